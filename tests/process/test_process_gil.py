"""Calls that hold the GIL, one after another: no freeze, however little they leave to other threads.

Real workers, all of their threads waiting for every gap. Each call is shorter than the limit; one that is longer is a
freeze. ``make soak`` runs every row 20 times, for two limits each, and with the limit that workers have.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gangq.client import Client
from process.machines import supervised_worker
from soaking import SOAK
from worker.worker_process import eventually

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
    limits: float = 2.0 if SOAK else 1.4
    """How long one kind of gap goes on, in limits."""

    @property
    def calls(self) -> list[tuple[float, int, int]]:
        calls = max(2, round(self.limits * self.silence_s / self.call_s))
        return [(self.call_s, gap, calls) for gap in self.gap_ms]

    @property
    def takes_s(self) -> float:
        return sum(call_s * calls for call_s, _, calls in self.calls)


SHORT = [Row(6, call_s) for call_s in (0.5, 1, 2, 4)]
LIMIT_S = 30 if SOAK else 15
LONG = [Row(LIMIT_S, LIMIT_S * share, (gap,)) for share in (1 / 3, 2 / 3) for gap in GAPS_MS]
TOO_LONG = [Row(2, 24), *([Row(6, 24), Row(30, 75)] if SOAK else [])]
"""Two short calls take half a limit; the worker is ended one limit later, while the call is still made."""


@contextlib.contextmanager
def workers(directory: Path, dsn: str, rows: list[Row]) -> Iterator[dict[Row, subprocess.Popen[bytes]]]:
    """A supervised worker for each row, on a queue of its own."""
    (directory / "held.py").write_text(_TASKS)
    with contextlib.ExitStack() as stack:
        yield {
            row: stack.enter_context(
                supervised_worker(
                    *(dsn, directory, f"w{number}", "held:app", "--queue", f"q{number}"),
                    *("--silence-s", str(row.silence_s), "--devices", "none"),
                )
            )
            for number, row in enumerate(rows)
        }


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


@pytest.mark.parametrize("nth", range(20 if SOAK else 1))
def test_calls_shorter_than_the_limit_are_never_a_freeze(
    nth: int, tmp_path: Path, dsn: str, client: Client
) -> None:
    rows = [*SHORT, *LONG]
    assert all(call_s < row.silence_s < call_s * calls for row in rows for call_s, _, calls in row.calls)
    run(tmp_path, dsn, client, rows)


@pytest.mark.parametrize("nth", range(20 if SOAK else 1))
def test_a_call_longer_than_the_limit_is_ended(nth: int, tmp_path: Path, dsn: str, client: Client) -> None:
    for number in range(len(TOO_LONG)):
        client.set_queue(name=f"q{number}")
    with workers(tmp_path, dsn, TOO_LONG) as started:
        jobs = {}
        for number, row in enumerate(TOO_LONG):
            rows = [(row.silence_s / 4, 1, 2), (row.call_s, 0, 1)]
            jobs[row] = client.submit(task="holds", queue=f"q{number}", payloads=[{"rows": rows}])[0]
        began = time.monotonic()
        for row in TOO_LONG:
            assert started[row].wait(row.call_s + 30) == 80
            assert time.monotonic() - began < row.call_s, f"{row} was ended during the call"
    for job in jobs.values():
        (trip,) = client.trips(job_id=job)
        assert (trip.code, trip.reason) == (80, "Frozen")
        assert "held.py" in trip.evidence["traceback"]
        handler = trip.evidence["handler"].splitlines()
        assert len(handler) == 1
        assert re.fullmatch(r'  File ".*/held.py", line \d+ in holds', handler[0])
    dead = client.events(kind="dead")
    assert len(dead) == len(TOO_LONG)
    assert all("handler" not in event.data for event in dead), "viewers read it"
