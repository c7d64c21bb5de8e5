"""The next token of each row: filters, then `argmax(logits / T + Gumbel(seed, choice, output index))`.

No state and no neighbour has a part in it, so a request that moves to another node, or is batched differently, goes on
with the same text. The order of the steps: bias, penalties, temperature, min-p, top-k, top-p, noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine import noise


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. The defaults are greedy."""

    temperature: float = 0.0
    """0 is greedy, and so is anything below 1e-5."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    """1 keeps every token."""
    min_p: float = 0.0
    """Least probability of a token relative to the most probable one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 leaves them alone."""
    presence_penalty: float = 0.0
    """Taken off once from each token in the output."""
    frequency_penalty: float = 0.0
    """Taken off for each time that a token is in the output."""
    seed: int = 0
    """Unsigned 64 bit."""
    choice: int = 0
    """Which of the request's choices this is; part of the counter of the noise."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    top_logprobs: int = -1
    """How many alternatives to report per token; -1 reports none, 0 the chosen token alone."""
    max_tokens: int = 16
    """Most output tokens; 0 sets no limit but the context's."""
    stop_token_ids: tuple[int, ...] = ()
    """End the text like the model's own end tokens."""
    ignore_eos: bool = False
    """Go on behind the model's end tokens, up to max_tokens."""

    def __post_init__(self) -> None:
        self._check("temperature", 0.0, math.inf)
        self._check("top_k", 0, math.inf)
        self._check("top_p", 0.0, 1.0)
        self._check("min_p", 0.0, 1.0)
        self._check("repetition_penalty", 0.0, 1e6)
        self._check("presence_penalty", -1e6, 1e6)
        self._check("frequency_penalty", -1e6, 1e6)
        self._check("seed", 0, 2**64 - 1)
        self._check("choice", 0, 2**32 - 1)
        self._check("top_logprobs", -1, math.inf)
        self._check("max_tokens", 0, math.inf)
        if self.top_p == 0.0 or self.repetition_penalty == 0.0:
            raise ValueError("top_p and repetition_penalty must be > 0")
        if not all(-1e6 <= bias <= 1e6 for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must be numbers in [-1e6, 1e6]")

    def _check(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not least <= value <= most or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number in [{least}, {most}], got {value}")


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the logits of one row are for."""

    params: SamplingParams
    token_ids: Sequence[int]
    """Prompt and output so far."""
    num_prompt_tokens: int

    @property
    def output_index(self) -> int:
        """Place in the output of the token that is chosen now, from 0."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, or why there is none."""

    token_id: int
    """-1 if there is an error."""
    logprob: float | None = None
    """Of the model's unchanged distribution; None if not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable (token id, logprob), best first, as many as asked for."""
    error: str | None = None
    """Why this row alone could not be sampled."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """One token per row. logits: float32 [len(rows), vocab], not changed. A bad row is an error of that row alone."""
    values = logits.numpy()
    assert len(values) == len(rows), (values.shape, len(rows))
    return [_sample_row(row_logits, row) for row_logits, row in zip(values, rows, strict=True)]


def _sample_row(raw: np.ndarray, row: SamplingRow) -> Sampled:
    if not math.isfinite(float(raw.sum(dtype=np.float64))):
        return Sampled(-1, error="the model's logits are not finite")
    if any(not 0 <= token_id < len(raw) for token_id in row.params.logit_bias):
        return Sampled(-1, error=f"logit_bias names a token outside the vocabulary of {len(raw)}")
    token_id = _choose(_penalised(raw, row), row)
    if row.params.top_logprobs < 0:
        return Sampled(token_id)
    highest = float(raw.max())
    total = highest + math.log(np.exp(raw.astype(np.float64) - highest).sum())
    top = [(int(i), float(raw[i]) - total) for i in _largest(raw, min(row.params.top_logprobs, len(raw)))]
    return Sampled(token_id, float(raw[token_id]) - total, tuple(top))


def _penalised(raw: np.ndarray, row: SamplingRow) -> np.ndarray:
    """float32 [vocab]: `raw` itself where nothing is to be changed."""
    params = row.params
    logits = raw
    if params.logit_bias:
        logits = logits.copy()
        for token_id, bias in params.logit_bias.items():
            logits[token_id] += bias
    if params.repetition_penalty != 1.0:
        logits = logits.copy()
        seen = np.unique(np.asarray(row.token_ids, np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        logits = logits.copy()
        output = np.asarray(row.token_ids[row.num_prompt_tokens :], np.int64)
        seen, counts = np.unique(output, return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    return logits


def _choose(logits: np.ndarray, row: SamplingRow) -> int:
    params = row.params
    if params.temperature < 1e-5:  # as good as greedy, and dividing by it could overflow
        return int(logits.argmax())  # the lowest id among equals
    start = noise.stream(params.seed, params.choice, row.output_index)
    return noise.choose(logits, params.temperature, _filtered(logits, params), start)


def _filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """int64 [n], ascending: ids of the tokens that may be chosen. The likeliest is one of them."""
    kept = np.arange(len(logits))
    if params.min_p > 0.0:
        kept = np.flatnonzero(logits >= logits.max() + params.temperature * math.log(params.min_p))
    if 0 < params.top_k < len(kept):
        kept = np.sort(kept[_largest(logits[kept], params.top_k)])
    if params.top_p < 1.0:
        mass = np.exp((logits[kept].astype(np.float64) - float(logits.max())) / params.temperature)
        needed = params.top_p * mass.sum()
        # Tokens lighter than this make up less than 1 - top_p together: they need not be sorted.
        heavy = np.flatnonzero(mass >= (mass.sum() - needed) / len(mass))
        order = heavy[np.argsort(-mass[heavy], kind="stable")]
        count = int(np.searchsorted(np.cumsum(mass[order]), needed)) + 1
        kept = np.sort(kept[order[:count]])
    return kept


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: where the largest values are, best first; the lowest index among equals."""
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]
