"""Text of a growing list of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class Detokenizer:
    """One output: what `push` and `finish` return, put together, is its text. Control tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete; bytes of an unfinished character wait. Invalid bytes become U+FFFD."""
        return self._decoder.decode(b"".join(self._tokenizer.text_bytes(token_id) for token_id in ids))

    def finish(self) -> str:
        """U+FFFD if an unfinished character was waiting."""
        return self._decoder.decode(b"", final=True)
