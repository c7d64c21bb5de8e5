"""Where a server listens, written host:port, with brackets around an IPv6 address."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and a TCP port; port 0 stands for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> HostPort:
        """The address that a process on this machine connects to: loopback where we listen on every interface."""
        return HostPort(_EVERY_INTERFACE.get(self.host, self.host), self.port)


def parse_host_port(value: object) -> HostPort:
    """Raises ValueError that shows how an address is written."""
    if isinstance(value, HostPort):
        return value
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"write an address as host:port, such as 127.0.0.1:8000 or '[::1]:8000', not {value!r}")
    port = int(match["port"])
    if port > 65535:
        raise ValueError(f"a port is at most 65535, got {port}; 0 takes a free one")
    return HostPort(match["v6"] or match["name"], port)


ListenAddress = Annotated[HostPort, BeforeValidator(parse_host_port), PlainSerializer(str)]
"""In YAML text such as 127.0.0.1:8000."""
