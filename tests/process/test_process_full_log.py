"""A worker whose log is a pipe that takes nothing more and that nobody reads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from process.floor import LEASE_S, PATIENCE_S, Floor
from process.machines import start_worker
from worker.worker_process import eventually, until_state

pytestmark = pytest.mark.slow


@pytest.fixture(params=["standard error", "standard output"])
def unread(
    request: pytest.FixtureRequest, floor: Floor, full_pipe: Path, dsn: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The worker, with the tasks of the floor; it logs there."""
    flags = ["--json"] if request.param == "standard output" else []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with full_pipe.open("wb") as into_it:
        arguments = ("tasks:app", "--devices", "none", *flags)
        process = start_worker(
            dsn, floor.directory, "w1", *arguments, log=into_it, inherited=environ, TEST_DSN=dsn
        )
    yield process
    process.kill()
    process.wait(10)


def test_it_keeps_its_lease_finishes_its_jobs_and_ends_as_told(
    floor: Floor, unread: subprocess.Popen[bytes], client: Client
) -> None:
    floor.until_done(floor.inline("quick"))
    row = floor.worker_row("w1")
    # The thread that keeps the lease is told of this, and logs it.
    told = floor.inline("lives")
    floor.until_at_work(told)
    client.cancel(job_ids=[told])
    until_state(client, told, "cancelled")
    eventually(
        lambda: (floor.worker_row("w1").renewed_at - row.registered_at).total_seconds() > LEASE_S,
        "it has renewed its lease for longer than one lasts",
        PATIENCE_S,
    )
    command = client.submit(task="command", payloads=[{"argv": ["true"]}])[0]
    floor.until_done(floor.inline("quick"), command)
    assert floor.worker_row("w1").incarnation == row.incarnation
    unread.terminate()
    assert unread.wait(15) == 0
