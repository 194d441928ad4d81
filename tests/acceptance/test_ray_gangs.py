"""Ray Serve's acceptance cases for gangs, R01 to R56, for batch work: one test for each that concerns scheduling.

A deployment of 8 replicas in gangs of 4 is here two gangs of 4 members; a node is a host with one worker.

Not translated, and why:

| cases | reason |
|---|---|
| R02 | the same scenario through another Python call; there is one way to submit |
| R10, R11, R12 | exact bundle lists of a placement group: members are never split; strategies are in R05 |
| R14, R15, R16 | constructor retries of a service; a member's failures are counted (tests/sql/test_finish.py) |
| R19, R20, R21 | child actors inside a placement group; a member's children are processes of its own |
| R25, R27, R28, R29, R36, R37, R55, R56 | autoscaling of a replicated service, replicas per node |
| R26 | the same through the command line: tests/cli |
| R44, R45, R46, R47, R49 | rolling updates of a replicated service |
"""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import Q, ack_all, gpus


def nodes(q: Q, count: int, cpus: float = 1, slots: int = 8, first: int = 1, **offer: Any) -> list[Any]:
    return [
        q.worker(f"w{n}", host=f"node{n}", slots=slots, cpus=cpus, **offer)
        for n in range(first, first + count)
    ]


def gangs_of_4(q: Q, count: int, cpus: float) -> list[Any]:
    return [q.submit_gang(4, cpus=cpus) for _ in range(count)]


def states(gangs: list[Any]) -> list[str]:
    return [gang.state for gang in gangs]


def test_r01_sufficient_resources(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.25)
    q.tick()
    assert sum(len(w.claim()) for w in workers) == 8
    assert states(gangs) == ["running"] * 2


def test_r03_an_incomplete_deployment_runs_what_fits_and_completes_with_another_node(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 3, 0.25)
    q.tick()
    assert sum(len(w.claim()) for w in workers) == 8
    assert states(gangs) == ["running", "running", "blocked"], "it waits, it has not failed"
    workers += nodes(q, 1, first=3)
    q.tick()
    assert sum(len(w.claim()) for w in workers) == 4
    assert states(gangs) == ["running"] * 3


def test_r04_leftover_capacity_makes_no_partial_gang(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 3, 0.2)
    q.tick()
    assert sum(len(w.claim()) for w in workers) == 8
    assert float(sum(w.free["cpus"] for w in workers)) == pytest.approx(0.4)
    assert gangs[2].states == ["blocked"] * 4
    nodes(q, 1, first=3)
    q.tick()
    assert gangs[2].state == "reserved"


def test_r05_pack_uses_one_node(q: Q) -> None:
    gang = q.submit_gang(4, cpus=0.25)
    nodes(q, 2)
    q.tick()
    assert len(set(gang.placed_on)) == 1


def test_r07_every_member_sees_the_same_gang_and_gangs_share_nothing(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.25)
    q.tick()
    claims = [c for w in workers for c in w.claim()]
    for gang in gangs:
        mine = [c for c in claims if c["gang_id"] == gang.id]
        assert sorted(c["rank"] for c in mine) == [0, 1, 2, 3]
        assert {(c["gang_id"], c["epoch"]) for c in mine} == {(gang.id, 1)}
        assert {c.job_id for c in mine} == set(gang.job_ids)
    assert not set(gangs[0].job_ids) & set(gangs[1].job_ids)


def test_r08_what_a_deleted_gang_held_is_free_at_once_or_when_its_members_have_stopped(q: Q) -> None:
    (worker,) = nodes(q, 1, devices=gpus(1, 1))
    reserved = q.submit_gang(2, gpus=1)
    q.tick()
    reserved.cancel()
    assert q.sql("select * from gangq.device_holds") == []
    running = q.submit_gang(2, gpus=1)
    claims = running.start(worker)
    running.cancel()
    assert q.value("select count(*) from gangq.device_holds") == 2, "told to stop is not stopped"
    ack_all(claims)
    assert q.sql("select * from gangq.device_holds") == []


def test_r09_gangs_of_two_kinds_run_side_by_side(q: Q) -> None:
    workers = nodes(q, 1)
    one, other = q.submit_gang(2, task="one", cpus=0.25), q.submit_gang(2, task="other", cpus=0.25)
    q.tick()
    assert sum(len(w.claim()) for w in workers) == 4
    assert states([one, other]) == ["running"] * 2


def test_r13_all_members_go_to_workers_with_the_label(q: Q) -> None:
    gang = q.submit_gang(2, labels={"gpu": "h100"})
    nodes(q, 1)
    q.tick()
    assert gang.state == "blocked"
    nodes(q, 1, first=2, labels={"gpu": "h100"})
    q.tick()
    assert gang.placed_on == ["w2", "w2"]


