"""What waits to be sent on a stream: bounded, whatever the reader does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protos import control_pb2

MAX_FEED_BYTES = 8 << 20
"""Events that may wait for one watcher."""


class WatchFeed:
    """Messages for one watcher, in order. A watcher that falls too far behind gets a fresh snapshot instead of them."""

    def __init__(
        self, snapshot: Callable[[], list[control_pb2.WatchResponse]], *, max_bytes: int = MAX_FEED_BYTES
    ) -> None:
        self.changed = asyncio.Event()
        """Set when there is something to take, or the feed has ended."""
        self.end: str | None = None
        """Why there will be no more; None while the feed goes on."""
        self._snapshot = snapshot
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[control_pb2.WatchResponse, int]] = deque()
        self._waiting_bytes = 0
        self._behind = True  # A new watcher knows nothing.
        self.changed.set()

    def push(self, response: control_pb2.WatchResponse) -> None:
        """Add an event. Never blocks."""
        if self._behind:
            return  # The snapshot that comes next will contain it.
        num_bytes = response.ByteSize()
        if self._waiting_bytes + num_bytes > self._max_bytes:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._behind = True
        else:
            self._waiting.append((response, num_bytes))
            self._waiting_bytes += num_bytes
        self.changed.set()

    def take(self) -> control_pb2.WatchResponse | None:
        """The next message, taken out; None if none waits now."""
        if self._behind:
            self._behind = False
            # Not counted: the bound is for what piles up behind it.
            self._waiting.extend((response, 0) for response in self._snapshot())
        if not self._waiting:
            self.changed.clear()
            return None
        response, num_bytes = self._waiting.popleft()
        self._waiting_bytes -= num_bytes
        return response

    def finish(self, reason: str) -> None:
        """No more messages."""
        self.end = reason
        self.changed.set()


class DirectiveQueue:
    """Answers for one node's Join stream. A newer one replaces a waiting one of its kind, so few ever wait."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when there is something to take, or the queue has ended."""
        self._waiting: dict[str, control_pb2.JoinResponse] = {}

    def push(self, response: control_pb2.JoinResponse) -> None:
        """Add an answer. Never blocks."""
        kind = str(response.WhichOneof("directive"))
        self._waiting.pop(kind, None)
        self._waiting[kind] = response
        self.changed.set()

    def take(self) -> control_pb2.JoinResponse | None:
        """The next answer, taken out; None if none waits now."""
        if not self._waiting:
            self.changed.clear()
            return None
        kind = next(iter(self._waiting))
        return self._waiting.pop(kind)
