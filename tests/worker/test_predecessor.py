"""A starting worker and its predecessor: what the database says is looked at, what the host says is acted on."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity, process_identity
from gangq.worker import host_record
from worker.worker_process import Fleet, WorkerProcess, eventually, fleet_of, short_leases, until_state


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    short_leases(client, lease_s=60, flag_after_s=5)
    with fleet_of(dsn, tmp_path) as running:
        running.define("""
@app.task
def quick(ctx):
    return os.getpid()
""")
        yield running


def identity_of(db: psycopg.Connection[dict[str, Any]], name: str) -> dict[str, Any]:
    """What the latest incarnation of this name recorded in the database."""
    row = db.execute(
        "select identity from gangq.incarnations where name = %s order by id desc limit 1", [name]
    ).fetchone()
    assert row is not None
    identity: dict[str, Any] = row["identity"]
    return identity


def forge(client: Client, name: str, **identity: object) -> int:
    """A worker's login says that it is this worker, and trips: its successor is to end what it names."""
    known = {
        "mark": "0123456789abcdef",
        "host": asdict(HostIdentity.here()),
        "process": {"pid": 4000000, "start_ticks": 1, "boot_id": HostIdentity.here().boot_id},
    }
    incarnation = client.register_worker(
        name=name, host="here", queues=["forged"], tasks=["any"], identity={**known, **identity}
    ).incarnation
    job = client.submit(task="any", queue="forged")[0]
    (claim,) = client.claim(incarnation=incarnation)
    client.trip(
        incarnation=incarnation,
        job_id=job,
        token=claim.token,
        code=76,
        error={"type": "forged"},
        exit_in_s=60,
    )
    return incarnation


def started(fleet: Fleet, client: Client, name: str, **options: Any) -> WorkerProcess:
    before = {worker.incarnation for worker in client.workers(name=name)}
    worker = fleet.start(name, **options)

    def is_up() -> bool:
        return worker.process.poll() is not None or any(
            row.incarnation not in before and row.pid == worker.process.pid
            for row in client.workers(name=name)
        )

    eventually(is_up, f"{name} is up\n{worker.log}")
    assert worker.process.poll() is None, worker.log
    return worker


def test_an_unrelated_process_survives_whatever_the_database_says_of_it(client: Client, fleet: Fleet) -> None:
    client.set_queue(name="forged")
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander:
        try:
            forge(client, "w1", process=asdict(process_identity(bystander.pid)))
            started(fleet, client, "w1")
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_the_job_of_another_worker_survives_the_mark_of_that_worker_in_the_database(
    client: Client, db: psycopg.Connection[dict[str, Any]], fleet: Fleet
) -> None:
    client.set_queue(name="forged")
    started(fleet, client, "peer")
    job = client.submit(task="command", payloads=[{"argv": ["sleep", "600"]}])[0]
    until_state(client, job, "running")
    mark = identity_of(db, "peer")["mark"]

    def at_work() -> list[procfs.Stat]:
        table = procfs.table()
        return [table[pid] for pid in procfs.carriers(table, f"{mark}/1") if table[pid].comm == "sleep"]

    (running,) = eventually(at_work, "its command runs")
    forge(client, "w1", mark=mark)
    started(fleet, client, "w1")
    assert procfs.same(running)
    assert client.job(id=job).state == "running"


def test_the_directory_of_another_worker_survives_its_name_in_the_database(
    client: Client, db: psycopg.Connection[dict[str, Any]], fleet: Fleet
) -> None:
    client.set_queue(name="forged")
    client.set_queue(name="peers")
    started(fleet, client, "peer", queues=["peers"])
    directory = Path(identity_of(db, "peer")["directory"])
    forge(client, "w1", directory=str(directory))
    started(fleet, client, "w1")
    assert (directory / "worker").exists()
    job = client.submit(task="command", queue="peers", payloads=[{"argv": ["true"]}])[0]
    assert until_state(client, job, "done", "failed").state == "done"


@pytest.mark.slow
def test_a_real_predecessor_is_ended_by_the_record_it_left_on_the_host(
    client: Client, db: psycopg.Connection[dict[str, Any]], fleet: Fleet
) -> None:
    first = started(fleet, client, "w1")
    job = client.submit(task="command", payloads=[{"argv": ["sh", "-c", "trap '' TERM; sleep 600 & wait"]}])[
        0
    ]
    until_state(client, job, "running")
    identity = identity_of(db, "w1")
    eventually(lambda: len(procfs.carriers(procfs.table(), f"{identity['mark']}/1")) >= 2, "its command runs")
    work = [procfs.table()[pid] for pid in procfs.carriers(procfs.table(), f"{identity['mark']}/1")]
    # Its guardian with it: nothing but the successor ends the command.
    guardians = [e for e in work if e.comm == procfs.work_name(identity["mark"])]
    procfs.strike([procfs.table()[first.process.pid], *guardians])
    first.exit_code()
    second = started(fleet, client, "w1")
    assert "predecessor_reported_dead" in second.log
    assert [entry for entry in work if procfs.same(entry)] == []
    assert not Path(identity["directory"]).exists()


@pytest.mark.parametrize("flaw", ["somebody else's", "a link", "in a directory of all", "a pipe"])
def test_a_record_that_somebody_else_could_have_written_is_none(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / f"{host_record.DIRECTORY_PREFIX}x"
    directory.mkdir(mode=0o700)
    host_record.write(directory, "w1", "mark", process_identity(os.getpid()))
    found = host_record.find("w1", "mark")
    assert found is not None
    assert found.lives()
    assert host_record.find("w2", "mark") is None
    assert host_record.find("w1", "another") is None
    file = directory / "worker"
    if flaw == "somebody else's":
        if os.geteuid() != 0:
            pytest.skip("giving a file away needs root")
        os.chown(file, 12345, 12345)
    elif flaw == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif flaw == "in a directory of all":
        directory.chmod(0o777)
    else:
        file.unlink()
        os.mkfifo(file, 0o600)
    assert host_record.find("w1", "mark") is None


def test_a_worker_that_is_crowded_lives(tmp_path: Path) -> None:
    gone = replace(process_identity(os.getpid()), start_ticks=1)
    record = host_record.HostRecord("w1", "mark", gone, tmp_path)
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(tmp_path / host_record.SOCKET))
        assert not record.lives(), "it does not listen"
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = opened.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(tmp_path / host_record.SOCKET))
        assert record.lives()
