"""Ray Serve's acceptance cases for gangs, R01 to R56, for batch work: one test for each that concerns scheduling.

A deployment of 8 replicas in gangs of 4 is here two gangs of 4 members; a node is a host with one worker; a node
that drains is `gangq drain-host`. Theirs stops what is left a grace period before a drain's deadline, ours at it; and
what has not begun there theirs stops in any case, ours when it fits elsewhere: a batch job may use the time that is
left. What is about replicas that are kept, scaled and updated (R25, R28, R29, R37, R44 to R47, R49) is a service.

Not translated, and why:

| cases | reason |
|---|---|
| R02 | the scenario of R01, with the gang set by `.options()`: a gang's spec has one way into the database |
| R15 | recovers because a new replica has a new id; a member keeps its id: one that always fails is R14 |
| R19, R20, R21 | actors and tasks that a replica starts are placed too; here they are processes of the member |
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from cli.cli_process import ok
from sql import services
from sql.drive import INVALID, Claim, Q, Worker, ack_all, gpus, refused
from sql.services import Replicas, put, whole


def nodes(q: Q, count: int, cpus: float = 1, slots: int = 8, first: int = 1, **offer: Any) -> list[Worker]:
    return [
        q.worker(f"w{n}", host=f"node{n}", slots=slots, cpus=cpus, **offer)
        for n in range(first, first + count)
    ]


def drain(q: Q, host: str, deadline_s: float | None = None) -> None:
    """What `gangq drain-host` calls."""
    deadline = None if deadline_s is None else q.clock.now() + timedelta(seconds=deadline_s)
    q.call("cordon", host=host, drain=True, deadline=deadline)


def told(claims: list[Claim], *workers: Worker) -> list[str]:
    """What their workers hear at the next heartbeat for each of these claims."""
    heard = [worker.beat(*(c for c in claims if c.incarnation == worker.incarnation)) for worker in workers]
    return [{job: action for beat in heard for job, action in beat.items()}[c.job_id] for c in claims]


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


def test_r06_spread_uses_both_nodes(q: Q) -> None:
    gang = q.submit_gang(4, cpus=0.25, strategy="spread")
    nodes(q, 2)
    q.tick()
    assert sorted(gang.placed_on) == ["w1", "w1", "w2", "w2"]


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


def test_r10_a_gang_holds_exactly_what_its_members_ask_for_and_no_member_is_split(q: Q) -> None:
    """Three nodes with 3 devices each have 9: 3 members of 2 find their place on three nodes, a fourth has none."""
    for n in (1, 2, 3):
        nodes(q, 1, cpus=4, first=n, devices=gpus(*[1] * 3, prefix=f"D{n}-"))
    fourth = q.submit_gang(4, gpus=2, cpus=0.5, wait_for_hardware=True)
    gang = q.submit_gang(3, gpus=2, cpus=0.5)
    q.tick()
    assert (fourth.state, gang.state) == ("blocked", "reserved")
    held = q.sql(
        "select job_id, count(*) as devices, count(distinct host) as hosts "
        "from gangq.devices where job_id is not null group by job_id order by job_id"
    )
    assert held == [{"job_id": job, "devices": 2, "hosts": 1} for job in gang.job_ids]
    assert q.value("select count(*) from gangq.device_holds") == 6


@pytest.mark.parametrize(("strategy", "hosts"), [("pack", 1), ("spread", 2)], ids=["r11-pack", "r12-spread"])
def test_r11_r12_members_of_several_devices_share_a_node_or_do_not(q: Q, strategy: str, hosts: int) -> None:
    for n in (1, 2):
        nodes(q, 1, cpus=4, first=n, devices=gpus(*[1] * 4, prefix=f"D{n}-"))
    gang = q.submit_gang(2, gpus=2, cpus=1, strategy=strategy)
    q.tick()
    assert len(set(gang.placed_on)) == hosts


def test_r13_all_members_go_to_workers_with_the_label(q: Q) -> None:
    gang = q.submit_gang(2, labels={"gpu": "h100"})
    nodes(q, 1)
    q.tick()
    assert gang.state == "blocked"
    nodes(q, 1, first=2, labels={"gpu": "h100"})
    q.tick()
    assert gang.placed_on == ["w2", "w2"]


def test_r14_a_gang_that_fails_every_time_ends_failed_and_holds_nothing(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4, max_attempts=3)
    for cycle in (1, 2, 3):
        claims = gang.start(*workers) if cycle == 1 else gang.restart(*workers)
        claims[0].fail("no such model")
        ack_all(claims[1:])
    assert (gang.state, set(gang.states)) == ("failed", {"failed"})
    assert "spent its 3" in gang.row["reason"]
    q.settle()
    assert workers[0].claim() == []
    assert workers[0].free["slots"] == 8


def test_r16_a_gang_that_fails_once_runs_the_second_time(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4)
    claims = gang.start(*workers)
    claims[3].fail("address in use")
    ack_all(claims[:3])
    for claim in gang.restart(*workers):
        claim.complete()
    assert (gang.state, gang.row["epoch"]) == ("done", 2)


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


def test_r18_a_member_that_is_not_healthy_restarts_its_gang_whole_and_no_other(q: Q) -> None:
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.25)
    q.tick()
    claims = [c for w in workers for c in w.claim()]
    mine = [c for c in claims if c["gang_id"] == gangs[0].id]
    mine[1].trip()
    others = [c for c in mine if c is not mine[1]]
    assert told(others, *workers) == ["preempt"] * 3
    ack_all(others)
    again = gangs[0].restart(*workers)
    assert not {c.token for c in again} & {c.token for c in mine}
    assert [(g.state, g.row["epoch"]) for g in gangs] == [("running", 2), ("running", 1)]


def test_r22_who_is_who_survives_whoever_schedules(q: Q, dsn: str) -> None:
    """Two gangs and a plain job run; who ticks is killed in the middle of a pass that has placed a third gang."""
    workers, gangs = nodes(q, 2), gangs_of_4(q, 2, 0.1)
    q.tick()
    members = [c for w in workers for c in w.claim()]
    plain = q.submit()
    claims = [*members, *(c for w in workers for c in w.claim())]
    assert [c.job_id for c in claims[8:]] == [plain]
    before = [c.barrier() for c in members]
    third = q.submit_gang(2)
    with q.connected(dsn) as other:
        other.sql("begin")
        other.tick()
        assert other.value("select state from gangq.live_gangs where id = %(id)s", id=third.id) == "reserved"
        pid = other.value("select pg_backend_pid()")
        assert q.value("select pg_terminate_backend(%(pid)s, 10000)", pid=pid)
        with pytest.raises(psycopg.OperationalError):
            other.tick()
    assert third.state == "blocked", "what it had not committed never was"
    q.tick()
    assert third.state == "reserved"
    assert [c.barrier() for c in members] == before
    assert told(claims, *workers) == ["continue"] * 9
    assert [(g.state, g.row["epoch"]) for g in gangs] == [("running", 1)] * 2


@pytest.mark.parametrize("same_gang", [True, False])
def test_r23_members_lost_while_nobody_looks_are_all_replaced_in_a_new_epoch(q: Q, same_gang: bool) -> None:
    """Their test waits for states and is flaky; the epoch is what says that it is a new start."""
    workers = nodes(q, 4, slots=1)
    gangs = [q.submit_gang(2), q.submit_gang(2)]
    q.tick()
    claims = [g.claimed_by(*workers[2 * n : 2 * n + 2]) for n, g in enumerate(gangs)]
    lost = claims[0] if same_gang else [claims[0][0], claims[1][0]]
    for worker in workers:
        if worker.incarnation in [c.incarnation for c in lost]:
            worker.report_dead()
    left = [c for c in claims[0] + claims[1] if c not in lost]
    workers = [worker for worker in workers if worker.row["ended_at"] is None]
    assert told(left, *workers) == ["continue" if same_gang else "preempt"] * 2
    if not same_gang:
        ack_all(left)
    workers += nodes(q, 2, slots=1, first=5)
    for gang in gangs:
        gang.skip_backoff()
    q.tick()
    for worker in workers:
        worker.claim()
    assert [g.states for g in gangs] == [["running"] * 2] * 2
    assert [g.row["epoch"] for g in gangs] == ([2, 1] if same_gang else [2, 2])


@pytest.mark.parametrize("strategy", ["spread", "pack"])
def test_r24_a_node_that_fails_restarts_its_gang_and_leaks_nothing(q: Q, strategy: str) -> None:
    workers = [
        worker
        for n in (1, 2, 3)
        for worker in nodes(q, 1, slots=2, first=n, devices=gpus(1, 1, prefix=f"D{n}-"))
    ]
    gang = q.submit_gang(2, gpus=1, strategy=strategy)
    claims = gang.start(*workers)
    hosts = {c.incarnation for c in claims}
    assert len(hosts) == (2 if strategy == "spread" else 1)
    lost = next(w for w in workers if w.incarnation in hosts)
    lost.report_dead()
    ack_all([c for c in claims if c.incarnation != lost.incarnation])
    assert gang.state == "blocked"
    assert q.sql("select * from gangq.device_holds") == []
    gang.restart(*(w for w in workers if w is not lost))
    assert lost.name not in gang.placed_on
    assert q.value("select count(*) from gangq.device_holds") == 2


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


def test_r36_a_gang_is_given_up_whole_and_never_by_a_member(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4)
    claims = gang.start(*workers)
    with refused(INVALID, f"of gang g{gang.id}"):
        q.call("cancel", job_ids=[gang.job_ids[3]])
    assert told(claims, *workers) == ["continue"] * 4
    gang.cancel()
    assert told(claims, *workers) == ["cancel"] * 4
    ack_all(claims)
    assert (gang.state, gang.states) == ("cancelled", ["cancelled"] * 4)


def test_r38_a_gang_with_a_member_that_never_began_is_restarted_whole(q: Q) -> None:
    """Theirs kept survivors that knew members of another start; here nobody begins before all have come."""
    workers, gang = nodes(q, 2, slots=1), q.submit_gang(2)
    q.tick()
    (claim,) = workers[0].claim()
    workers[1].report_dead()
    q.tick()
    assert gang.live["go_at"] is None
    assert told([claim], workers[0]) == ["preempt"]
    claim.ack()
    again = gang.restart(workers[0], *nodes(q, 1, slots=1, first=3))
    assert [c["epoch"] for c in again] == [2, 2]
    assert gang.placed_on == ["w1", "w3"]


@pytest.mark.parametrize("forced", [True, False])
def test_r39_a_gang_is_stopped_entirely_whether_its_members_confirm_it_or_are_found_dead(
    q: Q, forced: bool
) -> None:
    workers, gang = nodes(q, 4, slots=1), q.submit_gang(4)
    claims = gang.start(*workers)
    claims[0].fail()
    assert gang.states == ["preempted"] + ["preempting"] * 3
    runs_on = {worker.incarnation: worker for worker in workers}
    for claim in claims[1:]:
        assert gang.state == "draining"
        if forced:
            runs_on[claim.incarnation].report_dead()
        else:
            claim.ack()
    assert gang.states == ["blocked"] * 4
    assert len(q.events("drain", gang_id=gang.id)) == 1
    assert gang.row["crashes"] == 0, "who died while stopping had been told to"


def test_r40_several_failures_in_one_gang_stop_it_once(q: Q) -> None:
    workers, gang = nodes(q, 1), q.submit_gang(4)
    claims = gang.start(*workers)
    claims[0].fail()
    claims[1].fail()
    ack_all(claims[2:])
    assert gang.state == "blocked"
    assert len(q.events("drain", gang_id=gang.id)) == 1
    assert gang.row["attempts"] == 1


def test_r41_when_several_gangs_fail_the_others_run_on(q: Q) -> None:
    workers, gangs = nodes(q, 3), gangs_of_4(q, 3, 0.25)
    q.tick()
    claims = [c for w in workers for c in w.claim()]
    first, second, third = ([c for c in claims if c["gang_id"] == gang.id] for gang in gangs)
    first[0].fail()
    second[3].trip()
    assert states(gangs) == ["draining", "draining", "running"]
    assert told(third, *workers) == ["continue"] * 4
    ack_all(first[1:] + second[:3])
    assert states(gangs) == ["blocked", "blocked", "running"]
    assert gangs[2].row["epoch"] == 1


def test_r42_r43_the_place_is_free_only_after_the_last_member_has_stopped(q: Q) -> None:
    workers, gang = nodes(q, 1, slots=3), q.submit_gang(3)
    claims = gang.start(*workers)
    behind = q.submit_gang(3)
    claims[0].fail()
    assert gang.states == ["preempted", "preempting", "preempting"], "told together"
    claims[1].ack()
    q.tick()
    assert (gang.state, behind.state) == ("draining", "blocked")
    claims[2].ack()
    q.tick()
    assert behind.state == "reserved"


def test_r48_a_gang_that_replaces_a_member_is_moved_only_when_it_is_whole_again(q: Q) -> None:
    """Theirs is left out of an update; what changes a gang's places here is the drain of a node."""
    workers = nodes(q, 2, slots=1)
    gang = q.submit_gang(2, failure_policy="restart_member")
    claims = gang.start(*workers)
    claims[1].fail()
    workers += nodes(q, 3, slots=1, first=3)
    drain(q, "node1")
    for state in ("blocked", "reserved"):
        assert gang.states == ["running", state]
        gang.skip_backoff()
        q.tick()
        assert q.events("move") == []
    (successor,) = gang.claimed_by(*workers)
    q.tick()
    assert gang.states == ["preempting"] * 2
    ack_all([claims[0], successor])
    q.tick()
    assert gang.state == "reserved"
    assert "w1" not in gang.placed_on


