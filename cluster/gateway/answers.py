"""OpenAI's answers: chat completions and completions, whole and as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from cluster.gateway.errors import GatewayError
from cluster.gateway.models import ServedModel
from cluster.gateway.request import Output, Usage
from cluster.gateway.text import ShownToken

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def error_event(error: GatewayError) -> bytes:
    """Ends a stream that cannot be finished: without it a client takes what it has got for the whole answer."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class Answer(ABC):
    """How one request is answered. All of an event but the text is rendered once: there is one event per step."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    text_field: ClassVar[tuple[bytes, bytes]]
    """What stands before and after the text in an event's choice."""

    def __init__(
        self, request_id: str, model: ServedModel, created_unix_s: int, *, with_logprobs: bool, include_usage: bool
    ) -> None:
        """include_usage: the last event but [DONE] has the usage, and the others say null."""
        self._model = model
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._head = {"id": request_id, "created": created_unix_s, "model": model.name}
        opening = b"data: " + orjson.dumps({**self._head, "object": self.chunk_kind})[:-1] + b',"choices":['
        self._before_text = opening + b'{"index":0,' + self.text_field[0]
        self._after_text = self.text_field[1] + b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null}]' + (b',"usage":null' if include_usage else b"") + b"}\n\n"

    @abstractmethod
    def opening(self) -> bytes:
        """Events that come before the first text."""

    @abstractmethod
    def _last_choice(self) -> dict[str, Any]:
        """What the choice with the finish reason holds besides."""

    @abstractmethod
    def _whole_choice(self, text: str) -> dict[str, Any]:
        """What the only choice of a whole answer holds besides."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]: ...

    def events(self, output: Output) -> bytes:
        """The events of one piece; with the last one, everything that ends the stream."""
        events = b""
        piece = output.piece
        if piece.text or (piece.tokens and self._with_logprobs):
            logprobs = orjson.dumps(self._logprobs(piece.tokens)) if self._with_logprobs else b"null"
            events = self._before_text + orjson.dumps(piece.text) + self._after_text + logprobs + self._after_logprobs
        if output.finish_reason is None:
            return events
        choice = {"index": 0, **self._last_choice(), "logprobs": None, "finish_reason": output.finish_reason}
        events += self._event([choice], None)
        if self._include_usage and output.usage is not None:
            events += self._event([], output.usage)
        return events + DONE

    def whole(self, text: str, tokens: Sequence[ShownToken], finish_reason: str, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        logprobs = self._logprobs(tokens) if self._with_logprobs else None
        choice = {"index": 0, **self._whole_choice(text), "logprobs": logprobs, "finish_reason": finish_reason}
        return orjson.dumps({**self._head, "object": self.kind, "choices": [choice], "usage": _usage(usage)})

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        body: dict[str, Any] = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._include_usage:
            body["usage"] = None if usage is None else _usage(usage)
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _token_text(self, token_id: int) -> tuple[str, list[int]]:
        """A token by itself: its text (U+FFFD where it is no whole character) and its bytes."""
        raw = self._model.tokenizer.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), list(raw)


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_field = (b'"delta":{"content":', b"}")

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], None)

    def _last_choice(self) -> dict[str, Any]:
        return {"delta": {}}

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        content = []
        for shown in tokens:
            entry = self._entry(shown.token.token_id, shown.token.logprob)
            content.append(entry | {"top_logprobs": [self._entry(*alternative) for alternative in shown.token.top]})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": raw}


class CompletionAnswer(Answer):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"
    text_field = (b'"text":', b"")

    def opening(self) -> bytes:
        return b""

    def _last_choice(self) -> dict[str, Any]:
        return {"text": ""}

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._token_text(shown.token.token_id)[0] for shown in tokens],
            "token_logprobs": [shown.token.logprob for shown in tokens],
            "top_logprobs": [
                {self._token_text(token_id)[0]: logprob for token_id, logprob in shown.token.top} for shown in tokens
            ],
            "text_offset": [shown.text_offset for shown in tokens],
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
