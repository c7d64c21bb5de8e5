"""One peer that is read from: connecting on a helper thread, finding out by what path its bytes come, losing it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.transport.base import Card, Way
from kvstore.transport.nixl_address import NixlAddress
from kvstore.transport.nixl_agent import NixlAgent, NixlError
from kvstore.transport.tcp_bytes import open_files, received_bytes

logger = logging.getLogger(__name__)

_PROBE_BYTES = 64 << 10
_PROBE_READS = 64  # of a smaller region, at most
_PROBE_PAUSE_S = 0.2e-3
_HEADER_BYTES = 4 << 10  # of a TCP segment, more than UCX takes


@dataclass(slots=True)
class Link:
    """An agent that is connected to one peer."""

    agent: NixlAgent
    peer: str
    """The name of the peer's agent."""
    path: str
    """See `NixlTransport`."""
    segment_bytes: int | None
    """Over TCP, the most that one read may ask for, and then only one read may be in flight; else None.

    Such reads are emulated: the peer sends its bytes in messages, and UCX 1.23 aborts the *peer's* process when a
    reader is gone while a second message is still to be sent to it (ucp_request.inl: "unexpected error: Endpoint
    timeout"). A reader with several reads in flight that was killed took the source with it in 8 of 12 tries, where
    that was behind by 30 ms; with one read of one message in none of 54.
    """
    in_flight: int = 0
    """Requests that were posted and are not done."""


class Reading(Protocol):
    """An unfinished transfer, as its connection sees it."""

    def release(self, agent: NixlAgent) -> None:
        """Gives back its requests, done or not, to the agent, which is about to be closed."""

    def lose(self, error: str) -> None:
        """Settles with `error`: the agent is closed, nothing can land any more."""


class Connection:
    """What is known of one peer, and every unfinished transfer from it.

    connecting (helper thread) --> ready --> failed
                +----------------------------^
    """

    def __init__(
        self, own: NixlAddress, way: Way, address: NixlAddress, card: Card, region: npt.NDArray[np.uint8]
    ) -> None:
        """way: what the peer's card said; address: the same, parsed."""
        self.way = way
        self.bases = np.array([[address.base], [own.base]], dtype=np.uint64)
        """[2, 1]: where the peer's region starts, and ours."""
        self.error: str | None = None
        """Why it failed, once it has."""
        self.link: Link | None = None
        """Once ready."""
        self.transfers: set[Reading] = set()
        self.used_s = time.monotonic()
        """When the last transfer began."""
        self._own = own
        self._address = address
        self._card = card
        self._region = region
        self._abandoned = threading.Event()
        self._connecting: Future[Link] = Future()

    def start(self, name: str) -> threading.Thread:
        """Connects, on a helper thread; `name` is the agent's."""
        helper = threading.Thread(target=self._connect, args=(name,), name=f"to {self._card.incarnation}", daemon=True)
        helper.start()
        return helper

    # -- the helper thread -----------------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        agent: NixlAgent | None = None
        try:
            files = open_files()
            agent = NixlAgent(name, serves=False)
            agent.register(self._region)
            peer = agent.connect(self._address.metadata)
            link = self._probed(agent, peer, files)
        except Exception as error:
            # The edge of the helper thread: whatever went wrong, the transfers that wait for this peer must hear it.
            if agent is not None:
                agent.close()
            self._connecting.set_exception(error)
        else:
            self._connecting.set_result(link)

    def _probed(self, agent: NixlAgent, peer: str, older_files: set[int]) -> Link:
        """Reads a little from the peer, the second time over lanes that are up, and looks where the bytes came from."""
        scratch = np.zeros(min(_PROBE_BYTES, self._card.region_bytes), dtype=np.uint8)
        agent.register(scratch)
        local = np.array([[scratch.ctypes.data, len(scratch), 0]], dtype=np.uint64)
        remote = np.array([[self._address.base, len(scratch), 0]], dtype=np.uint64)
        handle = agent.prepare_read(peer, remote, local)
        self._read(agent, handle)
        files = open_files() - older_files
        before = received_bytes(files)
        reads = min(_PROBE_READS, -(-_PROBE_BYTES // len(scratch)))
        for _ in range(reads):
            self._read(agent, handle)
        after = received_bytes(files)
        agent.release(handle)
        same_host = self._own.host == self._address.host
        if before is None or after is None:
            path = "nixl:net"
        elif any(after[file] - before.get(file, 0) >= reads * len(scratch) for file in after):
            path = "nixl:tcp"
        else:
            path = "nixl:cma" if same_host else "nixl:rdma"
        if same_host and path != "nixl:cma":
            logger.warning("pulls from %s on this host go by %s, not by CMA", self._card.incarnation, path)
        segment_bytes = None
        if path in ("nixl:tcp", "nixl:net"):
            smaller = min(self._own.segment_bytes, self._address.segment_bytes)
            segment_bytes = max(smaller - _HEADER_BYTES, smaller // 2)
        return Link(agent, peer, path, segment_bytes)

    def _read(self, agent: NixlAgent, handle: int) -> None:
        """Posts and waits. No deadline: a frozen peer may wake up, and the pulls that wait for it have their own."""
        done = agent.post(handle)
        while not done:
            if self._abandoned.wait(_PROBE_PAUSE_S):
                raise NixlError("given up while connecting")
            done = agent.done(handle)

    # -- the owner thread ------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether `link` is there; fails the connection if connecting did."""
        if self.link is None and self.error is None and self._connecting.done():
            try:
                self.link = self._connecting.result()
            except Exception as error:
                # Whatever the helper thread ran into, NIXL's or not: out of file descriptors, above all.
                self.fail(f"{self._card.incarnation} cannot be reached: {error}")
        return self.link is not None

    def fail(self, error: str) -> None:
        """Closes by force. Every unfinished transfer is settled then, since nothing can land without the agent."""
        if self.error is not None:
            return
        self.error = error
        self._abandoned.set()
        if self.link is None:
            self._connecting.add_done_callback(_close_late)
        else:
            for transfer in self.transfers:
                transfer.release(self.link.agent)
            self.link.agent.close()
            self.link = None
        transfers, self.transfers = self.transfers, set()
        for transfer in transfers:
            transfer.lose(error)


def _close_late(connecting: Future[Link]) -> None:
    """Closes what came up after nobody wanted it any more."""
    if connecting.exception() is None:
        connecting.result().agent.close()
