"""Headrace on CPU against its peers: output tokens/s, TTFT, and how soon a cancelled request's pages are free.

benchmarks/README.md says how it measures and what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.benchmark import Benchmark
from benchmarks.config import QUICK, ServeConfig
from benchmarks.errors import BenchmarkError
from benchmarks.machine import look_at_machine, look_at_moment
from benchmarks.peers import PEERS
from benchmarks.report import Report
from benchmarks.weights import num_weight_bytes
from cluster.spec import SpecError, load_spec
from engine.errors import EngineError


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit code: 0 done, 1 failed, 130 interrupted."""
    config, markdown = _read(arguments)
    # Also where a shell started us in the background, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        with asyncio.Runner() as runner:
            benchmark = Benchmark(config, load_spec(config.spec).spec, folder, runner, _say)
            before = look_at_moment()
            findings = benchmark.run()
        report = Report(
            config=config,
            machine=look_at_machine(),
            before=before,
            after=look_at_moment(),
            weight_bytes=num_weight_bytes(benchmark.source),
            findings=findings,
        )
        print(report.text(markdown=markdown))
        print(report.json_line())
    except (BenchmarkError, SpecError, EngineError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _say(text: str) -> None:
    """Apart from the results, which go to standard output."""
    print(f"serve_cpu: {text}", file=sys.stderr, flush=True)


def _read(arguments: Sequence[str] | None) -> tuple[ServeConfig, bool]:
    """The config, and whether tables are wanted in markdown. Exits for options that make no sense."""
    parser = _parser()
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    markdown, is_quick = given.pop("markdown"), given.pop("quick")
    try:
        return ServeConfig(**((QUICK if is_quick else {}) | given)), markdown
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    defaults = {each.name: each.default for each in dataclasses.fields(ServeConfig)}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_cpu", description=__doc__)

    def option(name: str, help_text: str, **options: object) -> None:
        default = defaults[name]
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        suffix = "" if default is None else f" (default: {shown})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text + suffix, **options)  # type: ignore[arg-type]

    option("spec", "the cluster to start, on ports of its own", type=Path, metavar="FILE")
    option("url", "measure the server that runs there, with the weights of the spec's first model", metavar="URL")
    option("control", "that cluster's control plane, for cancel-to-free", metavar="HOST:PORT")
    option("streams", "numbers of concurrent streams", type=_numbers, metavar="N,N,...")
    option("prompt_tokens", "tokens of a prompt", type=int, metavar="N")
    option("output_tokens", "tokens of an answer", type=int, metavar="N")
    option("rounds", "requests of each stream in one turn", type=int, metavar="N")
    option("repeats", "turns of each engine at each number of streams", type=int, metavar="N")
    option("shared_prefix_tokens", "tokens that all prompts have in common at the front", type=int, metavar="N")
    option("peers", f"of {', '.join(PEERS)}; '' for none", type=_words, metavar="NAME,NAME,...")
    option("llama_python", "interpreter that has llama_cpp, if this one has not", metavar="FILE")
    option("vllm_python", "interpreter that has vLLM for CPUs", metavar="FILE")
    option("cancels", "requests to cancel; 0 for none", type=int, metavar="N")
    option("cancel_heartbeat_s", "seconds between load reports meanwhile", type=float, metavar="S")
    option("seed", "of the prompts and of the instants of cancelling", type=int, metavar="N")
    parser.add_argument("--quick", action="store_true", help="see that it works; the numbers mean nothing")
    parser.add_argument("--markdown", action="store_true", help="print markdown, as in benchmarks/README.md")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _words(text))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
