"""Between the prefill worker's messages and the wire's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.sampling import Sampled, SamplingParams
from engine.sequence import Span
from kvstore.refs import PageRef
from kvstore.transport import Card
from prefill_node.messages import Complete, Fail, ReadyPage, StartHandover
from protos import common_pb2, worker_pb2
from protos.convert import from_message


def start_handover(handover: str, message: worker_pb2.PrefillStart) -> StartHandover:
    """Raises ValueError for sampling parameters that the engine refuses."""
    return StartHandover(
        handover=handover,
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        params=from_message(message.sampling, SamplingParams),
        tenant_salt=message.tenant_salt,
        held=tuple(PageRef.from_proto(ref) for ref in message.held),
        card=Card.from_proto(message.card),
        wanted=tuple(Span(span.start, span.stop) for span in message.wanted),
    )


def accepted(card: Card) -> worker_pb2.PrefillResponse:
    return worker_pb2.PrefillResponse(accepted=worker_pb2.PrefillAccepted(card=card.to_proto()))


def pages_ready(
    pages: Sequence[ReadyPage], digests: npt.NDArray[np.uint64], page_bytes: int
) -> worker_pb2.PrefillResponse:
    """digests: uint64 [n, num_kv_heads], one row per page."""
    refs = [
        common_pb2.PageRef(
            page_index=page.page_index,
            key=page.key,
            offset_bytes=page.page * page_bytes,
            num_bytes=page_bytes,
            digests=row.tolist(),
            valid_tokens=page.valid_tokens,
        )
        for page, row in zip(pages, digests, strict=True)
    ]
    return worker_pb2.PrefillResponse(pages=worker_pb2.PagesReady(pages=refs))


def done(instruction: Complete) -> worker_pb2.PrefillResponse:
    return worker_pb2.PrefillResponse(
        done=worker_pb2.PrefillDone(
            first_token=instruction.first.token_id,
            first_logprobs=_logprobs(instruction.first),
            num_pages=instruction.num_pages,
            computed_tokens=instruction.computed_tokens,
        )
    )


def failed(instruction: Fail) -> worker_pb2.PrefillResponse:
    code = f"FAILURE_CODE_{instruction.code.upper()}"
    return worker_pb2.PrefillResponse(failed=worker_pb2.PrefillFailed(code=code, message=instruction.message))


def _logprobs(token: Sampled) -> common_pb2.TokenLogprobs | None:
    if token.logprob is None:
        return None
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in token.top]
    return common_pb2.TokenLogprobs(logprob=token.logprob, top=top)