def test_r50_without_room_elsewhere_a_gang_runs_until_the_deadline_and_then_stops_entirely(q: Q) -> None:
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    claims = gang.start(*workers)
    drain(q, "node1", deadline_s=40)
    q.live_on(35, *workers, step=5)
    assert told(claims, *workers) == ["continue"] * 4
    q.live_on(5, *workers, step=5)
    assert told(claims, *workers) == ["preempt"] * 4, "also those on the node that stays"
    ack_all(claims)
    assert (gang.states, gang.row["attempts"]) == (["blocked"] * 4, 0)


def test_r51_when_one_of_its_nodes_drains_the_whole_gang_moves(q: Q) -> None:
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    claims = gang.start(*workers)
    drain(q, "node1")
    q.tick()
    assert told(claims, *workers) == ["continue"] * 4, "nowhere to go yet"
    workers += nodes(q, 1, slots=2, first=3)
    q.tick()
    assert told(claims, *workers[:2]) == ["preempt"] * 4
    ack_all(claims)
    gang.start(*workers)
    assert (sorted(set(gang.placed_on)), gang.row["epoch"]) == (["w2", "w3"], 2)
    assert [m["attempts"] for m in gang.members] == [1] * 4, "the move is not charged"


def test_r52_a_gang_runs_on_when_its_node_stops_draining(q: Q) -> None:
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    claims = gang.start(*workers)
    drain(q, "node1", deadline_s=40)
    q.live_on(30, *workers)
    q.call("uncordon", host="node1")
    workers += nodes(q, 1, slots=2, first=3)
    q.live_on(60, *workers)
    assert told(claims, *workers[:2]) == ["continue"] * 4
    assert (gang.state, gang.row["epoch"], q.events("move")) == ("running", 1, [])


