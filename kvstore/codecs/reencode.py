"""From one stored form of a page to another: downwards only, since what is lost does not come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import Bytes
from kvstore.codecs.lineage import is_within, lossier
from kvstore.codecs.loss import Loss
from kvstore.codecs.registry import CODECS
from kvstore.pages.digest import bytes_digest, page_digests
from kvstore.pages.layout import PageLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Reencoded:
    """What the header of the new form says."""

    stored: Bytes
    codec: str
    lineage: str
    stored_digest: int
    digests: tuple[int, ...]
    """Of the page that decoding it gives, which after a loss is another one than before."""


def is_downwards(source: str, target: str) -> bool:
    """Whether a page in codec `source` may be stored in `target` instead: from lossless forms to any, from a lossy one
    to a lossier one."""
    if CODECS[source].loss is Loss.NONE:
        return True
    return is_within(source, target) and not is_within(target, source)


def reencode(stored: Bytes, source: str, target: str, lineage: str, layout: PageLayout) -> Reencoded:
    """The page that `stored` holds in codec `source`, in codec `target`.

    lineage: of `stored`. Takes milliseconds: not for an event loop.
    Raises ValueError where that is not downwards, or where `source` is lossier than `lineage` can be; Unencodable where
    `target` does not take the page; CorruptPage where `stored` holds none.
    """
    if not is_downwards(source, target):
        raise ValueError(f"a page stored as {source} cannot become {target} again")
    if not is_within(source, lineage):
        raise ValueError(f"a page stored as {source} cannot have lineage {lineage}")
    page = np.empty(layout.page_bytes, np.uint8)
    CODECS[source].decode(stored, page, layout)
    encoded = np.frombuffer(CODECS[target].encode(page, layout), np.uint8)
    if CODECS[target].loss is not Loss.NONE:
        page = np.empty(layout.page_bytes, np.uint8)
        CODECS[target].decode(encoded, page, layout)
    return Reencoded(
        stored=encoded,
        codec=target,
        lineage=lossier(lineage, target),
        stored_digest=bytes_digest(encoded),
        digests=tuple(page_digests(page[None], layout.num_kv_heads)[0].tolist()),
    )
