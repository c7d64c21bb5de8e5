"""Which nodes a spec asks for, and what each process is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from cluster.spec import HostPort, Spec

Kind = Literal["control", "kv", "prefill", "decode", "gateway"]

STOP_S = 5.0
"""How long a node that has nothing left to finish may take to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What the launcher has settled before any node is made."""

    control: HostPort
    """Where the control plane listens, before and after a restart."""
    gateways: tuple[tuple[HostPort, HostPort], ...]
    """HTTP and gRPC address of each gateway."""
    catalog_url: str
    host: str | None
    """Address that nodes listen on and advertise; None: each that of the machine it runs on."""
    cores: int
    """That the workers of one machine share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """One node. Travels to the process that runs it, which makes the node's own config from it (`build.py`)."""

    node_id: str
    kind: Kind
    spec: Spec
    site: Site
    index: int = 0
    """Which of the nodes of its kind."""
    group: int = 0
    """Which of the spec's groups of workers it belongs to."""

    @property
    def stop_deadline_s(self) -> float:
        """How long it may take to stop in good order."""
        return STOP_S + (self.spec.timing.drain_s if self.kind == "gateway" else 0.0)

    @property
    def beside_launcher(self) -> bool:
        """Whether its addresses are the launcher's machine's, so that it has to run there."""
        return self.kind in ("control", "gateway")


def plan_nodes(spec: Spec, site: Site) -> list[NodePlan]:
    """The control plane first, then storage nodes, workers and gateways, each numbered from 0."""
    wanted: list[tuple[Kind, list[int]]] = [
        ("kv", [0] * spec.kv.replicas),
        ("prefill", [number for number, group in enumerate(spec.prefill) for _ in range(group.replicas)]),
        ("decode", [number for number, group in enumerate(spec.decode) for _ in range(group.replicas)]),
        ("gateway", [0] * spec.gateway.replicas),
    ]
    plans = [NodePlan(node_id="control", kind="control", spec=spec, site=site)]
    for kind, groups in wanted:
        for index, group in enumerate(groups):
            node_id = f"{kind}-{index}"
            plans.append(NodePlan(node_id=node_id, kind=kind, spec=spec, site=site, index=index, group=group))
    return plans


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
