"""What a worker says to the storage nodes: who owns which page, asked and told in parallel, never waiting for one node.

A node that is dead, silent or late is a miss. Nothing here moves page bytes: the receiver pulls them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.codecs import EXACT, is_within
from kvstore.owners import by_owner, owner
from kvstore.pages import PageLayout
from kvstore.stored import StoredPage, codec_to_proto, layout_to_proto
from kvstore.transport import Card, boot_time_s
from protos import control_pb2, kvstore_pb2, kvstore_pb2_grpc
from protos.serving import connect

logger = logging.getLogger(__name__)

_MAX_BYTES = (1 << 63) - 1
"""What a signed offset can say; the wire's are unsigned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvClientConfig:
    """How long storage nodes are trusted."""

    lease_s: float = 5.0
    """Hold asked for with a match; pulling a prompt's pages takes far less."""
    lease_margin_s: float = 0.25
    """A lease counts as over so long before it is, for clocks that run differently and pulls that are noticed late."""
    late_s: float = 5.0
    """How long after its deadline an answer to a match is still awaited, in order to give its lease back."""
    release_deadline_s: float = 2.0
    """Seconds for one release; a lost one costs the node until the lease ends by itself."""
    silence_s: float = 1.0
    """A node that let a deadline pass is not asked again for so long, lest every request waits for it."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "release_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("late_s", "silence_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not 0 <= self.lease_margin_s < self.lease_s:
            raise ValueError(f"lease_margin_s must be in [0, lease_s), got {self.lease_margin_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMatch:
    """Pages that one storage node lends. To be given to `KvClient.release` once no pull of them is unsettled."""

    node_id: str
    lease_id: str
    card: Card
    valid_until_s: float
    """Instant of `boot_time_s`. A pull that settles later does not count; the deadline of a pull may not be later."""
    pages: Mapping[int, StoredPage]
    """By page index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOffer:
    """A page in the caller's region that a storage node may pull."""

    key: bytes
    parent_key: bytes | None
    """None for the first page of a prompt."""
    fragment_key: bytes
    """Key of the first page of its fragment, which decides about the owner (`kvstore.owners.fragment_key`)."""
    offset_bytes: int
    """In the caller's region."""
    num_bytes: int
    digests: tuple[int, ...]
    """`page_digests` of the page, one per kv head; as many for every page of an offer."""
    lineage: str = "raw"
    """The lossiest codec among this page and all that it was computed from."""


@dataclass(frozen=True, slots=True)
class OfferOutcome:
    """What became of an offer: every key is in exactly one of the three."""

    stored: frozenset[bytes]
    known: frozenset[bytes]
    """Was there already."""
    refused: frozenset[bytes]
    """Not taken, not acknowledged, or nobody was there to ask."""


class _Owner:
    """One storage node of the current view."""

    def __init__(self, member: control_pb2.StorageMember) -> None:
        self.node_id = member.node_id
        self.incarnation = member.incarnation
        self.identity = (member.incarnation, member.address)
        self.channel = connect(member.address)
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(self.channel)
        self.silent_until_s = 0.0


