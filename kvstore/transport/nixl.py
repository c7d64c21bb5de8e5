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
import logging
import threading
from collections import deque
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import Card, PageTransport, Pull, SettledTransfer, Transfer, Way, out_of_bounds
from kvstore.transport.nixl_address import KIND, NixlAddress, rdma_usable, this_host
from kvstore.transport.nixl_agent import NixlAgent, NixlError
from kvstore.transport.pieces import Extents, pieces

logger = logging.getLogger(__name__)

_POSTED_PIECES = 2  # in flight per pull: the second keeps the link busy while the first is noticed
_PROBE_BYTES = 64 << 10
_PROBE_PAUSE_S = 0.5e-3
_JOIN_S = 10.0  # connecting to nowhere takes 7 s


class NixlTransport(PageTransport):
    """The contract over NIXL.

    `Transfer.path` is what was seen, not what was configured:
        "nixl:cma"  the kernel copied from process to process: a probe was complete when its post returned. Certain.
        "nixl:tcp"  it was not, and one end has no RDMA device that it may use. Certain.
        "nixl:net"  it was not, and both ends have one: RDMA, or TCP where UCX could not use it. UCX does not tell.
    Between two processes of one host everything but "nixl:cma" is a degradation (missing ptrace permission, another pid
    namespace, UCX_TLS): five to ten times slower, and it costs CPU time at the source. It is logged once per peer.
    """

    kind = KIND

    def __init__(self, region: npt.NDArray[np.uint8], incarnation: str) -> None:
        super().__init__(region, incarnation)
        self._server = NixlAgent(incarnation, serves=True)
        self._server.register(region)
        self._address = NixlAddress(
            base=region.ctypes.data, host=this_host(), rdma=rdma_usable(), metadata=self._server.metadata()
        )
        self._connections: dict[str, _Connection] = {}
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
        try:
            address = NixlAddress.from_bytes(way.blob)
        except ValueError as error:
            return SettledTransfer(pull, f"{pull.card.incarnation} has no valid {self.kind} address: {error}")
        todo = pieces(pull)
        if not todo:
            return SettledTransfer(pull)
        transfer = _ReadTransfer(pull, self._connection(pull.card, address), todo)
        transfer.connection.transfers.add(transfer)
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

    def _connection(self, card: Card, address: NixlAddress) -> _Connection:
        """The connection to that peer: the one there is, or a new one if there is none, or it failed, or moved."""
        connection = self._connections.get(card.incarnation)
        if connection is not None and connection.error is None and connection.address == address:
            return connection
        if connection is not None:
            connection.fail(f"{card.incarnation} has another address now")
        connection = _Connection(self._address, address, card, self.region)
        self._connections[card.incarnation] = connection
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        self._helpers.append(connection.start(next(self._names)))
        return connection


class _Link:
    """An agent that is connected to one peer."""

    def __init__(self, agent: NixlAgent, peer: str, path: str) -> None:
        self.agent = agent
        self.peer = peer
        self.path = path


