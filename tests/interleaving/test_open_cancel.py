"""A cancel that is not committed holds its own gangs and jobs, and nobody else's."""

from __future__ import annotations

import time

import pytest

from interleaving.sessions import DEADLINE_S, Arena, Connection, Later, call, value
from sql.drive import PLACED, tick


def reap(meeting: Arena, *heard: int) -> int:
    """Let the leases of all others end; how many the ticks reaped that may wait for nobody."""
    others = meeting.connect(statement_timeout="1000")
    reaped = 0
    for _ in range(3):
        meeting.clock.advance(41)
        for incarnation in heard:
            call(others, "heartbeat", incarnation=incarnation)
        row = tick(others)
        assert {step: n for step, n in row["detail"].items() if n < 0} == {}
        reaped += row["detail"]["reap_expired"]
    return reaped


def wait_until_held_for(watcher: Connection, waits: Connection, holder: Connection, how_long: str) -> None:
    """Return once `waits` has waited for a lock of `holder` for so long, or waits no more."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        row = watcher.execute(
            "select %s = any (pg_blocking_pids(l.pid)) and l.waitstart < clock_timestamp() - %s::interval "
            "as held, a.state = 'active' as active from pg_stat_activity a "
            "left join pg_locks l on l.pid = a.pid and not l.granted where a.pid = %s",
            (holder.info.backend_pid, how_long, waits.info.backend_pid),
        ).fetchone()
        assert row is not None
        if row["held"] or not row["active"]:
            return
        time.sleep(0.01)
    raise AssertionError("it never came to wait for that lock")


@pytest.mark.parametrize(
    "what", ["a dependent of what crashed", "a gang workers are kept for", "a running gang", "a running job"]
)
def test_an_open_cancel_does_not_stop_the_reaping_of_others(meeting, what):
    heard, lost, held = (meeting.worker(name) for name in ("heard", "lost", "held"))
    frozen: Connection = meeting.connect(autocommit=False)
    if what == "a dependent of what crashed":
        # Lost for the second and last time: its dependents are to be told, and one of them is held.
        job, _ = meeting.running(held, max_crashes=1)
        meeting.db.execute("update gangq.live_jobs set crashes = 1 where id = %s", (job,))
        call(frozen, "cancel", job_ids=[meeting.job(after=[job])])
    elif what == "a gang workers are kept for":
        meeting.running(heard, budget_s=1, **PLACED)
        meeting.running(held, **PLACED)
        gang_id, _ = meeting.gang(3)
        meeting.running(lost, **PLACED)
        meeting.tick()
        planned = "select jsonb_array_length(seats) as n from gangq.plans"
        assert meeting.db.execute(planned).fetchall() == [{"n": 3}]
        call(frozen, "cancel", gang_ids=[gang_id])
    elif what == "a running gang":
        gang_id, _, _ = meeting.running_gang([held])
        call(frozen, "cancel", gang_ids=[gang_id])
    else:
        job, _ = meeting.running(held)
        call(frozen, "cancel", job_ids=[job])
    if what != "a gang workers are kept for":
        meeting.running(lost)
    assert reap(meeting, heard) >= 3, "two workers, and the job of one of them"
    rows = meeting.db.execute("select name, state from gangq.workers order by name").fetchall()
    assert {row["name"]: row["state"] for row in rows} == {"heard": "live", "held": "dead", "lost": "dead"}
    assert meeting.db.execute(
        "select count(*) as n from gangq.live_jobs where incarnation = %s", (lost,)
    ).fetchone() == {"n": 0}
    frozen.rollback()
    meeting.tick()
    meeting.tick()
    assert meeting.db.execute(
        "select count(*) as n from gangq.live_jobs where incarnation = %s", (held,)
    ).fetchone() == {"n": 0}
    assert meeting.violations() == []


def test_a_worker_whose_reserved_gang_is_being_cancelled_takes_its_other_work_after_a_moment(meeting):
    worker = meeting.worker("w1", slots=2)
    gang_id, (member,) = meeting.gang(1)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    solo = meeting.job()
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", gang_ids=[gang_id])
    claim = Later(meeting.connect(), lambda conn: call(conn, "claim", incarnation=worker, max_jobs=2))
    claim.start(meeting.db)
    assert claim.waited, "a sibling's claim would hold the gang only for a moment: it is waited for"
    claimed = claim.join().result()
    assert [row["job_id"] for row in claimed] == [solo]
    assert 0.15 < claim.seconds < 1.5
    frozen.rollback()
    assert [row["job_id"] for row in meeting.claim(worker, max_jobs=2)] == [member]
    assert meeting.gang_row(gang_id)["state"] == "running"
    assert meeting.violations() == []


def test_a_gang_that_is_being_cancelled_keeps_no_other_gang_of_its_worker_waiting(meeting):
    worker = meeting.worker("w1", slots=2)
    (held, _), (other, (member,)) = (meeting.gang(1) for _ in range(2))
    for gang_id in (held, other):
        assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", gang_ids=[held])
    assert [row["job_id"] for row in meeting.claim(worker, max_jobs=2)] == [member]
    frozen.rollback()


def test_a_claim_that_gave_up_on_a_gang_waits_as_long_as_ever_for_its_own_worker(meeting):
    worker = meeting.worker("w1", slots=2)
    gang_id, _ = meeting.gang(1)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=[worker])
    solo = meeting.job()
    frozen, busy = meeting.connect(autocommit=False), meeting.connect(autocommit=False)
    call(frozen, "cancel", gang_ids=[gang_id])
    busy.execute("select 1 from gangq.incarnations where id = %s for update", (worker,))
    mine = meeting.connect()
    claim = Later(mine, lambda conn: call(conn, "claim", incarnation=worker)).start(meeting.db)
    wait_until_held_for(meeting.db, mine, busy, "500ms")
    busy.rollback()
    assert [row["job_id"] for row in claim.join().result()] == [solo]
    frozen.rollback()
