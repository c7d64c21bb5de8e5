"""A spec as YAML in which every field is present and explained."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from cluster.spec.schema import Spec

WIDTH = 110
"""Columns of a comment line."""

HEADING = """A cluster on one machine, without a GPU: what `headrace up` starts where no spec is named, written by
`headrace spec`. Every field is here with its default; a spec of your own needs only those that differ."""


def render_spec(spec: Spec, heading: str = "") -> str:
    """YAML text that loads as `spec`; the comments are the fields' descriptions.

    heading: put first, as a comment.
    """
    lines = [*_comment(heading, ""), ""] if heading else []
    lines += _section(spec, "", explain=True, between=[""])
    return "\n".join(lines) + "\n"


def _section(section: BaseModel, indent: str, *, explain: bool, between: list[str]) -> Iterator[str]:
    """The fields of a section, indented. between: lines put between two fields."""
    values = section.model_dump()  # sizes and addresses as they are written
    for index, (name, field) in enumerate(type(section).model_fields.items()):
        if index:
            yield from between
        if explain:
            yield from _comment(field.description or "", indent)
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _section(value, indent + "  ", explain=explain, between=[])
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            for number, item in enumerate(value):
                yield from _item(item, indent + "  ", explain=explain and number == 0)
        elif value is None:
            if explain and field.examples:
                yield f"{indent}# {name}: {_scalar(field.examples[0])}"
        else:
            yield f"{indent}{name}: {_scalar(values[name])}"


def _item(item: BaseModel, indent: str, *, explain: bool) -> Iterator[str]:
    """A list's item: its first line that is no comment carries the dash."""
    dashed = False
    for line in _section(item, indent + "  ", explain=explain, between=[]):
        if dashed:
            yield line
        elif line.lstrip().startswith("#"):
            yield line.removeprefix("  ")
        else:
            yield f"{indent}- {line.removeprefix(indent + '  ')}"
            dashed = True


def _comment(text: str, indent: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        for line in textwrap.wrap(" ".join(paragraph.split()), WIDTH - len(indent) - 2, break_on_hyphens=False):
            yield f"{indent}# {line}"


def _scalar(value: Any) -> str:
    """A value on one line, quoted where YAML would read it as something else."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()
