"""The gateway as a node of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Sequence

import grpc

from cluster.gateway.config import GatewayConfig
from cluster.gateway.http import HttpApi
from cluster.gateway.http_server import HttpServer
from cluster.gateway.metrics import GatewayMetrics, Telemetry
from cluster.gateway.models import PromptEncoder, ServedModel, load_models
from cluster.gateway.placement import Placer
from cluster.gateway.request import Requests
from cluster.gateway.rpc import SERVICE_NAME, InferenceService
from cluster.gateway.sessions import SessionPool
from cluster.router import Router
from cluster.view import ClusterView, Role
from cluster.watch import Watcher
from protos import common_pb2, control_pb2, inference_pb2_grpc
from protos.registration import WIRE_VERSION, Registration
from protos.serving import Server, host_port, serve

logger = logging.getLogger(__name__)


class Gateway:
    """Serves clients over HTTP and gRPC with the workers that the control plane names.

    new --start--> serving --stop--> stopped
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.address = ""
        """host:port of the gRPC listener as others reach it, after `start`."""
        self.http_address = ""
        """host:port of the HTTP listener as others reach it, after `start`."""
        self.incarnation = uuid.uuid4().hex[:12]
        self._config = config
        self._models: dict[str, ServedModel] = {}
        self._view = ClusterView()
        self._router = Router(config.router)
        self._telemetry = Telemetry(config.node.node_id)
        self._stopping = False
        self._vital: list[asyncio.Task[None]] = []
        """They end when the gateway does, and if one ends before, the gateway is of no more use."""
        # What is undone at `stop`, last begun first.
        self._running = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Load the tokenizers, listen, and register. Returns when clients can connect and the cluster knows it.

        Workers need not be there yet: /readyz says whether they are. Raises EngineError for a model that cannot be
        read, OSError for a taken port, TimeoutError if the control plane does not answer; nothing is left running then.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Refuse new requests, let those in work end for `stop_grace_s`, end the others with an error. Idempotent."""
        self._stopping = True
        await self._running.aclose()

    async def wait_ended(self) -> str:
        """Wait until it no longer serves, for whatever reason; says which. Call it after `start`."""
        await asyncio.wait(self._vital, return_when=asyncio.FIRST_COMPLETED)
        if self._stopping:
            return "stopped"
        failed = next(task for task in self._vital if task.done())
        error = None if failed.cancelled() else failed.exception()
        return f"{failed.get_name()}: {error or 'ended'}"

    async def _start(self) -> None:
        config, node = self._config, self._config.node
        running = self._running
        running.callback(self._telemetry.close)
        self._models = await asyncio.to_thread(load_models, config.models)
        encoder = PromptEncoder(off_loop_chars=config.limits.off_loop_chars)
        running.callback(encoder.close)

        watcher = Watcher(self._view, node.control_address, node.node_id)
        await watcher.start()
        running.push_async_callback(watcher.stop)
        sessions = SessionPool(
            self.incarnation,
            open_timeout_s=config.placement.session_timeout_s,
            max_unsent_bytes=config.placement.max_unsent_bytes,
        )
        metrics = GatewayMetrics(self._telemetry.meter, self._view)
        placer = Placer(watcher, self._router, sessions, config.placement, metrics)
        requests = Requests(self.incarnation, placer, config.placement, config.limits, metrics)

        def register(server: grpc.aio.Server) -> Sequence[str]:
            service = InferenceService(self._models, encoder, requests)
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
            return [SERVICE_NAME]

        rpc = await serve(register, host=config.grpc_host, port=config.grpc_port)
        running.push_async_callback(rpc.stop, 0)
        self.address = self._advertised(rpc.address)
        api = HttpApi(
            self._models,
            encoder,
            requests,
            config.limits,
            self._telemetry,
            self._not_ready,
            keep_alive_s=config.keep_alive_s,
        )
        http = HttpServer(api.app(), host=config.http_host, port=config.http_port)
        await http.start()
        running.push_async_callback(http.stop)
        self.http_address = self._advertised(http.address)

        running.push_async_callback(self._end_requests, requests, placer, sessions)
        follower = asyncio.create_task(self._follow(watcher, sessions, rpc), name="gateway follows the view")
        running.push_async_callback(_cancelled, follower)
        self._vital = [follower, http.task]
        registration = Registration(node, self._description(), lambda: self._load(requests))
        await registration.start()
        running.push_async_callback(registration.stop)
        await registration.registered(config.register_timeout_s)
        logger.info("%s: http on %s, grpc on %s", node.node_id, self.http_address, self.address)

    async def _end_requests(self, requests: Requests, placer: Placer, sessions: SessionPool) -> None:
        reason = "This gateway is stopping"
        requests.close(reason)
        await requests.ended(self._config.stop_grace_s)
        placer.close(reason)
        await sessions.close(reason)
        if not await requests.ended(_LAST_WORDS_S):
            logger.warning("%d requests did not end; their connections are cut", len(requests))

    async def _follow(self, watcher: Watcher, sessions: SessionPool, rpc: Server) -> None:
        """As the view changes: drop the sessions with workers that are gone, and keep the gRPC health true."""
        while True:
            change = watcher.change
            peers = [node.peer for node in self._view.with_role(Role.DECODE)]
            sessions.retain(peers, "the worker is gone")
            await rpc.set_ready(self._not_ready() is None)
            await change.wait()

    def _not_ready(self) -> str | None:
        """Why no request could be served now."""
        if self._stopping:
            return "this gateway is stopping"
        missing = [name for name in self._models if not self._router.workers(self._view, name)]
        return f"no decode worker is ready for {', '.join(missing)}" if missing else None

    def _advertised(self, address: str) -> str:
        """How others reach a listener. One that listens everywhere is named by the node's own address."""
        host, _, port = address.rpartition(":")
        return host_port(self._config.node.host, int(port)) if host in ("0.0.0.0", "[::]") else address

    def _description(self) -> control_pb2.Node:
        return control_pb2.Node(
            node_id=self._config.node.node_id,
            incarnation=self.incarnation,
            role=common_pb2.ROLE_GATEWAY,
            address=self.address,
            http_address=self.http_address,
            fingerprint=control_pb2.Fingerprint(wire_version=WIRE_VERSION),
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _load(self, requests: Requests) -> control_pb2.Load:
        waiting = requests.num_waiting
        return control_pb2.Load(running=len(requests) - waiting, waiting=waiting, ready=self._not_ready() is None)


_LAST_WORDS_S = 2.0
"""For the error events of requests that were cut off by `stop`."""


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
