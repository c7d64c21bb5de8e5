"""Clients that leave at any instant: pages come back without new work, and the next request is served."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.system.cluster import Cluster
from tests.system.conftest import PAGE, TINY


def leave(cluster: Cluster, seed: int) -> None:
    """One client: reads some events or none, then hangs up."""
    rng = random.Random(seed)
    body = {
        "model": TINY,
        "prompt": [rng.randrange(3, 512) for _ in range(rng.choice([3, 5 * PAGE, 900, 2500]))],
        "max_tokens": 600,
        "temperature": 0,
        "ignore_eos": True,
    }
    if seed % 4 == 0:
        leave_before_the_first_event(cluster, body, rng.random() * 0.3)
        return
    events = cluster.stream(body)
    for _ in range(rng.choice([1, 2, 5, 40])):
        if next(events, None) is None:
            break
    events.close()


def leave_before_the_first_event(cluster: Cluster, body: dict, after_s: float) -> None:
    """Hangs up while the request is queued, computed or pulled, streamed or not."""
    try:
        cluster.http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=max(after_s, 0.001)))
    except httpx.ReadTimeout:
        return


def test_forty_requests_cancelled_at_random_instants_leak_nothing(cluster):
    cluster.until_idle()
    with ThreadPoolExecutor(8) as clients:
        for done in [clients.submit(leave, cluster, seed) for seed in range(40)]:
            done.result()
    workers = cluster.until_idle()
    assert workers["decode-0"]["pages_quarantined"] == 0
    assert workers["prefill-0"]["pages_quarantined"] == 0
    assert len(cluster.generate(TINY, [5, 6, 7], 4)[0]) == 4


def test_a_cancelled_neighbour_changes_no_token(cluster, tiny):
    tokens = [7] * (3 * PAGE)
    expected = cluster.generate(TINY, tokens, 60)[0]
    neighbours = [threading.Thread(target=leave, args=(cluster, seed)) for seed in range(1, 7)]
    for neighbour in neighbours:
        neighbour.start()
    assert cluster.generate(TINY, tokens, 60)[0] == expected
    for neighbour in neighbours:
        neighbour.join()
    cluster.until_idle()
