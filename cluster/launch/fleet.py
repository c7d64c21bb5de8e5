"""The actors of a cluster: started together, watched, and stopped in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.launch.errors import LaunchError, last_line
from cluster.launch.plan import NodePlan
from cluster.launch.ray_runtime import RayRuntime
from cluster.launch.signals import StopSignals
from cluster.launch.supervision import NodeWatch, Verdict

if TYPE_CHECKING:
    from cluster.launch.node_thread import Started

logger = logging.getLogger(__name__)

CHECK_S = 0.2
"""Between two looks at whether somebody wants to stop."""
LOG_LINES = 12
"""Of a node that failed, shown with the error."""
STOP_ORDER = (("gateway",), ("decode", "prefill"), ("kv",), ("control",))
"""Kinds of nodes: first those through which work comes in, the control plane last."""


@dataclass(slots=True)
class _Member:
    plan: NodePlan
    actor: Any
    question: Any = None
    """The answer to `health` that is awaited."""
    watch: NodeWatch | None = None


class Fleet:
    """Handles of the cluster's actors. Ray restarts an actor whose process dies; the handle stays good."""

    def __init__(self, runtime: RayRuntime, logs: Path | None) -> None:
        """logs: folder for one log file per node; None leaves the output to Ray's own files."""
        self._runtime = runtime
        self._logs = logs
        self._members: dict[str, _Member] = {}

    def launch(self, plans: list[NodePlan]) -> None:
        """Make all actors at once: a node waits for the control plane by itself, and the cores are shared better."""
        for plan in plans:
            actor = self._runtime.launch(plan, self._log_file(plan))
            self._members[plan.node_id] = _Member(plan, actor)

    def await_started(self, deadline_s: float, signals: StopSignals) -> Iterator[tuple[NodePlan, Started]]:
        """Each node once it serves, in the order in which they do.

        Raises LaunchError for a node that fails, or for those that are not ready after `deadline_s`, and StopAsked.
        """
        import ray
        import ray.exceptions as errors

        from cluster.launch.node_thread import StartFailed

        waiting = {
            member.actor.ready.options(concurrency_group="start").remote(): member for member in self._members.values()
        }
        until_s = time.monotonic() + deadline_s
        while waiting:
            signals.check()
            settled, _ = ray.wait(list(waiting), num_returns=1, timeout=CHECK_S)
            if not settled and time.monotonic() < until_s:
                continue
            if not settled:
                raise self._failure(f"not ready within {deadline_s} s", [member.plan for member in waiting.values()])
            member = waiting.pop(settled[0])
            try:
                outcome: Started | StartFailed = ray.get(settled[0])
            except errors.RayActorError as error:
                raise self._failure(f"its process ended while it started: {last_line(error)}", [member.plan]) from error
            if isinstance(outcome, StartFailed):
                raise self._failure(outcome.reason, [member.plan])
            member.watch = NodeWatch(
                member.plan.node_id, outcome.pid, hang_s=member.plan.spec.timing.hang_s, asked_s=time.monotonic()
            )
            yield member.plan, outcome

    @property
    def pids(self) -> dict[str, int]:
        """Process id by node id, as it was last known."""
        return {name: member.watch.pid for name, member in self._members.items() if member.watch is not None}

    def check(self, wait_s: float) -> list[tuple[NodeWatch, Verdict]]:
        """Ask every node whether it is well, and say what has become true since the last time.

        A node that hangs is ended, so that Ray starts it again. Takes about `wait_s`. Needs all nodes to have started.
        """
        import ray

        begun_s = time.monotonic()
        members = list(self._members.values())
        for member in members:
            if member.question is None:
                member.question = member.actor.health.options(concurrency_group="health").remote()
        answered, _ = ray.wait([member.question for member in members], num_returns=len(members), timeout=wait_s)
        time.sleep(max(0.0, begun_s + wait_s - time.monotonic()))
        news = []
        for member in members:
            assert member.watch is not None
            verdict = self._judge(member, member.watch, member.question in answered)
            if verdict is Verdict.HUNG:
                self._runtime.end_process(member.actor, member.watch.pid)
            if verdict is Verdict.HUNG or member.question in answered:
                member.question = None
            if verdict is not None:
                news.append((member.watch, verdict))
        return news

    def stop(self) -> None:
        """Stop the nodes in good order, each kind within its deadline, and end their processes. Idempotent."""
        import ray
        import ray.exceptions as errors

        for kinds in STOP_ORDER:
            members = [member for member in self._members.values() if member.plan.kind in kinds]
            if not members:
                continue
            stops = {member.actor.stop.remote(member.plan.stop_deadline_s): member.plan.node_id for member in members}
            deadline_s = max(member.plan.stop_deadline_s for member in members)
            done, late = ray.wait(list(stops), num_returns=len(stops), timeout=deadline_s + 1.0)
            for stop in done:
                with contextlib.suppress(errors.RayError):  # it had died; there is nothing to stop
                    if not ray.get(stop):
                        late.append(stop)
            for stop in late:
                logger.warning("%s did not stop within %s s", stops[stop], deadline_s)
            for member in members:
                ray.kill(member.actor, no_restart=True)
                del self._members[member.plan.node_id]

    @staticmethod
    def _judge(member: _Member, watch: NodeWatch, is_answered: bool) -> Verdict | None:
        import ray
        import ray.exceptions as errors

        now_s = time.monotonic()
        if not is_answered:
            return watch.silent(now_s)
        try:
            return watch.answered(ray.get(member.question), now_s)
        except errors.RayTaskError:
            return watch.silent(now_s)  # the process lives, its event loop did not answer in time
        except errors.RayActorError:
            return watch.gone(now_s)

    def _log_file(self, plan: NodePlan) -> Path | None:
        return None if self._logs is None else self._logs / f"{plan.node_id}.log"

    def _failure(self, why: str, plans: list[NodePlan]) -> LaunchError:
        text = f"{', '.join(plan.node_id for plan in plans)}: {why}"
        for plan in plans[:3]:
            log_file = self._log_file(plan)
            if log_file is not None and log_file.exists():
                lines = log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]
                text += f"\n  the end of {log_file}:\n" + "\n".join(f"    {line}" for line in lines)
        return LaunchError(text)
