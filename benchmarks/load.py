"""Load over HTTP, as a client makes it: the official `openai` client, streaming, in a closed loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai

from benchmarks.errors import LoadError
from benchmarks.prompts import Prompt
from benchmarks.sse import CompletionStream, StreamBroken
from benchmarks.turn import RequestTiming, Turn

REQUEST_DEADLINE_S = 300.0
"""A request that takes longer has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server of the OpenAI API."""

    url: str
    """Without the /v1."""
    model: str


def open_client(target: Target) -> openai.AsyncOpenAI:
    """Keeps connections between requests, and never sends one twice."""
    return openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_DEADLINE_S)


async def complete(
    client: openai.AsyncOpenAI,
    model: str,
    prompt: Prompt,
    output_tokens: int,
    *,
    first_token: asyncio.Event | None = None,
) -> RequestTiming:
    """Stream one completion of exactly `output_tokens` tokens at temperature 0.

    first_token: is set when the first text has come. The events are read as bytes: making an object of each would cost
    the server a part of its cores. Closes the connection if it is cancelled. Raises LoadError.
    """
    stream = CompletionStream()
    sent_s = time.monotonic()
    try:
        async with client.completions.with_streaming_response.create(
            model=model,
            prompt=prompt.text,
            max_tokens=output_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ) as response:
            async for received in response.iter_bytes():
                stream.feed(received, time.monotonic())
                if first_token is not None and stream.first_text_s is not None:
                    first_token.set()
        stream.finish()
    except (openai.OpenAIError, StreamBroken) as error:
        raise LoadError(f"{client.base_url}: {error}") from error
    if stream.first_text_s is None or stream.last_text_s is None or stream.usage is None:
        raise LoadError(f"{client.base_url}: an answer without text or without usage")
    usage = stream.usage
    if usage["completion_tokens"] != output_tokens or usage["prompt_tokens"] != len(prompt.token_ids):
        asked = f"{len(prompt.token_ids)} tokens in and {output_tokens} out"
        raise LoadError(f"{client.base_url}: asked for {asked}, the server counts {usage}")
    return RequestTiming(
        sent_s=sent_s,
        first_token_s=stream.first_text_s,
        ended_s=stream.last_text_s,
        output_tokens=output_tokens,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


async def closed_loop(
    client: openai.AsyncOpenAI, model: str, rounds: Sequence[Sequence[Prompt]], output_tokens: int
) -> Turn:
    """As many streams as a round has prompts; each sends its next request when its last one has ended.

    Raises LoadError if any request fails; the others are given up.
    """

    async def one_stream(prompts: Sequence[Prompt]) -> list[RequestTiming]:
        return [await complete(client, model, prompt, output_tokens) for prompt in prompts]

    cpu_s, begun_s = time.process_time(), time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(one_stream(prompts)) for prompts in zip(*rounds, strict=True)]
    except* LoadError as errors:
        raise errors.exceptions[0] from None
    cores = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
    return Turn(requests=tuple(timing for stream in streams for timing in stream.result()), driver_cores=cores)
