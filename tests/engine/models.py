"""Tiny models of every family, made of config.json and a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import Model, ModelSource, Segment, load_model

PAGE_SIZE = 4

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1000000.0},
}
"""Head sizes 16, 24 (not a multiple of the kernels' 16 lanes) and 32; ordinary, tied and untied; with and without
biases."""

_COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(family: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    return _COMMON | {"tie_word_embeddings": False} | FAMILIES[family]


def tiny_model(family: str, folder: Path, *, dtype: str = "bfloat16", seed: int = 7) -> Model:
    """Random weights on a tiny config, which is written to `folder`."""
    path = folder / "config.json"
    path.write_text(json.dumps(tiny_config(family)))
    return load_model(ModelSource(name=family, weights=f"random:{seed}", config=str(path), dtype=dtype))


class Pages:
    """A pool bound to a model, full of NaN so that reading what was never written shows, and a block table for each
    request."""

    def __init__(self, model: Model, *, num_pages: int = 64, page_size: int = PAGE_SIZE, seed: int = 0) -> None:
        self.model = model
        self.layout = model.layout(page_size)
        self.bytes = np.full((num_pages, self.layout.page_bytes), 0xFF, np.uint8)
        model.bind(self.bytes, self.layout)
        self._free = list(np.random.default_rng(seed).permutation(num_pages))

    def table(self, num_tokens: int) -> list[int]:
        """Fresh pages in random order."""
        return [int(self._free.pop()) for _ in range(self.layout.pages_for(num_tokens))]

    def kv(self, table: list[int], num_tokens: int) -> np.ndarray:
        """Bytes of K and V: [num_tokens, heads, layers, 2, bytes of a head]."""
        shape = (*self.layout.shape[:-1], self.layout.head_dim * self.layout.itemsize)
        pages = self.bytes[table].reshape(len(table), *shape)
        by_position = pages.transpose(0, 4, 1, 2, 3, 5)  # page, slot, head, layer, k|v, bytes
        return by_position.reshape(-1, *by_position.shape[2:])[:num_tokens].copy()


def greedy(model: Model, pages: Pages, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens of one request alone: prompt in one piece, then one by one."""
    table = pages.table(len(prompt) + num_tokens)
    output: list[int] = []
    logits = model.forward([Segment(prompt, 0, table, True)])
    while True:
        output.append(int(torch.argmax(logits[0])))
        if len(output) == num_tokens:
            return output
        logits = model.forward([Segment(output[-1:], len(prompt) + len(output) - 1, table, True)])
