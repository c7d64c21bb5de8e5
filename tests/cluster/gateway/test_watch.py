"""The view of the cluster: what each message of the stream does to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from cluster.view import ClusterView, Role
from cluster.watch import Watcher
from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.serving import serve
from tests.cluster.gateway.peers import eventually


def state(
    node_id: str, incarnation: str = "a", *, ready: bool = True, keys: tuple[bytes, ...] = ()
) -> control_pb2.NodeState:
    return control_pb2.NodeState(
        node=control_pb2.Node(
            node_id=node_id, incarnation=incarnation, role=common_pb2.ROLE_DECODE, address=f"{node_id}:{incarnation}"
        ),
        load=control_pb2.Load(ready=ready),
        prefixes=keys,
    )


def snapshot(*nodes: control_pb2.NodeState, epoch: int = 1) -> control_pb2.WatchResponse:
    return control_pb2.WatchResponse(control_epoch=epoch, snapshot=control_pb2.Snapshot(nodes=nodes))


def node(changed: control_pb2.NodeState, epoch: int = 1) -> control_pb2.WatchResponse:
    return control_pb2.WatchResponse(control_epoch=epoch, node=changed)


def gone(node_id: str, incarnation: str = "a") -> control_pb2.WatchResponse:
    return control_pb2.WatchResponse(
        control_epoch=1, gone=control_pb2.NodeGone(node_id=node_id, incarnation=incarnation, reason="test")
    )


def prefixes(
    node_id: str,
    incarnation: str = "a",
    *,
    added: tuple[bytes, ...] = (),
    removed: tuple[bytes, ...] = (),
    reset: bool = False,
) -> control_pb2.WatchResponse:
    delta = control_pb2.PrefixDelta(reset=reset, added=added, removed=removed)
    return control_pb2.WatchResponse(
        control_epoch=1, prefixes=control_pb2.NodePrefixes(node_id=node_id, incarnation=incarnation, delta=delta)
    )


def test_a_snapshot_replaces_what_was_known():
    view = ClusterView()
    view.apply(snapshot(state("d0", keys=(b"1",)), state("d1")), 0)
    view.apply(snapshot(state("d1", keys=(b"2",))), 1)
    assert {name: known.keys for name, known in view.nodes.items()} == {"d1": {b"2"}}
    assert view.nodes["d1"].role is Role.DECODE


def test_keys_follow_their_deltas_and_a_load_report_leaves_them_alone():
    view = ClusterView()
    view.apply(snapshot(state("d0", keys=(b"1", b"2"))), 0)
    view.apply(prefixes("d0", added=(b"3",), removed=(b"1",)), 1)
    view.apply(node(state("d0")), 2)
    assert view.nodes["d0"].keys == {b"2", b"3"}
    assert view.nodes["d0"].loaded_at_s == 2
    view.apply(prefixes("d0", reset=True, added=(b"4",)), 3)
    assert view.nodes["d0"].keys == {b"4"}


def test_a_new_incarnation_starts_without_keys_and_words_about_the_old_one_are_dropped():
    view = ClusterView()
    view.apply(snapshot(state("d0", "a", keys=(b"1",))), 0)
    view.apply(node(state("d0", "b")), 1)
    view.apply(prefixes("d0", "a", added=(b"2",)), 2)
    view.apply(gone("d0", "a"), 3)
    assert view.nodes["d0"].peer.incarnation == "b"
    assert view.nodes["d0"].keys == set()
    view.apply(gone("d0", "b"), 4)
    assert view.nodes == {}


def test_a_replaced_control_plane_is_not_believed():
    view = ClusterView()
    assert view.apply(snapshot(state("d0"), epoch=2), 0)
    assert not view.apply(snapshot(epoch=1), 1)
    assert set(view.nodes) == {"d0"}


def test_a_restarted_control_plane_that_has_not_heard_of_a_node_does_not_end_it_at_once():
    view = ClusterView(forget_after_s=10)
    view.apply(snapshot(state("d0", keys=(b"1",)), state("d1")), 0)
    view.apply(snapshot(epoch=2), 100)
    assert set(view.nodes) == {"d0", "d1"}
    view.apply(node(state("d0"), epoch=2), 105)
    view.expire(109)
    assert set(view.nodes) == {"d0", "d1"}
    view.expire(110)
    assert set(view.nodes) == {"d0"}
    view.apply(snapshot(epoch=2), 120)
    assert view.nodes == {}, "the same control plane has heard from everybody"


def test_the_placement_version_changes_with_who_is_there_and_ready_and_with_nothing_else():
    view = ClusterView()
    versions = []
    for message in (
        snapshot(state("d0")),
        node(state("d0")),
        prefixes("d0", added=(b"1",)),
        node(state("d0", ready=False)),
        node(state("d0", "b", ready=False)),
        gone("d0", "b"),
    ):
        view.apply(message, 0)
        versions.append(view.placement_version)
    assert versions == [1, 1, 1, 2, 3, 4]


class WatchServer(control_pb2_grpc.ControlServiceServicer):
    """Sends each watcher what `messages` gives, then waits."""

    def __init__(self, *messages: control_pb2.WatchResponse) -> None:
        self.messages = messages

    async def Watch(
        self, request: control_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.WatchResponse]:
        for message in self.messages:
            yield message
        await asyncio.Event().wait()


async def changed_until(watcher: Watcher, node_ids: set[str]) -> None:
    async with asyncio.timeout(20):
        while set(watcher.view.nodes) != node_ids:
            await watcher.change.wait()


class OnceConfusedView(ClusterView):
    """Raises at the first change of a node, as a bug or a message from another version would make it."""

    def __init__(self) -> None:
        super().__init__()
        self.confused_by: control_pb2.WatchResponse | None = None

    def apply(self, response: control_pb2.WatchResponse, now_s: float) -> bool:
        if self.confused_by is None and response.WhichOneof("event") == "node":
            self.confused_by = response
            raise KeyError("a field of the future")
        return super().apply(response, now_s)


def test_a_watcher_that_fails_on_a_message_says_so_and_watches_on(caplog):
    async def scenario() -> None:
        def register(server: grpc.aio.Server) -> list[str]:
            service = WatchServer(snapshot(state("d0")), node(state("d1")))
            control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
            return []

        server = await serve(register, host="127.0.0.1")
        view = OnceConfusedView()
        watcher = Watcher(view, server.address, "g0", reconnect_min_s=0.01, reconnect_max_s=0.05)
        await watcher.start()
        try:
            await changed_until(watcher, {"d0", "d1"})
            assert view.confused_by is not None
        finally:
            await watcher.stop()
            await server.stop(0)

    asyncio.run(scenario())
    (failure,) = [record for record in caplog.records if record.exc_info and record.name == "cluster.watch"]
    assert "a field of the future" in caplog.text
    assert failure.name == "cluster.watch"


def test_a_watcher_keeps_its_view_while_the_control_plane_is_away_and_finds_the_next_one():
    async def scenario() -> None:
        def register(service: WatchServer):
            def add(server: grpc.aio.Server) -> list[str]:
                control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
                return []

            return add

        first = await serve(register(WatchServer(snapshot(state("d0")))), host="127.0.0.1")
        watcher = Watcher(ClusterView(), first.address, "g0", reconnect_min_s=0.01, reconnect_max_s=0.05)
        await watcher.start()
        try:
            await changed_until(watcher, {"d0"})
            await first.stop(0)
            await eventually(lambda: not watcher.connected)
            assert set(watcher.view.nodes) == {"d0"}
            port = int(first.address.rpartition(":")[2])
            second = await serve(
                register(WatchServer(snapshot(state("d1"), epoch=2), node(state("d0"), epoch=2))),
                host="127.0.0.1",
                port=port,
            )
            try:
                await changed_until(watcher, {"d0", "d1"})
            finally:
                await second.stop(0)
        finally:
            await watcher.stop()

    asyncio.run(scenario())
