"""Operators and timeouts against what goes on meanwhile: a cordon and a claim, a timeout and an admission."""

from __future__ import annotations

from datetime import timedelta

import pytest

from interleaving.sessions import Arena, Later, Verb, both_ends, call, first_of_two, meet, value, verb
from sql.drive import place


def overdue(arena: Arena, style: str, size: int = 2) -> tuple[int, list[int]]:
    """A gang whose placement timeout is over."""
    gang_id, members = arena.gang(size)
    arena.db.execute(
        "update gangq.live_gangs set timeout_style = %s, timeout_at = gangq.now() where id = %s",
        (style, gang_id),
    )
    return gang_id, members


@first_of_two
@both_ends
@pytest.mark.parametrize("named", [{"host": "h1"}, {"worker": "w1"}])
def test_after_a_cordon_has_returned_no_claim_under_way_takes_anything(meeting, turn, end, named):
    worker = meeting.worker("w1", host="h1")
    job = meeting.job()
    claim: Verb = lambda conn: call(conn, "claim", incarnation=worker)  # noqa: E731
    cordon: Verb = lambda conn: call(conn, "cordon", **named)  # noqa: E731
    met, claimed, _ = meet(meeting, claim, cordon, turn, end)
    assert met.later.waited
    if turn == 0:
        # The claim was first: the cordon returns when it is over, and what it took is there to be seen.
        assert [row["job_id"] for row in claimed] == [job]
        (seen,) = meeting.db.execute("select jobs from gangq.cordoned").fetchall()
        assert seen["jobs"] == ([job] if end == "commit" else [])
    else:
        assert len(claimed) == (end == "rollback")
        assert meeting.state(job) == ("running" if end == "rollback" else "pending")


@first_of_two
@both_ends
def test_a_cordon_and_a_reservation_leave_no_gang_half_placed(meeting, turn, end):
    one, two = meeting.worker("w1", host="h1"), meeting.worker("w2", host="h2")
    gang_id, _ = meeting.gang(2)
    reserve = verb("reserve_gang", gang_id=gang_id, incarnations=[one, two])
    cordon: Verb = lambda conn: call(conn, "cordon", host="h1")  # noqa: E731
    met, reserved, _ = meet(meeting, reserve, cordon, turn, end)
    # The one who cordons waits for a reservation; a reservation waits for nobody.
    assert met.later.waited is (turn == 0)
    assert reserved is (turn == 0)
    if turn == 0 and end == "commit":
        assert len(meeting.claim(one)) == len(meeting.claim(two)) == 1
        assert meeting.gang_row(gang_id)["state"] == "running"
    else:
        assert meeting.gang_row(gang_id)["state"] == "blocked"


@both_ends
def test_two_cordons_of_one_host_make_one(meeting, end):
    meeting.worker("w1", host="h1")
    cordon: Verb = lambda conn: call(conn, "cordon", host="h1", reason="fan")  # noqa: E731
    met = meeting.meet(cordon, cordon, end)
    assert met.later.waited
    assert met.later.sqlstate is None
    told = meeting.db.execute("select kind from gangq.events where kind = 'cordon'").fetchall()
    assert len(told) == 1
    assert len(meeting.db.execute("select * from gangq.cordons").fetchall()) == 1


@first_of_two
@both_ends
def test_a_pause_of_a_task_and_its_end_by_a_tick_keep_no_one_waiting(meeting, turn, end):
    until = meeting.clock.now() + timedelta(seconds=5)
    call(meeting.db, "pause_task", task="t", until=until)
    meeting.clock.advance(6)
    job, worker = meeting.job(), meeting.worker("w1")
    met, _, ended = meet(meeting, verb("pause_task", task="t"), verb("end_pauses"), turn, end)
    if turn == 0:
        assert not met.later.waited
        assert ended == 0
    else:
        assert met.later.waited
    paused = turn == 1 or end == "commit"
    if not paused:
        assert value(meeting.db, "end_pauses") == 1
    assert [row["job_id"] for row in meeting.claim(worker)] == ([] if paused else [job])


@first_of_two
@both_ends
@pytest.mark.parametrize("style", ["requeue", "hard", "soft"])
def test_a_timeout_and_an_admission_of_the_same_gang_never_both_have_it(meeting, turn, end, style):
    meeting.worker("w1")
    meeting.worker("w2")
    gang_id, members = overdue(meeting, style)
    meeting.db.execute(
        "insert into gangq.verdicts (kind_id, gate, since) select kind_id, 'infeasible', gangq.now() "
        "from gangq.live_gangs"
    )
    admit: Verb = lambda conn: place(conn)["placed"]  # noqa: E731
    met, looked_at, placed = meet(meeting, verb("time_out"), admit, turn, end)
    assert not met.later.waited
    # Whoever comes second steps aside.
    assert (looked_at, placed) == ((1, 0) if turn == 0 else (0, 1))
    state = meeting.gang_row(gang_id)["state"]
    if turn == 1:
        assert state == ("reserved" if end == "commit" else "blocked")
    elif end == "rollback":
        assert state == "blocked"
    else:
        assert state == {"requeue": "blocked", "hard": "failed", "soft": "cancelled"}[style]
        assert {meeting.state(m) for m in members} == {
            {"requeue": "blocked", "hard": "failed", "soft": "pending"}[style]
        }


