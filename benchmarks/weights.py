"""The weights that Headrace serves, in the form that a peer reads."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import ModelConfig, load_config
from engine.gguf import GgufFile
from engine.gguf_tokenizer import tokenizer_from_gguf
from engine.source import ModelSource
from engine.weights import expected_shapes, open_checkpoint

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def num_weight_bytes(source: ModelSource) -> int:
    """What one decode step reads of them: every matrix once, in the dtype that is served."""
    config = load_config(source)
    itemsize: int = getattr(torch, source.dtype).itemsize
    return itemsize * sum(
        math.prod(shape)
        for name, shape in expected_shapes(config)
        # Of an embedding that is not the LM head as well, a step reads a row per stream.
        if len(shape) == 2 and (config.tied_embeddings or name != "model.embed_tokens.weight")
    )


def huggingface_folder(source: ModelSource, folder: Path) -> Path:
    """A folder with config.json, model.safetensors and tokenizer.json, all values as Headrace has them.

    Weights that lie in such a folder are used where they are; others are written to `folder`, in the dtype that is
    served. Raises ValueError for what config.json cannot say.
    """
    if source.kind == "folder":
        return source.weights_path()
    config = load_config(source)
    folder.mkdir(parents=True)
    if source.kind == "gguf":
        (folder / "config.json").write_text(json.dumps(config_json(config, source.dtype), indent=2))
    else:
        shutil.copy(source.config_path(), folder / "config.json")
    checkpoint = open_checkpoint(source, config)
    dtype = getattr(torch, source.dtype)
    tensors = {name: checkpoint.tensor(name).to(dtype).contiguous() for name, _ in expected_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(source.tokenizer_path(), folder)
    return folder


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json for a model whose metadata came from GGUF. Raises ValueError for what it cannot say."""
    if config.rope.divisors is not None:
        raise ValueError("the file's own rotary frequencies have no name in config.json")
    return {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids),
    }


def _write_tokenizer(path: Path, folder: Path) -> None:
    if path.suffix == ".gguf":
        tokenizer_from_gguf(GgufFile(path)).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        return
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            shutil.copy(path / name, folder / name)
