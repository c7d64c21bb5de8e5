"""Any transport with faults by a plan: pulls that start late, never end, fail half-way or bring wrong bytes.

It shows what the thread and its callers do when a transport is slow or wrong. It cannot show what a real network does:
for that see the tests with frozen and killed processes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.transport import Card, PageTransport, Pull, Transfer


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    hold_start: bool = False
    """Posts nothing until the pull is released."""
    hold_end: bool = False
    """Bytes land, but the transfer is not settled until the pull is released, stopped or not: a frozen peer."""
    error: str | None = None
    """Fails once everything has landed."""
    corrupt: bool = False
    """Flips a bit of the first byte that landed."""
    crash: bool = False
    """Breaks the contract: raises out of `advance`."""


class FaultPlan:
    """Which pull suffers what, by pull id. Thread-safe; may be changed while pulls are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[int, Fault] = {}
        self._landed: dict[int, threading.Event] = {}

    def plan(self, pull_id: int, fault: Fault) -> None:
        with self._lock:
            self._faults[pull_id] = fault

    def release(self, pull_id: int) -> None:
        """That pull suffers nothing from now on."""
        self.plan(pull_id, Fault())

    def of(self, pull_id: int) -> Fault:
        with self._lock:
            return self._faults.get(pull_id, Fault())

    def landed(self, pull_id: int) -> threading.Event:
        """Set once every byte of a pull with `hold_end` has landed."""
        with self._lock:
            return self._landed.setdefault(pull_id, threading.Event())


class FaultyTransport(PageTransport):
    """`inner` under a plan."""

    def __init__(self, inner: PageTransport, plan: FaultPlan) -> None:
        super().__init__(inner.region, inner.incarnation)
        self.kind = inner.kind
        self._inner = inner
        self._plan = plan
        self._transfers: list[_FaultyTransfer] = []

    def card(self) -> Card:
        return self._inner.card()

    def begin(self, pull: Pull) -> Transfer:
        transfer = _FaultyTransfer(self._inner.begin(pull), self._plan, self)
        self._transfers.append(transfer)
        return transfer

    def forget(self, incarnation: str) -> None:
        self._inner.forget(incarnation)
        for transfer in self._transfers:
            if transfer.pull.card.incarnation == incarnation:
                transfer.fail(f"{incarnation} was forgotten")

    def close(self) -> None:
        self._inner.close()
        for transfer in self._transfers:
            transfer.fail("the transport was closed")


class _FaultyTransfer(Transfer):
    def __init__(self, inner: Transfer, plan: FaultPlan, transport: FaultyTransport) -> None:
        super().__init__(inner.pull)
        self.path = inner.path
        self._inner = inner
        self._plan = plan
        self._transport = transport
        self._started = False

    def advance(self) -> bool:
        fault = self._plan.of(self.pull.pull_id)
        if fault.crash:
            raise RuntimeError("a planned crash")
        if self.settled or (fault.hold_start and not self._started and not self._inner.settled):
            return False
        self._started = True
        moved = self._inner.advance()
        if not self._inner.settled:
            return moved
        self.path, self.landed_bytes, self.error = self._inner.path, self._inner.landed_bytes, self._inner.error
        self._plan.landed(self.pull.pull_id).set()
        if fault.hold_end:
            return moved
        if fault.corrupt and len(self.pull.local_offsets):
            self._transport.region[self.pull.local_offsets[0]] ^= 1
        self.error = self.error or fault.error
        self.settled = True
        return True

    def stop(self) -> None:
        self._started = True
        self._inner.stop()

    def fail(self, error: str) -> None:
        if not self.settled:
            self.settled, self.error = True, error
