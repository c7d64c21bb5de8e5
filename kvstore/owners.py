"""Which storage node owns a page: computed from keys alone, so that clients ask the right nodes in one round trip.

The pages of a prompt are cut into fragments of a few pages of depth. A fragment lives on one node: the winner of the
weighted rendezvous hash of its first page's key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

FRAGMENT_TOKENS = 128
"""Depth of a fragment. Deeper ones need fewer nodes per request, shallower ones spread a long prompt over more."""

_UNIT = 1.0 / (1 << 53)


def fragment_pages(page_size: int, fragment_tokens: int = FRAGMENT_TOKENS) -> int:
    """Pages per fragment, at least one."""
    return max(1, fragment_tokens // page_size)


def fragment_key(keys: Sequence[bytes], index: int, fragment_pages: int) -> bytes:
    """The key that decides where page `index` lives: that of the first page of its fragment.

    keys: of the prompt's pages from position 0 on, at least to the fragment's first page.
    """
    return keys[index - index % fragment_pages]


def score(key: bytes, node_id: str, weight: float) -> float:
    """How strongly a node claims a key. Of nodes with weights w_i, each wins w_i / sum(w) of all keys.

    With h the first 53 bits of BLAKE2b-64(key || node id in UTF-8) read as a little-endian number:
    `weight / -ln((h + 0.5) / 2^53)`. A weight of 0 or less never wins.
    """
    if weight <= 0:
        return 0.0
    number = int.from_bytes(blake2b(key + node_id.encode(), digest_size=8).digest(), "little") >> 11
    # The half keeps the logarithm away from 0 and 1; the sum is exact in a double.
    return weight / -math.log((number + 0.5) * _UNIT)


def ranked(key: bytes, weights: Mapping[str, float]) -> list[str]:
    """Node ids in the order in which they own `key`: the owner, then who would own it without the owner, ...

    weights: by node id; nodes with a weight of 0 or less are left out.
    Adding or removing a node changes no order among the others.
    """
    scores = {node_id: score(key, node_id, weight) for node_id, weight in weights.items() if weight > 0}
    return sorted(scores, key=lambda node_id: (-scores[node_id], node_id))


def owner(key: bytes, weights: Mapping[str, float]) -> str | None:
    """The node that owns `key`; None if there is no node."""
    return next(iter(ranked(key, weights)), None)


def by_owner(
    keys: Sequence[bytes], indices: Iterable[int], fragment_pages: int, weights: Mapping[str, float]
) -> dict[str, list[int]]:
    """Page indices grouped by owning node, in the order given; no groups if there is no node."""
    owners: dict[bytes, str | None] = {}
    groups: dict[str, list[int]] = {}
    for index in indices:
        decider = fragment_key(keys, index, fragment_pages)
        if decider not in owners:
            owners[decider] = owner(decider, weights)
        node_id = owners[decider]
        if node_id is not None:
            groups.setdefault(node_id, []).append(index)
    return groups
