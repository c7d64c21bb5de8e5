"""The lossy codecs on torch tensors, for pools that live on a device: the same stored bytes, and the same pages back.

Batches of pages, on the CPU or on CUDA. Every operation is one that IEEE 754 defines for each element by itself, so
that results do not depend on the device; a quotient by a constant would, since torch may multiply with the inverse
instead. torch is imported when these functions are called: storage nodes have none of it loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.codecs.base import CorruptPage, Unencodable
from kvstore.codecs.bound import BLOCK
from kvstore.codecs.fp8 import Fp8Format
from kvstore.codecs.grouped import HEADER_BYTES, Format, Grouped, highest_scale
from kvstore.codecs.small_floats import (
    E2M1,
    E2M1_LARGEST,
    E4M3_NAN,
    LARGEST_SCALED,
    SMALLEST_SCALE,
)
from kvstore.pages.layout import PageLayout

if TYPE_CHECKING:
    from torch import Tensor


def encode_pages(codec: Grouped, pages: Tensor, layout: PageLayout) -> Tensor:
    """pages: uint8 [n, layout.page_bytes], C-contiguous. Returns uint8 [n, codec.stored_bytes(layout)] on its device.

    Waits for the device once. Raises Unencodable for a layout that does not suit, or a value that is not finite;
    ValueError for pages of another size.
    """
    import torch

    if pages.ndim != 2 or pages.shape[1] != layout.page_bytes:
        raise ValueError(f"{list(pages.shape)} are no pages of {layout.page_bytes} bytes")
    num_groups, group_size = layout.num_kv_heads * layout.num_layers, layout.page_size * layout.head_dim
    values = pages.view(getattr(torch, layout.dtype)).view(len(pages), num_groups, 2, group_size).float()
    if not torch.isfinite(values).all():
        raise Unencodable(codec.name, "a value is not finite")
    stored = torch.empty(len(pages), codec.stored_bytes(layout), dtype=torch.uint8, device=pages.device)
    stored[:, :HEADER_BYTES] = _bytes(codec.header(layout), pages.device)
    parts = [_encode(side, values[:, :, place]) for place, side in enumerate((codec.keys, codec.values))]
    scales = torch.stack([scales for scales, _ in parts], dim=-1)
    scales_end = HEADER_BYTES + 8 * num_groups
    stored[:, HEADER_BYTES:scales_end] = scales.view(torch.uint8).flatten(1)
    stored[:, scales_end:] = torch.cat([body for _, body in parts], dim=-1).flatten(1)
    return stored


def decode_pages(codec: Grouped, stored: Tensor, layout: PageLayout) -> Tensor:
    """stored: uint8 [n, codec.stored_bytes(layout)]. Returns uint8 [n, layout.page_bytes] on its device.

    Waits for the device once. Raises CorruptPage if any of the pages is none.
    """
    import torch

    try:
        header, num_bytes = codec.header(layout), codec.stored_bytes(layout)
    except Unencodable as error:
        raise CorruptPage(codec.name, error.reason) from error
    if stored.ndim != 2 or stored.shape[1] != num_bytes:
        raise CorruptPage(codec.name, f"{list(stored.shape)} are no stored pages of {num_bytes} bytes")
    num_groups = layout.num_kv_heads * layout.num_layers
    scales_end = HEADER_BYTES + 8 * num_groups
    scale_bytes = stored[:, HEADER_BYTES:scales_end].clone(memory_format=torch.contiguous_format)  # aligned
    scales = scale_bytes.view(torch.float32).view(len(stored), num_groups, 2)
    body = stored[:, scales_end:].view(len(stored), num_groups, (num_bytes - scales_end) // num_groups)
    values = torch.empty(len(stored), num_groups, 2, layout.page_size * layout.head_dim, device=stored.device)
    good = (stored[:, :HEADER_BYTES] == _bytes(header, stored.device)).all()
    column = 0
    for place, side in enumerate((codec.keys, codec.values)):
        part = body[..., column : column + side.group_bytes(layout)]
        column += part.shape[-1]
        of_side = scales[..., place]
        good &= ((of_side >= SMALLEST_SCALE) & (of_side <= highest_scale(side, layout))).all()
        values[:, :, place], have_meaning = _decode(side, part, of_side)
        good &= have_meaning
    if not good:
        raise CorruptPage(codec.name, "a header, a scale or a code that no encoder writes")
    return values.to(getattr(torch, layout.dtype)).flatten(1).view(torch.uint8)


def _encode(side: Format, values: Tensor) -> tuple[Tensor, Tensor]:
    """values: float32 [n, groups, size]. Returns scales, float32 [n, groups], and uint8 [n, groups, group_bytes]."""
    import torch

    largest = values.abs().amax(dim=-1).clamp(max=LARGEST_SCALED)
    scales = (largest * float(np.float32(1 / side.largest))).clamp(min=SMALLEST_SCALE)
    if isinstance(side, Fp8Format):
        return scales, (values / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = values.view(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    block_largest = blocks.abs().amax(dim=-1).clamp(max=LARGEST_SCALED) * float(np.float32(1 / E2M1_LARGEST))
    block_codes = (block_largest / scales[..., None]).to(torch.float8_e4m3fn)
    steps = block_codes.float() * scales[..., None]
    steps = torch.where(block_codes.view(torch.uint8) == 0, torch.inf, steps)
    scaled = (blocks / steps[..., None]).abs().clamp(max=E2M1_LARGEST)
    upper = torch.where(scaled < 4, scaled.round() + 2, (scaled * 0.5).round() + 4)
    codes = torch.where(scaled < 2, (scaled + scaled).round(), upper).to(torch.uint8)
    codes = (codes | (torch.signbit(blocks).to(torch.uint8) << 3)).view(*values.shape[:-1], values.shape[-1] // 2, 2)
    return scales, torch.cat([block_codes.view(torch.uint8), codes[..., 0] | (codes[..., 1] << 4)], dim=-1)


def _decode(side: Format, body: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The way back, and whether all codes have a meaning, as a bool tensor."""
    import torch

    if isinstance(side, Fp8Format):
        values = body.contiguous().view(torch.float8_e4m3fn).float() * scales[..., None]
        return values, ((body & 0x7F) != E4M3_NAN).all()
    num_blocks = body.shape[-1] // (1 + BLOCK // 2)
    block_codes, codes = body[..., :num_blocks].contiguous(), body[..., num_blocks:]
    steps = block_codes.view(torch.float8_e4m3fn).float() * scales[..., None]
    table = torch.from_numpy(E2M1.copy()).to(body.device)
    halves = table[torch.stack([codes & 15, codes >> 4], dim=-1).int()]
    values = halves.view(*steps.shape, BLOCK) * steps[..., None]
    return values.flatten(-2), (block_codes < E4M3_NAN).all()


def _bytes(data: bytes, device: object) -> Tensor:
    import torch

    return torch.tensor(list(data), dtype=torch.uint8, device=device)  # type: ignore[arg-type]
