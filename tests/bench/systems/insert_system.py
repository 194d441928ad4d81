"""The floor of enqueueing: a plain INSERT into a table of gangq's own width.

The table has the columns of ``gangq.live_jobs`` and a primary key; what goes into a row is what gangq stores for the
same job, copied from one that it was given. So it follows gangq's tables as they change.
"""

from __future__ import annotations

import contextlib

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from gangq.client import Client
from gangq.schema import migrate
from systems.base import Enqueuers, System

_TABLE = """
create table plain (like gangq.live_jobs including defaults);
alter table plain add primary key (id);
alter table plain alter id add generated always as identity;
"""


class _PlainEnqueuer:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        with connection.cursor(row_factory=dict_row) as cursor:
            stored = cursor.execute("select * from gangq.live_jobs").fetchone()
        assert stored is not None
        given = {n: v for n, v in stored.items() if v is not None and n not in ("id", "payload")}
        names = sql.SQL(", ").join(map(sql.Identifier, [*given, "payload"]))
        values = sql.SQL(", ").join(map(sql.Literal, given.values()))
        into = sql.SQL("insert into plain ({}) select {}, ").format(names, values)
        self._one = (into + sql.SQL("%s::jsonb returning id")).as_bytes(connection)
        self._many = (into + sql.SQL("unnest(%s::jsonb[]) returning id")).as_bytes(connection)

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._connection.execute(self._one, ("{}",)).fetchone()

    def many(self, count: int) -> None:
        self._connection.execute(self._many, (["{}"] * count,)).fetchall()

    def numbered(self, number: int) -> None:
        self._connection.execute(self._one, (Jsonb({"n": number}),)).fetchone()


class Insert(System):
    """INSERT ... RETURNING id, and INSERT ... SELECT unnest, by bare psycopg; nobody works the jobs off."""

    name = "insert"
    unfinished = "select exists (select 1 from plain)"
    measures = ("enqueue",)

    def version(self) -> str:
        return ""

    def install(self, dsn: str) -> None:
        migrate(dsn, log=lambda _: None)
        with Client(dsn) as client:
            client.submit(task="noop")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_TABLE)

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield _PlainEnqueuer(connection)
