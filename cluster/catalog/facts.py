"""The durable facts: what the catalog stores, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the operator wants to run."""

    counts: Mapping[str, int]
    """Nodes per role, such as {"prefill": 1, "decode": 2, "kv": 2, "gateway": 1}."""

    def __post_init__(self) -> None:
        for role, count in self.counts.items():
            if count < 0:
                raise ValueError(f"{role}: a count must be >= 0, got {count}")

    def to_json(self) -> str:
        return json.dumps({"counts": dict(self.counts)})

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Raises ValueError, KeyError or TypeError if `text` is not what `to_json` wrote."""
        counts = json.loads(text)["counts"]
        return cls(counts={str(role): int(count) for role, count in counts.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class RosterEntry:
    """What is remembered of a node id."""

    incarnations: tuple[str, ...]
    """Newest first. The older ones have been replaced and may not come back."""
    present: bool
    """Whether it was registered when last heard of."""
    restarts: int
    """How often a new incarnation replaced one that had not left in good order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """What a control plane needs to know of its predecessor's nodes."""

    membership_epoch: int = 0
    nodes: Mapping[str, RosterEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        nodes = {node_id: asdict(entry) for node_id, entry in self.nodes.items()}
        return json.dumps({"membership_epoch": self.membership_epoch, "nodes": nodes})

    @classmethod
    def from_json(cls, text: str) -> Roster:
        """Raises ValueError, KeyError or TypeError if `text` is not what `to_json` wrote."""
        value: dict[str, Any] = json.loads(text)
        nodes = {
            node_id: RosterEntry(
                incarnations=tuple(str(incarnation) for incarnation in entry["incarnations"]),
                present=bool(entry["present"]),
                restarts=int(entry["restarts"]),
            )
            for node_id, entry in value["nodes"].items()
        }
        return cls(membership_epoch=int(value["membership_epoch"]), nodes=nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One action of an operator."""

    actor: str
    """Who asked, as far as it is known: a peer's address, a program's name."""
    action: str
    """A stable word, such as "evict-prefixes"."""
    details: str
    """What of it a person would want to read later."""
    at_unix_s: float = 0.0
    """When; the catalog's own clock, filled in as the entry is read back."""
