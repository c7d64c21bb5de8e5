"""NIXL 1.5.1 behind a narrow face: every quirk of the library and of its UCX lives here.

The low-level bindings are used, since the Python wrapper above them hard-codes `pthrDelay = 0`, with which the progress
thread spins on a whole core, and defaults to no thread safety at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

# The progress thread polls its sockets with this time-out; 0 would spin. What arrives wakes it at once (reads over TCP
# were as quick with 200 ms as with 1 ms), so this only bounds what a missed wake-up costs. Idle on a loaded two-core
# machine: 1 ms 0.034 of a core, 10 ms 0.006.
_PROGRESS_DELAY_US = 10_000
_MODULES = ("nixl_cu12", "nixl_cu13")  # either runs without CUDA; the package `nixl` would pull in both

SEGMENT_BYTES = 1 << 20
"""What UCX sends over TCP in one message, and receives: a read of at most that is answered by one message, on which
`nixl_connection.Link` relies. It is also twice as quick as the default of 8 KiB."""

# Read by UCX and NIXL as they are loaded or make a context.
_REQUIRED = {"UCX_TCP_TX_SEG_SIZE": str(SEGMENT_BYTES), "UCX_TCP_RX_SEG_SIZE": str(SEGMENT_BYTES)}
_DEFAULTS = {  # what the operator has set stays
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # others in this process may speak to their own UCX
    "UCX_LOG_FILE": "stderr",  # the default is stdout, which belongs to the program
    "UCX_LOG_LEVEL": "error",  # at "warn", closing by force prints a line per read that was in flight
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_TCP_SYN_CNT": "2",  # connecting to an address that swallows packets takes 7 s; by default over 95 s
    "UCX_TCP_KEEPIDLE": "2s",  # a link that was lost while idle fails the next read within 10 s
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
}


class NixlError(Exception):
    """What the library said, in its words."""


@lru_cache(maxsize=1)
def _bindings() -> ModuleType:
    """Raises ImportError where neither build of NIXL is installed."""
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for package in _MODULES:
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._bindings")
    raise ImportError(f"the nixl transport needs one of {', '.join(_MODULES)}")


@lru_cache(maxsize=1)
def _errors() -> tuple[type[Exception], ...]:
    """The library's exceptions, which share no base class, and what its C++ throws past them, e.g. without sockets."""
    kinds = vars(_bindings()).values()
    return RuntimeError, *(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))


class NixlAgent:
    """One NIXL agent with a UCX backend. One thread at a time.

    Closing it is the only way to end a read by force: NIXL's release of a request and its removal of a remote agent
    return at once while bytes go on landing. With the agent go its UCX worker and every socket or queue pair of it.
    """

    def __init__(self, name: str, *, serves: bool) -> None:
        """name: must differ from every name that a peer of this agent has seen before, also from an earlier process.
        serves: runs a progress thread, without which nobody can connect, nor read over TCP. An agent that only reads
            needs none: asking whether a read is done makes it progress.
        """
        nixl = _bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY_US
        config.captureTelemetry = False
        self._nixl = nixl
        self._registered: list[npt.NDArray[np.uint8]] = []
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        except _errors() as error:
            raise NixlError(f"no UCX backend: {error}") from error

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Makes `memory` a source and a target of reads, and keeps it alive until `close`."""
        extents = [(memory.ctypes.data, memory.nbytes, 0, "")]
        try:
            self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, extents), [])
        except _errors() as error:
            raise NixlError(f"cannot register {memory.nbytes} bytes: {error}") from error
        self._registered.append(memory)

    def metadata(self) -> bytes:
        """Addresses and keys for `connect`."""
        blob: bytes = self._agent.getLocalMD()
        return blob

    def connect(self, metadata: bytes) -> str:
        """Connects to the agent with that metadata and returns its name. Blocks for up to 7 s."""
        try:
            name: bytes | str = self._agent.loadRemoteMD(metadata)
        except _errors() as error:
            raise NixlError(f"cannot connect: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def prepare_read(self, peer: str, remote: npt.NDArray[np.uint64], local: npt.NDArray[np.uint64]) -> int:
        """Makes a request, to be released, of reads from `remote` addresses of `peer` to `local` ones.

        remote, local: [n, 3], rows of address, bytes, device (0); row by row of the same bytes. Costs 4 us plus 0.1 us
        per row; tables prepared ahead would halve that and fix the page size.
        """
        nixl = self._nixl
        try:
            handle: int = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, local),
                nixl.nixlXferDList(nixl.DRAM_SEG, remote),
                peer,
                "",
                [],
            )
        except _errors() as error:
            raise NixlError(f"cannot read: {error}") from error
        return handle

    def post(self, handle: int) -> bool:
        """Starts the reads; True if all bytes have landed already. Where the kernel copies (CMA), it copies in here."""
        return self._complete(self._agent.postXferReq, handle, "")

    def done(self, handle: int) -> bool:
        """Whether all bytes have landed. Makes the agent progress."""
        return self._complete(self._agent.getXferStatus, handle)

    def _complete(self, call: Any, *arguments: Any) -> bool:
        try:
            status = call(*arguments)
        except _errors() as error:
            raise NixlError(str(error)) from error
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise NixlError(str(status))

    def release(self, handle: int) -> None:
        """Frees a request that is done. One that is not goes on reading until `close`."""
        try:
            self._agent.releaseXferReq(handle)
        except _errors() as error:
            raise NixlError(f"cannot release a request: {error}") from error

    def close(self) -> None:
        """Ends everything by force: after it nothing lands and nobody can read. Takes about 10 ms. Idempotent."""
        self._agent = None
        self._registered.clear()
