"""Text for the quality of KV codecs: a prefix whose pages are replaced, and the tokens after it, which are scored."""

from __future__ import annotations

import importlib
import inspect
import pydoc_data.topics
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError
from engine.tokenizer import Tokenizer

_CODE = (
    *("argparse", "ast", "asyncio.base_events", "calendar", "collections", "configparser", "dataclasses", "difflib"),
    *("doctest", "enum", "fractions", "ftplib", "functools", "heapq", "imaplib", "inspect", "logging", "mailbox"),
    *("optparse", "pathlib", "pdb", "pickle", "platform", "plistlib", "random", "shutil", "smtplib", "socketserver"),
    *("ssl", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest.mock"),
    *("urllib.request", "uuid", "weakref", "zipfile"),
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one kind of text."""

    kind: str
    """prose or code."""
    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    """One more than is scored: each token but the first is what the one before it is asked for."""


def cut(tokenizer: Tokenizer, num_chunks: int, prefix_tokens: int, scored_tokens: int) -> list[Chunk]:
    """Half of the chunks are prose, half are code; they overlap nowhere and are spread over the texts.

    Raises BenchmarkError if the texts have not so many.
    """
    texts = {"prose": _prose(), "code": _code()}
    size = prefix_tokens + scored_tokens + 1
    chunks = []
    for place, (kind, text) in enumerate(texts.items()):
        wanted = (num_chunks + 1 - place) // 2
        tokens = tokenizer.encode(text)
        if len(tokens) < wanted * size:
            raise BenchmarkError(f"{len(tokens)} tokens of {kind} are too few for {wanted} chunks of {size}")
        for index in range(wanted):
            start = index * (len(tokens) // wanted)
            chunks.append(
                Chunk(
                    kind,
                    tuple(tokens[start : start + prefix_tokens]),
                    tuple(tokens[start + prefix_tokens : start + size]),
                )
            )
    return chunks


def _prose() -> str:
    """Half a megabyte of technical English from Python's own documentation."""
    return "\n".join(pydoc_data.topics.topics.values())


def _code() -> str:
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in _CODE)
