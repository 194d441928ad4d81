"""Each pair of verbs that can collide, in both orders, and with the first one committed or rolled back.

Where the second waits it must act on what the first left; where it steps aside (skip locked) it must change
nothing, and a repetition must finish the work.
"""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

from interleaving.sessions import Arena, Later, Verb, both_ends, call, first_of_two, meet, value, verb
from sql.drive import PLACED, place


def claim(incarnation: int, **arguments: Any) -> Verb:
    return lambda conn: call(conn, "claim", incarnation=incarnation, **arguments)


def complete(*pairs: tuple[int, int]) -> Verb:
    return lambda conn: call(conn, "complete", job_ids=[p[0] for p in pairs], tokens=[p[1] for p in pairs])


# Claims -----------------------------------------------------------------------------------------------------


@first_of_two
@both_ends
def test_a_claim_and_a_rollback_of_the_same_gang_never_both_happen(meeting, turn, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, _ = meeting.gang(2)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[one, two])
    met, claimed, rolled_back = meet(meeting, claim(one), verb("rollback_gang", gang_id=gang_id), turn, end)
    assert met.later.waited
    if turn == 0:
        assert len(claimed) == 1
        assert rolled_back is (end == "rollback")
    else:
        assert rolled_back is True
        assert len(claimed) == (end == "rollback")
    kept = claimed != [] and (turn == 1 or end == "commit")
    assert meeting.gang_row(gang_id)["state"] == ("reserved" if kept else "blocked")


@first_of_two
@both_ends
def test_a_claim_and_a_preemption_of_the_same_gang_leave_no_member_running_alone(meeting, turn, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, members = meeting.gang(2)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[one, two])
    met, claimed, preempted = meet(meeting, claim(one), verb("preempt_gang", gang_id=gang_id), turn, end)
    assert met.later.waited
    assert preempted is True
    if turn == 0 and end == "commit":
        # It had been claimed: told to stop, and the gang is blocked again once it says that it has.
        (mine,) = claimed
        assert meeting.state(mine["job_id"]) == "preempting"
        assert meeting.gang_row(gang_id)["state"] == "draining"
        assert value(meeting.db, "ack_preempted", job_id=mine["job_id"], token=mine["token"]) == "preempted"
    elif turn == 1 and end == "rollback":
        assert len(claimed) == 1
        assert meeting.gang_row(gang_id)["state"] == "reserved"
        return
    else:
        assert len(claimed) == (1 if turn == 0 else 0)
    assert meeting.gang_row(gang_id)["state"] == "blocked"
    assert {meeting.row(m)["attempts"] for m in members} == {0}


