"""What a model looks like: read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import BrokenCheckpoint, UnsupportedModel
from engine.gguf import GgufFile
from engine.source import ModelSource

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""All are the Llama architecture with or without biases, QK-norm and tied embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's change of the rotary frequencies: low ones are divided by `factor`, middle ones interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding over the whole head, halves rotated against each other (not neighbours)."""

    theta: float
    scaling: Llama3Scaling | None = None
    divisors: tuple[float, ...] | None = None
    """One per frequency, head_dim // 2 of them: how GGUF files state a scaling (`rope_freqs.weight`)."""

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float32 [head_dim // 2]: radians per position."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inverse: np.ndarray = np.float32(1) / np.power(np.float32(self.theta), exponents)
        if self.divisors is not None:
            inverse = inverse / np.asarray(self.divisors, np.float32)
        if self.scaling is not None:
            inverse = _llama3_scaled(inverse, self.scaling)
        return inverse.astype(np.float32)


def _llama3_scaled(inverse: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelength = 2 * np.pi / inverse
    long = scaling.original_context_tokens / scaling.low_freq_factor
    short = scaling.original_context_tokens / scaling.high_freq_factor
    smooth = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return np.where(wavelength > long, inverse / scaling.factor, np.where(wavelength < short, inverse, between))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that the forward pass needs to know besides the weights."""

    model_type: str
    """One of MODEL_TYPES."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    """Most positions of one request, prompt and output together."""
    norm_epsilon: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of every query and key head, before RoPE."""
    tied_embeddings: bool = False
    """The LM head is the embedding."""
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    """Any of them ends a generation."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a whole number >= 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.rope.divisors is not None and len(self.rope.divisors) != self.head_dim // 2:
            raise ValueError(
                f"rope has {len(self.rope.divisors)} divisors, head_dim {self.head_dim} needs half as many"
            )


def load_config(source: ModelSource) -> ModelConfig:
    """Reads the config without torch and without the weights.

    Raises UnsupportedModel naming the field that the engine does not do, BrokenCheckpoint for a file that cannot be
    read.
    """
    path = source.config_path()
    try:
        if path.suffix == ".gguf":
            config = config_from_gguf(GgufFile(path))
        else:
            config = config_from_hf(_read_json(path), _generation_config(path.parent), path)
        limit = source.context_tokens or config.context_tokens
        return dataclasses.replace(config, context_tokens=min(limit, config.context_tokens))
    except KeyError as error:
        raise BrokenCheckpoint(path, f"{error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModel | BrokenCheckpoint):
            raise
        raise BrokenCheckpoint(path, str(error)) from error


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any], path: object = "config.json") -> ModelConfig:
    """From the parsed config.json, and generation_config.json ({} if there is none), whose end tokens are added."""
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(path, "model_type", model_type, " | ".join(MODEL_TYPES))
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(path, "hidden_act", activation, "silu")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel(path, "quantization_config", raw["quantization_config"], "none: plain weights")
    if (fraction := raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(path, "partial_rotary_factor", fraction, "1.0")
    attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    num_heads = raw["num_attention_heads"]
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        context_tokens=_without_sliding(raw["max_position_embeddings"], _sliding_window(raw), path),
        norm_epsilon=float(raw["rms_norm_eps"]),
        rope=_rope_from_hf(raw, path),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=_token_id(raw.get("bos_token_id")),
        eos_token_ids=_token_ids(raw.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From the metadata; what it does not say (biases, QK-norm, tying) shows in which tensors there are."""
    metadata = file.metadata
    architecture = metadata["general.architecture"]
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise UnsupportedModel(file.path, "general.architecture", architecture, "llama | qwen2 | qwen3")

    def of(key: str, default: Any = None) -> Any:
        return metadata[f"{architecture}.{key}"] if default is None else metadata.get(f"{architecture}.{key}", default)

    if experts := of("expert_count", 0):
        raise UnsupportedModel(file.path, f"{architecture}.expert_count", experts, "0")
    scaling_type = of("rope.scaling.type", "none")
    if scaling_type != "none":
        raise UnsupportedModel(file.path, f"{architecture}.rope.scaling.type", scaling_type, "none")
    num_heads = of("attention.head_count")
    num_kv_heads = of("attention.head_count_kv", num_heads)
    for name, value in (("head_count", num_heads), ("head_count_kv", num_kv_heads)):
        if not isinstance(value, int):
            raise UnsupportedModel(file.path, f"{architecture}.attention.{name}", value, "one number for all layers")
    head_dim = of("attention.key_length", of("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (dim := of(key, head_dim)) != head_dim:
            raise UnsupportedModel(file.path, f"{architecture}.{key}", dim, f"{head_dim}, the size of a head")
    divisors = None
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(float(value) for value in file.array("rope_freqs.weight"))
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return ModelConfig(
        model_type=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_layers=of("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_tokens=_without_sliding(of("context_length"), of("attention.sliding_window", 0) or None, file.path),
        norm_epsilon=of("attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(theta=of("rope.freq_base", 10000.0), divisors=divisors),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
    )


def _rope_from_hf(raw: Mapping[str, Any], path: object) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; before, the base stood alone and `rope_scaling` held the rest.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if (fraction := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(path, "rope_parameters.partial_rotary_factor", fraction, "1.0")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        raise UnsupportedModel(path, f"{field}.rope_type", kind, "default | llama3")
    scaling = Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_context_tokens=parameters["original_max_position_embeddings"],
    )
    return RopeConfig(theta=theta, scaling=scaling)


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    if raw["model_type"] == "mistral" or raw.get("use_sliding_window", False):
        return raw.get("sliding_window")
    return None


def _without_sliding(context_tokens: int, sliding_window: int | None, path: object) -> int:
    """A window that is never left changes nothing, so the context ends where the window would begin to slide."""
    if sliding_window is None or sliding_window >= context_tokens:
        return context_tokens
    logger.warning("%s: context cut from %d to %d tokens, its sliding window", path, context_tokens, sliding_window)
    return sliding_window


def _token_id(value: Any) -> int | None:
    return value[0] if isinstance(value, list) else value


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenCheckpoint(path, "must hold a JSON object")
    return value
