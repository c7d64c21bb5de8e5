"""How much codecs lose: the one order of the lineages."""

from __future__ import annotations

from enum import IntEnum


class Loss(IntEnum):
    """Less is better. Every codec names its own; nothing else decides which of two is the lossier one."""

    NONE = 0
    FP8 = 1
    FP8_AND_NVFP4 = 2
    """One of K and V in each."""
    NVFP4 = 3
