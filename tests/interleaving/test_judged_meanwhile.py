"""What was true when a judge looked may not be true when it judges."""

from __future__ import annotations

import pytest

from interleaving.sessions import Arena, Connection, Later, call, value


@pytest.mark.parametrize("judge", ["reap_expired", "flag_dead_workers", "rollback_stale"])
def test_nobody_is_judged_while_another_transaction_finds_that_the_server_was_restarted(
    meeting: Arena, judge: str
) -> None:
    worker = meeting.worker("w1")
    job, _ = meeting.running(worker)
    meeting.tick()
    meeting.clock.advance(121)
    meeting.db.execute(
        "update gangq.tick_state set server_started_at = server_started_at - interval '1 h', last_at = gangq.now()"
    )
    first = meeting.connect(autocommit=False)
    value(first, "rollback_stale")
    assert value(meeting.connect(statement_timeout="1000"), judge) == 0
    first.commit()
    meeting.tick()
    row = meeting.db.execute(
        "select state, flagged_at from gangq.incarnations where id = %s", (worker,)
    ).fetchone()
    assert row == {"state": "live", "flagged_at": None}
    assert meeting.state(job) == "running"
    assert meeting.violations() == []


def test_a_dead_worker_whose_device_is_being_registered_is_left_and_the_others_are_judged(
    meeting: Arena,
) -> None:
    seen = {"uuid": "GPU-1", "index": 0, "vram_mb": 1000}
    held, other = meeting.worker("held", devices=[seen]), meeting.worker("other")
    job, _ = meeting.running(other)
    meeting.clock.advance(121)
    opened = meeting.connect(autocommit=False)
    call(opened, "register_worker", name="new", host="h", queues=["default"], devices=[seen])
    assert meeting.tick()["detail"]["reap_expired"] == 2, "the other one and its job"
    assert meeting.state(job) == "pending"
    opened.commit()
    assert meeting.tick()["detail"]["reap_expired"] == 1
    ended = meeting.db.execute(
        "select id from gangq.incarnations where state = 'dead' order by id"
    ).fetchall()
    assert [row["id"] for row in ended] == [held, other]
    device = meeting.db.execute("select worker from gangq.devices").fetchall()
    assert device == [{"worker": "new"}]
    assert meeting.violations() == []


def test_a_worker_that_retired_pays_no_crash_for_one_that_was_lost_beside_it(meeting: Arena) -> None:
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gang_id, (first, second), _ = meeting.running_gang([one, two])
    frozen = meeting.connect(autocommit=False)
    frozen.execute("select from gangq.live_jobs where id = %s for update", (second,))
    value(meeting.connect(statement_timeout="1000"), "retire_worker", incarnation=one, final=True)
    assert meeting.state(first) == "running", "its gang is held"
    meeting.clock.advance(121)
    frozen.rollback()
    meeting.tick()
    lost = meeting.db.execute(
        "select gang_id, epoch, job_id from gangq.events where kind = 'lost' order by job_id"
    )
    assert lost.fetchall() == [{"gang_id": gang_id, "epoch": 1, "job_id": job} for job in (first, second)]
    assert [meeting.row(job)["crashes"] for job in (first, second)] == [0, 1]
    assert meeting.violations() == []


def test_a_member_stops_no_earlier_than_it_was_told_to(meeting: Arena) -> None:
    gang_id, (job,), (token,) = meeting.running_gang([meeting.worker("w1")])
    held = meeting.connect(autocommit=False)
    held.execute("select from gangq.live_gangs where id = %s for update", (gang_id,))
    report = Later(meeting.connect(), lambda conn: value(conn, "fail", job_id=job, token=token)).start(
        meeting.db
    )
    assert report.waited
    meeting.clock.advance(7)
    call(held, "cancel", gang_ids=[gang_id])
    meeting.clock.advance(1)
    held.commit()
    report.join().result()
    (ended,) = meeting.db.execute(
        "select data ->> 'seconds' as s from gangq.events where kind = 'ack'"
    ).fetchall()
    assert float(ended["s"]) == 1
    assert meeting.violations() == []


def held_up(meeting: Arena, number: int, table: str = "live_gangs") -> Connection:
    """Changes of this gang, or job, wait until the session that is returned unlocks 1."""
    meeting.db.execute(
        "create function public.hold_up() returns trigger language plpgsql set lock_timeout = '10s' as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$"
    )
    meeting.db.execute(
        f"create trigger hold_up before update on gangq.{table} for each row "
        f"when (old.id = {number}) execute function public.hold_up()"
    )
    gate = meeting.connect()
    gate.execute("select pg_advisory_lock(1)")
    return gate


def test_a_reservation_made_anew_since_the_look_is_not_rolled_back(meeting: Arena) -> None:
    one, two = meeting.worker("w1"), meeting.worker("w2")
    gangs = [meeting.gang(1)[0] for _ in range(2)]
    for gang_id, worker in zip(gangs, (one, two), strict=True):
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    slow, anew = gangs
    gate = held_up(meeting, slow)
    meeting.clock.advance(100)
    judged = Later(meeting.connect(), lambda conn: value(conn, "rollback_stale")).start(meeting.db)
    assert judged.waited
    assert value(meeting.db, "rollback_gang", gang_id=anew)
    assert value(meeting.db, "reserve_gang", gang_id=anew, incarnations=[meeting.worker("w3")])
    gate.execute("select pg_advisory_unlock(1)")
    assert judged.join().result() == 1
    assert [meeting.gang_row(gang_id)["state"] for gang_id in gangs] == ["blocked", "reserved"]
    assert meeting.violations() == []


