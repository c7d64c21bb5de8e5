"""Between a dataclass and a message whose fields have the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

from google.protobuf.message import Message


class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


M = TypeVar("M", bound=Message)
D = TypeVar("D", bound=DataclassInstance)


def to_message(value: DataclassInstance, kind: type[M]) -> M:
    """Every field of `value`, under its own name. A field that the message lacks raises ValueError."""
    return kind(**{field.name: getattr(value, field.name) for field in fields(value)})


def from_message(message: Message, kind: type[D]) -> D:
    """A `kind` from the message's fields of the same names; repeated ones as tuples, maps as dicts."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            value = dict(value)
        elif not isinstance(value, (bool, int, float, str, bytes, Message)):
            value = tuple(value)
        values[field.name] = value
    return kind(**values)
