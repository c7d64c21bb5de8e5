"""Runs one prefill worker until its standard input closes. Prints incarnation and address, and its figures when asked.

Arguments: model folder. Each line on standard input is answered by a line of JSON with the worker's figures.
"""

from __future__ import annotations

import asyncio
import json
import sys

from engine.core import EngineConfig
from engine.source import ModelSource
from kvstore.plane import PlaneConfig
from prefill_node import PrefillConfig, PrefillWorker
from prefill_node.core import PrefillCoreConfig
from protos.registration import NodeConfig


async def main(folder: str) -> None:
    worker = PrefillWorker(
        PrefillConfig(
            # No control plane runs here: the worker serves all the same.
            node=NodeConfig(node_id="prefill-0", control_address="127.0.0.1:1"),
            model=ModelSource(name="tiny", weights="random:7", config=folder),
            plane=PlaneConfig(pool_bytes=1 << 20, staging_bytes=1 << 20),
            engine=EngineConfig(chunk_tokens=8),
            core=PrefillCoreConfig(grace_s=1.0),
            page_size=4,
        )
    )
    await worker.start()
    print(worker.incarnation, worker.address, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        stats = worker.stats
        figures = {"pages_free": stats.pages_free, "pages_total": stats.pages_total, "computed": stats.tokens_computed}
        print(json.dumps(figures), flush=True)
    await worker.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
