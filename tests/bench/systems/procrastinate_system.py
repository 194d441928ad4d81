"""procrastinate: five async jobs at a time on a pool of ten connections, one at a time where that is asked for.

It fetches jobs one by one, so there is no batch to set.
"""

from __future__ import annotations

import asyncio
import contextlib

from marks import Marks
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.tasks import Task

from systems.base import Enqueuers, System

_CONCURRENCY = 5


class _ProcrastinateEnqueuer:
    def __init__(self, noop: Task) -> None:  # type: ignore[type-arg]
        self._noop = noop

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._noop.defer()

    def many(self, count: int) -> None:
        self._noop.batch_defer(*[{}] * count)

    def numbered(self, number: int) -> None:
        self._noop.defer(n=number)


class Procrastinate(System):
    """Finished jobs stay in its table, which is its default."""

    name = "procrastinate"
    unfinished = "select exists (select 1 from procrastinate_jobs where status in ('todo', 'doing'))"
    takes_100 = False
    best = 0
    slowness = 5

    def install(self, dsn: str) -> None:
        with App(connector=SyncPsycopgConnector(conninfo=dsn)).open() as app:
            app.schema_manager.apply_schema()

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        app = App(connector=SyncPsycopgConnector(conninfo=dsn, min_size=1, max_size=1))

        @app.task(name="noop")
        def noop(n: int = -1) -> None:
            raise NotImplementedError

        with app.open():
            yield _ProcrastinateEnqueuer(noop)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        app = App(connector=PsycopgConnector(conninfo=dsn, max_size=10))

        @app.task(name="noop")
        async def noop(n: int = -1) -> None:
            marks.started(n)

        async def serve() -> None:
            async with app.open_async():
                await app.run_worker_async(concurrency=1 if batch == 1 else _CONCURRENCY)

        asyncio.run(serve())