@pytest.mark.parametrize("claimed", ["none", "some"])
def test_r53_a_gang_that_has_not_begun_on_a_node_that_drains_goes_elsewhere_at_once(
    q: Q, claimed: str
) -> None:
    workers, gang = nodes(q, 2, slots=2), q.submit_gang(4)
    q.tick()
    claims = workers[1].claim() if claimed == "some" else []
    workers += nodes(q, 1, slots=2, first=3)
    drain(q, "node1")
    q.tick()
    assert gang.live["go_at"] is None
    assert workers[0].claim() == []
    ack_all(claims)
    q.tick()
    assert (gang.state, sorted(set(gang.placed_on))) == ("reserved", ["w2", "w3"])
    assert [m["attempts"] for m in gang.members] == [0] * 4
    assert gang.row["placement_misses"] == gang.row["never_started"] == 0


def test_r54_only_as_many_gangs_move_as_fit_elsewhere_and_each_of_them_whole(q: Q) -> None:
    (node,) = nodes(q, 1, slots=6)
    gangs = [q.submit_gang(2) for _ in range(3)]
    q.tick()
    claims = node.claim()
    nodes(q, 1, slots=3, first=2)
    drain(q, "node1")
    q.settle()
    assert sorted(states(gangs)) == ["draining", "running", "running"]
    for gang in gangs:
        heard = told([c for c in claims if c["gang_id"] == gang.id], node)
        assert heard == ["preempt" if gang.state == "draining" else "continue"] * 2


