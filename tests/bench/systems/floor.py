"""The floor: the least SQL that is still a queue, by bare psycopg. Nothing on PostgreSQL from Python that
claims and finishes in two statements can be much faster; what gangq costs beyond it buys its guarantees.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import psycopg
from marks import Marks

from systems.base import Enqueuers, System

_TABLE = """
create table floor_jobs (
  id bigint generated always as identity primary key,
  submitted_at timestamptz not null default clock_timestamp(),
  claimed_at timestamptz,
  finished_at timestamptz,
  priority smallint not null default 0,
  attempts smallint not null default 0,
  state text not null default 'pending',
  task text not null,
  payload jsonb not null
);
create index floor_jobs_pending on floor_jobs (priority desc, id) where state = 'pending';
"""

_INSERT = "insert into floor_jobs (task, payload) values ('noop', %s) returning id"
_INSERT_MANY = "insert into floor_jobs (task, payload) select 'noop', unnest(%s::jsonb[]) returning id"
_INSERT_AND_WAKE = (
    "with born as (insert into floor_jobs (task, payload) values ('noop', %s) returning id) "
    "select id, pg_notify('floor', '') from born"
)
_CLAIM = """
update floor_jobs set state = 'running', claimed_at = clock_timestamp(), attempts = attempts + 1
where id = any (array(
  select id from floor_jobs where state = 'pending'
  order by priority desc, id limit %s for update skip locked))
returning id, payload
"""
_DONE = "update floor_jobs set state = 'done', finished_at = clock_timestamp() where id = any (%s)"

_DONE_AND_CLAIM = f"with finished as ({_DONE.replace('%s', '%s::bigint[]')}) {_CLAIM}"


class _FloorEnqueuer:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._connection.execute(_INSERT, ("{}",)).fetchone()

    def many(self, count: int) -> None:
        self._connection.execute(_INSERT_MANY, (["{}"] * count,)).fetchall()

    def numbered(self, number: int) -> None:
        self._connection.execute(_INSERT_AND_WAKE, (f'{{"n": {number}}}',)).fetchone()


class Floor(System):
    """Claim by UPDATE ... FOR UPDATE SKIP LOCKED, finish by UPDATE, on one connection."""

    name = "floor"
    unfinished = "select exists (select 1 from floor_jobs where state <> 'done')"
    best = 1000

    def version(self) -> str:
        return f"psycopg {version('psycopg')}"

    def install(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_TABLE)

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield _FloorEnqueuer(connection)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        with (
            psycopg.connect(dsn, autocommit=True) as listener,
            psycopg.connect(dsn, autocommit=True) as connection,
        ):
            listener.execute("listen floor")
            while True:
                jobs = connection.execute(_CLAIM, (batch,)).fetchall()
                for _, payload in jobs:
                    marks.started(payload.get("n", -1))
                if jobs:
                    connection.execute(_DONE, ([job_id for job_id, _ in jobs],))
                else:
                    for _ in listener.notifies(timeout=1.0, stop_after=1):
                        pass


class Fused(Floor):
    """The last jobs are finished and the next are claimed by one statement, in one round trip."""

    name = "fused"
    measures = ("drain", "drain2", "single", "work")

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        done: list[int] = []
        with (
            psycopg.connect(dsn, autocommit=True) as listener,
            psycopg.connect(dsn, autocommit=True) as connection,
        ):
            listener.execute("listen floor")
            while True:
                jobs = connection.execute(_DONE_AND_CLAIM, (done, batch)).fetchall()
                for _, payload in jobs:
                    marks.started(payload.get("n", -1))
                done = [job_id for job_id, _ in jobs]
                if not done:
                    for _ in listener.notifies(timeout=1.0, stop_after=1):
                        pass
