"""How page bytes are kept: every stored page names its codec in its header.

A new codec is a module beside `raw.py` and `lossless.py`, a line in `registry.py`, and a value of `Codec` in
`protos/headrace/v1/kvstore.proto`. `tensors.py` is for processes that have torch, and is not imported here.
"""

from __future__ import annotations

from kvstore.codecs.base import Bytes, Codec, CorruptPage, Unencodable
from kvstore.codecs.bound import ErrorBound
from kvstore.codecs.fp8 import Fp8
from kvstore.codecs.grouped import Grouped
from kvstore.codecs.lineage import EXACT, is_within, lossier
from kvstore.codecs.loss import Loss
from kvstore.codecs.lossless import Lossless
from kvstore.codecs.mixed import KFp8VNvfp4
from kvstore.codecs.nvfp4 import Nvfp4
from kvstore.codecs.raw import Raw
from kvstore.codecs.reencode import Reencoded, is_downwards, reencode
from kvstore.codecs.registry import CODECS

__all__ = [
    "CODECS",
    "EXACT",
    "Bytes",
    "Codec",
    "CorruptPage",
    "ErrorBound",
    "Fp8",
    "Grouped",
    "KFp8VNvfp4",
    "Loss",
    "Lossless",
    "Nvfp4",
    "Raw",
    "Reencoded",
    "Unencodable",
    "is_downwards",
    "is_within",
    "lossier",
    "reencode",
]
