"""The stores that the catalog's checks run on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fakeredis
import pytest

from cluster.catalog import Catalog, EmbeddedCatalog

_names = itertools.count()


@pytest.fixture(scope="session", params=["fakeredis", "valkey", "redis-server"])
def store(request, tmp_path_factory) -> Iterator[Callable[[str], Catalog]]:
    """Opens the catalog of the cluster that it is given the name of."""
    if request.param == "fakeredis":
        server = fakeredis.FakeServer()
        yield lambda cluster: Catalog(fakeredis.FakeAsyncRedis(server=server, decode_responses=True), cluster=cluster)
        return
    program = None
    if request.param == "redis-server":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("no redis-server on PATH")
        program = Path(found)
    embedded = EmbeddedCatalog(tmp_path_factory.mktemp(request.param), server=program)
    embedded.start()
    yield lambda cluster: Catalog.open(embedded.url, cluster=cluster)
    embedded.stop()


@pytest.fixture
def open_catalog(store) -> Callable[[], Catalog]:
    """Opens the catalog of a cluster that only this test uses; each call makes a client of its own."""
    name = f"cluster-{next(_names)}"
    return lambda: store(name)
