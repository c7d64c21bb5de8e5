"""`headrace version`: what is installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

PARTS = ("headrace", "ray", "torch", "nixl-cu12", "grpcio")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("version", help="print versions", description="Print the versions that matter.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(
        "\n".join(
            [*(f"{part} {importlib.metadata.version(part)}" for part in PARTS), f"python {platform.python_version()}"]
        )
    )
    return 0
