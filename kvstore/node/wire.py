"""Between the messages of `kvstore.proto` and what a store understands. What came over the wire may be nonsense."""

from __future__ import annotations

from kvstore.codecs import CODECS
from kvstore.node.decisions import Lent, OfferedPage
from kvstore.pages import KEY_BYTES, PageLayout
from kvstore.stored import codec_from_proto, layout_from_proto
from protos import kvstore_pb2

MAX_KEYS = 1 << 20
"""Of one match or offer: more than any context has pages."""
_MAX_REGION_BYTES = (1 << 63) - 1
"""Offsets are signed numbers from here on."""


def match_keys(request: kvstore_pb2.MatchRequest) -> list[bytes]:
    """The keys asked for. Raises ValueError for a request that no client of ours sends."""
    if request.lease_ms == 0:
        raise ValueError("lease_ms must be > 0")
    keys = list(request.keys)
    _check_keys(keys)
    return keys


def offered_pages(request: kvstore_pb2.OfferRequest) -> tuple[PageLayout, list[OfferedPage]]:
    """The pages offered, and their layout. Raises ValueError for a request that no client of ours sends."""
    layout = layout_from_proto(request.layout)
    region_bytes = min(request.card.region_bytes, _MAX_REGION_BYTES)
    pages = [_offered_page(page, layout, region_bytes) for page in request.pages]
    _check_keys([page.key for page in pages])
    return layout, pages


def match_response(lent: Lent, now_s: float) -> kvstore_pb2.MatchResponse:
    """Without the card."""
    return kvstore_pb2.MatchResponse(
        lease_id=lent.lease_id,
        lease_ms=int((lent.expires_s - now_s) * 1000),
        pages=[page.to_proto() for page in lent.pages],
    )


def _offered_page(page: kvstore_pb2.OfferedPage, layout: PageLayout, region_bytes: int) -> OfferedPage:
    lineage = codec_from_proto(page.lineage)
    if lineage not in CODECS:
        raise ValueError(f"lineage {lineage!r} is not known here")
    if page.parent_key and len(page.parent_key) != KEY_BYTES:
        raise ValueError(f"a parent key has {len(page.parent_key)} bytes, not {KEY_BYTES}")
    if page.parent_key == page.key:
        raise ValueError("a page is no parent of itself")
    if page.num_bytes != layout.page_bytes:
        raise ValueError(f"a page has {page.num_bytes} bytes, not {layout.page_bytes} as its layout says")
    if len(page.digests) != layout.num_kv_heads:
        raise ValueError(f"a page has {len(page.digests)} digests for {layout.num_kv_heads} kv heads")
    if page.offset_bytes + page.num_bytes > region_bytes:
        raise ValueError(f"{page.num_bytes} bytes at {page.offset_bytes} leave a region of {region_bytes}")
    return OfferedPage(
        key=page.key,
        parent=page.parent_key or None,
        offset_bytes=page.offset_bytes,
        num_bytes=page.num_bytes,
        lineage=lineage,
        digests=tuple(page.digests),
    )


def _check_keys(keys: list[bytes]) -> None:
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys are more than {MAX_KEYS}")
    if len(set(keys)) != len(keys):
        raise ValueError("a key comes twice")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {len(key)} bytes, not {KEY_BYTES}")
