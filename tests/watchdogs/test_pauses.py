"""Telling a process that could not run from one whose interpreter was held by its own work."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from gangq.watchdogs import Trip, Watchdog
from gangq.watchdogs.pauses import PauseMeter


class Clocks:
    """Clocks and the kernel's books, and waits that take longer than they should."""

    def __init__(self) -> None:
        self.boot = 5000.0
        self.mono = 4000.0
        self.switches = 0
        self.worked = 7.0

    def meter(self) -> PauseMeter:
        return PauseMeter(
            clock=lambda: self.boot,
            awake=lambda: self.mono,
            switches=lambda: self.switches,
            worked=lambda: self.worked,
        )

    def wait(self, late: float = 0.0, *, asleep: float = 0.0, switches: int = 1) -> Callable[[float], None]:
        def wait(seconds: float) -> None:
            self.boot += seconds + late + asleep
            self.mono += seconds + late
            self.switches += switches

        return wait


@pytest.mark.parametrize("late", [0.0, 0.4, 1.9])
def test_a_wake_that_is_a_little_late_is_no_pause(late: float) -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert meter.wait(clocks.wait(late), 1.0) == 0
    assert (meter.total_s, meter.count) == (0, 0)


def test_a_wake_that_is_more_than_twice_its_wait_late_is_one() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert meter.wait(clocks.wait(60.0), 1.0) == pytest.approx(60)
    meter.wait(clocks.wait(30.0), 1.0)
    assert (meter.total_s, meter.count) == (pytest.approx(90), 2)


def test_a_late_wake_spent_asking_for_the_gil_is_none() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert meter.wait(clocks.wait(60.0, switches=12_000), 1.0) == 0
    assert meter.count == 0


def test_a_host_that_slept_is_a_pause_once_and_not_twice() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert meter.wait(clocks.wait(asleep=300.0), 1.0) == pytest.approx(300)
    assert meter.total_s == pytest.approx(300)


def test_sleep_of_the_host_counts_even_while_the_gil_was_held() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    assert meter.wait(clocks.wait(60.0, asleep=300.0, switches=30_000), 1.0) == pytest.approx(300)


def looks(clocks: Clocks, took: float, *, cpu: float = 0.0, switches: int = 1, asleep: float = 0.0) -> None:
    """What happens between two waits."""
    clocks.boot += took + asleep
    clocks.mono += took
    clocks.worked += cpu
    clocks.switches += switches


def test_a_process_that_was_stopped_while_it_looked_has_paused_too() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    meter.wait(clocks.wait(), 1.0)
    looks(clocks, 3600.0, cpu=0.2)
    assert meter.wait(clocks.wait(), 1.0) == pytest.approx(3599.8)
    assert meter.wait(clocks.wait(), 1.0) == 0
    assert meter.count == 1


@pytest.mark.parametrize(
    "why", [{"cpu": 30.0}, {"switches": 6000}, {"cpu": 15.0, "switches": 3000}], ids=["work", "GIL", "both"]
)
def test_a_look_that_takes_long_by_itself_is_no_pause(why: dict[str, float]) -> None:
    clocks = Clocks()
    meter = clocks.meter()
    meter.wait(clocks.wait(), 1.0)
    looks(clocks, 30.0, **why)  # type: ignore[arg-type]
    assert meter.wait(clocks.wait(), 1.0) == 0


def test_a_host_that_slept_during_a_look_is_a_pause_once() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    meter.wait(clocks.wait(), 1.0)
    looks(clocks, 0.1, asleep=300.0)
    meter.wait(clocks.wait(), 1.0)
    meter.wait(clocks.wait(), 1.0)
    assert (meter.total_s, meter.count) == (pytest.approx(300, abs=0.2), 1)


def test_what_is_accounted_for_otherwise_is_left_out() -> None:
    clocks = Clocks()
    meter = clocks.meter()
    meter.wait(clocks.wait(), 1.0)
    looks(clocks, 30.0)
    meter.resume()
    assert meter.wait(clocks.wait(), 1.0) == 0
    assert meter.wait(clocks.wait(60.0), 1.0) == pytest.approx(60)


def test_the_time_that_a_trip_took_until_it_was_called_off_is_no_pause() -> None:
    clocks = Clocks()

    def held(trip: Trip) -> bool:
        looks(clocks, 30.0)
        return False

    dog = Watchdog(clock=lambda: clocks.boot, on_trip=held, pauses=clocks.meter(), threads=False)
    dog.start(budget_s=5)
    dog.pauses.wait(clocks.wait(), 10.0)
    dog.check()
    assert dog.pauses.wait(clocks.wait(), 1.0) == 0


def test_a_pause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.meter().wait(clocks.wait(60.0), 1.0)
    (record,) = caplog.records
    assert (record.message, record.pause_s, record.count) == ("pause", 60.0, 1)  # type: ignore[attr-defined]


METER = """
import ctypes, sys, threading, time
from gangq.watchdogs.pauses import PauseMeter
meter = PauseMeter()
def watch():
    while True:
        meter.wait(time.sleep, 0.1)
threading.Thread(target=watch, name="gangq-budget", daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
sys.stdin.readline()
"""


def run_meter(then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", METER + then], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_process_that_was_stopped_has_paused_for_so_long() -> None:
    process = run_meter("time.sleep(0.5); print(meter.total_s, meter.count)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate("\n", timeout=20)
    total, count = out.split()
    assert 1.2 < float(total) < 2.5
    assert count == "1"


def test_a_gil_that_was_held_is_no_pause_although_it_makes_the_thread_as_late() -> None:
    process = run_meter(
        "blind = PauseMeter(switches=lambda: 0)\n"
        "threading.Thread(target=lambda: [blind.wait(time.sleep, 0.1) for _ in range(40)], daemon=True).start()\n"
        "ctypes.PyDLL(None).sleep(2); time.sleep(0.5); print(meter.total_s, meter.count, blind.total_s)\n"
    )
    out, _ = process.communicate("\n", timeout=20)
    total, count, without_the_books = out.split()
    assert (float(total), count) == (0.0, "0")
    assert float(without_the_books) > 1.2


LOOK = """
import signal, sys, threading, time
from gangq.watchdogs.pauses import PauseMeter
meter, looking, looked, took = PauseMeter(), threading.Event(), threading.Event(), []
def watch():
    meter.wait(time.sleep, 0.1)
    began = time.monotonic()
    looking.set()
    until = time.thread_time() + 1.2
    while time.thread_time() < until: pass
    meter.wait(time.sleep, 0.1)
    took.append(time.monotonic() - began)
    looked.set()
threading.Thread(target=watch, name="gangq-budget", daemon=True).start()
looking.wait()
print("looking", flush=True)
looked.wait()
print(meter.total_s, meter.count, took[0])
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stop_while_it_looks_is_told_from_a_look_that_takes_long(stopped: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "looking\n"
    if stopped:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    total, count, took = map(float, out.split())
    if stopped:
        assert total > 1.2
        assert count == 1
    # On a host under load it may have been starved as well, but 1.2 s of all that time it worked.
    assert total < took - 1.2
