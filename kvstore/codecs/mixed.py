"""K and V in different formats: errors of K move the scores of attention, those of V only average."""

from __future__ import annotations

from kvstore.codecs.fp8 import Fp8Format
from kvstore.codecs.grouped import Grouped
from kvstore.codecs.loss import Loss
from kvstore.codecs.nvfp4 import Nvfp4Format


class KFp8VNvfp4(Grouped):
    name = "k-fp8-v-nvfp4"
    loss = Loss.FP8_AND_NVFP4
    keys = Fp8Format()
    values = Nvfp4Format()
