"""A dying worker's trip meets everybody else: it waits for nobody long, and what both wanted happens once."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import Arena, Later, Verb, both_ends, call, first_of_two, meet, value, verb

DEVICE = [{"uuid": "G0", "index": 0, "vram_mb": 8}]


def trip(incarnation: int, job: int, token: int, code: int = 76, exit_in_s: float | None = 5) -> Verb:
    return lambda conn: value(
        conn,
        "trip",
        incarnation=incarnation,
        job_id=job,
        token=token,
        code=code,
        error={"type": "Stalled"},
        exit_in_s=exit_in_s,
    )


def rows(name: str, /, **arguments: Any) -> Verb:
    return lambda conn: call(conn, name, **arguments)


def health(arena: Arena) -> list[str]:
    return [r["health"] for r in arena.db.execute("select health from gangq.devices order by uuid")]


@first_of_two
@both_ends
def test_a_trip_and_the_completion_of_the_same_job_never_both_count(meeting, turn, end):
    worker = meeting.worker("w1", devices=DEVICE)
    job, token = meeting.running(worker, gpus=1)
    done = rows("complete", job_ids=[job], tokens=[token])
    met, tripped, _ = meet(meeting, trip(worker, job, token), done, turn, end)
    assert met.later.waited
    first_counts = end == "commit"
    if (turn == 0) == first_counts:
        assert tripped == "scheduled"
        assert met.later.sqlstate == ("GQ003" if first_counts else None)
        assert meeting.state(job) == "scheduled"
    else:
        # A false alarm: it may not end its worker, nor say that all went as planned.
        assert met.later.sqlstate == ("GQ003" if first_counts else None)
        assert meeting.state(job) == "done"
        assert meeting.db.execute("select state from gangq.workers").fetchone()["state"] == "live"
        assert health(meeting) == ["ok"]


@first_of_two
@both_ends
def test_a_trip_and_a_proof_of_death_leave_nothing_withheld(meeting, turn, end):
    worker = meeting.worker("w1", devices=DEVICE)
    job, token = meeting.running(worker, gpus=1)
    dead = verb("report_dead", worker="w1", incarnation=worker, evidence={"by": "test"})
    meet(meeting, trip(worker, job, token), dead, turn, end)
    if end == "rollback" and turn == 0:
        meeting.tick()
    if end == "rollback" and turn == 1:
        # The proof was never given.
        assert (meeting.state(job), health(meeting)) == ("scheduled", ["exiting"])
        assert dead(meeting.db) == 1
    meeting.tick()
    assert (meeting.state(job), health(meeting)) == ("pending", ["ok"])
    row = meeting.row(job)
    assert row["trips"] + row["crashes"] == 1
    assert dead(meeting.db) == 0


@first_of_two
@both_ends
def test_a_trip_and_a_claim_of_its_worker_leave_no_job_with_a_worker_that_is_gone(meeting, turn, end):
    worker = meeting.worker("w1", slots=2)
    job, token = meeting.running(worker)
    other = meeting.job()
    claim = rows("claim", incarnation=worker)
    met, _, _ = meet(meeting, trip(worker, job, token), claim, turn, end)
    assert met.later.waited
    if turn == 0 and end == "rollback":
        assert met.later.error is None
        return
    if turn == 0:
        assert met.later.sqlstate == "GQ005"
    meeting.clock.advance(5)
    meeting.tick()
    assert (meeting.state(job), meeting.state(other)) == ("pending", "pending")
    assert meeting.row(other)["crashes"] == 0


@first_of_two
@both_ends
def test_a_trip_and_a_heartbeat_never_wait_for_each_other(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    beat = rows("heartbeat", incarnation=worker, job_ids=[job], tokens=[token])
    met, tripped, _ = meet(meeting, trip(worker, job, token), beat, turn, end)
    assert not met.later.waited
    assert tripped == "scheduled"


@both_ends
def test_two_members_that_trip_at_the_same_moment_drain_their_gang_once(meeting, end):
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, (m0, m1), (t0, t1) = meeting.running_gang([one, two])
    met = meeting.meet(trip(one, m0, t0), trip(two, m1, t1), end)
    assert met.later.result() == "preempted"
    gang = meeting.gang_row(gang_id)
    if end == "commit":
        assert (gang["state"], gang["trips"]) == ("blocked", 1)
        assert [meeting.row(m)["trips"] for m in (m0, m1)] == [1, 0]
    else:
        assert (gang["state"], gang["trips"]) == ("draining", 1)
        assert meeting.state(m0) == "preempting"


@both_ends
def test_of_a_fleet_that_trips_in_the_same_instant_the_brake_counts_every_one(meeting, end):
    """Nobody's event is committed when the next one looks: without a lock all would go."""
    pairs = []
    for n in range(6):
        worker = meeting.worker(f"w{n}")
        pairs.append((worker, *meeting.running(worker)))
    assert trip(*pairs[0])(meeting.db) == "scheduled"
    met = meeting.meet(trip(*pairs[1]), trip(*pairs[2]), end)
    assert met.later.waited
    assert met.first == "scheduled"
    assert met.later.result() == ("held" if end == "commit" else "scheduled")


