"""A YAML document together with the line of everything in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

Loc = tuple[str | int, ...]
"""Where a value stands: keys and list indices from the document's root, as pydantic names it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a spec."""

    loc: Loc
    message: str


class SpecError(ValueError):
    """A spec that cannot be started; the text has one line per problem: file, line, field, what would be right."""


def field_name(loc: Loc) -> str:
    """`("decode", 0, "pool_bytes")` is `decode[0].pool_bytes`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


class Document:
    """Parsed YAML: `data` as plain Python values, and the place of each of them in the text.

    Raises SpecError for text that is no YAML, holds a key twice, or is not a mapping.
    """

    def __init__(self, text: str, name: str) -> None:
        """name: what messages call the document, normally its path."""
        self.name = name
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.data: Any = yaml.safe_load(text) if root is not None else {}
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            context = f" {error.context}:" if error.context else ""
            raise SpecError(f"{name}{line}: not YAML:{context} {error.problem}") from error
        except yaml.YAMLError as error:
            raise SpecError(f"{name}: not YAML: {str(error).splitlines()[0]}") from error
        self._lines: dict[Loc, int] = {}
        twice = list(self._index(root, ())) if root is not None else []
        if not isinstance(self.data, dict):
            raise SpecError(f"{name}:{self.line(())}: a spec is a mapping of fields, such as `cluster: laptop`")
        if twice:
            raise self.error(twice)

    def _index(self, node: yaml.Node, loc: Loc) -> Iterator[Problem]:
        """Note the line of `node` and of all below it; yields the keys that come twice."""
        self._lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self._index(item, (*loc, index))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = (*loc, str(key.value))
                line = key.start_mark.line + 1
                if below in self._lines:
                    yield Problem(below, f"given a second time in line {line}; keep one of the two")
                else:
                    self._lines[below] = line
                    yield from self._index(value, below)

    def line(self, loc: Loc) -> int:
        """The line of a value, or, where it is left out, of the closest part of the document around it."""
        while loc and loc not in self._lines:
            loc = loc[:-1]
        return self._lines.get(loc, 1)

    def error(self, problems: list[Problem]) -> SpecError:
        """All problems in the order of their lines."""
        lines = sorted((self.line(problem.loc), index) for index, problem in enumerate(problems))
        return SpecError("\n".join(f"{self.name}:{line}: {_said(problems[index])}" for line, index in lines))


def _said(problem: Problem) -> str:
    return f"{field_name(problem.loc)}: {problem.message}" if problem.loc else problem.message
