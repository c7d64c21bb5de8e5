"""The page as it is."""

from __future__ import annotations

from kvstore.codecs.base import Bytes, Codec, CorruptPage
from kvstore.codecs.loss import Loss
from kvstore.pages.layout import PageLayout


class Raw(Codec):
    name = "raw"
    loss = Loss.NONE

    def encode(self, page: Bytes, layout: PageLayout) -> memoryview:
        return page.data

    def decode(self, stored: Bytes, page: Bytes, layout: PageLayout) -> None:
        if len(stored) != len(page):
            raise CorruptPage(self.name, f"{len(stored)} bytes stored for a page of {len(page)}")
        page[:] = stored
