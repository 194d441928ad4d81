"""A trip with the database away: gone within five seconds, its supervisor included, and told when it is back."""

from __future__ import annotations

import contextlib
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import finished, running
from gangq.client import Client
from gangq.embedded import Server
from gangq.proc import statefile
from process.floor import PATIENCE_S, Floor
from worker.worker_process import eventually, until_state

pytestmark = pytest.mark.slow

PROMISED_S = 5.0
"""From the verdict to the end of what a service manager sees."""
SEEN_S = 1.0
"""What a watchdog takes to see that the budget is spent, and a test that a process has ended."""
BUDGET_S = 3.0

_HANGS = """
@app.task
def hangs(ctx):
    if (HERE / "again").exists():
        return "again"
    (HERE / "again").touch()
    (HERE / "began").write_text(str(time.monotonic()))
    time.sleep(600)
"""


def postgres(server: Server, number: signal.Signals) -> None:
    """The server and all it has started, stopped or going on."""
    import psutil

    pid = server.status().pid
    assert pid is not None
    parent = psutil.Process(pid)
    parent.send_signal(number)
    for child in parent.children(recursive=True):
        # What goes on may end at once: its client is gone.
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


AWAY: dict[str, tuple[Callable[[Server], object], Callable[[Server], object]]] = {
    "stopped": (Server.kill, Server.start),
    "frozen": (
        lambda server: postgres(server, signal.SIGSTOP),
        lambda server: postgres(server, signal.SIGCONT),
    ),
}


def worker(floor: Floor, name: str) -> Any:
    dsn = floor.fleet._dsn
    what = ("worker", "tasks:app", "--name", "w1", "--devices", "none", "--json")
    return running(dsn, floor.directory, name, *what, TEST_DSN=dsn)


def next_start(floor: Floor, dsn: str) -> None:
    with worker(floor, "again") as again:
        again.until(lambda: floor.client.trips(), "the trip is told", PATIENCE_S)
        again.interrupt(signal.SIGTERM)
        again.code()


def report_death(floor: Floor, dsn: str) -> None:
    done = finished(dsn, "systemd", "report-death", "--name", "w1")
    assert done.returncode == 0, done


def the_bouncer(floor: Floor, dsn: str) -> None:
    def bounced() -> bool:
        done = finished(dsn, "bounce", "--once")
        assert done.returncode in (0, 1), done
        return bool(floor.client.trips())

    eventually(bounced, "the bouncer tells the trip", PATIENCE_S)


@pytest.mark.parametrize(
    ("away", "teller"),
    [("stopped", next_start), ("frozen", report_death), ("stopped", the_bouncer)],
    ids=["stopped, next start", "frozen, report-death", "stopped, bouncer"],
)
def test_a_trip_that_could_not_be_told_is_a_trip_when_the_database_is_back(
    mortal_floor: Floor, mortal: Server, away: str, teller: Callable[[Floor, str], None]
) -> None:
    floor = mortal_floor
    floor.fleet.define(_HANGS)
    floor.configure(lease_s=60, lease_margin_s=10)
    dsn = floor.fleet._dsn
    go, come = AWAY[away]
    with worker(floor, "first") as first:
        job = floor.client.submit(task="hangs", budget_s=BUDGET_S)[0]
        first.until(lambda: has_begun(floor), "it is at work", PATIENCE_S)
        time.sleep(max(0.0, began(floor) + BUDGET_S - 1.0 - time.monotonic()))
        go(mortal)
        try:
            assert first.code(30) == 75, first.out + first.err
            took = time.monotonic() - began(floor) - BUDGET_S
        finally:
            come(mortal)
        assert took < PROMISED_S + SEEN_S, first.out
    kept = [Path(row.identity["directory"]) for row in predecessor(floor.client)]
    for directory in kept:
        for name in (statefile.TRIP, statefile.DEATH):
            about = (directory / name).stat()
            assert stat.S_IMODE(about.st_mode) == 0o600
    teller(floor, dsn)
    row = floor.client.job(id=job)
    assert (row.trips, row.crashes) == (1, 0)
    (trip,) = floor.client.trips()
    assert (trip.code, trip.class_) == (75, "budget")
    assert evidence_mentions(floor.client, job, "time.sleep(600)")
    # Told once more, by whoever: nothing changes.
    report_death(floor, dsn)
    assert len(floor.client.trips()) == 1
    assert floor.client.job(id=job).trips == 1
    with worker(floor, "last"):
        until_state(floor.client, job, "done", timeout=PATIENCE_S)


def has_begun(floor: Floor) -> bool:
    """A file is there before its text is."""
    file = floor.directory / "began"
    return file.exists() and file.read_text() != ""


def began(floor: Floor) -> float:
    return float((floor.directory / "began").read_text())


def predecessor(client: Client) -> list[Any]:
    return list(client.predecessor(worker="w1"))


def evidence_mentions(client: Client, job: int, text: str) -> bool:
    with client.connection() as conn:
        rows = conn.execute("select data::text from gangq.evidence where job_id = %s", (job,)).fetchall()
    return any(text in str(row[0]) for row in rows)
