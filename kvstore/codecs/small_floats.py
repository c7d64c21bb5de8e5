"""The 8-bit and 4-bit floating point formats of the Open Compute Project: what their codes mean.

Compiled kernels hold copies: numba compiles anew when `kernels.py` changes, not when this file does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

E4M3_LARGEST = 448.0
"""E4M3: sign, 4 bits of exponent, 3 of mantissa; no infinity, and all ones below the sign is NaN."""
E4M3_NAN = 0x7F
E2M1_LARGEST = 6.0
"""E2M1: sign, 2 bits of exponent, 1 of mantissa; neither infinity nor NaN."""

SMALLEST_SCALE = float(np.finfo(np.float32).smallest_normal)
"""Scales below it would lose bits. A group that would need one loses at most 2^-133."""
LARGEST_SCALED = float(np.finfo(np.float32).max) * (1 - 2.0**-20)
"""Larger values count as this one when a group's scale is chosen: times the scale, no code may overflow float32."""


def _e4m3() -> npt.NDArray[np.float32]:
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
    values[E4M3_NAN] = np.nan
    return _with_signs(values)


def _with_signs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    table = np.concatenate([values, -values]).astype(np.float32)
    table.flags.writeable = False
    return table


E4M3 = _e4m3()
"""float32 [256]: the value of each code."""
E2M1 = _with_signs(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]))
"""float32 [16]: the value of each code."""
