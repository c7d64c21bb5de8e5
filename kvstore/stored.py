"""A stored page as both ends see it: its header, and the way back to page bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs import CODECS, Bytes, Codec, CorruptPage, is_within
from kvstore.pages import PageLayout, bytes_digest, page_digests
from protos import kvstore_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPage:
    """A stored copy of one page. Another copy under the same key may differ in everything but the digests."""

    key: bytes
    offset_bytes: int
    """In the region of the node that holds it."""
    num_bytes: int
    """As stored."""
    codec: str
    lineage: str
    """The lossiest codec among this page and all that it was computed from."""
    stored_digest: int
    """`bytes_digest` of the stored bytes."""
    digests: tuple[int, ...]
    """`page_digests` of the page, one per kv head."""

    def to_proto(self) -> kvstore_pb2.StoredPage:
        return kvstore_pb2.StoredPage(
            key=self.key,
            offset_bytes=self.offset_bytes,
            num_bytes=self.num_bytes,
            codec=codec_to_proto(self.codec),
            lineage=codec_to_proto(self.lineage),
            stored_digest=self.stored_digest,
            digests=self.digests,
        )

    @classmethod
    def from_proto(cls, page: kvstore_pb2.StoredPage) -> StoredPage:
        """Raises ValueError for a codec that this version does not know, or a lineage that denies the codec's loss."""
        codec, lineage = codec_from_proto(page.codec), codec_from_proto(page.lineage)
        if not is_within(codec, lineage):
            raise ValueError(f"a page stored as {codec} cannot have lineage {lineage}")
        return cls(
            key=page.key,
            offset_bytes=page.offset_bytes,
            num_bytes=page.num_bytes,
            codec=codec,
            lineage=lineage,
            stored_digest=page.stored_digest,
            digests=tuple(page.digests),
        )


def codec_to_proto(name: str) -> str:
    """The name of the enum's value, which messages take as well as its number."""
    return f"CODEC_{name.upper().replace('-', '_')}"


def codec_from_proto(value: kvstore_pb2.Codec) -> str:
    """Raises ValueError for a value that this version does not know, and for none at all."""
    if value == kvstore_pb2.CODEC_UNSPECIFIED:
        raise ValueError("a page must name its codec and its lineage")
    return kvstore_pb2.Codec.Name(value).removeprefix("CODEC_").lower().replace("_", "-")


def layout_to_proto(layout: PageLayout) -> kvstore_pb2.PageLayout:
    return kvstore_pb2.PageLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,
    )


def layout_from_proto(layout: kvstore_pb2.PageLayout) -> PageLayout:
    """Raises ValueError for one that makes no sense, and for none at all."""
    return PageLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,  # type: ignore[arg-type]
    )


def restore(
    stored: StoredPage, staged: Bytes, page: Bytes, layout: PageLayout, codecs: Mapping[str, Codec] = CODECS
) -> bool:
    """Write the page that `staged` holds into `page`, if it is the page that its header promises.

    staged: uint8 [stored.num_bytes], as pulled from the node. page: uint8 [layout.page_bytes].
    Returns False for a miss: damaged bytes, a header that does not fit, a codec that is not known here. `page` may have
    been written to all the same. Takes about a millisecond per 600 kB: not for an event loop.
    """
    try:
        _restore(stored, staged, page, layout, codecs)
    except CorruptPage as error:
        logger.warning("stored page %s is a miss: %s", stored.key.hex(), error)
        return False
    return True


def _restore(stored: StoredPage, staged: Bytes, page: Bytes, layout: PageLayout, codecs: Mapping[str, Codec]) -> None:
    codec = codecs.get(stored.codec)
    if codec is None:
        raise CorruptPage(stored.codec, "this codec is not known here")
    if len(stored.digests) != layout.num_kv_heads:
        raise CorruptPage(stored.codec, f"{len(stored.digests)} digests for {layout.num_kv_heads} kv heads")
    # Not needed for the verdict, since the page is checked below, but it keeps damaged bytes out of the decoder. A raw
    # page has no decoder.
    if stored.codec != "raw" and bytes_digest(staged) != stored.stored_digest:
        raise CorruptPage(stored.codec, "the stored bytes are not those that the node stored")
    codec.decode(staged, page, layout)
    if not np.array_equal(page_digests(page[None], layout.num_kv_heads)[0], np.array(stored.digests, dtype=np.uint64)):
        raise CorruptPage(stored.codec, "the page is not the one that was offered")
