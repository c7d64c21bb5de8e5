"""Where tensors come from: a safetensors folder, a GGUF file, or a seed. All under the names that Hugging Face gives
them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.config import ModelConfig
from engine.errors import BrokenCheckpoint
from engine.gguf import GgufFile
from engine.source import ModelSource

_HASHED_PIECE_BYTES = 32 << 20


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a model of `config` has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", queries, hidden, config.qkv_bias),
            ("self_attn.k_proj", keys, hidden, config.qkv_bias),
            ("self_attn.v_proj", keys, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            yield f"{prefix}.{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}.{name}.bias", (rows,)
        if config.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


class Checkpoint(ABC):
    """Named tensors. Use `tensor`, which checks; the two abstract methods are what a format provides."""

    def __init__(self, source: object, config: ModelConfig) -> None:
        self.source = source
        self.config = config
        self._shapes = dict(expected_shapes(config))

    def tensor(self, name: str) -> torch.Tensor:
        """float32 copy. Raises BrokenCheckpoint if it is missing or not of the shape that the config implies."""
        tensor = self._read(name)
        if tensor is None:
            raise BrokenCheckpoint(self.source, f"{name} is missing")
        if tuple(tensor.shape) != self._shapes[name]:
            raise BrokenCheckpoint(self.source, f"{name} is {tuple(tensor.shape)}, config says {self._shapes[name]}")
        return tensor.to(torch.float32)

    @abstractmethod
    def _read(self, name: str) -> torch.Tensor | None:
        """The tensor in any float dtype, or None."""

    @abstractmethod
    def digest(self) -> bytes:
        """16 bytes that change when any weight or any part of the config changes."""


class FolderCheckpoint(Checkpoint):
    """A Hugging Face folder: model.safetensors, or shards with their index."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__(folder, config)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                by_name: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise BrokenCheckpoint(index, f"not a safetensors index: {error}") from error
            self._files = sorted({folder / name for name in by_name.values()})
        else:
            self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise BrokenCheckpoint(folder, "holds no .safetensors file")
        try:
            self._shards = [safe_open(file, framework="pt") for file in self._files]
        except (OSError, SafetensorError) as error:
            raise BrokenCheckpoint(folder, str(error)) from error
        self._shard_of = {name: shard for shard in self._shards for name in shard.keys()}  # noqa: SIM118

    def _read(self, name: str) -> torch.Tensor | None:
        shard = self._shard_of.get(name)
        return None if shard is None else shard.get_tensor(name)

    def digest(self) -> bytes:
        return _digest(repr(self.config), self._files)


class GgufCheckpoint(Checkpoint):
    """A GGUF file, dequantised as it is read."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        super().__init__(file.path, config)
        self._file = file

    def _read(self, name: str) -> torch.Tensor | None:
        stored = gguf_name(name)
        if stored not in self._file.tensors:
            return None
        array = self._file.array(stored)
        # llama.cpp's converter puts the rotated halves of a llama's head side by side; here they are apart. Only rows
        # move.
        if self.config.model_type == "llama" and (match := re.search(r"attn_([qk])\.", stored)):
            num_heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
            pairs = array.reshape(num_heads, self.config.head_dim // 2, 2, -1)
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        return torch.from_numpy(array)

    def digest(self) -> bytes:
        return _digest(repr(self.config), [self._file.path])


class RandomCheckpoint(Checkpoint):
    """Weights drawn from a seed, the same in every process. They are no model, but greedy text from them varies."""

    def __init__(self, seed: int, config: ModelConfig) -> None:
        super().__init__(f"random:{seed}", config)
        self._seed = seed

    def _read(self, name: str) -> torch.Tensor | None:
        shape = self._shapes.get(name)
        if shape is None:
            return None
        if "norm" in name:
            return torch.ones(shape)
        key = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=16).digest()
        values = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).standard_normal(shape)
        return torch.from_numpy((values * self._scale(name, shape)).astype(np.float32))

    @staticmethod
    def _scale(name: str, shape: tuple[int, ...]) -> float:
        if name.endswith(".bias"):
            return 0.1
        # A small embedding leaves the residual stream to the layers, and queries and keys are wide enough for peaked
        # attention: otherwise a tied head would only ever repeat the last token.
        gain = {"embed_tokens": 0.1, "q_proj": 2.0, "k_proj": 2.0, "o_proj": 3.0, "down_proj": 3.0}
        return gain.get(name.split(".")[-2], 1.0) / math.sqrt(shape[-1])

    def digest(self) -> bytes:
        return _digest(f"{self.source} {self.config!r}", [])


def open_checkpoint(source: ModelSource, config: ModelConfig) -> Checkpoint:
    """Nothing is read yet but headers."""
    if source.kind == "random":
        return RandomCheckpoint(source.seed, config)
    path = source.weights_path()
    if source.kind == "gguf":
        return GgufCheckpoint(GgufFile(path), config)
    return FolderCheckpoint(path, config)


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{parts[match[2]]}.{kind}"
    return f"{parts[stem]}.{kind}"


def _digest(header: str, files: list[Path]) -> bytes:
    """BLAKE2b-128 over the header and over the digests of 32 MiB pieces of the files, in order."""
    pieces = [(file, offset) for file in files for offset in range(0, max(file.stat().st_size, 1), _HASHED_PIECE_BYTES)]

    def piece_digest(piece: tuple[Path, int]) -> bytes:
        with piece[0].open("rb") as file:
            file.seek(piece[1])
            return hashlib.blake2b(file.read(_HASHED_PIECE_BYTES), digest_size=16).digest()

    total = hashlib.blake2b(header.encode(), digest_size=16)
    with ThreadPoolExecutor(max_workers=4) as pool:
        for digest in pool.map(piece_digest, pieces):
            total.update(digest)
    return total.digest()
