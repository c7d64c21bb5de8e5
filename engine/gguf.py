"""GGUF files: metadata and tensors, memory-mapped.

An own parser because `gguf.GGUFReader` makes one numpy view per string: 1.7 s for a small model against 0.03 s.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import BrokenCheckpoint, UnsupportedModel

Metadata = dict[str, Any]
"""Values are int, float, bool, str, or lists of those."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _Quantization:
    """A block format: `block` values lie in `num_bytes` bytes; `decode` maps uint8 [n, num_bytes] to float32 [n,
    block]."""

    name: str
    block: int
    num_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _halves(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 2k] -> float32 [n, k] of little-endian float16."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 16] -> uint8 [n, 32]: all low nibbles, then all high ones."""
    return np.concatenate([blocks & 0x0F, blocks >> 4], axis=1)


def _decode_bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.int8) - 8).astype(np.float32)


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    scale_and_min = _halves(blocks[:, :4])
    return scale_and_min[:, :1] * _nibbles(blocks[:, 4:]).astype(np.float32) + scale_and_min[:, 1:]


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    return _halves(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


_QUANTIZATIONS = {
    0: _Quantization("F32", 1, 4, lambda blocks: np.ascontiguousarray(blocks).view("<f4").astype(np.float32)),
    1: _Quantization("F16", 1, 2, _halves),
    2: _Quantization("Q4_0", 32, 18, _decode_q4_0),
    3: _Quantization("Q4_1", 32, 20, _decode_q4_1),
    8: _Quantization("Q8_0", 32, 34, _decode_q8_0),
    30: _Quantization("BF16", 1, 2, _decode_bf16),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in numpy's order (rows first), the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int
    """From the start of the file."""


class GgufFile:
    """A mapped GGUF file. The metadata is parsed when it is opened, a tensor is decoded when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises BrokenCheckpoint if `path` is not a whole little-endian GGUF file of version 2 or 3."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise BrokenCheckpoint(path, f"cannot be mapped: {error}") from error
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise BrokenCheckpoint(path, f"its GGUF header is damaged or cut off: {error}") from error

    def array(self, name: str) -> np.ndarray:
        """float32 copy of one tensor, dequantised. Raises UnsupportedModel for a block format that is not known."""
        tensor = self.tensors[name]
        quantization = _QUANTIZATIONS.get(tensor.type_id)
        if quantization is None:
            known = ", ".join(sorted(known.name for known in _QUANTIZATIONS.values()))
            raise UnsupportedModel(self.path, f"the GGML type of {name}", tensor.type_id, known)
        count = math.prod(tensor.shape)
        if tensor.shape and tensor.shape[-1] % quantization.block:
            raise BrokenCheckpoint(self.path, f"{name} {tensor.shape} does not divide into blocks")
        num_bytes = count // quantization.block * quantization.num_bytes
        if tensor.offset_bytes + num_bytes > len(self._data):
            raise BrokenCheckpoint(self.path, f"{name} ends after the end of the file")
        blocks = np.frombuffer(self._data, np.uint8, num_bytes, tensor.offset_bytes)
        return quantization.decode(blocks.reshape(-1, quantization.num_bytes)).reshape(tensor.shape)

    def _parse(self) -> tuple[Metadata, dict[str, GgufTensor]]:
        data = self._data
        if data[:4] != b"GGUF":
            raise BrokenCheckpoint(self.path, "not a GGUF file")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise UnsupportedModel(self.path, "the GGUF version", version, "2 or 3, little-endian")
        at = 24

        def scalar(code: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from("<" + code, data, at)
            at += struct.calcsize("<" + code)
            return value

        def string() -> str:
            nonlocal at
            length = scalar("Q")
            if at + length > len(data):
                raise struct.error(f"a string of {length} bytes passes the end of the file")
            at += length
            return data[at - length : at].decode()

        def value(type_id: int) -> Any:
            nonlocal at
            if type_id == _STRING:
                return string()
            if type_id == _ARRAY:
                item_type, count = scalar("I"), scalar("Q")
                if item_type in (_STRING, _ARRAY):
                    return [value(item_type) for _ in range(count)]
                form = f"<{count}{self._code(item_type)}"
                items = struct.unpack_from(form, data, at)
                at += struct.calcsize(form)
                return list(items)
            return scalar(self._code(type_id))

        metadata: Metadata = {}
        for _ in range(num_values):
            key = string()
            metadata[key] = value(scalar("I"))
        headers: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = string()
            dims = [scalar("Q") for _ in range(scalar("I"))]
            headers.append((name, tuple(reversed(dims)), scalar("I"), scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        base = -(-at // alignment) * alignment
        return metadata, {
            name: GgufTensor(name, shape, type_id, base + offset) for name, shape, type_id, offset in headers
        }

    def _code(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise BrokenCheckpoint(self.path, f"unknown metadata type {type_id}")
        return _SCALARS[type_id]
