"""The loops of the lossy codecs, compiled by numba when they are first used.

Values are float32 bit patterns, widened from the page's words by a shift: 16 for bfloat16, 0 for float32. What is
rounded where is part of the formats, since digests are taken of decoded pages: divisions and products are single
float32 operations, rounding is to the nearest with ties to even, and nothing is fused. `tensors.py` gives the same
bits.

Arrays are two-dimensional and C-contiguous; group i of K (place 0) or V (place 1) is row 2 i + place of the words, and
row i of the body from `column` on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from kvstore.codecs.bound import BLOCK
from kvstore.codecs.small_floats import (
    E2M1,
    E2M1_LARGEST,
    E4M3,
    E4M3_LARGEST,
    E4M3_NAN,
    LARGEST_SCALED,
    SMALLEST_SCALE,
)

_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).view(np.uint64).ravel()
"""uint64 [256]: the two float32 that a byte of E2M1 codes holds, the low half first."""

_u8, _u32, _f32 = np.uint8, np.uint32, np.float32
_MAGNITUDE = _u32(0x7FFFFFFF)
_INFINITE = _u32(0x7F800000)
_TO_E4M3 = _f32(1 / E4M3_LARGEST)
_TO_NVFP4 = _f32(1 / (E4M3_LARGEST * E2M1_LARGEST))
_TO_E2M1 = _f32(1 / E2M1_LARGEST)
_SMALLEST = _f32(SMALLEST_SCALE)
_LARGEST = _f32(LARGEST_SCALED)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compiled for the types it is first called with, and kept for later processes; the GIL is free while it runs."""
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # nowhere to keep it
        return numba.njit(function, **options)


@_kernel
def _widen(words, shift, bits):
    """words to float32 bits. Returns the largest magnitude's bits."""
    largest = _u32(0)
    for i in range(bits.size):
        value = _u32(_u32(words[i]) << shift)
        bits[i] = value
        largest = max(largest, _u32(value & _MAGNITUDE))
    return largest


@_kernel
def _narrow(bits, shift, words):
    """float32 bits to words, the nearest, ties to even."""
    if shift == _u32(0):
        for i in range(words.size):
            words[i] = bits[i]
        return
    for i in range(words.size):
        odd = _u32(_u32(bits[i] >> _u32(16)) & _u32(1))
        words[i] = _u32(_u32(bits[i] + _u32(0x7FFF) + odd) >> _u32(16))


@_kernel
def _e4m3(bits, value):
    """The E4M3 code nearest to |value| <= 463, ties to even, without its sign. bits: of the value."""
    magnitude = _u32(bits & _MAGNITUDE)
    odd = _u32(_u32(magnitude >> _u32(20)) & _u32(1))
    normal = _u32(_u32(magnitude + _u32(0x7FFFF) + odd) >> _u32(20)) - _u32(120 << 3)
    subnormal = _u32(np.int32(np.rint(abs(value) * _f32(512))))
    return _u32(normal) if magnitude >= _u32(0x3C800000) else subnormal  # 2^-6


@_kernel
def encode_fp8(words, shift, place, scales, body, column):
    """scales: float32 [n, 2]; group i writes scales[i, place] and as many codes as it has values. Returns whether all
    values are finite; at the first group where one is not, it stops."""
    size = words.shape[1]
    values = np.empty(size, _f32)
    bits = values.view(_u32)
    largest_bits = np.empty(1, _u32)
    largest = largest_bits.view(_f32)
    for group in range(body.shape[0]):
        largest_bits[0] = _widen(words[2 * group + place], shift, bits)
        if largest_bits[0] >= _INFINITE:
            return False
        scale = max(_f32(min(largest[0], _LARGEST) * _TO_E4M3), _SMALLEST)
        scales[group, place] = scale
        for i in range(size):
            values[i] = values[i] / scale
        codes = body[group, column : column + size]
        for i in range(size):
            sign = _u32(_u32(bits[i] >> _u32(24)) & _u32(0x80))
            codes[i] = _u8(_u32(_e4m3(bits[i], values[i]) | sign))
    return True


