"""The codecs on tensors write the bytes that the kernels write, and give back the same pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvstore.codecs import CODECS, CorruptPage, Loss, Unencodable
from kvstore.codecs.tensors import decode_pages, encode_pages
from tests.kvstore.codecs.pages import DTYPES, decoded, encoded, layout_of, page_of, pages

LOSSY = [codec for codec in CODECS.values() if codec.loss is not Loss.NONE]
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@every_lossy_codec
@pytest.mark.parametrize("device", DEVICES)
@given(page_and_layout=pages())
@settings(max_examples=200, deadline=None)
def test_any_page_has_the_same_bytes_in_both(codec, device, page_and_layout):
    page, layout = page_and_layout
    stored = encode_pages(codec, torch.from_numpy(page)[None].to(device), layout)
    assert np.array_equal(stored[0].cpu().numpy(), encoded(codec, page, layout))
    kept = decode_pages(codec, stored, layout)
    assert np.array_equal(kept[0].cpu().numpy(), decoded(codec, stored[0].cpu().numpy(), layout))


@every_lossy_codec
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pages", [0, 1, 7])
def test_a_batch_is_its_pages(codec, device, dtype, num_pages):
    layout = layout_of(dtype)
    rng = np.random.default_rng(num_pages)
    batch = [page_of(rng.normal(size=layout.shape).astype(np.float32), layout) for _ in range(num_pages)]
    array = np.array(batch, np.uint8).reshape(num_pages, layout.page_bytes)
    stored = encode_pages(codec, torch.from_numpy(array).to(device), layout)
    assert stored.shape == (num_pages, codec.stored_bytes(layout))
    for page, row in zip(batch, stored.cpu().numpy(), strict=True):
        assert np.array_equal(row, encoded(codec, page, layout))
    kept = decode_pages(codec, stored, layout)
    assert kept.shape == array.shape
    for row, page in zip(stored.cpu().numpy(), kept.cpu().numpy(), strict=True):
        assert np.array_equal(page, decoded(codec, row, layout))


@every_lossy_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(codec, bad):
    layout = layout_of("float32")
    array = np.zeros((3, layout.page_bytes), np.uint8)
    array[1].view(np.float32)[5] = bad
    with pytest.raises(Unencodable, match="not finite"):
        encode_pages(codec, torch.from_numpy(array), layout)


@every_lossy_codec
def test_pages_of_another_size_are_refused(codec):
    layout = layout_of()
    with pytest.raises(ValueError, match="no pages of"):
        encode_pages(codec, torch.zeros(2, layout.page_bytes - 2, dtype=torch.uint8), layout)
    with pytest.raises(CorruptPage, match="no stored pages of"):
        decode_pages(codec, torch.zeros(2, 77, dtype=torch.uint8), layout)


@every_lossy_codec
@pytest.mark.parametrize(("position", "byte"), [(0, 9), (12, 1), (19, 0xFF), (64, 0x7F), (64, 0xFF)])
def test_one_damaged_page_spoils_its_batch(codec, position, byte):
    """Header, high byte of a scale, first code of the body: a value's in fp8, a block's scale in nvfp4."""
    layout = layout_of()
    page = page_of(np.random.default_rng(0).normal(size=layout.shape).astype(np.float32), layout)
    stored = np.stack([encoded(codec, page, layout)] * 3)
    stored[1, position] = byte
    with pytest.raises(CorruptPage, match="no encoder writes"):
        decode_pages(codec, torch.from_numpy(stored), layout)


def test_a_layout_that_does_not_suit_is_refused():
    layout = layout_of(head_dim=24)
    with pytest.raises(Unencodable, match="multiple of 16"):
        encode_pages(CODECS["nvfp4"], torch.zeros(1, layout.page_bytes, dtype=torch.uint8), layout)
    with pytest.raises(CorruptPage, match="multiple of 16"):
        decode_pages(CODECS["nvfp4"], torch.zeros(1, 100, dtype=torch.uint8), layout)
