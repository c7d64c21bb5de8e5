"""Stop strings and held-back text, one character per token and in any batching."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.events import Token
from cluster.gateway.text import OutputText


class Spelled:
    """A decoder whose token i is the i-th of `spellings`; the last one's text comes only at the end."""

    def __init__(self, *spellings: str, at_end: str = "") -> None:
        self._spellings = spellings
        self._at_end = at_end

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._spellings[token_id] for token_id in ids)

    def finish(self) -> str:
        return self._at_end


def shown(spellings: Sequence[str], stop: Sequence[str], at_end: str = "") -> tuple[list[str], OutputText]:
    """The piece after each token, and after the end."""
    text = OutputText(Spelled(*spellings, at_end=at_end), stop)
    pieces = []
    for token_id in range(len(spellings)):
        text.push(Token(token_id))
        pieces.append(text.piece().text)
    text.finish()
    pieces.append(text.piece(last=True).text)
    return pieces, text


def test_without_stop_strings_everything_is_shown_at_once():
    pieces, text = shown(["ab", "", "c"], [])
    assert pieces == ["ab", "", "c", ""]
    assert not text.stopped


def test_a_stop_string_that_is_split_over_tokens_is_not_shown_at_all():
    pieces, text = shown(["one", " ST", "O", "P two"], ["STOP"])
    assert pieces == ["one", " ", "", "", ""]
    assert text.stopped
    assert text.num_tokens == 4


def test_what_only_looked_like_a_stop_string_is_shown_as_soon_as_that_is_known():
    pieces, _ = shown(["a", "S", "T", "x", "ST"], ["STOP"])
    assert pieces == ["a", "", "", "STx", "", "ST"]


def test_tokens_after_the_stop_string_are_not_counted():
    _, text = shown(["a", "X", "b", "c"], ["X"])
    assert text.num_tokens == 2


def test_the_stop_string_that_is_complete_first_counts_and_of_two_that_end_together_the_longer():
    assert "".join(shown(["abcdef"], ["cd", "bcdef"])[0]) == "ab"
    assert "".join(shown(["abcdef"], ["d", "bcd"])[0]) == "a"


def test_a_stop_string_may_be_completed_by_what_the_decoder_gives_at_the_end():
    pieces, text = shown(["ab", "c"], ["cd"], at_end="d")
    assert "".join(pieces) == "ab"
    assert text.stopped


@given(
    characters=st.text(alphabet="ab", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_does_not_depend_on_where_tokens_end(characters: str, cuts: list[int], stop: list[str]):
    edges = sorted({0, len(characters), *(min(cut, len(characters)) for cut in cuts)})
    spellings = [characters[start:end] for start, end in itertools.pairwise(edges)]
    expected = "".join(shown(list(characters), stop)[0])
    assert "".join(shown(spellings, stop)[0]) == expected
    assert all(string not in expected for string in stop)


@pytest.mark.parametrize(("at_end", "num_shown"), [("", 3), ("\N{REPLACEMENT CHARACTER}", 3)])
def test_tokens_are_shown_with_the_text_they_belong_to(at_end: str, num_shown: int):
    text = OutputText(Spelled("a", "", "S", "b", at_end=at_end), ["ST"])
    text.push(Token(0))
    text.push(Token(1))
    first = text.piece()
    text.push(Token(2))
    held = text.piece()
    text.finish()
    rest = text.piece(last=True)
    assert [item.token.token_id for item in first.tokens] == [0]
    assert held.tokens == ()
    assert [(item.token.token_id, item.text_offset) for item in rest.tokens] == [(1, 1), (2, 1)]
    assert len(first.tokens) + len(rest.tokens) == num_shown


def test_tokens_whose_text_fell_to_a_stop_string_are_not_shown():
    text = OutputText(Spelled("ab", "c", "d"), ["cd"])
    for token_id in range(3):
        text.push(Token(token_id))
    text.finish()
    assert [item.token.token_id for item in text.piece(last=True).tokens] == [0]
