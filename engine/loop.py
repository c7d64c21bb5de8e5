"""The step loop: the one thread that runs the model and owns the ledger."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

Instruction = TypeVar("Instruction", covariant=True)


class StepCore(Protocol[Instruction]):
    """Decides in plain synchronous code what a worker does; see `StepLoop`."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute something."""

    def handle(self, event: object, now_s: float) -> None:
        """Take one event from outside."""

    def step(self, now_s: float) -> None:
        """Run one step of the model, if there is work, and do what is due."""

    def measured(self, seconds: float) -> None:
        """The last `step` took so long."""

    def take_instructions(self) -> Sequence[Instruction]:
        """What the outside must do now, in order. Forgets them."""


_IDLE_S = 0.05
"""How long the loop sleeps without work: due times (grace, reclamation) are noticed this late at most."""


class StepLoop(Generic[Instruction]):
    """Runs a `StepCore` on a thread of its own.

    Events come in by `inbox`, from any thread; instructions go out through `deliver`, in batches, on this thread: it
    must not block. If the core raises, the state of the pages is unknown: `on_crash` is called and the thread ends, so
    that the process can be replaced.
    """

    def __init__(
        self,
        core: StepCore[Instruction],
        inbox: queue.SimpleQueue[object],
        deliver: Callable[[Sequence[Instruction]], None],
        on_crash: Callable[[BaseException], None],
        *,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.inbox = inbox
        self._clock = clock
        self.last_turn_s = clock()
        """When the loop last came round; health depends on it."""
        self._core = core
        self._deliver = deliver
        self._on_crash = on_crash
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the current step. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except BaseException as error:
            logger.exception("step loop %s crashed", self._thread.name)
            self._on_crash(error)

    def _turn(self) -> None:
        core = self._core
        try:
            event = self.inbox.get_nowait() if core.has_work else self.inbox.get(timeout=_IDLE_S)
            while True:
                core.handle(event, self._clock())
                event = self.inbox.get_nowait()
        except queue.Empty:
            pass
        began_s = self._clock()
        core.step(began_s)
        self.last_turn_s = self._clock()
        core.measured(self.last_turn_s - began_s)
        self._deliver(core.take_instructions())
