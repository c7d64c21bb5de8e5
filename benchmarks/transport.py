"""How fast pages are pulled from another process, beside a memcpy of as many pages of that size in the same run.

    python -m benchmarks.transport [--repeats 15] [--paths nixl nixl-tcp inprocess]

Every pull goes through a `TransportThread`, as in a worker: queue, thread, post, settle, event. Pages lie at random
places on both sides. memcpy and pull alternate. The ceiling is the memcpy: no path that ends in this process' memory
beats it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import queue
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from kvstore.transport import Card, Pull, PullSettled, TransportThread, boot_time_s, create_transport
from kvstore.transport.inprocess import Fabric
from protos import common_pb2

REGION_BYTES = 128 << 20
PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10, 368_640, 1 << 20, 2 << 20)  # 368,640: SmolLM2-135M, 16 tokens, bfloat16
NUM_PAGES = (1, 64)
IDLE_S = 3.0
PATHS = ("nixl", "nixl-tcp", "inprocess")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    path: str
    """As the transport reports it."""
    page_bytes: int
    num_pages: int
    """Per pull."""
    us_per_page_best: float
    us_per_page_median: float
    gb_per_s_best: float
    gb_per_s_median: float
    ratio_best: float
    """Best pull / best memcpy of the same pages."""
    ratio_median: float


def serve(connection: Connection) -> None:
    """The other process: a region until the connection ends."""
    region = np.random.default_rng(0).integers(0, 256, REGION_BYTES, dtype=np.uint8)
    thread = TransportThread(lambda: create_transport(("nixl",), region, f"source-{os.getpid()}"))
    connection.send(thread.start().to_proto().SerializeToString())
    try:
        connection.recv()
    except EOFError:
        thread.close()


@contextlib.contextmanager
def source(path: str, fabric: Fabric) -> Iterator[Card]:
    """A region to pull from, in another process unless the path is in-process."""
    if path == "inprocess":
        region = np.random.default_rng(0).integers(0, 256, REGION_BYTES, dtype=np.uint8)
        transport = create_transport(("inprocess",), region, "source", fabric=fabric)
        with contextlib.closing(transport):
            yield transport.card()
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield Card.from_proto(common_pb2.PoolCard.FromString(ours.recv()))
    finally:
        ours.close()
        process.join()


def rows(path: str, repeats: int) -> Iterator[Row | float]:
    """A row per page size and count, and first the share of a core that an idle transport thread takes."""
    os.environ["UCX_TLS"] = "tcp" if path == "nixl-tcp" else "all"
    fabric = Fabric()
    region = np.ones(REGION_BYTES, dtype=np.uint8)
    memory = np.random.default_rng(1).integers(0, 256, REGION_BYTES, dtype=np.uint8)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    kind = "inprocess" if path == "inprocess" else "nixl"
    thread = TransportThread(
        lambda: create_transport((kind,), region, f"reader-{path}", fabric=fabric if kind == "inprocess" else None),
        events=events,
    )
    with contextlib.closing(thread), source(path, fabric) as card:
        thread.start()
        pull_once(thread, events, card, *(np.zeros(1, dtype=np.int64) for _ in range(2)), page_bytes=1)
        yield idle_share()
        rng = np.random.default_rng(2)
        for page_bytes in PAGE_BYTES:
            for num_pages in NUM_PAGES:
                yield measured(thread, events, card, region, memory, rng, page_bytes, num_pages, repeats)


def idle_share() -> float:
    """CPU seconds of this process per second while nobody asks for anything."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    time.sleep(IDLE_S)
    return (time.process_time() - cpu_s) / (time.monotonic() - wall_s)


def measured(
    thread: TransportThread,
    events: queue.SimpleQueue[object],
    card: Card,
    region: npt.NDArray[np.uint8],
    memory: npt.NDArray[np.uint8],
    rng: np.random.Generator,
    page_bytes: int,
    num_pages: int,
    repeats: int,
) -> Row:
    copies, pulls, path = [], [], ""
    for _ in range(repeats + 1):
        places = (rng.permutation(REGION_BYTES // page_bytes)[:num_pages] * page_bytes for _ in range(2))
        remote, local = (place.astype(np.int64) for place in places)
        pairs = list(zip(remote.tolist(), local.tolist(), strict=True))
        copies.append(timed(lambda pairs=pairs: copy(region, memory, pairs, page_bytes)))  # type: ignore[misc]
        started_s = time.perf_counter()
        path = pull_once(thread, events, card, remote, local, page_bytes).path
        pulls.append(time.perf_counter() - started_s)
    copies, pulls = copies[1:], pulls[1:]  # the first warms up
    total_bytes = num_pages * page_bytes
    best_s, median_s = min(pulls), statistics.median(pulls)
    return Row(
        path=path,
        page_bytes=page_bytes,
        num_pages=num_pages,
        us_per_page_best=best_s / num_pages * 1e6,
        us_per_page_median=median_s / num_pages * 1e6,
        gb_per_s_best=total_bytes / best_s / 1e9,
        gb_per_s_median=total_bytes / median_s / 1e9,
        ratio_best=best_s / min(copies),
        ratio_median=median_s / statistics.median(copies),
    )


def copy(
    into: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], pairs: list[tuple[int, int]], page_bytes: int
) -> None:
    for remote, local in pairs:
        into[local : local + page_bytes] = source[remote : remote + page_bytes]


def timed(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def pull_once(
    thread: TransportThread,
    events: queue.SimpleQueue[object],
    card: Card,
    remote: npt.NDArray[np.int64],
    local: npt.NDArray[np.int64],
    page_bytes: int,
) -> PullSettled:
    thread.submit(
        Pull(
            pull_id=0,
            card=card,
            remote_offsets=remote,
            local_offsets=local,
            num_bytes=np.full(len(remote), page_bytes, dtype=np.int64),
            deadline_s=boot_time_s() + 60,
        )
    )
    settled = events.get(timeout=60)
    if not isinstance(settled, PullSettled) or settled.error is not None:
        raise RuntimeError(f"a pull failed: {settled}")
    return settled


def commit() -> str:
    """Of the checkout, or empty outside one."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    options = parser.parse_args()
    found: list[Row] = []
    idle: dict[str, float] = {}
    print(
        f"{'path':<10} {'page':>9} {'pages':>5} {'us/page':>9} {'median':>9} {'GB/s':>6} {'x memcpy':>8} {'median':>7}"
    )
    for path in options.paths:
        for row in rows(path, options.repeats):
            if isinstance(row, float):
                idle[path] = row
                continue
            found.append(row)
            print(
                f"{row.path:<10} {row.page_bytes:>9} {row.num_pages:>5} {row.us_per_page_best:>9.1f} "
                f"{row.us_per_page_median:>9.1f} {row.gb_per_s_best:>6.2f} "
                f"{row.ratio_best:>8.1f} {row.ratio_median:>7.1f}"
            )
    summary = {
        "benchmark": "transport",
        "commit": commit(),
        "machine": {"cpus": os.cpu_count(), "load_1min": os.getloadavg()[0], "kernel": platform.release()},
        "versions": {name: version(name) for name in ("nixl-cu12", "numpy")},
        "repeats": options.repeats,
        "idle_cores": idle,
        "rows": [asdict(row) for row in found],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
