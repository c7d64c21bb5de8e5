"""Tables of the rotary position embedding."""

from __future__ import annotations

import numpy as np

from engine.config import ModelConfig


class Rotation:
    """Cosines and sines, float32 [positions, head_dim / 2] flat, grown as far as positions have come."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse = config.rope.inverse_frequencies(config.head_dim)
        self._limit = config.context_tokens
        self._num_positions = 0
        self.cosines = np.empty(0, np.float32)
        self.sines = np.empty(0, np.float32)

    def reach(self, num_positions: int) -> None:
        """Make the tables cover positions below `num_positions`."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = min(max(num_positions, 2 * self._num_positions, 1024), self._limit)
        # The angle is float32, as models were trained; its cosine is taken in double and rounded once.
        angles = np.arange(self._num_positions, dtype=np.float32)[:, None] * self._inverse
        self.cosines = np.cos(angles.astype(np.float64)).astype(np.float32).reshape(-1)
        self.sines = np.sin(angles.astype(np.float64)).astype(np.float32).reshape(-1)
