"""Load reports of the workers, as the control plane passes them on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import grpc

from benchmarks.errors import BenchmarkError
from protos import common_pb2, control_pb2, control_pb2_grpc
from protos.serving import connect

_WORKERS = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
FIRST_DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one worker said of itself, and when it arrived here."""

    node_id: str
    received_s: float
    pages_total: int
    pages_free: int
    """Free and evictable."""
    running: int
    waiting: int

    @property
    def at_rest(self) -> bool:
        """No request, and every page is one that a new request could have."""
        return self.running == self.waiting == 0 and self.pages_free == self.pages_total


class ReportReader:
    """Reads the control plane's `Watch` for as long as it is entered. One task may wait on it at a time.

    Entering it waits for the first account of all workers. Raises BenchmarkError if the control plane does not answer,
    and from `next` if it goes away.
    """

    def __init__(self, control: str) -> None:
        self.latest: dict[str, Report] = {}
        """By node id."""
        self.gaps_s: list[float] = []
        """Between a worker's reports."""
        self._control = control
        self._fresh: list[Report] = []
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> ReportReader:
        self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(FIRST_DEADLINE_S):
                await self.next()
        except TimeoutError:
            await self.__aexit__(None, None, None)
            raise BenchmarkError(f"the control plane at {self._control} names no worker") from None
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def next(self) -> list[Report]:
        """The reports that have come since the last call; waits for one."""
        await self._changed.wait()
        if self._reading.done():
            self._reading.result()
        self._changed.clear()
        fresh, self._fresh = self._fresh, []
        return fresh

    def skip(self) -> None:
        """Forget the reports that have come and were not taken."""
        self._fresh.clear()

    async def _read(self) -> None:
        try:
            async for report in _worker_reports(self._control):
                if (last := self.latest.get(report.node_id)) is not None:
                    self.gaps_s.append(report.received_s - last.received_s)
                self.latest[report.node_id] = report
                self._fresh.append(report)
                self._changed.set()
            raise BenchmarkError(f"the control plane at {self._control} ended its stream")
        finally:
            self._changed.set()


async def _worker_reports(control: str) -> AsyncIterator[Report]:
    """First one of each prefill and decode worker, then every report. Raises BenchmarkError."""
    async with connect(control) as channel:
        call = control_pb2_grpc.ControlServiceStub(channel).Watch(control_pb2.WatchRequest(watcher="benchmark"))
        try:
            async for response in call:
                nodes = [response.node] if response.HasField("node") else response.snapshot.nodes
                received_s = time.monotonic()
                for state in nodes:
                    if state.node.role in _WORKERS:
                        yield _report(state, received_s)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"the control plane at {control}: {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()


def _report(state: control_pb2.NodeState, received_s: float) -> Report:
    load = state.load
    return Report(
        node_id=state.node.node_id,
        received_s=received_s,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        running=load.running,
        waiting=load.waiting,
    )
