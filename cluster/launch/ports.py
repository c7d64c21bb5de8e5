"""Ports that stay the cluster's own while a process that serves on them is being restarted."""

from __future__ import annotations

import socket

from cluster.spec import HostPort


class PortTaken(Exception):
    """Somebody else listens there, or the address is not this machine's."""


class HeldPort:
    """A TCP port bound and not listened on, so that our own process can listen there, again after a restart.

    Linux lets a second socket bind the address if both allow reuse and neither listens yet; connections go to the
    one that listens. A port that another process listens on cannot be held: that is the check for taken ports.
    """

    def __init__(self, wanted: HostPort) -> None:
        """Raises PortTaken. Port 0 takes a free one; `address` says which."""
        family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((wanted.host, wanted.port))
        except OSError as error:
            self._socket.close()
            raise PortTaken(f"cannot listen on {wanted}: {error.strerror or error}") from error
        self.address = HostPort(wanted.host, self._socket.getsockname()[1])

    def release(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()
