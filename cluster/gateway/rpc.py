"""`headrace.v1.InferenceService`: the same requests over gRPC."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import NoReturn

import grpc

from cluster.gateway.ask import Ask, check_fits, check_token_ids
from cluster.gateway.bodies import Message, SamplingFields, validate
from cluster.gateway.errors import GatewayError, Internal, InvalidRequest
from cluster.gateway.models import PromptEncoder, ServedModel, find_model
from cluster.gateway.request import Generation, Output, Requests
from protos import common_pb2, inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

MAX_TOP_LOGPROBS = 20


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Generate and ListModels. A call's deadline, or its client's leaving, cancels the generation at once."""

    def __init__(self, models: Mapping[str, ServedModel], encoder: PromptEncoder, requests: Requests) -> None:
        self._models = models
        self._encoder = encoder
        self._requests = requests

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(name=model.name, context_tokens=model.context_tokens)
                for model in self._models.values()
            ]
        )

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        received_s = self._requests.clock()
        try:
            ask = await self._ask(request)
            with self._requests.open(ask, received_s) as generation:
                await generation.admit()
                async with contextlib.aclosing(generation.outputs()) as outputs:
                    async for output in outputs:
                        await context.write(_response(generation, output))
        except GatewayError as error:
            await _abort(context, error)
        except Exception:
            logger.exception("a call of Generate failed")
            await _abort(context, Internal("The gateway failed on this request"))

    async def _ask(self, request: inference_pb2.GenerateRequest) -> Ask:
        model = find_model(self._models, request.model)
        fields = {
            name: getattr(request, name)
            for name in (
                "max_tokens",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "seed",
            )
            if request.HasField(name)
        }
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
        fields["stop"] = list(request.stop)
        fields["ignore_eos"] = request.ignore_eos
        sampling = validate(SamplingFields, fields)
        top_logprobs = request.top_logprobs if request.HasField("top_logprobs") else -1
        if top_logprobs > MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"must be at most {MAX_TOP_LOGPROBS}, got {top_logprobs}", param="top_logprobs")
        check_token_ids(model, request.logit_bias, param="logit_bias")
        prompt, token_ids = await self._prompt(model, request)
        check_fits(model, len(token_ids), sampling.max_tokens, prompt=prompt, limit="max_tokens")
        return Ask(
            operation="chat" if prompt == "chat" else "text_completion",
            model=model,
            token_ids=token_ids,
            sampling=sampling.sampling(max_tokens=sampling.max_tokens, top_logprobs=top_logprobs),
            stop=sampling.stop_strings,
        )

    async def _prompt(self, model: ServedModel, request: inference_pb2.GenerateRequest) -> tuple[str, list[int]]:
        """The name of the field that holds the prompt, and its token ids."""
        match request.WhichOneof("prompt"):
            case "text":
                return "text", await self._encoder.text(model, request.text)
            case "token_ids":
                token_ids = list(request.token_ids.token_ids)
                check_token_ids(model, token_ids, param="token_ids")
                return "token_ids", token_ids
            case "chat":
                if not request.chat.messages:
                    raise InvalidRequest("must not be empty", param="chat.messages")
                messages = []
                for index, message in enumerate(request.chat.messages):
                    try:
                        fields = {"role": message.role, "content": message.content}
                        messages.append(validate(Message, fields).for_template())
                    except InvalidRequest as error:
                        param = f"chat.messages[{index}].{error.param}"
                        raise InvalidRequest(error.message, param=param, code=error.code) from None
                return "chat", await self._encoder.chat(model, messages)
            case _:
                raise InvalidRequest("one of text, token_ids and chat must be set", param="prompt")


def _response(generation: Generation, output: Output) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        text=output.piece.text,
        token_ids=[shown.token.token_id for shown in output.piece.tokens],
        finish_reason=output.finish_reason or "",
    )
    for shown in output.piece.tokens:
        if shown.token.logprob is not None:
            top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in shown.token.top]
            response.logprobs.append(common_pb2.TokenLogprobs(logprob=shown.token.logprob, top=top))
    if output.usage is not None:
        response.usage.prompt_tokens = output.usage.prompt_tokens
        response.usage.completion_tokens = output.usage.output_tokens
        response.usage.cached_tokens = output.usage.cached_tokens
    return response


async def _abort(context: grpc.aio.ServicerContext, error: GatewayError) -> NoReturn:
    """gRPC's retry policies read the pushback: when to try again, or, if negative, not to."""
    headers = error.headers()
    metadata: tuple[tuple[str, str], ...] = ()
    if "retry-after-ms" in headers:
        metadata = (("grpc-retry-pushback-ms", headers["retry-after-ms"]),)
    elif isinstance(error, Internal):
        metadata = (("grpc-retry-pushback-ms", str(-1)),)
    await context.abort(error.grpc_code, error.text, trailing_metadata=metadata)
    raise AssertionError("abort always raises")
