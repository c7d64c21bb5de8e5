"""Prompts of an exact length that share nothing, or just what they are told to."""

from __future__ import annotations

import pydoc_data.topics

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.errors import BenchmarkError
from benchmarks.prompts import PromptSource
from engine.tokenizer import Tokenizer

TEXT = "\n".join(pydoc_data.topics.topics.values())[:20_000]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: token_id for token_id, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def source(tokenizer: Tokenizer, *, num_tokens: int = 40, shared: int = 0, seed: int = 1) -> PromptSource:
    return PromptSource(tokenizer, num_tokens, shared_prefix_tokens=shared, seed=seed, text=TEXT)


def test_every_prompt_has_the_length_asked_for_in_text_and_in_ids(tokenizer):
    for prompts in source(tokenizer).rounds(3, 4):
        for prompt in prompts:
            assert len(prompt.token_ids) == 40
            assert tokenizer.encode(prompt.text) == list(prompt.token_ids)


def test_no_two_prompts_share_a_page(tokenizer):
    rounds = source(tokenizer).rounds(25, 4)
    first_pages = {prompt.token_ids[:16] for prompts in rounds for prompt in prompts}
    assert len(first_pages) == 100


def test_a_shared_prefix_is_shared_and_nothing_after_it(tokenizer):
    (prompts,) = source(tokenizer, shared=20).rounds(1, 10)
    assert len({prompt.token_ids[:20] for prompt in prompts}) == 1
    assert len({prompt.token_ids[20:] for prompt in prompts}) == 10
    assert {len(prompt.token_ids) for prompt in prompts} == {40}


def test_the_same_seed_gives_the_same_prompts(tokenizer):
    assert source(tokenizer).rounds(2, 2) == source(tokenizer).rounds(2, 2)
    assert source(tokenizer).rounds(2, 2) != source(tokenizer, seed=2).rounds(2, 2)


def test_prompts_too_short_to_differ_are_refused(tokenizer):
    with pytest.raises(BenchmarkError, match="distinct prompts of 1 token"):
        source(tokenizer, num_tokens=1).rounds(1, 500)


def test_a_prefix_must_leave_room_for_a_prompt_of_its_own(tokenizer):
    with pytest.raises(ValueError, match="shared_prefix_tokens"):
        source(tokenizer, shared=40)
