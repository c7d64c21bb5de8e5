"""Threads that run one piece of work together."""

from __future__ import annotations

import threading

import pytest

from engine.team import Team, team_of


def test_all_parts_run_at_the_same_time():
    """Each part waits for the others: one after the other they would never end."""
    together = threading.Barrier(3, timeout=10)
    parts: list[int] = []

    def work(part: int) -> None:
        together.wait()
        parts.append(part)

    Team(3).run(work, 3)
    assert sorted(parts) == [0, 1, 2]


def test_a_part_of_the_team_can_do_the_work():
    team = team_of(3)
    for num_parts in (1, 2, 3, 1):
        parts: list[int] = []
        team.run(parts.append, num_parts)
        assert sorted(parts) == list(range(num_parts))


def test_callers_take_turns():
    team, running = Team(2), []

    def work(part: int) -> None:
        running.append(part)
        assert len(running) <= 2
        running.remove(part)

    callers = [threading.Thread(target=lambda: [team.run(work, 2) for _ in range(50)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=20)
        assert not caller.is_alive()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_reaches_the_caller_and_the_team_goes_on(failing):
    team = Team(2)

    def work(part: int) -> None:
        if part == failing:
            raise ArithmeticError(part)

    with pytest.raises(ArithmeticError):
        team.run(work, 2)
    parts: list[int] = []
    team.run(parts.append, 2)
    assert sorted(parts) == [0, 1]
