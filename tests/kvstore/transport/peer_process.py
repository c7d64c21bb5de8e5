"""A process that serves a region over NIXL: `python -m tests.kvstore.transport.peer_process SEED REGION_BYTES`.

Writes its card (hex) as the first line, then "pong" for every line that it reads, and leaves at the end of its input.
With a third argument, the hex card of a source, it pulls all of that source's region for ever instead of serving.
"""

from __future__ import annotations

import os
import queue
import sys

import numpy as np
import numpy.typing as npt

from kvstore.transport import Card, Pull, TransportThread, boot_time_s, create_transport
from protos import common_pb2


def content(seed: int, region_bytes: int) -> npt.NDArray[np.uint8]:
    """What the region of such a process holds."""
    return np.random.default_rng(seed).integers(0, 256, region_bytes, dtype=np.uint8)


def card_from_hex(line: str) -> Card:
    return Card.from_proto(common_pb2.PoolCard.FromString(bytes.fromhex(line)))


def main(seed: int, region_bytes: int, source: Card | None) -> None:
    region = content(seed, region_bytes)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not pass for an answer
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    transport = TransportThread(lambda: create_transport(("nixl",), region, f"peer-{os.getpid()}"), events=events)
    card = transport.start()
    if source is None:
        print(card.to_proto().SerializeToString().hex(), file=answers, flush=True)
        for _ in sys.stdin:
            print("pong", file=answers, flush=True)
        transport.close()
        return
    whole, start = np.array([region_bytes], dtype=np.int64), np.zeros(1, dtype=np.int64)
    for pull_id in range(1 << 62):
        transport.submit(
            Pull(
                pull_id=pull_id,
                card=source,
                remote_offsets=start,
                local_offsets=start,
                num_bytes=whole,
                deadline_s=boot_time_s() + 60,
            )
        )
        if pull_id == 0:
            print("pulling", file=answers, flush=True)
        else:
            events.get()  # so that two are always under way


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), card_from_hex(sys.argv[3]) if len(sys.argv) > 3 else None)
