"""What becomes of a model's predictions when the pages of a whole prefix went through a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kv_chunks import Chunk
from engine import Model, Segment
from kvstore.codecs import Codec, Loss

_ROWS_PER_STEP = 64
"""Scored at once: their logits are 200 kB each."""
_RESAMPLES = 4000
_SEED = 7

Pages = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ChunkScore:
    """One codec on one chunk; sums over its scored tokens."""

    kind: str
    num_tokens: int
    kl: float
    """KL divergence from the exact predictions, in nats."""
    log_likelihood_lost: float
    """Of the text itself, in nats."""
    num_same_top: int
    """Tokens at which the likeliest one is still the same."""
    stored_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over all scored tokens, with 95 % of its bootstrap over chunks."""

    mean: float
    low: float
    high: float


class Scorer:
    """One model and one pool, for chunks of one size."""

    def __init__(self, model: Model, page_size: int, num_tokens: int) -> None:
        """num_tokens: of a chunk, prefix and rest."""
        self._model = model
        self.layout = model.layout(page_size)
        self._pool = np.zeros((self.layout.pages_for(num_tokens), self.layout.page_bytes), np.uint8)
        self._table = list(range(len(self._pool)))
        model.bind(self._pool, self.layout)

    def prefix_pages(self, chunk: Chunk) -> Pages:
        """Computed anew: uint8 [n, page_bytes], a copy. The prefix must end with a page."""
        num_pages, over = divmod(len(chunk.prefix), self.layout.page_size)
        assert not over
        self._model.forward([Segment(chunk.prefix, 0, self._table, False)])
        return self._pool[:num_pages].copy()

    def scores(self, chunk: Chunk, codecs: Mapping[str, Codec]) -> dict[str, ChunkScore]:
        """By name of the codec."""
        exact = self.prefix_pages(chunk)
        expected = self._log_probabilities(chunk)
        text = torch.tensor(chunk.rest[1:])
        found = {}
        for name, codec in codecs.items():
            stored_bytes = 0
            for page, before in zip(self._pool, exact, strict=False):
                stored = np.frombuffer(codec.encode(before, self.layout), np.uint8)
                codec.decode(stored, page, self.layout)
                stored_bytes += len(stored)
            if codec.loss is Loss.NONE:
                assert np.array_equal(self._pool[: len(exact)], exact)
            got = self._log_probabilities(chunk)
            found[name] = ChunkScore(
                kind=chunk.kind,
                num_tokens=len(text),
                kl=float((expected.exp() * (expected - got)).sum()),
                log_likelihood_lost=float((expected - got).gather(1, text[:, None]).sum()),
                num_same_top=int((expected.argmax(-1) == got.argmax(-1)).sum()),
                stored_bytes=stored_bytes,
                page_bytes=exact.nbytes,
            )
        return found

    def _log_probabilities(self, chunk: Chunk) -> torch.Tensor:
        """float32 [scored tokens, vocab], after the prefix that the pool holds."""
        start = len(chunk.prefix)
        pieces = []
        for first in range(0, len(chunk.rest) - 1, _ROWS_PER_STEP):
            rows = range(first, min(first + _ROWS_PER_STEP, len(chunk.rest) - 1))
            # A segment for each row, since only a segment's last position has logits.
            logits = self._model.forward([Segment([chunk.rest[row]], start + row, self._table, True) for row in rows])
            pieces.append(torch.log_softmax(logits.float(), dim=-1))
        return torch.cat(pieces)


def interval(sums: Sequence[float], num_tokens: Sequence[int]) -> Interval:
    """sums, num_tokens: one of each per chunk. Tokens of a chunk depend on one another, chunks hardly do."""
    total, count = np.asarray(sums), np.asarray(num_tokens)
    picks = np.random.default_rng(_SEED).integers(0, len(total), (_RESAMPLES, len(total)))
    means = total[picks].sum(axis=1) / count[picks].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(total.sum() / count.sum()), float(low), float(high))
