"""What cannot be is refused where it is written."""

from __future__ import annotations

import pytest

from kvstore.client import KvClientConfig
from kvstore.node import StorageConfig, StoreBounds
from protos.registration import NodeConfig

NODE = NodeConfig(node_id="kv-0", control_address="127.0.0.1:1")


@pytest.mark.parametrize(
    "changes",
    [{"memory_bytes": 0}, {"transports": ()}, {"offer_deadline_s": 0.0}, {"stop_grace_s": -1.0}],
)
def test_a_storage_config_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        StorageConfig(**{"node": NODE, "memory_bytes": 1 << 20, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"max_lease_s": 0.0}, {"max_writing_share": 0.0}, {"max_writing_share": 1.1}],
)
def test_bounds_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        StoreBounds(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_s": 0.0},
        {"release_deadline_s": 0.0},
        {"late_s": -1.0},
        {"silence_s": -1.0},
        {"lease_margin_s": 5.0},
        {"lease_margin_s": -0.1},
    ],
)
def test_a_client_config_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        KvClientConfig(**changes)
