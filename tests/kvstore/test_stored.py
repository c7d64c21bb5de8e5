"""From stored bytes back to a page: the right one, or a miss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.codecs import CODECS
from kvstore.pages import PageLayout, bytes_digest, page_digests
from kvstore.stored import StoredPage, codec_from_proto, codec_to_proto, layout_from_proto, layout_to_proto, restore
from protos import kvstore_pb2

LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, head_dim=32, page_size=8, dtype="bfloat16")
PAGE = np.arange(LAYOUT.page_bytes // 2, dtype=np.uint16).view(np.uint8)


def stored(codec: str) -> tuple[StoredPage, np.ndarray]:
    staged = np.frombuffer(CODECS[codec].encode(PAGE, LAYOUT), np.uint8).copy()
    header = StoredPage(
        key=bytes(16),
        offset_bytes=512,
        num_bytes=len(staged),
        codec=codec,
        lineage=codec,
        stored_digest=bytes_digest(staged),
        digests=tuple(page_digests(decoded(codec, staged)[None], LAYOUT.num_kv_heads)[0].tolist()),
    )
    return header, staged


def decoded(codec: str, staged: np.ndarray) -> np.ndarray:
    page = np.empty_like(PAGE)
    CODECS[codec].decode(staged, page, LAYOUT)
    return page


def comes_back(header: StoredPage, staged: np.ndarray, layout: PageLayout = LAYOUT) -> bool:
    page = np.empty_like(PAGE)
    found = restore(header, staged, page, layout)
    assert not found or np.array_equal(page, decoded(header.codec, stored(header.codec)[1]))
    return found


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_stored_page_comes_back(codec):
    assert comes_back(*stored(codec))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_any_flipped_bit_is_a_miss(codec):
    header, staged = stored(codec)
    for position in np.linspace(0, len(staged) - 1, 40).astype(int):
        damaged = staged.copy()
        damaged[position] ^= 0x10
        assert not comes_back(header, damaged)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_another_page_under_the_same_header_is_a_miss(codec):
    header, _ = stored(codec)
    other = np.frombuffer(CODECS[codec].encode(PAGE[::-1].copy(), LAYOUT), np.uint8)
    assert not comes_back(header, other)
    assert not comes_back(replace(header, stored_digest=bytes_digest(other)), other)


def test_a_header_that_does_not_fit_is_a_miss():
    header, staged = stored("lossless")
    assert not comes_back(replace(header, codec="fp9"), staged)
    assert not comes_back(replace(header, codec="raw"), staged)
    assert not comes_back(header, staged, replace(LAYOUT, num_kv_heads=4, num_layers=1))
    assert not comes_back(replace(header, digests=()), staged)
    assert not comes_back(header, staged[:-1])


def test_a_header_survives_the_wire():
    header, _ = stored("lossless")
    message = kvstore_pb2.StoredPage.FromString(header.to_proto().SerializeToString())
    assert StoredPage.from_proto(message) == header


@pytest.mark.parametrize(("codec", "lineage"), [("fp8", "raw"), ("nvfp4", "k-fp8-v-nvfp4"), ("nvfp4", "lossless")])
def test_a_lineage_that_denies_the_loss_of_its_codec_is_refused(codec, lineage):
    header, _ = stored(codec)
    with pytest.raises(ValueError, match=f"stored as {codec} cannot have lineage {lineage}"):
        StoredPage.from_proto(replace(header, lineage=lineage).to_proto())


def test_a_layout_survives_the_wire():
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT
    with pytest.raises(ValueError, match="num_layers"):
        layout_from_proto(kvstore_pb2.PageLayout())


def test_every_codec_of_the_wire_is_known_here_and_the_other_way_round():
    named = {name for name, value in kvstore_pb2.Codec.items() if value}
    assert named == {codec_to_proto(name) for name in CODECS}
    assert {codec_from_proto(kvstore_pb2.Codec.Value(name)) for name in named} == set(CODECS)


@pytest.mark.parametrize("value", [0, 99])
def test_a_codec_of_another_version_is_refused(value):
    message = stored("raw")[0].to_proto()
    message.codec = value
    with pytest.raises(ValueError, match=r"codec|99"):
        StoredPage.from_proto(message)
