"""What the launcher makes of the answers of its nodes, in plain code: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What has just become true of a node."""

    DIED = "died"
    BACK = "back"
    HUNG = "hung"


@dataclass(slots=True)
class NodeWatch:
    """One node's process, as its answers to `health` show it.

    up --no process answers--> down --a process answers--> up      (Ray makes the new process)
    up --asked, and silent for hang_s--> HUNG, then as if it had died (the launcher ends the process)
    """

    node_id: str
    pid: int
    hang_s: float
    asked_s: float
    """When the question that is open was asked."""
    down_since_s: float | None = None

    def answered(self, pid: int, now_s: float) -> Verdict | None:
        """The process `pid` answered."""
        self.asked_s = now_s
        if pid == self.pid and self.down_since_s is None:
            return None
        self.pid, self.down_since_s = pid, None
        return Verdict.BACK

    def gone(self, now_s: float) -> Verdict | None:
        """Ray says that there is no process at the moment."""
        self.asked_s = now_s
        if self.down_since_s is not None:
            return None
        self.down_since_s = now_s
        return Verdict.DIED

    def silent(self, now_s: float) -> Verdict | None:
        """No answer so far."""
        if self.down_since_s is not None or now_s - self.asked_s < self.hang_s:
            return None
        self.down_since_s = self.asked_s = now_s
        return Verdict.HUNG
