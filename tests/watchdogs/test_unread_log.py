"""Watchdogs whose log nobody reads, and on hosts where no thread can be started."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fakes import Record, Scene

from gangq import logqueue
from gangq.proc.clock import boottime
from gangq.proc.within import within
from gangq.watchdogs import StallWatchdog, Suspicion, Watchdog
from gangq.watchdogs.evidence import collect
from watchdogs.victims import no_threads, until

# -- standard error is a pipe that nobody reads ----------------------------------------------------------------


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end of a full pipe into which nothing can be written any more."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    for size in (65536, 1):
        try:
            while True:
                os.write(writes, b"x" * size)
        except BlockingIOError:
            continue
    os.set_blocking(writes, True)
    yield writes
    os.close(reads)
    os.close(writes)


MUTE = """
import logging, sys, time
logging.basicConfig(level="INFO", stream=sys.stderr)
from gangq.watchdogs.trip import TripPath
from gangq.watchdogs import Watchdog
from gangq.proc.clock import boottime
path = TripPath("postgresql://x@127.0.0.1:1/x", 1{options})
def trip(what): return path(what, job_id=1, token=1)
"""
WATCH = """
# Not idle at all: it hangs because its own log is full.
Watchdog(budget_s=0.2, poll_s=0.05{more}).start()
print(boottime(), flush=True)
logging.getLogger("job").warning("step 1")
time.sleep(60)
"""


def run(code: str, stderr: int) -> tuple[int, float]:
    """Exit status, and how long after its budget it left, seconds."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, boottime() - float(out.split()[0]) - 0.2


@pytest.mark.parametrize("more", ["", ", on_trip=trip"], ids=["alone", "with the trip path"])
def test_a_job_that_hangs_in_its_full_log_is_ended_within_five_seconds(full_pipe: int, more: str) -> None:
    code, took_s = run(MUTE.format(options="") + WATCH.format(more=more), full_pipe)
    assert code == 75
    assert took_s < 5


@pytest.mark.parametrize("more", ["", ", on_trip=trip"], ids=["alone", "with the trip path"])
def test_so_is_one_whose_kernel_gives_no_timer(full_pipe: int, more: str) -> None:
    no_timer = (
        "from gangq.errors import Unsupported\n"
        "class NoTimer:\n    def __init__(self): raise Unsupported('none')\n"
        "sys.modules['gangq.watchdogs.trip'].Deadman = NoTimer\n"
    )
    code, took_s = run(MUTE.format(options="") + no_timer + WATCH.format(more=more), full_pipe)
    assert code == 75
    assert took_s < 5


def test_a_trip_that_is_called_off_is_not_carried_out_by_a_full_log(full_pipe: int) -> None:
    code = MUTE.format(options=", deadline_s=1.5") + (
        "from gangq.watchdogs import ExitCode, Trip\n"
        "from gangq.watchdogs import trip as steps; steps.report = lambda *a: 'held'\n"
        "print(boottime(), flush=True)\n"
        "off = trip(Trip(ExitCode.STALL, 'idle', 'no beat'))\n"
        "time.sleep(2.5)\n"
        "import os; os._exit(0 if off is False else 1)\n"
    )
    assert run(code, full_pipe)[0] == 0


def test_a_trip_is_reported_although_nobody_reads_its_log_any_more() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    code = MUTE.format(options="") + (
        "from gangq.watchdogs import ExitCode, Trip\n"
        "from gangq.watchdogs import trip as steps; steps.report = lambda *a: 'held'\n"
        "print(boottime(), flush=True)\n"
        "off = trip(Trip(ExitCode.STALL, 'idle', 'no beat'))\n"
        "import os; os._exit(0 if off is False else 1)\n"
    )
    try:
        assert run(code, writes)[0] == 0
    finally:
        os.close(writes)


# -- what is said last -----------------------------------------------------------------------------------------

