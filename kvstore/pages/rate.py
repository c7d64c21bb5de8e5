"""A measured rate: what page traffic and model steps are planned by."""

from __future__ import annotations


class Rate:
    """Amount per second over the recent past.

    Amounts and times fade alike, so that a large transfer counts for more than a small one, whose time is mostly
    latency.
    """

    def __init__(self, weight: float = 0.2) -> None:
        """weight: of the newest measurement against all earlier ones."""
        self._weight = weight
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """0 while nothing was measured."""
        return self._amount / self._seconds if self._seconds else 0.0

    def measured(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`; measurements without either are left out."""
        if amount > 0 and seconds > 0:
            keep = 1.0 - self._weight
            self._amount = self._amount * keep + amount
            self._seconds = self._seconds * keep + seconds
