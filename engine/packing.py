"""Weights as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.config import ModelConfig
from engine.kernels.decoder import Shape, Weights
from engine.kernels.simd import LANES
from engine.weights import Checkpoint


def padded(size: int) -> int:
    """The next multiple of a vector's 16 lanes."""
    return -(-size // LANES) * LANES


def shape_of(config: ModelConfig) -> Shape:
    return Shape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_epsilon=config.norm_epsilon,
        qk_norm=config.qk_norm,
    )


def pack(checkpoint: Checkpoint, dtype: torch.dtype) -> Weights:
    """Reads every tensor of the checkpoint. dtype: torch.bfloat16 or torch.float32, of the matrices' values."""
    config = checkpoint.config
    tensor = checkpoint.tensor

    def stacked(of_layer: Callable[[str], np.ndarray]) -> np.ndarray:
        """The layers' arrays one behind the other."""
        out = np.empty(0)
        for index in range(config.num_layers):
            array = of_layer(f"model.layers.{index}")
            if index == 0:
                out = np.empty((config.num_layers, len(array)), array.dtype)
            out[index] = array
        return out.reshape(-1)

    def matrices(*names: str) -> np.ndarray:
        return stacked(lambda layer: _panels(torch.cat([tensor(f"{layer}.{name}.weight") for name in names]), dtype))

    def biases(exist: bool, num_outputs: int, *names: str) -> np.ndarray:
        if not exist:
            return np.zeros(config.num_layers * padded(num_outputs), np.float32)
        return stacked(lambda layer: _vector(torch.cat([tensor(f"{layer}.{name}.bias") for name in names])))

    def head_norms(name: str) -> np.ndarray:
        if not config.qk_norm:
            return np.empty(0, np.float32)
        return stacked(lambda layer: tensor(f"{layer}.self_attn.{name}.weight").numpy())

    def gates_and_ups(layer: str) -> np.ndarray:
        return np.concatenate([_panels(tensor(f"{layer}.mlp.{name}_proj.weight"), dtype) for name in ("gate", "up")])

    def gate_and_up_biases(layer: str) -> np.ndarray:
        return np.concatenate([_vector(tensor(f"{layer}.mlp.{name}_proj.bias")) for name in ("gate", "up")])

    hidden, inner = config.hidden_size, padded(config.intermediate_size)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    embedding = _panels(tensor("model.embed_tokens.weight"), dtype)
    return Weights(
        embedding=embedding,
        attention_norm=stacked(lambda layer: _vector(tensor(f"{layer}.input_layernorm.weight"))),
        qkv=matrices(*qkv),
        qkv_bias=biases(config.qkv_bias, qkv_size, *qkv),
        query_norm=head_norms("q_norm"),
        key_norm=head_norms("k_norm"),
        output=matrices("self_attn.o_proj"),
        output_bias=biases(config.output_bias, hidden, "self_attn.o_proj"),
        mlp_norm=stacked(lambda layer: _vector(tensor(f"{layer}.post_attention_layernorm.weight"))),
        gate_up=stacked(gates_and_ups),
        gate_up_bias=stacked(gate_and_up_biases) if config.mlp_bias else biases(False, 2 * inner),
        down=matrices("mlp.down_proj"),
        down_bias=biases(config.mlp_bias, hidden, "mlp.down_proj"),
        norm=_vector(tensor("model.norm.weight")),
        head=embedding if config.tied_embeddings else _panels(tensor("lm_head.weight"), dtype),
        head_bias=np.zeros(padded(config.vocab_size), np.float32),
    )


def _panels(matrix: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """float32 [outputs, inputs] -> flat [padded(outputs) / 16, inputs, 16], values rounded to `dtype`; bfloat16 as its
    bits."""
    num_outputs, num_inputs = matrix.shape
    rounded = torch.zeros(padded(num_outputs), num_inputs, dtype=dtype)
    rounded[:num_outputs] = matrix
    # numpy has no bfloat16; the kernels take its bits.
    array = rounded.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else rounded.numpy()
    return np.ascontiguousarray(array.reshape(-1, LANES, num_inputs).swapaxes(1, 2)).reshape(-1)


def _vector(vector: torch.Tensor) -> np.ndarray:
    """float32, padded with 0 to a multiple of 16."""
    out = np.zeros(padded(len(vector)), np.float32)
    out[: len(vector)] = vector.numpy()
    return out