@pytest.mark.parametrize(
    "bounds", [{"size": 4, "min_size": 2}, {"roles": [{"name": "a", "count": 4, "min": 1}]}]
)
def test_r55_a_gang_may_have_bounds_for_its_size(q: Q, bounds: dict[str, Any]) -> None:
    nodes(q, 1, slots=3)
    gang = q.submit_gang(**bounds)
    q.tick()
    assert (gang.state, gang.live["world_size"]) == ("reserved", 3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": 2, "min_size": 3}, "min_size is 3 of a gang of 2"),
        ({"size": 2, "min_size": 0}, "min_size is 0"),
        ({"roles": [{"name": "a", "count": 1, "min": 2}]}, "role a has count 1 and min 2"),
    ],
)
def test_r55_bounds_that_make_no_sense_are_refused(q: Q, wrong: dict[str, Any], named: str) -> None:
    with refused(INVALID, named):
        q.submit_gang(**wrong)


def test_r56_wishes_for_nodes_that_contradict_each_other_are_refused(q: Q) -> None:
    with refused(INVALID, "a host for each member and for one host for all"):
        q.submit_gang(2, strategy="strict_spread", require="host")


def deployment(q: Q, replicas: int, gang: int, hosts: int = 4, **more: Any) -> Replicas:
    """A service on hosts with room for four replicas each, that is up."""
    fleet = Replicas.of_hosts(q, hosts, slots=4)
    put(q, replicas=replicas, gang=gang, **more)
    fleet.settle(2)
    assert len(services.endpoints(q)) == replicas
    return fleet


