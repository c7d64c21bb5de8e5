"""Ctrl-C and SIGTERM: the first asks for a clean stop, the next one for a quick one."""

from __future__ import annotations

import signal
import types


class StopAsked(BaseException):
    """Raised in the main thread, wherever it is, when somebody asks the process to stop."""


class StopSignals:
    """As a context, turns SIGINT, SIGTERM and SIGHUP into StopAsked, one for each signal."""

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number in self._before:
            signal.signal(number, self._raise)
        return self

    def ignore(self) -> None:
        """For the last few lines of a stop, which must not be cut short."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: types.FrameType | None) -> None:
        raise StopAsked(signal.Signals(number).name)
