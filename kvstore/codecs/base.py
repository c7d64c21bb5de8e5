"""What a codec is: page bytes to stored bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.codecs.bound import EXACT, ErrorBound
from kvstore.codecs.loss import Loss
from kvstore.pages.layout import PageLayout

Bytes = npt.NDArray[np.uint8]
"""uint8 [n], C-contiguous."""


class CorruptPage(Exception):
    """Stored bytes that are no page, or not the page that was asked for. To a reader it is a miss."""

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(f"{codec}: {reason}")
        self.codec = codec
        self.reason = reason


class Unencodable(ValueError):
    """A page or a layout that a codec cannot keep within its bound: the caller stores another form."""

    def __init__(self, codec: str, reason: str) -> None:
        super().__init__(f"{codec}: {reason}")
        self.codec = codec
        self.reason = reason


class Codec(ABC):
    """Stateless as seen from outside; one instance may be used by several threads at once."""

    name: ClassVar[str]
    """As in the header of a stored page."""
    loss: ClassVar[Loss]
    """Its place in the order of the lineages. Those of `Loss.NONE` give back the very bytes."""
    bounds: ClassVar[tuple[ErrorBound, ErrorBound]] = (EXACT, EXACT)
    """Of K and of V."""

    @abstractmethod
    def encode(self, page: Bytes, layout: PageLayout) -> bytes | memoryview:
        """Stored bytes of one page.

        page: uint8 [layout.page_bytes]. May alias `page`.
        The result can be larger than the page: the caller then stores another form.
        Raises Unencodable for a layout that does not suit the codec, or values that it cannot keep within its bound;
        ValueError for a page that the layout does not fit.
        """

    @abstractmethod
    def decode(self, stored: Bytes, page: Bytes, layout: PageLayout) -> None:
        """Write the page that `stored` holds into `page`, uint8 [layout.page_bytes].

        Raises CorruptPage, and may have written some of `page` by then.
        """
