"""A byte-level BPE tokenizer out of GGUF metadata.

transformers' own conversion leaves out the digits split of `smollm` and gives other ids; these give llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import BrokenCheckpoint, UnsupportedModel
from engine.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Token types; the others are plain entries of the vocabulary."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Raises UnsupportedModel for another kind of vocabulary or of splitting, BrokenCheckpoint if a part is missing."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        hint = "gpt2 (byte-level BPE); give the model's `tokenizer` a folder with tokenizer.json"
        raise UnsupportedModel(file.path, "tokenizer.ggml.model", kind, hint)
    split = metadata.get("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        hint = f"{' | '.join(_PRE_TOKENIZERS)}; or give the model's `tokenizer` a folder with tokenizer.json"
        raise UnsupportedModel(file.path, "tokenizer.ggml.pre", split, hint)
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        types: list[int] = metadata["tokenizer.ggml.token_type"]
    except KeyError as error:
        raise BrokenCheckpoint(file.path, f"{error.args[0]} is missing") from error
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == _CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
