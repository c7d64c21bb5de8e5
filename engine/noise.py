"""Counter-based noise: a number that depends only on what it is for, never on what was drawn before.

    word(seed, choice, index, token) = mix(mix(seed, choice, index) + (token + 1) * GOLDEN)

`mix` is splitmix64's finaliser (Steele, Lea, Flood 2014), GOLDEN its increment: each output position is one splitmix64
stream over the vocabulary. The vectors in tests/engine/test_noise.py fix it: changing a bit changes every seeded
answer.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream(seed: int, choice: int, index: int) -> int:
    """The 64-bit start of the stream of one output position of one choice of one request."""
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state + (choice + 1) * _GOLDEN) & _MASK)
    return _mix((state + (index + 1) * _GOLDEN) & _MASK)


def words(start: int, token_ids: np.ndarray) -> np.ndarray:
    """uint64 [n]: the stream's words at `token_ids` (uint64 [n])."""
    with np.errstate(over="ignore"):
        z = np.uint64(start) + (token_ids + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def gumbel(start: int, token_ids: np.ndarray) -> np.ndarray:
    """float64 [n]: standard Gumbel noise of the stream at `token_ids` (integers [n])."""
    # The upper 52 bits and a half: uniform in (0, 1), neither end included.
    uniform = ((words(start, token_ids.astype(np.uint64)) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))
