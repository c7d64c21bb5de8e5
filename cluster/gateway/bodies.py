"""Request bodies: what clients may write, field by field, and what is wrong with what they wrote."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from cluster.gateway import unsupported
from cluster.gateway.ask import Sampling
from cluster.gateway.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)

MAX_STOP_CHARS = 1024
"""Of one stop string: the output is held back by as much."""
MAX_LOGIT_BIASES = 1024
SMALLEST_FLOAT32 = 2.0**-126
"""Positive and normal: arithmetic that flushes subnormal numbers leaves it alone."""


def _token_biases(value: dict[str, float]) -> dict[str, float]:
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise PydanticCustomError(
                "invalid_value", "keys must be token ids, got {key}", {"key": repr(token_id[:40])}
            )
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "values must be from -100 to 100, got {value}", {"value": bias})
    return value


def _float32(value: float) -> float:
    """As workers get it: the wire has 32 bits, in which numbers below 1e-45 are 0."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _top_p(value: float) -> float:
    """0 keeps the likeliest token alone, as does any other number that is small enough."""
    return max(_float32(value), SMALLEST_FLOAT32)


def _one_or_many(value: Any) -> str:
    return "~many" if isinstance(value, list) else "~one"


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("~one")] | Annotated[list[StopString], Field(max_length=4), Tag("~many")],
    Discriminator(_one_or_many),
]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES), AfterValidator(_token_biases)]


class StrictModel(BaseModel):
    """Types are taken as written (no "5" for 5), numbers are finite, unknown fields are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class SamplingFields(StrictModel):
    """What HTTP and gRPC clients may say about sampling. Null, or nothing, is OpenAI's default."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(_top_p)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=10)] | None = None
    """Logits are divided by it: much smaller ones would overflow."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, *, max_tokens: int | None, top_logprobs: int) -> Sampling:
        """With the seed fixed, so that a new attempt goes on as the lost one would have."""
        given: dict[str, Any] = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "ignore_eos",
            )
            if (value := getattr(self, name)) is not None
        }
        seed = random.getrandbits(64) if self.seed is None else self.seed % 2**64
        return Sampling(
            **given,
            top_k=max(self.top_k or 0, 0),
            seed=seed,
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            top_logprobs=top_logprobs,
            max_tokens=max_tokens or 0,
        )


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class OpenAIFields(SamplingFields):
    """What both endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("~one")] | Annotated[list[TextPart], Field(min_length=1), Tag("~many")],
    Discriminator(_one_or_many),
]


class Message(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: one text, and "system" for its newer name."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(OpenAIFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "~one"
    if value and isinstance(value[0], str):
        return "~many"
    return "~lists" if value and isinstance(value[0], list) else "~ids"


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("~one")]
    | Annotated[list[str], Tag("~many")]
    | Annotated[TokenIds, Tag("~ids")]
    | Annotated[list[TokenIds], Tag("~lists")],
    Discriminator(_prompt_kind),
]


class CompletionBody(OpenAIFields):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def single_prompt(self) -> str | list[int]:
        """Raises InvalidRequest if there are several."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], int):
            return prompt  # type: ignore[return-value]
        if len(prompt) > 1:
            raise InvalidRequest(
                f"only one prompt per request is supported, got {len(prompt)}", param="prompt", code="unsupported_value"
            )
        return prompt[0]


def parse_chat(raw: bytes) -> ChatBody:
    """Raises InvalidRequest naming the field."""
    fields = _object(raw)
    unsupported.refuse(fields, unsupported.IN_CHAT)
    messages = fields.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                unsupported.refuse(message, unsupported.IN_MESSAGES, prefix=f"messages[{index}].")
    body = validate(ChatBody, fields)
    _check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("contradicts max_completion_tokens", param="max_tokens", code="invalid_value")
    return body


def parse_completion(raw: bytes) -> CompletionBody:
    """Raises InvalidRequest naming the field."""
    fields = _object(raw)
    unsupported.refuse(fields, unsupported.IN_COMPLETIONS)
    body = validate(CompletionBody, fields)
    _check_stream_options(body)
    return body


def validate(model: type[Body], fields: Mapping[str, Any]) -> Body:
    """Raises InvalidRequest that names the first field at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _param(first["loc"])
        raise InvalidRequest(first["msg"], param=param, code=_code(first["type"])) from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("The body must be a JSON object", code="invalid_json")
    return fields


def _check_stream_options(body: OpenAIFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("needs stream to be true", param="stream_options", code="invalid_value")


def _param(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "~many", 1) is messages[0].content[1]."""
    param = ""
    for part in loc:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not part.startswith("~"):
            param += f".{part}" if param else part
    return param


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
