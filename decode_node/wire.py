"""Between the decode worker's messages and the wire's."""

from __future__ import annotations

from decode_node.messages import (
    Accepted,
    AskPrefill,
    AttemptEvent,
    Cancelled,
    Failed,
    FailureCode,
    Finished,
    PeerAccepted,
    PeerDone,
    PeerFailed,
    PeerPages,
    PrefillPeer,
    Rejected,
    Reply,
    StartAttempt,
    Tokens,
)
from engine.sampling import Sampled, SamplingParams
from engine.sequence import FinishReason
from kvstore.refs import PageRef
from kvstore.transport import Card
from protos import common_pb2, worker_pb2
from protos.convert import from_message, to_message

_FINISH = {
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}
_FAILURE = {
    FailureCode.ABORTED: worker_pb2.FAILURE_CODE_ABORTED,
    FailureCode.RESOURCE_EXHAUSTED: worker_pb2.FAILURE_CODE_RESOURCE_EXHAUSTED,
    FailureCode.INVALID: worker_pb2.FAILURE_CODE_INVALID,
    FailureCode.INTERNAL: worker_pb2.FAILURE_CODE_INTERNAL,
}

_CODES = {number: code for code, number in _FAILURE.items()}


def start_attempt(session: str, message: worker_pb2.StartAttempt) -> StartAttempt:
    """Raises ValueError for sampling parameters that the engine refuses."""
    return StartAttempt(
        session=session,
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        params=from_message(message.sampling, SamplingParams),
        tenant_salt=message.tenant_salt,
        peers=tuple(PrefillPeer(peer.node_id, peer.incarnation, peer.address) for peer in message.prefill_peers),
    )


def prefill_start(ask: AskPrefill, model: str, held: list[PageRef], card: Card) -> worker_pb2.PrefillStart:
    return worker_pb2.PrefillStart(
        request_id=ask.request_id,
        attempt=ask.attempt,
        model=model,
        token_ids=ask.token_ids,
        num_prompt_tokens=ask.num_prompt_tokens,
        sampling=to_message(ask.params, common_pb2.SamplingParams),
        tenant_salt=ask.tenant_salt,
        held=[ref.to_proto() for ref in held],
        card=card.to_proto(),
        wanted=[common_pb2.Span(start=span.start, stop=span.stop) for span in ask.wanted],
    )


def from_prefill(
    handover_id: int, response: worker_pb2.PrefillResponse
) -> PeerAccepted | PeerPages | PeerDone | PeerFailed:
    """Raises ValueError for a message without content."""
    match response.WhichOneof("message"):
        case "accepted":
            return PeerAccepted(handover_id, Card.from_proto(response.accepted.card))
        case "pages":
            return PeerPages(handover_id, tuple(PageRef.from_proto(ref) for ref in response.pages.pages))
        case "done":
            done = response.done
            first = sampled(done.first_token, done.first_logprobs if done.HasField("first_logprobs") else None)
            return PeerDone(handover_id, first, done.num_pages, done.computed_tokens)
        case "failed":
            code = _CODES.get(response.failed.code, FailureCode.ABORTED)
            return PeerFailed(handover_id, code, response.failed.message)
    raise ValueError("a response of the prefill worker is empty")


def sampled(token_id: int, logprobs: common_pb2.TokenLogprobs | None) -> Sampled:
    if logprobs is None:
        return Sampled(token_id, None, ())
    return Sampled(token_id, logprobs.logprob, tuple((entry.token_id, entry.logprob) for entry in logprobs.top))


def session_response(reply: Reply) -> worker_pb2.SessionResponse:
    events = [_attempt_event(request_id, attempt, event) for request_id, attempt, event in reply.events]
    return worker_pb2.SessionResponse(step=worker_pb2.StepEvents(events=events))


def _attempt_event(request_id: str, attempt: int, event: AttemptEvent) -> worker_pb2.AttemptEvent:
    message = worker_pb2.AttemptEvent(request_id=request_id, attempt=attempt)
    match event:
        case Accepted():
            message.accepted.cached_tokens = event.cached_tokens
        case Rejected():
            message.rejected.needed_pages = event.needed_pages
            message.rejected.room_pages = event.room_pages
        case Tokens():
            message.tokens.token_ids.extend(token.token_id for token in event.tokens)
            message.tokens.logprobs.extend(
                common_pb2.TokenLogprobs(
                    logprob=token.logprob,
                    top=[common_pb2.TokenLogprob(token_id=t, logprob=value) for t, value in token.top],
                )
                for token in event.tokens
                if token.logprob is not None
            )
        case Finished():
            message.finished.reason = _FINISH[event.reason]
            message.finished.cached_tokens = event.cached_tokens
        case Cancelled():
            message.finished.reason = worker_pb2.FINISH_REASON_CANCELLED
        case Failed():
            message.failed.code = _FAILURE[event.code]
            message.failed.message = event.message
    return message
