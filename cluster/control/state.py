"""Who is in the cluster and what they hold: plain bookkeeping, without sockets and without a clock of its own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

from cluster.catalog import Roster
from cluster.control.outgoing import EndSession, Outgoing, ToNode, ToWatchers
from cluster.control.record import ROLES, History, NodeRecord
from protos import control_pb2
from protos.registration import KEYS_PER_MESSAGE

logger = logging.getLogger(__name__)

TAKEOVER_EPOCH_STEP = 1_000
"""Added to the stored membership epoch by a control plane that takes over: more than the changes that its predecessor
can have made while the catalog did not answer, so that no epoch is used twice."""


class UnknownNodes(Exception):
    """Asked about nodes that are not registered workers."""

    def __init__(self, node_ids: Sequence[str]) -> None:
        super().__init__(f"no worker is registered as {', '.join(node_ids)}")
        self.node_ids = tuple(node_ids)


class ClusterState:
    """Events go in, what to send comes out; `now_s` is any monotonic clock, always the same one.

    A node, seen from here (a session is one Join stream):

                     registration                stream ends | silent for silence_s | a newer incarnation registers
        (unknown) ------------------> registered ------------------------------------------------------> (gone)
                      older incarnation: refused    | report out of sequence          ^
                                                    v                                 |
                                               unsynced: Resync is sent, prefixes are ignored until a full account

    Messages of the wire are kept and passed on as they came: the load and the card of a node mean nothing here.

    A control plane that takes over from another knows the roster: until each node that was present has been heard
    from, or `silence_s` has passed, it sends no storage view, since a view with the first of several nodes would
    empty the others' shares. Then it says who did not come back.
    """

    def __init__(self, *, control_epoch: int, silence_s: float, now_s: float, roster: Roster | None = None) -> None:
        roster = roster or Roster()
        self.control_epoch = control_epoch
        self.membership_epoch = roster.membership_epoch
        self.records: dict[str, NodeRecord] = {}
        """Registered nodes by node id."""
        self.roster_version = 0
        """Goes up when `roster` has changed."""
        self._silence_s = silence_s
        self._history = {node_id: History.from_roster(entry) for node_id, entry in roster.nodes.items()}
        self._awaited = {
            node_id: history.incarnations[0]
            for node_id, history in self._history.items()
            if history.present and history.incarnations
        }
        if roster != Roster():
            self.membership_epoch += TAKEOVER_EPOCH_STEP
        self._settle_at_s = now_s + silence_s
        self._ticked_at_s = now_s
        self._sessions: dict[int, str] = {}
        self._members: list[control_pb2.StorageMember] = []

    # Events.

    def report(self, session: int, request: control_pb2.JoinRequest, now_s: float) -> list[Outgoing]:
        """A message came on a Join stream."""
        kind = request.WhichOneof("report")
        node_id = self._sessions.get(session)
        if node_id is None:
            if kind != "registration" or request.sequence != 1:
                return [EndSession(session, "invalid", "a stream begins with its registration, sequence 1")]
            return self._register(session, request.registration, now_s)
        record = self.records[node_id]
        record.heard_at_s = now_s
        if request.sequence != record.next_sequence:
            logger.warning("%s: report %d instead of %d", node_id, request.sequence, record.next_sequence)
            record.next_sequence = request.sequence + 1
            record.synced = False
            return [self._to_node(record, resync=control_pb2.Resync())]
        record.next_sequence += 1
        match kind:
            case "load":
                return self._take_load(record, request.load)
            case "prefixes":
                return self._take_prefixes(record, request.prefixes)
            case "leave":
                return self._forget(record, "left", in_good_order=True)
            case "registration":
                reason = "registered twice on one stream"
                return self._forget(record, reason, EndSession(session, "invalid", reason))
            case _:
                return []  # A report of a newer kind.

    def ended(self, session: int, reason: str) -> list[Outgoing]:
        """A Join stream is over: its node is gone, unless it has left before or come back on another one."""
        node_id = self._sessions.get(session)
        if node_id is None:
            return []
        return self._forget(self.records[node_id], reason)

    def tick(self, now_s: float, interval_s: float) -> list[Outgoing]:
        """Time has passed; called about every `interval_s`. A longer pause is ours and not the nodes' silence."""
        pause_s = max(0.0, now_s - self._ticked_at_s - 2 * interval_s)
        self._ticked_at_s = now_s
        outgoing: list[Outgoing] = []
        for record in list(self.records.values()):
            record.heard_at_s = min(now_s, record.heard_at_s + pause_s)
            silent_s = now_s - record.heard_at_s
            if silent_s > self._silence_s:
                reason = f"silent for {silent_s:.1f} s"
                outgoing += self._forget(record, reason, EndSession(record.session, "silent", reason))
        if self._awaited:
            self._settle_at_s += pause_s
            if now_s >= self._settle_at_s:
                outgoing += self._settle()
        return outgoing

    def evict(self, node_ids: Sequence[str]) -> tuple[list[str], list[Outgoing]]:
        """Ask workers to drop what they cache; all of them if `node_ids` is empty.

        Returns whom it asks, and what to send. Raises UnknownNodes, and then asks nobody.
        """
        workers = {node_id: record for node_id, record in self.records.items() if record.is_worker}
        unknown = [node_id for node_id in node_ids if node_id not in workers]
        if unknown:
            raise UnknownNodes(unknown)
        asked = sorted(set(node_ids) or workers)
        return asked, [self._to_node(workers[node_id], evict=control_pb2.EvictPrefixes()) for node_id in asked]

    # Views.

    def snapshot(self) -> list[control_pb2.WatchResponse]:
        """Everything, as a new watcher is told it: a snapshot, and as changes the keys that would make it too large."""
        snapshot = control_pb2.Snapshot()
        rest: list[control_pb2.WatchResponse] = []
        room = KEYS_PER_MESSAGE
        for record in self.records.values():
            state = snapshot.nodes.add()
            state.CopyFrom(record.state())
            keys = iter(record.prefixes)
            state.prefixes.extend(itertools.islice(keys, room))
            room -= len(state.prefixes)
            for piece in _pieces(keys, KEYS_PER_MESSAGE):
                rest.append(self._prefixes_event(record, control_pb2.PrefixDelta(added=piece)))
        return [control_pb2.WatchResponse(control_epoch=self.control_epoch, snapshot=snapshot), *rest]

    def storage_view(self) -> control_pb2.StorageView:
        """The storage nodes, as workers were told last."""
        return control_pb2.StorageView(membership_epoch=self.membership_epoch, members=self._members)

    def roster(self) -> Roster:
        """What the next control plane needs to know."""
        nodes = {node_id: history.to_roster() for node_id, history in self._history.items()}
        return Roster(membership_epoch=self.membership_epoch, nodes=nodes)

    def restarts(self) -> dict[str, int]:
        """How often each node id got a new process without having left in good order; only those that did."""
        return {node_id: history.restarts for node_id, history in self._history.items() if history.restarts}

    @property
    def settled(self) -> bool:
        """Whether every node that a predecessor knew has been heard from or given up."""
        return not self._awaited

    # Steps.

    def _register(self, session: int, node: control_pb2.Node, now_s: float) -> list[Outgoing]:
        missing = [name for name in ("node_id", "incarnation", "address") if not getattr(node, name)]
        if node.role not in ROLES:
            missing.append("role")
        if missing:
            return [EndSession(session, "invalid", f"a registration needs {', '.join(missing)}")]
        history = self._history.setdefault(node.node_id, History())
        if history.superseded(node.incarnation):
            reason = f"incarnation {node.incarnation} of {node.node_id} was replaced by {history.incarnations[0]}"
            return [EndSession(session, "superseded", reason)]
        outgoing: list[Outgoing] = []
        record = NodeRecord(node=node, session=session, heard_at_s=now_s)
        old = self.records.get(node.node_id)
        if old is not None:
            outgoing.append(EndSession(old.session, "replaced", "the node has registered on another stream"))
            del self._sessions[old.session]
            if old.node.incarnation == node.incarnation:
                # The same process, whose old stream is not known to be broken yet: what it held it still holds.
                record.load, record.prefixes = old.load, old.prefixes
            else:
                outgoing += self._remove(old, f"replaced by incarnation {node.incarnation}")
        history.came(node.incarnation)
        self.roster_version += 1
        self.records[node.node_id] = record
        self._sessions[session] = node.node_id
        logger.info("%s: registered, incarnation %s, at %s", node.node_id, node.incarnation, node.address)
        outgoing.append(self._to_node(record, joined=control_pb2.Joined()))
        if self.settled and self._wants_views(record):
            outgoing.append(self._to_node(record, storage=self.storage_view()))
        outgoing.append(self._event(node=record.state()))
        return outgoing + self._membership()

    def _take_load(self, record: NodeRecord, load: control_pb2.Load) -> list[Outgoing]:
        record.load = load
        outgoing: list[Outgoing] = [self._event(node=record.state())]
        if self._awaited.pop(record.node.node_id, None) is not None and self.settled:
            return outgoing + self._settle()
        return outgoing + self._membership()

    def _take_prefixes(self, record: NodeRecord, delta: control_pb2.PrefixDelta) -> list[Outgoing]:
        if delta.reset:
            record.synced = True
            record.prefixes = set()
        elif not record.synced:
            return []  # A change to something unknown; the full account is on its way.
        record.prefixes.difference_update(delta.removed)
        record.prefixes.update(delta.added)
        return [ToWatchers(self._prefixes_event(record, delta))]

    def _forget(
        self, record: NodeRecord, reason: str, end: EndSession | None = None, *, in_good_order: bool = False
    ) -> list[Outgoing]:
        """The node is gone, and what storage views list may have changed."""
        del self._sessions[record.session]
        self._history[record.node.node_id].went(in_good_order=in_good_order)
        self.roster_version += 1
        outgoing: list[Outgoing] = [end] if end is not None else []
        return outgoing + self._remove(record, reason) + self._membership()

    def _remove(self, record: NodeRecord, reason: str) -> list[Outgoing]:
        del self.records[record.node.node_id]
        logger.info("%s: gone, incarnation %s: %s", record.node.node_id, record.node.incarnation, reason)
        return [self._gone(record.node.node_id, record.node.incarnation, reason)]

    def _settle(self) -> list[Outgoing]:
        """The takeover is over: say who did not come back, and send the first storage view."""
        outgoing: list[Outgoing] = []
        for node_id, incarnation in self._awaited.items():
            if node_id not in self.records:
                self._history[node_id].present = False
                logger.info("%s: not heard from since the control plane took over", node_id)
                outgoing.append(self._gone(node_id, incarnation, "not heard from since the control plane took over"))
        self._awaited.clear()
        return outgoing + self._membership(always=True)

    def _membership(self, *, always: bool = False) -> list[Outgoing]:
        """A new storage view for all who use one, if the members have changed since the last (or `always`)."""
        members = [
            control_pb2.StorageMember(
                node_id=record.node.node_id,
                incarnation=record.node.incarnation,
                address=record.node.address,
                weight=_weight(record.load),
            )
            for _, record in sorted(self.records.items())
            if record.is_member
        ]
        if not self.settled or (members == self._members and not always):
            return []
        self._members = members
        self.membership_epoch += 1
        self.roster_version += 1
        view = self.storage_view()
        return [self._to_node(record, storage=view) for record in self.records.values() if self._wants_views(record)]

    @staticmethod
    def _wants_views(record: NodeRecord) -> bool:
        return ROLES[record.node.role] != "gateway"

    # Messages.

    def _to_node(
        self,
        record: NodeRecord,
        *,
        joined: control_pb2.Joined | None = None,
        storage: control_pb2.StorageView | None = None,
        resync: control_pb2.Resync | None = None,
        evict: control_pb2.EvictPrefixes | None = None,
    ) -> ToNode:
        response = control_pb2.JoinResponse(
            control_epoch=self.control_epoch, joined=joined, storage=storage, resync=resync, evict=evict
        )
        return ToNode(record.session, response)

    def _event(self, *, node: control_pb2.NodeState) -> ToWatchers:
        return ToWatchers(control_pb2.WatchResponse(control_epoch=self.control_epoch, node=node))

    def _gone(self, node_id: str, incarnation: str, reason: str) -> ToWatchers:
        gone = control_pb2.NodeGone(node_id=node_id, incarnation=incarnation, reason=reason)
        return ToWatchers(control_pb2.WatchResponse(control_epoch=self.control_epoch, gone=gone))

    def _prefixes_event(self, record: NodeRecord, delta: control_pb2.PrefixDelta) -> control_pb2.WatchResponse:
        prefixes = control_pb2.NodePrefixes(
            node_id=record.node.node_id, incarnation=record.node.incarnation, delta=delta
        )
        return control_pb2.WatchResponse(control_epoch=self.control_epoch, prefixes=prefixes)


def _weight(load: control_pb2.Load | None) -> float:
    """A storage node's share of the keys: its GiB, or 1 if it does not say."""
    return (load.capacity_bytes / (1 << 30) if load is not None else 0.0) or 1.0


def _pieces(keys: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while piece := list(itertools.islice(keys, size)):
        yield piece
