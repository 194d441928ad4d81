"""Placement timeouts: a gang that could have had a place and got none is requeued, failed, or split.

Time in which its kind was not eligible, as passes found it, does not count.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sql.drive import PLACED, Gang, Q, Worker

GATES: dict[str, dict[str, Any]] = {
    "paused": {"paused": True},
    "quota": {"maximum": {"jobs": 0}},
    "running_limit": {"max_running_gangs": 0},
    "submitter_limit": {"submitter_maximum": {"gangs": 0}},
}


def shut(q: Q, gate: str) -> None:
    """The queue starts nothing any more, and a pass finds it so."""
    q.call("set_queue", name="default", **GATES[gate])
    q.tick()
    assert q.value("select array_agg(distinct gate) from gangq.verdicts") == [gate]


def open_again(q: Q) -> None:
    """The queue may start what it has, and a pass finds it so."""
    limits = {"maximum": None, "max_running_gangs": None, "submitter_maximum": None}
    q.call("set_queue", name="default", paused=False, **limits)
    q.tick()
    assert not set(GATES) & set(q.value("select array_agg(gate) from gangq.verdicts"))


def gate_of(q: Q, gang: Gang) -> Any:
    """What the last pass found for gangs of this kind; None: no pass has looked."""
    rows = q.sql("select gate from gangq.verdicts where kind_id = %(kind)s", kind=gang.live["kind_id"])
    return rows[0]["gate"] if rows else None


def busy_worker(q: Q, budget_s: float) -> Worker:
    """A worker whose only slot is taken for that long, so that a gang of one can have a planned start."""
    worker = q.worker(lease_s=1e5)
    q.submit(budget_s=budget_s, **PLACED)
    worker.take()
    return worker


def gang_of(
    q: Q, size: int | None = 2, style: str = "requeue", timeout_s: float = 100, **options: Any
) -> Gang:
    """A gang that nothing here can hold: nobody serves its queue."""
    gang = q.submit_gang(size, **options)
    with_timeout(q, gang, style, timeout_s)
    return gang


def with_timeout(q: Q, gang: Gang, style: str, timeout_s: float) -> None:
    q.sql(
        "update gangq.live_gangs set timeout_style = %(style)s, timeout_s = %(s)s, "
        "timeout_at = greatest(gangq.now(), not_before) + make_interval(secs => %(s)s) where id = %(id)s",
        style=style,
        s=timeout_s,
        id=gang.id,
    )


def pass_by(q: Q, seconds: float, *workers: Worker) -> None:
    """Let so much time pass, in which these workers are not silent, and look."""
    q.later(seconds)
    for worker in workers:
        worker.beat()
    q.tick()


def ended_within(q: Q, gang: Gang, seconds: float) -> bool:
    """Whether a hard timeout strikes in this time; it must not have before."""
    assert gang.state != "failed"
    pass_by(q, seconds)
    return gang.state == "failed"


# Styles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_by", ["nobody serves it", "a planned start", "no planned starts"])
def test_a_gang_that_merely_waits_for_its_turn_waits_on_and_is_told_nothing(q: Q, held_by: str) -> None:
    workers = [] if held_by == "nobody serves it" else [busy_worker(q, 5000)]
    if held_by == "no planned starts":
        q.call("configure", reservations=0)
    gang = gang_of(q, 1)
    q.tick()
    assert gate_of(q, gang) == ("room" if workers else "workers")
    for _ in range(3):
        pass_by(q, 101, *workers)
        assert (gang.state, gang.live["timeouts"], gang.live["not_before"]) == ("blocked", 0, None)
        assert gang.live["timeout_at"] == q.clock.now() + timedelta(seconds=100)
    assert q.events("timeout") == []


def test_a_gang_that_no_pass_has_looked_at_waits_on(q: Q) -> None:
    gang = gang_of(q)
    q.later(101)
    assert q.one("time_out") == 1
    assert (gang.live["timeouts"], gate_of(q, gang)) == (0, None)
    assert gang.live["timeout_at"] == q.clock.now() + timedelta(seconds=100)


def test_a_gang_whose_planned_start_is_overdue_gives_its_place_back_and_backs_off(q: Q) -> None:
    worker = busy_worker(q, 50)
    gang = gang_of(q, 1)
    q.tick()
    assert [row["incarnation"] for row in q.planned_seats()] == [worker.incarnation]
    q.later(99)
    assert q.one("time_out") == 0
    q.later(1)
    assert q.one("time_out") == 1
    live = gang.live
    backoff = (live["not_before"] - q.clock.now()).total_seconds()
    assert (live["timeouts"], live["state"]) == (1, "blocked")
    assert 0 < backoff <= q.value("select gang_backoff_s from gangq.settings")
    assert live["timeout_at"] == live["not_before"] + timedelta(seconds=100)
    assert q.sql("select * from gangq.plans") == []
    (event,) = q.events("timeout", gang_id=gang.id)
    said = (
        "not placed within 100 s: there is room for 0 of its 1 member; for one more the nearest worker, w1, "
    )
    assert event["reason"].startswith(f"{said}has 0 of 1 slot free (held by ")
    assert (event["data"]["style"], event["data"]["timeouts"]) == ("requeue", 1)
    assert event["data"]["gate"] == "room"


def test_a_gang_whose_planned_start_has_come_starts_though_its_timeout_is_due_in_the_same_tick(q: Q) -> None:
    worker = q.worker(lease_s=1e5)
    runs = q.submit_gang(1, budget_s=900)
    planned = q.submit_gang(1, budget_s=900)
    behind = q.submit_gang(1, budget_s=50_000)
    (claim,) = runs.start(worker)
    q.tick()
    assert q.sql("select ask from gangq.plans order by place")[0]["ask"] == f"g{planned.id}"
    q.later(900.5)
    worker.beat(claim)
    claim.complete()
    q.tick()
    assert (runs.state, planned.state, behind.state) == ("done", "reserved", "blocked")
    assert q.events("timeout", gang_id=planned.id) == []


def test_a_gang_nothing_known_could_hold_backs_off_longer_each_time(q: Q) -> None:
    q.worker(lease_s=1e5)
    gang = gang_of(q, wait_for_hardware=True)
    q.tick()
    assert gate_of(q, gang) == "infeasible"
    base = q.value("select gang_backoff_s from gangq.settings")
    for nth in range(1, 5):
        pass_by(q, (gang.live["timeout_at"] - q.clock.now()).total_seconds())
        backoff = (gang.live["not_before"] - q.clock.now()).total_seconds()
        assert gang.live["timeouts"] == nth
        assert base * 2 ** (nth - 1) / 2 <= backoff <= base * 2 ** (nth - 1)
    assert len(q.events("timeout")) == 4


def test_a_hard_timeout_fails_the_gang_with_the_numbers_of_what_there_is(q: Q) -> None:
    q.worker(lease_s=1e5)
    gang = gang_of(q, style="hard", wait_for_hardware=True)
    pass_by(q, 99)
    assert gang.state == "blocked"
    pass_by(q, 1)
    assert gang.state == "failed"
    reason = "not placed within 100 s: the 1 worker of queue default could hold 1 of 2 members even when idle"
    assert gang.row["reason"].startswith(reason)
    assert gang.states == ["failed", "failed"]
    assert {m["error"]["message"] for m in gang.members} == {gang.row["reason"]}
    assert [(e["data"]["style"], e["data"]["gate"]) for e in q.events("timeout")] == [("hard", "infeasible")]


def test_a_hard_timeout_where_all_is_taken_says_so(q: Q) -> None:
    busy_worker(q, 5000)
    q.call("configure", reservations=0)
    gang = gang_of(q, 1, style="hard")
    q.tick()
    pass_by(q, 100)
    assert gang.row["reason"] == "not placed within 100 s: the workers that serve it take no new work now: w1"


def test_a_hard_timeout_needs_no_pass_before_it(q: Q) -> None:
    q.worker(slots=2)
    gang = gang_of(q, style="hard")
    q.later(100)
    assert q.one("time_out") == 1
    assert gang.row["reason"] == "not placed within 100 s"


def test_gangs_of_several_kinds_that_time_out_together_each_get_their_own_reason(q: Q) -> None:
    q.worker(slots=2)
    large, small = gang_of(q, 3, "hard", wait_for_hardware=True), gang_of(q, 2, "hard")
    q.later(100)
    assert q.one("time_out") == 2
    assert "could hold 2 of 3 members" in large.row["reason"]
    assert small.row["reason"] == "not placed within 100 s"


def test_a_soft_timeout_makes_single_jobs_of_the_members_with_their_ids_and_payloads(q: Q) -> None:
    gang = gang_of(q, 3, "soft", payloads=[{"n": n} for n in range(3)], priority=4)
    key = gang.live["order_key"]
    pass_by(q, 100)
    assert (gang.state, gang.members) == ("cancelled", [])
    reason = "not placed within 100 s: no registered worker serves queue default with task train"
    assert gang.row["reason"] == f"{reason}; its members run as single jobs"
    (split,) = q.events("split")
    assert (split["gang_id"], split["reason"], split["data"]["job_ids"]) == (gang.id, reason, gang.job_ids)
    jobs = [q.job(i) for i in gang.job_ids]
    assert [(j["state"], j["gang_id"], j["rank"], j["payload"]) for j in jobs] == [
        ("pending", None, None, {"n": n}) for n in range(3)
    ]
    keys = [row["order_key"] for row in q.sql("select order_key from gangq.live_jobs order by id")]
    assert keys == sorted(set(keys))
    assert keys[0] == key
    worker = q.worker(slots=3)
    claims = worker.claim()
    assert [c.job_id for c in claims] == gang.job_ids
    for claim in claims:
        assert (claim["gang_id"], claim["world_size"]) == (None, None)
        assert claim.complete() == "done"


def test_single_jobs_of_two_shapes_are_all_found_by_one_claim(q: Q) -> None:
    """Their places must differ: a claim that merges shapes by place would never get past two equal ones."""
    roles = [{"name": "one", "count": 2}, {"name": "other", "count": 2, "task": "other"}]
    gang = gang_of(q, None, "soft", roles=roles)
    pass_by(q, 100)
    claims = q.worker(slots=4).claim()
    assert [c.job_id for c in claims] == gang.job_ids


def test_what_waits_for_a_member_goes_on_waiting_for_the_job(q: Q) -> None:
    gang = gang_of(q, 2, "soft")
    after = q.submit(after=gang.job_ids)
    lost = q.submit(after=[gang.job_ids[1]])
    pass_by(q, 100)
    worker = q.worker(slots=2)
    first, second = worker.claim()
    first.complete()
    q.settle()
    assert [q.state(after), q.state(lost)] == ["waiting", "waiting"]
    second.complete()
    q.settle()
    assert [q.state(after), q.state(lost)] == ["pending", "pending"]


def test_a_job_split_from_its_gang_goes_on_from_the_last_step_that_all_had_saved(q: Q) -> None:
    w1, w2 = q.workers(2)
    gang = q.submit_gang(2)
    for claim, steps in zip(gang.start(w1, w2), ([5, 9], [5]), strict=True):
        for step in steps:
            claim.save(step)
    q.call("preempt_gang", gang_id=gang.id)
    for row in q.sql("select id, token from gangq.live_jobs order by id"):
        q.call("ack_preempted", job_id=row["id"], token=row["token"])
    with_timeout(q, gang, "soft", 100)
    for worker in (w1, w2):
        q.call("cordon", worker=worker.name)
    q.live_on(100, w1, w2)
    assert gang.state == "cancelled"
    q.call("uncordon", worker="w1")
    claim = w1.take()
    assert (claim["checkpoint_step"], claim.load()) == (5, (5, b"state"))
    assert q.value("select count(*) from gangq.checkpoints") == 2
    assert claim["attempt"] == 1


def test_a_gang_that_was_split_is_not_retried_under_its_id(q: Q) -> None:
    gang = gang_of(q, 2, "soft")
    pass_by(q, 100)
    with pytest.raises(Exception, match="no longer has every member"):
        q.call("retry", gang_ids=[gang.id])


# From when, and what does not count -------------------------------------------------------------------------


def test_the_wait_begins_when_the_gang_is_due_and_when_what_it_waits_for_is_done(q: Q) -> None:
    worker = q.worker(queues=["default"])
    first = q.submit()
    at = q.clock.now() + timedelta(seconds=500)
    due = gang_of(q, style="hard", due_at=at, wait_for_hardware=True)
    after = gang_of(q, style="hard", after=[first], wait_for_hardware=True)
    claim = worker.take()
    q.live_on(400, worker)
    assert (due.state, after.state) == ("blocked", "waiting")
    claim.complete()
    q.tick()
    assert after.state == "blocked"
    q.live_on(90, worker)
    assert after.state == "blocked"
    q.live_on(20, worker)
    assert (due.state, after.state) == ("blocked", "failed")
    q.live_on(80, worker)
    assert due.state == "blocked"
    q.live_on(20, worker)
    assert due.state == "failed"


def test_what_it_ran_does_not_count_and_it_waits_anew_after_a_drain(q: Q) -> None:
    w1, w2 = q.workers(2)
    gang = q.submit_gang(2)
    with_timeout(q, gang, "hard", 100)
    q.live_on(60, w1, w2, tick=False)
    claims = gang.start(w1, w2)
    q.live_on(500, w1, w2)
    q.call("preempt_gang", gang_id=gang.id)
    for claim in claims:
        claim.ack()
    assert gang.live["timeout_at"] == q.clock.now() + timedelta(seconds=100)


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_place_that_is_not_claimed_does_not_end_the_wait_nor_does_backing_off_count(
    q: Q, claimed: int
) -> None:
    w1, w2 = q.workers(2)
    gang = q.submit_gang(2)
    with_timeout(q, gang, "hard", 100)
    q.live_on(10, w1, w2, tick=False)
    q.tick()
    assert gang.state == "reserved"
    claims = w1.claim() if claimed else []
    q.live_on(40, w1, w2)
    for claim in claims:
        claim.ack()
    live = gang.live
    assert live["state"] == "blocked"
    backoff = (
        live["not_before"]
        - q.sql("select max(at) as at from gangq.events where kind in ('rollback', 'drained')")[0]["at"]
    )
    assert live["timeout_at"] == gang.row["submitted_at"] + timedelta(seconds=100) + backoff


def test_pauses_before_and_after_a_place_that_was_not_claimed_do_not_count(q: Q) -> None:
    worker = q.worker()
    q.call("set_queue", name="default", paused=True)
    gang = q.submit_gang(1, timeout_s=60, timeout_style="hard", claim_deadline_s=20)
    q.live_on(300, worker)
    q.call("set_queue", name="default", paused=False)
    q.tick()
    assert gang.state == "reserved"
    q.live_on(30, worker)
    assert gang.state == "blocked"
    q.call("set_queue", name="default", paused=True)
    q.live_on(250, worker)
    q.call("set_queue", name="default", paused=False)
    q.tick()
    assert gang.state == "reserved"


def test_a_gang_whose_places_are_never_claimed_times_out(q: Q) -> None:
    worker = q.worker()
    gang = q.submit_gang(1, timeout_s=60, timeout_style="hard", claim_deadline_s=20)
    q.live_on(400, worker)
    assert gang.state == "failed"
    assert gang.row["reason"].startswith("not placed within 60 s (")
    assert "(1 time its places were not claimed in time)" in gang.row["reason"]


@pytest.mark.parametrize("gate", ["paused", "quota", "running_limit", "submitter_limit"])
def test_time_in_which_it_was_not_eligible_does_not_count(q: Q, gate: str) -> None:
    gang = gang_of(q, style="hard")
    q.tick()
    assert not ended_within(q, gang, 60)
    shut(q, gate)
    for _ in range(5):
        assert not ended_within(q, gang, 1000)
    open_again(q)
    assert not ended_within(q, gang, 39)
    assert ended_within(q, gang, 1)


def test_a_pause_that_ends_between_two_looks_counts_for_as_long_as_it_lasted(q: Q) -> None:
    gang = gang_of(q, style="hard")
    for seconds in (30, 20):
        shut(q, "paused")
        q.later(seconds)
        open_again(q)
        q.later(10)
    assert not ended_within(q, gang, 79)
    assert ended_within(q, gang, 1)


@pytest.mark.parametrize("gate", GATES)
def test_a_clock_set_back_takes_nothing_from_the_time_it_was_held(q: Q, gate: str) -> None:
    q.submit_gang(1)
    held = f"select array_agg((waited ->> '{gate}')::float8) from gangq.verdicts"
    shut(q, gate)
    q.later(100)
    open_again(q)
    assert q.value(held) == [100]
    shut(q, gate)
    q.later(-3600)
    open_again(q)
    assert q.value(held) == [100]


def test_a_pause_that_began_before_it_was_submitted_counts_from_then_only(q: Q) -> None:
    """And one that was over by then not at all, though the verdict of its kind remembers both."""
    first = gang_of(q)
    shut(q, "quota")
    q.later(700)
    open_again(q)
    q.later(50)
    shut(q, "paused")
    q.later(900)
    gang = gang_of(q, style="hard")
    assert gang.live["kind_id"] == first.live["kind_id"]
    q.later(30)
    open_again(q)
    assert not ended_within(q, gang, 99)
    assert ended_within(q, gang, 1)


def test_a_pause_while_it_ran_does_not_lengthen_its_next_wait(q: Q) -> None:
    w1, w2 = q.workers(2)
    gang = q.submit_gang(2)
    with_timeout(q, gang, "hard", 100)
    claims = gang.start(w1, w2)
    assert gang_of(q).live["kind_id"] == gang.live["kind_id"]
    shut(q, "paused")
    q.live_on(300, w1, w2)
    open_again(q)
    q.call("preempt_gang", gang_id=gang.id)
    for claim in claims:
        claim.ack()
    for worker in ("w1", "w2"):
        q.call("cordon", worker=worker)
    assert not ended_within(q, gang, 99)
    assert ended_within(q, gang, 1)


def test_a_pause_before_it_was_due_lengthens_its_wait_by_one_timeout_at_most(q: Q) -> None:
    gang = gang_of(q, style="hard", due_at=q.clock.now() + timedelta(seconds=5000))
    assert gang_of(q).live["kind_id"] == gang.live["kind_id"]
    shut(q, "paused")
    q.later(5000)
    open_again(q)
    assert not ended_within(q, gang, 100)
    assert ended_within(q, gang, 100)


def assert_it_ends_in_100_s_as_a_gang_like(q: Q, gang: Gang, other: Gang) -> None:
    """The gang is of the other's kind from now on, and its queue is open."""
    q.sql(
        "update gangq.live_gangs set kind_id = %(kind)s where id = %(id)s",
        kind=other.live["kind_id"],
        id=gang.id,
    )
    open_again(q)
    assert not ended_within(q, gang, 99)
    assert ended_within(q, gang, 1)


