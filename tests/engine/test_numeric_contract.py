"""K, V and logits of a position depend bitwise on its prefix alone (DESIGN: Exactness)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import Model, Segment
from tests.engine.models import FAMILIES, Pages, greedy, tiny_model


@pytest.fixture(scope="module", params=[(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float32")])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, dtype = request.param
    return tiny_model(family, tmp_path_factory.mktemp("model"), dtype=dtype)


def _prompts(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, 300, length).tolist() for length in lengths]


def _one_by_one(model: Model, prompt: list[int], *, page_size: int = 4) -> tuple[torch.Tensor, np.ndarray]:
    """Logits of every position and all of K and V, each position decoded alone."""
    pages = Pages(model, page_size=page_size, seed=1)
    table = pages.table(len(prompt))
    logits = [model.forward([Segment([token], at, table, True)]) for at, token in enumerate(prompt)]
    return torch.cat(logits), pages.kv(table, len(prompt))


def test_a_prompt_in_one_piece_equals_its_tokens_one_by_one(model):
    (prompt,) = _prompts(np.random.default_rng(1), 75)
    logits, kv = _one_by_one(model, prompt)
    pages = Pages(model)
    table = pages.table(len(prompt))
    whole = model.forward([Segment(prompt, 0, table, True)])
    assert torch.isfinite(logits).all()
    assert torch.equal(whole[0], logits[-1])
    assert np.array_equal(pages.kv(table, len(prompt)), kv)


def test_random_chunks_in_random_batches_change_no_bit(model):
    rng = np.random.default_rng(2)
    prompts = _prompts(rng, 1, 3, 4, 5, 33, 64, 90, 17)
    alone = [_one_by_one(model, prompt) for prompt in prompts]
    for _ in range(3):
        pages = Pages(model, num_pages=128)
        tables = [pages.table(len(prompt)) for prompt in prompts]
        done = [0] * len(prompts)
        while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
            chosen = [i for i in rng.permutation(len(prompts)) if done[i] < len(prompts[i]) and rng.random() < 0.7]
            segments = []
            for i in chosen:
                stop = min(done[i] + int(rng.choice([1, 2, 7, 8, 9, 30])), len(prompts[i]))
                segments.append(Segment(prompts[i][done[i] : stop], done[i], tables[i], True))
                done[i] = stop
            for row, i in zip(model.forward(segments), chosen, strict=True):
                assert torch.equal(row, alone[i][0][done[i] - 1])
        for table, prompt, (_, kv) in zip(tables, prompts, alone, strict=True):
            assert np.array_equal(pages.kv(table, len(prompt)), kv)


def test_filling_a_hole_changes_no_bit_and_leaves_what_lies_behind_it_alone(model):
    (prompt,) = _prompts(np.random.default_rng(3), 60)
    logits, kv = _one_by_one(model, prompt)
    pages = Pages(model)
    table = pages.table(len(prompt))
    model.forward([Segment(prompt, 0, table, False)])
    holes = [(4, 8), (20, 32), (56, 60)]
    for start, stop in holes:
        pages.bytes[table[start // 4 : stop // 4]] = 0xFF
    out = model.forward([Segment(prompt[start:stop], start, table, True) for start, stop in holes])
    for row, (_, stop) in zip(out, holes, strict=True):
        assert torch.equal(row, logits[stop - 1])
    assert np.array_equal(pages.kv(table, len(prompt)), kv)


def test_requests_share_the_pages_of_a_common_prefix(model):
    rng = np.random.default_rng(4)
    common, left, right = _prompts(rng, 24, 7, 9)
    pages = Pages(model)
    shared = pages.table(len(common))
    model.forward([Segment(common, 0, shared, False)])
    segments = [Segment(tail, len(common), shared + pages.table(len(tail)), True) for tail in (left, right)]
    out = model.forward(segments)
    for row, tail in zip(out, (left, right), strict=True):
        assert torch.equal(row, _one_by_one(model, common + tail)[0][-1])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_the_page_size_changes_no_logit(model, page_size):
    (prompt,) = _prompts(np.random.default_rng(5), 50)
    assert torch.equal(_one_by_one(model, prompt, page_size=page_size)[0], _one_by_one(model, prompt)[0])


def test_two_threads_compute_the_bits_of_one(model, monkeypatch):
    monkeypatch.setattr("engine.model.OPERATIONS_PER_THREAD", 1)
    (prompt,) = _prompts(np.random.default_rng(6), 70)
    logits, kv = _one_by_one(model, prompt)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        try:
            pages = Pages(model)
            table = pages.table(len(prompt))
            whole = model.forward([Segment(prompt[:-1], 0, table, False)])
            assert len(whole) == 0
            assert torch.equal(model.forward([Segment(prompt[-1:], 69, table, True)])[0], logits[-1])
            assert np.array_equal(pages.kv(table, len(prompt)), kv)
        finally:
            torch.set_num_threads(1)


def test_random_weights_are_the_same_in_every_load_and_their_text_varies(model, tmp_path):
    prompt = list(range(5, 25))
    text = greedy(model, Pages(model), prompt, 40)
    again = tiny_model(_family(model), tmp_path, dtype=model.dtype_name)
    assert again.weights_digest == model.weights_digest
    assert greedy(again, Pages(again), prompt, 40) == text
    assert len(set(text)) > 8
    other = tiny_model(_family(model), tmp_path, dtype=model.dtype_name, seed=8)
    assert other.weights_digest != model.weights_digest
    assert greedy(other, Pages(other), prompt, 40) != text


def _family(model: Model) -> str:
    name = model.config.model_type
    return "llama-biased" if name == "llama" and model.config.qkv_bias else name


def test_what_does_not_exist_is_refused_before_anything_is_written(model):
    pages = Pages(model, num_pages=4)
    before = pages.bytes.copy()
    nonsense = [
        Segment([1, 300], 0, [0], True),
        Segment([-1], 0, [0], True),
        Segment([1], -1, [0], True),
        Segment([], 0, [0], True),
        Segment([1] * 5, 0, [0], True),
        Segment([1], 0, [4], True),
        Segment([1], 0, [-1], True),
        Segment([1], 256, list(range(4)) * 20, True),
    ]
    for segment in nonsense:
        with pytest.raises(ValueError, match=r"."):
            model.forward([Segment([1], 0, [0], True), segment])
    assert np.array_equal(pages.bytes, before)
    assert model.forward([]).shape == (0, 300)


def test_a_pool_of_another_layout_is_refused(model):
    layout = model.layout(4)
    with pytest.raises(ValueError, match="layout"):
        model.bind(np.zeros((2, layout.page_bytes), np.uint8), replace(layout, num_layers=3))
    with pytest.raises(ValueError, match="pages must be uint8"):
        model.bind(np.zeros((2, layout.page_bytes + 1), np.uint8), layout)
    with pytest.raises(ValueError, match="contiguous"):
        model.bind(np.zeros((4, layout.page_bytes), np.uint8)[::2], layout)
