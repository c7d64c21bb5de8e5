"""Processes that die: the request completes with the same text, and the cluster heals."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.system.cluster import Cluster
from tests.system.conftest import TINY


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


def text_while(cluster: Cluster, tokens: list[int], max_tokens: int, after: int, act) -> str:
    """The streamed text; `act` is called once, when `after` events have come."""
    body = {"model": TINY, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    text, finish = "", None
    for number, event in enumerate(cluster.stream(body)):
        assert "error" not in event, event
        if number == after:
            act()
        text += event["choices"][0]["text"]
        finish = event["choices"][0]["finish_reason"] or finish
    assert finish == "length"
    return text


def test_a_decode_worker_dies_mid_stream(cluster):
    tokens = prompt(100, seed=1)
    before = cluster.until_idle()["decode-0"]
    expected = text_while(cluster, tokens, 3000, -1, lambda: None)
    retries = cluster.retries()
    assert text_while(cluster, tokens, 3000, 10, lambda: cluster.kill("decode-0")) == expected
    assert cluster.retries() > retries, "it died at its work, and the request went on elsewhere"
    cluster.until_back("decode-0", before["incarnation"])
    assert cluster.until_idle()["decode-0"]["restarts"] > before["restarts"]


def test_a_prefill_worker_dies_while_it_computes(cluster):
    prompts = [prompt(3900, seed=2 + number) for number in range(4)]
    before = cluster.until_idle()["prefill-0"]
    retries = cluster.retries()
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [clients.submit(cluster.generate, TINY, tokens, 8) for tokens in prompts]
        cluster.until(
            lambda workers: workers["prefill-0"]["tokens_computed"] > before["tokens_computed"], "computing has begun"
        )
        cluster.kill("prefill-0")
        answered = [answer.result()[0] for answer in answers]
    assert cluster.retries() > retries, "it died at its work, and the requests were placed again"
    cluster.until_back("prefill-0", before["incarnation"])
    assert answered == [cluster.generate(TINY, tokens, 8)[0] for tokens in prompts]
    assert cluster.until_idle()["prefill-0"]["restarts"] > before["restarts"]


def test_a_storage_node_dies(cluster):
    tokens = prompt(600, seed=3)
    expected = cluster.generate(TINY, tokens, 20)[0]
    cluster.flush()
    workers = cluster.workers()
    held = [name for name in ("kv-0", "kv-1") if workers[name]["stored_bytes"]]
    assert held
    for name in held:
        cluster.kill(name)
    assert cluster.generate(TINY, tokens, 20)[0] == expected
    for name in held:
        cluster.until_back(name, workers[name]["incarnation"])
    cluster.flush()
    assert cluster.generate(TINY, tokens, 20)[0] == expected


def test_the_control_plane_dies_and_comes_back_from_the_catalog(cluster):
    status = cluster.status()
    nodes = set(cluster.workers())
    expected = cluster.generate(TINY, [5, 6, 7], 20)[0]
    os.kill(status["processes"]["control"], signal.SIGKILL)
    assert cluster.generate(TINY, [5, 6, 7], 20)[0] == expected
    cluster.until(lambda workers: set(workers) == nodes, "every node has registered again")
    assert cluster.status()["control_epoch"] > status["control_epoch"]
    assert cluster.generate(TINY, [5, 6, 7], 20)[0] == expected
