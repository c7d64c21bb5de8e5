"""All codecs, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.codecs.base import Codec
from kvstore.codecs.fp8 import Fp8
from kvstore.codecs.lossless import Lossless
from kvstore.codecs.mixed import KFp8VNvfp4
from kvstore.codecs.nvfp4 import Nvfp4
from kvstore.codecs.raw import Raw

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Raw(), Lossless(), Fp8(), KFp8VNvfp4(), Nvfp4())}
"""By name, the lossless ones first."""
