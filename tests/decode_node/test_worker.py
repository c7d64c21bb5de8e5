"""Prefill and decode as two processes, without Ray and without a control plane: pages go by NIXL, tokens by gRPC."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from decode_node import DecodeConfig, DecodeWorker
from decode_node.core import DecodeCoreConfig
from engine.core import EngineConfig
from engine.local import LocalEngine
from engine.model import load_model
from engine.sampling import SamplingParams
from engine.source import ModelSource
from kvstore.plane import PlaneConfig
from kvstore.transport import create_transport
from protos import common_pb2, worker_pb2, worker_pb2_grpc
from protos.registration import NodeConfig
from protos.serving import connect
from tests.kvstore.transport.faults import Fault, FaultPlan, FaultyTransport
from tests.models import tiny_model

PAGE = 4
DEADLINE_S = 60.0
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, 200)


class Prefill:
    """A prefill worker in a process of its own."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.decode_node.prefill_process", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.incarnation, self.address = self.process.stdout.readline().split()

    def figures(self) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def prefill(folder) -> Iterator[Prefill]:
    worker = Prefill(folder)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def alone(folder) -> LocalEngine:
    model = load_model(ModelSource(name="tiny", weights="random:7", config=folder))
    return LocalEngine(model, page_size=PAGE, num_pages=1000)


class Session:
    """A gateway's stream to one decode worker."""

    def __init__(self, call) -> None:
        self.call = call
        self.requests = 0

    async def start(self, tokens: list[int], peers: list[Prefill], max_tokens: int = 6) -> str:
        self.requests += 1
        start = worker_pb2.StartAttempt(
            request_id=f"request-{self.requests}",
            attempt=1,
            model="tiny",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=common_pb2.SamplingParams(
                top_p=1, repetition_penalty=1, top_logprobs=-1, max_tokens=max_tokens, ignore_eos=True
            ),
            prefill_peers=[
                worker_pb2.PrefillPeer(node_id=f"prefill-{i}", incarnation=peer.incarnation, address=peer.address)
                for i, peer in enumerate(peers)
            ],
        )
        await self.call.write(worker_pb2.SessionRequest(start=start))
        return start.request_id

    async def cancel(self, request_id: str) -> None:
        cancel = worker_pb2.CancelAttempt(request_id=request_id, attempt=1)
        await self.call.write(worker_pb2.SessionRequest(cancel=cancel))

    async def events(self) -> AsyncIterator[worker_pb2.AttemptEvent]:
        while True:
            async with asyncio.timeout(DEADLINE_S):
                response = await self.call.read()
            for event in response.step.events:
                yield event

    async def finish(self, request_id: str) -> tuple[list[int], worker_pb2.AttemptEvent]:
        """Tokens and terminal event of one request; others' events are dropped."""
        tokens: list[int] = []
        async for event in self.events():
            if event.request_id == request_id:
                tokens.extend(event.tokens.token_ids)
                if event.WhichOneof("event") in ("rejected", "finished", "failed"):
                    return tokens, event
        raise AssertionError("the session ended")


@asynccontextmanager
async def decode_worker(folder: str, *, pool_bytes: int = 1 << 20) -> AsyncIterator[tuple[DecodeWorker, Session]]:
    worker = DecodeWorker(
        DecodeConfig(
            node=NodeConfig(node_id="decode-0", control_address="127.0.0.1:1"),
            model=ModelSource(name="tiny", weights="random:7", config=folder),
            plane=PlaneConfig(pool_bytes=pool_bytes, staging_bytes=1 << 20),
            engine=EngineConfig(chunk_tokens=8),
            core=DecodeCoreConfig(local_prefill_max_tokens=0, grace_s=1.0),
            page_size=PAGE,
        )
    )
    await worker.start()
    channel = connect(worker.address)
    call = worker_pb2_grpc.DecodeServiceStub(channel).Session()
    try:
        await call.write(worker_pb2.SessionRequest(hello=worker_pb2.SessionHello(gateway_incarnation="test")))
        assert (await call.read()).welcome.incarnation == worker.incarnation
        yield worker, Session(call)
    finally:
        call.cancel()
        await channel.close()
        await worker.stop()


