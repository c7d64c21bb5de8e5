"""From output tokens to the text that a client may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.gateway.events import Token


class IncrementalDecoder(Protocol):
    """Turns a growing list of tokens into text, complete characters only. `engine.Detokenizer` is one."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of which some text, or all, is shown."""

    token: Token
    text_offset: int
    """Characters of output before it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown since the last piece."""

    text: str
    tokens: tuple[ShownToken, ...]

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class OutputText:
    """Decodes tokens, holds back what may be the beginning of a stop string, and ends before the first one.

    The first stop string is the one that is complete first, as if the text came character by character: so the result
    does not depend on how the tokens were batched. Of several that end at the same character the longest counts.

        |--- shown ---|-- held: may begin a stop string --|
    """

    def __init__(self, decoder: IncrementalDecoder, stop: Sequence[str]) -> None:
        self.num_tokens = 0
        """Tokens taken; the one that completed a stop string is the last."""
        self.stopped = False
        """A stop string has come. Nothing more is taken."""
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self._num_chars = 0  # decoded, held ones included
        self._num_shown = 0
        self._shown = ""  # not yet taken by `piece`
        self._tokens: list[ShownToken] = []  # not yet taken by `piece`

    def push(self, token: Token) -> None:
        """Take one token. Does nothing once stopped."""
        if self.stopped:
            return
        self.num_tokens += 1
        self._tokens.append(ShownToken(token, self._num_chars))
        self._append(self._decoder.push([token.token_id]))

    def finish(self) -> None:
        """No token comes any more: what is held is shown."""
        if self.stopped:
            return
        self._append(self._decoder.finish())
        if not self.stopped:
            self._show(len(self._held))

    def piece(self, *, last: bool = False) -> Piece:
        """What may be shown and was not returned before. last: all that is left, after `finish` or a stop string."""
        text, self._shown = self._shown, ""
        shown = [item for item in self._tokens if item.text_offset < self._num_shown or (last and not self.stopped)]
        self._tokens = self._tokens[len(shown) :]
        return Piece(text, tuple(shown))

    def _append(self, text: str) -> None:
        if not text:
            return
        self._num_chars += len(text)
        self._held += text
        starts = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._show(min(starts)[1])
            self._held = ""
        else:
            self._show(len(self._held) - self._num_undecided())

    def _num_undecided(self) -> int:
        """Length of the longest end of `_held` that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _show(self, num_chars: int) -> None:
        self._shown += self._held[:num_chars]
        self._held = self._held[num_chars:]
        self._num_shown += num_chars
