"""The lossy codecs: within their bounds on any page, and with the bytes that the formats say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs import CODECS, CorruptPage, Fp8, Grouped, KFp8VNvfp4, Loss, Nvfp4, Unencodable
from kvstore.codecs.small_floats import E2M1, E4M3
from tests.kvstore.codecs.pages import (
    DTYPES,
    assert_within_bound,
    decoded,
    encoded,
    layout_of,
    page_of,
    pages,
    values_of,
)

LOSSY = [codec for codec in CODECS.values() if codec.loss is not Loss.NONE]
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)


def normal_page(layout, seed: int = 0) -> np.ndarray:
    return page_of(np.random.default_rng(seed).normal(size=layout.shape).astype(np.float32), layout)


@every_lossy_codec
@given(page_and_layout=pages())
@settings(max_examples=200, deadline=None)
def test_any_page_comes_back_within_the_bound(codec, page_and_layout):
    page, layout = page_and_layout
    assert_within_bound(codec, page, decoded(codec, encoded(codec, page, layout), layout), layout)


@every_lossy_codec
def test_the_bounds_are_not_far_from_what_happens(codec):
    """A bound that is much too wide would let a wrong codec pass."""
    layout = layout_of("float32", page_size=256)
    values = np.exp2(np.random.default_rng(1).uniform(-4, 0, layout.shape)).astype(np.float32)
    page = page_of(values, layout)
    error = np.abs(values_of(decoded(codec, encoded(codec, page, layout), layout), layout) - values)
    for place, bound in enumerate(codec.bounds):
        used = error[:, :, place] / bound.limits(values[:, :, place].astype(np.float64), "float32")
        assert 0.9 < used.max() <= 1


@every_lossy_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_known_beforehand(codec, dtype):
    layout = layout_of(dtype)
    assert len(encoded(codec, normal_page(layout), layout)) == codec.stored_bytes(layout)


def test_bytes_per_value():
    """Of SmolLM2's pages; the scales cost a third of a percent, as do the headers."""
    layout = replace(layout_of(layers=30), num_kv_heads=3)
    shares = {codec.name: codec.stored_bytes(layout) / layout.page_bytes for codec in LOSSY}
    assert shares == pytest.approx({"fp8": 0.5020, "k-fp8-v-nvfp4": 0.3926, "nvfp4": 0.2832}, abs=1e-4)


