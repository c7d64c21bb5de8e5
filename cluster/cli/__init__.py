"""The `headrace` command. Each command is a module with `add_to(commands)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from cluster.cli.errors import CommandError
from cluster.cli.which import HOW_TO_START
from cluster.launch import HOME_VARIABLE, running_clusters

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 done, 1 failed, 2 wrong use, 3 no cluster, 130 interrupted."""
    logging.basicConfig(level=logging.WARNING, format="headrace: %(message)s")
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.run is None:
        parser.print_help()
        running = running_clusters()
        print(f"\nrunning here: {', '.join(running)}" if running else f"\nno cluster runs here; {HOW_TO_START}")
        return 0
    try:
        return int(parsed.run(parsed))
    except CommandError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    from cluster.cli import chat, down, flush, spec, status, up, version

    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Disaggregated LLM serving: prefill, decode and KV storage as separate processes.",
        epilog=f"Clusters are kept in ${HOME_VARIABLE}, or ~/.headrace where it is not set.",
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (up, down, status, chat, flush, spec, version):
        command.add_to(commands)
    return parser
