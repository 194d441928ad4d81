"""The wall clock, in virtual time."""

from __future__ import annotations

import pytest
from fakes import Clock, Record, drive

from gangq.errors import InvalidInput
from gangq.watchdogs import ExitCode, Watchdog


def make(clock: Clock, record: Record, **more: object) -> Watchdog:
    told = {"on_trip": record.trip, "on_suspect": record.suspicions.append}
    return Watchdog(clock=clock, threads=False, **told, **more)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def record() -> Record:
    return Record()


def test_without_a_budget_of_its_own_a_job_gets_the_default(clock: Clock, record: Record) -> None:
    dog = make(clock, record).start()
    clock.now += 2100 - 0.1
    dog.check()
    assert record.trips == []
    clock.now += 0.1
    dog.check()
    assert [(trip.code, trip.reason) for trip in record.trips] == [(ExitCode.BUDGET, "budget")]


def test_it_trips_at_the_budget_and_not_a_moment_before(clock: Clock, record: Record) -> None:
    dog = make(clock, record).start(budget_s=60)
    drive(dog, clock, 59.9)
    assert record.trips == []
    drive(dog, clock, 0.1)
    assert record.reasons == ["budget"]
    assert "60.0 s, its budget is 60 s" in record.trips[0].message


def test_a_job_that_ended_before_its_budget_does_not_trip(clock: Clock, record: Record) -> None:
    dog = make(clock, record, budget_s=60)
    with dog:
        drive(dog, clock, 50)
    drive(dog, clock, 500)
    assert record.trips == []


def test_the_next_job_gets_a_budget_of_its_own(clock: Clock, record: Record) -> None:
    dog = make(clock, record)
    with dog.start(budget_s=60):
        drive(dog, clock, 50)
    with dog.start(budget_s=60):
        drive(dog, clock, 50)
        assert record.trips == []
        drive(dog, clock, 10)
        assert record.reasons == ["budget"]


def test_a_pause_of_the_process_moves_the_deadline(clock: Clock, record: Record) -> None:
    dog = make(clock, record).start(budget_s=60)
    drive(dog, clock, 30)
    clock.now += 500
    dog.pauses.note(500, "stopped")
    drive(dog, clock, 29)
    assert record.trips == []
    drive(dog, clock, 1)
    assert record.reasons == ["budget"]
    assert record.trips[0].evidence["paused_s"] == 500


def test_a_pause_before_the_job_is_not_its_own(clock: Clock, record: Record) -> None:
    dog = make(clock, record)
    dog.pauses.note(500, "stopped")
    dog.start(budget_s=60)
    drive(dog, clock, 60)
    assert record.reasons == ["budget"]


def test_it_is_suspect_once_at_nine_tenths(clock: Clock, record: Record) -> None:
    dog = make(clock, record).start(budget_s=100)
    drive(dog, clock, 89)
    assert record.suspicions == []
    drive(dog, clock, 10)
    assert len(record.suspicions) == 1


def test_the_class_of_a_suspicion_is_not_taken_from_the_name_of_the_thread(
    clock: Clock, record: Record
) -> None:
    dog = make(clock, record, name="my-trainer").start(budget_s=100)
    drive(dog, clock, 95)
    assert [suspicion.cls for suspicion in record.suspicions] == ["budget"]


def test_called_off_it_is_tried_again_after_another_budget(clock: Clock) -> None:
    record = Record(call_off=True)
    dog = make(clock, record).start(budget_s=60)
    drive(dog, clock, 61)
    assert len(record.trips) == 1
    drive(dog, clock, 58)
    assert len(record.trips) == 1
    drive(dog, clock, 2)
    assert len(record.trips) == 2


def test_the_trip_knows_whose_it_is(clock: Clock, record: Record) -> None:
    dog = make(clock, record).start(budget_s=1, job="mine")
    drive(dog, clock, 1)
    assert record.trips[0].job == "mine"


@pytest.mark.parametrize("junk", [0, -1, float("nan"), float("inf"), True, "60", 1e10, [60]])
def test_a_budget_that_makes_no_sense_is_refused_by_name(clock: Clock, junk: object) -> None:
    with pytest.raises(InvalidInput, match="budget_s is "):
        Watchdog(budget_s=junk)  # type: ignore[arg-type]
    dog = make(clock, Record())
    with pytest.raises(InvalidInput, match="budget_s is "):
        dog.start(budget_s=junk)  # type: ignore[arg-type]
    assert not dog.watching
