"""gangq bench: what somebody's own server gives, in about a minute, in a scratch database that is removed."""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from gangq.cli.loops import Interrupts
from gangq.cli.output import say
from gangq.cli.session import Session, common_options
from gangq.cli.tables import columns
from gangq.errors import GangqError, NotAllowed
from gangq.proc import killing

if TYPE_CHECKING:
    import psycopg

_PREFIX = "gangq_bench_"
_ENQUEUE_S = 2.0
_PHASE_S = 10.0
_START_S = 30.0
_BATCH = 100
_PICKUPS = 100
_WARM_UP = 5
_STOP_S = 10.0
_GAP_S = 0.05
_NONE_IS_LIVE = "not exists (select 1 from gangq.live_jobs)"
_ROLES = "select rolname from pg_catalog.pg_roles where rolname like 'gangq\\_%'"


class Measured(NamedTuple):
    """One number."""

    measure: str
    value: float
    unit: str


_COLUMNS = columns(
    "measure >value unit", {"value": lambda m: f"{m.value:,.2f}" if m.value < 100 else f"{m.value:,.0f}"}
)


@click.command()
@click.option(
    "--jobs",
    type=click.IntRange(100, 1_000_000),
    default=10_000,
    show_default=True,
    help="How many no-op jobs to submit in one call and drain.",
)
@common_options
def bench(session: Session, jobs: int) -> None:
    """Measure this database server: enqueue, drain and pick-up latency of no-op jobs.

    In a new database, gangq_bench_..., which is removed at the end, also after Ctrl-C. Needs a login that
    may create databases. Where the server is busy the numbers are those of a busy server, and its other
    users notice. With --json one object per measure: {"measure", "value", "unit"}.
    """
    with Interrupts(last=1) as stop, _scratch(session.dsn()) as dsn:
        measured = []
        for one in _measure(dsn, jobs):
            measured.append(one)
            if stop.count:  # What a signal raises in the middle of a finaliser is lost there.
                raise KeyboardInterrupt
        session.rows(measured, _COLUMNS, "nothing was measured")


