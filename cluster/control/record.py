"""What is known of one registered node, and of one that was."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.catalog import RosterEntry
from protos import common_pb2, control_pb2

MAX_INCARNATIONS = 8
"""How many of a node id's processes are remembered: one that wakes up after more restarts than this is not refused."""

ROLES: dict[int, str] = {
    common_pb2.ROLE_PREFILL: "prefill",
    common_pb2.ROLE_DECODE: "decode",
    common_pb2.ROLE_KV: "kv",
    common_pb2.ROLE_GATEWAY: "gateway",
}
WORKERS = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)


@dataclass(kw_only=True, slots=True)
class NodeRecord:
    """A node that is registered now."""

    node: control_pb2.Node
    session: int
    heard_at_s: float
    load: control_pb2.Load | None = None
    prefixes: set[bytes] = field(default_factory=set)
    next_sequence: int = 2
    synced: bool = False
    """Whether a full account of the prefixes came after the registration or the last gap."""

    @property
    def is_worker(self) -> bool:
        return self.node.role in WORKERS

    @property
    def is_member(self) -> bool:
        """Whether storage views list it: from its first load on, since that says how large it is."""
        return self.node.role == common_pb2.ROLE_KV and self.load is not None

    def state(self) -> control_pb2.NodeState:
        """Without prefixes."""
        return control_pb2.NodeState(node=self.node, load=self.load)


@dataclass(kw_only=True, slots=True)
class History:
    """What is remembered of a node id over its processes' lives."""

    incarnations: list[str] = field(default_factory=list)
    """Newest first; none after it left in good order."""
    present: bool = False
    restarts: int = 0

    @classmethod
    def from_roster(cls, entry: RosterEntry) -> History:
        return cls(incarnations=list(entry.incarnations), present=entry.present, restarts=entry.restarts)

    def to_roster(self) -> RosterEntry:
        return RosterEntry(incarnations=tuple(self.incarnations), present=self.present, restarts=self.restarts)

    def superseded(self, incarnation: str) -> bool:
        """Whether a newer process than `incarnation` has been seen."""
        return incarnation in self.incarnations[1:]

    def came(self, incarnation: str) -> None:
        self.present = True
        if self.incarnations[:1] == [incarnation]:
            return
        if self.incarnations:
            self.restarts += 1
        self.incarnations = [incarnation, *self.incarnations][:MAX_INCARNATIONS]

    def went(self, *, in_good_order: bool) -> None:
        self.present = False
        if in_good_order:
            self.incarnations = []
