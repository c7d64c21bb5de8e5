"""Placement on synthetic views of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.router import Job, Router, RouterConfig
from cluster.view import ClusterView, Fingerprint, NodeLoad, NodeView, Peer, Role
from kvstore.pages import page_keys
from protos.registration import WIRE_VERSION

PAGE = 16
FINGERPRINT = Fingerprint(
    model="m", namespace=b"n" * 16, page_size=PAGE, page_bytes=1000, dtype="float32", wire_version=WIRE_VERSION
)
PROMPT = list(range(1000))
KEYS = page_keys(FINGERPRINT.namespace, PROMPT, PAGE)


def add(view: ClusterView, role: Role, node_id: str, keys: list[bytes] | None = None, **load: Any) -> NodeView:
    fingerprint = load.pop("fingerprint", FINGERPRINT)
    defaults = {
        "ready": True,
        "pages_total": 1000,
        "room_pages": 1000,
        "prefill_tokens_per_s": 1000.0,
        "pull_bytes_per_s": 1e6,
    }
    node = NodeView(
        peer=Peer(node_id=node_id, incarnation="a", address=f"{node_id}:1"),
        role=role,
        fingerprint=fingerprint,
        load=NodeLoad(**(defaults | load)),
        keys=set(keys or ()),
    )
    view.nodes[node_id] = node
    return node


def job(prompt: list[int] = PROMPT, max_tokens: int | None = 10) -> Job:
    return Job(model="m", token_ids=prompt, max_tokens=max_tokens)


def placements(router: Router, view: ClusterView, *jobs: Job) -> list[tuple[str, list[str]]]:
    routes = [router.routes(view, item, 0.0)[0] for item in jobs]
    return [(route.decode.node_id, [peer.node_id for peer in route.prefill]) for route in routes]


def test_without_a_ready_decode_worker_of_the_model_there_is_no_route():
    view = ClusterView()
    add(view, Role.PREFILL, "p0")
    add(view, Role.DECODE, "cold", ready=False)
    add(view, Role.DECODE, "other", fingerprint=Fingerprint(model="other", page_size=PAGE, wire_version=WIRE_VERSION))
    add(view, Role.DECODE, "newer", fingerprint=Fingerprint(model="m", page_size=PAGE, wire_version=WIRE_VERSION + 1))
    assert Router(RouterConfig()).routes(view, job(), 0.0) == []


def test_the_time_to_the_first_token_is_queue_and_uncached_tokens_and_bytes_over_measured_rates():
    view = ClusterView()
    add(view, Role.DECODE, "d0", KEYS[:10], pull_bytes_per_s=1e5)
    add(view, Role.PREFILL, "p0", KEYS[:4], queued_tokens=500, prefill_tokens_per_s=2000.0, pull_bytes_per_s=2e5)
    (route,) = Router(RouterConfig()).routes(view, job(), 0.0)
    assert route.uncached_tokens == 1000 - 10 * PAGE
    queue_s, compute_s = 500 / 2000, (1000 - 160) / 2000
    into_prefill_s, into_decode_s = 6 * 1000 / 2e5, 53 * 1000 / 1e5  # 63 pages in all, the tail page among them
    assert route.ttft_s == pytest.approx(queue_s + compute_s + into_prefill_s + into_decode_s)


def test_the_prefill_worker_that_holds_the_prefix_is_asked_first_unless_its_queue_costs_more():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    add(view, Role.PREFILL, "p0")
    holder = add(view, Role.PREFILL, "p1", KEYS[:50])
    add(view, Role.PREFILL, "p2", queued_tokens=100)
    router = Router(RouterConfig())
    assert placements(router, view, job()) == [("d0", ["p1", "p0", "p2"])]
    holder.load = NodeLoad(ready=True, queued_tokens=950, prefill_tokens_per_s=1000.0, pull_bytes_per_s=1e6)
    assert placements(router, view, job()) == [("d0", ["p0", "p2", "p1"])]


def test_pages_of_storage_nodes_count_as_cached_for_everybody_who_can_pull_them():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    add(view, Role.PREFILL, "p0")
    add(view, Role.KV, "k0", KEYS[:20])
    add(view, Role.KV, "k1", KEYS[30:40])
    (route,) = Router(RouterConfig()).routes(view, job(), 0.0)
    assert route.uncached_tokens == 1000 - 30 * PAGE


@pytest.mark.parametrize(("num_held", "is_local"), [(62, True), (46, True), (45, False), (0, False)])
def test_short_and_mostly_cached_prompts_get_no_prefill_peers(num_held: int, is_local: bool):
    view = ClusterView()
    add(view, Role.DECODE, "d0", KEYS[:num_held])
    add(view, Role.PREFILL, "p0")
    (route,) = Router(RouterConfig(local_prefill_max_tokens=264)).routes(view, job(), 0.0)
    assert (route.prefill == ()) is is_local


def test_the_page_with_the_last_token_never_counts_as_cached():
    view = ClusterView()
    prompt = PROMPT[: 4 * PAGE]
    add(view, Role.DECODE, "d0", KEYS[:4])
    (route,) = Router(RouterConfig()).routes(view, job(prompt), 0.0)
    assert route.uncached_tokens == PAGE


def test_only_prefill_workers_with_the_decode_workers_fingerprint_are_named_and_at_most_three():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    for index in range(5):
        add(view, Role.PREFILL, f"p{index}", queued_tokens=index)
    other = Fingerprint(model="m", namespace=b"x" * 16, page_size=PAGE, page_bytes=1000, wire_version=WIRE_VERSION)
    add(view, Role.PREFILL, "stranger", fingerprint=other)
    add(view, Role.PREFILL, "starting", ready=False)
    assert placements(Router(RouterConfig()), view, job()) == [("d0", ["p0", "p1", "p2"])]


def test_without_prefill_workers_the_decode_worker_computes_the_prompt_itself():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    assert placements(Router(RouterConfig()), view, job()) == [("d0", [])]


def test_a_worker_with_room_comes_before_one_without():
    view = ClusterView()
    add(view, Role.DECODE, "full", KEYS[:60], room_pages=2)
    add(view, Role.DECODE, "empty", room_pages=64)
    routes = Router(RouterConfig()).routes(view, job(max_tokens=16), 0.0)
    assert [(route.decode.node_id, route.has_room, route.needed_pages) for route in routes] == [
        ("empty", True, 64),
        ("full", False, 4),
    ]


def test_a_client_that_names_no_limit_is_given_the_growth_reserve():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    (route,) = Router(RouterConfig(growth_reserve_tokens=160)).routes(view, job(PROMPT[:16], max_tokens=None), 0.0)
    assert route.needed_pages == 11


def test_equal_workers_take_turns():
    view = ClusterView()
    for index in range(3):
        add(view, Role.DECODE, f"d{index}")
        add(view, Role.PREFILL, f"p{index}")
    router = Router(RouterConfig())
    placed = placements(router, view, *[job() for _ in range(6)])
    assert sorted(decode for decode, _ in placed) == ["d0", "d0", "d1", "d1", "d2", "d2"]
    assert sorted(prefill[0] for _, prefill in placed) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_among_nearly_equal_predictions_the_emptier_decode_worker_wins():
    view = ClusterView()
    add(view, Role.DECODE, "busy", running=30, pull_bytes_per_s=1.02e6)
    add(view, Role.DECODE, "idle", pull_bytes_per_s=1e6)
    add(view, Role.PREFILL, "p0")
    assert [decode for decode, _ in placements(Router(RouterConfig()), view, job(), job())] == ["idle", "idle"]


def test_what_was_placed_since_the_last_load_report_counts_as_queued_until_the_next_one():
    view = ClusterView()
    add(view, Role.DECODE, "d0")
    for index in range(2):
        add(view, Role.PREFILL, f"p{index}", queued_tokens=index * 700)
    router = Router(RouterConfig())
    (route,) = router.routes(view, job(), 0.0)
    assert [peer.node_id for peer in route.prefill] == ["p0", "p1"]
    router.placed(route, now_s=5.0)
    (route,) = router.routes(view, job(), 5.5)
    assert [peer.node_id for peer in route.prefill] == ["p1", "p0"]
    for node in view.nodes.values():
        node.loaded_at_s = 6.0
    (route,) = router.routes(view, job(), 6.0)
    assert [peer.node_id for peer in route.prefill] == ["p0", "p1"]


def test_while_the_control_plane_is_away_placements_count_for_a_few_seconds_and_no_longer():
    view = ClusterView()
    add(view, Role.DECODE, "d0", room_pages=640)
    add(view, Role.PREFILL, "p0")
    router = Router(RouterConfig(unreported_s=5.0))
    (fresh,) = router.routes(view, job(), 100.0)
    for number in range(20_000):
        router.placed(fresh, now_s=101.0 + number / 10_000)
    (crowded,) = router.routes(view, job(), 103.0)
    assert (fresh.has_room, crowded.has_room) == (True, False)
    assert crowded.ttft_s > fresh.ttft_s
    (later,) = router.routes(view, job(), 108.0)  # no load report came
    assert later == fresh, "requests flow on the last snapshot"


def test_unmeasured_rates_have_stated_defaults():
    view = ClusterView()
    add(view, Role.DECODE, "d0", prefill_tokens_per_s=0.0, pull_bytes_per_s=0.0)
    (route,) = Router(RouterConfig(default_prefill_tokens_per_s=500.0)).routes(view, job(), 0.0)
    assert route.ttft_s == pytest.approx(2.0)


def test_tenants_share_no_keys():
    view = ClusterView()
    add(view, Role.DECODE, "d0", KEYS)
    salted = Job(model="m", token_ids=PROMPT, max_tokens=10, tenant_salt=b"tenant")
    (route,) = Router(RouterConfig()).routes(view, salted, 0.0)
    assert route.uncached_tokens == 1000


def test_nonsense_in_the_config_is_refused():
    with pytest.raises(ValueError, match="max_candidates must be > 0"):
        RouterConfig(max_candidates=0)
