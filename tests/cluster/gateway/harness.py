"""A real gateway between real clients and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI

from cluster.gateway import Gateway, GatewayConfig, LimitsConfig, PlacementConfig
from engine.source import ModelSource
from engine.tokenizer import Tokenizer, load_tokenizer
from protos.registration import NodeConfig
from tests.cluster.gateway.peers import MODEL, Script, ScriptedControl, ScriptedWorker, eventually, scripted_cluster

T = TypeVar("T")


@dataclass
class Harness:
    gateway: Gateway
    control: ScriptedControl
    workers: list[ScriptedWorker]
    tokenizer: Tokenizer
    http: httpx.AsyncClient

    async def with_openai(self, use: Callable[[OpenAI], T], *, max_retries: int = 0) -> T:
        """Run `use` on a thread, with the official client."""

        def call() -> T:
            base_url = f"http://{self.gateway.http_address}/v1"
            with OpenAI(base_url=base_url, api_key="none", max_retries=max_retries, timeout=30) as client:
                return use(client)

        return await asyncio.to_thread(call)

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"} | fields)

    def idle(self) -> bool:
        """Nothing is left of any request, on any worker."""
        return not any(worker.running for worker in self.workers)


def source(folder: Path, name: str = MODEL) -> ModelSource:
    return ModelSource(name=name, weights="random:1", config=str(folder))


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *scripts: Script,
    placement: PlacementConfig | None = None,
    limits: LimitsConfig | None = None,
    stop_grace_s: float = 0.0,
    **config: Any,
) -> AsyncIterator[Harness]:
    """One worker per script. Ends only if nothing is left of any request."""
    async with scripted_cluster(*scripts) as (control, workers):
        gateway = Gateway(
            GatewayConfig(
                node=NodeConfig(node_id="gateway-0", control_address=control.address, heartbeat_s=0.05),
                models=(source(folder),),
                http_port=0,
                grpc_port=0,
                placement=placement or PlacementConfig(retry_after_s=0.05),
                limits=limits or LimitsConfig(),
                stop_grace_s=stop_grace_s,
                **config,
            )
        )
        await gateway.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=30) as http:
                harness = Harness(gateway, control, workers, load_tokenizer(source(folder)), http)
                await eventually(lambda: not scripts or (control.loads and control.loads[-1].ready))
                yield harness
            await eventually(harness.idle)
            assert not [error for worker in workers for error in worker.errors]
        finally:
            await gateway.stop()


def events(body: str) -> list[Any]:
    """The JSON objects of an event stream, and "[DONE]"; comments are dropped."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found
