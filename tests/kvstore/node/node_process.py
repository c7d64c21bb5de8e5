"""A storage node in a process of its own, over NIXL: `python -m tests.kvstore.node.node_process CONTROL_ADDRESS`.

Writes its incarnation and its address as the first line, and stops at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys

from kvstore.node import StorageConfig, StorageNode
from protos.registration import NodeConfig


async def main(control_address: str) -> None:
    config = StorageConfig(
        node=NodeConfig(node_id="kv-0", control_address=control_address), memory_bytes=4 << 20, transports=("nixl",)
    )
    node = StorageNode(config)
    await node.start()
    print(node.incarnation, node.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
