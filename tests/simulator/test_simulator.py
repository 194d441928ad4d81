"""The real SQL under a job log: everything runs once, nothing is overbooked, and policies do what they are for."""

from __future__ import annotations

import lublin
import pytest
from joblog import Job
from outcome import Outcome, Ran, judge, most_at_once

from gangq.embedded import Server
from simulator import Fleet, Policy, Replay

FLEET = Fleet(8, 4)


class Played:
    """A schedule, and what was broken on the way."""

    def __init__(self, server: Server, template: str, fleet: Fleet, policy: Policy, jobs: list[Job]) -> None:
        name = f"replay_{abs(hash((policy, len(jobs), jobs[0], jobs[-1])))}"
        replay = Replay(server.create_database(name, template=template), fleet, policy)
        try:
            self.ran: list[Ran] = replay.run(jobs)
            self.violations = replay.violations()
        finally:
            replay.close()
            server.drop_database(name)
        self.outcome: Outcome = judge(str(policy), self.ran, fleet.slots)

    def starts(self) -> dict[int, int]:
        return {r.job.id: r.start_s for r in self.ran}


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return lublin.generate(120, FLEET.slots, 1.1, seed=4)


@pytest.mark.parametrize("reservations", [0, 4])
def test_every_job_of_a_log_runs_once_and_to_its_end_and_no_slot_is_given_twice(
    server: Server, template: str, jobs: list[Job], reservations: int
) -> None:
    played = Played(server, template, FLEET, Policy(reservations), jobs)
    assert played.violations == []
    assert sorted(r.job.id for r in played.ran) == [job.id for job in jobs]
    assert all(r.end_s - r.start_s == r.job.run_s and r.start_s >= r.job.submit_s for r in played.ran)
    assert FLEET.slots // 2 < most_at_once(played.ran) <= FLEET.slots


def test_a_replay_decides_the_same_every_time(server: Server, template: str, jobs: list[Job]) -> None:
    first, second = (Played(server, template, FLEET, Policy(4), jobs[:40]) for _ in range(2))
    assert first.starts() == second.starts()


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
