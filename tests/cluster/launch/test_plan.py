"""From a spec to its nodes."""

from __future__ import annotations

import pickle
from pathlib import Path

from cluster.launch.build import build_node
from cluster.launch.models import model_shape, model_source
from cluster.launch.plan import NodePlan, Site, plan_nodes
from cluster.spec import HostPort, ModelShape, Spec, parse_spec

SITE = Site(
    control=HostPort("127.0.0.1", 1),
    gateways=(
        (HostPort("127.0.0.1", 2), HostPort("127.0.0.1", 3)),
        (HostPort("127.0.0.1", 4), HostPort("127.0.0.1", 5)),
    ),
    catalog_url="unix:///x",
    host="127.0.0.1",
    cores=8,
)
TWO_MODELS = """
models: [{name: a, weights: 'random:1', config: c}, {name: b, weights: 'random:2', config: c}]
prefill: [{model: a, replicas: 2}, {model: b}]
decode: [{model: b}, {model: a, threads: 3}]
kv: {replicas: 1}
gateway: {replicas: 2}
timing: {drain_s: 9}
"""


def plans(text: str = "") -> dict[str, NodePlan]:
    spec = parse_spec(text, name="x", folder=Path("/models")).spec
    return {plan.node_id: plan for plan in plan_nodes(spec, SITE)}


def test_the_laptop_has_one_of_each_and_two_storage_nodes() -> None:
    assert list(plans()) == ["control", "kv-0", "kv-1", "prefill-0", "decode-0", "gateway-0"]


def test_workers_are_numbered_through_their_groups() -> None:
    found = plans(TWO_MODELS)
    assert {
        name: (plan.kind, plan.index, plan.group) for name, plan in found.items() if "fill" in name or "code" in name
    } == {
        "prefill-0": ("prefill", 0, 0),
        "prefill-1": ("prefill", 1, 0),
        "prefill-2": ("prefill", 2, 1),
        "decode-0": ("decode", 0, 0),
        "decode-1": ("decode", 1, 1),
    }


def test_only_what_has_the_launchers_addresses_runs_beside_it() -> None:
    assert {name for name, plan in plans(TWO_MODELS).items() if plan.beside_launcher} == {
        "control",
        "gateway-0",
        "gateway-1",
    }


def test_a_gateway_may_drain_before_it_stops() -> None:
    found = plans(TWO_MODELS)
    assert found["gateway-0"].stop_deadline_s == found["decode-0"].stop_deadline_s + 9


def test_a_plan_travels_to_another_process() -> None:
    plan = plans(TWO_MODELS)["decode-1"]
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_every_kind_of_node_can_be_built_from_the_default_spec() -> None:
    for plan in plans().values():
        build_node(plan, "127.0.0.1")


def test_the_shape_of_the_laptops_model_is_read_from_its_own_file() -> None:
    assert model_shape(Spec().models[0]) == ModelShape(context_tokens=8192, page_bytes=368_640)


def test_a_limited_context_does_not_hide_what_the_model_was_made_for() -> None:
    model = parse_spec("models: [{context_tokens: 100}]", name="x", folder=Path("/")).spec.models[0]
    assert model_source(model).context_tokens == 100
    assert model_shape(model).context_tokens == 8192
