"""One contract, every codec: what goes in comes out, and what is damaged is said to be corrupt."""

from __future__ import annotations

import threading

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs import CODECS, Codec, CorruptPage, Lossless, Raw
from kvstore.pages import PageLayout

EXACT = [codec for codec in CODECS.values() if codec.loss == 0]
ITEMSIZES = {"bfloat16": 2, "float32": 4}
SIZES = [0, 8, 4096, 368_640]


def flat(num_values: int, dtype: str = "bfloat16") -> PageLayout:
    """A layout for pages of so many values; exact codecs look at nothing but their size."""
    return PageLayout(num_layers=1, num_kv_heads=1, head_dim=max(1, num_values // 2), page_size=1, dtype=dtype)


def stored_form(codec: Codec, page: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    return np.frombuffer(codec.encode(page, flat(len(page) // ITEMSIZES[dtype], dtype)), dtype=np.uint8)


def decoded_form(codec: Codec, stored: np.ndarray, page_bytes: int, dtype: str = "bfloat16") -> np.ndarray:
    page = np.full(page_bytes, 0xA5, np.uint8)
    codec.decode(stored, page, flat(page_bytes // ITEMSIZES[dtype], dtype))
    return page


def round_trip(codec: Codec, page: np.ndarray, dtype: str = "bfloat16") -> np.ndarray:
    return decoded_form(codec, stored_form(codec, page, dtype), len(page), dtype)


def kv_like_page(num_values: int, seed: int) -> np.ndarray:
    """bfloat16 bytes of normal values with a scale per channel, as K and V have."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_values // 64, 64)) * np.exp(rng.normal(size=64))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).ravel().view(np.uint8)


@pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZES))
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_bytes_come_back(codec, dtype, data):
    num_values = data.draw(st.integers(0, 300))
    page = data.draw(hnp.arrays(np.uint8, num_values * ITEMSIZES[dtype]))
    assert np.array_equal(round_trip(codec, page, dtype), page)


@pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZES))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("content", ["zero", "constant", "random", "kv"])
def test_pages_of_every_size_and_content_come_back(codec, dtype, size, content):
    rng = np.random.default_rng(size)
    page = {
        "zero": lambda: np.zeros(size, np.uint8),
        "constant": lambda: np.full(size, 0x7F, np.uint8),
        "random": lambda: rng.integers(0, 256, size, dtype=np.uint8),
        "kv": lambda: np.resize(kv_like_page(184_320, seed=1), size),
    }[content]()
    assert np.array_equal(round_trip(codec, page, dtype), page)


@pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.name)
def test_the_payload_of_a_nan_survives(codec):
    words = np.array([0x7FC0, 0x7F81, 0xFFC1, 0xFFFF, 0x8000, 0x0001, 0x7F80, 0xFF80] * 64, dtype="<u2")
    assert np.array_equal(round_trip(codec, words.view(np.uint8)), words.view(np.uint8))


@pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.name)
def test_a_page_of_another_size_is_corrupt(codec):
    stored = stored_form(codec, kv_like_page(4096, seed=2))
    for size in (0, 8190, 8194):
        with pytest.raises(CorruptPage):
            decoded_form(codec, stored, size)


@pytest.mark.parametrize("codec", EXACT, ids=lambda codec: codec.name)
def test_a_truncated_or_lengthened_page_is_corrupt(codec):
    page = kv_like_page(1024, seed=3)
    stored = stored_form(codec, page)
    for damaged in [stored[:0], stored[:3], stored[:9], stored[:-1], np.append(stored, np.uint8(0))]:
        with pytest.raises(CorruptPage):
            decoded_form(codec, damaged, len(page))


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_byte_never_raises_anything_but_corrupt(position, flip):
    page = kv_like_page(1024, seed=4)
    stored = stored_form(Lossless(), page).copy()
    stored[position % len(stored)] ^= flip
    try:
        decoded_form(Lossless(), stored, len(page))
    except CorruptPage:
        pass  # a flipped bit of a plane that is stored as it is decodes: that is what digests are for


@given(stored=st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_nonsense_is_corrupt_or_a_page(stored):
    try:
        decoded_form(Lossless(), np.frombuffer(stored, np.uint8), 16)
    except CorruptPage:
        pass


def test_a_frame_that_claims_a_huge_content_takes_no_memory():
    """zstd frames say how large they are, and the decompressor allocates that before it reads on."""
    frame = bytes.fromhex("28b52ffd") + bytes([0b1110_0000]) + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00"
    stored = bytes([1, 1, 0, 0]) + len(frame).to_bytes(4, "little") + frame
    with pytest.raises(CorruptPage, match="a plane is not of 4096 bytes"):
        decoded_form(Lossless(), np.frombuffer(stored, np.uint8), 4096)


def test_kv_shrinks_by_a_third_and_noise_grows_by_the_header_alone():
    page = kv_like_page(184_320, seed=5)
    assert len(stored_form(Lossless(), page)) < len(page) / 1.3
    noise = np.random.default_rng(6).integers(0, 256, 368_640, dtype=np.uint8)
    assert len(stored_form(Lossless(), noise)) == len(noise) + 12


def test_raw_gives_the_page_itself_without_a_copy():
    page = kv_like_page(64, seed=7)
    assert np.shares_memory(np.asarray(Raw().encode(page, flat(64))), page)


@pytest.mark.parametrize(("size", "dtype"), [(7, "bfloat16"), (6, "float32")])
def test_half_a_value_is_refused(size, dtype):
    with pytest.raises(ValueError, match="values"):
        stored_form(Lossless(), np.zeros(size, np.uint8), dtype)


def test_threads_share_one_codec():
    codec = Lossless()
    pages = [kv_like_page(8192, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not np.array_equal(round_trip(codec, pages[index]), pages[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(pages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
