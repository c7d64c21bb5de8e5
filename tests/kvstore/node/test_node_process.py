"""A storage node that is another process: pages travel over NIXL, and the process is killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from kvstore.client import KvClientConfig
from tests.kvstore.node.harness import WAIT_S, Cluster, eventually, run
from tests.kvstore.node.samples import key_of

ROOT = Path(__file__).parents[3]
NUMBERS = tuple(range(1, 33))


@contextlib.asynccontextmanager
async def node_process(cluster: Cluster) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kvstore.node.node_process",
        cluster.control_address,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            incarnation, address = (await process.stdout.readline()).decode().split()
        cluster.joined("kv-0", incarnation, address)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_pages_come_back_from_another_process_until_it_is_killed():
    async def body() -> None:
        async with Cluster() as cluster, node_process(cluster) as process:
            worker = await cluster.worker(transport="nixl")
            assert (await worker.offer(*NUMBERS)).stored == {key_of(number) for number in NUMBERS}
            assert await worker.fetch(32) == list(NUMBERS)
            await eventually(lambda: cluster.control.keys == {key_of(number) for number in NUMBERS})
            [match] = await worker.match(32)
            process.kill()
            await process.wait()
            assert await worker.pull(99, match) == []
            await worker.client.release(match)
            assert await worker.match(32) == []
            assert (await worker.offer(1)).refused == {key_of(1)}

    run(body)


def test_a_frozen_process_is_a_miss_and_comes_back():
    async def body() -> None:
        async with Cluster() as cluster, node_process(cluster) as process:
            worker = await cluster.worker(KvClientConfig(silence_s=0.0), transport="nixl")
            await worker.offer(*NUMBERS)
            process.send_signal(signal.SIGSTOP)
            assert await worker.match(32, deadline_in_s=0.2) == []
            assert (await worker.offer(1, deadline_in_s=0.2)).refused == {key_of(1)}
            process.send_signal(signal.SIGCONT)
            assert await worker.fetch(32) == list(NUMBERS)

    run(body)


def test_a_process_ends_in_good_order_when_it_is_told_to():
    async def body() -> None:
        async with Cluster() as cluster, node_process(cluster) as process:
            assert process.stdin is not None
            process.stdin.close()
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0

    run(body)
