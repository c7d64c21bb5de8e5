"""The storage node's process: memory, transport, gRPC listener, and its place in the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from kvstore.arena import Arena
from kvstore.node.config import StorageConfig
from kvstore.node.keeper import Keeper
from kvstore.node.service import KvStoreService
from kvstore.node.store import Store
from kvstore.pages import allocate_region
from kvstore.transport import Card, create_transport
from protos import common_pb2, control_pb2, kvstore_pb2, kvstore_pb2_grpc
from protos.registration import Registration
from protos.serving import Server, serve

if TYPE_CHECKING:
    from kvstore.transport.inprocess import Fabric

logger = logging.getLogger(__name__)


class StorageNode:
    """Keeps pages that left the workers' pools, and lends them.

    Everything decides and answers on the event loop; bytes move on the transport's thread, and are compressed on the
    encoder's.
    """

    def __init__(self, config: StorageConfig, *, fabric: Fabric | None = None) -> None:
        """fabric: what the transport "inprocess" needs."""
        self.address = ""
        """host:port of the gRPC listener, after `start`."""
        self.incarnation = f"{config.node.node_id}-{uuid.uuid4().hex[:8]}"
        self._config = config
        self._fabric = fabric
        self._keeper: Keeper | None = None
        self._server: Server | None = None
        self._registration: Registration | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Take the memory, register it with the transport, listen. Returns when it can serve.

        Registering with the control plane goes on in the background. To be stopped also if this raises.
        """
        self._ended = asyncio.get_running_loop().create_future()
        config = self._config
        region = await asyncio.to_thread(allocate_region, config.memory_bytes)
        store = Store(Arena(region), self.incarnation, config.bounds, write_behind=config.lossless)
        self._keeper = Keeper(
            store,
            lambda: create_transport(config.transports, region, self.incarnation, fabric=self._fabric),
            self._publish,
        )
        card = await self._keeper.start()
        self._server = await serve(lambda server: self._register(server, card), host=config.node.host)
        self.address = self._server.address
        self._registration = Registration(config.node, self._describe(), self._load)
        await self._registration.start()
        await self._server.set_ready(True)
        self._tasks = [
            asyncio.create_task(self._obey(self._registration), name="directives"),
            asyncio.create_task(self._watch_transport(self._keeper, self._server), name="transport"),
        ]

    async def stop(self) -> None:
        """Leave the cluster, stop listening, settle what is under way. Idempotent."""
        self._end("stopped")
        for task in self._tasks:
            task.cancel()
        if self._registration is not None:
            await self._registration.stop()
        if self._server is not None:
            await self._server.stop(self._config.stop_grace_s)
        if self._keeper is not None:
            await self._keeper.close()

    async def wait_ended(self) -> str:
        """Until the node was stopped, or its transport died and the process must be replaced. Says which."""
        assert self._ended is not None, "not started"
        return await asyncio.shield(self._ended)

    def _register(self, server: grpc.aio.Server, card: Card) -> Sequence[str]:
        assert self._keeper is not None
        service = KvStoreService(self._keeper, card, self._config.offer_deadline_s)
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(service, server)
        return [kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name]

    def _describe(self) -> control_pb2.Node:
        return control_pb2.Node(
            node_id=self._config.node.node_id,
            incarnation=self.incarnation,
            role=common_pb2.ROLE_KV,
            address=self.address,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if self._registration is not None:
            self._registration.publish(added, removed)

    def _load(self) -> control_pb2.Load:
        assert self._keeper is not None
        store = self._keeper.store
        # Pages have no fixed size here: free memory is told in pages of the mean size of those that are stored.
        mean_bytes = store.stored_bytes / store.num_pages if store.num_pages else 0
        num_free = int(store.arena.free_bytes / mean_bytes) if mean_bytes else 0
        load = control_pb2.Load(
            pages_total=store.num_pages + store.num_quarantined + num_free,
            pages_free=store.num_evictable + num_free,
            pages_cached=store.num_pages,
            pages_quarantined=store.num_quarantined,
            pages_served=store.num_served,
            stored_bytes=store.stored_bytes,
            capacity_bytes=store.arena.capacity_bytes,
            ready=not self._keeper.failed.done(),
        )
        self._keeper.stats.tell(load)
        return load

    async def _watch_transport(self, keeper: Keeper, server: Server) -> None:
        reason = await asyncio.shield(keeper.failed)
        await server.set_ready(False)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    async def _obey(self, registration: Registration) -> None:
        """Takes the directives off the queue: none of them concerns a storage node.

        Members are for clients, and an eviction means workers' pools.
        """
        while True:
            directive = await registration.directives.get()
            logger.debug("%s: nothing to do for a %s", self._config.node.node_id, directive.WhichOneof("directive"))
