"""What is collected before a job is ended: bounded, plain, and never in the way."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from gangq.watchdogs import ExitCode, Trip
from gangq.watchdogs import evidence as evidence_module
from gangq.watchdogs.evidence import collect
from watchdogs.victims import HUNG, until, victim


def test_the_own_process_shows_where_every_thread_stands() -> None:
    release = threading.Event()

    def hanging_here() -> None:
        release.wait(30)

    thread = threading.Thread(target=hanging_here, daemon=True)
    thread.start()
    try:
        found = collect(own=True)
    finally:
        release.set()
        thread.join()
    assert "hanging_here" in found["stacks"]
    (process,) = found["processes"]
    assert process["pid"] == os.getpid()
    assert {t["tid"] for t in process["threads"]} >= {threading.get_native_id()}


def _states(pid: int) -> list[str]:
    (shown,) = collect(lambda: [pid])["processes"]
    return [thread["state"] for thread in shown["threads"]]


def test_another_process_shows_what_its_threads_wait_for() -> None:
    with victim(HUNG["lock_wait"]) as process:
        until(lambda: all(field == "S" for field in _states(process.pid)))
        found = collect(lambda: [process.pid])
    assert "stacks" not in found
    (shown,) = found["processes"]
    assert any("futex" in (thread["wchan"] or "") for thread in shown["threads"])
    assert all(thread["state"] == "S" for thread in shown["threads"])


def test_open_device_files_are_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "_DEVICE_PATHS", (str(tmp_path),))
    with (tmp_path / "nvidia0").open("w") as file:
        found = collect(lambda: [os.getpid()])
        number = str(file.fileno())
    assert found["processes"][0]["devices_open"] == {number: str(tmp_path / "nvidia0")}


def test_a_process_that_is_gone_is_said_to_be() -> None:
    with victim("ready(); time.sleep(60)") as process:
        pass
    assert collect(lambda: [process.pid])["processes"] == [{"pid": process.pid, "gone": True}]


def test_whatever_hangs_costs_a_second_and_the_rest_is_there() -> None:
    began = time.monotonic()
    found = collect(lambda: time.sleep(30) or [], own=True)  # type: ignore[arg-type,func-returns-value]
    assert time.monotonic() - began < 1.7
    assert "hangs" in found["stacks"]
    assert found["incomplete"] == ["processes"]


def test_it_is_json_that_postgresql_takes_whatever_was_put_in() -> None:
    trip = Trip(
        ExitCode.STALL,
        "idle",
        "nul \0 here",
        {"loss": float("nan"), "odd": object(), "far": [float("inf"), {1: 2}], "more": {"a", "b"}},
    )
    found = collect(trip=trip, log_tail=lambda: b"tail \xff\0")
    text = json.dumps(found, allow_nan=False)
    assert "\\u0000" not in text
    assert found["reason"] == "idle"
    assert found["seen"]["far"] == ["inf", {"1": 2}]


def test_evidence_that_cannot_be_had_is_said_so_and_the_rest_is_there() -> None:
    def broken() -> str:
        raise OSError("no log")

    found = collect(own=True, log_tail=broken)
    assert "no log" in found["log_tail"]
    assert "stacks" in found


def test_it_is_bounded_in_size() -> None:
    trip = Trip(ExitCode.STALL, "idle", "hangs", {"long": "x" * 10**6})
    found = collect(trip=trip, log_tail=lambda: "y" * 10**6)
    assert len(json.dumps(found)) < 60_000
