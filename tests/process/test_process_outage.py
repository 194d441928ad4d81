"""The database goes away: for less than a lease it costs nothing, for longer it costs time and no attempt."""

from __future__ import annotations

import signal
import time
from typing import Any

import psycopg

from gangq.embedded import Server
from process.floor import LEASE_S, PATIENCE_S, Floor, Restarter
from worker.worker_process import eventually

OBEYING, DEAF = {"deaf": False}, {"deaf": True}


def until_gang_at_work(floor: Floor, gang: Any) -> list[int]:
    for job in gang.job_ids:
        floor.until_at_work(job)
    return list(gang.job_ids)


def test_the_kill_of_postgresql_costs_running_work_nothing(mortal_floor: Floor, mortal: Server) -> None:
    floor = mortal_floor
    floor.configure(lease_s=60)  # However long it takes to start again.
    inline = floor.start("inline", commands=False)
    handler = floor.inline(payload=DEAF)
    floor.until_at_work(handler)
    commands = floor.start("commands", slots=2, light=2)
    command = floor.command("--below")
    floor.until_at_work(command, 2)
    gang = floor.client.submit_gang(task="command", size=2, payload=floor.work())
    jobs = [handler, command, *until_gang_at_work(floor, gang)]
    before = {job: (floor.journal.attempts(job), sorted(floor.journal.living(job))) for job in jobs}
    incarnations = [w.incarnation for w in floor.client.workers()]

    mortal.kill()
    mortal.start()

    beaten = max(w.renewed_at for w in floor.client.workers())
    eventually(lambda: all(w.renewed_at > beaten for w in floor.client.workers()), "both renew", PATIENCE_S)
    # Nothing was touched: the same processes are at work under the same tokens.
    assert {job: (floor.journal.attempts(job), sorted(floor.journal.living(job))) for job in jobs} == before
    floor.go()
    rows = floor.until_done(*jobs)
    assert [(r.attempts, r.crashes, r.stops) for r in rows] == [(1, 0, 0)] * 4
    assert floor.client.gang(id=gang.gang_id).epoch == 1
    assert [w.incarnation for w in floor.client.workers()] == incarnations
    assert (inline.process.poll(), commands.process.poll()) == (None, None)
    floor.until_listening(inline, 2)
    floor.until_done(floor.inline("quick"), floor.command())
    assert [w.state for w in floor.client.workers()] == ["live", "live"]


def test_a_result_that_came_while_postgresql_was_down_is_kept(mortal_floor: Floor, mortal: Server) -> None:
    floor = mortal_floor
    worker = floor.start("w")
    job = floor.inline()
    floor.until_at_work(job)
    mortal.kill()
    floor.go()
    eventually(lambda: "call_repeated" in worker.log, "the result was told, and not heard", PATIENCE_S)
    mortal.start()
    (row,) = floor.until_done(job)
    assert (row.result, row.attempts, row.crashes, row.stops) == ("first", 1, 0, 0)
    assert len(floor.journal.attempts(job)) == 1


def test_work_that_cannot_renew_for_too_long_stops_itself_and_counts_a_stop_only(
    mortal_floor: Floor, mortal: Server
) -> None:
    floor = mortal_floor
    jobs = {}
    options: dict[str, dict[str, Any]] = {"obeying": {}, "deaf": {}, "commands": {"slots": 2, "light": 2}}
    with Restarter(floor, obeying={"commands": False}) as first:
        jobs["obeying"] = floor.inline(payload=OBEYING)
        floor.until_at_work(jobs["obeying"])
        with Restarter(floor, deaf={"commands": False}) as second:
            jobs["deaf"] = floor.inline(payload=DEAF)
            floor.until_at_work(jobs["deaf"])
            with Restarter(floor, commands=options["commands"]) as third:
                jobs["command"] = floor.command("--below", "--deaf")
                floor.until_at_work(jobs["command"], 2)
                gang = floor.client.submit_gang(task="command", size=2, payload=floor.work())
                members = until_gang_at_work(floor, gang)
                everything = [*jobs.values(), *members]
                down = time.monotonic()
                mortal.kill()
                for job in everything:
                    eventually(
                        lambda job=job: not floor.journal.living(job), f"job {job} stopped", PATIENCE_S
                    )  # type: ignore[misc]
                # Before the lease's end, whoever renewed last: nobody needed the database for it.
                assert time.monotonic() - down < LEASE_S
                mortal.start()
                rows = floor.until_done(*everything, timeout=60)
            assert [(r.attempts, r.crashes) for r in rows] == [(1, 0)] * 5
            assert all(r.stops >= 1 for r in rows[:3])
            assert floor.client.gang(id=gang.gang_id).epoch == 2
            assert third.codes == []
        # It could not register until the database was back, and said so each time.
        assert second.codes[0] == 77
        assert set(second.codes[1:]) <= {1}
    assert first.codes == []


def listening_pid(floor: Floor, name: str) -> int:
    """The connection of its control loop."""
    with psycopg.connect(floor.client.target.conninfo, autocommit=True) as conn:
        rows = conn.execute(
            "select pid from pg_stat_activity where application_name = %s and datname = current_database()",
            (f"gangq worker {name}",),
        ).fetchall()
    assert len(rows) == 1, rows
    return int(rows[0][0])


def assert_hears(floor: Floor, job: int) -> None:
    """Only a notification can bring this in time: heartbeats are far apart."""
    asked = time.monotonic()
    floor.client.cancel(job_ids=[job])
    eventually(lambda: floor.client.job(id=job).state == "cancelled", "it is cancelled", 8)
    assert time.monotonic() - asked < 8


def test_a_worker_whose_listening_connection_is_cut_listens_again(floor: Floor) -> None:
    floor.configure(heartbeat_s=60, lease_s=600)
    worker = floor.start("w")
    job = floor.inline()
    floor.until_at_work(job)
    pid = listening_pid(floor, "w")
    with psycopg.connect(floor.client.target.conninfo, autocommit=True) as conn:
        conn.execute("select pg_terminate_backend(%s)", (pid,))
    floor.until_listening(worker, 2)
    assert floor.journal.living(job)
    assert_hears(floor, job)
    floor.until_done(floor.inline("quick"))
    assert worker.process.poll() is None


def test_a_worker_all_of_whose_connections_are_cut_goes_on(floor: Floor) -> None:
    worker = floor.start("w", light=2)
    running = floor.command()
    floor.until_at_work(running)
    theirs = (
        "from pg_stat_activity where datname = current_database() and application_name = 'gangq worker w'"
    )
    with psycopg.connect(floor.client.target.conninfo, autocommit=True) as conn:
        for round_ in range(2, 5):
            # Its main thread runs no handler, and needs none of its own.
            eventually(lambda: len(conn.execute(f"select pid {theirs}").fetchall()) == 1, "it is back")
            assert len(conn.execute(f"select pg_terminate_backend(pid) {theirs}").fetchall()) == 1
            floor.until_listening(worker, round_)
    renewed = floor.worker_row("w").renewed_at
    eventually(lambda: floor.worker_row("w").renewed_at > renewed, "it renews", PATIENCE_S)
    floor.go()
    row, _ = floor.until_done(running, floor.command())
    assert (row.attempts, row.crashes, row.stops) == (1, 0, 0)
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
