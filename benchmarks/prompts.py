"""Prompts of an exact length in tokens, out of text that Python itself ships."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError
from engine.tokenizer import Tokenizer

_DISTINCT_TOKENS = 16
"""Two prompts differ within so many tokens, so that they share no page that size or larger."""
_TRIES_PER_PROMPT = 200


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt for engines that take text and for those that take ids."""

    text: str
    token_ids: tuple[int, ...]


class PromptSource:
    """Distinct prompts for ever, the same ones for the same seed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_tokens: int,
        *,
        shared_prefix_tokens: int,
        seed: int,
        text: str | None = None,
    ) -> None:
        """shared_prefix_tokens: how many tokens at the front all prompts have in common.

        text: what they are cut from; None takes half a megabyte of technical English from Python's own documentation.
        """
        if not 0 <= shared_prefix_tokens < num_tokens:
            raise ValueError(f"shared_prefix_tokens must lie in [0, {num_tokens}), got {shared_prefix_tokens}")
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._random = random.Random(seed)
        self._corpus = tokenizer.encode(_documentation() if text is None else text)
        self._num_front = len(tokenizer.encode(""))  # a bos token, where the model wants one
        self._prefix_text = ""
        self._num_shared = shared_prefix_tokens
        self._seen: set[tuple[int, ...]] = set()
        if shared_prefix_tokens:
            self._prefix_text = self._draw("", shared_prefix_tokens).text
        self._prompts = self._endless()

    def rounds(self, num_rounds: int, num_streams: int) -> list[list[Prompt]]:
        """`num_rounds` lists of `num_streams` prompts that were not given before.

        Raises BenchmarkError if the text has no more prompts of this length.
        """
        return [[next(self._prompts) for _ in range(num_streams)] for _ in range(num_rounds)]

    def _endless(self) -> Iterator[Prompt]:
        while True:
            yield self._draw(self._prefix_text, self._num_tokens)

    def _draw(self, front: str, num_tokens: int) -> Prompt:
        shared = self._num_shared if front else 0
        window = num_tokens - (shared or self._num_front)
        for _ in range(_TRIES_PER_PROMPT):
            start = self._random.randrange(max(1, len(self._corpus) - window))
            text = front + self._tokenizer.decode(self._corpus[start : start + window])
            token_ids = tuple(self._tokenizer.encode(text))
            # Where the front meets the window, and where the window cuts a word, tokens can merge into others.
            start_of_own = token_ids[shared : shared + _DISTINCT_TOKENS]
            if len(token_ids) == num_tokens and start_of_own not in self._seen:
                self._seen.add(start_of_own)
                return Prompt(text, token_ids)
        raise BenchmarkError(f"no {len(self._seen) + 1} distinct prompts of {num_tokens} tokens; use longer ones")


def _documentation() -> str:
    return "\n".join(pydoc_data.topics.topics.values())
