"""NOTIFY needs no right: a login without roles floods a worker, which does not work more for that."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cli.cli_process import answers, eventually, worker
from gangq.client import Client

pytestmark = pytest.mark.slow

SECONDS = 3.0
MOST = SECONDS / 0.05
Db = psycopg.Connection[dict[str, Any]]


class Flood:
    """Notifications from another login, as many as it can send."""

    def __init__(self, dsn: str, login: str, sent: list[tuple[str, str]]) -> None:
        self.count = 0
        self._over = threading.Event()
        self._dsn, self._login, self._sent = dsn, login, sent
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            conn.execute(f"set session authorization {self._login}".encode())
            while not self._over.is_set():
                for channel, payload in self._sent:
                    conn.execute("select pg_notify(%s, %s)", (channel, payload))
                    self.count += 1


def calls(db: Db) -> dict[str, int]:
    """How often each function was called so far, of sessions that have said so."""
    rows = db.execute(
        "select funcname, calls from pg_stat_user_functions where schemaname = 'gangq'"
    ).fetchall()
    return {row["funcname"]: row["calls"] for row in rows}


@pytest.fixture
def stranger(db: Db) -> Any:
    name = f"stranger_{db.info.backend_pid}"
    db.execute(f"create role {name} login".encode())
    yield name
    db.execute(f"drop role {name}".encode())


def test_a_flood_of_notifications_makes_a_worker_ask_twenty_times_a_second_at_most(
    dsn: str, db: Db, client: Client, tmp_path: Path, stranger: str
) -> None:
    db.execute(f"alter database {db.info.dbname} set track_functions = 'all'".encode())
    with worker(dsn, tmp_path, "w1", "--queue", "default", "--json"):
        (found,) = answers(dsn, "workers")
        own = f"gangq_{found['incarnation']}"
        sent = [
            ("gangq_wake", "default"),
            (own, "claim"),
            (own, "tick"),
            (own, "stop"),
            (own, "go"),
            (own, "wake"),
        ]
        with Flood(dsn, stranger, sent) as flood:
            time.sleep(SECONDS)
            # It works meanwhile, and what is for it is found in time.
            job = client.submit(task="command", payloads=[{"argv": ["true"]}])[0]
            asked = time.monotonic()
            eventually(lambda: client.job(id=job).state == "done", "the job is done")
            assert time.monotonic() - asked < 5
            lasted = time.monotonic() - asked + SECONDS
        assert flood.count > 10 * MOST, "it was a flood"
    eventually(lambda: calls(db).get("retire_worker", 0) > 0, "its statistics have arrived")
    most = lasted / 0.05 + 20
    found = calls(db)
    for name in ("claim", "tick", "heartbeat"):
        assert found[name] <= most, (name, found[name], flood.count)
