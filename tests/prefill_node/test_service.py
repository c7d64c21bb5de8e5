"""The `Prefill` stream of a real prefill worker, driven at the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from engine.core import EngineConfig
from engine.source import ModelSource
from kvstore.pages import page_keys
from kvstore.plane import PlaneConfig
from prefill_node import PrefillConfig, PrefillWorker
from prefill_node.core import PrefillCoreConfig
from protos import common_pb2, worker_pb2, worker_pb2_grpc
from protos.registration import NodeConfig
from protos.serving import connect
from tests.models import tiny_model

PAGE = 4
DEADLINE_S = 60.0
GRACE_S = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


class Stream:
    """A decode worker's end of one handover."""

    def __init__(self, call) -> None:
        self.call = call

    async def start(self, **fields) -> None:
        await self.call.write(worker_pb2.PrefillRequest(start=start_of(**fields)))

    async def read(self) -> worker_pb2.PrefillResponse:
        async with asyncio.timeout(DEADLINE_S):
            return await self.call.read()

    async def last_word(self) -> tuple[list[common_pb2.PageRef], worker_pb2.PrefillResponse]:
        """All announced pages, and what ended the handover."""
        pages: list[common_pb2.PageRef] = []
        while (response := await self.read()).WhichOneof("message") not in ("done", "failed"):
            pages.extend(response.pages.pages)
        return pages, response

    async def cancel(self) -> None:
        await self.call.write(worker_pb2.PrefillRequest(cancel=worker_pb2.PrefillCancel()))

    async def release(self) -> None:
        await self.call.write(worker_pb2.PrefillRequest(released=worker_pb2.PrefillReleased()))
        assert await self.read() is grpc.aio.EOF


def start_of(tokens=(5, 6, 7, 8, 9, 10), model="tiny", wanted=(0, 2), **sampling) -> worker_pb2.PrefillStart:
    params = {"top_p": 1, "repetition_penalty": 1, "top_logprobs": -1, "max_tokens": 4} | sampling
    return worker_pb2.PrefillStart(
        request_id="request",
        attempt=1,
        model=model,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=common_pb2.SamplingParams(**params),
        wanted=[common_pb2.Span(start=wanted[0], stop=wanted[1])],
        card=common_pb2.PoolCard(incarnation="decode"),
    )


@asynccontextmanager
async def prefill_worker(folder: str) -> AsyncIterator[tuple[PrefillWorker, worker_pb2_grpc.PrefillServiceStub]]:
    worker = PrefillWorker(
        PrefillConfig(
            node=NodeConfig(node_id="prefill-0", control_address="127.0.0.1:1"),
            model=ModelSource(name="tiny", weights="random:7", config=folder),
            plane=PlaneConfig(pool_bytes=1 << 20, staging_bytes=1 << 20),
            engine=EngineConfig(chunk_tokens=PAGE),
            core=PrefillCoreConfig(grace_s=GRACE_S),
            page_size=PAGE,
        )
    )
    await worker.start()
    channel = connect(worker.address)
    try:
        yield worker, worker_pb2_grpc.PrefillServiceStub(channel)
    finally:
        await channel.close()
        await worker.stop()


async def all_free(worker: PrefillWorker) -> None:
    """Raises TimeoutError if pages do not come back without new work."""
    async with asyncio.timeout(DEADLINE_S):
        while worker.stats.pages_free != worker.stats.pages_total:  # noqa: ASYNC110 - it lies in the step loop
            await asyncio.sleep(0.02)


def test_pages_are_announced_with_key_place_and_digest_and_stay_until_released(folder):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            stream = Stream(stub.Prefill())
            await stream.start()
            accepted = await stream.read()
            assert accepted.accepted.card.incarnation == worker.incarnation
            pages, last = await stream.last_word()
            assert last.done.num_pages == 2
            assert last.done.computed_tokens == 6
            layout = worker._plane.layout
            key = page_keys(worker._core._namespace, [5, 6, 7, 8], PAGE)[0]
            assert [(ref.page_index, ref.key, ref.valid_tokens) for ref in pages] == [(0, key, 4), (1, b"", 2)]
            assert {ref.num_bytes for ref in pages} == {layout.page_bytes}
            for ref in pages:
                page = ref.offset_bytes // layout.page_bytes
                assert list(ref.digests) == worker._plane.digests([page])[0].tolist()
            assert worker.stats.pages_free == worker.stats.pages_total - 2
            await stream.release()
            await all_free(worker)
            assert worker.stats.pages_cached == 1

    asyncio.run(run())


def test_only_wanted_pages_are_announced(folder):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            stream = Stream(stub.Prefill())
            await stream.start(tokens=range(5, 16), wanted=(1, 2))
            pages, last = await stream.last_word()
            assert [ref.page_index for ref in pages] == [1]
            assert last.done.num_pages == 1
            await stream.release()
            await all_free(worker)

    asyncio.run(run())


def test_a_stream_that_breaks_frees_its_pages_after_the_grace(folder):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            stream = Stream(stub.Prefill())
            await stream.start()
            await stream.last_word()
            stream.call.cancel()
            await all_free(worker)
            assert worker.stats.pages_quarantined == 0

    asyncio.run(run())


def test_a_cancelled_handover_says_so_and_its_pages_come_back(folder):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            stream = Stream(stub.Prefill())
            await stream.start(tokens=[5] * 400, wanted=(0, 100))
            await stream.read()
            await stream.cancel()
            _, last = await stream.last_word()
            assert last.failed.code == worker_pb2.FAILURE_CODE_ABORTED
            await stream.release()
            await all_free(worker)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [5] * 5000}, "do not fit"),
        ({"tokens": [511, 512]}, "token ids must lie in"),
        ({"tokens": [5], "logit_bias": {600: 1.0}}, "logit_bias"),
    ],
)
def test_a_prompt_that_can_never_be_computed_is_refused_alone(folder, fields, message):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            stream = Stream(stub.Prefill())
            await stream.start(**fields)
            _, last = await stream.last_word()
            assert last.failed.code == worker_pb2.FAILURE_CODE_INVALID
            assert message in last.failed.message
            await stream.release()
            good = Stream(stub.Prefill())
            await good.start()
            assert (await good.last_word())[1].done.num_pages == 2
            await good.release()
            await all_free(worker)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (worker_pb2.PrefillRequest(cancel=worker_pb2.PrefillCancel()), grpc.StatusCode.INVALID_ARGUMENT),
        (worker_pb2.PrefillRequest(start=start_of(model="other")), grpc.StatusCode.FAILED_PRECONDITION),
        (worker_pb2.PrefillRequest(start=start_of(temperature=-1)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_stream_that_begins_wrongly_ends_with_the_reason(folder, request_, code):
    async def run() -> None:
        async with prefill_worker(folder) as (worker, stub):
            call = stub.Prefill()
            await call.write(request_)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is code
            assert worker.stats.waiting == 0

    asyncio.run(run())
