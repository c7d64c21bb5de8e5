"""A worker's dealings with storage nodes: bring pages in, write cold ones out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from kvstore.arena import Arena, Extent
from kvstore.client import KvClient, NodeMatch, OfferOutcome, PageOffer
from kvstore.codecs import EXACT
from kvstore.owners import fragment_pages
from kvstore.pages import ColdPage
from kvstore.plane import PagePlane
from kvstore.stored import StoredPage, restore
from kvstore.transport import boot_time_s

logger = logging.getLogger(__name__)

_ANSWER_SHARE = 0.5
"""Of the time until a fetch's deadline: how long owners may take to answer. What others lend is pulled meanwhile, and
counts only if the fetch returns before its deadline, so a silent owner must be given up earlier."""
_OFFER_DEADLINE_S = 10.0
"""Seconds for an owner to read what it was offered. The pages stay pinned meanwhile."""


class StoredPages:
    """Belongs to the event loop's thread; decoding and digests run on others.

    Nothing here raises for what a node does.
    """

    def __init__(self, plane: PagePlane, client: KvClient) -> None:
        self._plane = plane
        self._client = client
        self._staging = Arena(plane.region[plane.pool_bytes :])
        self._fragment_pages = fragment_pages(plane.layout.page_size)

    async def fetch(
        self, keys: Sequence[bytes], wanted: Mapping[bytes, int], *, deadline_s: float, lossiest: str = EXACT
    ) -> frozenset[int]:
        """Bring stored pages into the pool.

        keys: of the prompt's pages from position 0 on. wanted: page ids of the pool by key; they belong to this call
        until it returns, which is when nothing can land in them any more. deadline_s: instant of `boot_time_s`.
        lossiest: the worst lineage that serves the request.
        Returns the page ids that hold what their key says, up to what the page's lineage has lost.
        """
        indices = [index for index, key in enumerate(keys) if key in wanted]
        now_s = boot_time_s()
        answers = self._client.matches(
            keys,
            self._fragment_pages,
            deadline_s=now_s + (deadline_s - now_s) * _ANSWER_SHARE,
            wanted=indices,
            lossiest=lossiest,
        )
        bringing: list[asyncio.Task[set[int]]] = []
        try:
            async with contextlib.aclosing(answers):
                async for match in answers:
                    work = self._bring(match, wanted, deadline_s)
                    bringing.append(asyncio.create_task(work, name=f"pages from {match.node_id}"))
            # All of them, whatever becomes of one: others may still be writing into the pages.
            outcomes = await asyncio.gather(*bringing, return_exceptions=True)
        finally:
            for task in bringing:
                task.cancel()
        filled: set[int] = set()
        for task, outcome in zip(bringing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                logger.error("%s are misses", task.get_name(), exc_info=outcome)
            else:
                filled |= outcome
        return frozenset(filled)

    async def offer(self, cold: Sequence[ColdPage]) -> OfferOutcome:
        """Offer pages to their owners. When this returns, nobody reads them any more, or what is read is discarded."""
        digests = await asyncio.to_thread(self._plane.digests, [entry.page for entry in cold])
        layout = self._plane.layout
        offers = [
            PageOffer(
                key=entry.key,
                parent_key=entry.parent,
                fragment_key=entry.fragment_key,
                offset_bytes=self._plane.cache.offset_bytes(entry.page),
                num_bytes=layout.page_bytes,
                digests=tuple(row.tolist()),
            )
            for entry, row in zip(cold, digests, strict=True)
        ]
        deadline_s = boot_time_s() + _OFFER_DEADLINE_S
        outcome = await self._client.offer(offers, self._plane.card, layout, deadline_s=deadline_s)
        if outcome.refused:
            logger.info("%d of %d cold pages found no place in the KV store", len(outcome.refused), len(cold))
        return outcome

    async def _bring(self, match: NodeMatch, wanted: Mapping[bytes, int], deadline_s: float) -> set[int]:
        """Pull what one node lends, and decode it."""
        try:
            return await self._pull(match, wanted, min(deadline_s, match.valid_until_s))
        finally:
            await self._client.release(match)

    async def _pull(self, match: NodeMatch, wanted: Mapping[bytes, int], deadline_s: float) -> set[int]:
        staged: list[tuple[StoredPage, Extent]] = []
        for page in match.pages.values():
            extent = self._staging.allocate(page.num_bytes)
            if extent is None:
                break  # The rest is computed; a prompt larger than the staging area gains most from its first pages.
            staged.append((page, extent))
        if not staged:
            return set()
        # If this wait is cancelled the staging extents stay taken, since bytes may still land in them.
        settled = await self._plane.pull(
            match.card,
            [page.offset_bytes for page, _ in staged],
            [self._plane.pool_bytes + extent.offset_bytes for _, extent in staged],
            [page.num_bytes for page, _ in staged],
            deadline_s=deadline_s,
        )
        try:
            if settled.error is not None:
                logger.info("pages from storage node %s: %s", match.node_id, settled.error)
                return set()
            return await asyncio.to_thread(self._decode, staged, wanted)
        finally:
            for _, extent in staged:
                self._staging.free(extent)

    def _decode(self, staged: Sequence[tuple[StoredPage, Extent]], wanted: Mapping[bytes, int]) -> set[int]:
        """Page ids whose bytes are restored."""
        return {
            wanted[page.key]
            for page, extent in staged
            if restore(page, self._staging.view(extent), self._plane.cache.pages[wanted[page.key]], self._plane.layout)
        }
