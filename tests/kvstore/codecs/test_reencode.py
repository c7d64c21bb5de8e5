"""Lineages, and stored pages that become lossier ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs import (
    CODECS,
    EXACT,
    CorruptPage,
    Loss,
    Unencodable,
    is_downwards,
    is_within,
    lossier,
    reencode,
)
from kvstore.pages import bytes_digest, page_digests
from kvstore.stored import StoredPage, restore
from tests.kvstore.codecs.pages import assert_within_bound, decoded, encoded, layout_of, page_of

LAYOUT = layout_of()
PAGE = page_of(np.random.default_rng(1).normal(size=LAYOUT.shape).astype(np.float32), LAYOUT)
ORDER = [["raw", "lossless"], ["fp8"], ["k-fp8-v-nvfp4"], ["nvfp4"]]
"""From the best to the worst; those in one list are equal."""
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}


def test_every_codec_has_its_place_in_the_order():
    assert set(RANKS) == set(CODECS)
    assert RANKS[EXACT] == 0


@pytest.mark.parametrize("first", RANKS)
@pytest.mark.parametrize("second", RANKS)
def test_the_lossier_of_two(first, second):
    assert is_within(first, second) == (RANKS[first] <= RANKS[second])
    assert lossier(first, second) == (second if RANKS[second] > RANKS[first] else first)


@pytest.mark.parametrize("source", RANKS)
@pytest.mark.parametrize("target", RANKS)
def test_pages_are_reencoded_downwards_only(source, target):
    stored = encoded(CODECS[source], PAGE, LAYOUT)
    downwards = RANKS[source] < RANKS[target] or RANKS[source] == RANKS[target] == 0
    assert is_downwards(source, target) == downwards
    if not downwards:
        with pytest.raises(ValueError, match=f"stored as {source} cannot become {target}"):
            reencode(stored, source, target, source, LAYOUT)
        return
    before = decoded(CODECS[source], stored, LAYOUT)
    new = reencode(stored, source, target, source, LAYOUT)
    after = decoded(CODECS[target], new.stored, LAYOUT)
    assert (new.codec, new.lineage) == (target, lossier(source, target))
    assert new.stored_digest == bytes_digest(new.stored)
    assert new.digests == tuple(page_digests(after[None], LAYOUT.num_kv_heads)[0].tolist())
    if CODECS[target].loss is Loss.NONE:
        assert np.array_equal(after, PAGE)
    else:
        assert_within_bound(CODECS[target], before, after, LAYOUT)


@pytest.mark.parametrize("lineage", RANKS)
def test_a_lineage_never_gets_better(lineage):
    """A raw page that a worker computed from lossy ones stays what it is, in whatever codec."""
    stored = encoded(CODECS["raw"], PAGE, LAYOUT)
    for target in CODECS:
        new = reencode(stored, "raw", target, lineage, LAYOUT)
        assert RANKS[new.lineage] == max(RANKS[lineage], RANKS[target])


def test_a_reencoded_page_is_one_that_readers_take():
    new = reencode(encoded(CODECS["lossless"], PAGE, LAYOUT), "lossless", "nvfp4", "raw", LAYOUT)
    header = StoredPage(
        key=bytes(16),
        offset_bytes=0,
        num_bytes=len(new.stored),
        codec=new.codec,
        lineage=new.lineage,
        stored_digest=new.stored_digest,
        digests=new.digests,
    )
    page = np.empty(LAYOUT.page_bytes, np.uint8)
    assert restore(StoredPage.from_proto(header.to_proto()), new.stored, page, LAYOUT)
    assert np.array_equal(page, decoded(CODECS["nvfp4"], new.stored, LAYOUT))


def test_a_lineage_better_than_the_codec_is_refused():
    stored = encoded(CODECS["fp8"], PAGE, LAYOUT)
    with pytest.raises(ValueError, match="stored as fp8 cannot have lineage lossless"):
        reencode(stored, "fp8", "nvfp4", "lossless", LAYOUT)


def test_what_the_target_does_not_take_is_refused():
    page = PAGE.copy()
    page.view(np.uint16)[77] = 0x7FC0
    with pytest.raises(Unencodable, match="not finite"):
        reencode(page, "raw", "fp8", "raw", LAYOUT)


def test_a_damaged_page_is_not_reencoded():
    with pytest.raises(CorruptPage):
        reencode(encoded(CODECS["lossless"], PAGE, LAYOUT)[:-1], "lossless", "fp8", "raw", LAYOUT)


@pytest.mark.parametrize("codec", ["fp8", "k-fp8-v-nvfp4", "nvfp4"])
def test_a_page_that_went_through_a_codec_goes_through_it_again_with_little_further_loss(codec):
    """So that a page which is fetched, evicted and stored once more does not drift away."""
    once = decoded(CODECS[codec], encoded(CODECS[codec], PAGE, LAYOUT), LAYOUT)
    again = decoded(CODECS[codec], encoded(CODECS[codec], once, LAYOUT), LAYOUT)
    assert_within_bound(CODECS[codec], PAGE, once, LAYOUT)
    assert (once.view(np.uint16) == again.view(np.uint16)).mean() > 0.99
