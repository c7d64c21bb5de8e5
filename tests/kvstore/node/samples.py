"""Pages to store: their bytes follow from a number, so that a test knows what must come back."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from kvstore.codecs import CODECS, Bytes, Codec, CorruptPage
from kvstore.codecs.loss import Loss
from kvstore.node.decisions import OfferedPage
from kvstore.pages import PageLayout, page_digests

HEADS = 2
LAYOUT = PageLayout(num_layers=2, num_kv_heads=HEADS, head_dim=32, page_size=8, dtype="bfloat16")
PAGE_BYTES = LAYOUT.page_bytes


class Rounded(Codec):
    """Keeps the upper byte of each two-byte value. Stands for every lossy codec: its lineage is worse than exact."""

    name = "rounded"
    loss = Loss.FP8

    def encode(self, page: Bytes, layout: PageLayout) -> bytes:
        return page[1::2].tobytes()

    def decode(self, stored: Bytes, page: Bytes, layout: PageLayout) -> None:
        if len(stored) * 2 != len(page):
            raise CorruptPage(self.name, "another size")
        page[0::2] = 0
        page[1::2] = stored


WITH_LOSSY = {**CODECS, "rounded": Rounded()}


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=16).digest()


@lru_cache(maxsize=4096)
def page_of(number: int, lineage: str = "raw", page_bytes: int = PAGE_BYTES) -> Bytes:
    """Every third page is noise, which no codec makes smaller; the others shrink by a third."""
    rng = np.random.default_rng(number)
    page = rng.integers(0, 256, page_bytes, dtype=np.uint8)
    if number % 3:
        page[1::2] &= 0x11
    if lineage == "rounded":
        page[0::2] = 0
    page.flags.writeable = False
    return page


def digests_of(page: Bytes) -> tuple[int, ...]:
    return tuple(page_digests(page[None], HEADS)[0].tolist())


def offered(
    number: int, *, parent: int | None = None, lineage: str = "raw", offset: int = 0, page_bytes: int = PAGE_BYTES
) -> OfferedPage:
    page = page_of(number, lineage, page_bytes)
    return OfferedPage(
        key=key_of(number),
        parent=None if parent is None else key_of(parent),
        offset_bytes=offset,
        num_bytes=page_bytes,
        lineage=lineage,
        digests=digests_of(page),
    )
