"""Threads that run one kernel together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[int], None]
"""Called once by each thread with its part, 0 and on. All parts run at the same time, so they may wait for each
other."""


class Team:
    """`num_threads` threads, the caller's included. Callers on several threads take turns.

    The work has to let go of the GIL. It runs to its end: there is no cancelling.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._inboxes: list[SimpleQueue[Work]] = [SimpleQueue() for _ in range(num_threads - 1)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._turn = threading.Lock()
        for helper, inbox in enumerate(self._inboxes, start=1):
            name = f"engine-{helper}"
            threading.Thread(target=self._help, args=(helper, inbox), name=name, daemon=True).start()

    def run(self, work: Work, num_parts: int) -> None:
        """Calls work(part) for part = 0..num_parts - 1 at the same time; num_parts <= num_threads.

        Returns when all have ended. Raises what a part raised.
        """
        if num_parts == 1:
            work(0)
            return
        with self._turn:
            helpers = self._inboxes[: num_parts - 1]
            for inbox in helpers:
                inbox.put(work)
            try:
                work(0)
            finally:
                failures = [failure for failure in (self._done.get() for _ in helpers) if failure is not None]
            if failures:
                raise failures[0]

    def _help(self, part: int, inbox: SimpleQueue[Work]) -> None:
        while True:
            work = inbox.get()
            try:
                work(part)
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
            del work  # or it would keep the arrays of the last step alive


@functools.cache
def team_of(num_threads: int) -> Team:
    """The process's team of that size: models take turns rather than compete for the same cores."""
    return Team(num_threads)
