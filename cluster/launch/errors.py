"""How a start fails."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LaunchError(Exception):
    """A step of the start failed; the text says which, why, and where to read on."""


def last_line(error: BaseException) -> str:
    """What an error of Ray's comes down to; what goes before it is about Ray's inside."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
