"""Schedules that an App declares: what is said where they are written, and what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from gangq import App, AsyncClient, Client, Gang, Job, Role
from gangq.errors import InvalidInput, NotAllowed, NotFound, NotSerializable, WrongState
from gangq.tasks import Task


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


def report(ctx: object, days: int = 1) -> int:
    return days


def stored(client: Client) -> dict[str, Any]:
    return {row.name: row for row in client.schedules()}


def test_above_a_task_it_stays_the_task(app: App) -> None:
    @app.schedule("0 3 * * *", tz="Europe/Oslo", payload={"days": 7})
    @app.schedule(every="6h", name="often", catch_up="skip", skip_if_running=True)
    @app.task(gpus=1)
    def nightly(ctx: object, days: int = 1) -> int:
        return days

    assert isinstance(nightly, Task)
    assert nightly(None, 3) == 3  # type: ignore[arg-type]
    assert list(app.schedules) == ["often", "nightly"]
    assert repr(app.schedules["nightly"]) == "<Schedule nightly: nightly, 0 3 * * *>"
    assert repr(app.schedules["often"]) == "<Schedule often: nightly, every 21600 s>"


def test_what_is_stored_is_what_was_declared(app: App, client: Client) -> None:
    client.set_queue(name="lab")
    task = app.task(queue="lab", gpus=2, priority=5, budget=60, labels={"a": "b"}, selector="gpu=h100")(
        report
    )
    app.schedule("0 3 * * *", task, tz="Europe/Oslo", payload={"days": 7}, catch_up="all", due_as=None)
    app.schedule(task=task.options(priority=9, wait_for_hardware=True), every=90, name="often")
    assert app.store_schedules("tests:app") == []
    often, nightly = stored(client)["often"], stored(client)["report"]
    assert (nightly.cron, nightly.tz, nightly.task, nightly.payload) == (
        "0 3 * * *", "Europe/Oslo", "report", {"days": 7},
    )  # fmt: skip
    assert nightly.work == {
        "queue": "lab", "gpus": 2, "priority": 5, "budget_s": 60, "labels": {"a": "b"},
        "selector": [{"key": "gpu", "op": "=", "values": ["h100"]}],
    }  # fmt: skip
    assert (nightly.catch_up, nightly.skip_if_running, nightly.source) == ("all", False, "tests:app")
    assert (often.every, often.work["priority"], often.work["wait_for_hardware"]) == (
        timedelta(seconds=90),
        9,
        True,
    )
    before = client.schedules()
    assert app.store_schedules("tests:app") == []
    assert client.schedules() == before


def test_a_schedule_of_a_gang(app: App, client: Client) -> None:
    task = app.task(gpus=1)(report)
    app.schedule("0 3 * * *", task, size=4, gang={"strategy": "spread", "min_size": 2}, payload={"days": 2})
    roles = [Role("driver", 1, payload={"days": 3}), Role("executor", 2)]
    app.schedule("0 4 * * *", task, name="roles", gang={"roles": roles})
    app.store_schedules("tests:app")
    found = stored(client)
    assert found["report"].work == {"gpus": 1, "size": 4, "strategy": "spread", "min_size": 2}
    assert found["report"].payload == {"days": 2}
    assert [role["name"] for role in found["roles"].work["roles"]] == ["driver", "executor"]
    gang = app.schedules["roles"].run_now()
    assert isinstance(gang, Gang)
    assert len(gang.members) == 3


def test_the_due_time_is_an_argument_of_the_function(app: App, client: Client, clock: Any) -> None:
    @app.schedule(every="1s", due_as="day")
    @app.task
    def daily(ctx: object, day: str) -> str:
        return day

    app.store_schedules("tests:app")
    clock.advance(1)
    client.tick(force=True)
    (job,) = client.jobs()
    assert datetime.fromisoformat(job.payload["day"]) == clock.now()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "either a cron expression or every"),
        ({"cron": "0 3 * * *", "every": "1h"}, "either a cron expression or every"),
        ({"cron": "0 3 * *"}, "five fields"),
        ({"cron": "0 33 * * *"}, "Bad hour"),
        ({"cron": "0 3 * * *", "tz": "Mars/Olympus"}, "is not known on this machine"),
        ({"every": "soon"}, "every is 'soon'"),
        ({"every": 0.5}, "1 to 1e"),
        ({"cron": "0 3 * * *", "catch_up": "some"}, "catch_up 'some'"),
        ({"cron": "0 3 * * *", "payload": {"week": 1}}, "the arguments do not fit task 'report'"),
        ({"cron": "0 3 * * *", "due_as": "day"}, "the arguments do not fit task 'report'"),
        ({"cron": "0 3 * * *", "payload": [1]}, "payload"),
        ({"cron": "0 3 * * *", "size": 2, "payload": {"week": 1}}, "do not fit"),
        ({"cron": "0 3 * * *", "gang": {"min_size": 2}}, "either a size or roles"),
        ({"cron": "0 3 * * *", "size": 2, "gang": {"heap": True}}, "unknown option 'heap'"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_written(given: dict[str, Any], why: str) -> None:
    app = App("postgresql://nowhere.invalid/x")
    with pytest.raises(InvalidInput, match=why):
        app.schedule(task=app.task(report), **given)
    assert app.schedules == {}


def test_what_is_not_json_is_said_there_too() -> None:
    app = App("postgresql://nowhere.invalid/x")
    with pytest.raises(NotSerializable, match="payload"):
        app.schedule("0 3 * * *", app.task(report), payload={"days": object()})


@pytest.mark.parametrize(
    "options",
    [
        {"run_at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"after": [1]},
        {"request_id": "0190e0a0-0000-7000-8000-000000000000"},
        {"connection": object()},
    ],
)
def test_options_of_one_submission_are_none_of_a_schedule(options: dict[str, Any]) -> None:
    app = App("postgresql://nowhere.invalid/x")
    task = app.task(report).options(**options)
    with pytest.raises(InvalidInput, match="which is for one submission"):
        app.schedule("0 3 * * *", task)
    with pytest.raises(InvalidInput, match="which is for one submission"):
        app.schedule("0 3 * * *", task, size=2)


def test_a_name_is_declared_once_and_only_tasks_have_schedules() -> None:
    app = App("postgresql://nowhere.invalid/x")
    task = app.task(report)
    app.schedule("0 3 * * *", task)
    with pytest.raises(InvalidInput, match="schedule 'report' is declared twice"):
        app.schedule("0 4 * * *", task)
    with pytest.raises(InvalidInput, match=r"is no task: @app\.schedule stands above @app\.task"):
        app.schedule("0 3 * * *")(report)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"no option 'misfire'; the options are catch_up, "):
        app.schedule("0 3 * * *", task, misfire=1)  # type: ignore[call-overload]


def test_a_handle_runs_pauses_and_shows_it(app: App, client: Client, clock: Any) -> None:
    handle = app.schedule(task=app.task(report), every="1h", skip_if_running=True, payload={"days": 4})
    with pytest.raises(NotFound, match="is not stored: workers store it"):
        handle.row()
    app.store_schedules("tests:app")
    job = handle.run_now()
    assert isinstance(job, Job)
    assert client.job(id=job.id).payload == {"days": 4}
    assert handle.row().last_job == job.id
    with pytest.raises(WrongState, match="does not run twice at once"):
        handle.run_now()
    until = clock.now() + timedelta(hours=5)
    handle.pause(until)
    assert (handle.row().paused, handle.row().paused_until) == (True, until)
    handle.resume()
    assert not handle.row().paused
    handle.pause()
    assert (handle.row().paused, handle.row().paused_until) == (True, None)
    with pytest.raises(InvalidInput, match="without a time zone"):
        handle.pause(datetime(2030, 1, 1))


def test_a_refusal_comes_after_the_others_are_stored(app: App, client: Client) -> None:
    task = app.task(report)
    app.schedule("0 3 * * *", task.options(queue="gone"), name="a")
    app.schedule("0 3 * * *", task, name="b")
    with pytest.raises(NotFound, match="queue 'gone' does not exist"):
        app.store_schedules("tests:app")
    assert list(stored(client)) == ["b"]


def test_a_login_that_may_not_submit_stores_none_and_one_without_schedules_needs_no_right(
    app: App, dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute("drop role if exists only_worker_test")
    db.execute("create role only_worker_test login")
    db.execute("grant gangq_worker to only_worker_test")
    with App(make_conninfo(dsn, user="only_worker_test")) as other:
        assert other.store_schedules("tests:app") == []
        other.schedule("0 3 * * *", other.task(report))
        with pytest.raises(NotAllowed, match="only a submitter stores schedules: grant gangq_submitter"):
            other.store_schedules("tests:app")


def test_a_client_computes_what_a_tick_finds_unplanned_unless_it_is_told_not_to(
    client: Client, clock: Any
) -> None:
    client.set_schedule(name="s", task="t", cron="* * * * *")
    assert client.tick(force=True, decides=False).unplanned == 1
    assert client.schedules()[0].next_due is None
    report = client.tick(force=True)
    assert (report.unplanned, report.again) == (1, False)
    due = client.schedules()[0].next_due
    assert due is not None
    clock.set(due + timedelta(minutes=10))
    report = client.tick(force=True)
    assert (report.again, report.next_in_s) == (True, 0.0), "what was missed is due now"
    client.tick(force=True)
    assert client.schedules()[0].last_due == due + timedelta(minutes=10)


def test_what_only_python_can_read_of_an_expression_is_refused_by_the_client(client: Client) -> None:
    with pytest.raises(InvalidInput, match="Bad minute"):
        client.set_schedule(name="s", task="t", cron="99 * * * *")
    with pytest.raises(InvalidInput, match="every is 'soon'"):
        client.set_schedule(name="s", task="t", every="soon")
    assert client.set_schedule(name="s", task="t", every=timedelta(minutes=1)) == "made"
    assert client.schedules(name="s")[0].every == timedelta(minutes=1)
    assert client.schedules(name="x") == []


def test_a_schedule_is_set_in_a_callers_transaction(client: Client, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        client.set_schedule(name="s", task="t", cron="* * * * *", connection=conn)
        assert client.schedules() == []
        conn.rollback()
        client.set_schedule(name="s", task="t", cron="* * * * *", connection=conn)
        client.pause_schedule(name="s", connection=conn)
    assert client.schedules()[0].paused
    client.resume_schedule(name="s")
    client.forget_schedule(name="s")
    assert client.schedules() == []


def test_the_async_client_has_the_same(dsn: str) -> None:
    async def use() -> None:
        async with AsyncClient(dsn) as client:
            assert await client.set_schedule(name="s", task="t", cron="* * * * *") == "made"
            assert (await client.tick(force=True)).unplanned == 1
            (row,) = await client.schedules()
            assert row.next_due is not None
            assert (await client.run_schedule_now(name="s")).gang_id is None

    asyncio.run(use())
