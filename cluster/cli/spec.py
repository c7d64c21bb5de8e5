"""`headrace spec`: the default spec, or somebody's own one checked and completed."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.cli.errors import CommandError
from cluster.spec import HEADING, SpecError, check_models, default_spec, load_spec, render_spec


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "spec",
        help="print the default spec with comments, or check a file",
        description="Print a spec with every field and its meaning: the default one, or FILE checked and completed.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a spec to check")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cluster.launch.models import model_shape

    if arguments.file is None:
        print(render_spec(default_spec().spec, HEADING), end="")
        return 0
    try:
        loaded = load_spec(arguments.file)
        check_models(loaded, model_shape)
    except SpecError as error:
        raise CommandError(str(error)) from error
    print(render_spec(loaded.spec), end="")
    return 0
