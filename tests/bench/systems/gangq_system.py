"""gangq, as a user has it: `Client.submit` on one side, a worker of `gangq.worker.main` on the other."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import version
from typing import Any

from marks import Marks

from gangq.app import App
from gangq.client import Client
from gangq.schema import migrate
from gangq.worker.main import run_worker
from systems.base import Enqueuers, System


class _GangqEnqueuer:
    def __init__(self, client: Client) -> None:
        self._client = client

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._client.submit(task="noop")

    def many(self, count: int) -> None:
        self._client.submit(task="noop", payloads=[{}] * count)

    def numbered(self, number: int) -> None:
        self._client.submit(task="noop", payloads=[{"n": number}])


class Gangq(System):
    """The batch of a worker is its prefetch."""

    name = "gangq"
    unfinished = "select exists (select 1 from gangq.live_jobs)"
    best = 1000

    def version(self) -> str:
        return f"gangq {version('gangq')} (psycopg {version('psycopg')})"

    def install(self, dsn: str) -> None:
        migrate(dsn, log=lambda _: None)
        with Client(dsn) as client:
            client.tick(force=True)  # What the first tick of an installation does is not part of any job.

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with Client(dsn, min_size=1, max_size=1) as client:
            yield _GangqEnqueuer(client)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        app = App(dsn)

        @app.task
        def noop(ctx: Any, n: int = -1) -> None:
            marks.started(n)

        sys.exit(run_worker(app, dsn=dsn, name=f"bench-{os.getpid()}", prefetch=batch, devices="none"))
