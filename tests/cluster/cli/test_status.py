"""What `headrace status` makes of the control plane's answer."""

from __future__ import annotations

import json

from cluster.cli.status import as_dict, as_text
from cluster.launch import Addresses
from protos import common_pb2, control_pb2

ADDRESSES = Addresses(
    cluster="laptop",
    http="127.0.0.1:8000",
    grpc="127.0.0.1:8001",
    control="127.0.0.1:4000",
    ray="127.0.0.1:5000",
    catalog="unix:///x",
    models=["m"],
    launcher_pid=7,
    started_unix_s=1_000.0,
)


def response() -> control_pb2.GetStatusResponse:
    decode = control_pb2.NodeState(
        node=control_pb2.Node(
            node_id="decode-0", incarnation="i1", role=common_pb2.ROLE_DECODE, address="127.0.0.1:6000", pid=42
        ),
        load=control_pb2.Load(
            ready=True,
            pages_total=100,
            pages_free=90,
            pages_pulled=3,
            bytes_pulled=3 * 368_640,
            transport="nixl:cma",
            degradations=[control_pb2.Degradation(kind="transport-tcp", consequence="slow", since_unix_s=1_030.0)],
        ),
    )
    store = control_pb2.NodeState(
        node=control_pb2.Node(node_id="kv-0", role=common_pb2.ROLE_KV),
        load=control_pb2.Load(stored_bytes=1 << 20, capacity_bytes=1 << 28),
    )
    return control_pb2.GetStatusResponse(
        cluster="laptop",
        control_epoch=3,
        nodes=[decode, store],
        restarts={"decode-0": 2},
        catalog="unix:///x",
        degradations=[control_pb2.Degradation(kind="catalog", consequence="no changes", since_unix_s=940.0)],
    )


def test_programs_get_every_counter_of_every_node() -> None:
    status = json.loads(json.dumps(as_dict(ADDRESSES, {"control": 5}, response())))
    decode, store = status["workers"]
    assert decode["role"] == "decode"
    assert (decode["pages_pulled"], decode["bytes_pulled"]) == (3, 1_105_920)
    assert (decode["pages_total"], decode["pages_free"], decode["transport"]) == (100, 90, "nixl:cma")
    assert (decode["pid"], decode["restarts"], decode["incarnation"]) == (42, 2, "i1")
    assert (store["role"], store["restarts"]) == ("kv", 0)
    counters = {field.name for field in control_pb2.Load.DESCRIPTOR.fields}
    assert all(counters <= set(worker) for worker in status["workers"])
    assert status["addresses"]["http"] == "127.0.0.1:8000"
    assert status["processes"] == {"control": 5}


def test_a_person_gets_a_page() -> None:
    page = as_text(as_dict(ADDRESSES, {}, response()), now_unix_s=1_090.0).splitlines()
    assert page[0] == "cluster laptop, up 1 min"
    decode, store = (line.split() for line in page if line.startswith(("  decode-0 ", "  kv-0 ")))
    assert decode == ["decode-0", "42", "2", "yes", "0", "0", "90/100", "3", "pages,", "1.05MiB", "nixl:cma", "-"]
    assert store[-3:] == ["1MiB", "of", "256MiB"]
    assert page[-2:] == ["  cluster: catalog, for 2 min: no changes", "  decode-0: transport-tcp, for 1 min: slow"]


def test_a_healthy_cluster_says_so() -> None:
    healthy = control_pb2.GetStatusResponse(cluster="laptop")
    assert as_text(as_dict(ADDRESSES, {}, healthy), now_unix_s=1_000.0).endswith("no degradations")
