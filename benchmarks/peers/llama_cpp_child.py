"""llama.cpp on a fixed batch, through the low-level calls of `llama_cpp`, in a process of its own.

The GGUF file runs as llama.cpp runs it: in its quantised form, with activations quantised too where its kernels want
that. So its tokens are not those of the dequantised weights.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError, Unavailable
from benchmarks.peers.child import run_child
from benchmarks.turn import RequestTiming, batch_timings

FORMATS = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}
"""What a file can be rewritten to, and llama.cpp's name of it."""
PREFILL_TOKENS = 512
"""Prompt tokens per call, in whole prompts: llama.cpp's own default for a physical batch."""


class LlamaCppWorker:
    """A context per shape of batch: its size is fixed when it is made."""

    def __init__(self, file: Path, rewritten: Path | None, form: str | None, num_threads: int) -> None:
        """form: one of FORMATS to write to `rewritten` and run from there; None runs `file` as it is."""
        try:
            llama_cpp: Any = importlib.import_module("llama_cpp")
            numpy: Any = importlib.import_module("numpy")
        except (ImportError, OSError) as error:  # OSError: the shared library does not load on this machine
            raise Unavailable(f"not installed ({error})") from error
        self._numpy = numpy
        self._lib = llama_cpp
        self._num_threads = num_threads
        self._lib.llama_backend_init()
        if form is not None:
            assert rewritten is not None
            self._rewrite(file, rewritten, form)
            file = rewritten
        self._model = self._lib.llama_model_load_from_file(str(file).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise BenchmarkError(f"llama.cpp cannot load {file}")
        self._num_vocab = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def measure(self, rounds: Sequence[Sequence[Sequence[int]]], output_tokens: int) -> list[RequestTiming]:
        longest = max(len(prompt) for prompts in rounds for prompt in prompts)
        context = self._context(len(rounds[0]), longest + output_tokens, longest)
        try:
            return [timing for prompts in rounds for timing in self._batch(context, prompts, output_tokens)]
        finally:
            self._lib.llama_free(context)

    def _rewrite(self, file: Path, rewritten: Path, form: str) -> None:
        parameters = self._lib.llama_model_quantize_default_params()
        parameters.ftype = getattr(self._lib, FORMATS[form])
        parameters.nthread = self._num_threads
        parameters.allow_requantize = True
        names = (str(file).encode(), str(rewritten).encode())
        if (code := self._lib.llama_model_quantize(*names, parameters)) != 0:
            raise BenchmarkError(f"llama_model_quantize to {form} returned {code}")

    def _context(self, num_streams: int, tokens_per_stream: int, longest_prompt: int) -> Any:
        parameters = self._lib.llama_context_default_params()
        padded = -(-tokens_per_stream // 256) * 256  # what it rounds each sequence's share up to
        parameters.n_ctx = num_streams * padded
        parameters.n_seq_max = num_streams
        parameters.n_batch = max(PREFILL_TOKENS, longest_prompt)
        parameters.n_ubatch = PREFILL_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._num_threads
        parameters.no_perf = True
        context = self._lib.llama_init_from_model(self._model, parameters)
        if not context:
            raise BenchmarkError(f"llama.cpp makes no context of {num_streams} x {padded} tokens")
        return context

    def _batch(self, context: Any, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[RequestTiming]:
        """Prefill whole prompts, as many at a time as fit a call, then all streams one token at a time."""
        sent_s = time.monotonic()
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        last: list[int] = []
        instants_s: list[list[float]] = []
        for group in _groups(prompts):
            rows = [
                (token, position, stream, position == len(prompts[stream]) - 1)
                for stream in group
                for position, token in enumerate(prompts[stream])
            ]
            last += self._decode(context, rows)
            now_s = time.monotonic()
            instants_s += [[now_s] for _ in group]
        for step in range(output_tokens - 1):
            rows = [(token, len(prompts[stream]) + step, stream, True) for stream, token in enumerate(last)]
            last = self._decode(context, rows)
            now_s = time.monotonic()
            for instants in instants_s:
                instants.append(now_s)
        return batch_timings(sent_s, instants_s)

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, stream, wants logits) rows; the most likely next token of each that wants one."""
        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for row, (token, position, stream, wants_logits) in enumerate(rows):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = stream
                batch.logits[row] = wants_logits
            if (code := self._lib.llama_decode(context, batch)) != 0:
                raise BenchmarkError(f"llama_decode returned {code}")
            wanted = [row for row, (_, _, _, wants_logits) in enumerate(rows) if wants_logits]
            return [self._most_likely(context, row) for row in wanted]
        finally:
            self._lib.llama_batch_free(batch)

    def _most_likely(self, context: Any, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._num_vocab,)).argmax())


def _groups(prompts: Sequence[Sequence[int]]) -> Iterator[range]:
    """Consecutive prompts of together at most PREFILL_TOKENS tokens, or a single longer one."""
    start, num_tokens = 0, 0
    for stream, prompt in enumerate(prompts):
        if stream > start and num_tokens + len(prompt) > PREFILL_TOKENS:
            yield range(start, stream)
            start, num_tokens = stream, 0
        num_tokens += len(prompt)
    yield range(start, len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--form", choices=FORMATS)
    parser.add_argument("--rewritten", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    run_child(lambda: LlamaCppWorker(arguments.file, arguments.rewritten, arguments.form, arguments.threads))


if __name__ == "__main__":
    main()
