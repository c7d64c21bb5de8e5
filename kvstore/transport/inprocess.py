"""Pulls between regions of one process, by memcpy: for unit tests and for running every node in one process."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import Card, PageTransport, Pull, SettledTransfer, Transfer, Way, out_of_bounds
from kvstore.transport.pieces import Extents, pieces


class Fabric:
    """The regions that can reach each other, by incarnation: what the network is to other transports. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, npt.NDArray[np.uint8]] = {}

    def join(self, incarnation: str, region: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            if incarnation in self._regions:
                raise ValueError(f"incarnation {incarnation!r} has joined already")
            self._regions[incarnation] = region

    def leave(self, incarnation: str) -> None:
        with self._lock:
            self._regions.pop(incarnation, None)

    def copy(self, incarnation: str, into: npt.NDArray[np.uint8], extents: Extents) -> str | None:
        """Copies from the region of `incarnation`. Returns what is wrong, if anything; then nothing was copied."""
        with self._lock:
            region = self._regions.get(incarnation)
        if region is None:
            return f"{incarnation} is gone"
        if (extents[:, 0] + extents[:, 2] > len(region)).any():
            return f"{incarnation} has fewer bytes than its card says"
        for remote, local, size in extents.tolist():
            into[local : local + size] = region[remote : remote + size]
        return None


class InProcessTransport(PageTransport):
    """The contract over a `Fabric`. A peer that left the fabric is gone, as a killed process would be."""

    kind = "inprocess"

    def __init__(self, fabric: Fabric, region: npt.NDArray[np.uint8], incarnation: str) -> None:
        super().__init__(region, incarnation)
        self._fabric = fabric
        self._transfers: set[_CopyTransfer] = set()
        fabric.join(incarnation, region)

    def card(self) -> Card:
        way = Way(self.kind, self.incarnation.encode())
        return Card(incarnation=self.incarnation, region_bytes=len(self.region), ways=(way,))

    def begin(self, pull: Pull) -> Transfer:
        if pull.card.way(self.kind) is None:
            return SettledTransfer(pull, f"{pull.card.incarnation} cannot be reached by {self.kind}")
        if (problem := out_of_bounds(pull, len(self.region))) is not None:
            return SettledTransfer(pull, problem)
        transfer = _CopyTransfer(pull, self._fabric, self.region)
        self._transfers = {other for other in self._transfers if not other.settled}
        self._transfers.add(transfer)
        return transfer

    def forget(self, incarnation: str) -> None:
        for transfer in self._transfers:
            if transfer.pull.card.incarnation == incarnation:
                transfer.fail(f"{incarnation} was forgotten")

    def close(self) -> None:
        self._fabric.leave(self.incarnation)
        for transfer in self._transfers:
            transfer.fail("the transport was closed")


class _CopyTransfer(Transfer):
    """Copies one piece per `advance`. Nothing is ever in flight between two calls, so stopping settles at once."""

    def __init__(self, pull: Pull, fabric: Fabric, region: npt.NDArray[np.uint8]) -> None:
        super().__init__(pull)
        self.path = InProcessTransport.kind
        self._fabric = fabric
        self._region = region
        self._pieces = deque(pieces(pull))

    def advance(self) -> bool:
        if self.settled:
            return False
        if self._pieces:
            piece = self._pieces.popleft()
            error = self._fabric.copy(self.pull.card.incarnation, self._region, piece)
            if error is not None:
                self.fail(error)
                return True
            self.landed_bytes += int(piece[:, 2].sum())
        self.settled = not self._pieces
        return True

    def stop(self) -> None:
        self.fail("stopped")

    def fail(self, error: str) -> None:
        if not self.settled:
            self.settled, self.error = True, error
            self._pieces.clear()
