"""Control planes, nodes and watchers over real sockets, in this process and in others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from cluster.control import ControlConfig, ControlPlane
from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.registration import NodeConfig, Registration
from protos.serving import connect

DEADLINE_S = 30.0
_names = itertools.count()

NODE_PROCESS = """
import asyncio, sys
from protos import control_pb2
from protos.registration import NodeConfig, Registration

async def main():
    node_id, control_address = sys.argv[1:]
    node = control_pb2.Node(node_id=node_id, incarnation="child", role=2, address="127.0.0.1:9")
    config = NodeConfig(node_id=node_id, control_address=control_address, heartbeat_s=0.05)
    registration = Registration(config, node, lambda: control_pb2.Load(ready=True))
    await registration.start()
    await registration.registered(30)
    print("registered", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

CONTROL_PROCESS = """
import asyncio, sys
from cluster.control import ControlConfig, ControlPlane

async def main():
    cluster, catalog_url, lock_ttl_s = sys.argv[1:]
    plane = ControlPlane(ControlConfig(cluster=cluster, catalog_url=catalog_url, lock_ttl_s=float(lock_ttl_s)))
    await plane.start()
    print(plane.address, flush=True)
    print(await plane.wait_ended(), flush=True)
    await plane.stop()

asyncio.run(main())
"""


def new_cluster_name() -> str:
    """Keeps the facts of a test apart from those of others in one catalog."""
    return f"cluster-{next(_names)}"


@contextlib.contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, killed at the end."""
    with subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


async def said(child: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert child.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await asyncio.to_thread(child.stdout.readline)).strip()


@contextlib.asynccontextmanager
async def control_plane(config: ControlConfig) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(config)
    await plane.start()
    try:
        yield plane
    finally:
        await plane.stop()


def make_node(node_id: str, incarnation: str = "a", role: common_pb2.Role = common_pb2.ROLE_DECODE) -> control_pb2.Node:
    return control_pb2.Node(node_id=node_id, incarnation=incarnation, role=role, address="127.0.0.1:9")


@contextlib.asynccontextmanager
async def joined(
    address: str, node: control_pb2.Node, load: control_pb2.Load | None = None
) -> AsyncIterator[Registration]:
    """A node that is registered."""
    config = NodeConfig(
        node_id=node.node_id, control_address=address, heartbeat_s=0.05, reconnect_min_s=0.02, reconnect_max_s=0.1
    )
    registration = Registration(config, node, lambda: load or control_pb2.Load(ready=True))
    await registration.start()
    try:
        await registration.registered(DEADLINE_S)
        yield registration
    finally:
        await registration.stop()


class Observer:
    """Follows `Watch` and remembers everything that it was told."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._call = call
        self.nodes: dict[str, control_pb2.NodeState] = {}
        self.prefixes: dict[str, set[bytes]] = {}
        self.gone: list[control_pb2.NodeGone] = []
        self.control_epoch = 0

    async def until(self, condition: Callable[[Observer], object]) -> None:
        """Read on until `condition` holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(self):
                self._take(await self._call.read())

    def _take(self, response: control_pb2.WatchResponse) -> None:
        assert response is not grpc.aio.EOF
        self.control_epoch = response.control_epoch
        match response.WhichOneof("event"):
            case "snapshot":
                self.nodes = {state.node.node_id: state for state in response.snapshot.nodes}
                self.prefixes = {state.node.node_id: set(state.prefixes) for state in response.snapshot.nodes}
            case "node":
                self.nodes[response.node.node.node_id] = response.node
            case "gone":
                self.gone.append(response.gone)
                self.nodes.pop(response.gone.node_id, None)
            case "prefixes":
                keys = self.prefixes.setdefault(response.prefixes.node_id, set())
                if response.prefixes.delta.reset:
                    keys.clear()
                keys.difference_update(response.prefixes.delta.removed)
                keys.update(response.prefixes.delta.added)


@contextlib.asynccontextmanager
async def observer(address: str) -> AsyncIterator[Observer]:
    async with connect(address) as channel:
        call = control_pb2_grpc.ControlServiceStub(channel).Watch(control_pb2.WatchRequest(watcher="test"))
        try:
            yield Observer(call)
        finally:
            call.cancel()


async def status(address: str) -> control_pb2.GetStatusResponse:
    async with connect(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=DEADLINE_S, wait_for_ready=True)


async def status_once(
    address: str, condition: Callable[[control_pb2.GetStatusResponse], object]
) -> control_pb2.GetStatusResponse:
    """The first status of which `condition` holds."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition(answer := await status(address)):
        assert time.monotonic() < until_s, answer
        await asyncio.sleep(0.02)
    return answer


async def evict(address: str, *node_ids: str) -> list[str]:
    async with connect(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        reply = await stub.EvictPrefixes(control_pb2.EvictPrefixesRequest(node_ids=node_ids), timeout=DEADLINE_S)
        return list(reply.node_ids)


def kinds(answer: control_pb2.GetStatusResponse) -> list[str]:
    return [entry.kind for entry in answer.degradations]
