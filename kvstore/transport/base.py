"""The page transport's contract: one-sided pulls with a deadline, between registered regions of two processes.

A process registers one region and hands out its `Card`. Whoever holds the card may pull bytes out of that region into
its own. Nothing that was posted can be called back: bytes keep landing after a cancel or a deadline, until the
transfer has *settled*. So the pages that a pull writes to belong to the transport until then, whatever the caller
has decided meanwhile. Stale or torn bytes may be read (the source may have moved on); digests tell.

One thread owns a transport: every call on a `PageTransport` and its `Transfer`s comes from there (see `thread.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos import common_pb2

PIECE_BYTES = 16 << 20
"""The most that one post moves. A copying path (CMA, memcpy) does the whole copy inside the post, so this bounds how
long the owner thread is away from its deadlines: about 2 ms at 8 GB/s."""

EXPIRED = "expired"
CANCELLED = "cancelled"
CLOSED = "closed"


def boot_time_s() -> float:
    """The clock of leases and deadlines: seconds since boot, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a region can be reached."""

    kind: str
    """Name of the implementation that understands `blob`, e.g. "nixl"."""
    blob: bytes
    """Address and keys; opaque to everybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Where the bytes of one process are and how to reach them. A restarted process has a new incarnation."""

    incarnation: str
    region_bytes: int
    ways: tuple[Way, ...]
    """Best first, in the eyes of the process that the card describes."""

    def to_proto(self) -> common_pb2.PoolCard:
        return common_pb2.PoolCard(
            incarnation=self.incarnation,
            region_bytes=self.region_bytes,
            ways=[common_pb2.TransportWay(kind=way.kind, blob=way.blob) for way in self.ways],
        )

    @classmethod
    def from_proto(cls, card: common_pb2.PoolCard) -> Card:
        return cls(
            incarnation=card.incarnation,
            region_bytes=card.region_bytes,
            ways=tuple(Way(way.kind, way.blob) for way in card.ways),
        )

    def way(self, kind: str) -> Way | None:
        return next((way for way in self.ways if way.kind == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pull:
    """Extents to copy from a peer's region into ours. Extents of zero bytes, and no extents at all, are allowed."""

    pull_id: int
    card: Card
    """Whose bytes."""
    remote_offsets: npt.NDArray[np.int64]
    """[n], bytes from the start of the peer's region. Comes over the wire: checked before anything is posted."""
    local_offsets: npt.NDArray[np.int64]
    """[n], bytes from the start of our region."""
    num_bytes: npt.NDArray[np.int64]
    """[n]"""
    deadline_s: float
    """Instant on `boot_time_s`."""
    expected: npt.NDArray[np.uint64] | None = None
    """[n, heads]: digest of each of the `heads` equal slices of each extent, compared after landing. None: no check."""

    def __post_init__(self) -> None:
        for name in ("remote_offsets", "local_offsets", "num_bytes"):
            array: np.ndarray = getattr(self, name)
            if array.dtype != np.int64 or array.shape != (len(self.num_bytes),):
                raise ValueError(f"{name} must be int64 [{len(self.num_bytes)}], got {array.dtype} {array.shape}")
        if self.expected is not None and (
            self.expected.dtype != np.uint64
            or self.expected.ndim != 2
            or len(self.expected) != len(self.num_bytes)
            or self.expected.shape[1] == 0
        ):
            got = f"{self.expected.dtype} {self.expected.shape}"
            raise ValueError(f"expected must be uint64 [{len(self.num_bytes)}, heads >= 1], got {got}")


