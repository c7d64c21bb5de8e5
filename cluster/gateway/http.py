"""The OpenAI HTTP API, and the gateway's own health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from cluster.gateway.ask import Ask, check_fits, check_token_ids
from cluster.gateway.bodies import ChatBody, CompletionBody, OpenAIFields, parse_chat, parse_completion
from cluster.gateway.config import LimitsConfig
from cluster.gateway.disconnect import ClientGone, until_disconnected
from cluster.gateway.errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    Internal,
    InvalidRequest,
    NotFound,
    WrongMediaType,
)
from cluster.gateway.event_stream import EventStream
from cluster.gateway.metrics import Telemetry
from cluster.gateway.models import PromptEncoder, ServedModel, find_model
from cluster.gateway.openapi import describe
from cluster.gateway.request import Generation, Output, Requests


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


class HttpApi:
    """The routes. Everything that can be refused is refused before a generation is opened."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        encoder: PromptEncoder,
        requests: Requests,
        limits: LimitsConfig,
        telemetry: Telemetry,
        not_ready: Callable[[], str | None],
        *,
        keep_alive_s: float,
    ) -> None:
        """not_ready: why no request could be served now, or None."""
        self._models = models
        self._encoder = encoder
        self._requests = requests
        self._limits = limits
        self._telemetry = telemetry
        self._not_ready = not_ready
        self._keep_alive_s = keep_alive_s

    def app(self) -> FastAPI:
        # No pages of documentation: they fetch their scripts from elsewhere.
        app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.list_models, response_model=None)
        app.add_api_route("/v1/models/{name:path}", self.get_model, response_model=None)
        app.add_api_route("/healthz", self.alive, response_model=None)
        app.add_api_route("/health", self.ready, response_model=None)
        app.add_api_route("/readyz", self.ready, response_model=None)
        app.add_api_route("/metrics", self.metrics, response_model=None, response_class=PlainTextResponse)
        app.add_api_route("/openapi.json", self.description, include_in_schema=False)
        app.add_exception_handler(GatewayError, _gateway_error)
        app.add_exception_handler(ClientGone, _client_gone)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(Exception, _bug)
        return app

    async def chat(self, request: Request) -> Response:
        received_s = self._requests.clock()
        body = parse_chat(await self._body(request))
        model = find_model(self._models, body.model)
        ask = await self._chat_ask(model, body)

        def answer(generation: Generation) -> Answer:
            return ChatAnswer(
                f"chatcmpl-{generation.request_id}",
                model,
                int(time.time()),
                with_logprobs=bool(body.logprobs),
                include_usage=body.include_usage,
            )

        return await self._serve(request, body, ask, answer, received_s)

    async def completions(self, request: Request) -> Response:
        received_s = self._requests.clock()
        body = parse_completion(await self._body(request))
        model = find_model(self._models, body.model)
        ask = await self._completion_ask(model, body)

        def answer(generation: Generation) -> Answer:
            return CompletionAnswer(
                f"cmpl-{generation.request_id}",
                model,
                int(time.time()),
                with_logprobs=body.logprobs is not None,
                include_usage=body.include_usage,
            )

        return await self._serve(request, body, ask, answer, received_s)

    async def list_models(self) -> Response:
        return JsonResponse({"object": "list", "data": [_model_fields(model) for model in self._models.values()]})

    async def get_model(self, name: str) -> Response:
        return JsonResponse(_model_fields(find_model(self._models, name)))

    async def alive(self) -> Response:
        return JsonResponse({"status": "alive"})

    async def ready(self) -> Response:
        reason = self._not_ready()
        if reason is not None:
            return JsonResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JsonResponse({"status": "ready"})

    async def description(self, request: Request) -> Response:
        return JsonResponse(describe(request.app))

    async def metrics(self) -> Response:
        return Response(self._telemetry.exposition(), media_type=self._telemetry.content_type)

    async def _chat_ask(self, model: ServedModel, body: ChatBody) -> Ask:
        limit = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        max_tokens = body.max_completion_tokens or body.max_tokens
        check_token_ids(model, map(int, body.logit_bias or ()), param="logit_bias")
        token_ids = await self._encoder.chat(model, [message.for_template() for message in body.messages])
        check_fits(model, len(token_ids), max_tokens, prompt="messages", limit=limit)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        return Ask(
            operation="chat",
            model=model,
            token_ids=token_ids,
            sampling=body.sampling(max_tokens=max_tokens, top_logprobs=top_logprobs),
            stop=body.stop_strings,
        )

    async def _completion_ask(self, model: ServedModel, body: CompletionBody) -> Ask:
        prompt = body.single_prompt
        check_token_ids(model, map(int, body.logit_bias or ()), param="logit_bias")
        if isinstance(prompt, str):
            token_ids = await self._encoder.text(model, prompt)
        else:
            check_token_ids(model, prompt, param="prompt")
            token_ids = prompt
        check_fits(model, len(token_ids), body.max_tokens, prompt="prompt", limit="max_tokens")
        return Ask(
            operation="text_completion",
            model=model,
            token_ids=token_ids,
            sampling=body.sampling(
                max_tokens=body.max_tokens, top_logprobs=-1 if body.logprobs is None else body.logprobs
            ),
            stop=body.stop_strings,
        )

    async def _serve(
        self,
        request: Request,
        body: OpenAIFields,
        ask: Ask,
        make_answer: Callable[[Generation], Answer],
        received_s: float,
    ) -> Response:
        generation = self._requests.open(ask, received_s)
        try:
            answer = make_answer(generation)
            if body.stream:
                # Placed before the first byte goes out, so that a refusal has its own status.
                await until_disconnected(request.receive, generation.admit())
                return EventStream(generation, answer, self._keep_alive_s)
            with generation:
                whole = await until_disconnected(request.receive, _whole(generation, answer))
                return JsonResponse(whole, headers={"x-request-id": generation.request_id})
        except BaseException as error:
            generation.close(error)
            raise

    async def _body(self, request: Request) -> bytes:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise WrongMediaType(f"The content type must be application/json, got {media_type or 'none'!r}")
        limit = self._limits.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for chunk in _chunks(request, limit):
                    body += chunk
                    if len(body) > limit:
                        raise BodyTooLarge(f"The body is over {limit} bytes")
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise BodyTimeout(f"The body did not come within {self._limits.body_timeout_s:.0f} s") from None
        return bytes(body)


async def _chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(f"The body is over {limit} bytes")
    async for chunk in request.stream():
        yield chunk


async def _whole(generation: Generation, answer: Answer) -> bytes:
    await generation.admit()
    outputs: list[Output] = []
    async with contextlib.aclosing(generation.outputs()) as stream:
        async for output in stream:
            outputs.append(output)
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    text = "".join(output.piece.text for output in outputs)
    tokens = [token for output in outputs for token in output.piece.tokens]
    return answer.whole(text, tokens, last.finish_reason, last.usage)


def _model_fields(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.loaded_unix_s,
        "owned_by": "headrace",
        "max_model_len": model.context_tokens,
    }


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    headers = error.headers()
    if isinstance(error, BodyTooLarge | BodyTimeout | WrongMediaType):
        headers["connection"] = "close"  # the body has not been read, and is not going to be
    return JsonResponse(error.body(), status_code=error.status, headers=headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # read by nobody


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or the wrong method for it, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    shape = NotFound(message, code="unknown_url") if error.status_code == 404 else InvalidRequest(message)
    return JsonResponse(shape.body(), status_code=error.status_code, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again, so that the server logs its traceback."""
    shape = Internal("The gateway failed on this request")
    return JsonResponse(shape.body(), status_code=shape.status, headers=shape.headers())
