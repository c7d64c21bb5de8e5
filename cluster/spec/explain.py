"""What pydantic found wrong, in words that say what would be right."""

from __future__ import annotations

import difflib
import re
from typing import get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from cluster.spec.document import Loc, Problem
from cluster.spec.schema import Spec

_PHRASES = {
    "string_pattern_mismatch": "should be as described",
    "model_type": "should be a mapping of fields",
    "list_type": "should be a list, each item after a dash",
    "too_short": "needs one item at least",
    "string_too_short": "must not be empty",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
}
"""Words for pydantic's error types, where its own speak of Python."""


def explain(errors: list[ErrorDetails]) -> list[Problem]:
    """One problem for each place of the document."""
    by_loc: dict[Loc, list[ErrorDetails]] = {}
    for error in errors:
        by_loc.setdefault(tuple(part for part in error["loc"] if not _is_branch(part)), []).append(error)
    return [Problem(loc, _words(loc, found)) for loc, found in by_loc.items()]


def closest(name: str, known: list[str], otherwise: str) -> str:
    """A hint for a name that is not among `known`."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{otherwise} {', '.join(known)}"


def without_password(url: str) -> str:
    """Text that may be shown: in a URL, even a misspelt one, what stands before the @ is hidden."""
    return re.sub(r"(\w+://)?[^\s'\"]*@", r"\1***@", url)


def _words(loc: Loc, errors: list[ErrorDetails]) -> str:
    """errors: those of one place; several if it may hold one of several types."""
    first, section = errors[0], _section_at(loc[:-1])
    if first["type"] == "extra_forbidden":
        return f"no such field; {closest(str(loc[-1]), list(section.model_fields) if section else [], 'there are')}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    said = " or ".join(_PHRASES.get(error["type"]) or _plain(error["msg"]) for error in errors)
    value = first["input"]
    found = "" if value is None or isinstance(value, dict | list) else f", not {without_password(repr(value))}"
    field = section.model_fields.get(str(loc[-1])) if section and loc else None
    meaning = f" ({' '.join(field.description.split())})" if field and field.description else ""
    return f"{said}{found}{meaning}"


def _plain(message: str) -> str:
    return message.replace("Input should be", "should be").replace("String should", "should")


def _is_branch(part: str | int) -> bool:
    """Whether a part of pydantic's location names the branch of a union rather than a field."""
    return isinstance(part, str) and (part.startswith(("literal[", "constrained-")) or part in ("int", "none", "str"))


def _section_at(loc: Loc) -> type[BaseModel] | None:
    """The section class at a place of the document."""
    section: type[BaseModel] = Spec
    for part in loc:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        below = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if below is None:
            return None
        section = below
    return section
