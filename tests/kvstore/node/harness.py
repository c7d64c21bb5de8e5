"""Real nodes, a real worker's side, and a control plane that only listens: over gRPC, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import numpy as np

from kvstore.arena import Arena
from kvstore.client import KvClient, KvClientConfig, NodeMatch, OfferOutcome, PageOffer
from kvstore.node import StorageConfig, StorageNode, StoreBounds
from kvstore.node.keeper import Keeper
from kvstore.node.service import KvStoreService
from kvstore.node.store import Store
from kvstore.owners import fragment_key
from kvstore.stored import restore
from kvstore.transport import Pull, PullExpired, PullSettled, TransportThread, boot_time_s, create_transport
from kvstore.transport.inprocess import Fabric
from protos import control_pb2, control_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from protos.registration import NodeConfig
from protos.serving import Server, serve
from tests.kvstore.node.samples import LAYOUT, PAGE_BYTES, digests_of, key_of, page_of
from tests.kvstore.transport.faults import FaultPlan, FaultyTransport

WAIT_S = 30.0  # far more than anything takes; only a test that fails waits as long
FRAGMENT_PAGES = 4
_names = itertools.count(1)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await body()

    asyncio.run(bounded())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class ListeningControl(control_pb2_grpc.ControlServiceServicer):
    """Takes registrations and keeps what it was told."""

    def __init__(self) -> None:
        self.nodes: list[control_pb2.Node] = []
        self.loads: list[control_pb2.Load] = []
        self.keys: set[bytes] = set()
        self.storage = control_pb2.StorageView()

    async def Join(
        self, requests: AsyncIterator[control_pb2.JoinRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.JoinResponse]:
        async for request in requests:
            match request.WhichOneof("report"):
                case "registration":
                    self.nodes.append(request.registration)
                    yield control_pb2.JoinResponse(control_epoch=1, joined=control_pb2.Joined())
                    yield control_pb2.JoinResponse(control_epoch=1, storage=self.storage)
                case "load":
                    self.loads.append(request.load)
                case "prefixes":
                    self.keys = set() if request.prefixes.reset else self.keys
                    self.keys |= set(request.prefixes.added)
                    self.keys -= set(request.prefixes.removed)

    async def listen(self) -> Server:
        def register(server: grpc.aio.Server) -> Sequence[str]:
            control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)
            return ["headrace.v1.ControlService"]

        return await serve(register, host="127.0.0.1")


class Gate(kvstore_pb2_grpc.KvStoreServiceServicer):
    """A node's service that answers a match only while it is open: a node that is frozen, or too busy.

    `alter` may change the answer: a node that talks nonsense.
    """

    def __init__(self, service: KvStoreService) -> None:
        self._service = service
        self.open = asyncio.Event()
        self.open.set()
        self.alter: Callable[[kvstore_pb2.MatchResponse], None] = lambda response: None
        self.num_released = 0
        self.num_asked = 0

    async def Match(self, request, context):
        self.num_asked += 1
        response = await self._service.Match(request, context)
        self.alter(response)
        await self.open.wait()
        return response

    async def Release(self, request, context):
        response = await self._service.Release(request, context)
        self.num_released += response.released
        return response

    async def Offer(self, request, context):
        return await self._service.Offer(request, context)


class BareNode:
    """A node without a place in a cluster, whose transport has faults and whose service has a gate."""

    def __init__(self, cluster: Cluster, node_id: str, num_pages: int = 256, **bounds) -> None:
        self.faults = FaultPlan()
        self.node_id = node_id
        """Of the node and, as its process never restarts, of its incarnation."""
        region = np.zeros(num_pages * PAGE_BYTES, np.uint8)
        self.store = Store(Arena(region), self.node_id, StoreBounds(**bounds), write_behind=False)
        self.published: set[bytes] = set()
        self.keeper = Keeper(
            self.store,
            lambda: FaultyTransport(
                create_transport(("inprocess",), region, self.node_id, fabric=cluster.fabric), self.faults
            ),
            self._publish,
        )

    async def start(self) -> None:
        self.card = await self.keeper.start()
        self.gate = Gate(KvStoreService(self.keeper, self.card, offer_deadline_s=10 * WAIT_S))

        def register(server: grpc.aio.Server) -> Sequence[str]:
            kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self.gate, server)
            return ["headrace.v1.KvStoreService"]

        self.server = await serve(register, host="127.0.0.1")

    @property
    def address(self) -> str:
        return self.server.address

    async def stop(self) -> None:
        await self.server.stop(0)
        await self.keeper.close()
        self.store.check()

    def _publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.published |= set(added)
        self.published -= set(removed)


class Worker:
    """Has pages 1..32 in its region, offers them, and brings pages back into a staging area behind them."""

    def __init__(self, cluster: Cluster, config: KvClientConfig | None = None, transport: str = "inprocess") -> None:
        self.client = KvClient(config)
        self.region = np.concatenate(
            [*(page_of(number) for number in range(1, 33)), np.zeros(32 * PAGE_BYTES, np.uint8)]
        )
        self._cluster = cluster
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        name = f"worker-{next(_names)}"
        self.transport = TransportThread(
            lambda: create_transport((transport,), self.region, name, fabric=cluster.fabric), events=self._events
        )
        self.card = self.transport.start()

    async def close(self) -> None:
        await self.client.close()
        self.transport.close()

    async def offer(self, *numbers: int, deadline_in_s: float = 10 * WAIT_S, **changes) -> OfferOutcome:
        """Each page is the child of the page of the number before; fragments begin at 1, 5, 9, ..."""
        keys = [key_of(number) for number in range(1, 33)]
        offers = []
        for number in numbers:
            fields = {
                "key": key_of(number),
                "parent_key": key_of(number - 1) if number > 1 else None,
                "fragment_key": fragment_key(keys, number - 1, FRAGMENT_PAGES),
                "offset_bytes": (number - 1) * PAGE_BYTES,
                "num_bytes": PAGE_BYTES,
                "digests": digests_of(page_of(number)),
            }
            offers.append(PageOffer(**{**fields, **changes}))
        return await self.client.offer(offers, self.card, LAYOUT, deadline_s=boot_time_s() + deadline_in_s)

    async def match(self, num_pages: int, *, deadline_in_s: float = WAIT_S, **options) -> list[NodeMatch]:
        keys = [key_of(number) for number in range(1, num_pages + 1)]
        deadline_s = boot_time_s() + deadline_in_s
        answers = self.client.matches(keys, FRAGMENT_PAGES, deadline_s=deadline_s, **options)
        found: list[NodeMatch] = []
        try:
            async with contextlib.aclosing(answers):
                async for match in answers:
                    found.append(match)
        except asyncio.CancelledError:
            for match in found:
                await self.client.release(match)
            raise
        return found

    async def fetch(self, num_pages: int) -> list[int]:
        """Numbers of the pages that came back, each checked byte by byte."""
        came: list[int] = []
        for place, match in enumerate(await self.match(num_pages)):
            came += [index + 1 for index in await self.pull(place, match)]
            await self.client.release(match)
        return sorted(came)

    async def pull(self, pull_id: int, match: NodeMatch) -> list[int]:
        """Page indices that came. An error of the transport is a miss of them all."""
        indices = list(match.pages)
        pages = [match.pages[index] for index in indices]
        staging = [(32 + index) * PAGE_BYTES for index in indices]
        self.transport.submit(
            Pull(
                pull_id=pull_id,
                card=match.card,
                remote_offsets=np.array([page.offset_bytes for page in pages], np.int64),
                local_offsets=np.array(staging, np.int64),
                num_bytes=np.array([page.num_bytes for page in pages], np.int64),
                deadline_s=match.valid_until_s,
            )
        )
        event = await asyncio.to_thread(self._events.get, timeout=WAIT_S)
        while isinstance(event, PullExpired):
            event = await asyncio.to_thread(self._events.get, timeout=WAIT_S)
        assert isinstance(event, PullSettled)
        if event.error is not None:
            return []
        came = []
        for index, page, start in zip(indices, pages, staging, strict=True):
            restored = np.empty(PAGE_BYTES, np.uint8)
            if restore(page, self.region[start : start + page.num_bytes], restored, LAYOUT):
                assert np.array_equal(restored, page_of(index + 1))
                came.append(index)
        return came


class Cluster:
    """Whatever a test starts, stopped at its end in the reverse order."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.control = ListeningControl()
        self.members: dict[str, control_pb2.StorageMember] = {}
        self.epoch = 0
        self._started: list[Callable[[], Awaitable[None]]] = []
        self._workers: list[Worker] = []
        self.control_address = ""

    async def __aenter__(self) -> Cluster:
        server = await self.control.listen()
        self.control_address = server.address
        self._started.append(lambda: server.stop(0))
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._started:
            await self._started.pop()()

    def config(self, node_id: str, num_pages: int = 256, **changes) -> StorageConfig:
        node = NodeConfig(node_id=node_id, control_address=self.control_address, heartbeat_s=0.02)
        return StorageConfig(
            **{"node": node, "memory_bytes": num_pages * PAGE_BYTES, "transports": ("inprocess",), **changes}
        )

    async def node(self, node_id: str, **changes) -> StorageNode:
        node = StorageNode(self.config(node_id, **changes), fabric=self.fabric)
        self._started.append(node.stop)
        await node.start()
        self.joined(node_id, node.incarnation, node.address)
        return node

    async def bare_node(self, **changes) -> BareNode:
        node = BareNode(self, f"bare-{len(self.members)}", **changes)
        await node.start()
        self._started.append(node.stop)
        self.joined(node.node_id, node.node_id, node.address)
        return node

    async def worker(self, config: KvClientConfig | None = None, transport: str = "inprocess") -> Worker:
        worker = await asyncio.to_thread(Worker, self, config, transport)
        self._started.append(worker.close)
        self._workers.append(worker)
        worker.client.update(self.view())
        return worker

    def joined(self, node_id: str, incarnation: str, address: str) -> None:
        self.members[node_id] = control_pb2.StorageMember(
            node_id=node_id, incarnation=incarnation, address=address, weight=1.0
        )
        self.tell()

    def left(self, node_id: str) -> None:
        del self.members[node_id]
        self.tell()

    def tell(self) -> None:
        self.epoch += 1
        for worker in self._workers:
            worker.client.update(self.view())

    def view(self) -> control_pb2.StorageView:
        return control_pb2.StorageView(membership_epoch=self.epoch, members=list(self.members.values()))