def test_a_trip_left_open_holds_up_the_others_for_a_second_at_most(meeting):
    pairs = []
    for n in range(2):
        worker = meeting.worker(f"w{n}")
        pairs.append((worker, *meeting.running(worker)))
    frozen = meeting.connect(autocommit=False)
    assert trip(*pairs[0])(frozen) == "scheduled"
    later = Later(meeting.connect(statement_timeout="2000"), trip(*pairs[1])).start(meeting.db).join()
    assert later.result() == "scheduled"
    assert later.seconds < 1.8
    frozen.commit()
    assert meeting.violations() == []


def test_a_trip_of_a_job_that_somebody_holds_gives_up_in_time_to_exit(meeting):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", job_ids=[job])
    later = Later(meeting.connect(), trip(worker, job, token)).start(meeting.db)
    assert later.waited
    later.join()
    assert later.sqlstate == "55P03"
    assert later.seconds < 3
    frozen.rollback()
    assert meeting.state(job) == "running"


@pytest.mark.parametrize("held", ["other slot", "member"])
def test_what_somebody_holds_of_a_tripped_worker_is_freed_by_a_later_tick(meeting, held):
    worker = meeting.worker("w1", slots=2)
    job, token = meeting.running(worker)
    if held == "member":
        gang_id, (other,) = meeting.gang(1)
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
        meeting.claim(worker)
        hold = {"gang_ids": [gang_id]}
    else:
        other, _ = meeting.running(worker)
        hold = {"job_ids": [other]}
    frozen = meeting.connect(autocommit=False)
    call(frozen, "set_priority", priority=5, **hold)
    others = meeting.connect(statement_timeout="1000")
    assert trip(worker, job, token, exit_in_s=0)(others) == "scheduled"
    call(others, "tick", force=True)
    assert (meeting.state(job), meeting.state(other)) == ("pending", "running")
    frozen.commit()
    meeting.tick()
    assert meeting.state(other) in ("pending", "blocked")
    assert meeting.violations() == []


@both_ends
def test_of_two_hosts_cron_jobs_that_ask_at_once_one_restarts_the_worker(meeting, end):
    worker = meeting.worker("w1", host="h1")
    meeting.running(worker)
    meeting.tick()
    meeting.clock.advance(40)
    meeting.tick()
    ask = verb("bounce", incarnation=worker, host="h1")
    met = meeting.meet(ask, ask, end)
    assert met.later.waited
    assert (met.first, met.later.result()) == ("go", "taken" if end == "commit" else "go")


@both_ends
@pytest.mark.parametrize("left", [[], ["b"]], ids=["nothing", "a set that no job avoided before"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_job_done_while_a_device_it_avoids_is_given_back_is_done(meeting, end, left, strict):
    job = meeting.job(gpus=1)
    for name in ["a", *left]:
        worker = meeting.worker(name, devices=[{"uuid": name, "index": 0, "vram_mb": 8}])
        trip(worker, job, meeting.claim(worker)[0]["token"], code=85, exit_in_s=None)(meeting.db)
    (claim,) = meeting.claim(meeting.worker("c", devices=[{"uuid": "c", "index": 0, "vram_mb": 8}]))
    done = rows("complete", job_ids=[job], tokens=[claim["token"]], strict=strict)
    met = meeting.meet(verb("unquarantine", device_uuid="a"), done, end)
    assert met.later.waited == strict
    if not strict:
        assert met.later.result() == [{"job_id": job, "outcome": "busy"}]
    assert (done(meeting.db) if not strict else met.later.result()) == [{"job_id": job, "outcome": "done"}]
    assert meeting.state(job) == "done"


@first_of_two
@both_ends
def test_a_stuck_process_and_a_new_registration_of_its_name_leave_the_name_quarantined(meeting, turn, end):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    trip(worker, job, token)(meeting.db)
    stuck = verb("report_stuck", worker="w1", incarnation=worker, evidence={"pid": 7})
    again = rows("register_worker", name="w1", host="w1", queues=["default"])
    meet(meeting, stuck, again, turn, end)
    if turn == 0 and end == "rollback":
        stuck(meeting.db)
    if turn == 1 and end == "rollback":
        again(meeting.db)
    (row,) = meeting.db.execute("select incarnation, quarantined from gangq.workers").fetchall()
    assert row["incarnation"] != worker
    assert "cannot be killed" in row["quarantined"]