def test_r17_r33_a_member_that_fails_at_the_start_stops_its_whole_gang_and_no_other(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.25)
    q.tick()
    claims = [c for w in workers for c in w.claim()]
    mine = [c for c in claims if c["gang_id"] == gangs[0].id]
    mine[0].fail()
    assert states(gangs) == ["draining", "running"]
    ack_all(mine[1:])
    assert gangs[0].states == ["blocked"] * 4
    gangs[0].skip_backoff()
    q.tick()
    assert (gangs[0].state, gangs[0].row["epoch"], gangs[1].row["epoch"]) == ("reserved", 2, 1)


def test_r18_r39_r41_a_member_that_is_lost_restarts_its_gang_whole_while_another_runs_on(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.25)
    q.tick()
    claims = [c for w in workers for c in w.claim()]
    lost = workers[0].incarnation
    (hit,) = {c["gang_id"] for c in claims if c.incarnation == lost}
    workers[0].report_dead()
    q.tick()
    other = next(g for g in gangs if g.id != hit)
    gang = next(g for g in gangs if g.id == hit)
    assert (other.state, other.row["epoch"]) == ("running", 1)
    assert gang.state == "blocked", "all four ran there"
    assert [m["attempts"] for m in gang.members].count(1) <= 1


def test_r23_r38_members_lost_while_nobody_looks_are_all_replaced_in_a_new_epoch(q: Q) -> None:
    """Their test waits for states and is flaky; the epoch is what says that it is a new start."""
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    gang.start(*workers)
    for worker in workers:
        worker.report_dead()
    q.settle()
    workers = nodes(q, 2, slots=2, first=3)
    gang.skip_backoff()
    gang.start(*workers)
    assert gang.row["epoch"] == 2
    assert sorted(set(gang.placed_on)) == ["w3", "w4"]


def test_r24_a_node_that_fails_leaks_nothing(q: Q) -> None:
    workers = [
        q.worker(f"w{n}", host=f"node{n}", slots=2, devices=gpus(1, 1, prefix=f"D{n}-")) for n in (1, 2)
    ]
    gang = q.submit_gang(4, gpus=1)
    claims = gang.start(*workers)
    workers[0].report_dead()
    q.tick()
    for claim in claims:
        if claim.incarnation == workers[1].incarnation:
            claim.ack()
    assert gang.state == "blocked"
    assert q.sql("select * from gangq.device_holds") == []


def test_r30_what_is_told_to_stop_still_holds_its_place(q: Q) -> None:
    workers, gang = nodes(q, 1, slots=2), q.submit_gang(2)
    claims = gang.start(*workers)
    gang.cancel()
    behind = q.submit_gang(2)
    q.tick()
    assert behind.state == "blocked"
    ack_all(claims)
    q.tick()
    assert behind.state == "reserved"


def test_r31_r32_a_gang_that_cannot_be_placed_says_so_and_others_proceed(q: Q) -> None:
    nodes(q, 1, slots=2)
    large, small = q.submit_gang(3, wait_for_hardware=True), q.submit_gang(2)
    q.tick()
    assert (large.state, small.state) == ("blocked", "reserved")
    (verdict,) = q.sql("select * from gangq.verdicts")
    assert verdict["gate"] == "infeasible"


def test_r34_a_failure_is_counted_once_for_the_gang_not_once_for_each_member(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4)
    for cycle in (1, 2):
        claims = gang.start(*workers) if cycle == 1 else gang.restart(*workers)
        claims[0].fail()
        ack_all(claims[1:])
        assert gang.row["attempts"] == cycle


def test_r35_a_gang_that_has_failed_for_good_is_placed_again_after_retry(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(2, max_attempts=1)
    claims = gang.start(*workers)
    claims[0].fail()
    ack_all(claims[1:])
    q.settle()
    assert gang.state == "failed"
    q.tick()
    assert gang.state == "failed"
    q.call("retry", gang_ids=[gang.id])
    q.tick()
    assert gang.state == "reserved"


def test_r40_several_failures_in_one_gang_stop_it_once(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4)
    claims = gang.start(*workers)
    claims[0].fail()
    claims[1].fail()
    ack_all(claims[2:])
    assert gang.state == "blocked"
    assert len(q.events("drain", gang_id=gang.id)) == 1
    assert gang.row["attempts"] == 1


def test_r42_r43_the_place_is_free_only_after_the_last_member_has_stopped(q: Q) -> None:
    workers, gang = nodes(q, 1, slots=3), q.submit_gang(3)
    claims = gang.start(*workers)
    behind = q.submit_gang(3)
    claims[0].fail()
    claims[1].ack()
    q.tick()
    assert (gang.state, behind.state) == ("draining", "blocked")
    claims[2].ack()
    q.tick()
    assert behind.state == "reserved"


def test_r51_r53_a_worker_that_drains_takes_no_gang_and_gives_back_what_has_not_started(q: Q) -> None:
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    q.tick()
    assert gang.state == "reserved"
    workers[0].retire(final=False)
    q.tick()
    assert gang.states == ["blocked"] * 4, "the whole gang, not only the members there"
    nodes(q, 1, slots=2, first=3)
    gang.skip_backoff()
    q.tick()
    assert sorted(set(gang.placed_on)) == ["w2", "w3"]
