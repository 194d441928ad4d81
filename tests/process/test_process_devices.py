"""Devices that do nothing or fail under a worker: true driver bindings over a scripted library, true workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu.gpu_fakes import HERE, compile_library, gpu, line, rewrite
from process.floor import PATIENCE_S, TASKS, Floor
from worker.worker_process import WorkerProcess, eventually

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
IDLE: dict[str, Any] = {"used_mib": 2048, "util": 0, "memutil": 0, "milliwatts": 70_000}
BUSY: dict[str, Any] = {**IDLE, "util": 80, "memutil": 40, "milliwatts": 400_000}
XID = 8

UNTIL_KILLED = """
def first_time(ctx):
    try:
        (HERE / f"tried-{ctx.job.id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

@app.task
def beats(ctx):
    while not (HERE / "enough").exists():
        ctx.beat()
        time.sleep(0.1)

@app.task
def waits(ctx):
    "The first time for ever, and without a beat; tells where it runs the second."
    if first_time(ctx):
        threading.Event().wait()
    return ctx.devices[0].uuid
"""


class Cards:
    """The script of the driver library: card a, card b."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def say(self, a: dict[str, Any], b: dict[str, Any] | None = None) -> None:
        rewrite(self._state, gpu("a", **a), gpu("b", **(IDLE if b is None else b)))

    def hang(self) -> None:
        """The driver no longer answers whoever opens it."""
        rewrite(self._state, line("driver", hang="init"), gpu("a"), gpu("b"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    compile_library(HERE / "fake_nvml.c", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture
def cards(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    state = tmp_path / "nvml.txt"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML", str(state))
    made = Cards(state)
    made.say(IDLE)
    return made


@pytest.fixture
def start(floor: Floor, cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], WorkerProcess]:
    """Start a worker that owns one card, on a host of its own."""
    floor.fleet.define(TASKS + UNTIL_KILLED)
    floor.configure(load_grace_s=30, health_window_s=5)

    def started(letter: str) -> WorkerProcess:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{letter * 8}")
        return floor.start(letter, devices=None, host=f"host-{letter}")

    return started


def at_work(floor: Floor) -> int:
    job = floor.inline("waits", gpus=1)
    eventually(lambda: floor.client.job(id=job).state == "running", "it runs", PATIENCE_S)
    return job


def device(floor: Floor, uuid: str) -> Any:
    return next(found for found in floor.client.devices() if found.uuid == uuid)


def until_seen_busy(floor: Floor) -> None:
    """Card a is being read, and its events have been subscribed to."""
    eventually(lambda: (device(floor, A).reading or {}).get("gpu_pct") == 80, "it was seen busy", PATIENCE_S)


@pytest.mark.slow
def test_a_device_that_was_seen_busy_and_then_does_nothing_for_a_whole_window_is_freed(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    worker = start("a")
    job = at_work(floor)
    start("b")
    cards.say(BUSY)
    until_seen_busy(floor)
    assert worker.process.poll() is None
    cards.say(IDLE)
    assert worker.exit_code(PATIENCE_S) == 78
    (row,) = floor.until_done(job)
    (trip,) = floor.client.trips(job_id=job)
    assert (trip.code, trip.class_, trip.devices) == (78, "health", [A])
    assert {reading["gpu_pct"] for reading in trip.evidence["seen"]["window"]["devices"][-3:]} == {0}
    # Not again on the device where it hung, as long as there is another.
    assert (row.result, row.trips, row.attempts) == (B, 1, 1)
    assert device(floor, A).state != "quarantined" or "exiting" in device(floor, A).reason


def test_a_device_that_was_never_seen_busy_convicts_nobody(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    floor.configure(load_grace_s=1, health_window_s=2)
    worker = start("a")
    job = at_work(floor)
    time.sleep(8)
    assert worker.process.poll() is None
    assert floor.client.trips(job_id=job) == []
    floor.client.cancel(job_ids=[job])
    assert worker.exit_code(PATIENCE_S) == 79


def test_a_worker_that_starts_while_its_driver_hangs_waits_for_it(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    first = start("a")
    first.signal(signal.SIGTERM)
    assert first.exit_code(PATIENCE_S) == 0
    cards.hang()
    # As long as a driver that is slow, not as one that is broken: its predecessor had a device.
    worker = floor.start("a", ready=False, devices=None, host="host-a")
    eventually(lambda: "driver_silent" in worker.log, "it says what it waits for", PATIENCE_S)
    cards.say(IDLE)
    floor.until_listening(worker, times=2)
    assert [found.worker for found in floor.client.devices() if found.uuid == A] == ["a"]


def test_a_fatal_xid_ends_the_job_within_two_seconds_and_takes_the_device_out_of_service(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    worker = start("a")
    job = at_work(floor)
    start("b")
    cards.say(BUSY)
    until_seen_busy(floor)
    told_at = time.monotonic()
    cards.say({**BUSY, "event": f"1:{XID}:79"})
    eventually(lambda: floor.client.trips(job_id=job), "it tripped", PATIENCE_S)
    assert time.monotonic() - told_at < 4
    assert worker.exit_code() == 85
    (row,) = floor.until_done(job)
    (trip,) = floor.client.trips(job_id=job)
    assert (trip.code, trip.class_, trip.devices) == (85, "fault", [A])
    assert (row.result, row.trips) == (B, 1)
    found = device(floor, A)
    assert (found.state, found.health) == ("quarantined", "quarantined")
    assert "79" in found.reason
    floor.client.unquarantine(device_uuid=A)


def test_an_xid_that_programs_cause_is_a_suspicion_and_blames_no_device(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    worker = start("a")
    job = at_work(floor)
    cards.say(BUSY)
    until_seen_busy(floor)
    cards.say({**BUSY, "event": f"1:{XID}:31"})
    told = eventually(lambda: floor.client.events(job_id=job, kind="suspect"), "it is suspect", PATIENCE_S)
    assert [event.data["class"] for event in told] == ["fault"]
    assert worker.process.poll() is None
    assert floor.client.job(id=job).state == "running"
    assert device(floor, A).state == "held"
    floor.client.cancel(job_ids=[job])
    assert worker.exit_code(PATIENCE_S) == 79


def test_a_driver_that_is_slow_costs_no_job_and_brings_no_new_one(
    floor: Floor, cards: Cards, start: Callable[[str], WorkerProcess]
) -> None:
    worker = start("a")
    floor.configure(health_window_s=300)
    beats = floor.inline("beats", gpus=1)
    eventually(lambda: floor.client.job(id=beats).state == "running", "it runs", PATIENCE_S)
    cards.say({**BUSY, "slow_ms": 700})
    eventually(lambda: "device_silent" in worker.log, "its device is doubtful", PATIENCE_S)
    (floor.directory / "enough").touch()
    (row,) = floor.until_done(beats)
    assert (row.attempts, row.trips) == (1, 0)
    after = floor.inline("quick")
    # What would take it does not ask, though it is woken.
    with pytest.raises(AssertionError, match="did not happen"):
        eventually(lambda: floor.client.job(id=after).state != "pending", "it is claimed", 3)
    cards.say(BUSY)
    floor.until_done(after)
    assert worker.process.poll() is None
    assert floor.client.trips() == []
    assert device(floor, A).state == "free"
