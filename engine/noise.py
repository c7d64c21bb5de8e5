"""Counter-based noise: a number that depends only on what it is for, never on what was drawn before.

    word(token) = mix(start + (token + 1) * GOLDEN), start = mix(mix(mix(seed), choice), output index)

`mix` is splitmix64's finaliser (Steele, Lea, Flood 2014), GOLDEN its increment: each output position is one splitmix64
stream over the vocabulary. The vectors in tests/engine/test_noise.py fix it: changing a bit changes every seeded
answer.
"""

from __future__ import annotations

import numpy as np

from engine.kernels import noise as kernels

_GOLDEN = int(kernels.GOLDEN)
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream(seed: int, choice: int, index: int) -> np.uint64:
    """The start of the stream of one output position of one choice of one request."""
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state + (choice + 1) * _GOLDEN) & _MASK)
    return np.uint64(_mix((state + (index + 1) * _GOLDEN) & _MASK))


def gumbel(start: np.uint64, token_ids: np.ndarray) -> np.ndarray:
    """float64 [n]: standard Gumbel noise, -log(-log(u)), of the stream at `token_ids` (int64 [n]).

    u = 1 - (the upper 52 bits of the word's complement, and a half) * 2^-52.
    """
    out = np.empty(len(token_ids))
    kernels.gumbel(start, token_ids, out)
    return out


def choose(logits: np.ndarray, temperature: float, token_ids: np.ndarray, start: np.uint64) -> int:
    """The token of largest logits / temperature + noise; the lowest id among equals.

    logits: float32 [vocab]. token_ids: int64 [n >= 1], ascending: those that may be chosen, the likeliest among them.
    """
    return int(kernels.gumbel_argmax(logits, temperature, token_ids, int(logits.argmax()), start))
