"""PgQueuer as its documentation recommends it for speed: asyncpg on uvloop, an async handler.

With a batch of 1 it still overlaps a handler with the next dequeue; that is its design, and stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from importlib.metadata import version

import asyncpg  # type: ignore[import-untyped]
import uvloop
from marks import Marks
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

from systems.base import Enqueuers, System

_ENTRYPOINT = "noop"


class _PgQueuerEnqueuer:
    def __init__(self, loop: asyncio.AbstractEventLoop, queries: Queries) -> None:
        self._loop = loop
        self._queries = queries

    def one_by_one(self, count: int) -> None:
        async def each() -> None:
            for _ in range(count):
                await self._queries.enqueue(_ENTRYPOINT, b"{}")

        self._loop.run_until_complete(each())

    def many(self, count: int) -> None:
        self._loop.run_until_complete(
            self._queries.enqueue([_ENTRYPOINT] * count, [b"{}"] * count, [0] * count)
        )

    def numbered(self, number: int) -> None:
        payload = json.dumps({"n": number}).encode()
        self._loop.run_until_complete(self._queries.enqueue(_ENTRYPOINT, payload))


class PgQueuer(System):
    """Its finished jobs leave the queue table; their log rows are written in batches of the batch size."""

    name = "pgqueuer"
    unfinished = "select exists (select 1 from pgqueuer)"
    best = 500

    def version(self) -> str:
        parts = ", ".join(f"{name} {version(name)}" for name in ("asyncpg", "uvloop"))
        return f"pgqueuer {version('pgqueuer')} ({parts})"

    def install(self, dsn: str) -> None:
        async def install() -> None:
            connection = await asyncpg.connect(dsn)
            await Queries.from_asyncpg_connection(connection).install()
            await connection.close()

        uvloop.run(install())

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        loop = uvloop.new_event_loop()
        connection = loop.run_until_complete(asyncpg.connect(dsn))
        try:
            yield _PgQueuerEnqueuer(loop, Queries.from_asyncpg_connection(connection))
        finally:
            loop.run_until_complete(connection.close())
            loop.close()

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        async def serve() -> None:
            manager = QueueManager(Queries.from_asyncpg_connection(await asyncpg.connect(dsn)))

            @manager.entrypoint(_ENTRYPOINT)
            async def noop(job: Job) -> None:
                marks.started(json.loads(job.payload or b"{}").get("n", -1))

            await manager.run(batch_size=batch)

        uvloop.run(serve())