@dataclass(frozen=True, slots=True)
class PullExpired:
    """The deadline passed. Bytes may still land: the pull is NOT settled and its pages are not free."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class PullSettled:
    """The last word on a pull: nothing lands any more. Its pages may be used if `error` is None, and freed always."""

    pull_id: int
    error: str | None
    """None: every byte landed before the deadline. Else EXPIRED, CANCELLED, CLOSED, or what failed, in words."""
    mismatched: tuple[int, ...]
    """Extents whose digests differ from `expected`; empty if there was an error, for then nothing counts anyway."""
    num_bytes: int
    """Bytes known to have landed."""
    seconds: float
    """From `submit` to here, digests not counted."""
    path: str
    """What carries the bytes, e.g. "inprocess", "nixl:cma", "nixl:tcp"; empty if the pull never got that far."""


class Transfer(ABC):
    """The bytes of one pull on their way.

    posting --advance()--> ... --> settled
       |                              ^
       +--stop()--> (in flight) ------+
    """

    def __init__(self, pull: Pull) -> None:
        self.pull = pull
        self.settled = False
        """Nothing of this pull can land any more. Final."""
        self.error: str | None = None
        """Why not every byte landed, once settled. None after `stop` if all had been posted before."""
        self.landed_bytes = 0
        self.path = ""

    @abstractmethod
    def advance(self) -> bool:
        """Posts what may be posted and asks after what was. True if anything happened since the last call.

        Blocks at most for the copy of PIECE_BYTES. Never raises for what a peer does or is: that ends in `error`.
        """

    @abstractmethod
    def stop(self) -> None:
        """Posts nothing further. What is in flight goes on and `advance` must still be called until `settled`."""


class SettledTransfer(Transfer):
    """A pull that ended before anything was posted: refused with `error`, or empty."""

    def __init__(self, pull: Pull, error: str | None = None, path: str = "") -> None:
        super().__init__(pull)
        self.settled, self.error, self.path = True, error, path

    def advance(self) -> bool:
        return False

    def stop(self) -> None:
        pass


class PageTransport(ABC):
    """Moves bytes from other processes' regions into this process' region, and lets others do the same.

    `region` is writable, C-contiguous uint8 and stays mapped at its address until `close` has returned: with some
    implementations a peer's read of unmapped memory kills this process.
    """

    kind: str
    """Name in `Way.kind`."""

    def __init__(self, region: npt.NDArray[np.uint8], incarnation: str) -> None:
        flags = region.flags
        if region.dtype != np.uint8 or region.ndim != 1 or not (region.size and flags.c_contiguous and flags.writeable):
            got = f"{region.dtype} {region.shape}, writeable={flags.writeable}"
            raise ValueError(f"region must be a contiguous, writeable uint8 [bytes >= 1], got {got}")
        self.region = region
        self.incarnation = incarnation

    @abstractmethod
    def card(self) -> Card:
        """How others reach this region."""

    @abstractmethod
    def begin(self, pull: Pull) -> Transfer:
        """Starts a pull. Does not block; connecting, where needed, is part of the transfer.

        A pull that cannot be (no way to reach that peer, extents outside a region) comes back settled with an error.
        """

    @abstractmethod
    def forget(self, incarnation: str) -> None:
        """That peer is gone: closes the connection by force. Its unfinished transfers settle with an error.

        Unknown incarnations are ignored. A later pull with a card of that incarnation connects anew.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends by force whatever is unfinished. After it nothing lands and nobody can read the region. Idempotent."""


def out_of_bounds(pull: Pull, region_bytes: int) -> str | None:
    """Names the first extent of `pull` that leaves the peer's region or ours (`region_bytes`), None if none does."""
    sides = (("remote", pull.remote_offsets, pull.card.region_bytes), ("local", pull.local_offsets, region_bytes))
    sizes = pull.num_bytes.view(np.uint64)
    for side, offsets, limit_bytes in sides:
        # Unsigned, so that what is negative is too large; and nothing overflows, whatever 64 bits came over the wire.
        limit = np.uint64(limit_bytes)
        bad = (sizes > limit) | (offsets.view(np.uint64) > limit - np.minimum(sizes, limit))
        if bad.any():
            i = int(bad.argmax())
            return f"extent {i} leaves the {side} region: {pull.num_bytes[i]} bytes at {offsets[i]} of {limit_bytes}"
    return None
