"""Whole models out of GGUF files: the same bits as from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine import BrokenCheckpoint, Model, ModelSource, Segment, load_config, load_model
from engine.weights import expected_shapes, gguf_name, open_checkpoint
from tests.engine.models import Pages, tiny_model


def _written_as_gguf(family: str, folder: Path) -> tuple[Model, Path]:
    """A tiny random model, and the GGUF file that llama.cpp's converter would make of it."""
    model = tiny_model(family, folder, dtype="float32")
    source = ModelSource(name="tiny", weights="random:7", config=str(folder), dtype="float32")
    config = load_config(source)
    checkpoint = open_checkpoint(source, config)
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_context_length(config.context_tokens)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    for name, shape in expected_shapes(config):
        array = checkpoint.tensor(name).numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def _logits(model: Model) -> torch.Tensor:
    pages = Pages(model)
    return model.forward([Segment(list(range(3, 50)), 0, pages.table(47), True)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_model_that_it_was_made_of(family, tmp_path):
    """llama.cpp's converter permutes the rows of a llama's queries and keys, and of no other family."""
    model, path = _written_as_gguf(family, tmp_path)
    converted = load_model(ModelSource(name="tiny", weights=str(path), dtype="float32"))
    assert torch.equal(_logits(converted), _logits(model))


def test_a_file_without_a_tensor_is_refused_by_its_name(tmp_path):
    _, path = _written_as_gguf("llama", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    with pytest.raises(BrokenCheckpoint, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(ModelSource(name="tiny", weights=str(path), dtype="float32"))