@_kernel
def decode_fp8(body, column, scales, place, words, shift):
    """The way back. Returns False at the first group that holds the code of a NaN."""
    size = words.shape[1]
    values = np.empty(256, _f32)
    bits = values.view(_u32)
    table = np.empty(256, words.dtype)
    for group in range(body.shape[0]):
        codes = body[group, column : column + size]
        largest = _u8(0)
        for i in range(size):
            largest = max(largest, _u8(codes[i] & _u8(0x7F)))
        if largest == E4M3_NAN:
            return False
        # All that a code of this group can mean: making the table costs less than so many products and roundings.
        for code in range(256):
            values[code] = E4M3[code] * scales[group, place]
        _narrow(bits, shift, table)
        target = words[2 * group + place]
        for i in range(size):
            target[i] = table[codes[i]]
    return True


@_kernel
def encode_nvfp4(words, shift, place, scales, body, column):
    """As `encode_fp8`; a group writes one E4M3 scale per block of 16 values, then two codes a byte, the low half
    first."""
    size = words.shape[1]
    num_blocks = size // BLOCK
    values = np.empty(size, _f32)
    bits = values.view(_u32)
    block_bits = np.empty(num_blocks, _u32)
    block_values = block_bits.view(_f32)
    codes = np.empty(size, _u8)
    for group in range(body.shape[0]):
        if _widen(words[2 * group + place], shift, bits) >= _INFINITE:
            return False
        largest = _f32(0)
        for block in range(num_blocks):
            block_largest = _u32(0)
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                block_largest = max(block_largest, _u32(bits[i] & _MAGNITUDE))
            block_bits[block] = block_largest
            largest = max(largest, block_values[block])
        scale = max(_f32(min(largest, _LARGEST) * _TO_NVFP4), _SMALLEST)
        scales[group, place] = scale
        stored = body[group, column : column + num_blocks + size // 2]
        for block in range(num_blocks):
            block_values[block] = _f32(min(block_values[block], _LARGEST) * _TO_E2M1) / scale
        for block in range(num_blocks):
            code = _e4m3(block_bits[block], block_values[block])
            stored[block] = _u8(code)
            # What is divided by infinity becomes code 0, in a block so small beside its group that it has scale 0.
            block_values[block] = _f32(E4M3[code] * scale) if code else _f32(np.inf)
        for block in range(num_blocks):  # apart from the loop above, which LLVM does not vectorise
            step = block_values[block]
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                values[i] = values[i] / step
        for i in range(size):
            # 0, 0.5, 1, 1.5 and 2 are codes 0 to 4, then come 3 and 4, then 6. Branches would not be vectorised.
            a = min(abs(values[i]), _f32(6))
            upper = np.rint(a) + _f32(2) if a < _f32(4) else np.rint(a * _f32(0.5)) + _f32(4)
            rounded = np.rint(a + a) if a < _f32(2) else upper
            sign = _u32(_u32(bits[i] >> _u32(28)) & _u32(8))
            codes[i] = _u8(_u32(_u32(np.int32(rounded)) | sign))
        for i in range(size // 2):
            stored[num_blocks + i] = _u8(codes[2 * i] | _u8(codes[2 * i + 1] << _u8(4)))
    return True


@_kernel
def decode_nvfp4(body, column, scales, place, words, shift):
    """The way back. Returns False at the first group with a block scale that is negative or NaN."""
    size = words.shape[1]
    num_blocks = size // BLOCK
    values = np.empty(size, _f32)
    bits = values.view(_u32)
    pairs = values.view(np.uint64)
    for group in range(body.shape[0]):
        stored = body[group, column : column + num_blocks + size // 2]
        for i in range(size // 2):
            pairs[i] = _PAIRS[stored[num_blocks + i]]
        largest = _u8(0)
        for block in range(num_blocks):
            largest = max(largest, stored[block])
            step = _f32(E4M3[stored[block]] * scales[group, place])
            for i in range(block * BLOCK, (block + 1) * BLOCK):
                values[i] = values[i] * step
        if largest >= E4M3_NAN:
            return False
        _narrow(bits, shift, words[2 * group + place])
    return True
