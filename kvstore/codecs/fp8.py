"""E4M3 with one scale per group: half of the bytes of bfloat16."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import Bytes
from kvstore.codecs.bound import ErrorBound
from kvstore.codecs.grouped import Format, Grouped, Scales, Words
from kvstore.codecs.loss import Loss
from kvstore.codecs.small_floats import E4M3_LARGEST
from kvstore.pages.layout import PageLayout

_ARITHMETIC = 1 + 2.0**-16
"""Roundings of scales and quotients in float32, far fewer than would add up to this."""


class Fp8Format(Format):
    """The scale is the group's largest magnitude / 448; a value is its code times the scale."""

    number = 1
    largest = E4M3_LARGEST
    bound = ErrorBound(
        relative=2.0**-4 * _ARITHMETIC,  # half a step of a 3-bit mantissa
        of_block=0.0,
        of_group=2.0**-10 / E4M3_LARGEST * _ARITHMETIC,  # half a step of the subnormals
    )

    def group_bytes(self, layout: PageLayout) -> int:
        return layout.page_size * layout.head_dim

    # numba takes a second to import, and most processes never need it.

    def encode(self, words: Words, shift: np.uint32, place: int, scales: Scales, body: Bytes, column: int) -> bool:
        from kvstore.codecs.kernels import encode_fp8

        return bool(encode_fp8(words, shift, place, scales, body, column))

    def decode(self, body: Bytes, column: int, scales: Scales, place: int, words: Words, shift: np.uint32) -> bool:
        from kvstore.codecs.kernels import decode_fp8

        return bool(decode_fp8(body, column, scales, place, words, shift))


class Fp8(Grouped):
    name = "fp8"
    loss = Loss.FP8
    keys = values = Fp8Format()