def test_a_gang_whose_kind_changes_keeps_what_it_has_waited(q: Q) -> None:
    other = gang_of(q, memory_mb=1)
    shut(q, "paused")
    q.later(5000)
    gang = gang_of(q, style="hard")
    q.tick()
    pass_by(q, 40)
    assert_it_ends_in_100_s_as_a_gang_like(q, gang, other)


def test_a_pause_before_it_was_due_does_not_lengthen_its_wait_where_its_kind_changes(q: Q) -> None:
    other = gang_of(q, memory_mb=1)
    gang = gang_of(q, style="hard", due_at=q.clock.now() + timedelta(seconds=5000))
    assert gang_of(q).live["kind_id"] == gang.live["kind_id"]
    shut(q, "paused")
    q.later(5000)
    assert_it_ends_in_100_s_as_a_gang_like(q, gang, other)


# The step ---------------------------------------------------------------------------------------------------


def test_a_step_is_bounded_and_the_tick_says_that_there_is_more(q: Q) -> None:
    gangs = [gang_of(q, 1, "hard") for _ in range(5)]
    q.later(100)
    assert [q.one("time_out", most=2) for _ in range(4)] == [2, 2, 1, 0]
    assert {gang.state for gang in gangs} == {"failed"}


def test_gangs_of_a_paused_queue_are_not_looked_at_and_nobody_is_hidden_behind_them(q: Q) -> None:
    q.call("set_queue", name="open")
    held = [gang_of(q, 1, "hard") for _ in range(3)]
    shut(q, "paused")
    other = gang_of(q, 2, "hard", queue="open")
    q.later(100)
    assert q.one("time_out", most=1) == 1
    assert other.state == "failed"
    assert q.one("time_out", most=1) == 0
    assert {gang.state for gang in held} == {"blocked"}


def test_a_gang_somebody_holds_is_left_for_the_next_tick(q: Q, dsn: str) -> None:
    held, free = gang_of(q, 1, "soft"), gang_of(q, 1, "soft")
    q.later(100)
    with q.connected(dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.live_gangs where id = %(id)s for update", id=held.id)
        assert q.one("time_out") == 1
        assert (held.state, free.state) == ("blocked", "cancelled")
    assert q.one("time_out") == 1
    assert held.state == "cancelled"


def test_a_plan_that_another_session_holds_delays_its_own_gang_only(q: Q, dsn: str) -> None:
    busy_worker(q, 5000)
    held, free = gang_of(q, 1, "hard"), gang_of(q, 1, "hard")
    q.tick()
    assert [row["ask"] for row in q.sql("select ask from gangq.plans order by place")] == [
        f"g{held.id}",
        f"g{free.id}",
    ]
    q.later(100)
    with q.connected(dsn) as other, other.db.transaction():
        other.sql("update gangq.plans set pass = pass where ask = %(ask)s", ask=f"g{held.id}")
        assert q.one("time_out") == 1
        assert (held.state, free.state) == ("blocked", "failed")
    assert q.one("time_out") == 1
    assert held.state == "failed"