class _Connection:
    """What is known of one peer, and every unfinished transfer from it.

    connecting (helper thread) --> ready --> failed
                +----------------------------^
    """

    def __init__(self, own: NixlAddress, address: NixlAddress, card: Card, region: npt.NDArray[np.uint8]) -> None:
        self.own = own
        self.address = address
        self.error: str | None = None
        self.link: _Link | None = None
        self.transfers: set[_ReadTransfer] = set()
        self._card = card
        self._region = region
        self._abandoned = threading.Event()
        self._connecting: Future[_Link] = Future()

    def start(self, name: str) -> threading.Thread:
        """Connects, on a helper thread; `name` is the agent's."""
        helper = threading.Thread(target=self._connect, args=(name,), name=f"to {self._card.incarnation}", daemon=True)
        helper.start()
        return helper

    # -- the helper thread -----------------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        agent: NixlAgent | None = None
        try:
            agent = NixlAgent(name, serves=False)
            agent.register(self._region)
            peer = agent.connect(self.address.metadata)
            link = _Link(agent, peer, self._probe(agent, peer))
        except Exception as error:
            # The edge of the helper thread: whatever went wrong, the transfers that wait for this peer must hear it.
            if agent is not None:
                agent.close()
            self._connecting.set_exception(error)
        else:
            self._connecting.set_result(link)

    def _probe(self, agent: NixlAgent, peer: str) -> str:
        """Reads twice, the second time over lanes that are up, and says by what path."""
        scratch = np.zeros(min(_PROBE_BYTES, self._card.region_bytes), dtype=np.uint8)
        agent.register(scratch)
        local = np.array([[scratch.ctypes.data, len(scratch), 0]], dtype=np.uint64)
        remote = np.array([[self.address.base, len(scratch), 0]], dtype=np.uint64)
        handle = agent.prepare_read(peer, remote, local)
        for _ in range(2):
            at_once = agent.post(handle)
            done = at_once
            while not done:
                # No deadline here: a frozen peer may wake up, and the pulls that wait for it have deadlines of their
                # own. Tearing the read down instead would kill that peer as it wakes (see `forget`).
                if self._abandoned.wait(_PROBE_PAUSE_S):
                    raise NixlError("given up while connecting")
                done = agent.done(handle)
        agent.release(handle)
        if at_once:
            return "nixl:cma"
        path = "nixl:net" if self.own.rdma and self.address.rdma else "nixl:tcp"
        if self.own.host == self.address.host:
            logger.warning("pulls from %s on this host go by %s, not by CMA", self._card.incarnation, path)
        return path

    # -- the owner thread ------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether `link` is there; fails the connection if connecting did."""
        if self.link is None and self.error is None and self._connecting.done():
            try:
                self.link = self._connecting.result()
            except NixlError as error:
                self.fail(f"{self._card.incarnation} cannot be reached: {error}")
        return self.link is not None

    def fail(self, error: str) -> None:
        """Closes by force. Every unfinished transfer is settled then, since nothing can land without the agent."""
        if self.error is not None:
            return
        self.error = error
        self._abandoned.set()
        if self.link is not None:
            for transfer in self.transfers:
                transfer.release(self.link.agent)
            self.link.agent.close()  # with which a request that would not be released ends too
            self.link = None
        else:
            self._connecting.add_done_callback(_close_late)
        for transfer in self.transfers:
            transfer.settled, transfer.error = True, error
        self.transfers.clear()


def _close_late(connecting: Future[_Link]) -> None:
    """Closes what came after nobody wanted it any more."""
    if connecting.exception() is None:
        connecting.result().agent.close()


class _ReadTransfer(Transfer):
    """Posts pieces in order, a few in flight, over a connection that may still be coming up."""

    def __init__(self, pull: Pull, connection: _Connection, todo: list[Extents]) -> None:
        super().__init__(pull)
        self.connection = connection
        self._todo = deque(todo)
        self._posted: list[tuple[int, int]] = []
        """Handle and bytes of each request in flight."""

    def advance(self) -> bool:
        if self.settled:
            return False
        if self._todo and not self.connection.ready():
            return self.settled
        try:
            moved = self._collect()
            if self._todo and len(self._posted) < _POSTED_PIECES:
                self._post(self._todo.popleft())
                moved = True
        except NixlError as error:
            # One request failed: its siblings may still be landing, so the whole connection goes.
            self.connection.fail(f"{self.pull.card.incarnation} is gone: {error}")
            return True
        if not self._todo and not self._posted:
            self.settled = moved = True
            self.connection.transfers.discard(self)
        return moved

    def stop(self) -> None:
        if self._todo:
            self._todo.clear()
            self.error = "stopped"

    def release(self, agent: NixlAgent) -> None:
        """Frees the requests in flight; the agent is about to be closed."""
        for handle, _ in self._posted:
            with contextlib.suppress(NixlError):
                agent.release(handle)
        self._posted.clear()

    def _collect(self) -> bool:
        if not self._posted:
            return False
        link = self._link()
        still: list[tuple[int, int]] = []
        for handle, num_bytes in self._posted:
            if link.agent.done(handle):
                link.agent.release(handle)
                self.landed_bytes += num_bytes
            else:
                still.append((handle, num_bytes))
        moved = len(still) < len(self._posted)
        self._posted = still
        return moved

    def _post(self, piece: Extents) -> None:
        link = self._link()
        self.path = link.path
        rows = np.zeros((2, len(piece), 3), dtype=np.uint64)
        rows[:, :, 0] = piece[:, :2].T
        rows[0, :, 0] += np.uint64(self.connection.address.base)
        rows[1, :, 0] += np.uint64(self.connection.own.base)
        rows[:, :, 1] = piece[:, 2]
        try:
            handle = link.agent.prepare_read(link.peer, rows[0], rows[1])
        except NixlError as error:
            # Nothing was posted, so the peer need not be dead: its card promised more than it had registered.
            self.stop()
            self.error = f"{self.pull.card.incarnation}: {error}"
            return
        num_bytes = int(piece[:, 2].sum())
        self._posted.append((handle, num_bytes))
        if link.agent.post(handle):
            self._posted.pop()
            link.agent.release(handle)
            self.landed_bytes += num_bytes

    def _link(self) -> _Link:
        assert self.connection.link is not None, "a piece is posted or asked after only over a live connection"
        return self.connection.link
