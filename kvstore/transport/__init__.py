"""Pulling page bytes out of other processes' regions, with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import (
    CANCELLED,
    CLOSED,
    EXPIRED,
    Card,
    PageTransport,
    Pull,
    PullExpired,
    PullSettled,
    Transfer,
    Way,
    boot_time_s,
)
from kvstore.transport.thread import DigestsReady, EventSink, TransportEvent, TransportFailed, TransportThread

if TYPE_CHECKING:
    from kvstore.transport.inprocess import Fabric

__all__ = [
    "CANCELLED",
    "CLOSED",
    "EXPIRED",
    "Card",
    "DigestsReady",
    "EventSink",
    "PageTransport",
    "Pull",
    "PullExpired",
    "PullSettled",
    "Transfer",
    "TransportEvent",
    "TransportFailed",
    "TransportThread",
    "Way",
    "boot_time_s",
    "create_transport",
]


def create_transport(
    kinds: Sequence[str], region: npt.NDArray[np.uint8], incarnation: str, *, fabric: Fabric | None = None
) -> PageTransport:
    """Makes the transport that reaches others by `kinds`, best first, and registers `region` with it.

    kinds: "nixl" (processes and hosts), "inprocess" (needs `fabric`). With several, a card names every way and a pull
        takes the first of ours that the peer also has.
    incarnation: unique per process start, over the cluster.
    Raises ValueError for an unknown or repeated kind, ImportError where the library of a kind is not installed.
    """
    if not kinds or len(set(kinds)) != len(kinds):
        raise ValueError(f"transport kinds must be at least one and all different, got {list(kinds)}")
    made: list[PageTransport] = []
    try:
        for kind in kinds:
            made.append(_create(kind, region, incarnation, fabric))
    except BaseException:
        for transport in made:
            transport.close()
        raise
    if len(made) == 1:
        return made[0]
    from kvstore.transport.several import SeveralTransports

    return SeveralTransports(made)


def _create(kind: str, region: npt.NDArray[np.uint8], incarnation: str, fabric: Fabric | None) -> PageTransport:
    # Imported where needed: NIXL loads 100 MB of libraries and its environment must be set before.
    if kind == "nixl":
        from kvstore.transport.nixl import NixlTransport

        return NixlTransport(region, incarnation)
    if kind == "inprocess":
        from kvstore.transport.inprocess import InProcessTransport

        if fabric is None:
            raise ValueError("transport kind 'inprocess' needs a fabric")
        return InProcessTransport(fabric, region, incarnation)
    raise ValueError(f"unknown transport kind {kind!r}: known are 'nixl' and 'inprocess'")
