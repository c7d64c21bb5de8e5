"""GGUF files, against the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import BrokenCheckpoint, UnsupportedModel
from engine.gguf import GgufFile

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """One tensor of each type and one metadata value of each kind."""
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.int", 7)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "ünïcode")
    writer.add_array("some.strings", ["a", "", "ç"])
    writer.add_array("some.floats", [0.5, 1.5])
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_kind_is_read(written):
    metadata = GgufFile(written).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["an.int"] == 7
    assert metadata["a.double"] == 0.1
    assert metadata["a.bool"] is True
    assert metadata["a.string"] == "ünïcode"
    assert metadata["some.strings"] == ["a", "", "ç"]
    assert metadata["some.floats"] == [0.5, 1.5]


@pytest.mark.parametrize("name", TYPES)
def test_tensors_are_dequantised_to_the_bit(written, name):
    (tensor,) = [tensor for tensor in gguf.GGUFReader(written).tensors if tensor.name == name]
    expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(3, 64)
    assert np.array_equal(GgufFile(written).array(name), expected)


def test_an_unknown_block_format_is_refused_by_name(tmp_path):
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.zeros((1, 210), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="the GGML type of w = 14"):
        GgufFile(path).array("w")


def test_a_file_cut_anywhere_is_refused_and_nothing_else_happens(written, tmp_path):
    whole = written.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 40, 100, 300, 500, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(BrokenCheckpoint, match=r"cut\.gguf"):
            GgufFile(cut).array("Q4_1")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model " * 10)
    with pytest.raises(BrokenCheckpoint, match="not a GGUF file"):
        GgufFile(path)
