"""Merging extents and cutting them into pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.transport import Card, Pull
from kvstore.transport.pieces import pieces, single_extents


def pull(remote: list[int], local: list[int], sizes: list[int]) -> Pull:
    return Pull(
        pull_id=1,
        card=Card(incarnation="a", region_bytes=1 << 30, ways=()),
        remote_offsets=np.array(remote, dtype=np.int64),
        local_offsets=np.array(local, dtype=np.int64),
        num_bytes=np.array(sizes, dtype=np.int64),
        deadline_s=0.0,
    )


def test_neighbours_on_both_sides_become_one_extent() -> None:
    (piece,) = pieces(pull([0, 10, 20, 30], [100, 110, 120, 200], [10, 10, 10, 5]))
    assert piece.tolist() == [[0, 100, 30], [30, 200, 5]]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    (piece,) = pieces(pull([0, 10], [100, 120], [10, 10]))
    assert piece.tolist() == [[0, 100, 10], [10, 120, 10]]


def test_an_extent_is_cut_where_a_piece_is_full() -> None:
    cut = pieces(pull([0, 1000], [0, 500], [25, 10]), piece_bytes=10)
    assert [piece.tolist() for piece in cut] == [
        [[0, 0, 10]],
        [[10, 10, 10]],
        [[20, 20, 5], [1000, 500, 5]],
        [[1005, 505, 5]],
    ]


def test_no_bytes_are_no_pieces() -> None:
    assert pieces(pull([], [], [])) == []
    assert pieces(pull([3, 4], [5, 6], [0, 0])) == []
    assert single_extents(pull([3, 4], [5, 6], [0, 0]), 10) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12)), max_size=12),
    st.integers(1, 40),
)
def test_every_byte_is_in_one_piece_and_no_piece_is_too_large(
    extents: list[tuple[int, int, int]], piece_bytes: int
) -> None:
    remote, local, sizes = ([extent[side] for extent in extents] for side in range(3))
    wanted = [(r + i, w + i) for r, w, size in extents for i in range(size)]
    asked = pull(remote, local, sizes)
    singles = single_extents(asked, piece_bytes)
    assert all(len(piece) == 1 for piece in singles)
    for cut in (pieces(asked, piece_bytes), singles):
        found = [(r + i, w + i) for piece in cut for r, w, size in piece.tolist() for i in range(size)]
        assert found == wanted
        assert all(0 < piece[:, 2].sum() <= piece_bytes and (piece[:, 2] > 0).all() for piece in cut)