@first_of_two
@both_ends
def test_two_workers_never_claim_the_same_job_and_neither_waits(meeting, turn, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    jobs = [meeting.job(), meeting.job()]
    met, first, second = meet(meeting, claim(one), claim(two), turn, end)
    assert not met.later.waited
    assert {first[0]["job_id"], second[0]["job_id"]} == set(jobs)
    assert meeting.state(second[0]["job_id"] if turn == 0 else first[0]["job_id"]) == "running"
    undone = first[0]["job_id"] if turn == 0 else second[0]["job_id"]
    assert meeting.state(undone) == ("running" if end == "commit" else "pending")


@both_ends
def test_a_claim_repeated_while_its_first_call_is_still_open_returns_the_same_claims(meeting, end):
    worker = meeting.worker("w1", slots=2)
    meeting.job()
    meeting.job()
    ask = claim(worker, request_id=uuid.uuid4())
    met = meeting.meet(ask, ask, end)
    assert met.later.waited
    again = met.later.result()
    if end == "commit":
        assert [(r["job_id"], r["token"]) for r in again] == [(r["job_id"], r["token"]) for r in met.first]
    assert len(again) == 1
    running = meeting.db.execute("select count(*) as n from gangq.jobs where state = 'running'").fetchone()
    assert running == {"n": 1}


@first_of_two
@both_ends
def test_a_claim_and_the_cancelling_of_a_pending_job_never_both_have_it(meeting, turn, end):
    worker = meeting.worker("w1")
    job = meeting.job()
    cancel: Verb = lambda conn: call(conn, "cancel", job_ids=[job])  # noqa: E731
    met, claimed, cancelled = meet(meeting, claim(worker), cancel, turn, end)
    if turn == 0:
        assert met.later.waited
        assert cancelled[0]["state"] == ("preempting" if end == "commit" else "cancelled")
        assert meeting.state(job) == cancelled[0]["state"]
    else:
        assert not met.later.waited
        assert claimed == []
        assert meeting.state(job) == ("cancelled" if end == "commit" else "pending")


@first_of_two
@both_ends
def test_a_claim_and_the_cancelling_of_a_reserved_gang_act_one_after_the_other(meeting, turn, end):
    worker = meeting.worker("w1")
    gang_id, (member,) = meeting.gang(1)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    cancel: Verb = lambda conn: call(conn, "cancel", gang_ids=[gang_id])  # noqa: E731
    met, claimed, cancelled = meet(meeting, claim(worker), cancel, turn, end)
    assert met.later.waited
    if turn == 0:
        assert cancelled[0]["state"] == ("draining" if end == "commit" else "cancelled")
        assert meeting.state(member) == ("preempting" if end == "commit" else "cancelled")
    else:
        assert len(claimed) == (end == "rollback")
        assert meeting.state(member) == ("cancelled" if end == "commit" else "running")


@first_of_two
@both_ends
def test_a_claim_and_a_quarantine_never_both_take_the_device(meeting, turn, end):
    device = {"uuid": "GPU-1", "index": 0, "vram_mb": 1000}
    worker = meeting.worker("w1", devices=[device])
    job = meeting.job(gpus=1)
    meeting.place()
    met, claimed, _ = meet(meeting, claim(worker), verb("quarantine", device_uuid="GPU-1"), turn, end)
    assert met.later.waited
    (held,) = meeting.db.execute("select state, job_id from gangq.devices").fetchall()
    if turn == 0:
        assert len(claimed) == 1
        assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
        expected = (
            {"state": "held", "job_id": job} if end == "commit" else {"state": "quarantined", "job_id": None}
        )
    else:
        assert len(claimed) == (end == "rollback")
        expected = (
            {"state": "quarantined", "job_id": None} if end == "commit" else {"state": "held", "job_id": job}
        )
    assert held == expected


@first_of_two
@both_ends
@pytest.mark.parametrize("final", [True, False])
def test_a_claim_and_a_retirement_leave_no_job_with_a_worker_that_is_gone(meeting, turn, end, final):
    worker = meeting.worker("w1")
    job = meeting.job()
    met, claimed, _ = meet(
        meeting, claim(worker), verb("retire_worker", incarnation=worker, final=final), turn, end
    )
    assert met.later.waited
    if turn == 0:
        assert len(claimed) == 1
        expected = "running" if end == "commit" and not final else "pending"
        assert meeting.row(job)["crashes"] == 0
    elif end == "commit":
        assert met.later.sqlstate == ("GQ005" if final else None)
        assert final or claimed == []
        expected = "pending"
    else:
        expected = "running"
    assert meeting.state(job) == expected


def test_a_gang_reserved_on_a_worker_that_retires_during_its_claim_is_rolled_back_by_the_next_tick(meeting):
    worker = meeting.worker("w1")
    gang_id, _ = meeting.gang(1)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    met = meeting.meet(verb("retire_worker", incarnation=worker), claim(worker))
    assert met.later.sqlstate in ("GQ005", None)
    meeting.tick()
    assert meeting.gang_row(gang_id)["state"] == "blocked"
    assert meeting.violations() == []


@first_of_two
@both_ends
def test_a_reservation_and_a_place_never_spend_the_same_slot(meeting, turn, end):
    worker = meeting.worker("w1")
    gang_id, _ = meeting.gang(1)
    job = meeting.job(**PLACED)
    met, reserved, opened = meet(
        meeting,
        verb("reserve_gang", gang_id=gang_id, incarnations=[worker]),
        verb("open_place", incarnation=worker, job_id=job),
        turn,
        end,
    )
    if turn == 0:
        assert met.later.waited
        assert reserved is True
        assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
        assert len(meeting.claim(worker)) == 1
    else:
        # Busy this moment: it steps aside, and the next pass decides anew.
        assert not met.later.waited
        assert reserved is False
        assert opened > 0
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker]) is (
            end == "rollback"
        )
    assert meeting.violations() == []


# Ends -------------------------------------------------------------------------------------------------------


def expire(arena: Arena) -> None:
    """Move the clock past every lease. No tick has run before, so nobody takes it for an outage."""
    arena.clock.advance(121)


