"""What a NIXL way says about a process: pure data, readable without NIXL."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.transport.base import Card

KIND = "nixl"
_RDMA_TLS = ("rc", "dc", "ud", "ib")


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlAddress:
    """Where the region of a process lies and how its agent is reached."""

    base: int
    """Address of the region's first byte in its process."""
    host: str
    """Differs between machines and between boots of one machine; the same in every container of a machine."""
    rdma: bool
    """Whether that process can use an RDMA device."""
    metadata: bytes
    """Of its NIXL agent."""

    def to_bytes(self) -> bytes:
        header = json.dumps({"base": self.base, "host": self.host, "rdma": self.rdma})
        return header.encode() + b"\n" + self.metadata

    @classmethod
    def from_bytes(cls, blob: bytes) -> NixlAddress:
        """Raises ValueError for anything that `to_bytes` did not write."""
        header, separator, metadata = blob.partition(b"\n")
        fields: Any = json.loads(header)
        match fields:
            case {"base": int(base), "host": str(host), "rdma": bool(rdma)} if separator and 0 <= base < 1 << 64:
                return cls(base=base, host=host, rdma=rdma, metadata=metadata)
        raise ValueError("not the address of a NIXL agent")


def same_host(one: Card, other: Card) -> bool:
    """Whether both processes run on one machine, so that pulls should go by CMA. False if a card does not tell."""
    ways = one.way(KIND), other.way(KIND)
    try:
        hosts = [NixlAddress.from_bytes(way.blob).host for way in ways if way is not None]
    except ValueError:
        return False
    return len(hosts) == 2 and hosts[0] == hosts[1]


def this_host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def rdma_usable() -> bool:
    """Whether there is an RDMA device and UCX_TLS does not rule it out."""
    devices = Path("/sys/class/infiniband")
    tls = os.environ.get("UCX_TLS", "all").split(",")
    allowed = "all" in tls or any(name.startswith(_RDMA_TLS) for name in tls)
    return allowed and devices.is_dir() and any(devices.iterdir())