@pytest.mark.parametrize(("before", "after"), [(4, 2), (8, 4), (4, 8)])
def test_r25_scaled_by_whole_gangs_the_smaller_set_is_part_of_the_larger(
    q: Q, before: int, after: int
) -> None:
    fleet = deployment(q, before, 2)
    had = set(whole(q))
    put(q, task=None, replicas=after)
    least = before
    for _ in range(5):
        fleet.turn()
        least = min(least, len(services.endpoints(q)))
        q.later(1)
    has = set(whole(q))
    assert (len(has), least) == (after // 2, min(before, after))
    assert has < had or had < has


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8)])
def test_r26_scaled_by_whole_gangs_on_the_command_line(q: Q, dsn: str, before: int, after: int) -> None:
    fleet = deployment(q, before, 4)
    had = set(whole(q))
    ok(dsn, "service", "set", "chat", "--replicas", str(after))
    fleet.settle(4)
    has = set(whole(q))
    assert len(has) == after // 4
    assert has < had or had < has


def test_r27_scaled_by_its_load_from_2_to_8_and_back_by_whole_gangs(q: Q) -> None:
    fleet = deployment(
        q, 2, 2, min_replicas=2, max_replicas=8, target_load=0.5, up_after_s=10, down_after_s=30
    )
    seen = [2]
    for load, until in ((1.0, 8), (0.0, 2)):
        for _ in range(40):
            for claim in fleet.claims.values():
                if fleet.goes(claim):
                    q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)
            fleet.turn()
            q.later(5)
            count = len(services.endpoints(q))
            assert count % 2 == 0
            seen += [count] if count != seen[-1] else []
        assert seen[-1] == until
    assert seen[: seen.index(8) + 1] == [2, 4, 8]
    assert q.violations() == []


