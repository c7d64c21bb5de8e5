"""Ctrl-C and SIGTERM: the first one asks for a clean stop, the next one for a quick one."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Callable, Iterator


class StopAsked(BaseException):
    """Somebody asked the process to stop; the text is the signal's name."""


class StopSignals:
    """As a context, takes SIGINT, SIGTERM and SIGHUP.

    The first one is noted, and raised as StopAsked by the next `check`, or at once inside `at_once`: an exception out
    of nowhere is safe in our own code, but not in the middle of Ray's. Every later one calls `on_second`, in the main
    thread, wherever that is.
    """

    def __init__(self) -> None:
        self.on_second: Callable[[], None] = lambda: None
        self._asked: str | None = None
        self._raise_at_once = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number in self._before:
            signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StopAsked if somebody has asked; once the stop has begun nobody should call this any more."""
        if self._asked is not None:
            raise StopAsked(self._asked)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """A signal interrupts what is inside. Any exception that it turned into on its way comes out as StopAsked."""
        self.check()
        self._raise_at_once = True
        try:
            yield
        except StopAsked as asked:  # perhaps from a library that had put a handler of its own in our place
            self._asked = str(asked)
            raise
        except BaseException:
            self.check()
            raise
        finally:
            self._raise_at_once = False

    def _take(self, number: int, frame: types.FrameType | None) -> None:
        if self._asked is not None:
            self.on_second()
            return
        self._asked = signal.Signals(number).name
        if self._raise_at_once:
            raise StopAsked(self._asked)
