"""Byte sizes as people write them: 512MiB, 1.5GiB, 2GB, or a plain number of bytes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def parse_bytes(value: object) -> int:
    """Whole bytes from an int or from text with a unit. Raises ValueError that shows how it is written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"write a size such as 512MiB or 1.5GiB (units: {', '.join(_UNITS)}), not {value!r}")
    size = float(match[1]) * _UNITS[match[2]]
    if size != int(size):
        raise ValueError(f"{value} is not a whole number of bytes")
    return int(size)


def format_bytes(size: int) -> str:
    """The shortest exact form in binary units: 536870912 is 512MiB, 1500 is 1500B."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


def about_bytes(size: float) -> str:
    """For reading: three digits and a binary unit, such as 1.46GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.3g}{unit}"
    return f"{size:.0f}B"


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), PlainSerializer(format_bytes)]
"""A number of bytes, at least one; in YAML a plain int or text with a unit."""
