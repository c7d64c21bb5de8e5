"""The noise of sampling, and the choice by it; see engine/noise.py for what it is."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels.compiled import entry, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ONE, _12, _27, _30, _31 = np.uint64(1), np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)


@kernel
def _remainder(start, token_id):
    """1 - u for the uniform number u of `token_id` in the stream: both in (0, 1), neither end included, and exact."""
    z = start + (np.uint64(token_id) + _ONE) * GOLDEN
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    z = z ^ (z >> _31)
    return (np.float64(~z >> _12) + 0.5) * 2.0**-52


@entry
def gumbel(start, token_ids, out):
    """out = standard Gumbel noise of the stream at `token_ids`. start: uint64. token_ids: int64 [n]. out: float64
    [n]."""
    for i in range(len(token_ids)):
        out[i] = -math.log(-math.log(1.0 - _remainder(start, token_ids[i])))


@entry
def gumbel_argmax(logits, temperature, token_ids, likeliest, start):
    """The token of largest `logits[token] / temperature + noise`; the first of `token_ids` among equals.

    logits: float32. token_ids: int64, ascending. likeliest: one of them with a high logit, where the search begins.
    start: uint64.

    -log(-log(u)) <= -log(1 - u), and exp(d) >= 1 + d + d²/2 + d³/6: most tokens are ruled out without a logarithm.
    """
    chosen = likeliest
    best = logits[likeliest] / temperature - math.log(-math.log(1.0 - _remainder(start, likeliest)))
    for token_id in token_ids:
        scaled = logits[token_id] / temperature
        needed = best - scaled
        remainder = _remainder(start, token_id)
        if needed > 0 and remainder * (1.0 + needed * (1.0 + needed * (0.5 + needed / 6.0))) > 1.0 + 1e-9:
            continue
        value = scaled - math.log(-math.log(1.0 - remainder))
        if value > best or (value == best and token_id < chosen):
            best = value
            chosen = token_id
    return chosen
