"""Pulls between processes and hosts by NIXL over UCX: one-sided reads.

One agent serves this process' region and never reads. Every peer is read through an agent of its own, because

- the only way to end a read by force is to destroy the agent that posted it (`forget` must not end other peers' pulls),
- connecting holds the agent's lock, for seconds where packets get lost (other peers' pulls must go on).

An agent that only reads has no thread; it costs 6 MB, 11 file descriptors and 45 ms on a helper thread, once per peer.
Registering the region with each is free for CMA and TCP; RDMA pins it once per agent.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import Card, PageTransport, Pull, SettledTransfer, Transfer, Way, out_of_bounds
from kvstore.transport.nixl_address import KIND, NixlAddress, this_host
from kvstore.transport.nixl_agent import SEGMENT_BYTES, NixlAgent, NixlError
from kvstore.transport.nixl_connection import Connection, Link
from kvstore.transport.pieces import Extents, pieces, single_extents

_POSTED_PIECES = 2  # in flight per pull: the second keeps the link busy while the end of the first is noticed
_JOIN_S = 10.0  # connecting to nowhere takes 7 s
_IDLE_S = 300.0  # connecting anew takes 45 ms


class NixlTransport(PageTransport):
    """The contract over NIXL.

    `Transfer.path` is what was seen when connecting, not what was configured:
        "nixl:tcp"   the bytes of a probe came through a TCP socket of this process, as the kernel counts them: certain.
        "nixl:cma"   they did not, and the peer is on this host: the kernel copies from process to process.
        "nixl:rdma"  they did not, and the peer is on another host.
        "nixl:net"   the kernel does not count (before Linux 4.1, some sandboxes).
    Between two processes of one host everything but "nixl:cma" is a degradation (no ptrace permission, another pid
    namespace, UCX_TLS): several times slower, and it costs CPU time at the source. It is logged once per peer.
    """

    kind = KIND

    def __init__(self, region: npt.NDArray[np.uint8], incarnation: str, *, idle_s: float = _IDLE_S) -> None:
        """idle_s: a connection that was not used for so long is closed when the next one is made."""
        super().__init__(region, incarnation)
        self._idle_s = idle_s
        self._server = NixlAgent(incarnation, serves=True)
        self._server.register(region)
        self._address = NixlAddress(
            base=region.ctypes.data, host=this_host(), segment_bytes=SEGMENT_BYTES, metadata=self._server.metadata()
        )
        self._connections: dict[str, Connection] = {}
        self._helpers: list[threading.Thread] = []
        self._names = (f"{incarnation}/{number}" for number in itertools.count())

    def card(self) -> Card:
        way = Way(self.kind, self._address.to_bytes())
        return Card(incarnation=self.incarnation, region_bytes=len(self.region), ways=(way,))

    def begin(self, pull: Pull) -> Transfer:
        if (problem := out_of_bounds(pull, len(self.region))) is not None:
            return SettledTransfer(pull, problem)
        if (way := pull.card.way(self.kind)) is None:
            return SettledTransfer(pull, f"{pull.card.incarnation} cannot be reached by {self.kind}")
        if not pull.num_bytes.any():
            return SettledTransfer(pull)
        try:
            connection = self._connection(pull.card, way)
        except ValueError as error:
            return SettledTransfer(pull, f"{pull.card.incarnation} has no valid {self.kind} address: {error}")
        except RuntimeError as error:
            return SettledTransfer(pull, f"{pull.card.incarnation} cannot be reached: {error}")
        transfer = _ReadTransfer(pull, connection)
        connection.transfers.add(transfer)
        connection.used_s = time.monotonic()
        return transfer

    def forget(self, incarnation: str) -> None:
        if (connection := self._connections.pop(incarnation, None)) is not None:
            connection.fail(f"{incarnation} was forgotten")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.fail("the transport was closed")
        self._connections.clear()
        for helper in self._helpers:
            helper.join(_JOIN_S)
        self._server.close()

    def _connection(self, card: Card, way: Way) -> Connection:
        """The connection to that peer: the one there is, or a new one if there is none, or it failed, or moved.

        Raises ValueError if `way` holds no address, RuntimeError if no thread can be started for connecting.
        """
        connection = self._connections.get(card.incarnation)
        if connection is not None and connection.error is None and connection.way == way:
            return connection
        address = NixlAddress.from_bytes(way.blob)
        if connection is not None:
            connection.fail(f"{card.incarnation} has another address now")
        self._drop_idle()
        connection = Connection(self._address, way, address, card, self.region)
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        self._helpers.append(connection.start(next(self._names)))
        self._connections[card.incarnation] = connection
        return connection

    def _drop_idle(self) -> None:
        """Mostly those to processes that have ended: where nothing is read, nobody notices."""
        before_s = time.monotonic() - self._idle_s
        for incarnation, connection in list(self._connections.items()):
            if not connection.transfers and connection.used_s <= before_s:
                self.forget(incarnation)


class _ReadTransfer(Transfer):
    """Posts pieces in order over a connection that may still be coming up."""

    def __init__(self, pull: Pull, connection: Connection) -> None:
        super().__init__(pull)
        self._connection = connection
        self._todo: deque[Extents] | None = None
        """The pieces to post; None as long as the path, which decides how to cut them, is not known."""
        self._posted: list[tuple[int, int]] = []
        """Handle and bytes of each request in flight."""

    def advance(self) -> bool:
        if self.settled:
            return False
        moved = False
        if self._todo is None and self._connection.ready():
            self._todo = self._cut(self._live())
            moved = True
        if self.settled or self._todo is None:
            return self.settled
        try:
            # One or the other, so that pulls that share a link with room for one read take turns.
            moved |= self._collect() or self._post_next(self._todo)
        except NixlError as error:
            # One request failed: its siblings may still be landing, so the whole connection goes.
            self._connection.fail(f"{self.pull.card.incarnation} is gone: {error}")
            return True
        if not self._todo and not self._posted:
            self._settle()
        return moved | self.settled

    def stop(self) -> None:
        if self._todo is None or self._todo:
            self._todo = deque()
            self.error = "stopped"

    def release(self, agent: NixlAgent) -> None:
        for handle, _ in self._posted:
            with contextlib.suppress(NixlError):  # closing the agent ends what it did not want to give back
                agent.release(handle)
        self._posted.clear()

    def lose(self, error: str) -> None:
        self.settled, self.error = True, error

    def _settle(self) -> None:
        self.settled = True
        self._connection.transfers.discard(self)

    def _cut(self, link: Link) -> deque[Extents]:
        self.path = link.path
        return deque(pieces(self.pull) if link.segment_bytes is None else single_extents(self.pull, link.segment_bytes))

    def _collect(self) -> bool:
        """Asks after what is in flight; whether any of it is done."""
        if not self._posted:
            return False
        link = self._live()
        posted, self._posted = self._posted, []
        for place, (handle, num_bytes) in enumerate(posted):
            try:
                done = link.agent.done(handle)
            except NixlError:
                self._posted += posted[place:]
                raise
            if done:
                self._landed(link, handle, num_bytes)
            else:
                self._posted.append((handle, num_bytes))
        return len(self._posted) < len(posted)

    def _post_next(self, todo: deque[Extents]) -> bool:
        if not todo:
            return False
        link = self._live()
        if link.in_flight if link.segment_bytes is not None else len(self._posted) == _POSTED_PIECES:
            return False
        self._post(link, todo.popleft())
        return True

    def _post(self, link: Link, piece: Extents) -> None:
        rows = np.zeros((2, len(piece), 3), dtype=np.uint64)
        np.add(piece[:, :2].T.view(np.uint64), self._connection.bases, out=rows[:, :, 0])
        rows[:, :, 1] = piece[:, 2]
        try:
            handle = link.agent.prepare_read(link.peer, rows[0], rows[1])
        except NixlError as error:
            # Nothing was posted, so the peer need not be dead: its card promised more than it had registered.
            self._todo = deque()
            self.error = f"{self.pull.card.incarnation}: {error}"
            return
        num_bytes = int(piece[:, 2].sum())
        link.in_flight += 1
        self._posted.append((handle, num_bytes))
        if link.agent.post(handle):
            self._posted.pop()
            self._landed(link, handle, num_bytes)

    def _landed(self, link: Link, handle: int, num_bytes: int) -> None:
        link.agent.release(handle)
        link.in_flight -= 1
        self.landed_bytes += num_bytes

    def _live(self) -> Link:
        assert self._connection.link is not None, "a piece is posted or asked after only over a live connection"
        return self._connection.link
