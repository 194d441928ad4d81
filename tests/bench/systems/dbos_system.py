"""DBOS: a queue with its defaults, so no cap on what runs at once and a look every second.

One job at a time would be one job a look, and of two workers the first to look takes all: not measured. Its rate is
too good: what it claims before its first job starts is all that waits, and the clock has not begun.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from dbos import DBOS, DBOSClient
from marks import Marks

from systems.base import Enqueuers, System

_QUEUE = "bench"
_VERSION = "bench"


def _launch(dsn: str, marks: Marks | None) -> None:
    """Launch makes the tables as well."""
    logging.getLogger("dbos").setLevel(logging.ERROR)
    DBOS(
        config={
            "name": "bench",
            "system_database_url": dsn,
            "log_level": "ERROR",
            "application_version": _VERSION,
        }
    )
    one_at_a_time = threading.Lock()

    @DBOS.workflow(name="noop")
    def noop(n: int = -1) -> None:
        assert marks is not None
        with one_at_a_time:  # Workflows run in threads.
            marks.started(n)

    DBOS.launch()
    DBOS.register_queue(_QUEUE)


class _DbosEnqueuer:
    def __init__(self, client: DBOSClient) -> None:
        self._client = client
        self._options: Any = {"queue_name": _QUEUE, "workflow_name": "noop", "app_version": _VERSION}

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._client.enqueue(self._options)

    def many(self, count: int) -> None:
        with self._client._sys_db.engine.begin() as connection:
            for _ in range(count):
                self._client.enqueue_in_transaction(connection, self._options)

    def numbered(self, number: int) -> None:
        self._client.enqueue(self._options, number)


class Dbos(System):
    """It has no call for many jobs: they are enqueued in one transaction."""

    name = "dbos"
    unfinished = "select exists (select 1 from dbos.workflow_status where status in ('ENQUEUED', 'PENDING'))"
    measures = ("drain", "enqueue", "pickup", "work")
    takes_100 = False
    best = 0
    slowness = 5
    poll_s = 1.0

    def install(self, dsn: str) -> None:
        _launch(dsn, None)
        DBOS.destroy()

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        client = DBOSClient(system_database_url=dsn)
        try:
            yield _DbosEnqueuer(client)
        finally:
            client.destroy()

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        _launch(dsn, marks)
        threading.Event().wait()
