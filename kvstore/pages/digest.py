"""Digests of page bytes: against torn, stale and misdirected reads, not against a hostile member.

Multilinear hashing over 32-bit words: `sum(word_i * c_i) + num_bytes * c_length mod 2^64`, with fixed odd 64-bit
coefficients. Sums and products that wrap are the same on every device, so a GPU can compute them too, and the words are
half as wide as the sum, so that no two flipped high bits can cancel.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_LENGTH_COEFFICIENT = np.uint64(0x9E3779B97F4A7C15)


@lru_cache(maxsize=8)
def coefficients(num_words: int) -> npt.NDArray[np.uint64]:
    """uint64 [num_words]: SplitMix64 of the word's place, made odd."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, num_words + 1, dtype=np.uint64)) * _LENGTH_COEFFICIENT
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    z.flags.writeable = False
    return z


def page_digests(pages: npt.NDArray[np.uint8], num_kv_heads: int) -> npt.NDArray[np.uint64]:
    """Digests per (page, kv head).

    pages: uint8 [n, page_bytes], page_bytes divisible by `num_kv_heads`.
    Returns uint64 [n, num_kv_heads].
    """
    num_pages, page_bytes = pages.shape
    if page_bytes % num_kv_heads:
        raise ValueError(f"{page_bytes} bytes per page do not divide into {num_kv_heads} heads")
    digests = np.empty((num_pages, num_kv_heads), dtype=np.uint64)
    for index in range(num_pages):
        # One page at a time: the widened copy of a page stays in the cache, that of a batch would not.
        heads = np.ascontiguousarray(pages[index]).reshape(num_kv_heads, page_bytes // num_kv_heads)
        digests[index] = _multilinear(heads)
    return digests


def bytes_digest(data: npt.NDArray[np.uint8]) -> int:
    """Digest of uint8 [n], as an unsigned 64-bit number."""
    return int(_multilinear(np.ascontiguousarray(data).reshape(1, -1))[0])


def _multilinear(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """uint8 [r, n] -> uint64 [r]."""
    num_bytes = rows.shape[1]
    if num_bytes % 4:
        rows = np.pad(rows, ((0, 0), (0, 4 - num_bytes % 4)))
    words = rows.view("<u4").astype(np.uint64)
    with np.errstate(over="ignore"):
        length = np.uint64(num_bytes) * _LENGTH_COEFFICIENT
        return np.asarray(words @ coefficients(words.shape[1]) + length, dtype=np.uint64)
