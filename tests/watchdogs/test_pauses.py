"""Telling a process that could not run from one whose interpreter was held by its own work."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from gangq.watchdogs import PauseMeter


class Clocks:
    """Clocks and the kernel's books, and waits that take longer than they should."""

    def __init__(self) -> None:
        self.boot = 5000.0
        self.mono = 4000.0
        self.switches = 0

    def meter(self) -> PauseMeter:
        return PauseMeter(clock=lambda: self.boot, awake=lambda: self.mono, switches=lambda: self.switches)

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


def test_a_pause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.meter().wait(clocks.wait(60.0), 1.0)
    (record,) = caplog.records
    assert (record.message, record.pause_s, record.count) == ("pause", 60.0, 1)  # type: ignore[attr-defined]


METER = """
import ctypes, sys, threading, time
from gangq.watchdogs import PauseMeter
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
