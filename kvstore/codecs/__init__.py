"""How page bytes are kept: every stored page names its codec in its header.

A new codec is a module beside `raw.py` and `lossless.py`, a line in `CODECS`, and a value of `Codec` in
`protos/headrace/v1/kvstore.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.codecs.base import Bytes, Codec, CorruptPage
from kvstore.codecs.lossless import Lossless
from kvstore.codecs.raw import Raw

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Raw(), Lossless())}
"""By name."""

__all__ = ["CODECS", "Bytes", "Codec", "CorruptPage", "Lossless", "Raw"]
