"""A linear layer, packed for the kernel."""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.linear import gather_rows, linear
from engine.kernels.simd import LANES


def padded(size: int) -> int:
    """The next multiple of a vector's 16 lanes: the row stride of activations, whose last columns are 0."""
    return -(-size // LANES) * LANES


class Linear:
    """y = x W^T + b with W's values in the model's dtype, sums in float32.

    Rows are independent of each other bit for bit: see kernels/linear.py.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """weight: float32 [outputs, inputs]. bias: float32 [outputs]."""
        self.num_outputs, self.num_inputs = weight.shape
        self._num_panels = padded(self.num_outputs) // LANES
        panels = torch.zeros(self._num_panels * LANES, self.num_inputs, dtype=dtype)
        panels[: self.num_outputs] = weight
        packed = panels.view(self._num_panels, LANES, self.num_inputs).transpose(1, 2).contiguous().view(-1)
        # numpy has no bfloat16; the kernels take its bits.
        self._weights = packed.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else packed.numpy()
        self._bias = np.zeros(self._num_panels * LANES, np.float32)
        if bias is not None:
            self._bias[: self.num_outputs] = bias.numpy()

    @property
    def output_stride(self) -> int:
        """Columns of an output row, padding included."""
        return self._num_panels * LANES

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """x: float32 [rows, stride >= inputs], contiguous. Returns float32 [rows, output_stride]; adds to `out` if
        given."""
        accumulate = out is not None
        if out is None:
            out = np.empty((len(x), self.output_stride), np.float32)
        linear(
            *(x.reshape(-1), x.shape[1], len(x)),
            *(self._weights, self.num_inputs, self._bias, self._num_panels),
            *(out.reshape(-1), out.shape[1], accumulate, 0, 1),
        )
        return out

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of W as float32 [len(ids), padded(inputs)]. ids: int64."""
        out = np.empty((len(ids), padded(self.num_inputs)), np.float32)
        gather_rows(ids, self._weights, self.num_inputs, out.reshape(-1), out.shape[1])
        return out
