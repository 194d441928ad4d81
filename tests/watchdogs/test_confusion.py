"""Hung or honest: real processes, judged through a device that reads a trusted 0 %.

Three kinds of hung (the GIL held in C and parked, a lock wait, a processor spin), five kinds of honest loader
(staged read, O_DIRECT, mapping, growing heap, download), and a collective that spins at 100 % for ever. Every
one of them is judged right every time: once here, 20 times with GANGQ_SOAK=1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fakes import GPU, Record, Sampler

from gangq.proc.clock import boottime
from gangq.watchdogs import StallWatchdog, WorkSensors
from soaking import SOAK
from watchdogs.victims import HUNG, LOADING, big_file, victim

ROUNDS = 20 if SOAK else 1
_LOOK_S = 0.25
_TIMEOUT_S = 0.2


class Case:
    """One victim under one watchdog, looked at by hand."""

    def __init__(
        self,
        name: str,
        pid: int,
        sampler: Sampler,
        *,
        ignored: int | None = None,
        overdue_factor: float = 10,
        confirm_s: float = 1.0,
    ) -> None:
        self.name = name
        self.pid = pid
        self.sampler = sampler
        self.ignored = ignored
        self.overdue_factor = overdue_factor
        self.confirm_s = confirm_s
        self.right: list[str] = []
        self.because: list[str] = []

    def begin(self) -> None:
        self.record = Record()
        self.why: list[str] = []
        ignored = None if self.ignored is None else lambda: [self.ignored]
        self.dog = StallWatchdog(
            stall_timeout_s=_TIMEOUT_S,
            confirm_s=self.confirm_s,
            overdue_factor=self.overdue_factor,
            sensors=WorkSensors(lambda: [self.pid], ignored=ignored, uuids=(GPU,), sampler=self.sampler),  # type: ignore
            on_trip=self.record.trip,
            threads=False,
        )
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
            # Overdue after 10 s only: on a busy machine a look may come a second late.
            cases[name] = Case(name, process.pid, quiet, ignored=sender, overdue_factor=50)
        yield cases


def test_every_kind_of_hang_and_of_honest_work_is_told_apart_every_time(tmp_path: Path) -> None:
    expected = {**dict.fromkeys(HUNG, "idle"), **dict.fromkeys(LOADING, "working")}
    with every_case(tmp_path) as cases:
        for _ in range(ROUNDS):
            for case in cases.values():
                case.begin()
            look(list(cases.values()), lambda case: case.decided, within_s=15)
            for case in cases.values():
                assert case.decided, f"{case.name}: neither tripped nor exonerated"
                case.right.append(case.result())
                case.because += case.why or [trip.message for trip in case.record.trips]
        for name, case in cases.items():
            assert case.right == [expected[name]] * ROUNDS, f"{name}: {case.because}"


def test_a_collective_that_spins_at_full_load_is_ended_at_ten_times_overdue_and_not_before() -> None:
    busy = Sampler(boottime)
    busy.set(gpu_pct=100.0, memory_pct=40.0)
    with victim(HUNG["cpu_spin"]) as process:
        cases = [Case("collective", process.pid, busy) for _ in range(ROUNDS)]
        for case in cases:
            case.begin()
        look(cases, lambda case: bool(case.record.trips), within_s=30 * _TIMEOUT_S)
    for case in cases:
        (trip,) = case.record.trips
        assert trip.reason == "no_progress"
        assert 10 * _TIMEOUT_S <= trip.evidence["silence_s"] < 20 * _TIMEOUT_S
        assert case.why, "it was exonerated as busy before"


def test_without_a_device_that_was_seen_busy_the_same_silence_convicts_nobody() -> None:
    blind = Sampler(boottime)
    blind.set(gpu_pct=0.0, busy_before=False)
    with contextlib.ExitStack() as stack:
        cases = [
            Case(name, stack.enter_context(victim(code)).pid, blind, overdue_factor=1000, confirm_s=0.5)
            for name, code in HUNG.items()
        ]
        for case in cases:
            case.begin()
        # Before that, a victim on a busy host may still be seen to begin.
        look(cases, lambda case: bool(case.record.trips) or unseen(case), within_s=20)
    for case in cases:
        assert case.record.trips == []
        assert unseen(case), case.why


def unseen(case: Case) -> bool:
    return any("never been seen busy" in why for why in case.why)


def look(cases: list[Case], done: Callable[[Case], bool], *, within_s: float) -> None:
    """Let every watchdog look, time and again, until each case is done."""
    deadline = time.monotonic() + within_s
    while (left := [case for case in cases if not done(case)]) and time.monotonic() < deadline:
        for case in left:
            case.dog.check()
        time.sleep(_LOOK_S / 2)
