"""Greedy output of the split cluster equals the engine's in one process, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.local import LocalEngine
from engine.sampling import SamplingParams
from tests.system.cluster import Cluster
from tests.system.conftest import PAGE, SMOL, TINY

OUTPUT = 12


def prompt(length: int, seed: int, vocab: int = 512) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def expected(engine: LocalEngine, tokens: list[int]) -> list[int]:
    return engine.generate([tokens], SamplingParams(max_tokens=OUTPUT, ignore_eos=True))[0]


class Counters:
    """What the workers of one model have done since the last look, checked against arithmetic."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self._decode, self._prefill = f"decode-{number}", f"prefill-{number}"
        self.workers = cluster.until_idle()

    def expect(self, what: str, *, decode_pulled: int, prefill_pulled: int, computed: int) -> None:
        """Wait for the counters to move by exactly this much: pages, pages, prompt tokens."""
        before = self.workers

        def moved(workers: dict[str, dict[str, Any]]) -> bool:
            decode, prefill = workers[self._decode], workers[self._prefill]
            return (
                decode["pages_pulled"] - before[self._decode]["pages_pulled"] == decode_pulled
                and prefill["pages_pulled"] - before[self._prefill]["pages_pulled"] == prefill_pulled
                and prefill["tokens_computed"] - before[self._prefill]["tokens_computed"] == computed
                and decode["tokens_computed"] == before[self._decode]["tokens_computed"]
            )

        self.workers = self._cluster.until(moved, f"{what}: {decode_pulled=} {prefill_pulled=} {computed=}")


def check_everywhere(cluster: Cluster, engine: LocalEngine, model: str, number: int, tokens: list[int]) -> None:
    """Cold, then with the prefix at the decode worker, on the storage nodes only, and partly on each."""
    length, reference = len(tokens), expected(engine, tokens)
    pages, cacheable = -(-length // PAGE), (length - 1) // PAGE
    cluster.flush()
    counters = Counters(cluster, number)

    def ask(what: str, cached: int, tokens: list[int] = tokens, reference: list[int] = reference) -> None:
        output, usage = cluster.generate(model, tokens, OUTPUT)
        assert output == reference, (what, length)
        assert usage.cached_tokens == cached, (what, length)

    ask("cold", 0)
    counters.expect("cold", decode_pulled=pages, prefill_pulled=0, computed=length)
    ask("local", cacheable * PAGE)
    counters.expect("local", decode_pulled=pages - cacheable, prefill_pulled=0, computed=length - cacheable * PAGE)
    cluster.flush()
    ask("storage", cacheable * PAGE)
    counters.expect("storage", decode_pulled=pages, prefill_pulled=cacheable, computed=length - cacheable * PAGE)
    if cacheable < 2:
        return
    half = cacheable // 2
    cluster.flush()
    head = tokens[: half * PAGE + 1]
    ask("first half", half * PAGE, head, expected(engine, head))
    counters.expect("first half", decode_pulled=half + 1, prefill_pulled=half, computed=1)
    ask("partly on each", cacheable * PAGE)
    counters.expect(
        "partly on each",
        decode_pulled=pages - half,
        prefill_pulled=cacheable - half,
        computed=length - cacheable * PAGE,
    )


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, 2000])
def test_the_tiny_model_at_every_page_edge(cluster, tiny, length):
    check_everywhere(cluster, tiny, TINY, 0, prompt(length, seed=length))


@pytest.mark.parametrize("length", [PAGE - 1, 3 * PAGE + 5, 160])
def test_smollm2_at_three_lengths(cluster, smol, length):
    check_everywhere(cluster, smol, SMOL, 1, prompt(length, seed=length, vocab=49152))


def test_the_bytes_of_the_pages_go_over_the_transport(cluster):
    """Pages times bytes per page, as reported; head-major bfloat16: 2 heads x 2 layers x k and v x 16 x 8 x 2 bytes."""
    before = cluster.until_idle()["decode-0"]
    tokens = prompt(5 * PAGE + 3, seed=77)
    cluster.generate(TINY, tokens, 2)
    after = cluster.until(
        lambda workers: workers["decode-0"]["pages_pulled"] == before["pages_pulled"] + 6, "six pages pulled"
    )["decode-0"]
    assert after["bytes_pulled"] - before["bytes_pulled"] == 6 * (2 * 2 * 2 * 16 * 8 * 2)
    assert after["transport"].startswith("nixl:")
    (reported,) = [worker for worker in cluster.status()["workers"] if worker["node_id"] == "decode-0"]
    for name in ("role", "pages_pulled", "bytes_pulled", "transport", "pages_free", "pages_total"):
        assert reported[name] == after[name]


def test_turn_two_of_a_chat_recomputes_no_page_of_turn_one(cluster):
    """The answer's pages exist only at the decode worker, which lends them to the prefill worker."""
    question = {"role": "user", "content": "Name three rivers of Europe and say where each of them ends."}
    first = chat(cluster, [question])
    answer = first["choices"][0]["message"]["content"]
    following = {"role": "user", "content": "And which of them is the longest?"}
    cluster.until_idle()
    before = cluster.workers()
    second = chat(cluster, [question, {"role": "assistant", "content": answer}, following])
    # The last token of turn 1 was never fed to the model, so what was computed then is one token less.
    known = (first["usage"]["total_tokens"] - 1) // PAGE * PAGE
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == known
    computed = second["usage"]["prompt_tokens"] - known
    cluster.until(
        lambda workers: (
            workers["prefill-1"]["tokens_computed"] - before["prefill-1"]["tokens_computed"] == computed
            and workers["decode-1"]["tokens_computed"] == before["decode-1"]["tokens_computed"]
        ),
        f"{computed} prompt tokens computed",
    )


def chat(cluster: Cluster, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": SMOL, "messages": messages, "max_tokens": 40, "temperature": 0}
    response = cluster.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()
