"""Real workers and a schedule every second: each due time is one job, whoever ticks, dies, or goes away."""

from __future__ import annotations

import itertools
import signal
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.embedded import Server
from process.floor import PATIENCE_S, Floor
from worker.worker_process import WorkerProcess, eventually

TASKS = """
import logging

class Why(logging.Handler):
    def emit(self, record):
        print(getattr(record, "error", ""), getattr(record, "advice", ""), flush=True)

logging.getLogger("gangq.worker.schedules").addHandler(Why())

@app.schedule(every="1s", name="seconds", catch_up="all", due_as="due")
@app.task(name="seconds")
def seconds(ctx, due):
    return due

@app.schedule("* * * * *", tz="Europe/Oslo", skip_if_running=True)
@app.task
def minutes(ctx):
    pass
"""
SECOND = timedelta(seconds=1)


def started(floor: Floor, *names: str, tasks: str = TASKS, **options: Any) -> list[WorkerProcess]:
    floor.fleet.define(tasks)
    return [floor.start(name, **options) for name in names]


def done(client: Client) -> list[datetime]:
    """The due times whose jobs are done, in order."""
    return sorted(
        datetime.fromisoformat(job.result)
        for job in client.jobs(task="seconds", limit=None)
        if job.state == "done"
    )


def until_done(client: Client, count: int, timeout: float = PATIENCE_S) -> list[datetime]:
    eventually(lambda: len(done(client)) >= count, f"{count} due times are done", timeout)
    return done(client)


def in_a_row(dues: list[datetime]) -> bool:
    return all(later - earlier == SECOND for earlier, later in itertools.pairwise(dues))


def logged(worker: WorkerProcess, what: str) -> bool:
    eventually(lambda: what in worker.log, f"{what}\n{worker.log}", PATIENCE_S)
    return True


def test_workers_store_the_schedules_of_their_app_and_run_each_due_time_once(floor: Floor) -> None:
    one, two = started(floor, "one", "two")
    assert in_a_row(until_done(floor.client, 4))
    for worker in (one, two):
        assert logged(worker, "schedules_stored")
    seconds, minutes = (floor.client.schedules(name=name)[0] for name in ("seconds", "minutes"))
    assert (seconds.every, seconds.source, seconds.catch_up) == (SECOND, "tasks:app", "all")
    assert (minutes.cron, minutes.tz, minutes.problem) == ("* * * * *", "Europe/Oslo", None)
    assert minutes.next_due is not None
    assert minutes.next_due.second == 0
    # The one that ticks may die at any moment.
    one.signal(signal.SIGKILL)
    dues = until_done(floor.client, len(done(floor.client)) + 4)
    assert in_a_row(dues)
    assert len(floor.client.events(kind="set_schedule")) == 2, "the second found them as they were"
    jobs = floor.client.jobs(task="seconds", limit=None)
    assert len(jobs) == len({job.payload["due"] for job in jobs})


@pytest.mark.slow
def test_an_outage_of_the_database_loses_no_due_time_and_doubles_none(
    mortal_floor: Floor, mortal: Server
) -> None:
    floor = mortal_floor
    floor.configure(lease_s=60)
    started(floor, "one", "two")
    until_done(floor.client, 2)
    mortal.kill()
    mortal.start()
    before = len(done(floor.client))
    mortal.kill()
    mortal.start()
    until_done(floor.client, before + 4)
    # Two workers: a later one may be done while an earlier one still runs.
    eventually(lambda: in_a_row(done(floor.client)), "no due time is missing", PATIENCE_S)
    jobs = floor.client.jobs(task="seconds", limit=None)
    assert len(jobs) == len({job.payload["due"] for job in jobs})


def test_a_worker_whose_login_may_not_submit_says_so_and_works(floor: Floor) -> None:
    with floor.client.connection() as conn:
        conn.execute("drop role if exists only_worker_test")
        conn.execute("create role only_worker_test login")
        conn.execute("grant gangq_worker to only_worker_test")
    floor.fleet.define(TASKS)
    dsn = psycopg.conninfo.make_conninfo(floor.client.target.conninfo, user="only_worker_test")
    worker = floor.start("w", dsn=dsn)
    assert logged(worker, "schedules_not_stored")
    assert floor.client.schedules() == []
    # It computes and submits what another login has stored.
    floor.client.set_schedule(name="s", task="seconds", every="1s", due_as="due")
    floor.client.set_schedule(name="yearly", task="minutes", cron="0 3 1 1 *")
    until_done(floor.client, 2)
    assert floor.client.schedules(name="yearly")[0].next_due is not None


def test_what_vanished_from_the_code_goes_on_and_the_newest_declaration_wins(floor: Floor) -> None:
    (old,) = started(floor, "w")
    until_done(floor.client, 1)
    old.signal(signal.SIGTERM)
    assert old.exit_code() == 0
    newer = TASKS.replace('@app.schedule("* * * * *", tz="Europe/Oslo", skip_if_running=True)\n', "")
    (new,) = started(floor, "w", tasks=newer.replace('every="1s"', 'every="2s"'))
    assert logged(new, "schedules_undeclared")
    minutes, seconds = floor.client.schedules()
    assert minutes.undeclared_at is not None
    assert minutes.next_due is not None
    assert (seconds.every, seconds.undeclared_at) == (2 * SECOND, None)
    assert "gangq schedule rm NAME" in new.log


def test_a_refused_schedule_keeps_no_worker_from_its_work_nor_from_the_others(floor: Floor) -> None:
    (worker,) = started(
        floor, "w", tasks=TASKS + '\napp.schedule("0 3 * * *", minutes.options(queue="gone"), name="lost")\n'
    )
    assert logged(worker, "schedule_refused")
    assert "queue 'gone' does not exist" in worker.log
    until_done(floor.client, 1)
    assert [row.name for row in floor.client.schedules()] == ["minutes", "seconds"]
