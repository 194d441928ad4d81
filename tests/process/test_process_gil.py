"""Calls that hold the GIL, one after another: no freeze, however little they leave to other threads.

Real workers, all of their threads waiting for every gap. Each call is shorter than the limit; one that is longer is a
freeze. ``make soak`` runs every row 20 times.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import eventually

SOAK = os.environ.get("GANGQ_SOAK", "0") not in ("", "0")
GAPS_MS = (0, 1, 10)
_TASKS = """
import ctypes, os, time
import gangq
app = gangq.App(os.environ["GANGQ_DSN"])

@app.task
def holds(ctx, rows):
    hold = ctypes.PyDLL(None).usleep
    for call_s, gap_ms, calls in rows:
        for _ in range(calls):
            hold(int(call_s * 1e6))
            if gap_ms:
                time.sleep(gap_ms / 1e3)
    return os.getpid()
"""


@dataclass(frozen=True)
class Row:
    """Calls of one length under one limit, with gaps of one length between them."""

    silence_s: float
    call_s: float
    gap_ms: tuple[int, ...] = GAPS_MS
    limits: float = 2.0
    """How long one kind of gap goes on, in limits."""

    @property
    def calls(self) -> list[tuple[float, int, int]]:
        calls = max(2, round(self.limits * self.silence_s / self.call_s))
        return [(self.call_s, gap, calls) for gap in self.gap_ms]

    @property
    def takes_s(self) -> float:
        return sum(call_s * calls for call_s, _, calls in self.calls)


SHORT = [Row(6, call_s) for call_s in (0.5, 1, 2, 4)]
LONG = [Row(30, call_s, (gap,), 1.4) for call_s in (10, 20) for gap in GAPS_MS]


@contextlib.contextmanager
def workers(directory: Path, dsn: str, rows: list[Row]) -> Iterator[dict[Row, subprocess.Popen[bytes]]]:
    """A supervised worker for each row, on a queue of its own."""
    (directory / "held.py").write_text(_TASKS)
    environ = {**os.environ, "GANGQ_DSN": dsn, "PYTHONPATH": str(directory)}
    started = {}
    try:
        for number, row in enumerate(rows):
            command = [sys.executable, "-m", "gangq", "worker", "held:app", "--name", f"w{number}"]
            command += ["--queue", f"q{number}", "--silence-s", str(row.silence_s), "--devices", "none"]
            with (directory / f"w{number}.log").open("wb") as out:
                started[row] = subprocess.Popen(command, env=environ, cwd=directory, stdout=out, stderr=out)
        yield started
    finally:
        for number, process in enumerate(started.values()):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            print(f"---- w{number}\n{(directory / f'w{number}.log').read_text()[-3000:]}")


def run(directory: Path, dsn: str, client: Client, rows: list[Row]) -> None:
    """Run each row on its worker, all at once, and require that none was ended."""
    for number in range(len(rows)):
        client.set_queue(name=f"q{number}")
    with workers(directory, dsn, rows) as started:
        jobs = {
            row: client.submit(task="holds", queue=f"q{number}", payloads=[{"rows": row.calls}])[0]
            for number, row in enumerate(rows)
        }
        patience_s = max(row.takes_s for row in rows) * 1.5 + 60
        for row, job in jobs.items():
            eventually(
                lambda job=job, row=row: (  # type: ignore[misc]
                    client.job(id=job).state == "done" or started[row].poll() is not None
                ),
                f"{row} is over",
                patience_s,
            )
            found = client.job(id=job)
            assert (started[row].poll(), found.state, found.attempts, found.trips, found.crashes) == (
                None,
                "done",
                1,
                0,
                0,
            ), row
    assert client.violations() == []


def test_calls_shorter_than_the_limit_are_no_freeze(tmp_path: Path, dsn: str, client: Client) -> None:
    few = [Row(30, call_s, (gap,), limits=0.5) for call_s in (10, 20) for gap in GAPS_MS]
    run(tmp_path, dsn, client, [*SHORT, *few])


@pytest.mark.soak
@pytest.mark.parametrize("nth", range(20 if SOAK else 1))
def test_calls_shorter_than_the_limit_are_never_a_freeze(
    nth: int, tmp_path: Path, dsn: str, client: Client
) -> None:
    run(tmp_path, dsn, client, [*SHORT, *LONG])


@pytest.mark.parametrize("nth", range(20 if SOAK else 1))
def test_a_call_longer_than_the_limit_is_ended(nth: int, tmp_path: Path, dsn: str, client: Client) -> None:
    row = Row(2, 12)
    client.set_queue(name="q0")
    with workers(tmp_path, dsn, [row]) as started:
        job = client.submit(task="holds", queue="q0", payloads=[{"rows": [(0.5, 1, 2), (12, 0, 1)]}])[0]
        eventually(lambda: client.job(id=job).state == "running", "it runs", 30)
        began = time.monotonic()
        assert started[row].wait(30) == 80
        assert time.monotonic() - began < 10
    (trip,) = client.trips(job_id=job)
    assert (trip.code, trip.reason) == (80, "Frozen")
    assert "held.py" in trip.evidence["traceback"]
    (dead,) = client.events(kind="dead")
    assert "handler" not in dead.data, "viewers read it"
    handler = trip.evidence["handler"].splitlines()
    assert len(handler) == 1
    assert re.fullmatch(r'  File ".*/held.py", line \d+ in holds', handler[0])
