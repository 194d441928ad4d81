"""One frozen client never stalls the fleet: what it holds in an open transaction, the others go around.

Every session but the frozen one has a statement_timeout of one second: whoever waits, fails.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from psycopg.types.json import Jsonb

from interleaving.sessions import Arena, Connection, call, value
from sql import drive


@pytest.fixture
def frozen(meeting: Arena) -> Connection:
    """A client that stops in the middle of its transaction and does not come back before the test ends."""
    return meeting.connect(autocommit=False)


@pytest.fixture
def others(meeting: Arena) -> Connection:
    """Everybody else: waits for nobody."""
    return meeting.connect(statement_timeout="1000")


def tick(conn: Connection) -> dict:
    row = drive.tick(conn)
    assert row["ran"]
    # No step gave up because of a lock.
    assert {step: n for step, n in row["detail"].items() if n < 0} == {}
    return row


def test_a_completion_held_uncommitted_stalls_neither_heartbeats_nor_the_tick_nor_other_claims(
    meeting, frozen, others
):
    me, other, silent = (meeting.worker(name) for name in ("me", "other", "silent"))
    job, token = meeting.running(me)
    lost, _ = meeting.running(silent)
    beat = [Jsonb({"step": 1})]
    call(others, "heartbeat", incarnation=me, job_ids=[job], tokens=[token], beats=beat)

    assert call(frozen, "complete", job_ids=[job], tokens=[token])[0]["outcome"] == "done"

    waiting = meeting.job(after=[lost])
    # Two leases long, the holder's worker is heard and so is another; the silent one must be reaped.
    gang_id = None
    for step in range(1, 9):
        meeting.clock.advance(30)
        answers = call(
            others, "heartbeat", incarnation=me, job_ids=[job], tokens=[token], beats=[Jsonb({"step": step})]
        )
        assert [a["action"] for a in answers] == ["continue"]
        call(others, "heartbeat", incarnation=other)
        tick(others)
        if step == 6:
            assert meeting.state(lost) == "pending"
            (claimed,) = call(others, "claim", incarnation=other)
            assert claimed["job_id"] == lost
            call(others, "complete", job_ids=[lost], tokens=[claimed["token"]])
            (row,) = call(others, "submit_gang", task="t", size=1)
            gang_id = row["gang_id"]
    assert meeting.state(waiting) == "pending"
    assert meeting.gang_row(gang_id)["state"] in ("reserved", "blocked")
    assert meeting.gang_row(gang_id)["epoch"] >= 1
    frozen.commit()
    assert meeting.state(job) == "done"
    assert meeting.violations() == []


def test_a_completion_of_a_member_held_uncommitted_stalls_no_other_gang(meeting, frozen, others):
    one, two, three = (meeting.worker(name) for name in ("w1", "w2", "w3"))
    gang_id, (m0, m1), (t0, _) = meeting.running_gang([one, two])
    call(frozen, "complete", job_ids=[m0], tokens=[t0])
    other_gang, _ = meeting.gang(1)
    for _ in range(5):
        meeting.clock.advance(28)
        call(others, "heartbeat", incarnation=one, job_ids=[m0], tokens=[t0])
        call(others, "heartbeat", incarnation=three)
        tick(others)  # the second worker's lease ends on the way: its member is stepped over
    assert meeting.gang_row(other_gang)["epoch"] >= 1
    frozen.rollback()
    meeting.tick()
    assert meeting.gang_row(gang_id)["state"] == "draining"
    assert meeting.state(m1) == "preempted"
    assert meeting.violations() == []


def test_a_submit_of_a_shape_never_seen_before_held_uncommitted_stalls_no_other_submit(
    meeting, frozen, others
):
    worker = meeting.worker("w1")
    value(frozen, "submit", task="never seen", memory_mb=0, cpus=0)
    assert value(others, "submit", task="never seen")
    call(frozen, "submit_gang", task="never seen either", size=2, wait_for_hardware=True)
    assert call(others, "submit_gang", task="never seen either", size=1)
    call(others, "heartbeat", incarnation=worker)
    tick(others)
    assert call(others, "claim", incarnation=worker)
    frozen.commit()
    assert meeting.violations() == []


@pytest.mark.parametrize("hold", ["lock of a member", "checkpoint of a member"])
def test_a_member_held_by_a_frozen_client_does_not_stop_the_tick(meeting, frozen, others, hold):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, (m0,), (t0,) = meeting.running_gang([one])
    call(frozen, "heartbeat", incarnation=two)
    frozen.commit()
    if hold == "lock of a member":
        frozen.execute("select from gangq.live_jobs where id = %s for key share", (m0,))
    else:
        value(frozen, "save_checkpoint", job_id=m0, token=t0, step=1, data=b"x")
    meeting.clock.advance(121)
    call(others, "heartbeat", incarnation=two)
    other_gang, _ = meeting.gang(1)
    tick(others)
    assert meeting.gang_row(other_gang)["epoch"] == 1
    frozen.rollback()
    meeting.tick()
    assert meeting.gang_row(gang_id)["state"] in ("blocked", "reserved")
    assert meeting.violations() == []


def test_a_job_held_by_a_frozen_client_keeps_no_other_with_its_dead_worker(meeting, frozen, others):
    held, _ = meeting.running(meeting.worker("w1"))
    free, _ = meeting.running(meeting.worker("w2"))
    frozen.execute("select from gangq.live_jobs where id = %s for update", (held,))
    meeting.clock.advance(121)
    tick(others)
    assert (meeting.state(held), meeting.state(free)) == ("running", "pending")
    frozen.rollback()
    meeting.tick()
    assert meeting.state(held) == "pending"
    assert meeting.violations() == []


ROLE = {"name": "a", "count": 1, "prefer": "rack"}
LEVELS = {"task": "t", "size": 2, "require": "rack", "wait_for_hardware": True}
SUBMISSIONS: dict[str, Callable[[Connection, int], object]] = {
    "single": lambda conn, _: call(
        conn, "submit", task="t", labels={"never": "seen"}, wait_for_hardware=True
    ),
    "batch": lambda conn, _: call(conn, "submit", task="t", payloads=[Jsonb({})] * 3, name="b"),
    "limited": lambda conn, _: call(conn, "submit", task="t", limit_key="known", limit=2),
    "unique": lambda conn, _: call(conn, "submit_unique", unique_key="k", task="t"),
    "gang": lambda conn, _: call(conn, "submit_gang", task="t", size=2, limit_key="known"),
    "gang with levels": lambda conn, _: call(conn, "submit_gang", **LEVELS),
    "gang with roles": lambda conn, _: call(
        conn, "submit_gang", task="t", roles=[ROLE], wait_for_hardware=True
    ),
    "retried gang": lambda conn, ended: call(conn, "retry", gang_ids=[ended]),
}


@pytest.mark.parametrize("what", SUBMISSIONS)
def test_a_submission_held_uncommitted_stalls_no_setting_and_no_other_submission(
    meeting, frozen, others, what
):
    call(meeting.db, "configure", topology=["rack", "host"])
    call(meeting.db, "set_limit", key="known", most=2)
    worker = meeting.worker("w1", slots=4, light=2, labels={"rack": "r1"})
    ended, _ = meeting.gang(1, require="rack")
    call(meeting.db, "cancel", gang_ids=[ended])
    SUBMISSIONS[what](frozen, ended)

    for name, submit in SUBMISSIONS.items():
        if name != what or name not in ("unique", "retried gang"):
            submit(others, ended)
    call(others, "configure", grace_s=14)
    call(others, "configure", topology=["host", "rack", "zone"])
    call(others, "set_queue", name="default", max_attempts=4, policy="fair", maximum={"jobs": 99})
    call(others, "set_task", task="t", budget_s=100)
    call(others, "set_limit", key="known", most=3)
    call(others, "pause_task", task="t")
    call(others, "resume_task", task="t")
    call(others, "set_schedule", name="s", cron="0 3 * * *", task="t")
    call(others, "declare_schedules", source="here", names=["s"])
    call(others, "set_service", name="v", task="t", replicas=1)
    call(others, "declare_services", source="here", names=["v"])
    call(others, "register_worker", name="w2", host="h", queues=["default"], task_options={"t": {"cpus": 1}})
    call(others, "quarantine", worker="w1")
    call(others, "unquarantine", worker="w1")
    call(others, "heartbeat", incarnation=worker)
    tick(others)
    assert call(others, "claim", incarnation=worker)
    frozen.commit()
    assert meeting.violations() == []


@pytest.mark.parametrize("what", ["gang with levels", "gang with roles", "retried gang"])
def test_only_taking_a_topology_level_away_waits_for_a_submission_that_asks_for_it(
    meeting, frozen, others, what
):
    call(meeting.db, "configure", topology=["rack", "host"])
    ended, _ = meeting.gang(1, require="rack", wait_for_hardware=True)
    call(meeting.db, "cancel", gang_ids=[ended])
    SUBMISSIONS[what](frozen, ended)
    call(others, "configure", grace_s=14)  # a newer row of the settings, still locked
    with pytest.raises(psycopg.errors.QueryCanceled):
        call(others, "configure", topology=["host"])
    frozen.rollback()
    call(frozen, "configure", topology=["host"])
    with pytest.raises(psycopg.errors.QueryCanceled):
        SUBMISSIONS[what](others, ended)
    frozen.commit()
    with drive.refused(drive.INVALID, "topology level 'rack'"):
        SUBMISSIONS[what](others, ended)


def test_only_who_names_the_same_new_limit_key_waits_for_the_submission_that_makes_it(
    meeting, frozen, others
):
    call(frozen, "submit", task="t", limit_key="new", limit=2)
    call(others, "submit", task="t", limit_key="another", limit=2)
    call(others, "submit", task="t")
    with pytest.raises(psycopg.errors.QueryCanceled):
        call(others, "submit", task="t", limit_key="new", limit=2)
    frozen.commit()
    call(others, "submit", task="t", limit_key="new", limit=2)
    assert meeting.violations() == []


@pytest.mark.parametrize("stage", ["blocked", "late", "drained"])
def test_a_member_held_by_a_frozen_client_does_not_stop_the_tick_at_any_stage_of_its_gang(
    meeting, frozen, others, stage
):
    one = meeting.worker("w1")
    gang_id, (m0,) = meeting.gang(1)
    if stage != "blocked":
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[one])
    if stage == "drained":
        assert meeting.claim(one)
        value(meeting.db, "preempt_gang", gang_id=gang_id)
    frozen.execute("select from gangq.live_jobs where id = %s for key share", (m0,))
    if stage == "late":
        meeting.clock.advance(31)
    if stage == "drained":
        meeting.clock.advance(121)
    two = meeting.worker("w2")
    other_gang, _ = meeting.gang(1, priority=-1)
    tick(others)
    assert meeting.gang_row(other_gang)["epoch"] == 1, two
    frozen.rollback()
    meeting.tick()
    assert meeting.violations() == []


def test_a_pass_goes_past_gangs_that_a_frozen_client_holds(meeting, frozen, others):
    meeting.worker("w1")
    meeting.worker("w2")
    _, (held,) = meeting.gang(1)
    frozen.execute("select from gangq.live_jobs where id = %s for key share", (held,))
    others_gang, _ = meeting.gang(1, priority=-1)
    assert drive.place(others) == {"placed": 1, "again": True}
    assert meeting.gang_row(others_gang)["state"] == "reserved"
    frozen.rollback()
    assert drive.place(others) == {"placed": 1, "again": False}
    assert meeting.violations() == []


def test_a_cancelled_gang_held_uncommitted_does_not_stop_the_tick_that_had_kept_workers_for_it(
    meeting, frozen, others
):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker, **drive.PLACED)
    gang_id, _ = meeting.gang(1)
    meeting.tick()
    planned = meeting.db.execute("select ask from gangq.plans").fetchall()
    assert planned == [{"ask": f"g{gang_id}"}]
    call(frozen, "cancel", gang_ids=[gang_id])
    call(others, "complete", job_ids=[job], tokens=[token])
    tick(others)
    frozen.rollback()
    meeting.tick()
    assert meeting.gang_row(gang_id)["state"] == "reserved"
    assert meeting.violations() == []


@pytest.mark.parametrize("kind", ["solo", "gang"])
def test_a_waiting_job_whose_other_awaited_job_is_being_completed_does_not_stop_the_tick(
    meeting, frozen, others, kind
):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    held, held_token = meeting.running(one)
    failed, failed_token = meeting.running(two)
    after = [held, failed]
    waiting = meeting.job(after=after) if kind == "solo" else meeting.gang(2, after=after)[1][0]
    call(frozen, "complete", job_ids=[held], tokens=[held_token])
    value(others, "fail", job_id=failed, token=failed_token, retryable=False)
    due = meeting.gang(1)[0]
    tick(others)
    assert meeting.gang_row(due)["state"] == "reserved"
    frozen.commit()
    meeting.tick()
    assert meeting.state(waiting) == "cancelled"
    assert meeting.violations() == []


def test_a_gang_of_which_one_member_is_being_told_is_cancelled_as_a_whole_later(meeting, frozen, others):
    job, token = meeting.running(meeting.worker("w1"))
    meeting.worker("w2")
    gang_id, (_, told) = meeting.gang(2, after=[job])
    value(others, "fail", job_id=job, token=token, retryable=False)
    frozen.execute("select from gangq.dependencies where job_id = %s for update", (told,))
    tick(others)
    assert meeting.gang_row(gang_id)["state"] == "waiting"
    frozen.commit()
    meeting.tick()
    assert meeting.state(told) == "cancelled"
    assert meeting.violations() == []


def test_a_set_priority_held_uncommitted_on_a_blocked_gang_does_not_stop_the_tick(meeting, frozen, others):
    meeting.worker("w1")
    meeting.worker("w2")
    held, _ = meeting.gang(1)
    free, _ = meeting.gang(1)
    call(frozen, "set_priority", priority=5, gang_ids=[held])
    assert tick(others)["again"]
    assert meeting.gang_row(free)["state"] == "reserved"
    frozen.commit()
    meeting.tick()
    assert meeting.gang_row(held)["state"] == "reserved"


def test_an_uncommitted_claim_stalls_neither_its_own_heartbeat_nor_the_tick(meeting, frozen, others):
    worker = meeting.worker("w1")
    lost_worker = meeting.worker("w2")
    lost, _ = meeting.running(lost_worker)
    meeting.job()
    (claimed,) = call(frozen, "claim", incarnation=worker)
    for _ in range(3):
        meeting.clock.advance(41)
        call(others, "heartbeat", incarnation=worker)
        tick(others)
    assert meeting.state(lost) == "pending"
    frozen.rollback()
    assert meeting.state(claimed["job_id"]) == "pending"
    assert meeting.violations() == []


@pytest.mark.parametrize("how", ["reaped", "retired", "draining"])
def test_a_submission_held_uncommitted_that_wakes_a_worker_does_not_keep_it_from_being_ended(
    meeting, frozen, others, how
):
    worker = meeting.worker("w1")
    call(others, "claim", incarnation=worker, sleep=True)
    call(frozen, "submit", task="t", wake="sleepers")
    if how == "reaped":
        meeting.clock.advance(1000)
        tick(others)
        meeting.clock.advance(1000)
        tick(others)
    else:
        value(others, "retire_worker", incarnation=worker, final=how == "retired")
    (row,) = meeting.db.execute("select state from gangq.incarnations").fetchall()
    assert row["state"] == {"reaped": "dead"}.get(how, how)


def test_a_gang_that_waited_is_let_go_as_a_whole_however_small_the_bite(meeting):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    gang_id, members = meeting.gang(3, after=[job], wait_for_hardware=True)
    call(meeting.db, "complete", job_ids=[job], tokens=[token])
    assert value(meeting.db, "promote_due", most=1) == 3
    assert {meeting.state(m) for m in members} == {"blocked"}
    assert meeting.gang_row(gang_id)["state"] == "blocked"
    assert meeting.violations() == []


def test_waiting_jobs_that_a_frozen_client_holds_do_not_keep_the_others_waiting(meeting, frozen, others):
    job, token = meeting.running(meeting.worker("w1"))
    held = [
        row["submit"] for row in call(meeting.db, "submit", task="t", payloads=[Jsonb({})] * 250, after=[job])
    ]
    free = meeting.job(after=[job])
    call(frozen, "set_priority", priority=5, job_ids=held)
    call(others, "complete", job_ids=[job], tokens=[token])
    for _ in range(20):
        tick(others)
    assert meeting.state(free) == "pending"
    frozen.commit()
    for _ in range(2):
        meeting.tick()
    assert {meeting.state(one) for one in held} == {"pending"}
