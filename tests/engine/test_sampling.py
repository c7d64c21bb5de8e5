"""Sampling: filters, penalties, noise, and that no row knows its neighbours."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import Sampled, SamplingParams, SamplingRow, sample

VOCAB = 50


def _row(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> SamplingRow:
    prompt = [1, 2, 3] if prompt is None else prompt
    return SamplingRow(SamplingParams(**params), prompt + (output or []), len(prompt))


def _logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _draws(logits: list[float], count: int, **params: object) -> Counter[int]:
    """How often each token is chosen over `count` seeds."""
    row = SamplingParams(temperature=1.0, **params)
    rows = [SamplingRow(replace(row, seed=seed), [0], 1) for seed in range(count)]
    return Counter(sampled.token_id for sampled in sample(_logits(*[logits] * count), rows))


def test_greedy_takes_the_best_and_the_lowest_id_among_equals():
    assert sample(_logits([0.0, 3.0, 3.0, 1.0]), [_row()]) == [Sampled(1)]


def test_a_hair_of_temperature_is_greedy():
    assert sample(_logits([0.0, 3.0, 2.0]), [_row(temperature=1e-9, seed=s) for s in range(1)])[0].token_id == 1


def test_the_same_seed_choice_and_output_index_choose_the_same_token():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    first = sample(logits, [_row(temperature=1.0, seed=5)])
    assert sample(logits, [_row(temperature=1.0, seed=5)]) == first
    varied = [
        _row(temperature=1.0, seed=6),
        _row(temperature=1.0, seed=5, choice=1),
        _row(temperature=1.0, seed=5, output=[9]),
        _row(temperature=1.0, seed=5, output=[9, 9]),
    ]
    assert any(sample(logits, [row]) != first for row in varied)


def test_the_noise_follows_the_output_index_and_not_the_prompt():
    """A request that goes on elsewhere has other token ids in front but the same place in its output."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    short = sample(logits, [_row(prompt=[1], output=[7, 8], temperature=1.0, seed=5)])
    assert sample(logits, [_row(prompt=[1, 2, 3, 4], output=[9, 9], temperature=1.0, seed=5)]) == short


def test_no_row_depends_on_its_neighbours():
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [
        _row(),
        _row(temperature=0.7, seed=1, top_k=5),
        _row(temperature=1.3, seed=1, top_p=0.8, top_logprobs=3),
        _row(temperature=1.0, seed=2, min_p=0.1),
        _row(output=[4, 4, 9], repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
        _row(temperature=1.0, seed=3, logit_bias={7: 5.0}),
        _row(top_logprobs=0),
        _row(temperature=2.0, seed=2**64 - 1, choice=2**32 - 1),
    ]
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)] == together


