"""Holds that end by themselves."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Leases(Generic[T]):
    """What was lent, under which id, until when. Time is an argument: a node counts on its own boot-time clock."""

    def __init__(self, incarnation: str) -> None:
        """incarnation: of the node; part of the ids, so that those of a former process mean nothing here."""
        self._incarnation = incarnation
        self._num_granted = 0
        self._held: dict[str, tuple[T, ...]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap; entries of leases that ended early stay until their time

    @property
    def next_expiry_s(self) -> float | None:
        """No lease ends by itself before this instant; None if there is none at all."""
        return self._expiries[0][0] if self._expiries else None

    def grant(self, held: tuple[T, ...], expires_s: float) -> str:
        self._num_granted += 1
        lease_id = f"{self._incarnation}/{self._num_granted}"
        self._held[lease_id] = held
        heapq.heappush(self._expiries, (expires_s, lease_id))
        return lease_id

    def end(self, lease_id: str) -> tuple[T, ...] | None:
        """What was held under it; None if there is no such lease."""
        return self._held.pop(lease_id, None)

    def end_expired(self, now_s: float) -> Iterator[T]:
        """End every lease whose time is over, and yield what was held."""
        while self._expiries and self._expiries[0][0] <= now_s:
            yield from self.end(heapq.heappop(self._expiries)[1]) or ()

    def held(self) -> Iterator[T]:
        """All that is lent, once per lease."""
        for held in self._held.values():
            yield from held

    def check(self) -> None:
        """Assert that every lease ends some day."""
        assert self._held.keys() <= {lease_id for _, lease_id in self._expiries}
