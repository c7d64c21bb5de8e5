"""The event stream of /v1/completions as a stopwatch reads it."""

from __future__ import annotations

import json
from typing import Any


class StreamBroken(Exception):
    """The stream held an error, or ended without saying why."""


class CompletionStream:
    """Takes bytes as they arrive and notes when text came. No sockets and no clock: time is passed in.

    A chunk bears a token if its text is not empty: the role or finish event of a stream carries none, and a token
    that is half a character shows with the other half.
    """

    def __init__(self) -> None:
        self.first_text_s: float | None = None
        self.last_text_s: float | None = None
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self._line = b""
        self._data: list[bytes] = []
        self._done = False

    def feed(self, received: bytes, now_s: float) -> None:
        """Raises StreamBroken for an event that reports an error or is no JSON."""
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                self._event(data, now_s)

    def finish(self) -> None:
        """The connection has ended. Raises StreamBroken if the answer had not."""
        if not self._done or self.finish_reason is None:
            raise StreamBroken(f"the stream ended early, after {len(self.text)} characters")

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamBroken(f"an event is no JSON: {data[:200]!r}") from error
        if "error" in event:
            raise StreamBroken(f"the server says: {event['error']}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if text := choice.get("text"):
                self.text += text
                self.last_text_s = now_s
                if self.first_text_s is None:
                    self.first_text_s = now_s
