"""chancy as its documentation has it for many short jobs: async jobs on its event loop, 1,000 at a time, polling
again as soon as there is room. Completions are written in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from importlib.metadata import version

import chancy
from chancy import Queue, Worker
from marks import Marks

from systems.base import Enqueuers, System

_CONCURRENCY = 1000
_marks: Marks | None = None


@chancy.job(queue="default")
async def noop(n: int = -1) -> None:
    """Imported by its path in the worker, so a worker process's marks are a global."""
    assert _marks is not None
    _marks.started(n)


def _app(dsn: str) -> chancy.Chancy:
    return chancy.Chancy(dsn, log=logging.getLogger("chancy"))


def _queue(concurrency: int) -> Queue:
    return Queue(
        name="default",
        concurrency=concurrency,
        executor=chancy.Chancy.Executor.Async,
        polling_interval=1,
        eager_polling=True,
    )


class _ChancyEnqueuer:
    def __init__(self, app: chancy.Chancy) -> None:
        self._app = app

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._app.sync_push(noop.job)

    def many(self, count: int) -> None:
        for _ in self._app.sync_push_many([noop.job] * count, batch_size=count):
            pass

    def numbered(self, number: int) -> None:
        self._app.sync_push(noop.job.with_kwargs(n=number))


class Chancy(System):
    """The concurrency is its batch."""

    name = "chancy"
    unfinished = "select exists (select 1 from chancy_jobs where state in ('pending', 'running', 'retrying'))"
    takes_100 = False
    best = _CONCURRENCY
    slowness = 2

    def version(self) -> str:
        return f"chancy {version('chancy')}"

    def install(self, dsn: str) -> None:
        async def install() -> None:
            async with _app(dsn) as app:
                await app.migrate()
                await app.declare(_queue(_CONCURRENCY))

        asyncio.run(install())

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with _app(dsn) as app:
            yield _ChancyEnqueuer(app)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        global _marks
        _marks = marks

        async def serve() -> None:
            async with _app(dsn) as app:
                await app.declare(_queue(batch or _CONCURRENCY), upsert=True)
                async with Worker(app) as worker:
                    await worker.wait_for_shutdown()

        asyncio.run(serve())
