"""Making transports by kind, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.transport import Card, Pull, boot_time_s, create_transport
from kvstore.transport.inprocess import Fabric


def region() -> np.ndarray:
    return np.ones(4096, dtype=np.uint8)


@pytest.mark.parametrize("kinds", [(), ("inprocess", "inprocess"), ("pigeon",)])
def test_kinds_that_make_no_sense_are_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="kind"):
        create_transport(kinds, region(), "a", fabric=Fabric())


def test_inprocess_needs_a_fabric() -> None:
    with pytest.raises(ValueError, match="fabric"):
        create_transport(("inprocess",), region(), "a")


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(16, dtype=np.int8),
        np.ones((4, 4), dtype=np.uint8),
        np.ones(16, dtype=np.uint8)[::2],
        np.frombuffer(b"read only", dtype=np.uint8),
        np.ones(0, dtype=np.uint8),
    ],
)
def test_a_region_must_be_writeable_contiguous_bytes(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="region must be"):
        create_transport(("inprocess",), bad, "a", fabric=Fabric())


def test_a_failed_creation_leaves_nothing_behind() -> None:
    fabric = Fabric()
    with pytest.raises(ValueError, match="unknown"):
        create_transport(("inprocess", "pigeon"), region(), "a", fabric=fabric)
    create_transport(("inprocess",), region(), "a", fabric=fabric).close()


def test_an_incarnation_is_used_once() -> None:
    fabric = Fabric()
    create_transport(("inprocess",), region(), "a", fabric=fabric)
    with pytest.raises(ValueError, match="has joined already"):
        create_transport(("inprocess",), region(), "a", fabric=fabric)


def test_the_first_way_that_both_have_is_taken() -> None:
    fabric = Fabric()
    both = create_transport(("inprocess", "nixl"), region(), "both", fabric=fabric)
    nixl_only = create_transport(("nixl",), region(), "nixl-only")
    try:
        assert [way.kind for way in both.card().ways] == ["inprocess", "nixl"]
        own = create_transport(("inprocess", "nixl"), region(), "own", fabric=fabric)
        paths = {}
        for card in (both.card(), nixl_only.card()):
            transfer = own.begin(_pull(card))
            while not transfer.settled:
                transfer.advance()
            assert transfer.error is None
            paths[card.incarnation] = transfer.path
        assert paths["both"] == "inprocess"
        assert paths["nixl-only"].startswith("nixl:")
        stranger = Card(incarnation="stranger", region_bytes=8, ways=())
        assert own.begin(_pull(stranger)).error is not None
        own.forget("both")
        own.close()
    finally:
        both.close()
        nixl_only.close()


def test_arrays_of_a_pull_must_agree() -> None:
    two, one = np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64)
    card = Card(incarnation="a", region_bytes=8, ways=())
    with pytest.raises(ValueError, match="local_offsets must be"):
        Pull(pull_id=1, card=card, remote_offsets=two, local_offsets=one, num_bytes=two, deadline_s=0.0)
    with pytest.raises(ValueError, match="expected must be"):
        Pull(
            pull_id=1,
            card=card,
            remote_offsets=two,
            local_offsets=two,
            num_bytes=two,
            deadline_s=0.0,
            expected=np.zeros((1, 1), dtype=np.uint64),
        )


def _pull(card: Card) -> Pull:
    places = np.array([0], dtype=np.int64)
    sizes = np.array([8], dtype=np.int64)
    return Pull(
        pull_id=1,
        card=card,
        remote_offsets=places,
        local_offsets=places,
        num_bytes=sizes,
        deadline_s=boot_time_s() + 30,
    )
