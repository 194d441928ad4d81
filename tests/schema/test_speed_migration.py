"""An installation of the release before, with workers at it, gets cheaper statements."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg

from gangq import schema


def test_it_gives_way_to_a_heartbeat_that_is_half_done(
    empty_dsn: str, migrate_to: Callable[[str], None]
) -> None:
    migrate_to("0004_pace")
    waits = "select exists (select 1 from pg_locks where relation is not null and not granted)"
    with (
        psycopg.connect(empty_dsn) as worker,
        psycopg.connect(empty_dsn, autocommit=True) as watcher,
        ThreadPoolExecutor() as threads,
    ):
        worker.execute("update gangq.leases set renewed_at = renewed_at")
        migration = threads.submit(schema.migrate, empty_dsn, log=lambda _: None)
        while watcher.execute(waits).fetchone() != (True,):
            assert not migration.done()
        assert worker.execute("select id from gangq.live_jobs").fetchall() == []
        worker.commit()
        assert migration.result().applied[0] == "0005_speed"
