"""Logits of every family against transformers, on tiny random checkpoints that transformers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine import BrokenCheckpoint, Model, ModelSource, Segment, load_model
from tests.engine.models import FAMILIES, Pages, tiny_config


def _written_by_transformers(family: str, folder: Path, **options: object) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(**tiny_config(family))
    torch.manual_seed(3)
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for (
            parameter
        ) in oracle.parameters():  # transformers starts biases at 0 and norms at 1, which would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    oracle.save_pretrained(folder, **options)
    return oracle


def _load(folder: Path, dtype: str = "float32") -> Model:
    return load_model(ModelSource(name="tiny", weights=str(folder), dtype=dtype))


def _logits(model: Model, prompt: list[int]) -> torch.Tensor:
    """Of every position."""
    pages = Pages(model)
    table = pages.table(len(prompt))
    return torch.cat([model.forward([Segment([token], at, table, True)]) for at, token in enumerate(prompt)])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tmp_path):
    """Both compute in float32; 1e-4 is some hundred roundings of logits of size 10."""
    oracle = _written_by_transformers(family, tmp_path)
    prompt = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0]
    logits = _logits(_load(tmp_path), prompt)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path):
    _written_by_transformers("llama", tmp_path)
    prompt = list(range(60))
    exact, rounded = _logits(_load(tmp_path), prompt), _logits(_load(tmp_path, "bfloat16"), prompt)
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 1e-3


def test_a_sharded_checkpoint_is_one_model(tmp_path):
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    _written_by_transformers("qwen3", whole)
    _written_by_transformers("qwen3", sharded, max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    prompt = list(range(20))
    assert torch.equal(_logits(_load(whole), prompt), _logits(_load(sharded), prompt))


def test_a_digest_follows_weights_and_config(tmp_path):
    _written_by_transformers("llama", tmp_path)
    first = _load(tmp_path).weights_digest
    assert _load(tmp_path).weights_digest == first
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace("10000.0", "20000.0"))
    assert _load(tmp_path).weights_digest != first
    config.write_text(text)
    (weights,) = tmp_path.glob("*.safetensors")
    flipped = bytearray(weights.read_bytes())
    flipped[-2] ^= 1
    weights.write_bytes(flipped)
    assert _load(tmp_path).weights_digest != first


def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_the_tensor(tmp_path):
    _written_by_transformers("llama", tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(BrokenCheckpoint, match=r"model\.layers\.2\.\S+ is missing"):
        _load(tmp_path)
    config.write_text(text.replace('"intermediate_size": 100', '"intermediate_size": 90'))
    with pytest.raises(BrokenCheckpoint, match=r"gate_proj\.weight is \(100, 64\), config says \(90, 64\)"):
        _load(tmp_path)


def test_a_broken_or_empty_folder_is_refused(tmp_path):
    _written_by_transformers("llama", tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BrokenCheckpoint):
        _load(tmp_path)
    weights.unlink()
    with pytest.raises(BrokenCheckpoint, match=r"holds no \.safetensors file"):
        _load(tmp_path)
