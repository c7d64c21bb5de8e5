"""What a NIXL way says about a process: pure data, readable without NIXL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIND = "nixl"


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlAddress:
    """Where the region of a process lies and how its agent is reached."""

    base: int
    """Address of the region's first byte in its process."""
    host: str
    """Differs between machines and between boots of one machine; the same in every container of a machine."""
    segment_bytes: int
    """What that process sends over TCP in one message."""
    metadata: bytes
    """Of its NIXL agent."""

    def to_bytes(self) -> bytes:
        header = json.dumps({"base": self.base, "host": self.host, "segment_bytes": self.segment_bytes})
        return header.encode() + b"\n" + self.metadata

    @classmethod
    def from_bytes(cls, blob: bytes) -> NixlAddress:
        """Raises ValueError for anything that `to_bytes` did not write."""
        header, separator, metadata = blob.partition(b"\n")
        fields: Any = json.loads(header)
        match fields:
            case {"base": int(base), "host": str(host), "segment_bytes": int(segment_bytes)}:
                if separator and 0 <= base < 1 << 64 and segment_bytes > 0:
                    return cls(base=base, host=host, segment_bytes=segment_bytes, metadata=metadata)
        raise ValueError("not the address of a NIXL agent")


def this_host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
