"""Owners of fragments: the same everywhere, fair by weight, and stable when nodes come and go."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.owners import by_owner, fragment_key, fragment_pages, owner, ranked, score

WEIGHTS = {"kv-0": 1.0, "kv-1": 1.0, "kv-2": 2.0}
VECTORS = [
    # key, its scores by node id, its ranking; as in kvstore/README.md
    ("00" * 16, ("0x1.6306b2e3af740p+1", "0x1.6ff1c500669d2p+5", "0x1.c6584bd5a1057p+3"), ["kv-1", "kv-2", "kv-0"]),
    (
        "000102030405060708090a0b0c0d0e0f",
        ("0x1.4e6f2d8da05edp+3", "0x1.64fce01d76f77p+0", "0x1.02a9873c05f88p+0"),
        ["kv-0", "kv-1", "kv-2"],
    ),
    ("ff" * 16, ("0x1.1b28a56272de4p+0", "0x1.413f68ea374a8p-1", "0x1.904b54ae7b477p+1"), ["kv-2", "kv-0", "kv-1"]),
]
keys = st.binary(min_size=16, max_size=16)


def some_keys(count: int) -> list[bytes]:
    return [blake2b(index.to_bytes(4, "little"), digest_size=16).digest() for index in range(count)]


@pytest.mark.parametrize(("key", "scores", "ranking"), VECTORS)
def test_published_vectors_hold(key, scores, ranking):
    expected = [float.fromhex(text) for text in scores]
    # A logarithm may differ in its last bits from one C library to the next; the ranking may not.
    assert [score(bytes.fromhex(key), *item) for item in WEIGHTS.items()] == pytest.approx(expected, rel=1e-14)
    assert ranked(bytes.fromhex(key), WEIGHTS) == ranking


def test_each_node_owns_its_share_by_weight():
    wins = dict.fromkeys(WEIGHTS, 0)
    for key in some_keys(8000):
        wins[owner(key, WEIGHTS)] += 1
    # Four standard deviations of 8000 draws at a half.
    assert wins["kv-2"] == pytest.approx(4000, abs=180)
    assert wins["kv-0"] == pytest.approx(2000, abs=180)


@given(key=keys, leaver=st.sampled_from(sorted(WEIGHTS)))
def test_a_node_that_leaves_moves_only_its_own_keys(key, leaver):
    rest = {node_id: weight for node_id, weight in WEIGHTS.items() if node_id != leaver}
    assert ranked(key, rest) == [node_id for node_id in ranked(key, WEIGHTS) if node_id != leaver]


@given(key=keys)
def test_the_order_of_the_view_does_not_matter(key):
    assert ranked(key, dict(reversed(WEIGHTS.items()))) == ranked(key, WEIGHTS)


def test_a_node_without_weight_owns_nothing():
    assert ranked(bytes(16), {"kv-0": 0.0, "kv-1": -1.0, "kv-2": 1.0}) == ["kv-2"]
    assert owner(bytes(16), {"kv-0": 0.0}) is None
    assert owner(bytes(16), {}) is None


def test_the_first_page_of_a_fragment_decides_for_all_of_it():
    prompt = some_keys(20)
    assert fragment_pages(16) == 8
    assert [prompt.index(fragment_key(prompt, index, 8)) for index in range(20)] == [0] * 8 + [8] * 8 + [16] * 4


def test_a_fragment_has_at_least_one_page():
    assert fragment_pages(page_size=256, fragment_tokens=128) == 1
    assert fragment_pages(page_size=48, fragment_tokens=128) == 2


@given(num_pages=st.integers(0, 40), per_fragment=st.integers(1, 9))
def test_every_page_is_asked_of_exactly_its_owner(num_pages, per_fragment):
    prompt = some_keys(num_pages)
    groups = by_owner(prompt, range(num_pages), per_fragment, WEIGHTS)
    assert sorted(index for group in groups.values() for index in group) == list(range(num_pages))
    for node_id, group in groups.items():
        assert group == sorted(group)
        assert {owner(fragment_key(prompt, index, per_fragment), WEIGHTS) for index in group} == {node_id}


def test_nobody_is_asked_where_nobody_is():
    assert by_owner(some_keys(3), range(3), 8, {}) == {}
