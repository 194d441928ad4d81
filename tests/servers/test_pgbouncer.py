"""The library behind a real PgBouncer, whichever `pgbouncer` is on PATH: calls, workers, the ticker, the doctor."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from gangq.client import AsyncClient, Client
from worker.worker_process import Fleet, eventually, fleet_of, short_leases, until_state

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed (apt-get install pgbouncer)"),
]
_ROOT_AS_NOBODY = ("unshare", "--user", "--map-user=65534", "--map-group=65534", "--")
_CONFIG = """
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr =
unix_socket_dir = {directory}
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
{more}
"""
_PREPARES_SINCE = (1, 21)


@contextmanager
def pooled(dsn: str, mode: str, size: int = 8, more: str = "") -> Iterator[str]:
    """The DSN of a PgBouncer in front of `dsn`; `size` connections at most. It runs as the server's own user: root it
    refuses to be, and the socket is closed to others.
    """
    assert PGBOUNCER is not None
    server = conninfo_to_dict(dsn)
    owner = os.stat(str(server["host"])).st_uid
    with tempfile.TemporaryDirectory(prefix="gangq-pgbouncer-") as directory:
        config = Path(directory, "pgbouncer.ini")
        config.write_text(_CONFIG.format(**server, directory=directory, mode=mode, size=size, more=more))
        for path in (directory, config):
            os.chown(path, owner, -1)
        said = Path(directory, "log")
        with said.open("wb") as log:
            pooler = subprocess.Popen(
                [*(_ROOT_AS_NOBODY if owner == 0 else ()), PGBOUNCER, str(config)],
                user=owner,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            there = f"postgresql://{server['user']}@/{server['dbname']}?host={quote(directory, safe='')}&port=6432"
            eventually(lambda: pooler.poll() is not None or _answers(there), "PgBouncer answers")
            assert pooler.poll() is None, said.read_text()
            yield there
        finally:
            pooler.kill()
            pooler.wait(10)
            print(f"---- PgBouncer\n{said.read_text()}")


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _version() -> tuple[int, ...]:
    assert PGBOUNCER is not None
    said = subprocess.run([PGBOUNCER, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, said.split()[1].split(".")[:2]))


@pytest.fixture(params=["that knows no prepared statements", "that keeps prepared statements"])
def statements(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """A setting of PgBouncer, and whether prepared statements outlive their transaction then."""
    kept = "keeps" in request.param
    if _version() >= _PREPARES_SINCE:
        return f"max_prepared_statements = {100 if kept else 0}", kept
    if kept:
        pytest.skip("this PgBouncer is older than 1.21: it knows no prepared statements in transaction mode")
    return "", False


def test_clients_behind_a_transaction_pool_submit_each_job_once_with_or_without_prepared_statements(
    dsn: str, statements: tuple[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gangq.client")
    setting, kept = statements

    def submit(client: Client, part: int) -> None:
        for number in range(40):
            client.submit(task="t", payloads=[{"part": part, "number": number}])
            client.schema_version()

    # Fewer connections than threads: each call meets what another has left behind.
    with pooled(dsn, "transaction", 2, setting) as there:
        with Client(there, prepare=True) as one, Client(there, max_size=1, prepare=True) as two:
            with ThreadPoolExecutor(4) as threads:
                for done in [
                    threads.submit(submit, client, n) for n, client in enumerate((one, one, two, two))
                ]:
                    done.result()
            found = [(job.payload["part"], job.payload["number"]) for job in one.jobs(limit=1000)]
    assert sorted(found) == [(part, number) for part in range(4) for number in range(40)]
    assert caplog.text.count("going on without them") == (0 if kept else 2), "once a client"


def test_the_async_client_behind_a_transaction_pool(dsn: str, statements: tuple[str, bool]) -> None:
    async def submit(there: str) -> list[int]:
        async with AsyncClient(there, prepare=True) as client:
            answers = await asyncio.gather(*(client.submit(task="t") for _ in range(100)))
        return sorted(job for jobs in answers for job in jobs)

    with pooled(dsn, "transaction", 2, statements[0]) as there:
        assert asyncio.run(submit(there)) == list(range(1, 101))


@pytest.mark.parametrize("size", [2, 8], ids=["of two connections", "of eight"])
def test_every_worker_behind_a_transaction_pool_finds_that_it_hears_nothing_and_works_all_the_same(
    dsn: str, client: Client, tmp_path: Path, size: int
) -> None:
    short_leases(client, lease_s=30)
    with pooled(dsn, "transaction", size) as there, fleet_of(there, tmp_path) as fleet:
        _work(fleet, client)
        for worker in fleet.started:
            eventually(lambda log=worker: "notifications_lost" in log.log, f"{worker.name} says so")
            assert "INFO listening" not in worker.log
        with psycopg.connect(dsn) as conn:
            (left,) = conn.execute("select count(*) from gangq.violations").fetchone() or (None,)
        assert left == 0


def test_a_worker_behind_a_session_pool_hears_what_is_sent(dsn: str, client: Client, tmp_path: Path) -> None:
    short_leases(client, lease_s=30)
    with pooled(dsn, "session") as there, fleet_of(there, tmp_path) as fleet:
        _work(fleet, client)
        assert all("INFO listening" in worker.log for worker in fleet.started)
        assert all("notifications_lost" not in worker.log for worker in fleet.started)


def _work(fleet: Fleet, client: Client) -> None:
    """Two workers do single jobs and a gang, and end when they are told to."""
    fleet.define(
        """
@app.task
def double(ctx, n):
    return 2 * n
"""
    )
    for name in ("w1", "w2"):
        fleet.start(name)
    eventually(lambda: len(client.workers()) == 2, "both workers are registered")
    jobs = client.submit(task="double", payloads=[{"n": n} for n in range(50)])
    gang = client.submit_gang(task="double", size=2, payloads=[{"n": 1}, {"n": 2}])
    for n, job in enumerate(jobs):
        assert until_state(client, job, "done").result == 2 * n
    eventually(lambda: client.gang(id=gang.gang_id).state == "done", "the gang is done")
    for worker in fleet.started:
        eventually(
            lambda log=worker: "INFO listen" in log.log or "notifications_lost" in log.log, "it has tried"
        )
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_the_commands_behind_a_pool(empty_dsn: str, mode: str) -> None:
    with pooled(empty_dsn, mode) as there:

        def gangq(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "gangq", *words],
                env={**os.environ, "GANGQ_DSN": there},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        gangq("migrate")
        assert "up to date" in gangq("migrate")
        gangq("submit", "t", "{}")
        gangq("submit", "t", "--gang", "2")
        for words in (["tick"], ["ls"], ["explain", "1"], ["plan"], ["cancel", "1", "g1"]):
            gangq(*words)
        with Client(empty_dsn) as direct:
            assert direct.job(id=1).state == "cancelled"
        listens = next(line for line in gangq("doctor").splitlines() if line.split()[1] == "listen")
    assert listens.split()[0] == ("ok" if mode == "session" else "warn")