class KvClient:
    """All storage nodes of the cluster, for the event loop of a worker. Every method belongs to that loop's thread."""

    def __init__(self, config: KvClientConfig | None = None) -> None:
        self._config = config or KvClientConfig()
        self._epoch = 0
        self._owners: dict[str, _Owner] = {}
        self._weights: dict[str, float] = {}
        self._background: set[asyncio.Task[None]] = set()

    def update(self, view: control_pb2.StorageView) -> list[str]:
        """Take a new membership. An older one than the newest seen is ignored.

        Returns the incarnations that are members no longer.
        """
        if view.membership_epoch < self._epoch:
            return []
        self._epoch = view.membership_epoch
        known = self._owners
        self._owners = {}
        self._weights = {}
        for member in view.members:
            old = known.get(member.node_id)
            if old is not None and old.identity == (member.incarnation, member.address):
                self._owners[member.node_id] = known.pop(member.node_id)
            else:
                self._owners[member.node_id] = _Owner(member)
            self._weights[member.node_id] = member.weight
        for gone in known.values():
            # With grace: calls on it, releases above all, still end by themselves.
            self._spawn(gone.channel.close(self._config.release_deadline_s), f"close {gone.node_id}")
        members = {member.incarnation for member in view.members}
        return [gone.incarnation for gone in known.values() if gone.incarnation not in members]

    async def matches(
        self,
        keys: Sequence[bytes],
        fragment_pages: int,
        *,
        deadline_s: float,
        wanted: Iterable[int] | None = None,
        lossiest: str = EXACT,
    ) -> AsyncGenerator[NodeMatch, None]:
        """Ask every owner at once for the pages of a prompt; yield each answer as it comes, until `deadline_s`.

        keys: of the prompt's pages from position 0 on. wanted: indices to ask for; None asks for all.
        deadline_s: instant of `boot_time_s`. lossiest: the worst lineage that serves the caller; a lossier page is a
        miss.
        Never raises for what a node does. A later answer is no match: its lease is given back; so are the leases that
        come once nobody asks this generator any more, for which it has to be closed (`contextlib.aclosing`).
        """
        now_s = boot_time_s()
        if deadline_s <= now_s:
            return
        groups = by_owner(keys, range(len(keys)) if wanted is None else wanted, fragment_pages, self._weights)
        asked = {
            asyncio.create_task(self._ask(node, indices, keys, deadline_s, lossiest)): node
            for node_id, indices in groups.items()
            if (node := self._owners[node_id]).silent_until_s <= now_s
        }
        pending = set(asked)
        try:
            while pending:
                left_s = max(0.0, deadline_s - boot_time_s())
                done, _ = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    pending.remove(task)
                    if (found := task.result()) is not None:
                        yield found
            for task in pending:
                asked[task].silent_until_s = boot_time_s() + self._config.silence_s
                logger.warning("storage node %s did not answer a match in time", asked[task].node_id)
        finally:
            for task in pending:
                self._release_when_there(task)

    async def release(self, match: NodeMatch) -> None:
        """Give a lease back. Best effort, with a deadline; what is lost ends by itself at the node."""
        node = self._owners.get(match.node_id)
        if node is None:
            return
        request = kvstore_pb2.ReleaseRequest(lease_id=match.lease_id)
        await self._call(node, node.stub.Release(request, timeout=self._config.release_deadline_s))

    async def offer(
        self, pages: Sequence[PageOffer], card: Card, layout: PageLayout, *, deadline_s: float
    ) -> OfferOutcome:
        """Offer each page to its owner and wait until all have read what they want, or `deadline_s` has passed.

        card: of the region that the pages are in. layout: of every page.
        The bytes must stay as they are until this returns; whatever an owner reads later, it discards.
        Never raises for what a node does.
        """
        groups: dict[str, list[PageOffer]] = {}
        refused: set[bytes] = set()
        now_s = boot_time_s()
        for page in pages:
            node_id = owner(page.fragment_key, self._weights)
            if node_id is None or deadline_s <= now_s or self._owners[node_id].silent_until_s > now_s:
                refused.add(page.key)
            else:
                groups.setdefault(node_id, []).append(page)
        stored: set[bytes] = set()
        known: set[bytes] = set()
        answers = [
            self._offer(self._owners[node_id], group, card, layout, deadline_s) for node_id, group in groups.items()
        ]
        for group, answer in zip(groups.values(), await asyncio.gather(*answers), strict=True):
            offered = {page.key for page in group}
            stored |= offered & set(answer.stored)
            known |= offered & set(answer.known)
            refused |= offered
        return OfferOutcome(frozenset(stored), frozenset(known - stored), frozenset(refused - stored - known))

    async def close(self) -> None:
        """Hang up. Idempotent."""
        owners, self._owners, self._weights = self._owners, {}, {}
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for node in owners.values():
            await node.channel.close()

    # -- one node --------------------------------------------------------------------------------------------------

    async def _ask(
        self, node: _Owner, indices: Sequence[int], keys: Sequence[bytes], deadline_s: float, lossiest: str
    ) -> NodeMatch | None:
        """None for a miss. Ends at the latest `late_s` after the deadline."""
        # The lease counts from before the request was sent: the node's own count begins later.
        sent_s = boot_time_s()
        request = kvstore_pb2.MatchRequest(
            keys=[keys[index] for index in indices], lease_ms=round(self._config.lease_s * 1000)
        )
        timeout_s = max(0.0, deadline_s - sent_s) + self._config.late_s
        response: kvstore_pb2.MatchResponse | None
        response = await self._call(node, node.stub.Match(request, timeout=timeout_s))
        if response is None or not response.lease_id:
            return None
        index_of = {keys[index]: index for index in indices}
        pages: dict[int, StoredPage] = {}
        region_bytes = min(response.card.region_bytes, _MAX_BYTES)
        for message in response.pages:
            try:
                page = StoredPage.from_proto(message)
            except ValueError as error:
                logger.warning("storage node %s: page %s is a miss: %s", node.node_id, message.key.hex(), error)
                continue
            if not 0 < page.num_bytes <= region_bytes - page.offset_bytes:
                logger.warning("storage node %s: page %s is a miss: it leaves the region", node.node_id, page.key.hex())
                continue
            if page.key in index_of and is_within(page.lineage, lossiest):
                pages[index_of[page.key]] = page
        match = NodeMatch(
            node_id=node.node_id,
            lease_id=response.lease_id,
            card=Card.from_proto(response.card),
            valid_until_s=sent_s + response.lease_ms / 1000 - self._config.lease_margin_s,
            pages=pages,
        )
        if pages:
            return match
        await self.release(match)
        return None

    async def _offer(
        self, node: _Owner, pages: Sequence[PageOffer], card: Card, layout: PageLayout, deadline_s: float
    ) -> kvstore_pb2.OfferResponse:
        request = kvstore_pb2.OfferRequest(
            card=card.to_proto(),
            layout=layout_to_proto(layout),
            pages=[
                kvstore_pb2.OfferedPage(
                    key=page.key,
                    parent_key=page.parent_key or b"",
                    offset_bytes=page.offset_bytes,
                    num_bytes=page.num_bytes,
                    lineage=codec_to_proto(page.lineage),
                    digests=page.digests,
                )
                for page in pages
            ],
        )
        call = node.stub.Offer(request, timeout=max(0.0, deadline_s - boot_time_s()))
        response: kvstore_pb2.OfferResponse | None = await self._call(node, call)
        return response or kvstore_pb2.OfferResponse()

    async def _call(self, node: _Owner, call: grpc.aio.UnaryUnaryCall[Any, Any]) -> Any | None:
        """The response, or None if there is none."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            logger.warning("storage node %s: %s: %s", node.node_id, error.code().name, error.details())
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                node.silent_until_s = boot_time_s() + self._config.silence_s
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None  # The node left the view, and its channel was closed under the call.
        finally:
            call.cancel()

    # -- in the background -----------------------------------------------------------------------------------------

    def _release_when_there(self, task: asyncio.Task[NodeMatch | None]) -> None:
        async def release() -> None:
            match = await task
            if match is not None:
                self._owners_answer(match)
                await self.release(match)

        self._spawn(release(), "release of a late match")

    def _owners_answer(self, match: NodeMatch) -> None:
        """A late answer is a sign of life."""
        node = self._owners.get(match.node_id)
        if node is not None:
            node.silent_until_s = 0.0

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
