"""When a stream's first text came, however the network cuts the bytes."""

from __future__ import annotations

import json

import pytest

from benchmarks.sse import CompletionStream, StreamBroken


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None}], usage=None)


END = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}], usage=None)
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


def test_text_and_its_instants_are_noted():
    stream = CompletionStream()
    for now_s, received in ((1.0, text("Pa")), (2.0, text("ris")), (3.0, END), (4.0, USAGE + DONE)):
        stream.feed(received, now_s)
    stream.finish()
    assert (stream.text, stream.first_text_s, stream.last_text_s) == ("Paris", 1.0, 2.0)
    assert stream.finish_reason == "length"
    assert stream.usage == {"prompt_tokens": 5, "completion_tokens": 2}


def test_comments_and_events_without_text_are_no_first_token():
    stream = CompletionStream()
    stream.feed(b": keep-alive\n\n", 1.0)
    stream.feed(text(""), 2.0)
    assert stream.first_text_s is None
    stream.feed(text("a"), 3.0)
    assert stream.first_text_s == 3.0


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_bytes_that_come_one_by_one_give_the_same(newline):
    whole = (b": hello\n\n" + text("für ") + text("dich") + END + USAGE + DONE).replace(b"\n", newline)
    stream = CompletionStream()
    for instant, byte in enumerate(whole):
        stream.feed(bytes([byte]), float(instant))
    stream.finish()
    assert stream.text == "für dich"
    assert stream.first_text_s is not None
    assert stream.last_text_s is not None
    assert stream.first_text_s < stream.last_text_s < len(whole)


def test_an_event_counts_when_its_last_byte_is_there():
    stream = CompletionStream()
    first = text("a")
    stream.feed(first[:-1], 1.0)
    assert stream.first_text_s is None
    stream.feed(first[-1:], 2.0)
    assert stream.first_text_s == 2.0


@pytest.mark.parametrize("received", [text("a"), text("a") + DONE, text("a") + END])
def test_a_stream_that_ends_early_is_broken(received):
    stream = CompletionStream()
    stream.feed(received, 1.0)
    with pytest.raises(StreamBroken, match="early"):
        stream.finish()


def test_an_error_event_breaks_the_stream_with_what_the_server_says():
    stream = CompletionStream()
    with pytest.raises(StreamBroken, match="the worker is gone"):
        stream.feed(event(error={"message": "the worker is gone"}), 1.0)


def test_an_event_that_is_no_json_breaks_the_stream():
    with pytest.raises(StreamBroken, match="no JSON"):
        CompletionStream().feed(b"data: {oops\n\n", 1.0)
