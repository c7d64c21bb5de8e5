"""How long after a client has left until every worker has its pages back."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError
from benchmarks.load import Target, complete, open_client
from benchmarks.load_reports import Report, ReportReader
from benchmarks.prompts import Prompt

CONFIRMATIONS = 3
"""Reports in a row that must show a worker at rest. A request may still be on its way to a worker when its client
leaves, so a single one proves nothing; the time counts to the first of them."""
LONGER = 4
"""Times the answer that a cancelled request asks for is longer than the whole one, so that it is not over before."""
FREE_DEADLINE_S = 60.0
"""Pages that are not back by then count as lost."""


class FreedWatch:
    """Decides from load reports when all workers have all their pages back. No sockets and no clock.

    Free pages are those that a new request could have: cached prefixes count, quarantined pages do not.
    """

    def __init__(self, node_ids: Iterable[str]) -> None:
        self._at_rest: dict[str, list[float]] = {node_id: [] for node_id in node_ids}
        self._latest: dict[str, Report] = {}

    def take(self, report: Report) -> None:
        """Workers that were not named are not waited for."""
        instants = self._at_rest.get(report.node_id)
        if instants is None:
            return
        self._latest[report.node_id] = report
        if report.at_rest:
            instants.append(report.received_s)
        else:
            instants.clear()

    @property
    def freed_s(self) -> float | None:
        """When the last worker came to rest, once all have stayed there for CONFIRMATIONS reports."""
        if any(len(instants) < CONFIRMATIONS for instants in self._at_rest.values()):
            return None
        return max(instants[0] for instants in self._at_rest.values())

    def missing(self) -> str:
        """Who is not at rest, for an error."""
        return "; ".join(
            str(self._latest.get(node_id, f"{node_id} says nothing"))
            for node_id, instants in self._at_rest.items()
            if not instants
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelTimes:
    """Seconds from the client's close to the first report that shows all pages free."""

    after_first_token_s: tuple[float, ...]
    at_random_s: tuple[float, ...]
    """Closed at an instant drawn evenly from the time that a whole request takes."""
    num_holding: int
    """Trials in which the last report before the close showed pages in use; in the others the request was younger than
    a report, or had none yet."""
    num_over: int
    """Requests that had ended before they could be closed; they are no trials."""
    report_every_s: float
    """Median time between two reports of one worker. A time above is too long by less than that."""


async def measure_cancels(
    target: Target,
    control: str,
    prompts: Sequence[Prompt],
    output_tokens: int,
    *,
    seed: int,
    free_deadline_s: float = FREE_DEADLINE_S,
) -> CancelTimes:
    """One request at a time, on a cluster that does nothing else; every other one is closed after its first token.

    The first prompt is answered in full, to learn how long that takes, and the last one to see that the cluster still
    serves. Raises BenchmarkError if pages do not come back.
    """
    first, *cancelled, last = prompts
    draw = random.Random(seed)
    after_first_token_s: list[float] = []
    at_random_s: list[float] = []
    num_holding = num_over = 0
    async with open_client(target) as client, ReportReader(control) as reports:
        whole = await complete(client, target.model, first, output_tokens)
        await _await_rest(reports, free_deadline_s)
        for index, prompt in enumerate(cancelled):
            first_token = asyncio.Event()
            request = asyncio.create_task(
                complete(client, target.model, prompt, LONGER * output_tokens, first_token=first_token)
            )
            if index % 2 == 0:
                await _either(first_token, request)
            else:
                await asyncio.sleep(draw.uniform(0, whole.ended_s - whole.sent_s))
            if request.done():
                request.result()
                num_over += 1
                continue
            num_holding += any(not report.at_rest for report in reports.latest.values())
            closed_s = time.monotonic()
            request.cancel()
            (after_first_token_s if index % 2 == 0 else at_random_s).append(
                await _await_rest(reports, free_deadline_s) - closed_s
            )
            await asyncio.gather(request, return_exceptions=True)
        await complete(client, target.model, last, output_tokens)
        return CancelTimes(
            after_first_token_s=tuple(after_first_token_s),
            at_random_s=tuple(at_random_s),
            num_holding=num_holding,
            num_over=num_over,
            report_every_s=statistics.median(reports.gaps_s),
        )


async def _await_rest(reports: ReportReader, deadline_s: float) -> float:
    """When all workers came to rest, judged by the reports that arrive from now on."""
    reports.skip()
    watch = FreedWatch(reports.latest)
    try:
        async with asyncio.timeout(deadline_s):
            while watch.freed_s is None:
                for report in await reports.next():
                    watch.take(report)
    except TimeoutError:
        raise BenchmarkError(f"pages are not free {deadline_s:.0f} s after the end: {watch.missing()}") from None
    return watch.freed_s


async def _either(event: asyncio.Event, request: asyncio.Task[object]) -> None:
    """Until the event is set or the request has ended."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, request), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
