"""The floor of waking somebody: one NOTIFY from psycopg to psycopg, and no job."""

from __future__ import annotations

import contextlib

import psycopg
from marks import Marks

from systems.base import Enqueuers, System


class _Notifier:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def one_by_one(self, count: int) -> None:
        raise NotImplementedError

    def many(self, count: int) -> None:
        raise NotImplementedError

    def numbered(self, number: int) -> None:
        self._connection.execute("select pg_notify('bench', %s)", (str(number),))


class Notify(System):
    """It loses what nobody listens for: the first of them is said again until it is heard."""

    name = "notify"
    unfinished = "select false"
    measures = ("pickup",)

    def version(self) -> str:
        return ""

    def install(self, dsn: str) -> None:
        pass

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield _Notifier(connection)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("listen bench")
            for heard in connection.notifies():
                marks.started(int(heard.payload))