def test_tokens_come_with_their_probabilities():
    """5,000 draws: chi-square with 4 degrees of freedom stays under 18.5 in 99.9 of 100 cases; the seeds are fixed."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    draws = _draws(np.log(probabilities).tolist(), 5000)
    observed = np.array([draws[token] for token in range(5)])
    expected = probabilities * 5000
    assert ((observed - expected) ** 2 / expected).sum() < 18.5


def test_temperature_sharpens_and_flattens():
    logits = np.log([0.6, 0.4]).tolist()
    rows = [SamplingRow(SamplingParams(temperature=0.5, seed=seed), [0], 1) for seed in range(4000)]
    share = sum(s.token_id == 0 for s in sample(_logits(*[logits] * 4000), rows)) / 4000
    assert abs(share - 0.36 / 0.52) < 0.03


def test_top_k_keeps_the_best_k():
    assert set(_draws([1.0, 1.2, 0.9, 1.1], 300, top_k=2)) == {1, 3}
    assert set(_draws([1.0, 1.2, 0.9, 1.1], 300, top_k=1)) == {1}
    assert set(_draws([1.0, 1.2, 0.9, 1.1], 300, top_k=99)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(_draws(logits, 300, top_p=0.39)) == {0}
    assert set(_draws(logits, 300, top_p=0.41)) == {0, 1}
    assert set(_draws(logits, 300, top_p=0.69)) == {0, 1}
    assert set(_draws(logits, 300, top_p=0.95)) == {0, 1, 2, 3}
    assert set(_draws(logits, 300, top_p=1e-9)) == {0}
    assert set(_draws(logits, 300, top_p=2.0**-126)) == {0}  # what gateways make of 0


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.5, 0.26, 0.14, 0.1]).tolist()
    assert set(_draws(logits, 300, min_p=0.5)) == {0, 1}
    assert set(_draws(logits, 300, min_p=1.0)) == {0}


def test_equal_tokens_at_the_edge_of_a_filter_are_kept_by_id():
    assert set(_draws([1.0, 2.0, 1.0, 1.0], 200, top_k=2)) == {0, 1}


def test_repetition_counts_prompt_and_output_and_knows_signs():
    logits = _logits([2.0, 1.9, -1.0, -1.2])
    assert sample(logits, [_row(prompt=[0], repetition_penalty=1.5)])[0].token_id == 1
    assert sample(logits, [_row(prompt=[3], output=[0, 1], repetition_penalty=10.0)])[0].token_id == 0
    only_negative = _logits([-1.0, -1.2])
    assert sample(only_negative, [_row(prompt=[0], repetition_penalty=1.5)])[0].token_id == 1


def test_presence_and_frequency_count_the_output_alone():
    logits = _logits([2.0, 1.5, 1.2])
    assert sample(logits, [_row(prompt=[0], presence_penalty=1.0)])[0].token_id == 0
    assert sample(logits, [_row(prompt=[2], output=[0], presence_penalty=0.6)])[0].token_id == 1
    assert sample(logits, [_row(prompt=[2], output=[0, 0], frequency_penalty=0.2)])[0].token_id == 0
    assert sample(logits, [_row(prompt=[2], output=[0, 0, 0], frequency_penalty=0.2)])[0].token_id == 1


def test_a_bias_can_force_and_forbid():
    logits = _logits([0.0, 1.0, 2.0])
    assert sample(logits, [_row(logit_bias={0: 100.0})])[0].token_id == 0
    assert set(_draws([0.0, 1.0, 2.0], 300, logit_bias={2: -100.0})) == {0, 1}


def test_logprobs_are_of_the_unchanged_distribution():
    logits = _logits([1.0, 3.0, 2.0, -1.0])
    expected = logits[0].double().log_softmax(-1).tolist()
    row = _row(top_logprobs=2, temperature=5.0, logit_bias={3: 100.0}, top_k=1)
    (sampled,) = sample(logits, [row])
    assert sampled.token_id == 3
    assert sampled.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token_id for token_id, _ in sampled.top] == [1, 2]
    assert [logprob for _, logprob in sampled.top] == pytest.approx([expected[1], expected[2]], abs=1e-6)
    assert sample(logits, [_row(top_logprobs=0)])[0].top == ()
    assert len(sample(logits, [_row(top_logprobs=99)])[0].top) == 4


def test_a_row_that_cannot_be_sampled_fails_alone():
    logits = _logits([0.0, 1.0], [math.nan, 1.0], [0.0, math.inf], [0.0, -math.inf], [1.0, 0.0])
    results = sample(logits, [_row(prompt=[0])] * 5)
    assert [result.token_id for result in results] == [1, -1, -1, -1, 0]
    assert [result.error is None for result in results] == [True, False, False, False, True]
    assert "vocabulary" in str(sample(logits[:1], [_row(prompt=[0], logit_bias={2: 1.0})])[0].error)


def test_extreme_parameters_choose_a_token_all_the_same():
    logits = _logits([1e30, -1e30, 0.0, 5.0])
    for params in (
        {"temperature": 1e-4},
        {"temperature": 1e6},
        {"temperature": 1e-4, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 1e-12, "min_p": 1.0, "top_k": 1},
        {"temperature": 1.0, "repetition_penalty": 1e-3},
        {"temperature": 1.0, "repetition_penalty": 1e6, "presence_penalty": 1e6, "frequency_penalty": -1e6},
        {"temperature": 1.0, "logit_bias": {0: -1e6, 1: 1e6}},
    ):
        (sampled,) = sample(logits, [_row(prompt=[0, 1, 2, 3], output=[0, 3, 3], **params)])
        assert 0 <= sampled.token_id < 4
        assert sampled.error is None


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**64},
        {"logit_bias": {1: math.inf}},
        {"top_logprobs": -2},
        {"max_tokens": -1},
    ],
)
def test_parameters_that_mean_nothing_are_refused_by_name(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, VOCAB), []) == []
