"""Where a model comes from."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import BrokenCheckpoint

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """One model: where its weights, config and tokenizer lie. Cheap to make; nothing is read before it is asked for."""

    name: str
    """What clients call it."""
    weights: str
    """A Hugging Face folder, a .gguf file, `package:NAME` (an installed distribution that ships one .gguf file, which
    is found without importing it), or `random:SEED`."""
    config: str | None = None
    """Folder or file of config.json. Needed by `random:SEED`; otherwise found beside or in the weights."""
    tokenizer: str | None = None
    """Folder with tokenizer.json and the chat template, a .gguf file, or `package:NAME`. Default: beside the config, or
    in the weights."""
    dtype: str = "bfloat16"
    """Precision of the weights' values and of the KV pages: bfloat16 or float32. Sums are float32 in both."""
    context_tokens: int | None = None
    """Serve no more positions than this, if the model was made for more. Default: what it was made for."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ValueError(f"context_tokens must be >= 1, got {self.context_tokens}")
        scheme, _, rest = self.weights.partition(":")
        if scheme == "random":
            if not rest.isdecimal():
                raise ValueError(f"weights must be random:SEED with a whole number, got {self.weights!r}")
            if self.config is None:
                raise ValueError(f"config is needed with weights {self.weights!r}")
        elif not (rest if scheme == "package" else self.weights):
            raise ValueError(f"weights must name a folder, a .gguf file, package:NAME or random:SEED: {self.weights!r}")

    @property
    def kind(self) -> Literal["random", "gguf", "folder"]:
        """How the weights are stored."""
        if self.weights.startswith("random:"):
            return "random"
        return "gguf" if self.weights.startswith("package:") or self.weights.endswith(".gguf") else "folder"

    @property
    def seed(self) -> int:
        """The SEED of `random:SEED`."""
        assert self.kind == "random"
        return int(self.weights.removeprefix("random:"))

    def weights_path(self) -> Path:
        """The folder or file of the weights. Raises BrokenCheckpoint if there is none."""
        assert self.kind != "random"
        path = _path_of(self.weights)
        if not path.exists():
            raise BrokenCheckpoint(path, "no such file or folder")
        return path

    def config_path(self) -> Path:
        """The config.json, or the .gguf file that holds the metadata instead."""
        if self.config is None:
            path = self.weights_path()
        else:
            path = Path(self.config).expanduser()
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise BrokenCheckpoint(path, "no such file")
        return path

    def tokenizer_path(self) -> Path:
        """The folder with tokenizer.json, or the .gguf file that holds the vocabulary."""
        if self.tokenizer is not None:
            path = _path_of(self.tokenizer)
        elif self.kind == "gguf":
            path = self.weights_path()
        else:
            path = self.config_path().parent
        if path.name == "tokenizer.json":
            path = path.parent
        if not path.exists():
            raise BrokenCheckpoint(path, "no such file or folder")
        return path


def _path_of(place: str) -> Path:
    if place.startswith("package:"):
        return _packaged_gguf(place.removeprefix("package:"))
    return Path(place).expanduser()


def _packaged_gguf(distribution: str) -> Path:
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise BrokenCheckpoint(f"package:{distribution}", "no such installed distribution") from None
    found = [file for file in files or () if file.name.endswith(".gguf")]
    if len(found) != 1:
        raise BrokenCheckpoint(f"package:{distribution}", f"ships {len(found)} .gguf files; exactly one is needed")
    return Path(str(found[0].locate()))