async def until(condition) -> None:
    """Raises TimeoutError if it does not become true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the condition lies in other threads and processes
            await asyncio.sleep(0.02)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


def expected(alone: LocalEngine, tokens: list[int], max_tokens: int = 6) -> list[int]:
    return alone.generate([tokens], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]


def test_split_output_is_that_of_one_process_cold_and_warm(folder, prefill, alone):
    async def run() -> None:
        async with decode_worker(folder) as (worker, session):
            pages = 0
            for turn in range(2):
                for length in LENGTHS:
                    tokens = prompt(length, seed=length)
                    answer, last = await session.finish(await session.start(tokens, [prefill]))
                    assert answer == expected(alone, tokens), (turn, length)
                    cached = (length - 1) // PAGE * PAGE if turn else 0
                    assert last.finished.cached_tokens == cached, (turn, length)
                    pages += -(-length // PAGE) - cached // PAGE
            await until(lambda: worker.stats.pages_pulled == pages)
            layout = worker._plane.layout
            assert worker.stats.bytes_pulled == pages * layout.page_bytes
            assert worker.stats.transport.startswith("nixl:")
            await until(lambda: worker.stats.pages_free == worker.stats.pages_total)
            await until(lambda: prefill.figures()["pages_free"] == prefill.figures()["pages_total"])

    asyncio.run(run())


def test_the_next_turn_of_a_chat_recomputes_no_page_of_the_last_one(folder, prefill, alone):
    async def run() -> None:
        async with decode_worker(folder) as (_, session):
            first = prompt(19, seed=1)
            answer, _ = await session.finish(await session.start(first, [prefill], max_tokens=14))
            before = prefill.figures()["computed"]
            second = [*first, *answer, *prompt(6, seed=2)]
            text, last = await session.finish(await session.start(second, [prefill]))
            assert text == expected(alone, second)
            # 33 tokens of turn 1, the last of which was never fed to the model: 32 lie in whole pages.
            assert last.finished.cached_tokens == 32
            await until(lambda: prefill.figures()["computed"] - before == len(second) - 32)

    asyncio.run(run())


def test_a_killed_prefill_worker_is_replaced_by_the_next(folder, prefill, alone):
    async def run() -> None:
        second = await asyncio.to_thread(Prefill, folder)
        try:
            async with decode_worker(folder) as (worker, session):
                tokens = prompt(400, seed=3)
                request = await session.start(tokens, [prefill, second])
                async for event in session.events():
                    if event.WhichOneof("event") == "accepted":
                        break
                prefill.process.kill()
                answer, _ = await session.finish(request)
                assert answer == expected(alone, tokens)
                # Channels to addresses that are gone used to pile up.
                await until(lambda: set(worker._prefill._channels) == {second.address})
        finally:
            await asyncio.to_thread(second.close)

    asyncio.run(run())


def test_without_any_prefill_worker_the_attempt_is_aborted_and_its_pages_are_free(folder, prefill):
    async def run() -> None:
        prefill.process.kill()
        prefill.process.wait()
        async with decode_worker(folder) as (worker, session):
            _, last = await session.finish(await session.start(prompt(50, seed=4), [prefill]))
            assert last.failed.code == worker_pb2.FAILURE_CODE_ABORTED
            await until(lambda: worker.stats.pages_free == worker.stats.pages_total)

    asyncio.run(run())


def test_cancelled_at_any_moment_all_pages_come_back_on_both_sides(folder, prefill, alone):
    async def run() -> None:
        rng = random.Random(5)
        async with decode_worker(folder) as (worker, session):
            for number in range(12):
                request = await session.start(prompt(150, seed=100 + number), [prefill], max_tokens=40)
                seen = 0
                stop_after = rng.randrange(0, 12)
                async for event in session.events():
                    seen += event.request_id == request
                    if seen > stop_after or event.WhichOneof("event") == "finished":
                        break
                await session.cancel(request)
            await until(lambda: worker.stats.pages_free == worker.stats.pages_total and not worker.stats.running)
            await until(lambda: prefill.figures()["pages_free"] == prefill.figures()["pages_total"])
            tokens = prompt(30, seed=6)
            answer, _ = await session.finish(await session.start(tokens, [prefill]))
            assert answer == expected(alone, tokens)

    asyncio.run(run())


def test_a_session_that_breaks_takes_its_attempts_with_it(folder, prefill):
    async def run() -> None:
        async with decode_worker(folder) as (worker, session):
            await session.start(prompt(100, seed=7), [prefill], max_tokens=500)
            await until(lambda: worker.stats.running == 1)
            session.call.cancel()
            await until(lambda: worker.stats.running == 0)
            await until(lambda: worker.stats.pages_free == worker.stats.pages_total)

    asyncio.run(run())


def test_what_cannot_be_served_is_refused_before_any_work(folder):
    async def run() -> None:
        async with decode_worker(folder, pool_bytes=100_000) as (worker, session):
            _, last = await session.finish(await session.start([600], []))
            assert "token ids" in last.failed.message
            _, last = await session.finish(await session.start(prompt(10, seed=8), [], max_tokens=3000))
            assert last.rejected.needed_pages > last.rejected.room_pages
            assert worker.stats.pages_free == worker.stats.pages_total

    asyncio.run(run())


class EveryPullCrashes(FaultPlan):
    def of(self, pull_id: int) -> Fault:
        return Fault(crash=True)


def test_a_worker_whose_transport_died_is_ready_no_more_and_ends(folder, prefill, monkeypatch):
    """It used to stay ready, and every request that came to it failed."""
    monkeypatch.setattr(
        "kvstore.plane.create_transport",
        lambda *arguments: FaultyTransport(create_transport(*arguments), EveryPullCrashes()),
    )

    async def run() -> None:
        async with decode_worker(folder) as (worker, session):
            assert worker.stats.ready
            _, last = await session.finish(await session.start(prompt(20, seed=9), [prefill]))
            assert last.WhichOneof("event") == "failed"
            async with asyncio.timeout(DEADLINE_S):
                assert await worker.wait_ended() == "the transport thread failed: a planned crash"
            assert not worker.stats.ready

    asyncio.run(run())
