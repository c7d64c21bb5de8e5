"""What a client asked for, checked and in the gateway's own terms, whichever way it came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.gateway.errors import InvalidRequest
from cluster.gateway.models import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen. The values of a client that says nothing are OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Unsigned, 64 bit."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = -1
    """Alternatives per token: -1 reports nothing, 0 the chosen token alone."""
    max_tokens: int = 0
    """Of output, over all attempts. 0: to the end of the context."""
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request that may be queued."""

    operation: Literal["chat", "text_completion"]
    model: ServedModel
    token_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()

    @property
    def max_output_tokens(self) -> int:
        """Where the output ends at the latest."""
        room = self.model.context_tokens - len(self.token_ids)
        return min(self.sampling.max_tokens, room) if self.sampling.max_tokens else room


def check_fits(model: ServedModel, num_prompt_tokens: int, max_tokens: int | None, *, prompt: str, limit: str) -> None:
    """Raises InvalidRequest unless the prompt, and the output that was asked for, fit into the model's context.

    prompt, limit: names of the fields at fault.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param=prompt, code="invalid_value")
    if num_prompt_tokens + (max_tokens or 1) <= model.context_tokens:
        return
    wanted = f"{num_prompt_tokens} in the prompt"
    if max_tokens is not None:
        wanted = f"{num_prompt_tokens + max_tokens} tokens ({wanted}, {max_tokens} for the output)"
    else:
        wanted = f"{wanted}, and one for the output"
    raise InvalidRequest(
        f"this model's context is {model.context_tokens} tokens; you asked for {wanted}",
        param=prompt if num_prompt_tokens >= model.context_tokens else limit,
        code="context_length_exceeded",
    )


def check_token_ids(model: ServedModel, token_ids: Iterable[int], *, param: str) -> None:
    """Raises InvalidRequest if one of them is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{token_id} is not a token id; there are {model.vocab_size}", param=param, code="invalid_value"
            )
