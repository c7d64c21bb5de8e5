"""What the lossy codecs have in common: K and V apart, in groups, each group with a scale.

    offset  0         1        2        3       4          6        8           10         12 .. 15
           +---------+--------+--------+-------+----------+--------+-----------+----------+------+
           | version | K's    | V's    | dtype | kv heads | layers | page size | head_dim | zero |
           |         | format | format |       |          |        |           |          |      |
           +---------+--------+--------+-------+----------+--------+-----------+----------+------+
    16      scales: float32 [kv_head][layer][k|v]
    then    body: [kv_head][layer][K's group, V's group]

Little-endian. A group is what a page holds of one kv head, one layer and one of K and V: `page_size * head_dim` values
in the page's order. The groups of one head are contiguous, as in the page, so that a tensor-parallel rank can take its
own.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.codecs.base import Bytes, Codec, CorruptPage, Unencodable
from kvstore.codecs.bound import ErrorBound
from kvstore.codecs.small_floats import LARGEST_SCALED, SMALLEST_SCALE
from kvstore.pages.layout import PageLayout

HEADER_BYTES = 16
_HEADER = struct.Struct("<BBBBHHHHI")
_VERSION = 1
_DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3}
_LARGEST = {"bfloat16": 255 / 128 * 2.0**127, "float16": 65504.0, "float32": LARGEST_SCALED}
_SLACK = 1 + 2.0**-16
"""A scale is rounded: its largest code may mean a little more than the largest value that it was made for."""

Words = npt.NDArray[np.unsignedinteger[Any]]
Scales = npt.NDArray[np.float32]


class Format(ABC):
    """How the values of one group are kept."""

    number: ClassVar[int]
    """In the header."""
    largest: ClassVar[float]
    """What a group's scale is multiplied with at most."""
    bound: ClassVar[ErrorBound]

    @abstractmethod
    def group_bytes(self, layout: PageLayout) -> int:
        """Of the body, per group. Raises Unencodable for a layout that the format does not suit."""

    @abstractmethod
    def encode(self, words: Words, shift: np.uint32, place: int, scales: Scales, body: Bytes, column: int) -> bool:
        """See `kernels.py`. Returns False if a value is not finite."""

    @abstractmethod
    def decode(self, body: Bytes, column: int, scales: Scales, place: int, words: Words, shift: np.uint32) -> bool:
        """See `kernels.py`. Returns False for codes that `encode` does not write."""


class Grouped(Codec):
    """Keeps K in one format and V in the same or another. All pages of one layout become equally large."""

    keys: ClassVar[Format]
    values: ClassVar[Format]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.bounds = (cls.keys.bound, cls.values.bound)

    def stored_bytes(self, layout: PageLayout) -> int:
        """Size of every encoded page. Raises Unencodable for a layout that does not suit."""
        group_bytes = self.keys.group_bytes(layout) + self.values.group_bytes(layout)
        return HEADER_BYTES + layout.num_kv_heads * layout.num_layers * (8 + group_bytes)

    def header(self, layout: PageLayout) -> bytes:
        """The same for all pages of one layout. Raises Unencodable for one that does not fit into it."""
        sizes = (layout.num_kv_heads, layout.num_layers, layout.page_size, layout.head_dim)
        if max(sizes) > 0xFFFF:
            raise Unencodable(self.name, f"the header has no room for {layout}")
        return _HEADER.pack(_VERSION, self.keys.number, self.values.number, _DTYPES[layout.dtype], *sizes, 0)

    def encode(self, page: Bytes, layout: PageLayout) -> memoryview:
        if len(page) != layout.page_bytes:
            raise ValueError(f"{len(page)} bytes are no page of {layout.page_bytes}")
        stored = np.empty(self.stored_bytes(layout), np.uint8)
        stored[:HEADER_BYTES] = np.frombuffer(self.header(layout), np.uint8)
        num_groups = layout.num_kv_heads * layout.num_layers
        scales = np.empty((num_groups, 2), np.float32)
        scales_end = HEADER_BYTES + scales.nbytes
        body = stored[scales_end:].reshape(num_groups, -1)
        if layout.dtype == "float16":
            words: Words = page.view("<f2").astype(np.float32).view(np.uint32)
        else:
            words = page.view(f"<u{layout.itemsize}")
        words, shift = words.reshape(2 * num_groups, -1), _shift(layout)
        if not (
            self.keys.encode(words, shift, 0, scales, body, 0)
            and self.values.encode(words, shift, 1, scales, body, self.keys.group_bytes(layout))
        ):
            raise Unencodable(self.name, "a value is not finite")
        stored[HEADER_BYTES:scales_end].view("<f4")[:] = scales.ravel()
        return stored.data

    def decode(self, stored: Bytes, page: Bytes, layout: PageLayout) -> None:
        scales, body = self._parts(stored, page, layout)
        words: Words
        if layout.dtype == "float16":
            words = np.empty(len(page) // 2, np.uint32)
        else:
            words = page.view(f"<u{layout.itemsize}")
        groups, shift = words.reshape(2 * len(body), -1), _shift(layout)
        if not (
            self.keys.decode(body, 0, scales, 0, groups, shift)
            and self.values.decode(body, self.keys.group_bytes(layout), scales, 1, groups, shift)
        ):
            raise CorruptPage(self.name, "a code has no meaning")
        if layout.dtype == "float16":
            page.view("<f2")[:] = words.view(np.float32)

    def _parts(self, stored: Bytes, page: Bytes, layout: PageLayout) -> tuple[Scales, Bytes]:
        """Scales and body, checked: whatever they hold, decoding gives finite values."""
        try:
            header, num_bytes = self.header(layout), self.stored_bytes(layout)
        except Unencodable as error:
            raise CorruptPage(self.name, error.reason) from error
        if len(page) != layout.page_bytes:
            raise CorruptPage(self.name, f"{len(page)} bytes are no page of {layout.page_bytes}")
        if len(stored) != num_bytes:
            raise CorruptPage(self.name, f"{len(stored)} bytes stored, not {num_bytes}")
        if stored[:HEADER_BYTES].tobytes() != header:
            raise CorruptPage(self.name, f"header {stored[:HEADER_BYTES].tobytes().hex()}, not {header.hex()}")
        num_groups = layout.num_kv_heads * layout.num_layers
        scales_end = HEADER_BYTES + 8 * num_groups
        scales = np.frombuffer(stored[HEADER_BYTES:scales_end].tobytes(), "<f4").reshape(num_groups, 2)
        highest = [highest_scale(side, layout) for side in (self.keys, self.values)]
        if not ((scales >= SMALLEST_SCALE) & (scales <= highest)).all():
            raise CorruptPage(self.name, f"a scale is out of bounds for {layout.dtype}")
        return scales, stored[scales_end:].reshape(num_groups, -1)


def highest_scale(side: Format, layout: PageLayout) -> float:
    """No encoder writes a higher one; with it, no code overflows the page's dtype."""
    return _LARGEST[layout.dtype] * _SLACK / side.largest


def _shift(layout: PageLayout) -> np.uint32:
    return np.uint32(16 if layout.dtype == "bfloat16" else 0)