@contextmanager
def _scratch(dsn: str) -> Iterator[str]:
    """A database of its own with the schema in it; afterwards it is gone, and the roles that came with it."""
    # Not at the top, as below: completion asks this module for options, without a database.
    import psycopg
    from psycopg import sql
    from psycopg.conninfo import make_conninfo

    from gangq import schema
    from gangq.client import core

    target = core.target(dsn, {})
    name = f"{_PREFIX}{secrets.token_hex(4)}"
    try:
        admin = psycopg.connect(target.conninfo, autocommit=True)
    except psycopg.Error as e:
        raise target.unreachable(e) from None
    with admin:
        for (leftover,) in admin.execute(
            "select datname from pg_catalog.pg_database d where starts_with(datname, %s) "
            "and not exists (select 1 from pg_catalog.pg_stat_activity a where a.datid = d.oid)",
            (_PREFIX,),
        ):
            say(f"database {leftover} was left by a run that was killed: drop database {leftover};")
        roles = {role for (role,) in admin.execute(_ROLES)}
        try:
            admin.execute(
                sql.SQL("create database {} encoding 'UTF8' template template0").format(sql.Identifier(name))
            )
        except psycopg.errors.InsufficientPrivilege:
            raise NotAllowed(
                f"{admin.info.user} may not create databases on {target}: give --dsn a login that may, or have an "
                f"administrator run  alter role {admin.info.user} createdb"
            ) from None
        except psycopg.Error as e:
            raise target.failed(e, "create database") from None
        try:
            scratch = make_conninfo(target.conninfo, dbname=name)
            say(f"in the scratch database {name}")
            schema.migrate(scratch, log=lambda _: None)
            yield scratch
        finally:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
            for (role,) in admin.execute(_ROLES).fetchall():
                if role not in roles:
                    admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def _measure(dsn: str, jobs: int) -> Iterator[Measured]:
    import psycopg

    from gangq.client import Client

    with Client(dsn, max_size=2) as client, psycopg.connect(dsn, autocommit=True) as look:
        client.tick(force=True)  # What the first tick of an installation does belongs to no job.
        yield _each(look, "a round trip, median", "select 1")
        look.execute("create table public.bench_commits (n integer)")
        yield _each(look, "a commit, median", "insert into public.bench_commits values (1)")

        say("enqueueing")
        ids: list[int] = []
        began = time.monotonic()
        while time.monotonic() - began < _ENQUEUE_S:
            ids += client.submit(task="noop")
        yield Measured("enqueue one by one", len(ids) / (time.monotonic() - began), "jobs/s")
        began = time.monotonic()
        ids += client.submit(task="noop", payloads=[{}] * jobs)
        yield Measured(f"enqueue {jobs:,} in one call", jobs / (time.monotonic() - began), "jobs/s")

        say(f"draining {len(ids):,} jobs")
        look.execute("vacuum analyze")
        with _worker(dsn, _BATCH) as worker:
            yield _drained(look, worker, f"drain, {_BATCH} at a time, one worker", 3 * _PHASE_S)
        client.cancel(job_ids=[id for (id,) in look.execute("select id from gangq.live_jobs")])

        with _worker(dsn, 1) as worker:
            say("waiting for an idle worker")
            picked: list[int] = []
            if not _until(look, worker, "exists (select 1 from gangq.sleepers)", _START_S):
                raise GangqError(f"no worker was ready within {_START_S:.0f} s: {worker.last_words()}")
            for _ in range(_WARM_UP + _PICKUPS):
                time.sleep(_GAP_S)
                picked += client.submit(task="noop")
            _until(look, worker, _NONE_IS_LIVE, _PHASE_S)
            waits = sorted(
                wait * 1000
                for (wait,) in look.execute(
                    "select extract(epoch from claimed_at - submitted_at)::float8 from gangq.history "
                    "where job_id = any (%s) and claimed_at is not null",
                    (picked[_WARM_UP:],),
                )
            )
            yield Measured("pick-up by an idle worker, p50", statistics.median(waits), "ms")
            yield Measured("pick-up by an idle worker, p99", waits[-max(1, len(waits) // 100)], "ms")
            say("one job at a time")
            client.submit(task="noop", payloads=[{}] * 1000)
            yield _drained(look, worker, "drain, one at a time, one worker", _PHASE_S, after=max(picked))


def _each(look: psycopg.Connection[Any], what: str, statement: str) -> Measured:
    taken = []
    for _ in range(200):
        began = time.monotonic_ns()
        look.execute(statement.encode(), prepare=True)
        taken.append((time.monotonic_ns() - began) / 1e6)
    return Measured(what, statistics.median(taken), "ms")


def _drained(
    look: psycopg.Connection[Any], worker: _Worker, what: str, most_s: float, *, after: int = 0
) -> Measured:
    """Jobs a second, by the database's clock, from the first claim to the last ending; or of `most_s`."""
    _until(look, worker, _NONE_IS_LIVE, most_s)
    row = look.execute(
        "select count(*), extract(epoch from max(finished_at) - min(claimed_at))::float8 "
        "from gangq.history where claimed_at is not null and job_id > %s",
        (after,),
    ).fetchone()
    assert row is not None
    count, took = row
    if not count or not took:
        raise GangqError(f"no job was done within {most_s:.0f} s: {worker.last_words()}")
    return Measured(what, count / took, "jobs/s")


def _until(look: psycopg.Connection[Any], worker: _Worker, condition: str, most_s: float) -> bool:
    """Wait for a condition in SQL, as long as the worker runs; whether it came in time."""
    began = time.monotonic()
    while time.monotonic() - began < most_s:
        worker.check()
        row = look.execute(f"select {condition}".encode()).fetchone()
        if row == (True,):
            return True
        time.sleep(0.05)
    return False


class _Worker:
    """A worker process, and what it said."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raise if it has ended."""
        if (code := self._process.poll()) is not None:
            raise GangqError(f"the worker ended with {code}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-500:] or "it said nothing"


@contextmanager
def _worker(dsn: str, prefetch: int) -> Iterator[_Worker]:
    with tempfile.TemporaryFile() as log:
        # The DSN may hold a password: not in the arguments, which everybody on the host can read.
        process = subprocess.Popen(
            [sys.executable, "-m", "gangq.cli.bench", str(prefetch)],
            env={**os.environ, "GANGQ_DSN": dsn},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _Worker(process, log)
        finally:
            # In order, so that nobody is woken in its place.
            process.terminate()
            killing.end_group(process, _STOP_S)


def _work(prefetch: int) -> int:
    from gangq.app import App
    from gangq.worker.main import run_worker

    app = App(os.environ["GANGQ_DSN"])

    @app.task
    def noop(ctx: Any) -> None:
        pass

    return run_worker(app, name=f"bench-{prefetch}", prefetch=prefetch, slots=0, devices="none")


if __name__ == "__main__":
    sys.exit(_work(int(sys.argv[1])))
