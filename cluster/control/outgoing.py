"""What the cluster's state tells the edge to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protos import control_pb2

EndKind = Literal["invalid", "superseded", "replaced", "silent"]
"""invalid: nonsense was sent; superseded: a newer process of this node is known; replaced: a newer stream of this node
came; silent: nothing was heard for too long."""


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send `response` on the Join stream `session`."""

    session: int
    response: control_pb2.JoinResponse


@dataclass(frozen=True, slots=True)
class ToWatchers:
    """Send `response` to everybody who watches."""

    response: control_pb2.WatchResponse


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the Join stream `session`, which the state has forgotten already."""

    session: int
    kind: EndKind
    reason: str


Outgoing = ToNode | ToWatchers | EndSession
