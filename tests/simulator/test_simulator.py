"""The real SQL under a job log: everything runs once, nothing is overbooked, and policies do what they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import lublin
import pytest
import reference
from in_memory import InMemory
from joblog import Job
from outcome import Outcome, Ran, judge, most_at_once

from gangq.embedded import Server
from simulator import Fleet, Policy, Replay

pytestmark = pytest.mark.slow

FLEET = Fleet(8, 4)


class Played:
    """A schedule, and what was broken on the way."""

    def __init__(self, server: Server, template: str, fleet: Fleet, policy: Policy, jobs: list[Job]) -> None:
        name = f"replay_{abs(hash((policy, len(jobs), jobs[0], jobs[-1])))}"
        replay = Replay(server.create_database(name, template=template), fleet, policy)
        try:
            self.ran: list[Ran] = replay.run(jobs)
            self.violations = replay.violations()
            self.promises = replay.promises()
        finally:
            replay.close()
            server.drop_database(name)
        self.outcome: Outcome = judge(str(policy), self.ran, fleet.slots)

    def starts(self) -> dict[int, int]:
        return {r.job.id: r.start_s for r in self.ran}


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return lublin.generate(45, FLEET.slots, 1.5, seed=4)


@pytest.fixture(scope="module")
def played(server: Server, template: str, jobs: list[Job]) -> Callable[[int], Played]:
    """The log with so many planned starts, played once."""
    return functools.cache(lambda reservations: Played(server, template, FLEET, Policy(reservations), jobs))


@pytest.mark.parametrize("reservations", [0, 1, 4])
def test_every_job_of_a_log_runs_once_and_to_its_end_and_no_slot_is_given_twice(
    played: Callable[[int], Played], jobs: list[Job], reservations: int
) -> None:
    mine = played(reservations)
    assert mine.violations == []
    assert sorted(r.job.id for r in mine.ran) == [job.id for job in jobs]
    assert all(r.end_s - r.start_s == r.job.run_s and r.start_s >= r.job.submit_s for r in mine.ran)
    assert FLEET.slots // 2 < most_at_once(mine.ran) <= FLEET.slots


def test_without_planned_starts_it_is_the_textbooks_best_effort_to_the_second(
    played: Callable[[int], Played], jobs: list[Job]
) -> None:
    book = {r.job.id: r.start_s for r in reference.simulate(jobs, FLEET.slots, 0)}
    assert played(0).starts() == book


@pytest.mark.parametrize("reservations", [0, 1, 4])
def test_in_memory_it_is_the_same_schedule_to_the_second(
    played: Callable[[int], Played], jobs: list[Job], reservations: int
) -> None:
    ran = InMemory(FLEET, Policy(reservations)).run(jobs)
    assert {r.job.id: r.start_s for r in ran} == played(reservations).starts()


@pytest.mark.parametrize("reservations", [1, 4])
def test_when_estimates_are_exact_every_gang_starts_when_it_was_first_promised_or_sooner(
    played: Callable[[int], Played], reservations: int
) -> None:
    mine = played(reservations)
    late = {
        job: (starts_s, mine.promises[job])
        for job, starts_s in mine.starts().items()
        if job in mine.promises and starts_s > mine.promises[job] + 1
    }
    assert len(mine.promises) >= 5
    assert late == {}


def test_a_gang_that_waits_for_what_the_same_pass_started_gets_a_planned_start_too(
    server: Server, template: str
) -> None:
    log = [Job(1, 0, 100, 100, 20), Job(2, 0, 50, 50, 32), Job(3, 0, 500, 500, 1), Job(4, 0, 100, 100, 12)]
    assert Played(server, template, FLEET, Policy(1), log).starts() == {1: 0, 2: 100, 3: 150, 4: 0}


def test_a_large_gang_behind_a_stream_of_small_ones_starts_with_a_planned_start_and_starves_without(
    server: Server, template: str
) -> None:
    stream = [Job(n, 5 * n, 100, 100, 2) for n in range(1, 31)]
    log = sorted([*stream, Job(100, 52, 100, 100, 32)], key=lambda job: job.submit_s)
    starts = {k: Played(server, template, FLEET, Policy(k), log).starts()[100] for k in (0, 1)}
    assert starts[0] > stream[-1].submit_s
    assert starts[1] == 150  # the last of those before it has ended


def test_a_small_gang_behind_a_stream_of_large_ones_waits_for_none_that_came_after_it(
    server: Server, template: str
) -> None:
    stream = [Job(n, 10 * n, 100, 100, 31) for n in range(1, 12)]
    log = sorted([*stream, Job(100, 25, 500, 500, 2)], key=lambda job: job.submit_s)
    for reservations in (0, 4):
        assert Played(server, template, FLEET, Policy(reservations), log).starts()[100] == 210


def test_a_replay_decides_the_same_every_time(
    played: Callable[[int], Played], server: Server, template: str, jobs: list[Job]
) -> None:
    assert Played(server, template, FLEET, Policy(4), jobs).starts() == played(4).starts()


def test_what_outruns_its_estimate_is_stopped_there_and_its_slots_are_given_on(
    server: Server, template: str
) -> None:
    log = [Job(1, 0, 1000, 300, 32), Job(2, 10, 50, 50, 32), Job(3, 20, 90, 40, 1)]
    played = Played(server, template, FLEET, Policy(4), log)
    assert [(r.job.id, r.start_s, r.end_s, r.outran) for r in played.ran] == [
        (1, 0, 300, True),
        (2, 300, 350, False),
        (3, 350, 390, True),
    ]


def test_a_log_with_users_queues_and_priorities_is_replayed_with_them(server: Server, template: str) -> None:
    log = [
        Job(1, 0, 100, 100, 32),
        Job(2, 1, 100, 100, 32, "ada", "a"),
        Job(3, 2, 100, 100, 32, "bob", "b", priority=5),
    ]
    assert Played(server, template, FLEET, Policy(4, order="priority"), log).starts() == {
        1: 0,
        3: 100,
        2: 200,
    }


def test_a_job_that_the_fleet_cannot_hold_is_refused_before_anything_runs(
    server: Server, template: str
) -> None:
    with pytest.raises(ValueError, match=r"jobs \[7\] need more than the fleet's 32 slots"):
        Played(server, template, FLEET, Policy(4), [Job(7, 0, 1, 1, 33)])