def test_r28_an_unaligned_number_is_rounded_up_when_it_grows(q: Q) -> None:
    fleet = deployment(q, 3, 3)
    put(q, task=None, replicas=5)
    fleet.settle(3)
    assert len(services.endpoints(q)) == 6


def test_r29_an_unaligned_number_is_rounded_up_when_it_shrinks(q: Q) -> None:
    fleet = deployment(q, 9, 3)
    put(q, task=None, replicas=4)
    fleet.settle(3)
    assert len(services.endpoints(q)) == 6


def test_r37_a_gang_that_waits_is_given_up_before_one_that_runs(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 1, slots=4)
    put(q, replicas=8, gang=4)
    fleet.settle(2)
    (runs,) = whole(q)
    put(q, task=None, replicas=4)
    fleet.settle(2)
    assert [g["gang_id"] for g in services.gangs(q)] == [runs]
    assert set(whole(q)) == {runs}


def test_r44_a_new_version_replaces_one_whole_gang_at_a_time(q: Q) -> None:
    fleet = deployment(q, 9, 3, version="1")
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.settle(3)
    assert [(g["revision"], g["members"]) for g in services.gangs(q)] == [(1, 3)] * 3 + [(2, 3)]
    assert len(services.endpoints(q)) == 9


def test_r45_a_change_of_configuration_alone_stops_nothing(q: Q) -> None:
    fleet = deployment(q, 4, 2)
    before = set(whole(q))
    put(q, task=None, surge=3, ready_within_s=30)
    fleet.settle(3)
    assert set(whole(q)) == before
    assert services.service(q)["revision"] == 1


def test_r46_gangs_of_a_version_that_was_overtaken_stop_at_once_and_the_first_stay_until_the_third_is_ready(
    q: Q,
) -> None:
    fleet = deployment(q, 4, 2, version="1")
    first = set(whole(q))
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.settle(2)
    put(q, task=None, version="3")
    fleet.settle(3)
    assert [g["revision"] for g in services.gangs(q)] == [1, 1, 3]
    assert set(whole(q)) == first
    fleet.becomes_ready = lambda _: True
    fleet.settle(8)
    assert {g["revision"] for g in services.gangs(q)} == {3}


def test_r47_as_many_gangs_at_a_time_as_its_surge_allows(q: Q) -> None:
    fleet = deployment(q, 20, 2, hosts=6, version="1", surge=2)
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.settle(2)
    assert [g["revision"] for g in services.gangs(q)].count(2) == 2
    assert len(services.endpoints(q)) == 20


def test_r49_a_gang_on_a_node_that_drains_is_replaced_by_one_of_the_new_version(q: Q) -> None:
    fleet = deployment(q, 4, 4, version="1")
    (host,) = {e["host"] for e in services.endpoints(q)}
    drain(q, host)
    put(q, task=None, version="2")
    fleet.settle(6)
    (gang,) = services.gangs(q)
    assert (gang["revision"], gang["serves"]) == (2, True)
    assert host not in gang["hosts"]
