"""What the transport of one node has brought, and what of that the cluster is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvstore.pages import Rate
from kvstore.transport import PullSettled
from protos import control_pb2


@dataclass(slots=True)
class PullStats:
    """Counted since the start."""

    pages_pulled: int = 0
    bytes_pulled: int = 0
    bytes_rate: Rate = field(default_factory=Rate)
    """From a pull's submission to its last byte."""
    path: str = ""
    """What the last pull took, e.g. "nixl:cma"."""
    tcp_since_unix_s: float | None = None
    """Since when pulls have gone through TCP; None while they do not."""

    def settled(self, event: PullSettled, num_pages: int) -> None:
        """A pull of `num_pages` pages has ended."""
        if event.path:
            self.path = event.path
            if not event.path.endswith(":tcp"):
                self.tcp_since_unix_s = None
            elif self.tcp_since_unix_s is None:
                self.tcp_since_unix_s = time.time()
        if event.error is None:
            self.pages_pulled += num_pages - len(event.mismatched)
            self.bytes_pulled += event.num_bytes
            self.bytes_rate.measured(event.num_bytes, event.seconds)

    def tell(self, load: control_pb2.Load) -> None:
        """Write it into a load report."""
        load.pages_pulled = self.pages_pulled
        load.bytes_pulled = self.bytes_pulled
        load.pull_bytes_per_s = self.bytes_rate.per_s
        load.transport = self.path
        if self.tcp_since_unix_s is not None:
            load.degradations.add(
                kind="transport-tcp",
                consequence="pages come through TCP, ten times slower than by RDMA or from memory, and in clear text",
                since_unix_s=self.tcp_since_unix_s,
            )
