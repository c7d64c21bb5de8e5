"""The models that a gateway serves: names, limits and tokenizers. Never weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.gateway.errors import InvalidRequest, NotFound
from engine.config import load_config
from engine.errors import BrokenChat
from engine.source import ModelSource
from engine.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """One model as clients know it."""

    name: str
    context_tokens: int
    """Most positions of one request, prompt and output together."""
    vocab_size: int
    """Token ids are below it."""
    tokenizer: Tokenizer
    loaded_unix_s: int


def load_models(sources: Sequence[ModelSource]) -> dict[str, ServedModel]:
    """Read configs and tokenizers, by name in the order of `sources`. Slow: call it on a thread.

    Raises engine.errors.EngineError.
    """
    models: dict[str, ServedModel] = {}
    for source in sources:
        config = load_config(source)
        models[source.name] = ServedModel(
            name=source.name,
            context_tokens=config.context_tokens,
            vocab_size=config.vocab_size,
            tokenizer=load_tokenizer(source),
            loaded_unix_s=int(time.time()),
        )
    return models


class PromptEncoder:
    """Turns prompts into token ids: short ones at once, long ones on a thread, since streams must go on meanwhile."""

    def __init__(self, *, off_loop_chars: int) -> None:
        self._off_loop_chars = off_loop_chars
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    async def text(self, model: ServedModel, text: str) -> list[int]:
        return await self._run(len(text), lambda: model.tokenizer.encode(text))

    async def chat(self, model: ServedModel, messages: list[dict[str, Any]]) -> list[int]:
        """Raises InvalidRequest if the model's chat template refuses the messages."""
        num_chars = sum(len(message["content"]) for message in messages)
        try:
            return await self._run(num_chars, lambda: model.tokenizer.encode_chat(messages))
        except BrokenChat as error:
            raise InvalidRequest(str(error), param="messages", code="invalid_value") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, num_chars: int, encode: Callable[[], T]) -> T:
        if num_chars <= self._off_loop_chars:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """Raises NotFound in OpenAI's words."""
    model = models.get(name)
    if model is None:
        raise NotFound(f"the model {name!r} does not exist", param="model", code="model_not_found")
    return model
