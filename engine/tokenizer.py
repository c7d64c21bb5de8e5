"""Text to token ids and back, chats included. Needs no torch: gateways use it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate
from engine.config import load_config
from engine.detokenizer import Detokenizer
from engine.errors import BrokenChat, BrokenCheckpoint, UnsupportedModel
from engine.gguf import GgufFile
from engine.gguf_tokenizer import tokenizer_from_gguf
from engine.source import ModelSource

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]

_UNASSIGNED = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Noncharacters: Unicode reserves them for a program's internal use."""


class Tokenizer:
    """Thread-safe.

    Control tokens (`<|im_start|>`, `</s>`, ...) come out of a text only where the chat template, or a caller that says
    `special`, put them: the same characters in a user's text stay text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """template: chat template. special_tokens: `bos_token` and others by name, for the template.

        add_bos: whether `encode` begins with the bos token; None leaves that to the backend's own post-processor.
        Raises BrokenChat if the template does not compile, UnsupportedModel for a kind of vocabulary that is not known.
        """
        special_tokens = special_tokens or {}
        self._backend = backend
        self._lock = threading.Lock()
        self._template = None if template is None else ChatTemplate(template, special_tokens)
        self._bos_token_id = None
        if add_bos and "bos_token" in special_tokens:
            self._bos_token_id = backend.token_to_id(special_tokens["bos_token"])
        self._add_special_tokens = add_bos is not False
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        """Ids are below it. A model may have more, which stand for nothing."""
        self.eos_token_ids = frozenset(eos_token_ids)
        controls = {
            token_id: added.content for token_id, added in backend.get_added_tokens_decoder().items() if added.special
        }
        self._control_names = controls
        self._control_ids = {name: token_id for token_id, name in controls.items()}
        names = sorted(controls.values(), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._control_heads = tuple({name[:end] for name in names for end in range(1, len(name))})
        self._control_tails = tuple({name[start:] for name in names for start in range(1, len(name))})
        self._bytes = _token_bytes(backend)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """A whole prompt, with the bos token in front where the model wants one.

        special: names of control tokens in `text` become these tokens.
        """
        ids = self._encode(text, special=special, add_special_tokens=self._add_special_tokens)
        if self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            ids.insert(0, self._bos_token_id)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that asks for the assistant's next message, by the model's chat template.

        messages: dicts with `role` and `content`, and whatever else the template reads. Raises BrokenChat.
        """
        if self._template is None:
            raise BrokenChat("this model has no chat template; send a plain prompt")
        # Names of control tokens in the messages get a character inside that keeps them apart from the template's own.
        marker = _absent_character(messages)
        rendered = self._template.render([self._marked(message, marker) for message in messages])
        if marker not in rendered:
            return self._encode(rendered, special=True, add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for match in self._controls.finditer(rendered):
            ids += self._encode(
                rendered[at : match.start()].replace(marker, ""), special=False, add_special_tokens=False
            )
            ids.append(self._control_ids[match.group()])
            at = match.end()
        return ids + self._encode(rendered[at:].replace(marker, ""), special=False, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without control tokens. Invalid bytes become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, maybe a part of a character; the name of a control token; b"" for an unknown
        id."""
        return self._bytes.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text: as `token_bytes`, but nothing for a control token."""
        return b"" if token_id in self._control_names else self._bytes.get(token_id, b"")

    def _encode(self, text: str, *, special: bool, add_special_tokens: bool) -> list[int]:
        if not text and not add_special_tokens:
            return []
        with self._lock:  # the flag is the backend's, and encoding lets other threads run
            self._backend.encode_special_tokens = not special
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _marked(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, marker)
        if isinstance(value, Mapping):
            return {key: self._marked(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, marker) for item in value]
        return value

    def _marked_text(self, text: str, marker: str) -> str:
        """`text` with a marker inside every name of a control token, and at an end that the template could complete to
        one."""
        marked = self._controls.sub(lambda match: match[0][0] + marker + match[0][1:], text)
        if marked.startswith(self._control_tails):
            marked = marker + marked
        if marked.endswith(self._control_heads):
            marked += marker
        return marked


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Reads tokenizer and chat template; a fraction of a second, and no weights.

    Raises BrokenCheckpoint if there is none or it does not fit the model, UnsupportedModel for a kind that is not
    known.
    """
    config = load_config(source)
    path = source.tokenizer_path()
    if path.suffix == ".gguf":
        tokenizer = _from_gguf(GgufFile(path), config.eos_token_ids)
    else:
        tokenizer = _from_folder(path, config.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        reason = f"has {tokenizer.vocab_size} tokens, but the model {source.name!r} only {config.vocab_size}"
        raise BrokenCheckpoint(path, reason)
    return tokenizer


def _from_gguf(file: GgufFile, eos_token_ids: frozenset[int]) -> Tokenizer:
    backend = tokenizer_from_gguf(file)
    metadata = file.metadata
    special_tokens = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            special_tokens[name] = metadata["tokenizer.ggml.tokens"][token_id]
    return Tokenizer(
        backend,
        template=metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", False),
        eos_token_ids=eos_token_ids,
    )


def _from_folder(folder: Path, eos_token_ids: frozenset[int]) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BrokenCheckpoint(path, "no such file")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no narrower class
        raise BrokenCheckpoint(path, f"not a tokenizer: {error}") from error
    config = _read_object(folder / "tokenizer_config.json")
    special_tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if value is not None:
            special_tokens[name] = value
    return Tokenizer(
        backend,
        template=_template_of(folder, config),
        special_tokens=special_tokens,
        add_bos=config.get("add_bos_token") or None,  # the post-processor already heeds false
        eos_token_ids=eos_token_ids,
    )


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BrokenCheckpoint(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenCheckpoint(path, "must hold a JSON object")
    return value


def _absent_character(messages: object) -> str:
    """A noncharacter that no message holds."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    for character in _UNASSIGNED:
        if character not in text:
            return character
    raise BrokenChat("the messages use every one of Unicode's noncharacters U+FDD0 to U+FDEF")


def _token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """What each token stands for."""
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab()
    if '"ByteLevel"' in decoder:
        alphabet = _byte_level_alphabet()
        decoded = {
            token_id: bytes(alphabet[c] for c in token)
            for token, token_id in vocabulary.items()
            if token_id not in added
        }
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
        decoded = {
            token_id: _sentencepiece_bytes(token) for token, token_id in vocabulary.items() if token_id not in added
        }
    else:
        raise UnsupportedModel("tokenizer.json", "decoder", decoder, "ByteLevel, ByteFallback or Metaspace")
    return decoded | {token_id: token.content.encode() for token_id, token in added.items()}


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others are moved behind U+0100 in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(moved)}
