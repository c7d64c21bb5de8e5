"""transformers' `generate` on a fixed batch, in a process of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import Unavailable
from benchmarks.peers.child import run_child
from benchmarks.turn import RequestTiming, batch_timings


class TransformersWorker:
    """All prompts of a round have one length, so a batch needs no padding."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise Unavailable(f"not installed ({error})") from error
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        # The folder's own settings may end an answer early, or sample.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self.version = f"transformers {transformers.__version__}"

    def measure(self, rounds: Sequence[Sequence[Sequence[int]]], output_tokens: int) -> list[RequestTiming]:
        timings: list[RequestTiming] = []
        for prompts in rounds:
            sent_s = time.monotonic()
            ids = self._torch.tensor(prompts)
            watch = _TokenWatch()
            with self._torch.inference_mode():
                self._model.generate(
                    ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=output_tokens, streamer=watch
                )
            timings += batch_timings(sent_s, [watch.instants_s] * len(prompts))
        return timings


class _TokenWatch:
    """A streamer that notes when each token of the batch was known."""

    def __init__(self) -> None:
        self.instants_s: list[float] = []
        self._prompt_seen = False

    def put(self, value: object) -> None:
        """The prompts come first, then one token per prompt and step."""
        if self._prompt_seen:
            self.instants_s.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    run_child(lambda: TransformersWorker(arguments.weights, arguments.dtype, arguments.threads))


if __name__ == "__main__":
    main()
