"""`headrace status`: who is in a cluster and how they are."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from cluster.cli.control import call_control
from cluster.cli.which import ready_cluster
from cluster.launch import Addresses, ClusterHome
from cluster.spec import about_bytes
from protos import common_pb2, control_pb2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="who is in it, and how they are", description="Show a running cluster.")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--cluster", metavar="NAME", help="which cluster, where several run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    addresses = ready_cluster(arguments.cluster)
    request = control_pb2.GetStatusRequest()
    response = call_control(addresses.control, lambda stub, timeout_s: stub.GetStatus(request, timeout=timeout_s))
    status = as_dict(addresses, ClusterHome(addresses.cluster).processes(), response)
    print(json.dumps(status, indent=2) if arguments.json else as_text(status))
    return 0


def as_dict(addresses: Addresses, processes: dict[str, int], response: control_pb2.GetStatusResponse) -> dict[str, Any]:
    """What `--json` prints. `workers` has every registered node; the counters are those of its `Load`.

    processes: process ids of all nodes as the launcher saw them, of those too that are not registered.
    """
    return {
        "cluster": response.cluster,
        "started_unix_s": addresses.started_unix_s,
        "control_epoch": response.control_epoch,
        "membership_epoch": response.membership_epoch,
        "catalog": response.catalog,
        "addresses": dataclasses.asdict(addresses),
        "processes": processes,
        "workers": [_worker(state, response.restarts) for state in response.nodes],
        "degradations": [_degradation(each) for each in response.degradations],
    }


def as_text(status: dict[str, Any], now_unix_s: float | None = None) -> str:
    """A page for a person. now_unix_s: the time; None takes the clock's."""
    addresses, now_unix_s = status["addresses"], time.time() if now_unix_s is None else now_unix_s
    lines = [
        f"cluster {status['cluster']}, up {_duration(now_unix_s - status['started_unix_s'])}",
        "",
        f"  OpenAI API  http://{addresses['http']}/v1",
        f"  gRPC        {addresses['grpc']}",
        f"  control     {addresses['control']}, epoch {status['control_epoch']}",
        f"  catalog     {status['catalog']}",
        f"  models      {', '.join(addresses['models'])}",
        "",
        *_table([_ROW_HEADS, *(_row(worker) for worker in status["workers"])]),
        "",
    ]
    own = [{**each, "who": worker["node_id"]} for worker in status["workers"] for each in worker["degradations"]]
    degradations = [{**each, "who": "cluster"} for each in status["degradations"]] + own
    lines += ["degradations:"] if degradations else ["no degradations"]
    for each in degradations:
        since = _duration(now_unix_s - each["since_unix_s"])
        lines.append(f"  {each['who']}: {each['kind']}, for {since}: {each['consequence']}")
    return "\n".join(lines)


_ROW_HEADS = ("node", "pid", "restarts", "ready", "running", "waiting", "free/total", "pulled", "way", "stored")


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    has_pool, is_store = worker["pages_total"] > 0, worker["capacity_bytes"] > 0
    return (
        worker["node_id"],
        str(worker["pid"]),
        str(worker["restarts"]),
        "yes" if worker["ready"] else "no",
        str(worker["running"]),
        str(worker["waiting"]),
        f"{worker['pages_free']}/{worker['pages_total']}" if has_pool else "-",
        f"{worker['pages_pulled']} pages, {about_bytes(worker['bytes_pulled'])}" if worker["pages_pulled"] else "-",
        worker["transport"] or "-",
        f"{about_bytes(worker['stored_bytes'])} of {about_bytes(worker['capacity_bytes'])}" if is_store else "-",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _worker(state: control_pb2.NodeState, restarts: Any) -> dict[str, Any]:
    node, load = state.node, state.load
    counters = {
        field.name: getattr(load, field.name)
        for field in control_pb2.Load.DESCRIPTOR.fields
        if field.name != "degradations"
    }
    return {
        "node_id": node.node_id,
        "role": common_pb2.Role.Name(node.role).removeprefix("ROLE_").lower(),
        "incarnation": node.incarnation,
        "address": node.address,
        "http_address": node.http_address,
        "host": node.host,
        "pid": node.pid,
        "restarts": restarts.get(node.node_id, 0),
        "model": node.fingerprint.model,
        **counters,
        "degradations": [_degradation(each) for each in load.degradations],
    }


def _degradation(degradation: control_pb2.Degradation) -> dict[str, Any]:
    return {
        "kind": degradation.kind,
        "consequence": degradation.consequence,
        "since_unix_s": degradation.since_unix_s,
    }


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"
