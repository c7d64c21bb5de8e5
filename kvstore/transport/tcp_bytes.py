"""Whether bytes came through a TCP socket of this process: asked of the kernel, not of the library that read them."""

from __future__ import annotations

import os
import socket
import stat
import struct

_RECEIVED_AT = 128  # offset of tcpi_bytes_received in struct tcp_info, since Linux 4.1


def open_files() -> set[int]:
    """The file descriptors that this process has open."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def received_bytes(files: set[int]) -> dict[int, int] | None:
    """Payload bytes that each TCP socket among `files` has received so far; None where the kernel does not tell.

    Other threads may close files meanwhile; what is no TCP socket, or no longer one, is left out.
    """
    received: dict[int, int] = {}
    for file in files:
        if (sock := _duplicate(file)) is None:
            continue
        with sock:
            try:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
            except OSError:
                continue
        if len(info) < _RECEIVED_AT + 8:
            return None
        (received[file],) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    return received


def _duplicate(file: int) -> socket.socket | None:
    """A second handle on the socket `file`; None if it is none."""
    try:
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            return None
        copy = os.dup(file)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
