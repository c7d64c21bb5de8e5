"""How far decoded values may be from those that were encoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 16
"""Values along head_dim that share a scale in formats with scales by block."""

_SMALLEST = 2.0**-133
"""Scales do not get smaller than the smallest normal float32: this much may be lost however small the group is."""

_ROUNDING = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25), "float32": (2.0**-24, 2.0**-150)}
"""Half a unit in the last place, relative to the value, and of the smallest values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound:
    """A decoded value differs from the encoded one by no more than

        max(relative * |value|, of_block * largest |value| of its block) + of_group * largest |value| of its group

    and half a unit in the last place of the page's dtype. A group is K or V of one layer and head in one page; a block
    is 16 values of it along head_dim.
    """

    relative: float
    of_block: float
    of_group: float

    def limits(self, groups: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
        """The largest difference allowed at each value.

        groups: [..., page_size, head_dim], head_dim being a multiple of 16 if `of_block` is not 0. Returns that shape.
        """
        sizes = np.abs(groups)
        of_value = self.relative * sizes
        if self.of_block:
            blocks = sizes.reshape(*sizes.shape[:-1], -1, BLOCK).max(axis=-1)
            of_value = np.maximum(of_value, self.of_block * np.repeat(blocks, BLOCK, axis=-1))
        lossy = of_value + self.of_group * sizes.max(axis=(-2, -1), keepdims=True) + _SMALLEST
        roundoff, smallest = _ROUNDING[dtype]
        limits: npt.NDArray[np.float64] = lossy + roundoff * (sizes + lossy) + smallest
        return limits


EXACT = ErrorBound(relative=0.0, of_block=0.0, of_group=0.0)
"""Of codecs that give back the very bytes: `limits` says nothing about them."""
