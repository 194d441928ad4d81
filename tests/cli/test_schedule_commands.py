"""gangq schedule: what people type, and what they are told."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from cli.cli_process import answers, gangq, objects, ok
from gangq.client import Client


def refused(dsn: str, code: int, *args: object) -> str:
    result = gangq(dsn, "schedule", *args)
    assert result.exit_code == code, (result.stdout, result.stderr)
    return str(result.stderr)


def test_a_schedule_from_one_line(dsn: str, client: Client) -> None:
    client.set_queue(name="lab")
    told = ok(
        dsn, "schedule", "add", "nightly", "0 3 * * *", "report", "days=1", "name=x", "--tz", "Europe/Oslo",
        "--catch-up", "all", "--skip-if-running", "--due-as", "day", "--queue", "lab", "--gpus", "2",
        "--budget", "1h", "--label", "a=b", "--select", "gpu=h100",
    )  # fmt: skip
    assert told.startswith("schedule nightly: made; due at ")
    (row,) = client.schedules()
    assert (row.cron, row.tz, row.task, row.payload) == (
        "0 3 * * *",
        "Europe/Oslo",
        "report",
        {"days": 1, "name": "x"},
    )
    assert (row.catch_up, row.skip_if_running, row.due_as) == ("all", True, "day")
    assert row.work == {
        "queue": "lab", "gpus": 2, "budget_s": 3600, "labels": {"a": "b"},
        "selector": [{"key": "gpu", "op": "=", "values": ["h100"]}],
    }  # fmt: skip
    assert ok(dsn, "schedule", "add", "nightly", "0 3 * * *", "report").startswith(
        "schedule nightly: changed"
    )
    assert ok(dsn, "schedule", "add", "nightly", "0 3 * * *", "report").startswith("schedule nightly: same")


def test_the_other_forms(dsn: str, client: Client) -> None:
    ok(dsn, "schedule", "add", "poll", "--every", "90s", "poll", '{"n": [1]}')
    ok(dsn, "schedule", "add", "gang", "0 3 * * *", "train", "--gang", "4", "--strategy", "spread")
    ok(dsn, "schedule", "add", "clean", "30 4 * * *", "--command", "--", "rm", "-rf", "/x")
    rows = {row.name: row for row in client.schedules()}
    assert (rows["poll"].every, rows["poll"].payload) == (timedelta(seconds=90), {"n": [1]})
    assert rows["gang"].work == {"size": 4, "strategy": "spread"}
    assert (rows["clean"].task, rows["clean"].payload["argv"]) == ("command", ["rm", "-rf", "/x"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "s", "0", "3", "*", "*", "*", "report"], "quote it"),
        (["add", "s", "*/5", "report"], "quote it"),
        (["add", "s", "10s", "report"], "or give an interval, as in gangq schedule add s --every 5m TASK"),
        (["add", "s", "0 3 * * *"], "name the task"),
        (["add", "s"], "name the task"),
        (["add", "s", "--every", "5m"], "name the task"),
        (["add", "s", "0 33 * * *", "report"], "Bad hour"),
        (["add", "s", "0 3 * * *", "report", "--tz", "Mars/X"], "is not known on this machine"),
        (["add", "s", "0 3 * * *", "report", "--strategy", "spread"], "is for gangs"),
        (["add", "s", "0 3 * * *", "report", "--due", "5m"], "No such option"),
        (["add", "s", "0 3 * * *", "report", "--queue", "gone"], "queue 'gone' does not exist"),
        (["add", "s", "0 3 * * *", "report", "x"], "'x' is not key=value"),
        (["list", "s"], "schedule 's' does not exist"),
        (["pause", "s"], "schedule 's' does not exist"),
        (["rm", "s"], "schedule 's' does not exist"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(dsn: str, words: list[str], said: str) -> None:
    assert said in refused(dsn, 2, *words)


def test_a_schedule_is_listed_paused_run_and_forgotten(dsn: str, client: Client, clock: Any) -> None:
    assert "no schedules" in gangq(dsn, "schedule", "list").stderr
    ok(dsn, "schedule", "add", "s", "* * * * *", "report")
    table = ok(dsn, "schedule", "list")
    assert table.splitlines()[0].split()[:3] == ["NAME", "WHEN", "TASK"]
    assert "not computed yet" in table
    client.tick(force=True)
    (shown,) = answers(dsn, "schedule", "list", "s")
    due = datetime.fromisoformat(shown["next_due"])
    clock.set(due)
    client.tick(force=True)
    (shown,) = answers(dsn, "schedule", "list")
    assert datetime.fromisoformat(shown["last_due"]) == due
    assert "paused until" in ok(dsn, "schedule", "pause", "s", "--until", "2h")
    (shown,) = answers(dsn, "schedule", "list", "s")
    assert datetime.fromisoformat(shown["paused_until"]) == due + timedelta(hours=2)
    assert ok(dsn, "schedule", "pause", "s") == "schedule s: paused\n"
    job = int(ok(dsn, "schedule", "run-now", "s"))
    assert client.job(id=job).task == "report"
    assert ok(dsn, "schedule", "resume", "s") == "schedule s: goes on\n"
    assert ok(dsn, "schedule", "rm", "s") == "schedule s: forgotten\n"
    assert client.schedules() == []


def test_rm_says_that_a_program_brings_it_back(dsn: str, client: Client) -> None:
    client.set_schedule(name="s", task="t", cron="* * * * *")
    client.declare_schedules(source="tasks:app", names=["s"])
    result = gangq(dsn, "schedule", "rm", "s")
    assert "tasks:app declares it" in result.stderr


def test_tick_computes_and_submits_without_any_worker(dsn: str, client: Client, clock: Any) -> None:
    ok(dsn, "schedule", "add", "s", "* * * * *", "report")
    (ticked,) = answers(dsn, "tick", "--force")
    assert ticked["unplanned"] == 1
    (row,) = client.schedules()
    assert row.next_due is not None
    clock.set(row.next_due + timedelta(hours=3))
    ok(dsn, "tick", "--force")
    assert client.schedules()[0].last_due == row.next_due + timedelta(hours=3), "in one command"


def checked(dsn: str) -> dict[str, Any]:
    found = {check["check"]: check for check in objects(gangq(dsn, "doctor", "--json").stdout)}
    return dict(found["schedules"])


def test_the_doctor_says_what_is_wrong_with_schedules(dsn: str, client: Client, clock: Any) -> None:
    assert checked(dsn)["detail"] == "0 schedules, all as they should be"
    client.set_schedule(name="s", task="t", cron="* * * * *")
    assert checked(dsn)["status"] == "ok"
    clock.advance(61)
    found = checked(dsn)
    assert (found["status"], "s has no next due time (not computed yet" in found["detail"]) == ("warn", True)
    assert "run a worker, or gangq tick" in found["advice"]
    client.tick(force=True)
    due = client.schedules()[0].next_due
    assert due is not None
    clock.set(due + timedelta(seconds=61))
    assert "s was due at" in checked(dsn)["detail"]
    client.set_queue(name="default", draining=True)
    client.tick(force=True)
    client.tick(force=True)
    assert "(queue default is draining (GQ004))" in checked(dsn)["detail"]
    client.set_queue(name="default", draining=False)
    client.set_schedule(name="s", task="t", every="1h", skip_if_running=True)
    client.run_schedule_now(name="s")
    clock.advance(3601)
    client.tick(force=True)
    assert checked(dsn)["status"] == "ok", "it still runs, as wanted"
    client.declare_schedules(source="tasks:app", names=["s"])
    client.declare_schedules(source="tasks:app", names=[])
    assert "s goes on, and is not in tasks:app any more" in checked(dsn)["detail"]
