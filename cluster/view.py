"""What is known of the cluster: plain data that the control plane's messages change."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum

from protos import common_pb2, control_pb2

logger = logging.getLogger(__name__)


class Role(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"
    KV = "kv"
    GATEWAY = "gateway"


_ROLES = {
    common_pb2.ROLE_PREFILL: Role.PREFILL,
    common_pb2.ROLE_DECODE: Role.DECODE,
    common_pb2.ROLE_KV: Role.KV,
    common_pb2.ROLE_GATEWAY: Role.GATEWAY,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Two workers may exchange pages only if these are equal."""

    model: str = ""
    namespace: bytes = b""
    page_size: int = 0
    page_bytes: int = 0
    dtype: str = ""
    wire_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoad:
    """The part of a node's load report that placement and the metrics use. A rate of 0 was not measured yet."""

    ready: bool = False
    pages_total: int = 0
    pages_free: int = 0
    room_pages: int = 0
    """What a new request could have: free pages less those promised to running ones."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    pull_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A node as others name and reach it. A new process has a new incarnation."""

    node_id: str
    incarnation: str
    address: str


@dataclass(kw_only=True, slots=True)
class NodeView:
    """One node, as last heard of."""

    peer: Peer
    role: Role
    fingerprint: Fingerprint
    load: NodeLoad = field(default_factory=NodeLoad)
    loaded_at_s: float = 0.0
    """When `load` came, by the view's clock."""
    keys: set[bytes] = field(default_factory=set)
    """Keys of the pages in the node's tree."""
    unconfirmed_since_s: float | None = None
    """Set while a restarted control plane has not heard of this node (yet)."""


class ClusterView:
    """The cluster as the control plane last described it. Plain data: no sockets, and the time is passed in.

    A snapshot replaces everything, with one exception: a control plane of a *new* epoch has just started and has not
    heard from everybody, so a node that it does not list stays for `forget_after_s`, and goes then unless it has
    registered again. Otherwise the restart of a control plane would look like the death of every worker.
    """

    def __init__(self, *, forget_after_s: float = 10.0) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.control_epoch = 0
        self.placement_version = 0
        """Goes up whenever a node comes or goes, or starts or stops being ready."""
        self.forget_after_s = forget_after_s

    def with_role(self, role: Role) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.role is role]

    def apply(self, response: control_pb2.WatchResponse, now_s: float) -> bool:
        """Take one message of the stream. False, and no change, if it comes from a control plane that was replaced."""
        if response.control_epoch < self.control_epoch:
            return False
        restarted = 0 < self.control_epoch < response.control_epoch
        self.control_epoch = response.control_epoch
        before = self._placement()
        match response.WhichOneof("event"):
            case "snapshot":
                self._apply_snapshot(response.snapshot, restarted, now_s)
            case "node":
                self._apply_state(response.node, now_s)
            case "gone":
                self._apply_gone(response.gone)
            case "prefixes":
                self._apply_prefixes(response.prefixes)
            case unknown:
                logger.warning("an event of a newer kind was ignored: %s", unknown)
        self._count_change(before)
        return True

    def expire(self, now_s: float) -> None:
        """Drop the nodes that a restarted control plane has not heard of for `forget_after_s`."""
        before = self._placement()
        for node_id, node in list(self.nodes.items()):
            if node.unconfirmed_since_s is not None and now_s - node.unconfirmed_since_s >= self.forget_after_s:
                logger.info("%s: not heard of again since the control plane restarted", node_id)
                del self.nodes[node_id]
        self._count_change(before)

    def _placement(self) -> set[tuple[Peer, bool]]:
        return {(node.peer, node.load.ready) for node in self.nodes.values()}

    def _count_change(self, before: set[tuple[Peer, bool]]) -> None:
        if self._placement() != before:
            self.placement_version += 1

    def _apply_snapshot(self, snapshot: control_pb2.Snapshot, restarted: bool, now_s: float) -> None:
        old, self.nodes = self.nodes, {}
        for state in snapshot.nodes:
            self._apply_state(state, now_s)
            node = self.nodes.get(state.node.node_id)
            if node is not None:
                node.keys = set(state.prefixes)
        for node_id, node in old.items():
            if node_id in self.nodes:
                continue
            if restarted and node.unconfirmed_since_s is None:
                node.unconfirmed_since_s = now_s
            if node.unconfirmed_since_s is not None:
                self.nodes[node_id] = node

    def _apply_state(self, state: control_pb2.NodeState, now_s: float) -> None:
        role = _ROLES.get(state.node.role)
        if role is None:
            logger.warning("%s: a node of a newer role was ignored: %s", state.node.node_id, state.node.role)
            return
        peer = Peer(node_id=state.node.node_id, incarnation=state.node.incarnation, address=state.node.address)
        node = self.nodes.get(peer.node_id)
        if node is None or node.peer != peer:
            node = NodeView(peer=peer, role=role, fingerprint=_fingerprint(state.node.fingerprint))
            self.nodes[peer.node_id] = node
        node.load = _load(state.load)
        node.loaded_at_s = now_s
        node.unconfirmed_since_s = None

    def _apply_gone(self, gone: control_pb2.NodeGone) -> None:
        node = self.nodes.get(gone.node_id)
        # The word may come after the next incarnation's registration.
        if node is not None and node.peer.incarnation == gone.incarnation:
            logger.info("%s: gone: %s", gone.node_id, gone.reason)
            del self.nodes[gone.node_id]

    def _apply_prefixes(self, prefixes: control_pb2.NodePrefixes) -> None:
        node = self.nodes.get(prefixes.node_id)
        if node is None or node.peer.incarnation != prefixes.incarnation:
            return
        if prefixes.delta.reset:
            node.keys.clear()
        node.keys.difference_update(prefixes.delta.removed)
        node.keys.update(prefixes.delta.added)


def _fingerprint(message: control_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=message.model,
        namespace=message.namespace,
        page_size=message.page_size,
        page_bytes=message.page_bytes,
        dtype=message.dtype,
        wire_version=message.wire_version,
    )


def _load(message: control_pb2.Load) -> NodeLoad:
    return NodeLoad(
        ready=message.ready,
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        room_pages=message.room_pages,
        running=message.running,
        waiting=message.waiting,
        queued_tokens=message.queued_tokens,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        pull_bytes_per_s=message.pull_bytes_per_s,
    )