SLOW = """
import logging, sys, time
from types import SimpleNamespace
from gangq import logqueue
from gangq.watchdogs.deadman import Deadman
from gangq.watchdogs import ExitCode, Trip
from gangq.watchdogs.trip import TripPath, leave_now
from gangq.watchdogs.trip import boottime
from gangq.worker.runner_inline import HardExit
class Slow(logging.StreamHandler):
    def emit(self, record):
        time.sleep(0.05)
        super().emit(record)
logging.basicConfig(level="INFO", handlers=[Slow(sys.stderr)])
logqueue.start(*logqueue.WORKER)
trip = Trip(ExitCode.BUDGET, "budget", "it took too long")
"""
ENDS = {
    "leave_now": "leave_now(trip)",
    "trip path": "TripPath('postgresql://x@127.0.0.1:1/x', 1)(trip, job_id=1, token=1)",
    "hard exit": """
session = SimpleNamespace(
    tripping=False, kill_at=boottime() + 60, note=str, table=SimpleNamespace(snapshot=list),
)
job = SimpleNamespace(extra={}, lane="light")
HardExit(session, SimpleNamespace(flush=int), Deadman())(75, "why", job)
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_line_is_written_before_the_process_ends(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW + ENDS[end]], stderr=subprocess.PIPE, text=True, timeout=20, check=False
    )
    assert done.returncode == 75
    assert done.stderr.endswith(":hard_exit\n" if end == "hard exit" else ":leaving\n")


LEAVES = {
    "in its own on_trip": "Watchdog(budget_s=0.1, on_trip=lambda trip: os._exit(0)).start(); time.sleep(20)",
    "at its end": "Watchdog(budget_s=60).start(); logging.getLogger('gangq.watchdogs').warning('trip')",
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_a_program_without_a_worker_that_ends_has_the_last_line_of_its_watchdog_in_its_log(
    leaves: str,
) -> None:
    code = SLOW.replace("logqueue.start(*logqueue.WORKER)", "import os; from gangq.watchdogs import Watchdog")
    done = subprocess.run(
        [sys.executable, "-c", code + LEAVES[leaves]],
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr.endswith(":trip\n")


# -- its lines are queued --------------------------------------------------------------------------------------


def test_a_watchdog_without_a_worker_queues_its_lines_while_its_thread_runs() -> None:
    own = logging.getLogger("gangq.watchdogs")
    before = own.handlers
    dog = Watchdog(budget_s=60, poll_s=0.01, on_trip=Record().trip)
    dog.start()
    assert logqueue.in_use()
    assert own.handlers != before
    dog.close()
    until(lambda: not logqueue.in_use())
    assert own.handlers == before


# -- the pids cgroup is full -----------------------------------------------------------------------------------


def test_a_suspicion_that_cannot_be_told_opens_its_window_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, told = Record(), []
    dog = StallWatchdog(
        stall_timeout_s=0.1,
        confirm_s=0.1,
        poll_s=0.02,
        sensors=Scene(boottime),
        on_trip=record.trip,
        on_suspect=told.append,
    ).start()
    with monkeypatch.context() as patch:
        no_threads(patch)
        dog.beat(1)
        until(lambda: record.trips)
    assert (record.reasons, told) == (["idle"], [])
    dog.start()
    dog.beat(1)
    until(lambda: told)  # There are threads again, and so can it be told.
    assert isinstance(told[0], Suspicion)
    dog.close()


def test_a_watchdog_whose_thread_could_not_be_started_starts_it_with_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record()
    dog = Watchdog(budget_s=0.01, poll_s=0.01, on_trip=record.trip)
    with monkeypatch.context() as patch:
        no_threads(patch)
        with pytest.raises(RuntimeError):
            dog.start()
        dog.stop()
    with dog.start():
        until(lambda: record.trips)
    dog.close()


def test_without_threads_evidence_is_incomplete_and_nothing_is_done_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_threads(monkeypatch)
    assert collect(own=True)["incomplete"] == ["processes", "stacks", "waits"]
    assert within(1.0, lambda: 1, "gangq-test") is None
