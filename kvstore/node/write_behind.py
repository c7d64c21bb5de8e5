"""Raw pages that wait to be encoded, and the exchange of one form for the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvstore.arena import Arena
from kvstore.codecs import Bytes, Codec
from kvstore.node.decisions import Encoding
from kvstore.node.index import Copy, Index

_CODEC = "lossless"


class WriteBehind:
    """Copy on write: the encoded form gets an extent of its own, and readers of the raw one keep theirs."""

    def __init__(self, arena: Arena, index: Index, codecs: Mapping[str, Codec]) -> None:
        self._arena = arena
        self._index = index
        self._codec = codecs[_CODEC]
        self._waiting: dict[Copy, None] = {}  # in order of arrival
        self._under_way: dict[int, Copy] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        """Pages that it has not finished with."""
        return len(self._waiting) + len(self._under_way)

    def add(self, copy: Copy) -> None:
        """This raw copy is to be encoded, unless it is retired before its turn comes."""
        self._waiting[copy] = None

    def begin(self) -> Encoding | None:
        """The copy that has waited longest, pinned until `end`; None if none waits."""
        while self._waiting:
            copy = next(iter(self._waiting))
            del self._waiting[copy]
            if not copy.retired:
                copy.pins += 1
                self._num_begun += 1
                self._under_way[self._num_begun] = copy
                return Encoding(self._num_begun, self._arena.view(copy.extent), copy.layout, self._codec)
        return None

    def end(self, encoding_id: int, stored: Bytes | None, stored_digest: int) -> bool:
        """Put the encoded form in the raw one's place.

        stored: None if encoding failed. Returns False, and leaves the page raw, where the form is not smaller, or where
        readers hold the raw one and there is no room beside it. Nothing is evicted.
        """
        copy = self._under_way.pop(encoding_id)
        try:
            return stored is not None and self._exchange(copy, stored, stored_digest)
        finally:
            self._index.unpin(copy)

    def pinned(self) -> list[Copy]:
        """Those under way."""
        return list(self._under_way.values())

    def check(self) -> None:
        """Assert that what waits is raw and, unless retired, current."""
        for copy in self._waiting:
            assert copy.header.codec == "raw"
            assert copy.retired or self._index.get(copy.header.key) is copy

    def _exchange(self, copy: Copy, stored: Bytes, stored_digest: int) -> bool:
        if copy.retired or not 0 < len(stored) < copy.extent.num_bytes:
            return False
        extent = self._arena.allocate(len(stored))
        in_place = extent is None and copy.pins == 1
        if in_place:
            # Nobody reads the raw bytes, so that half-encoded ones can mislead at most a reader whose lease is over.
            extent = copy.extent = self._arena.shrink(copy.extent, len(stored))
        if extent is None:
            return False
        self._arena.view(extent)[:] = stored
        header = replace(
            copy.header,
            offset_bytes=extent.offset_bytes,
            num_bytes=extent.num_bytes,
            codec=_CODEC,
            stored_digest=stored_digest,
        )
        if in_place:
            copy.header = header
        else:
            self._index.put(Copy(header, extent, copy.layout), None)
        return True
