"""Hung or honest: real processes, judged through a device that reads a trusted 0 %.

Three kinds of hung (the GIL held in C and parked, a lock wait, a processor spin), five kinds of honest loader
(staged read, O_DIRECT, mapping, growing heap, download), and a collective that spins at 100 % for ever. Every
one of them is judged right every time: 3 times here, 20 with GANGQ_SOAK=1.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import GPU, Record, Sampler
from victims import HUNG, LOADING, big_file, victim

from gangq.watchdogs import StallWatchdog, WorkSensors
from gangq.watchdogs.clock import boottime

ROUNDS = 20 if os.environ.get("GANGQ_SOAK") else 3
_LOOK_S = 0.25
_TIMEOUT_S = 0.2


class Case:
    """One victim under one watchdog, looked at by hand."""

    def __init__(self, name: str, pid: int, sampler: Sampler, *, ignored: int | None = None) -> None:
        self.name = name
        self.pid = pid
        self.sampler = sampler
        self.ignored = ignored
        self.right: list[str] = []

    def begin(self) -> None:
        self.record = Record()
        self.why: list[str] = []
        ignored = None if self.ignored is None else lambda: [self.ignored]
        self.dog = StallWatchdog(
            stall_timeout_s=_TIMEOUT_S,
            confirm_s=1.0,
            sensors=WorkSensors(lambda: [self.pid], ignored=ignored, uuids=(GPU,), sampler=self.sampler),  # type: ignore
            on_trip=self.record.trip,
        )
        self.dog._spawn = lambda: None  # type: ignore[method-assign]
        inner = self.dog._rearm

        def rearm(job, silence_s, limits, verdict) -> None:  # type: ignore[no-untyped-def]
            self.why.append(verdict.why)
            inner(job, silence_s, limits, verdict)

        self.dog._rearm = rearm  # type: ignore[method-assign]
        self.dog.start()
        self.dog.beat(1)
        self.began = time.monotonic()

    @property
    def decided(self) -> bool:
        return bool(self.record.trips or self.why)

    def result(self) -> str:
        """What it was taken for, and when, in timeouts."""
        if self.record.trips:
            return self.record.trips[0].reason
        return "working"


@contextlib.contextmanager
def every_case(directory: Path) -> Iterator[dict[str, Case]]:
    quiet = Sampler(boottime)
    quiet.set(gpu_pct=0.0)
    with contextlib.ExitStack() as stack:
        cases = {}
        path = str(big_file(directory))
        for name, code in {**HUNG, **LOADING}.items():
            process = stack.enter_context(victim(code, path))
            sender = None
            if name == "download":
                (sender,) = (
                    int(pid)
                    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                )
            cases[name] = Case(name, process.pid, quiet, ignored=sender)
        yield cases


def test_every_kind_of_hang_and_of_honest_work_is_told_apart_every_time(tmp_path: Path) -> None:
    expected = {**dict.fromkeys(HUNG, "idle"), **dict.fromkeys(LOADING, "working")}
    with every_case(tmp_path) as cases:
        for _ in range(ROUNDS):
            for case in cases.values():
                case.begin()
            deadline = time.monotonic() + 15
            while not all(case.decided for case in cases.values()) and time.monotonic() < deadline:
                for case in cases.values():
                    if not case.decided:
                        case.dog.check()
                time.sleep(_LOOK_S)
            for case in cases.values():
                assert case.decided, f"{case.name}: neither tripped nor exonerated"
                case.right.append(case.result())
        for name, case in cases.items():
            assert case.right == [expected[name]] * ROUNDS, f"{name}: {case.why} {case.record.trips}"


def test_a_collective_that_spins_at_full_load_is_ended_at_ten_times_overdue_and_not_before() -> None:
    busy = Sampler(boottime)
    busy.set(gpu_pct=100.0, memory_pct=40.0)
    with victim(HUNG["cpu_spin"]) as process:
        for _ in range(ROUNDS):
            case = Case("collective", process.pid, busy)
            case.begin()
            while not case.record.trips and time.monotonic() - case.began < 20 * _TIMEOUT_S:
                case.dog.check()
                time.sleep(0.05)
            (trip,) = case.record.trips
            assert trip.reason == "no_progress"
            assert 10 * _TIMEOUT_S <= trip.evidence["silence_s"] < 15 * _TIMEOUT_S
            assert case.why, "it was exonerated as busy before"


@pytest.mark.parametrize("name", sorted(HUNG))
def test_the_hung_are_hung_and_the_check_is_no_accident(name: str) -> None:
    """Without the calibration the same silence convicts nobody."""
    blind = Sampler(boottime)
    blind.set(gpu_pct=0.0, busy_before=False)
    with victim(HUNG[name]) as process:
        case = Case(name, process.pid, blind)
        case.begin()
        while not case.decided and time.monotonic() - case.began < 5:
            case.dog.check()
            time.sleep(0.1)
        assert case.result() != "idle"
