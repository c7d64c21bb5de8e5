"""`KvStoreService`: a keeper over gRPC."""

from __future__ import annotations

import logging

import grpc

from kvstore.node.keeper import Keeper
from kvstore.node.wire import match_keys, match_response, offered_pages
from kvstore.transport import Card, boot_time_s
from protos import kvstore_pb2, kvstore_pb2_grpc

logger = logging.getLogger(__name__)


class KvStoreService(kvstore_pb2_grpc.KvStoreServiceServicer):
    """A request that makes no sense is answered with INVALID_ARGUMENT. A page that is not here is a miss, no error."""

    def __init__(self, keeper: Keeper, card: Card, offer_deadline_s: float) -> None:
        """card: of the keeper's region. offer_deadline_s: the most that pulling one offer may take."""
        self._keeper = keeper
        self._card = card.to_proto()
        self._offer_deadline_s = offer_deadline_s

    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.MatchResponse:
        try:
            keys = match_keys(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        now_s = boot_time_s()
        lent = self._keeper.match(keys, request.lease_ms / 1000, now_s)
        response = match_response(lent, now_s)
        if lent.pages:
            response.card.CopyFrom(self._card)
        return response

    async def Release(
        self, request: kvstore_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.ReleaseResponse:
        return kvstore_pb2.ReleaseResponse(released=self._keeper.release(request.lease_id))

    async def Offer(
        self, request: kvstore_pb2.OfferRequest, context: grpc.aio.ServicerContext
    ) -> kvstore_pb2.OfferResponse:
        try:
            layout, pages = offered_pages(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # Whoever offers reuses the memory once its own deadline has passed.
        patience_s = context.time_remaining()
        allowed_s = self._offer_deadline_s if patience_s is None else min(patience_s, self._offer_deadline_s)
        plan, written = await self._keeper.offer(
            Card.from_proto(request.card), pages, layout, boot_time_s() + allowed_s
        )
        response = kvstore_pb2.OfferResponse(known=plan.known, refused=plan.refused)
        if written is not None:
            response.stored.extend(written.stored)
            response.refused.extend(written.refused)
        return response
