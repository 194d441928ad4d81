"""absurd: its synchronous worker, one job after the other, claimed 100 at a time.

Its SDK brings no SQL; its own tool absurdctl does, and what `absurdctl init` applies is applied here without psql.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import psycopg
from absurd_sdk import Absurd as Sdk
from absurdctl import BUNDLED_SCHEMA_SQL
from marks import Marks

from systems.base import Enqueuers, System

_QUEUE = "bench"


class _AbsurdEnqueuer:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._sdk = Sdk(connection, queue_name=_QUEUE)

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._sdk.spawn("noop", {}, queue=_QUEUE)

    def many(self, count: int) -> None:
        with self._connection.transaction():
            self.one_by_one(count)

    def numbered(self, number: int) -> None:
        self._sdk.spawn("noop", {"n": number}, queue=_QUEUE)


class Absurd(System):
    """It has no call for many jobs: they are spawned in one transaction."""

    name = "absurd"
    unfinished = (
        "select exists (select 1 from absurd.t_bench where state in ('pending', 'running', 'sleeping'))"
    )
    slowness = 5
    poll_s = 0.25

    def version(self) -> str:
        return f"absurd-sdk {version('absurd-sdk')}, SQL of absurdctl {version('absurdctl')}"

    def install(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(BUNDLED_SCHEMA_SQL)
            Sdk(connection, queue_name=_QUEUE).create_queue(_QUEUE)

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield _AbsurdEnqueuer(connection)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        sdk = Sdk(dsn, queue_name=_QUEUE)

        @sdk.register_task(name="noop")
        def noop(params: dict[str, Any], ctx: object) -> None:
            marks.started(params.get("n", -1))

        sdk.start_worker(concurrency=1, batch_size=batch, poll_interval=self.poll_s)
