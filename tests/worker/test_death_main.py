"""What a supervisor has said of its worker, by the process that says it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from gangq.client import Client
from gangq.errors import IncarnationEnded
from gangq.proc import clock, death_report, statefile
from gangq.proc.supervisor_log import Log
from gangq.worker.death_main import DIRECTORY_PREFIX, main, own_directory, report, report_end
from worker.worker_process import eventually


def facts(job: Any = None, **more: Any) -> dict[str, Any]:
    """Of a worker that froze while this job ran."""
    return {
        "exit_code": 80,
        "status": -9,
        "signal": 9,
        "silent_s": 30.0,
        "job": job and job.job_id,
        "token": job and job.token,
        "threads": [],
        "stacks": "",
        "stuck": [],
        "left": [],
        "tree_dead": True,
        **more,
    }


def worker(client: Client) -> dict[str, Any]:
    row = client.register_worker(name="w", host="h", queues=["default"])
    return {"worker": "w", "incarnation": row.incarnation}


def test_the_job_of_a_frozen_worker_is_tripped_and_free_at_once(client: Client) -> None:
    record = worker(client)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(job))
    row = client.job(id=job.job_id)
    assert (row.state, row.trips, row.crashes, row.attempts) == ("pending", 1, 0, 0)
    assert [trip.code for trip in client.trips()] == [80]


def test_what_a_frozen_worker_began_while_it_was_being_ended_is_charged_nothing(client: Client) -> None:
    record = worker(client)
    client.submit(task="t", payloads=[{}, {}])
    (frozen,) = client.claim(incarnation=record["incarnation"])
    client.complete(job_ids=[frozen.job_id], tokens=[frozen.token])
    (next_one,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(frozen))
    row = client.job(id=next_one.job_id)
    assert (row.state, row.trips, row.crashes, row.stops, row.attempts) == ("pending", 0, 0, 1, 0)
    assert client.job(id=frozen.job_id).state == "done"
    assert client.trips() == []


def test_the_job_of_a_killed_worker_is_charged_a_crash(client: Client) -> None:
    record = worker(client)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(job, exit_code=137, silent_s=None))
    row = client.job(id=job.job_id)
    assert (row.state, row.trips, row.crashes, row.attempts) == ("pending", 0, 1, 0)


def kept(directory: Path, record: dict[str, Any], job: Any, **more: Any) -> None:
    trip = {
        "incarnation": record["incarnation"],
        "job": job.job_id,
        "token": job.token,
        "code": 76,
        "class": "stall",
    }
    error = {"type": "Stalled", "message": "no step for 130 s"}
    statefile.write(directory, statefile.TRIP, json.dumps({**trip, "error": error, **more}).encode())


def end(client: Client, record: dict[str, Any], left: Path) -> None:
    """Report its end by what it left in its directory; another process may have done so already."""
    with contextlib.suppress(IncarnationEnded):
        report_end(client, "w", record["incarnation"], left, os.getuid(), {"by": "a test"})


def directory(tmp_path: Path) -> Path:
    made = tmp_path / f"{DIRECTORY_PREFIX}x"
    made.mkdir()
    return made


def test_a_trip_that_the_worker_left_is_told_once_with_its_class_and_evidence(
    client: Client, tmp_path: Path
) -> None:
    record, place = worker(client), directory(tmp_path)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    kept(place, record, job, evidence={"stacks": "where it hung"})
    for _ in range(3):
        end(client, record, place)
    assert (client.job(id=job.job_id).trips, client.job(id=job.job_id).crashes) == (1, 0)
    (trip,) = client.trips()
    assert (trip.code, trip.class_, trip.evidence) == (76, "stall", {"stacks": "where it hung"})


def test_a_claim_that_was_over_meanwhile_is_no_trip_of_the_next(client: Client, tmp_path: Path) -> None:
    client.set_queue(name="default", backoff_s=0.01, backoff_max_s=0.02)
    record, place = worker(client), directory(tmp_path)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    kept(place, record, job)
    client.report_dead(worker="w", incarnation=record["incarnation"], evidence={"by": "a test"})
    again = worker(client)

    def claimed() -> bool:
        client.tick(force=True)
        return bool(client.claim(incarnation=again["incarnation"]))

    eventually(claimed, "it runs again")
    end(client, record, place)
    row = client.job(id=job.job_id)
    assert (row.state, row.trips, row.crashes, client.trips()) == ("running", 0, 1, [])


@pytest.mark.parametrize(
    "junk", ["", "null", "[" * 100000, '{"incarnation": 1}', '{"incarnation": 1, "job": "x", "code": []}']
)
def test_junk_in_the_place_of_what_was_left_is_nothing(client: Client, tmp_path: Path, junk: str) -> None:
    record, place = worker(client), directory(tmp_path)
    for name in (statefile.TRIP, statefile.DEATH):
        statefile.write(place, name, junk.replace("1", str(record["incarnation"]), 1).encode())
    end(client, record, place)
    assert client.trips() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file to another user needs root")
@pytest.mark.parametrize("anothers", [".", "note"])
def test_nothing_is_read_of_another_user(tmp_path: Path, anothers: str) -> None:
    statefile.write(tmp_path, "note", b"7")
    assert statefile.read(tmp_path, "note", uid=os.getuid()) == b"7"
    os.chown(tmp_path / anothers, os.getuid() + 1, -1)
    assert statefile.read(tmp_path, "note", uid=os.getuid()) is None


def test_what_stands_there_is_mode_0600_and_takes_no_link(tmp_path: Path) -> None:
    place = directory(tmp_path)
    (tmp_path / "elsewhere").write_text("kept")
    (place / "trip").symlink_to(tmp_path / "elsewhere")
    statefile.write(place, "trip", b"7")
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert stat.S_IMODE((place / "trip").stat().st_mode) == 0o600
    assert statefile.read(place, "trip", uid=os.getuid()) == b"7"
    assert [entry.name for entry in place.iterdir()] == ["trip"]


@pytest.mark.parametrize(
    ("trip", "more", "for_s", "kept"),
    [
        ({}, {}, 5.0, True),
        ({"until": 3.0}, {}, 3.0, True),
        ({"until": 3.0, "reported": True}, {}, 2.0, False),
        ({"until": 3.0, "incarnation": 8}, {}, 5.0, True),
        ({"until": 0.5}, {}, None, True),
        ({"until": 3.0}, {"frozen_at": -1.0}, 4.0, True),
        ({"until": 0.5}, {"stuck": True}, 5.0, True),
    ],
    ids=["no trip", "began", "reported", "of another", "too late", "frozen", "stuck"],
)
def test_a_supervisor_reports_within_what_its_worker_left_of_five_seconds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trip: dict[str, Any],
    more: dict[str, Any],
    for_s: float | None,
    kept: bool,
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(death_report.clock, "boottime", lambda: 100.0)
    monkeypatch.setattr(death_report, "_run_report", lambda *given: allowed.append(given[3]) or 0)
    if trip:
        left = {"incarnation": 7, **trip, "until": 100 + trip["until"]}
        statefile.write(tmp_path, statefile.TRIP, json.dumps(left).encode())
    facts: dict[str, object] = {"stuck": [{"pid": 1}] if "stuck" in more else []}
    frozen_at = 100 + more["frozen_at"] if "frozen_at" in more else None
    record = json.dumps({"directory": str(tmp_path)}).encode()
    log = Log(as_json=True)
    death_report.send(log, {}, b"{}", record, 7, facts, frozen_at)
    assert allowed == ([] if for_s is None else [for_s])
    assert (tmp_path / statefile.DEATH).exists() is kept


@pytest.mark.parametrize("junk", ["[" * 100_000, "{", "7", '{"incarnation": 7, "until": "x"}'])
def test_a_supervisor_reports_whatever_stands_where_its_worker_keeps_a_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: str
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(death_report, "_run_report", lambda *given: allowed.append(given[3]) or 0)
    statefile.write(tmp_path, statefile.TRIP, junk.encode())
    record = json.dumps({"directory": str(tmp_path)}).encode()
    log = Log(as_json=True)
    death_report.send(log, {}, b"{}", record, 7, {"stuck": []}, None)
    assert allowed == [5.0]


@pytest.mark.parametrize("junk", ["7", "[]", '["x"]', r'"a\u0000b"', r'"\ud800"'])
def test_a_supervisor_reports_whatever_its_worker_calls_its_directory(
    monkeypatch: pytest.MonkeyPatch, junk: str
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(death_report, "_run_report", lambda *given: allowed.append(given[3]) or 0)
    record = f'{{"directory": {junk}}}'.encode()
    death_report.send(Log(as_json=True), {}, b"{}", record, 7, {"stuck": []}, None)
    assert allowed == [5.0]


@pytest.mark.parametrize("junk", [7, [], "/tmp/gangq-w-a\0b", "/tmp/gangq-w-\ud800", "gangq-w-a", "/tmp"])
def test_what_cannot_be_a_workers_directory_is_none(junk: object) -> None:
    assert own_directory(junk) is None


@pytest.mark.parametrize(
    ("record", "secrets"), [("{", "{}"), ("7", "{}"), ("", "{}"), ("{}", "{"), ("{}", "")]
)
def test_a_supervisor_says_that_it_cannot_report_by_junk_of_its_worker_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], record: str, secrets: str
) -> None:
    monkeypatch.setattr(death_report, "_run_report", lambda *given: pytest.fail("it was started"))
    death_report.send(Log(as_json=True), {}, secrets.encode(), record.encode(), 7, {"stuck": []}, None)
    assert "death_not_reported" in capfd.readouterr().out


def test_a_disk_without_room_is_left_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    statefile.write(tmp_path, "trip", b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space left"):
            statefile.write(tmp_path, "trip", b"after")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"trip": b"before"}


@pytest.mark.parametrize("dsn", ["host=127.0.0.1 port=1", "host=192.0.2.1"], ids=["refused", "silent"])
def test_one_that_starts_late_says_that_it_failed_before_its_supervisor_kills_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"worker": "w", "incarnation": 1, "dsn": dsn}
    until = clock.boottime() + 0.6
    words = {"record": record, "secrets": {}, "facts": facts(), "until": until}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(words)))
    with pytest.raises(SystemExit, match="1"):
        main()
    # Without it the tries would go on for seconds. The rest is for a busy machine.
    assert clock.boottime() < until + 2
    assert "report_failed" in caplog.text
