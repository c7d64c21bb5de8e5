"""The catalog that control planes in tests stand on: the real embedded server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.catalog import EmbeddedCatalog


@pytest.fixture(scope="package")
def catalog(tmp_path_factory) -> Iterator[EmbeddedCatalog]:
    """Shared; every test has a cluster name of its own in it."""
    embedded = EmbeddedCatalog(tmp_path_factory.mktemp("catalog"))
    embedded.start()
    yield embedded
    embedded.stop()
