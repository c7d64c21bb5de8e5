"""How a start fails."""

from __future__ import annotations


class LaunchError(Exception):
    """A step of the start failed; the text says which, why, and where to read on."""


def first_line(error: BaseException) -> str:
    """What an error of Ray's says first; the rest is about Ray's inside."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
