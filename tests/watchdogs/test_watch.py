"""What all three watchdogs promise about jobs that end, threads that poll, and what starting one costs."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import Clock, Record

from gangq import logqueue
from gangq.errors import GangqError
from gangq.watchdogs import GpuHealthWatchdog, StallWatchdog, Suspicion, Trip, Watchdog
from watchdogs.victims import until

FAST = {"poll_s": 0.01}


@pytest.fixture
def dogs() -> Iterator[Callable[..., Watchdog]]:
    made: list[Watchdog] = []

    def make(on_trip: Callable[[Trip], bool], **more: Any) -> Watchdog:
        made.append(Watchdog(on_trip=on_trip, **FAST, **more))
        return made[-1]

    yield make
    for dog in made:
        dog.close()


def test_the_thread_looks_by_itself_and_is_one_for_all_jobs(dogs: Callable[..., Watchdog]) -> None:
    record = Record()
    dog = dogs(record.trip)
    names = []
    for _ in range(3):
        with dog.start(budget_s=0.02):
            until(lambda: record.trips)
            record.trips.clear()
        names.append([t.ident for t in threading.enumerate() if t.name == "gangq-budget"])
    assert len(names[0]) == 1
    assert names[0] == names[1] == names[2]


def test_stopping_waits_for_a_trip_that_has_begun(dogs: Callable[..., Watchdog]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(trip: Trip) -> bool:
        begun.set()
        go_on.wait(10)
        return False

    dog = dogs(slow).start(budget_s=0.01)
    assert begun.wait(5)
    stopped = threading.Event()
    thread = threading.Thread(target=lambda: (dog.stop(), stopped.set()))
    thread.start()
    # In production the process would end in there: were stop() to return, the next job would be in it.
    assert not stopped.wait(0.3)
    go_on.set()
    assert stopped.wait(5)
    thread.join()


def test_starting_the_next_job_waits_for_a_trip_of_the_former_one(dogs: Callable[..., Watchdog]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(trip: Trip) -> bool:
        begun.set()
        go_on.wait(10)
        return False

    dog = dogs(slow).start(budget_s=0.01)
    assert begun.wait(5)
    started = threading.Event()
    thread = threading.Thread(target=lambda: (dog.start(budget_s=100), started.set()))
    thread.start()
    assert not started.wait(0.3)
    go_on.set()
    assert started.wait(5)
    thread.join()


def test_without_threads_the_caller_looks_and_is_told_suspicions_in_that_call() -> None:
    clock, record = Clock(), Record()
    threads = threading.enumerate()
    dog = Watchdog(
        budget_s=100, clock=clock, on_trip=record.trip, on_suspect=record.suspicions.append, threads=False
    )
    with dog:
        clock.now += 95
        assert record.suspicions == []
        dog.check()
        assert [suspicion.cls for suspicion in record.suspicions] == ["budget"]
        clock.now += 5
        dog.check()
        assert record.reasons == ["budget"]
        assert threading.enumerate() == threads
    dog.close()


def test_a_job_that_ends_while_it_is_being_judged_is_not_tripped() -> None:
    record = Record()
    dog = Watchdog(on_trip=record.trip, threads=False)
    dog.start(budget_s=1)
    job = dog._job
    assert job is not None
    dog.stop()
    dog.start(budget_s=1000)
    dog._look(job, time.time() + 1e9)  # What a thread does that had fetched the former job.
    assert record.trips == []


def test_three_hundred_short_jobs_never_trip_one_another(dogs: Callable[..., Watchdog]) -> None:
    tripped: list[Any] = []
    current: list[int] = [-1]

    def on_trip(trip: Trip) -> bool:
        tripped.append((trip.job, current[0]))
        return False

    dog = dogs(on_trip)
    for number in range(300):
        current[0] = number
        dog.start(budget_s=0.004, job=number)
        time.sleep(0.001 if number % 3 else 0.006)
        dog.stop()
    assert tripped, "no job was tripped at all: this test shows nothing"
    assert all(of == during for of, during in tripped)


def test_a_trip_may_end_its_own_job(dogs: Callable[..., Watchdog]) -> None:
    done = threading.Event()

    def on_trip(trip: Trip) -> bool:
        dog.stop()
        done.set()
        return True

    dog = dogs(on_trip).start(budget_s=0.01)
    assert done.wait(5)
    until(lambda: not dog.watching)


def test_a_fault_in_a_sensor_neither_trips_nor_ends_the_watching(
    dogs: Callable[..., Watchdog], caplog: pytest.LogCaptureFixture
) -> None:
    record = Record()
    dog = dogs(record.trip)
    faults = [0]
    look = dog._look

    def broken(job: Any, now: float) -> None:
        faults[0] += 1
        if faults[0] <= 2:
            raise OSError("a sensor nobody foresaw")
        look(job, now)

    dog._look = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        dog.start(budget_s=0.01)
        until(lambda: record.trips)
        assert logqueue.flush(5)
    assert [record.message for record in caplog.records].count("watchdog_fault") == 2


def test_who_is_told_of_a_suspicion_may_hang_and_the_trip_still_comes(dogs: Callable[..., Watchdog]) -> None:
    record = Record()
    told: list[Suspicion] = []
    go_on = threading.Event()

    def hangs(suspicion: Suspicion) -> None:
        told.append(suspicion)
        go_on.wait(60)

    # Suspect at 90 %: a look must come in the last tenth also on a busy machine.
    dog = dogs(record.trip, on_suspect=hangs).start(budget_s=4, job="mine")
    try:
        until(lambda: told)
        until(lambda: record.trips)
    finally:
        go_on.set()
    assert (told[0].cls, told[0].job) == ("budget", "mine")
    assert dog.name == "gangq-budget"


def test_a_hundred_suspicions_may_wait_to_be_told_and_more_are_dropped_with_a_line_in_the_log(
    dogs: Callable[..., Watchdog], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Suspicion] = []
    go_on = threading.Event()

    def hangs(suspicion: Suspicion) -> None:
        go_on.wait(60)
        told.append(suspicion)

    dog = dogs(Record().trip, on_suspect=hangs).start(budget_s=1000)
    assert dog._job is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(110):
            dog._suspect(dog._job, "it is slow", {})
        assert logqueue.flush(5)
    go_on.set()
    until(lambda: len(told) >= 100)
    assert [record.message for record in caplog.records].count("suspicion_not_reported") in (9, 10)


def test_a_closed_watchdog_says_that_it_is(dogs: Callable[..., Watchdog]) -> None:
    dog = dogs(Record().trip)
    dog.start()
    dog.close()
    dog.close()
    assert not any(thread.name == dog.name and thread.is_alive() for thread in threading.enumerate())
    never_started = Watchdog(name="gangq-other")
    never_started.close()
    for closed in (dog, never_started):
        with pytest.raises(GangqError, match=f"{closed.name} is closed"):
            closed.start()
        assert not closed.watching


def test_entering_starts_unless_it_was_started_and_leaving_stops() -> None:
    dog = Watchdog(budget_s=50, threads=False)
    with dog:
        assert dog._job is not None
        assert dog._job.limit_s == 50
    assert not dog.watching
    with dog.start(budget_s=7):
        assert dog._job.limit_s == 7
    with pytest.raises(KeyError), dog:
        raise KeyError
    assert not dog.watching


def calls(act: Callable[[], object]) -> int:
    """How many functions of Python and of C it calls: the same on every machine, whatever else runs there."""
    seen: list[str] = []

    def see(_frame: object, event: str, _arg: object) -> None:
        if event in ("call", "c_call"):
            seen.append(event)

    gc.disable()  # It would call what else has a finalizer.
    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(seen) - 1  # the one that ended it


@pytest.mark.parametrize("kind", [Watchdog, StallWatchdog, GpuHealthWatchdog])
def test_bracketing_a_job_costs_a_few_calls_and_a_beat_fewer(kind: Any) -> None:
    # A call is 0.05 to 0.2 us.
    dog = kind(on_trip=Record().trip)
    dog.start()
    costs = {"bracket": calls(lambda: (dog.start(), dog.stop()))}
    if hasattr(dog, "beat"):
        dog.start()
        costs["beat"] = calls(lambda: dog.beat(1, 10))
    dog.close()
    assert costs["bracket"] <= 12
    assert costs.get("beat", 0) <= 8


def test_beating_takes_no_lock() -> None:
    dog = StallWatchdog(on_trip=Record().trip, threads=False)
    health = GpuHealthWatchdog(on_trip=Record().trip, threads=False)
    dog.start()
    health.start()
    with dog._lock, health._lock:  # A plain lock: taking it again would hang here for ever.
        dog.beat(1)
        health.beat(1)
    assert dog._job is not None
    assert dog._job.last is not None
