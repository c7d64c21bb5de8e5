"""Pages made of values, and back."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from kvstore.codecs import Codec
from kvstore.pages import PageLayout

DTYPES = ["bfloat16", "float16", "float32"]
_SMALLEST_AND_LARGEST = {
    "bfloat16": (2.0**-133, 3.38e38),
    "float16": (2.0**-24, 65504.0),
    "float32": (2.0**-149, 3.4e38),
}


def layout_of(dtype: str = "bfloat16", head_dim: int = 64, page_size: int = 16, layers: int = 3) -> PageLayout:
    return PageLayout(num_layers=layers, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype)


def page_of(values: np.ndarray, layout: PageLayout) -> np.ndarray:
    """values: float32, `layout.shape`. Rounded to the page's dtype; what is too large for it becomes its largest."""
    if layout.dtype == "float16":
        return np.clip(values, -65504, 65504).astype(np.float16).ravel().view(np.uint8)
    bits = values.astype(np.float32).ravel().view(np.uint32)
    if layout.dtype == "bfloat16":
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    return bits.view(np.uint8)


def values_of(page: np.ndarray, layout: PageLayout) -> np.ndarray:
    """float64, `layout.shape`; exact."""
    if layout.dtype == "float16":
        values = page.view(np.float16)
    elif layout.dtype == "bfloat16":
        values = (page.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = page.view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs of random bits
        return values.astype(np.float64).reshape(layout.shape)


def encoded(codec: Codec, page: np.ndarray, layout: PageLayout) -> np.ndarray:
    return np.frombuffer(codec.encode(page, layout), np.uint8)


def decoded(codec: Codec, stored: np.ndarray, layout: PageLayout) -> np.ndarray:
    page = np.full(layout.page_bytes, 0xA5, np.uint8)
    codec.decode(stored, page, layout)
    return page


def assert_within_bound(codec: Codec, before: np.ndarray, after: np.ndarray, layout: PageLayout) -> None:
    values, kept = values_of(before, layout), values_of(after, layout)
    assert np.isfinite(kept).all()
    for place, bound in enumerate(codec.bounds):
        excess = np.abs(kept - values)[:, :, place] - bound.limits(values[:, :, place], layout.dtype)
        worst = np.unravel_index(excess.argmax(), excess.shape)
        assert excess.max() <= 0, f"{values[:, :, place][worst]} became {kept[:, :, place][worst]}"


layouts = st.builds(
    layout_of,
    dtype=st.sampled_from(DTYPES),
    head_dim=st.sampled_from([16, 48, 64]),
    page_size=st.sampled_from([1, 5, 16]),
    layers=st.integers(1, 3),
)


@st.composite
def pages(draw: st.DrawFn) -> tuple[np.ndarray, PageLayout]:
    """A page of finite values of some kind, and its layout."""
    layout = draw(layouts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    smallest, largest = _SMALLEST_AND_LARGEST[layout.dtype]
    kind = draw(
        st.sampled_from(["normal", "constant", "outliers", "tiny", "zero", "huge", "any magnitude", "any bits"])
    )
    normal = rng.normal(size=layout.shape)
    signs = np.sign(normal)
    with np.errstate(over="ignore"):
        if kind == "constant":
            values = np.full(layout.shape, draw(st.floats(-1e4, 1e4, width=32)))
        elif kind == "outliers":  # some channels, and single values
            values = normal * np.exp(3 * rng.normal(size=layout.head_dim)) + (rng.random(layout.shape) < 0.01) * 3e3
        elif kind == "tiny":
            values = signs * smallest * rng.integers(0, 2 ** draw(st.integers(1, 30)), layout.shape)
        elif kind == "zero":
            values = normal * (rng.random(layout.shape) < draw(st.sampled_from([0.0, 0.001])))
        elif kind == "huge":
            values = signs * largest * rng.random(layout.shape) ** 8
            values.flat[0] = largest
        elif kind == "any magnitude":
            values = signs * np.exp2(rng.uniform(np.log2(smallest), np.log2(largest), layout.shape))
        else:
            values = normal
    page = page_of(values.astype(np.float32), layout)
    if kind == "any bits":
        page = rng.integers(0, 256, layout.page_bytes, dtype=np.uint8)
        bad = ~np.isfinite(values_of(page, layout)).ravel()
        page.reshape(-1, layout.itemsize)[bad] = 0
    return page, layout
