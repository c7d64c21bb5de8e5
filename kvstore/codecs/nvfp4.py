"""E2M1 with one E4M3 scale per 16 values and one float32 scale per group: 28 % of the bytes of bfloat16.

A group in the body: its block scales, then its codes, two a byte, the low half first. Both in the order of the values.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import Bytes, Unencodable
from kvstore.codecs.bound import BLOCK, ErrorBound
from kvstore.codecs.grouped import Format, Grouped, Scales, Words
from kvstore.codecs.loss import Loss
from kvstore.codecs.small_floats import E2M1_LARGEST, E4M3_LARGEST
from kvstore.pages.layout import PageLayout

_ARITHMETIC = 1 + 2.0**-16
"""Roundings of scales and quotients in float32, far fewer than would add up to this."""


class Nvfp4Format(Format):
    """The group's scale is its largest magnitude / (448 * 6), a block's the nearest E4M3 to its largest / 6 in units of
    the former; a value is its code times the product of both."""

    number = 2
    largest = E4M3_LARGEST * E2M1_LARGEST
    bound = ErrorBound(
        relative=0.2 * _ARITHMETIC,  # 2.5 becomes 2, and 5 becomes 4
        of_block=0.25 * (17 / 16) / E2M1_LARGEST * _ARITHMETIC,  # half of the smallest step, by a scale rounded up
        of_group=2.0**-10 / E4M3_LARGEST * _ARITHMETIC,  # a block whose scale is subnormal, or 0
    )

    def group_bytes(self, layout: PageLayout) -> int:
        if layout.head_dim % BLOCK:
            raise Unencodable("nvfp4", f"head_dim {layout.head_dim} is no multiple of {BLOCK}")
        num_values = layout.page_size * layout.head_dim
        return num_values // BLOCK + num_values // 2

    # numba takes a second to import, and most processes never need it.

    def encode(self, words: Words, shift: np.uint32, place: int, scales: Scales, body: Bytes, column: int) -> bool:
        from kvstore.codecs.kernels import encode_nvfp4

        return bool(encode_nvfp4(words, shift, place, scales, body, column))

    def decode(self, body: Bytes, column: int, scales: Scales, place: int, words: Words, shift: np.uint32) -> bool:
        from kvstore.codecs.kernels import decode_nvfp4

        return bool(decode_nvfp4(body, column, scales, place, words, shift))


class Nvfp4(Grouped):
    name = "nvfp4"
    loss = Loss.NVFP4
    keys = values = Nvfp4Format()
