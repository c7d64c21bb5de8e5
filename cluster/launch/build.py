"""From a plan to the node that it describes. Runs in the node's process, and imports what that kind of node needs."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from cluster.launch.models import model_source
from cluster.launch.plan import NodePlan
from cluster.spec import WorkerGroup
from protos.registration import NodeConfig


class Node(Protocol):
    """What every node is to the launcher. `start` returns when it can serve; `stop` is idempotent."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@runtime_checkable
class EndingNode(Protocol):
    """A node that can find that it is of no use any more, and has to be replaced."""

    async def wait_ended(self) -> str:
        """Wait until it no longer acts, for whatever reason; says which."""
        ...


def build_node(plan: NodePlan, host: str) -> Node:
    """The node, not yet started. host: the address of this machine for nodes that listen on their own machine's."""
    match plan.kind:
        case "control":
            return _control(plan)
        case "kv":
            return _storage(plan, host)
        case "prefill":
            return _prefill(plan, host)
        case "decode":
            return _decode(plan, host)
        case "gateway":
            return _gateway(plan, host)


def _control(plan: NodePlan) -> Node:
    from cluster.control import ControlConfig, ControlPlane

    config = ControlConfig(
        cluster=plan.spec.cluster,
        host=plan.site.control.host,
        port=plan.site.control.port,
        catalog_url=plan.site.catalog_url,
        silence_s=plan.spec.timing.silence_s,
    )
    return ControlPlane(config)


def _storage(plan: NodePlan, host: str) -> Node:
    from kvstore.node import StorageConfig, StorageNode

    config = StorageConfig(
        node=_node_config(plan, host),
        memory_bytes=plan.spec.kv.memory_bytes,
        transports=tuple(plan.spec.transports),
        lossless=plan.spec.kv.codec == "lossless",
    )
    return StorageNode(config)


def _prefill(plan: NodePlan, host: str) -> Node:
    from prefill_node import PrefillWorker
    from prefill_node.config import PrefillConfig
    from prefill_node.core import PrefillCoreConfig

    group, timing = plan.spec.prefill[plan.group], plan.spec.timing
    core = PrefillCoreConfig(pull_deadline_s=timing.pull_deadline_s, grace_s=timing.grace_s, fetch=group.fetch)
    return PrefillWorker(PrefillConfig(**_worker_config(plan, group, host), core=core))


def _decode(plan: NodePlan, host: str) -> Node:
    from decode_node import DecodeWorker
    from decode_node.config import DecodeConfig
    from decode_node.core import DecodeCoreConfig

    group, timing = plan.spec.decode[plan.group], plan.spec.timing
    core = DecodeCoreConfig(
        local_prefill_max_tokens=plan.spec.routing.local_prefill_max_tokens,
        pull_deadline_s=timing.pull_deadline_s,
        grace_s=timing.grace_s,
    )
    return DecodeWorker(DecodeConfig(**_worker_config(plan, group, host), core=core))


def _gateway(plan: NodePlan, host: str) -> Node:
    from cluster.gateway import Gateway, GatewayConfig
    from cluster.router import RouterConfig

    http, grpc = plan.site.gateways[plan.index]
    config = GatewayConfig(
        node=_node_config(plan, host),
        models=tuple(model_source(model) for model in plan.spec.models),
        http_host=http.host,
        http_port=http.port,
        grpc_host=grpc.host,
        grpc_port=grpc.port,
        router=RouterConfig(
            local_prefill_max_tokens=plan.spec.routing.local_prefill_max_tokens,
            growth_reserve_tokens=plan.spec.routing.growth_reserve_tokens,
        ),
        stop_grace_s=plan.spec.timing.drain_s,
    )
    return Gateway(config)


def _node_config(plan: NodePlan, host: str) -> NodeConfig:
    return NodeConfig(
        node_id=plan.node_id,
        control_address=str(plan.site.control),
        host=plan.site.host or host,
        heartbeat_s=plan.spec.timing.heartbeat_s,
    )


def _worker_config(plan: NodePlan, group: WorkerGroup, host: str) -> dict[str, Any]:
    """What both kinds of worker are told."""
    from engine.core import EngineConfig
    from kvstore.plane import PlaneConfig

    spec = plan.spec
    model = spec.model_of(group)
    num_workers = sum(each.replicas for each in [*spec.prefill, *spec.decode])
    return {
        "node": _node_config(plan, host),
        "model": model_source(model),
        "plane": PlaneConfig(pool_bytes=group.pool_bytes, transports=tuple(spec.transports)),
        "engine": EngineConfig(
            chunk_tokens=group.chunk_tokens,
            max_running=group.max_running,
            growth_reserve_tokens=spec.routing.growth_reserve_tokens,
        ),
        "page_size": model.page_size,
        "threads": max(1, plan.site.cores // num_workers) if group.threads == "auto" else group.threads,
    }
