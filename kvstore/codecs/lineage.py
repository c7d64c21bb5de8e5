"""Lineages: what a page has been through. Named like codecs, by the lossiest one among a page and all it came from."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.codecs.base import Codec
from kvstore.codecs.registry import CODECS

EXACT = "lossless"
"""Within it: pages with the very bytes that a worker computed from such pages."""


def is_within(lineage: str, lossiest: str, codecs: Mapping[str, Codec] = CODECS) -> bool:
    """Whether pages of `lineage` serve a reader that takes nothing lossier than `lossiest`.

    Raises KeyError for names that are not known.
    """
    return codecs[lineage].loss <= codecs[lossiest].loss


def lossier(first: str, second: str, codecs: Mapping[str, Codec] = CODECS) -> str:
    """The lineage of what both went into; the first one if they are equal.

    Raises KeyError for names that are not known.
    """
    return first if is_within(second, first, codecs) else second