@first_of_two
@both_ends
@pytest.mark.parametrize("kind", ["solo", "gang"])
def test_a_job_completed_while_its_worker_is_reaped_is_done_or_runs_again_but_never_both(
    meeting, turn, end, kind
):
    worker = meeting.worker("w1")
    if kind == "solo":
        job, token = meeting.running(worker)
    else:
        _, (job,), (token,) = meeting.running_gang([worker])
    expire(meeting)
    met, completed, reaped = meet(meeting, complete((job, token)), verb("reap_expired"), turn, end)
    if turn == 0:
        # The reaper steps over what a caller holds open.
        assert not met.later.waited
        assert reaped == 1
        assert completed[0]["outcome"] == "done"
        assert meeting.state(job) == ("done" if end == "commit" else "running")
        if end == "rollback":
            meeting.tick()
            assert meeting.state(job) in ("pending", "blocked")
    else:
        assert met.later.waited
        if end == "commit":
            # The token is old: a caller's own writes must not commit on it.
            assert met.later.sqlstate == "GQ003"
            assert meeting.state(job) in ("pending", "blocked")
        else:
            assert completed[0]["outcome"] == "done"
            assert meeting.state(job) == "done"


@both_ends
def test_two_members_that_fail_at_the_same_moment_both_count_as_stopped(meeting, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, (m0, m1), (t0, t1) = meeting.running_gang([one, two])
    met = meeting.meet(verb("fail", job_id=m0, token=t0), verb("fail", job_id=m1, token=t1), end)
    assert met.later.waited
    assert met.later.result() == "preempted"
    gang = meeting.gang_row(gang_id)
    if end == "commit":
        # Nobody is left to wait for, one launch is charged, and only the one that failed first pays.
        assert gang["state"] == "blocked"
        assert gang["attempts"] == 1
        assert [meeting.row(m)["attempts"] for m in (m0, m1)] == [1, 0]
    else:
        assert gang["state"] == "draining"
        assert meeting.state(m0) == "preempting"
        assert value(meeting.db, "fail", job_id=m0, token=t0) == "preempted"
        assert meeting.gang_row(gang_id)["state"] == "blocked"
    for job, token in ((m0, t0), (m1, t1)):
        assert value(meeting.db, "fail", job_id=job, token=token) == "repeated"


@both_ends
def test_a_gang_whose_last_two_members_complete_at_once_ends_exactly_once(meeting, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, (m0, m1), (t0, t1) = meeting.running_gang([one, two])
    met = meeting.meet(complete((m0, t0)), complete((m1, t1)), end)
    assert met.later.waited
    assert met.later.result()[0]["outcome"] == "done"
    if end == "rollback":
        assert meeting.gang_row(gang_id)["state"] == "running"
        assert call(meeting.db, "complete", job_ids=[m0], tokens=[t0])[0]["outcome"] == "done"
    assert meeting.gang_row(gang_id)["state"] == "done"
    ends = meeting.db.execute(
        "select count(*) as n from gangq.events where kind = 'end' and gang_id = %s", (gang_id,)
    ).fetchone()
    assert ends == {"n": 1}
    left = meeting.db.execute(
        "select count(*) as n from gangq.history where gang_id = %s", (gang_id,)
    ).fetchone()
    assert left == {"n": 2}


@first_of_two
@both_ends
def test_a_member_is_never_done_before_the_claim_that_opens_its_barrier(meeting, turn, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, _ = meeting.gang(2)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[one, two])
    (mine,) = meeting.claim(one)
    early = complete((mine["job_id"], mine["token"]))
    if turn == 1:
        # Refused at once, so it has no transaction to keep open.
        with pytest.raises(psycopg.Error, match="barrier") as refused:
            early(meeting.connect())
        assert refused.value.sqlstate == "GQ004"
        assert meeting.state(mine["job_id"]) == "running"
        return
    met = meeting.meet(claim(two), early, end)
    assert met.later.waited
    assert met.later.sqlstate == (None if end == "commit" else "GQ004")
    assert meeting.gang_row(gang_id)["state"] == ("running" if end == "commit" else "reserved")


@first_of_two
@both_ends
def test_a_snooze_and_the_end_of_its_lease_charge_the_job_once(meeting, turn, end):
    worker, job = meeting.worker("w1"), meeting.job()
    (claimed,) = meeting.claim(worker)
    meeting.clock.advance(130)
    token = claimed["token"]
    met, said, _ = meet(
        meeting, verb("snooze", job_id=job, token=token, for_s=60), verb("reap_expired"), turn, end
    )
    # The tick skips a job that is locked; the snooze waits.
    assert met.later.waited == (turn == 1)
    assert met.later.sqlstate == ("GQ003" if (turn, end) == (1, "commit") else None)
    assert turn == 1 or said == "scheduled"
    row = meeting.db.execute(
        "select state, attempts, crashes, snoozes from gangq.live_jobs where id = %s", (job,)
    ).fetchone()
    assert (
        tuple(row.values())
        == {
            (0, "commit"): ("scheduled", 0, 0, 1),
            (0, "rollback"): ("running", 1, 0, 0),
            (1, "commit"): ("pending", 0, 1, 0),
            (1, "rollback"): ("scheduled", 0, 0, 1),
        }[turn, end]
    )


@first_of_two
@both_ends
def test_an_acknowledgement_and_a_forced_drain_count_one_stop(meeting, turn, end):
    device = {"uuid": "GPU-1", "index": 0, "vram_mb": 1000}
    worker = meeting.worker("w1", devices=[device])
    gang_id, (job,), (token,) = meeting.running_gang([worker], gpus=1)
    assert value(meeting.db, "preempt_gang", gang_id=gang_id)
    for _ in range(3):
        meeting.clock.advance(56)
        call(meeting.db, "heartbeat", incarnation=worker, job_ids=[job], tokens=[token])
    met, acked, forced = meet(
        meeting, verb("ack_preempted", job_id=job, token=token), verb("reap_expired"), turn, end
    )
    # The tick skips a gang that is locked; the acknowledgement waits.
    assert met.later.waited == (turn == 1)
    assert forced == turn
    stopped_by_force = {
        (0, "commit"): False,
        (0, "rollback"): True,
        (1, "commit"): True,
        (1, "rollback"): False,
    }[turn, end]
    if (turn, end) == (0, "rollback"):
        assert meeting.gang_row(gang_id)["state"] == "draining"
        assert value(meeting.db, "reap_expired") == 1
    if (turn, end) != (1, "commit"):
        assert acked == "preempted"
    assert meeting.gang_row(gang_id)["state"] == "blocked"
    (held,) = meeting.db.execute("select state from gangq.devices").fetchall()
    assert held["state"] == ("quarantined" if stopped_by_force else "free")
    told = meeting.db.execute("select acked, forced from gangq.drains").fetchall()
    assert told == [{"acked": int(not stopped_by_force), "forced": int(stopped_by_force)}]


@first_of_two
@both_ends
def test_a_released_job_that_is_being_cancelled_ends_cancelled_and_is_charged_nothing(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    release: Verb = lambda conn: call(conn, "release", job_ids=[job], tokens=[token])  # noqa: E731
    cancel: Verb = lambda conn: call(conn, "cancel", job_ids=[job])  # noqa: E731
    met, released, cancelled = meet(meeting, release, cancel, turn, end)
    assert met.later.waited
    assert released[0]["outcome"] == "released"
    if turn == 0:
        assert cancelled[0]["state"] == ("cancelled" if end == "commit" else "preempting")
        assert meeting.state(job) == cancelled[0]["state"]
    else:
        assert meeting.state(job) == ("cancelled" if end == "commit" else "pending")


@first_of_two
@both_ends
def test_a_job_that_waits_for_one_completing_this_moment_is_let_go(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    submit = verb("submit", task="later", after=[job])
    met, waiting, completed = meet(meeting, submit, complete((job, token)), turn, end)
    assert not met.later.waited
    assert completed[0]["outcome"] == "done"
    if turn == 0 and end == "rollback":
        return
    if turn == 1 and end == "rollback":
        assert meeting.state(waiting) == "waiting"
        call(meeting.db, "complete", job_ids=[job], tokens=[token])
    meeting.tick()
    assert meeting.state(waiting) == "pending"


@first_of_two
@both_ends
@pytest.mark.parametrize("kind", ["solo", "gang"])
def test_a_checkpoint_is_saved_by_the_present_claim_or_refused(meeting, turn, end, kind):
    worker = meeting.worker("w1")
    if kind == "solo":
        job, token = meeting.running(worker)
    else:
        _, (job,), (token,) = meeting.running_gang([worker])
    expire(meeting)
    save = verb("save_checkpoint", job_id=job, token=token, step=7, data=b"state")
    met, _, reaped = meet(meeting, save, verb("reap_expired"), turn, end)
    assert reaped in (1, 2)
    if turn == 0:
        # It steps over the job, with its gang, and frees it when the saver is done.
        assert not met.later.waited
        assert meeting.state(job) == "running"
        meeting.tick()
        saved = end == "commit"
    else:
        assert met.later.waited
        assert met.later.sqlstate == ("GQ003" if end == "commit" else None)
        saved = end == "rollback"
    assert meeting.state(job) == (
        "running" if turn == 1 and end == "rollback" else "blocked" if kind == "gang" else "pending"
    )
    steps = meeting.db.execute("select step from gangq.checkpoints").fetchall()
    assert steps == ([{"step": 7}] if saved else [])


# Workers ----------------------------------------------------------------------------------------------------


@both_ends
def test_two_registrations_of_one_name_give_one_incarnation(meeting, end):
    register: Verb = lambda conn: call(conn, "register_worker", name="w", host="h", queues=["default"])  # noqa: E731
    met = meeting.meet(register, register, end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ006" if end == "commit" else None)
    live = meeting.db.execute("select incarnation from gangq.workers where name = 'w'").fetchall()
    assert len(live) == 1


@first_of_two
@both_ends
def test_a_heartbeat_and_the_reaper_never_wait_for_each_other(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    expire(meeting)
    beat: Verb = lambda conn: call(  # noqa: E731
        conn, "heartbeat", incarnation=worker, job_ids=[job], tokens=[token]
    )
    met, answers, reaped = meet(meeting, beat, verb("reap_expired"), turn, end)
    assert not met.later.waited
    if turn == 0:
        assert [a["action"] for a in answers] == ["continue"]
        # While the renewal is not committed the lease is not judged.
        assert reaped == 0
        assert meeting.state(job) == "running"
        assert value(meeting.db, "reap_expired") == (0 if end == "commit" else 2)
    else:
        assert reaped == 2
        # Not renewed, and told so: else it would count on time it does not have.
        assert met.later.sqlstate == "55P03"
        if end == "commit":
            late = meeting.connect()
            with pytest.raises(Exception, match="ended") as refused:
                beat(late)
            assert refused.value.sqlstate == "GQ005"
            assert meeting.state(job) == "pending"
        else:
            assert meeting.state(job) == "running"
    assert meeting.violations() == []


@first_of_two
@both_ends
def test_a_heartbeat_and_a_report_of_death_never_wait_for_each_other(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    beat: Verb = lambda conn: call(  # noqa: E731
        conn, "heartbeat", incarnation=worker, job_ids=[job], tokens=[token]
    )
    report = verb("report_dead", worker="w1", incarnation=worker, evidence={"by": "test"})
    met, answers, freed = meet(meeting, beat, report, turn, end)
    assert not met.later.waited
    assert [a["action"] for a in answers] == ["continue"]
    assert freed == 1
    dead = turn == 0 or end == "commit"
    assert meeting.state(job) == ("pending" if dead else "running")


# The scheduler ----------------------------------------------------------------------------------------------


@both_ends
def test_two_admissions_place_a_gang_once_and_neither_waits(meeting, end):
    meeting.worker("w1")
    meeting.worker("w2")
    gang_id, _ = meeting.gang(2)
    met = meeting.meet(place, place, end)
    assert met.first == {"placed": 1, "again": False}
    assert not met.later.waited
    assert met.later.result() == {"placed": 0, "again": True}
    gang = meeting.gang_row(gang_id)
    assert (gang["state"], gang["epoch"]) == (("reserved", 1) if end == "commit" else ("blocked", 0))
    meeting.tick()
    assert meeting.gang_row(gang_id)["epoch"] == 1


@both_ends
def test_two_admissions_that_keep_workers_for_the_same_gang_agree(meeting, end):
    worker = meeting.worker("w1")
    meeting.running(worker, **PLACED)
    gang_id, _ = meeting.gang(1)
    met = meeting.meet(place, place, end)
    assert met.later.sqlstate in (None, "55P03")
    meeting.tick()
    planned = meeting.db.execute("select ask, seats -> 0 -> 'worker' as worker from gangq.plans").fetchall()
    assert planned == [{"ask": f"g{gang_id}", "worker": worker}]


@both_ends
def test_of_three_ticks_one_runs_and_the_others_come_again_and_no_event_is_lost(meeting, end):
    meeting.worker("w1")
    first_runner = meeting.connect(autocommit=False)
    (first,) = call(first_runner, "tick", force=True)
    assert first["ran"]
    # Committed while the first runs, too late for it to see.
    meeting.gang(1)
    turns = []
    for _ in range(2):
        later = Later(meeting.connect(), lambda conn: call(conn, "tick", force=True)).start(meeting.db)
        assert not later.waited
        (row,) = later.join().result()
        assert row["ran"] is False
        turns.append(row["next_turn"])
    getattr(first_runner, end)()
    (again,) = call(meeting.db, "tick", force=True, turn=turns[0], decides=True)
    assert (again["ran"], again["decide"]) == (True, True), "it sees the gang"
    if end == "commit":
        (served,) = call(meeting.db, "tick", force=True, turn=turns[1])
        assert (served["ran"], served["next_turn"]) == (False, None), "the run after the first was for both"
    assert meeting.violations() == []
