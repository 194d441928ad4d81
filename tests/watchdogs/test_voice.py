"""Watchdogs whose log goes nowhere any more, and on hosts where no thread can be started."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from fakes import Clock, Record, Scene, drive
from victims import until

from gangq.watchdogs import StallWatchdog, Suspicion, Watchdog, collect
from gangq.watchdogs.trip import within
from gangq.watchdogs.voice import Voice, voice

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
from gangq.watchdogs import TripPath, Watchdog
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
    from gangq.proc.clock import boottime

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
        "from gangq.watchdogs import Unsupported\n"
        "class NoTimer:\n    def __init__(self): raise Unsupported('none')\n"
        "sys.modules['gangq.watchdogs.trip'].Deadman = NoTimer\n"
    )
    code, took_s = run(MUTE.format(options="") + no_timer + WATCH.format(more=more), full_pipe)
    assert code == 75
    assert took_s < 5


def test_a_trip_that_is_called_off_is_not_carried_out_by_a_full_log(full_pipe: int) -> None:
    code = MUTE.format(options=", deadline_s=1.5") + (
        "from gangq.watchdogs import ExitCode, Trip\n"
        "path.tell = lambda *a, **k: 'held'\n"
        "print(boottime(), flush=True)\n"
        "off = trip(Trip(ExitCode.STALL, 'idle', 'no beat'))\n"
        "time.sleep(2.5)\n"
        "import os; os._exit(0 if off is False else 1)\n"
    )
    assert run(code, full_pipe)[0] == 0


class Stuck(logging.Handler):
    """A handler that waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.heard: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.go.wait(30)
        self.heard.append(record)


@pytest.fixture
def stuck() -> Iterator[tuple[Stuck, Voice]]:
    log, handler = logging.getLogger("gangq.test.stuck"), Stuck()
    log.propagate = False
    log.addHandler(handler)
    yield handler, Voice(log, patience_s=0.05)
    handler.go.set()
    log.removeHandler(handler)


def test_lines_that_do_not_get_through_are_dropped_and_counted(stuck: tuple[Stuck, Voice]) -> None:
    handler, speaker = stuck
    threads = threading.active_count()
    began = time.monotonic()
    for number in range(20):
        speaker.say(logging.WARNING, f"line {number}", {"reason": "why"})
    assert time.monotonic() - began < 1
    assert threading.active_count() <= threads + 1, "each line left a thread behind"
    handler.go.set()
    until(lambda: handler.heard)
    speaker.say(logging.WARNING, "last")
    until(lambda: len(handler.heard) == 2)
    assert [record.getMessage() for record in handler.heard] == ["line 0", "last"]
    assert handler.heard[0].reason == "why"  # type: ignore[attr-defined]
    assert handler.heard[1].lines_lost == 19  # type: ignore[attr-defined]


def test_a_handler_that_fails_does_not_silence_what_follows() -> None:
    class Broken(logging.Handler):
        said: list[str] = []  # noqa: RUF012

        def emit(self, record: logging.LogRecord) -> None:
            self.said.append(record.getMessage())
            raise OSError("no space left")

    log, handler = logging.getLogger("gangq.test.broken"), Broken()
    log.propagate = False
    log.addHandler(handler)
    speaker = Voice(log)
    for number in range(3):
        speaker.say(logging.WARNING, f"line {number}")
    log.removeHandler(handler)
    assert handler.said == ["line 0", "line 1", "line 2"]


def test_what_nobody_listens_to_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads(monkeypatch)
    speaker = Voice(logging.getLogger("gangq.test.unheard"))
    speaker.say(logging.DEBUG, "nobody hears it")
    assert speaker.lost == 0


def test_everybody_who_asks_for_a_log_gets_the_same_voice() -> None:
    assert voice("gangq.test.shared") is voice("gangq.test.shared")


# -- the pids cgroup is full -----------------------------------------------------------------------------------


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, as in a full pids cgroup."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_suspicion_that_cannot_be_told_opens_its_window_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, record, told = Clock(), Record(), []
    dog = StallWatchdog(
        stall_timeout_s=20, sensors=Scene(clock), clock=clock, on_trip=record.trip, on_suspect=told.append
    )
    dog._spawn = lambda: None  # type: ignore[method-assign]
    dog.start()
    dog.beat(1)
    with monkeypatch.context() as patch:
        no_threads(patch)
        drive(dog, clock, 40)
    assert record.reasons == ["idle"]
    dog.start()
    dog.beat(1)
    drive(dog, clock, 25)
    until(lambda: told)  # There are threads again, and so is the mouth.
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
