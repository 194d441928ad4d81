"""A worker whose interpreter is frozen: killed on time, with its stacks and the code, and its job runs again.

With GANGQ_SOAK=1 all of it 34 times: 204 runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from process.supervised import (
    AS_PID_1,
    LATE_S,
    SILENCE_S,
    Start,
    build_library,
    needs_namespaces,
    starter,
)
from soaking import SOAK

pytestmark = pytest.mark.slow

REPEATS = 34 if SOAK else 1
FREEZES = {
    "holds_the_gil_in_c": "in holds_the_gil_in_c",
    "backtracks": "in backtracks",
    "is_stopped": "in is_stopped",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def start(tmp_path: Path, library: str, dsn: str) -> Iterator[Start]:
    with starter(tmp_path, library) as begin:
        yield begin


@pytest.mark.parametrize("nth", range(REPEATS))
@pytest.mark.parametrize("place", ["plain", "as PID 1"])
@pytest.mark.parametrize("freeze", FREEZES)
def test_a_frozen_worker_is_dead_on_time_and_its_job_runs_elsewhere(
    freeze: str, place: str, nth: int, start: Start, client: Client, dsn: str
) -> None:
    if place == "as PID 1":
        needs_namespaces()
    job = client.submit(task="any")[0]
    run = start(freeze, prefix=AS_PID_1 if place == "as PID 1" else (), TEST_DSN=dsn, TEST_WORKER="w1")
    frozen_at = run.until_marked()
    died_at = run.worker_died_at()
    assert run.exit_code() == 80
    assert SILENCE_S - 1 < died_at - frozen_at <= SILENCE_S + LATE_S
    assert FREEZES[freeze] in run.log
    assert run.left() == []
    row = client.job(id=job)
    assert (row.state, row.trips, row.crashes, row.attempts) == ("pending", 1, 0, 0)
    (trip,) = client.trips(job_id=job)
    assert (trip.code, trip.reason, trip.outcome, trip.worker) == (80, "Frozen", "scheduled", "w1")
    assert FREEZES[freeze] in trip.evidence["traceback"]
    assert client.workers(name="w1")[0].state == "dead"
    assert client.unproven(worker="w1") == []
    elsewhere = client.register_worker(name="w2", host="there", queues=["default"]).incarnation
    (claim,) = client.claim(incarnation=elsewhere)
    assert claim.job_id == job
    client.complete(job_ids=[job], tokens=[claim.token])
    assert client.job(id=job).state == "done"
    assert client.violations() == []


def test_nobody_reading_what_it_says_keeps_it_from_nothing(
    start: Start, full_pipe: Path, client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    into_it = ("sh", "-c", f'exec "$0" "$@" >>{full_pipe} 2>&1')
    run = start("holds_the_gil_in_c", prefix=into_it, TEST_DSN=dsn, TEST_WORKER="w1")
    frozen_at = run.until_marked()
    died_at = run.worker_died_at()
    assert died_at - frozen_at <= SILENCE_S + LATE_S
    assert run.exit_code(15) == 80
    assert time.monotonic() - died_at < 4, "the report waited for somebody to read what it says"
    (trip,) = client.trips(job_id=job)
    assert (trip.code, trip.reason) == (80, "Frozen")
    assert "in holds_the_gil_in_c" in trip.evidence["traceback"]
    assert client.workers(name="w1")[0].state == "dead"


def test_without_a_supervisor_the_kernel_ends_it(start: Start) -> None:
    run = start("holds_the_gil_in_c", supervised=False, GANGQ_SILENCE_S=str(SILENCE_S))
    frozen_at = run.until_marked()
    died_at = run.worker_died_at()
    assert run.exit_code() == 80
    assert died_at - frozen_at <= SILENCE_S + LATE_S
    assert "in holds_the_gil_in_c" in run.log


def test_a_supervisor_that_cannot_act_leaves_it_to_the_kernel(start: Start) -> None:
    import signal

    lease_s = SILENCE_S + 2
    run = start("holds_the_gil_in_c", TEST_REGISTERS="1", TEST_LEASE_S=str(lease_s))
    frozen_at = run.until_marked()
    run.process.send_signal(signal.SIGSTOP)
    died_at = run.worker_died_at()
    assert lease_s - 1 < died_at - frozen_at <= lease_s + LATE_S
    run.process.send_signal(signal.SIGCONT)
    assert run.exit_code() == 80