def test_a_worker_that_was_heard_since_the_look_is_not_flagged(meeting: Arena) -> None:
    slow, heard = meeting.worker("w1"), meeting.worker("w2")
    for worker in (slow, heard):
        meeting.running(worker)
    meeting.clock.advance(31)
    gate = held_up(meeting, slow, "incarnations")
    judged = Later(meeting.connect(), lambda conn: value(conn, "flag_dead_workers")).start(meeting.db)
    assert judged.waited
    call(meeting.db, "heartbeat", incarnation=heard)
    gate.execute("select pg_advisory_unlock(1)")
    assert judged.join().result() == 1
    flagged = meeting.db.execute("select id from gangq.incarnations where flagged_at is not null").fetchall()
    assert [row["id"] for row in flagged] == [slow]
    assert meeting.violations() == []


def test_a_gang_that_was_freed_and_reserved_anew_since_the_look_loses_nothing(meeting: Arena) -> None:
    one, two, three = (meeting.worker(name) for name in ("w1", "w2", "w3"))
    gangs = [meeting.gang(1)[0] for _ in range(2)]
    for gang_id, worker in zip(gangs, (one, two), strict=True):
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    slow, anew = gangs
    meeting.db.execute(
        "update gangq.incarnations set state = 'dead', ended_at = gangq.now() where id = any (%s)",
        ([one, two],),
    )
    gate = held_up(meeting, slow)
    judged = Later(
        meeting.connect(), lambda conn: conn.execute("select gangq.free_orphans(null)").fetchall()
    ).start(meeting.db)
    assert judged.waited
    assert value(meeting.db, "rollback_gang", gang_id=anew)
    assert value(meeting.db, "reserve_gang", gang_id=anew, incarnations=[three])
    gate.execute("select pg_advisory_unlock(1)")
    judged.join().result()
    assert [meeting.gang_row(gang_id)["state"] for gang_id in gangs] == ["blocked", "reserved"]
    assert meeting.violations() == []


def test_a_job_that_was_freed_and_claimed_anew_since_the_look_is_not_taken_from_its_new_worker(
    meeting: Arena,
) -> None:
    dead, healthy = meeting.worker("w1", slots=2), meeting.worker("w2")
    slow, anew = meeting.job(), meeting.job()
    tokens = {row["job_id"]: row["token"] for row in meeting.claim(dead, max_jobs=2)}
    meeting.db.execute(
        "update gangq.incarnations set state = 'dead', ended_at = gangq.now() where id = %s", (dead,)
    )
    gate = held_up(meeting, slow, "live_jobs")
    judged = Later(
        meeting.connect(), lambda conn: conn.execute("select gangq.free_orphans(null)").fetchall()
    ).start(meeting.db)
    assert judged.waited
    call(meeting.db, "release", job_ids=[anew], tokens=[tokens[anew]])
    assert [row["job_id"] for row in meeting.claim(healthy)] == [anew]
    gate.execute("select pg_advisory_unlock(1)")
    judged.join().result()
    assert [meeting.state(job) for job in (slow, anew)] == ["pending", "running"]
    assert meeting.violations() == []


@pytest.mark.parametrize("kind", ["gang", "job"])
def test_what_left_a_drained_host_since_the_look_is_not_told_to_stop(meeting: Arena, kind: str) -> None:
    here, also_here, elsewhere = (
        meeting.worker("w1", host="h1"),
        meeting.worker("w2", host="h1"),
        meeting.worker("w3"),
    )
    slow, _, _ = meeting.running_gang([here])
    if kind == "gang":
        gone, (job,), (token,) = meeting.running_gang([also_here])
    else:
        job, token = meeting.running(also_here)
    meeting.db.execute(
        "select gangq.cordon(host => 'h1', drain => true, deadline => gangq.now() + interval '1 s')"
    )
    meeting.clock.advance(2)
    gate = held_up(meeting, slow)
    judged = Later(meeting.connect(), lambda conn: value(conn, "move_away")).start(meeting.db)
    assert judged.waited
    if kind == "gang":
        assert value(meeting.db, "preempt_gang", gang_id=gone)
        value(meeting.db, "ack_preempted", job_id=job, token=token)
        assert value(meeting.db, "reserve_gang", gang_id=gone, incarnations=[elsewhere])
        assert meeting.claim(elsewhere)
    else:
        call(meeting.db, "release", job_ids=[job], tokens=[token])
        assert [row["job_id"] for row in meeting.claim(elsewhere)] == [job]
    gate.execute("select pg_advisory_unlock(1)")
    assert judged.join().result() == 1
    assert meeting.state(job) == "running"
    assert meeting.violations() == []


def test_a_job_that_stopped_and_was_told_to_stop_anew_since_the_look_is_not_forced(meeting: Arena) -> None:
    worker = meeting.worker("w1", slots=2)
    slow, _, _ = meeting.running_gang([worker])
    job, token = meeting.running(worker)
    value(meeting.db, "preempt_gang", gang_id=slow)
    value(meeting.db, "displace_job", job_id=job)
    for _ in range(16):
        meeting.clock.advance(20)
        call(meeting.db, "heartbeat", incarnation=worker)
    gate = held_up(meeting, slow)
    judged = Later(meeting.connect(), lambda conn: value(conn, "reap_expired")).start(meeting.db)
    assert judged.waited
    value(meeting.db, "ack_preempted", job_id=job, token=token)
    assert [row["job_id"] for row in meeting.claim(worker)] == [job]
    value(meeting.db, "displace_job", job_id=job)
    gate.execute("select pg_advisory_unlock(1)")
    assert judged.join().result() == 1, "the member of the gang"
    assert meeting.state(job) == "preempting"
    assert meeting.violations() == []