def nearest_code(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code whose value is nearest, of two equally near ones the even one; by trying all. Signs are kept."""
    magnitudes = table[: len(table) // 2].astype(np.float64)
    magnitudes = magnitudes[~np.isnan(magnitudes)]
    distance = np.abs(np.abs(values)[..., None] - magnitudes)
    near = distance == distance.min(axis=-1, keepdims=True)
    codes = np.where(near.sum(axis=-1) == 2, near.argmax(axis=-1) + near.argmax(axis=-1) % 2, near.argmax(axis=-1))
    return codes + np.signbit(values) * (len(table) // 2)


def test_fp8_writes_a_scale_per_group_and_the_nearest_codes():
    layout = layout_of("float32", page_size=5)
    values = np.random.default_rng(2).normal(size=layout.shape).astype(np.float32)
    values[0, 0, 0, :, :] *= np.exp2(np.linspace(0, -16, 5))[:, None].astype(np.float32)
    stored = encoded(Fp8(), page_of(values, layout), layout)
    scales = stored[16 : 16 + 48].view(np.float32).reshape(2, 3, 2)
    assert np.allclose(scales, np.abs(values).max(axis=(3, 4)) / 448, rtol=1e-6)
    codes = stored[64:].reshape(layout.shape)
    assert np.array_equal(codes, nearest_code(values / scales[..., None, None], E4M3))


def test_nvfp4_writes_block_scales_then_codes_with_the_low_half_first():
    layout = layout_of("float32", head_dim=32, page_size=5, layers=1)
    values = np.random.default_rng(3).normal(size=layout.shape).astype(np.float32)
    values[0, 0, 1, 2, :16] = 0
    stored = encoded(Nvfp4(), page_of(values, layout), layout)
    scales = stored[16:32].view(np.float32).reshape(2, 1, 2)
    assert np.allclose(scales, np.abs(values).max(axis=(3, 4)) / 2688, rtol=1e-6)
    body = stored[32:].reshape(2, 1, 2, 90)
    block_scales, codes = body[..., :10], body[..., 10:]
    blocks = values.reshape(2, 1, 2, 10, 16)
    largest = (np.abs(blocks).max(axis=-1) * np.float32(1 / 6)) / scales[..., None]
    assert np.array_equal(block_scales, nearest_code(largest, E4M3))
    steps = E4M3[block_scales] * scales[..., None]
    expected = nearest_code(blocks / np.where(steps, steps, np.inf)[..., None], E2M1).reshape(2, 1, 2, 80, 2)
    assert np.array_equal(codes & 15, expected[..., 0])
    assert np.array_equal(codes >> 4, expected[..., 1])


def test_ties_go_to_the_even_code():
    layout = layout_of("float32", head_dim=16, page_size=2, layers=1)
    values = np.zeros(layout.shape, np.float32)
    values[..., 0] = 6 * 448 / 512  # makes the group's scale 1 / 512 and the block's 448
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -5.0], np.float32)
    values[..., 1:11] = ties * np.float32(448 / 512)
    kept = values_of(decoded(Nvfp4(), encoded(Nvfp4(), page_of(values, layout), layout), layout), layout)
    assert (kept[..., 1:11] * 512 / 448 == [0, 1, 1, 2, 2, 4, 4, 0, -2, -4]).all()


def test_a_mix_holds_k_in_one_format_and_v_in_the_other():
    layout = layout_of()
    page = normal_page(layout)
    mixed, fp8, nvfp4 = (
        values_of(decoded(codec, encoded(codec, page, layout), layout), layout)
        for codec in (KFp8VNvfp4(), Fp8(), Nvfp4())
    )
    assert np.array_equal(mixed[:, :, 0], fp8[:, :, 0])
    assert np.array_equal(mixed[:, :, 1], nvfp4[:, :, 1])


def test_the_header_says_everything_about_the_layout():
    layout = replace(layout_of("float16", head_dim=48, page_size=5, layers=3), num_kv_heads=2)
    header = bytes(KFp8VNvfp4().encode(normal_page(layout), layout))[:16]
    assert header == bytes([1, 1, 2, 2, 2, 0, 3, 0, 5, 0, 48, 0, 0, 0, 0, 0])


@every_lossy_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, -1, 1024])
def test_a_value_that_is_not_finite_is_refused(codec, dtype, bad, where):
    layout = layout_of(dtype)
    page = normal_page(layout)
    word = np.array([bad], np.float16 if dtype == "float16" else np.float32).view(np.uint8)[-layout.itemsize :]
    page.reshape(-1, layout.itemsize)[where] = word
    with pytest.raises(Unencodable, match="not finite"):
        codec.encode(page, layout)


@pytest.mark.parametrize("codec", [Nvfp4(), KFp8VNvfp4()], ids=lambda codec: codec.name)
def test_blocks_need_a_head_of_whole_blocks(codec):
    layout = layout_of(head_dim=24)
    with pytest.raises(Unencodable, match="24 is no multiple of 16"):
        codec.encode(np.zeros(layout.page_bytes, np.uint8), layout)
    with pytest.raises(CorruptPage, match="24 is no multiple of 16"):
        codec.decode(np.zeros(100, np.uint8), np.zeros(layout.page_bytes, np.uint8), layout)


def test_fp8_takes_heads_of_any_size():
    layout = layout_of(head_dim=7)
    page = normal_page(layout)
    assert_within_bound(Fp8(), page, decoded(Fp8(), encoded(Fp8(), page, layout), layout), layout)


@every_lossy_codec
def test_a_layout_too_large_for_the_header_is_refused(codec):
    layout = layout_of(head_dim=1 << 16, page_size=1, layers=1)
    with pytest.raises(Unencodable, match="no room"):
        codec.encode(np.zeros(layout.page_bytes, np.uint8), layout)


@every_lossy_codec
def test_a_page_that_is_not_of_its_layout_is_refused(codec):
    layout = layout_of()
    page = normal_page(layout)
    with pytest.raises(ValueError, match="bytes are no page"):
        codec.encode(page[:-2], layout)
    with pytest.raises(CorruptPage, match="bytes are no page"):
        codec.decode(encoded(codec, page, layout), page[:-2], layout)


@every_lossy_codec
def test_a_page_of_another_layout_is_corrupt(codec):
    layout = layout_of()
    stored = encoded(codec, normal_page(layout), layout)
    for other in (
        replace(layout, dtype="float16"),
        replace(layout, page_size=8, head_dim=128),
        replace(layout, num_kv_heads=3, num_layers=2),
    ):
        assert codec.stored_bytes(other) == len(stored)
        with pytest.raises(CorruptPage, match="header"):
            decoded(codec, stored, other)


@every_lossy_codec
def test_a_truncated_or_lengthened_page_is_corrupt(codec):
    layout = layout_of()
    stored = encoded(codec, normal_page(layout), layout)
    for damaged in [stored[:0], stored[:3], stored[:20], stored[:-1], np.append(stored, np.uint8(0))]:
        with pytest.raises(CorruptPage):
            decoded(codec, damaged, layout)


@every_lossy_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 0.0, 1e-39, 3e38])
def test_scales_that_no_encoder_writes_are_corrupt(codec, dtype, scale):
    layout = layout_of(dtype)
    stored = encoded(codec, normal_page(layout), layout).copy()
    stored[16:24].view(np.float32)[1] = scale
    with pytest.raises(CorruptPage, match="scale"):
        decoded(codec, stored, layout)


@every_lossy_codec
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_are_corrupt_or_finite(codec, data):
    layout = layout_of(data.draw(st.sampled_from(DTYPES)), head_dim=16, page_size=2, layers=1)
    stored = encoded(codec, normal_page(layout), layout).copy()
    for position, byte in data.draw(st.lists(st.tuples(st.integers(0, len(stored) - 1), st.integers(0, 255)))):
        stored[position] = byte
    try:
        page = decoded(codec, stored, layout)
    except CorruptPage:
        return
    assert np.isfinite(values_of(page, layout)).all()


@every_lossy_codec
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_of_no_number_are_corrupt(codec: Grouped, place, byte):
    layout = layout_of()
    stored = encoded(codec, normal_page(layout), layout).copy()
    body = stored[16 + 4 * 2 * 6 :].reshape(6, -1)
    group_bytes = codec.keys.group_bytes(layout)
    body[3, group_bytes * place] = byte  # a value's code in fp8, a block's scale in nvfp4
    with pytest.raises(CorruptPage, match="no meaning"):
        decoded(codec, stored, layout)


@every_lossy_codec
def test_pages_that_may_not_be_written_are_encoded_and_decoded_all_the_same(codec):
    layout = layout_of()
    page = normal_page(layout)
    expected = decoded(codec, encoded(codec, page, layout), layout)
    page.flags.writeable = False
    stored = encoded(codec, page, layout)
    stored.flags.writeable = False
    assert np.array_equal(decoded(codec, stored, layout), expected)


@every_lossy_codec
def test_bytes_at_odd_addresses_are_decoded(codec):
    """Extents of an arena and pulls into a staging area need not be aligned."""
    layout = layout_of()
    stored = encoded(codec, normal_page(layout), layout)
    shifted = np.empty(len(stored) + 1, np.uint8)[1:]
    shifted[:] = stored
    assert np.array_equal(decoded(codec, shifted, layout), decoded(codec, stored, layout))


def test_a_process_that_keeps_pages_losslessly_loads_neither_torch_nor_numba():
    program = "import sys, kvstore.node; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
