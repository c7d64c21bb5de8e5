"""The report of a run: for a person, and one line of JSON."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field

from benchmarks.config import ServeConfig
from benchmarks.machine import Machine, Moment
from benchmarks.result import Findings, as_json, cancel_lines, engine_lines
from benchmarks.tables import cancel_table, engine_table

NOISE = 0.25
"""Load average per core that is no longer quiet. Threads that wait for one another at every layer lose much more to a
neighbour than one thread does: on two cores at a load of 8, decode steps of transformers and llama.cpp with two threads
took a quarter of a second to three seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that is needed to believe or to repeat the numbers."""

    config: ServeConfig
    machine: Machine
    before: Moment
    after: Moment
    weight_bytes: int
    """That one step of Headrace's decode reads."""
    findings: Findings
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))

    def text(self, *, markdown: bool) -> str:
        """Conditions, the engines' table, the cancels' table."""
        engines = engine_table(engine_lines(self.findings.turns, self.config.prompt_tokens), markdown=markdown)
        bullet = "- " if markdown else "  "
        parts = [
            f"Headrace {self.machine.headrace}, commit {self.machine.commit or 'unknown'}, {self.date}",
            "\n".join(bullet + line for line in [*self._conditions(), *self._engines()]),
            engines,
            self._cancels(markdown=markdown),
        ]
        return "\n\n".join(parts) + "\n"

    def json_line(self) -> str:
        """Everything, raw turns included, on one line."""
        findings = self.findings
        return json.dumps(
            as_json(
                {
                    "benchmark": "serve_cpu",
                    "date": self.date,
                    "machine": self.machine,
                    "before": self.before,
                    "after": self.after,
                    "config": self.config,
                    "weight_bytes": self.weight_bytes,
                    "engines": findings.engines,
                    "absent": findings.absent,
                    "lines": engine_lines(findings.turns, self.config.prompt_tokens),
                    "output_tokens_per_s": {
                        engine: {streams: [turn.output_tokens_per_s for turn in turns] for streams, turns in by.items()}
                        for engine, by in findings.turns.items()
                    },
                    "cancel": None if findings.cancels is None else cancel_lines(findings.cancels),
                    "cancel_times": findings.cancels,
                }
            )
        )

    def _conditions(self) -> list[str]:
        config, machine, findings = self.config, self.machine, self.findings
        one = max(self.before.read_bytes_per_s_of_one, self.after.read_bytes_per_s_of_one)
        all_cores = max(self.before.read_bytes_per_s, self.after.read_bytes_per_s)
        lines = [
            f"machine: {machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.0f} GiB, "
            f"{machine.system}; Python {machine.python}, torch {machine.torch}",
            f"memory read: {all_cores / 1e9:.1f} GB/s with all cores, {one / 1e9:.1f} with one. A step reads "
            f"{self.weight_bytes / 1e6:.0f} MB of weights: at that rate one stream makes at most "
            f"{all_cores / self.weight_bytes:.0f} tokens/s with all cores, {one / self.weight_bytes:.0f} with one",
            f"load average: {self.before.load_average:.2f} before, {self.after.load_average:.2f} after",
            f"load: closed loop, {config.prompt_tokens} tokens in and {config.output_tokens} out, temperature 0, "
            f"{config.rounds} requests per stream and turn, {config.repeats} repeats; {self._prefixes()}",
        ]
        ours = next(iter(findings.turns.values()))
        client_cores = max(turn.driver_cores for turns in ours.values() for turn in turns)
        lines.append(f"the load generator used at most {client_cores:.2f} cores beside Headrace")
        if config.url is not None:
            lines.append("the server that was measured kept its processes, and what they use idle, beside its peers")
        if self.before.load_average > NOISE * machine.cores:
            lines.append(
                "THE MACHINE WAS BUSY before the run began: engines with several threads suffer most from that"
            )
        return lines

    def _prefixes(self) -> str:
        shared = self.config.shared_prefix_tokens
        return f"the first {shared} tokens of all prompts are the same" if shared else "all prompts are different"

    def _engines(self) -> list[str]:
        took_part = [f"{name}: {described}" for name, described in self.findings.engines.items()]
        return took_part + [f"{name}: took no part, {reason}" for name, reason in self.findings.absent.items()]

    def _cancels(self, *, markdown: bool) -> str:
        times = self.findings.cancels
        if times is None:
            why = "left out" if not self.config.cancels else "this server's control plane is not known (--control)"
            return f"cancel to free: not measured, {why}"
        num_trials = len(times.after_first_token_s) + len(times.at_random_s)
        return (
            f"{cancel_table(cancel_lines(times), markdown=markdown)}\n\n"
            f"From the client's close to the first load report that shows every page of every worker free. Workers "
            f"report every {times.report_every_s * 1e3:.0f} ms, which is the resolution; in {times.num_holding} of "
            f"{num_trials} trials a report had shown pages in use before the close. Left out: "
            f"{times.num_over} requests that were over before they could be closed."
        )
