"""What the transport tests run over: peers and readers per kind of transport."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.transport import PageTransport, create_transport
from kvstore.transport.inprocess import Fabric
from tests.kvstore.transport.peers import InProcessPeer, ProcessPeer, Reader

_names = itertools.count(1)


class World:
    """Makes readers and peers that can reach each other, and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._fabric = Fabric()
        self._open: list[Reader | ProcessPeer | InProcessPeer] = []
        self._shared: dict[int, ProcessPeer | InProcessPeer] = {}

    def transport(self, region: npt.NDArray[np.uint8]) -> PageTransport:
        name = f"reader-{os.getpid()}-{next(_names)}"
        if self.kind == "inprocess":
            return create_transport(("inprocess",), region, name, fabric=self._fabric)
        return create_transport(("nixl",), region, name)

    def reader(self, close_s: float = 2.0) -> Reader:
        reader = Reader(self.transport, close_s)
        self._open.append(reader)
        return reader

    def peer(self) -> ProcessPeer | InProcessPeer:
        """A peer of one's own, to be killed."""
        peer = InProcessPeer(self._fabric) if self.kind == "inprocess" else ProcessPeer()
        self._open.append(peer)
        return peer

    def shared_peer(self, number: int = 0) -> ProcessPeer | InProcessPeer:
        """A peer that stays alive, and that several tests read from."""
        if number not in self._shared:
            self._shared[number] = InProcessPeer(self._fabric) if self.kind == "inprocess" else ProcessPeer()
        return self._shared[number]

    def close_opened(self) -> None:
        """Closes what the test opened; a reader checks its book then."""
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        self.close_opened()
        for peer in self._shared.values():
            peer.close()


@pytest.fixture(scope="module", params=["inprocess", "nixl", "nixl-tcp"])
def module_world(request: pytest.FixtureRequest) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        world = World(request.param)
        yield world
        world.close()


@pytest.fixture
def world(module_world: World) -> Iterator[World]:
    yield module_world
    module_world.close_opened()


@pytest.fixture(scope="module")
def module_tcp_world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        world = World("nixl-tcp")
        yield world
        world.close()


@pytest.fixture
def tcp_world(module_tcp_world: World) -> Iterator[World]:
    """NIXL over TCP, where a pull needs its peer to run."""
    yield module_tcp_world
    module_tcp_world.close_opened()


@pytest.fixture
def make_reader() -> Iterator[Callable[[Callable[[npt.NDArray[np.uint8]], PageTransport]], Reader]]:
    """Readers over any transport, closed and checked as the test ends."""
    readers: list[Reader] = []

    def make(make_transport: Callable[[npt.NDArray[np.uint8]], PageTransport]) -> Reader:
        readers.append(Reader(make_transport, close_s=0.1))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()
