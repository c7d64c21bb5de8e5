"""What the engine refuses.

EngineError
├── UnsupportedModel      a config or checkpoint asks for something that the engine does not do (also a ValueError)
├── BrokenCheckpoint      a file is unreadable, or a tensor is missing or of the wrong shape (also a ValueError)
└── BrokenChat            the chat template refused the messages, or is itself broken (also a ValueError)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class UnsupportedModel(EngineError, ValueError):
    """`field` of `source` has a `value` that the engine does not do."""

    def __init__(self, source: object, field: str, value: object, expected: str) -> None:
        super().__init__(f"{source}: {field} = {value!r} is not supported; expected {expected}")
        self.source = source
        self.field = field
        self.value = value


class BrokenCheckpoint(EngineError, ValueError):
    """`source` cannot be read as what it claims to be."""

    def __init__(self, source: object, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


class BrokenChat(EngineError, ValueError):
    """The messages of a chat do not fit its template."""
