"""A cluster as the state's tests see it: nodes that report, watchers that rebuild what they are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.catalog import Roster
from cluster.control.feed import WatchFeed
from cluster.control.outgoing import EndSession, Outgoing, ToNode, ToWatchers
from cluster.control.state import ClusterState
from protos import common_pb2, control_pb2

SILENCE_S = 5.0
TICK_S = 0.5

View = dict[str, tuple[str, str, frozenset[bytes]]]
"""node_id -> (incarnation, load as bytes, prefixes)."""


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def node(
    node_id: str, incarnation: str = "a", role: common_pb2.Role = common_pb2.ROLE_DECODE, model: str = "m"
) -> control_pb2.Node:
    return control_pb2.Node(
        node_id=node_id,
        incarnation=incarnation,
        role=role,
        address=f"{node_id}.{incarnation}:1",
        fingerprint=control_pb2.Fingerprint(model=model),
    )


class Watcher:
    """Rebuilds the cluster from a feed, as any client of `Watch` would."""

    def __init__(self, state: ClusterState, max_bytes: int = 1 << 20) -> None:
        self.feed = WatchFeed(state.snapshot, max_bytes=max_bytes)
        self.nodes: dict[str, control_pb2.NodeState] = {}
        self.prefixes: dict[str, set[bytes]] = {}
        self.gone: list[control_pb2.NodeGone] = []
        self.num_snapshots = 0

    def drain(self, most: int | None = None) -> None:
        while most is None or most > 0:
            response = self.feed.take()
            if response is None:
                return
            self._apply(response)
            most = None if most is None else most - 1

    def _apply(self, response: control_pb2.WatchResponse) -> None:
        match response.WhichOneof("event"):
            case "snapshot":
                self.num_snapshots += 1
                self.nodes = {state.node.node_id: state for state in response.snapshot.nodes}
                self.prefixes = {state.node.node_id: set(state.prefixes) for state in response.snapshot.nodes}
            case "node":
                state = response.node
                known = self.nodes.get(state.node.node_id)
                if known is None or known.node.incarnation != state.node.incarnation:
                    self.prefixes[state.node.node_id] = set()
                self.nodes[state.node.node_id] = state
            case "gone":
                self.gone.append(response.gone)
                known = self.nodes.get(response.gone.node_id)
                if known is not None and known.node.incarnation == response.gone.incarnation:
                    del self.nodes[response.gone.node_id], self.prefixes[response.gone.node_id]
            case "prefixes":
                event = response.prefixes
                assert self.nodes[event.node_id].node.incarnation == event.incarnation
                keys = self.prefixes[event.node_id]
                if event.delta.reset:
                    keys.clear()
                keys.difference_update(event.delta.removed)
                keys.update(event.delta.added)

    def view(self) -> View:
        return {
            node_id: (state.node.incarnation, state.load.SerializeToString(), frozenset(self.prefixes[node_id]))
            for node_id, state in self.nodes.items()
        }


class Stream:
    """A node's Join stream: numbers its reports, keeps what it is told."""

    def __init__(self, cluster: Cluster, number: int, registration: control_pb2.Node) -> None:
        self.number = number
        self.node = registration
        self.told: list[control_pb2.JoinResponse] = []
        self.end: EndSession | None = None
        self._cluster = cluster
        self._sequence = 0

    def report(
        self,
        *,
        registration: control_pb2.Node | None = None,
        load: control_pb2.Load | None = None,
        prefixes: control_pb2.PrefixDelta | None = None,
        leave: control_pb2.Leave | None = None,
        skip: int = 0,
    ) -> None:
        """skip: how many reports got lost before this one."""
        self._sequence += 1 + skip
        request = control_pb2.JoinRequest(
            sequence=self._sequence, registration=registration, load=load, prefixes=prefixes, leave=leave
        )
        cluster = self._cluster
        cluster.deliver(cluster.state.report(self.number, request, cluster.now_s))

    def holds(self, *numbers: int) -> None:
        """Give a full account of the prefixes."""
        self.report(prefixes=control_pb2.PrefixDelta(reset=True, added=[key(number) for number in numbers]))

    def loses_stream(self) -> None:
        self._cluster.deliver(self._cluster.state.ended(self.number, "its stream broke"))

    def kinds(self) -> list[str]:
        return [str(response.WhichOneof("directive")) for response in self.told]

    def view(self) -> control_pb2.StorageView | None:
        """The storage view that the node has now."""
        views = [response.storage for response in self.told if response.WhichOneof("directive") == "storage"]
        return views[-1] if views else None


class Cluster:
    """The state, and the edge that carries out what it decides."""

    def __init__(self, roster: Roster | None = None, control_epoch: int = 1) -> None:
        self.now_s = 1000.0
        self.state = ClusterState(control_epoch=control_epoch, silence_s=SILENCE_S, now_s=self.now_s, roster=roster)
        self.watchers: list[Watcher] = []
        self.streams: dict[int, Stream] = {}

    def join(self, registration: control_pb2.Node, load: control_pb2.Load | None = None) -> Stream:
        stream = Stream(self, len(self.streams) + 1, registration)
        self.streams[stream.number] = stream
        stream.report(registration=registration)
        if load is not None:
            stream.report(load=load)
        return stream

    def watch(self, max_bytes: int = 1 << 20) -> Watcher:
        watcher = Watcher(self.state, max_bytes)
        self.watchers.append(watcher)
        return watcher

    def tick(self, seconds: float) -> None:
        """Time passes, with the state's own ticks in it."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + TICK_S, until_s)
            self.deliver(self.state.tick(self.now_s, TICK_S))

    def deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for message in outgoing:
            match message:
                case ToNode(session, response):
                    assert response.control_epoch == self.state.control_epoch
                    assert self.streams[session].end is None
                    self.streams[session].told.append(response)
                case ToWatchers(response):
                    assert response.control_epoch == self.state.control_epoch
                    for watcher in self.watchers:
                        watcher.feed.push(response)
                case EndSession(session, _, _):
                    self.streams[session].end = message

    def evict(self, node_ids: Sequence[str] = ()) -> list[str]:
        asked, outgoing = self.state.evict(node_ids)
        self.deliver(outgoing)
        return asked

    def view(self) -> View:
        """What every watcher that has read everything must see."""
        return {
            node_id: (
                record.node.incarnation,
                (record.load or control_pb2.Load()).SerializeToString(),
                frozenset(record.prefixes),
            )
            for node_id, record in self.state.records.items()
        }

    def check(self) -> None:
        """Everybody who has read everything sees the same."""
        for watcher in self.watchers:
            watcher.drain()
            assert watcher.view() == self.view()
        live = {record.session for record in self.state.records.values()}
        for number, stream in self.streams.items():
            if stream.end is not None:
                assert number not in live
            elif number in live and self.state.settled and stream.node.role != common_pb2.ROLE_GATEWAY:
                assert stream.view() == self.state.storage_view()
        members = {
            node_id
            for node_id, record in self.state.records.items()
            if record.node.role == common_pb2.ROLE_KV and record.load
        }
        if self.state.settled:
            assert {member.node_id for member in self.state.storage_view().members} == members