@first_of_two
@both_ends
@pytest.mark.parametrize("style", ["hard", "soft"])
def test_a_timeout_and_a_cancellation_end_the_gang_once(meeting, turn, end, style):
    gang_id, members = overdue(meeting, style)
    cancel: Verb = lambda conn: call(conn, "cancel", gang_ids=[gang_id])[0]["state"]  # noqa: E731
    met, looked_at, cancelled = meet(meeting, verb("time_out"), cancel, turn, end)
    if turn == 0:
        assert met.later.waited
        assert looked_at == 1
        # It had ended when the cancellation came to it: its members are single jobs, which that call does not name.
        assert cancelled == ("failed" if style == "hard" and end == "commit" else "cancelled")
        left = {"hard": "failed", "soft": "pending"}[style] if end == "commit" else "cancelled"
    else:
        assert not met.later.waited
        assert (looked_at, cancelled) == (0, "cancelled")
        left = "cancelled" if end == "commit" else "blocked"
    assert {meeting.state(m) for m in members} == {left}
    ends = meeting.db.execute("select count(*) as n from gangq.events where kind = 'end'").fetchone()
    assert ends == {"n": 0 if left == "blocked" else 1}


@both_ends
def test_a_timeout_steps_over_a_gang_with_a_member_that_somebody_holds_this_moment(meeting, end):
    gang_id, members = overdue(meeting, "soft")
    hold: Verb = lambda conn: conn.execute(  # noqa: E731
        "select from gangq.live_jobs where id = %s for key share", (members[1],)
    )
    met = meeting.meet(hold, verb("time_out"), end)
    assert not met.later.waited
    assert met.later.result() == 0
    assert value(meeting.db, "time_out") == 1
    assert meeting.gang_row(gang_id)["state"] == "cancelled"


@both_ends
def test_a_timeout_ends_a_gang_with_a_member_that_an_open_submit_waits_for(meeting, end):
    gang_id, members = overdue(meeting, "soft")
    submit = verb("submit", task="later", after=[members[1]])
    met = meeting.meet(submit, verb("time_out"), end)
    assert not met.later.waited
    assert met.later.result() == 1
    assert meeting.gang_row(gang_id)["state"] == "cancelled"
    if end == "commit":
        assert meeting.state(met.first) == "waiting"


@first_of_two
@both_ends
def test_a_solo_job_displaced_while_it_completes_is_done_or_told_to_stop(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    complete: Verb = lambda conn: call(conn, "complete", job_ids=[job], tokens=[token])[0]["outcome"]  # noqa: E731
    met, completed, displaced = meet(meeting, complete, verb("displace_job", job_id=job), turn, end)
    assert met.later.waited
    assert completed == "done"
    if turn == 0:
        if end == "commit":
            assert met.later.sqlstate == "GQ002"
        else:
            assert displaced is True
        assert meeting.state(job) == ("done" if end == "commit" else "preempting")
    else:
        assert displaced is True
        assert meeting.state(job) == "done"


def test_a_drain_past_its_deadline_waits_for_no_claim_and_no_completion(meeting):
    worker = meeting.worker("w1", host="h1", slots=2)
    job, token = meeting.running(worker)
    gang_id, _, _ = meeting.running_gang([worker])
    meeting.db.execute(
        "select gangq.cordon(host => 'h1', drain => true, deadline => gangq.now() + interval '1 s')"
    )
    meeting.clock.advance(2)
    holder = meeting.connect(autocommit=False)
    call(holder, "complete", job_ids=[job], tokens=[token])
    mover = Later(meeting.connect(), verb("move_away")).start(meeting.db)
    assert not mover.waited
    assert mover.result() == 1
    assert meeting.gang_row(gang_id)["state"] == "draining"
    holder.rollback()
    assert value(meeting.db, "move_away") == 1
    assert meeting.state(job) == "preempting"


@both_ends
def test_a_quarantine_that_is_lifted_while_its_worker_registers_again_is_not_inherited(meeting, end):
    value(meeting.db, "retire_worker", incarnation=meeting.worker("w1"))
    value(meeting.db, "quarantine", worker="w1")
    register: Verb = lambda conn: call(conn, "register_worker", name="w1", host="h", queues=["default"])  # noqa: E731
    met = meeting.meet(register, lambda conn: call(conn, "unquarantine", worker="w1"), end)
    met.later.result()
    assert meeting.db.execute("select 1 from gangq.workers where quarantined is not null").fetchall() == []
