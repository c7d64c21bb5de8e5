"""The kernels by themselves: exact arithmetic, whatever the CPU."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from engine.kernels.product import product
from engine.kernels.rows import gate, rms_norm

_ROOT = Path(__file__).parents[2]


@numba.njit(error_model="numpy")
def _multiply(num_rows, num_panels, depth, x, w, bias, out):  # type: ignore[no-untyped-def]
    product(num_rows, num_panels, depth, x, 0, depth, w, 0, 16, depth * 16, bias, 0, 0, out, 0, num_panels * 16, False)


@numba.njit(error_model="numpy")
def _norm_and_gate(x, num_rows, size, weights, normed, gated):  # type: ignore[no-untyped-def]
    rms_norm(x, 0, num_rows, 2 * size, 2 * size, weights, 0, 1e-5, normed)
    gate(normed, num_rows, size, 0, size, gated)


def _product(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x: float32 [rows, depth]. w: float32 [panels, depth, 16]. bias: float32 [panels * 16]."""
    out = np.empty((len(x), len(w) * 16), np.float32)
    _multiply(len(x), len(w), x.shape[1], x.reshape(-1), w.reshape(-1), bias, out.reshape(-1))
    return out


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_every_element_is_one_chain_of_multiply_adds():
    """In double precision, then rounded: the exact product of two float32 fits, and so a fused step is one rounding.

    Double rounding could differ once in some 2^29 steps; the seed is fixed.
    """
    x, w, bias = _normal(0, 7, 37), _normal(1, 3, 37, 16), _normal(2, 48)
    expected = np.broadcast_to(bias, (7, 48)).copy()
    for k in range(37):
        terms = x[:, k, None].astype(np.float64) * w[:, k].reshape(-1).astype(np.float64)
        expected = (expected.astype(np.float64) + terms).astype(np.float32)
    assert np.array_equal(_product(x, w, bias), expected)


@pytest.mark.parametrize("depth", [1, 16, 100, 1536])
def test_a_row_does_not_depend_on_how_many_there_are(depth):
    x, w, bias = _normal(3, 200, depth), _normal(4, 5, depth, 16), _normal(5, 80)
    whole = _product(x, w, bias)
    for num_rows in [*range(1, 20), 95, 96, 97, 191, 193]:
        assert np.array_equal(_product(x[:num_rows], w, bias), whole[:num_rows])
        assert np.array_equal(_product(x[7 : 7 + num_rows], w, bias), whole[7 : 7 + num_rows])


def _digest() -> str:
    """Of what the kernels make of fixed numbers."""
    outputs = [
        _product(_normal(i, rows, 300), _normal(1, 5, 300, 16), _normal(2, 80)) for i, rows in enumerate((1, 5, 19))
    ]
    x, normed, gated = _normal(6, 9, 128), np.empty(9 * 128, np.float32), np.empty(9 * 64, np.float32)
    _norm_and_gate(x.reshape(-1) * 20, 9, 64, _normal(7, 128), normed, gated)
    return hashlib.blake2b(b"".join(array.tobytes() for array in (*outputs, normed, gated))).hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compiles for a plain x86-64 processor")
def test_a_cpu_with_narrower_registers_computes_the_same_bits(monkeypatch):
    """Compiled for plain x86-64: four lanes instead of eight or sixteen, and the multiply-add in software."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "x86-64")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    command = [sys.executable, "-c", "from tests.engine.test_kernels import _digest; print(_digest())"]
    there = subprocess.run(command, cwd=_ROOT, check=True, timeout=120, capture_output=True, text=True).stdout
    assert there.strip() == _digest()
