"""How the bytes of one page lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LAYOUT_VERSION = 1
"""Goes into the namespace: pages of another layout have other keys."""

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """A page holds `page_size` token positions of all layers, contiguous and head-major.

    `[kv_head][layer][k|v][position][head_dim]`: the heads of one tensor-parallel rank are one contiguous slice.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Token positions per page."""
    dtype: Literal["bfloat16", "float16", "float32"]

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype must be one of {sorted(_ITEM_BYTES)}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return _ITEM_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`(num_kv_heads, num_layers, 2, page_size, head_dim)`."""
        return (self.num_kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv head, all layers."""
        return self.num_layers * 2 * self.page_size * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all heads and layers."""
        return self.num_kv_heads * self.head_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` positions touch."""
        return -(-num_tokens // self.page_size)
