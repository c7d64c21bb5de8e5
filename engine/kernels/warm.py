"""Compiling before the first request."""

from __future__ import annotations

import numpy as np

from engine.kernels.decoder import Activations, Batch, Pool, Shape, Weights, forward
from engine.kernels.noise import gumbel_argmax


def warm_up(dtype: str) -> None:
    """Compiles the kernels for "bfloat16" or "float32", or loads what an earlier process compiled.

    The one takes seconds, the other a quarter of a second. It runs a step without layers and rows: the arrays only have
    to be of the right types.
    """
    values = np.empty(0, np.uint16 if dtype == "bfloat16" else np.float32)
    floats, integers = np.empty(0, np.float32), np.empty(0, np.int64)
    weights = Weights(
        embedding=values,
        attention_norm=floats,
        qkv=values,
        qkv_bias=floats,
        query_norm=floats,
        key_norm=floats,
        output=values,
        output_bias=floats,
        mlp_norm=floats,
        gate_up=values,
        gate_up_bias=floats,
        down=values,
        down_bias=floats,
        norm=floats,
        head=values,
        head_bias=floats,
    )
    forward(
        Shape(0, 16, 16, 1, 1, 16, 1e-5, False),
        weights,
        Pool(values, 1, 1, 1, 1, 1),
        Batch(integers, integers, integers, integers, integers, integers, floats, floats),
        Activations(floats, floats, floats, floats, floats, floats),
        floats,
        np.zeros(1, np.int64),
        0,
        1,
    )
    gumbel_argmax(np.zeros(1, np.float32), 1.0, np.zeros(1, np.int64), 0, np.uint64(0))
