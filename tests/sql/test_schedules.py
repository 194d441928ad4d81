"""Schedules: each due time is submitted once, on behalf of who stored it, and nothing is lost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from gangq.decider.schedules import plan_schedules
from sql.drive import (
    INVALID,
    MISSING,
    NOT_ALLOWED,
    TOO_LARGE,
    WRONG_STATE,
    Q,
    a_role,
    in_steps,
    refused,
)


def put(q: Q, name: str = "s", cron: str | None = "* * * * *", task: str = "report", **more: Any) -> str:
    if "every" in more:
        cron = None
    return str(q.one("set_schedule", name=name, **({"cron": cron} if cron else {}), task=task, **more))


def row(q: Q, name: str = "s") -> dict[str, Any]:
    return q.sql("select * from gangq.schedules where name = %(name)s", name=name)[0]


def jobs(q: Q) -> list[dict[str, Any]]:
    return q.sql("select * from gangq.live_jobs order by id")


def dues(q: Q) -> list[datetime]:
    return [job["due_at"] for job in jobs(q)]


def alone(q: Q) -> dict[str, Any]:
    """A tick in SQL alone."""
    ticked: dict[str, Any] = q.one("tick", force=True)
    return ticked


def plan(q: Q) -> bool:
    return in_steps(q.db, plan_schedules())


def to(q: Q, at: datetime) -> None:
    q.clock.set(at)


@pytest.fixture
def noon(q: Q) -> datetime:
    """The next full hour, and the database's clock stands a second before it."""
    at = q.clock.now().replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    to(q, at - timedelta(seconds=1))
    return at


# Setting ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_schedule_is_made_changed_or_the_same(q: Q) -> None:
    assert put(q, payload={"n": 1}) == "made"
    before = q.sql("select xmin, * from gangq.schedules_table")
    assert put(q, cron=" *  * * * * ", payload={"n": 1}) == "same"
    assert q.sql("select xmin, * from gangq.schedules_table") == before, "nothing was written"
    assert put(q, payload={"n": 2}) == "changed"
    assert [event["data"] for event in q.events("set_schedule")] == [{"schedule": "s"}] * 2


def test_the_view_shows_what_was_stored(q: Q) -> None:
    put(
        q, "nightly", "0 3 * * *", tz="Europe/Oslo", payload={"days": 1}, work={"gpus": 1, "vram_mb": 900},
        catch_up="all", skip_if_running=True, due_as="day",
    )  # fmt: skip
    shown = row(q, "nightly")
    assert {key: shown[key] for key in ("cron", "every", "tz", "task", "queue", "catch_up")} == {
        "cron": "0 3 * * *", "every": None, "tz": "Europe/Oslo", "task": "report", "queue": "default",
        "catch_up": "all",
    }  # fmt: skip
    assert (shown["skip_if_running"], shown["due_as"], shown["payload"]) == (True, "day", {"days": 1})
    assert (shown["work"], shown["submitter"], shown["paused"]) == (
        {"gpus": 1, "vram_mb": 900},
        "postgres",
        False,
    )
    assert shown["problem"] == "not computed yet: a worker or gangq tick does that"


def test_the_queue_shown_is_the_one_it_submits_to(q: Q) -> None:
    q.sql("select gangq.set_queue('lab'), gangq.set_queue('gpu')")
    put(q)
    q.worker(tasks=["report"], task_options={"report": {"queue": "lab"}}, queues=["lab"])
    assert row(q)["queue"] == "lab"
    put(q, work={"queue": "gpu"})
    assert row(q)["queue"] == "gpu"


@pytest.mark.parametrize(
    ("arguments", "code", "mentioning"),
    [
        ({"name": ""}, INVALID, "set_schedule: name is"),
        ({"name": "x" * 201}, INVALID, "set_schedule: name is"),
        ({"name": None}, INVALID, "a schedule has a name and a task"),
        ({"task": None}, INVALID, "a schedule has a name and a task"),
        ({"task": "x" * 201}, INVALID, "set_schedule: task is"),
        ({"cron": None}, INVALID, "either cron or every"),
        ({"every": "1 min", "cron": "* * * * *"}, INVALID, "either cron or every"),
        ({"cron": "* * * *"}, INVALID, "cron expression"),
        ({"cron": "* * * * * *"}, INVALID, "cron expression"),
        ({"cron": "* * * * *;"}, INVALID, "cron expression"),
        ({"cron": ""}, INVALID, "cron expression"),
        ({"cron": "@daily"}, INVALID, "cron expression"),
        ({"cron": "1," * 120 + "1 * * * *"}, INVALID, "cron expression"),
        ({"tz": "Mars/Olympus"}, INVALID, "time zone 'Mars/Olympus' is not known"),
        ({"tz": "CEST"}, INVALID, "is not known"),
        ({"tz": "europe/oslo"}, INVALID, "is not known"),
        ({"tz": "UTC+3"}, INVALID, "is not known"),
        ({"tz": ""}, INVALID, "is not known"),
        ({"cron": None, "every": "999 ms"}, INVALID, "every is"),
        ({"cron": None, "every": "1 month"}, INVALID, "every is"),
        ({"cron": None, "every": "116 days"}, INVALID, "every is"),
        ({"cron": None, "every": "-1 day"}, INVALID, "every is"),
        ({"cron": None, "every": "1 min", "tz": "UTC"}, INVALID, "both every and tz"),
        ({"catch_up": "some"}, INVALID, "catch_up"),
        ({"skip_if_running": "yes"}, INVALID, "skip_if_running"),
        ({"due_as": ""}, INVALID, "due_as"),
        ({"due_as": "day", "payload": [1]}, INVALID, "no JSON object"),
        ({"misfire": 1}, INVALID, "no option 'misfire'"),
        ({"work": []}, INVALID, "work is []"),
        ({"work": {"gpu": 1}}, INVALID, "submit has no option 'gpu'"),
        ({"work": {"gpus": -1}}, INVALID, "gpus is -1"),
        ({"work": {"priority": 1001}}, INVALID, "priority is 1001"),
        ({"work": {"parent": 1}}, INVALID, "without parent"),
        ({"work": {"request_id": "0"}}, INVALID, "without request_id"),
        ({"work": {"due_at": "2030-01-01"}}, INVALID, "due_at"),
        ({"work": {"strategy": "pack"}}, INVALID, "strategy"),
        ({"work": {"size": 0}}, INVALID, "size is 0"),
        ({"work": {"size": 2, "request_id": "0"}}, INVALID, "without request_id"),
        ({"work": {"size": 2, "strategy": "heap"}}, INVALID, "strategy is"),
        ({"work": {"queue": "nowhere"}}, MISSING, "queue 'nowhere' does not exist"),
        ({"payload": {"x": "y" * 2_000_000}}, TOO_LARGE, "payload of a schedule"),
        ({"work": {"size": 1, "payloads": ["y" * 300_000]}}, TOO_LARGE, "work of a schedule"),
    ],
)
def test_what_no_schedule_could_be_is_refused(
    untouched: Q, arguments: dict[str, Any], code: str, mentioning: str
) -> None:
    given = {"name": "s", "cron": "0 3 * * *", "task": "report", **arguments}
    with refused(code, mentioning):
        untouched.call("set_schedule", **given)
    assert untouched.sql("select from gangq.schedules_table") == []


def test_a_payload_that_no_compression_makes_smaller_is_bounded_too(q: Q) -> None:
    with refused(TOO_LARGE, "payload of a schedule"):
        q.sql(
            "select gangq.set_schedule('s', '* * * * *', 'report', jsonb_build_object('x', (select "
            "string_agg(md5(n::text), '') from generate_series(1, 40000) n)))"
        )


def test_a_login_has_a_thousand_schedules_at_most_and_an_admin_any_number(q: Q, dsn: str) -> None:
    a_role(q.db, "many_test", "gangq_submitter", login=True)
    q.sql("set session authorization many_test")
    q.sql("select gangq.set_schedule('s' || n, '0 3 * * *', 'report') from generate_series(1, 1000) n")
    with refused(TOO_LARGE, "many_test has 1000 schedules"):
        put(q)
    put(q, "s7", payload={"n": 1})
    q.call("forget_schedule", name="s8")
    put(q)
    q.sql("reset session authorization")
    put(q, "one more")


# Due --------------------------------------------------------------------------------------------------------


def test_a_due_time_is_submitted_once_and_the_next_one_is_computed(q: Q, noon: datetime) -> None:
    q.sql("select gangq.set_queue('lab')")
    put(
        q, cron="0 * * * *", payload={"n": 1},
        work={"queue": "lab", "priority": 7, "gpus": 2, "vram_mb": 900, "budget_s": 50, "max_attempts": 2},
    )  # fmt: skip
    q.tick()
    assert (row(q)["next_due"], row(q)["problem"], jobs(q)) == (noon, None, [])
    to(q, noon)
    assert q.tick_once()["detail"]["submit_schedules"] == 1
    for _ in range(3):
        q.tick()
    (job,) = q.sql("select * from gangq.jobs")
    assert {key: job[key] for key in ("task", "queue", "state", "priority", "gpus", "vram_mb")} == {
        "task": "report", "queue": "lab", "state": "pending", "priority": 7, "gpus": 2, "vram_mb": 900,
    }  # fmt: skip
    assert (job["payload"], job["budget_s"], job["max_attempts"]) == ({"n": 1}, 50, 2)
    assert (job["due_at"], job["submitter"], job["login"]) == (noon, "postgres", "postgres")
    shown = row(q)
    assert (shown["last_due"], shown["last_at"], shown["last_job"]) == (noon, noon, job["id"])
    assert (shown["next_due"], shown["passed_over"]) == (noon + timedelta(hours=1), None)
    (event,) = q.events("scheduled")
    assert (event["job_id"], event["data"]["schedule"]) == (job["id"], "s")
    assert datetime.fromisoformat(event["data"]["due_at"]) == noon


def test_a_worker_can_run_what_a_schedule_submitted(q: Q, noon: datetime) -> None:
    put(q, payload={"n": 5})
    q.tick()
    worker = q.worker()
    to(q, noon)
    q.tick()
    claim = worker.take()
    assert (claim["task"], claim["payload"]) == ("report", {"n": 5})
    assert claim.complete() == "done"


def test_what_is_left_open_is_as_the_workers_declare_the_task(q: Q, noon: datetime) -> None:
    q.worker(
        tasks=["report"], task_options={"report": {"gpus": 1, "priority": 5}}, devices=[
            {"uuid": "G", "index": 0, "vram_mb": 1000}],
    )  # fmt: skip
    put(q, work={"priority": None})
    q.tick()
    to(q, noon)
    q.tick()
    (job,) = q.sql("select * from gangq.jobs")
    assert (job["gpus"], job["priority"]) == (1, 5)


def test_a_schedule_may_submit_a_gang(q: Q, noon: datetime) -> None:
    put(q, payload={"n": 1}, due_as="due", work={"size": 2, "strategy": "spread", "name": "nightly"})
    roles = [{"name": "driver", "count": 1}, {"name": "executor", "count": 2, "payload": {"x": None}}]
    put(q, "roles", work={"roles": roles, "size": None})
    q.tick()
    to(q, noon)
    q.tick()
    for name, size, called in (("s", 2, "nightly"), ("roles", 3, None)):
        (gang,) = q.sql("select * from gangq.gangs where id = %(id)s", id=row(q, name)["last_gang"])
        assert (gang["size"], gang["name"], gang["submitter"]) == (size, called, "postgres")
        first = q.value("select id from gangq.live_jobs where gang_id = %(id)s and rank = 0", id=gang["id"])
        assert row(q, name)["last_job"] == first
    payloads = {str(job["payload"]) for job in jobs(q)}
    assert payloads == {
        str({"n": 1, "due": f"{noon:%Y-%m-%dT%H:%M:%S}.000000+00:00"}),
        "{}",
        "{'x': None}",
    }


def test_what_it_submits_is_found_by_the_name_and_tags_of_its_batch(q: Q, noon: datetime) -> None:
    put(q, work={"name": "nightly", "tags": ["report", "eu"]})
    q.tick()
    for _ in range(2):
        to(q, noon)
        q.tick()
        noon += timedelta(minutes=1)
    found = q.sql(
        "select b.id, b.name, b.tags, b.size, b.submitter, j.id as job, j.array_index "
        "from gangq.batches b join gangq.jobs j on j.batch_id = b.id order by 1"
    )
    ids = [job["id"] for job in jobs(q)]
    assert found == [
        {
            "id": job, "name": "nightly", "tags": ["eu", "report"], "size": 1, "submitter": "postgres", "job": job,
            "array_index": 0,
        }
        for job in ids
    ]  # fmt: skip
    assert len(ids) == 2
    assert row(q)["last_job"] == ids[-1]


def test_a_schedule_submits_one_job_of_which_at_most_says_nothing(q: Q) -> None:
    with refused("GQ001", "a schedule submits without at_most") as caught:
        put(q, work={"name": "nightly", "at_most": 1})
    assert "limit_key and limit" in (caught.value.diag.message_hint or "")


def test_the_due_time_goes_into_the_payload_where_the_schedule_names_a_key(q: Q, noon: datetime) -> None:
    q.sql("set timezone = 'Asia/Kolkata'")
    put(q, payload={"n": 1}, due_as="day")
    q.tick()
    to(q, noon + timedelta(seconds=0.5))
    q.tick()
    payload = jobs(q)[0]["payload"]
    assert payload["n"] == 1
    assert payload["day"].endswith("+00:00")
    assert datetime.fromisoformat(payload["day"]) == noon
    (now,) = q.call("run_schedule_now", name="s")
    at = q.value("select payload ->> 'day' from gangq.live_jobs where id = %(id)s", id=now["job_id"])
    assert datetime.fromisoformat(at) == q.clock.now()


def test_an_interval_is_counted_from_its_start_and_does_not_drift(q: Q) -> None:
    start = q.clock.now()
    put(q, every="30 s")
    assert row(q)["next_due"] == start + timedelta(seconds=30), "and SQL has computed it"
    for late in (30.4, 75, 92.9, 149.999):
        to(q, start + timedelta(seconds=late))
        alone(q)
    assert dues(q) == [start + timedelta(seconds=n) for n in (30, 60, 90, 120)]
    assert row(q)["next_due"] == start + timedelta(seconds=150)


@pytest.mark.parametrize("every", ["1 s", "7 s", "1.000001 s", "1 day", "36:00:00.5"])
def test_the_due_times_of_an_interval_lie_on_its_grid_however_long_it_runs(q: Q, every: str) -> None:
    q.sql("set timezone = 'Europe/Oslo'")  # where a day may have 23 hours
    start = q.clock.now().astimezone(UTC)
    put(q, every=every)
    step = q.value("select every from gangq.schedules")
    for elapsed in sorted((step * 7.5, step * 400.25, timedelta(days=500), timedelta(days=900))):
        to(q, start + elapsed)
        q.value("select gangq.submit_schedules(can_plan => false)")
        shown = row(q)
        last, following = (shown[key].astimezone(UTC) for key in ("last_due", "next_due"))
        assert last <= start + elapsed < following
        assert following - last == step
        assert (following - start) % step == timedelta()


def test_a_payload_that_is_no_object_is_submitted_as_it_is(q: Q, noon: datetime) -> None:
    put(q, payload=[1, 2])
    put(q, "text", payload="x")
    q.tick()
    to(q, noon)
    q.tick()
    assert sorted(str(job["payload"]) for job in jobs(q)) == ["[1, 2]", "x"]


def test_a_tick_that_has_just_run_still_submits_what_is_due(q: Q, noon: datetime) -> None:
    put(q)
    q.tick()
    to(q, noon - timedelta(seconds=0.3))
    assert q.one("tick", force=True)["next_in_s"] == pytest.approx(0.3, abs=0.01)
    assert q.one("tick")["ran"] is False
    to(q, noon)
    ticked = q.one("tick", decides=True)
    assert (ticked["ran"], ticked["detail"], ticked["unplanned"]) == (True, {"submit_schedules": 1}, 1)
    assert len(jobs(q)) == 1


def test_nothing_is_due_so_nothing_is_read_twice(q: Q) -> None:
    put(q, cron="0 3 1 1 *")
    q.tick()
    ticked = alone(q)
    assert "submit_schedules" not in ticked["detail"]
    assert (ticked["unplanned"], ticked["again"]) == (0, False)


def test_a_tick_in_sql_alone_submits_what_is_stored_and_says_that_the_next_is_missing(
    q: Q, noon: datetime
) -> None:
    put(q)
    assert alone(q)["unplanned"] == 1, "the first one is missing, too"
    assert row(q)["problem"].startswith("not computed yet")
    plan(q)
    assert row(q)["problem"] is None
    to(q, noon)
    ticked = alone(q)
    assert (ticked["detail"]["submit_schedules"], ticked["unplanned"]) == (1, 1)
    assert (dues(q), row(q)["next_due"]) == ([noon], None)
    assert row(q)["problem"] == "not computed yet: a worker or gangq tick does that"
    to(q, noon + timedelta(seconds=30))
    assert "submit_schedules" not in alone(q)["detail"]
    q.tick()
    assert row(q)["next_due"] == noon + timedelta(minutes=1), "the one after the one that was run"


def test_a_schedule_that_is_set_wakes_a_tick(q: Q, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_tick")
        put(q)
        assert [n.channel for n in ear.notifies(timeout=2, stop_after=1)] == ["gangq_tick"]
        put(q)
        assert list(ear.notifies(timeout=0)) == [], "it was the same"


def test_a_schedule_in_an_open_transaction_is_not_there_yet(q: Q, dsn: str) -> None:
    with q.connected(dsn) as other:
        with other.db.transaction():
            other.call("set_schedule", name="s", cron="* * * * *", task="report")
            assert alone(q)["unplanned"] == 0
        assert alone(q)["unplanned"] == 1


# Missed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "ran"), [("skip", []), ("last", [60]), ("all", [0, 15, 30, 45, 60])], ids=str
)
def test_what_was_missed_is_caught_up_as_the_schedule_says(
    q: Q, noon: datetime, catch_up: str, ran: list[int]
) -> None:
    put(q, cron="*/15 * * * *", catch_up=catch_up)
    q.tick()
    to(q, noon + timedelta(minutes=70))
    q.tick()
    assert dues(q) == [noon + timedelta(minutes=n) for n in ran]
    shown = row(q)
    assert shown["next_due"] == noon + timedelta(minutes=75)
    if catch_up == "all":
        assert shown["passed_over"] is None
    else:
        assert shown["passed_over"] == noon
        before = noon + timedelta(minutes=75 if catch_up == "skip" else 60)
        assert shown["why"] == (
            f"due times from {noon:%Y-%m-%d %H:%M:%S} UTC on, before {before:%Y-%m-%d %H:%M:%S} UTC, "
            "were missed"
        )
        assert [event["reason"] for event in q.events("missed")] == [shown["why"]]
    to(q, shown["next_due"])
    q.tick()
    assert dues(q)[-1] == noon + timedelta(minutes=75), "and then it goes on"


@pytest.mark.parametrize(
    ("catch_up", "ran"), [("skip", []), ("last", [60]), ("all", [0, 15, 30, 45, 60])], ids=str
)
def test_the_same_of_an_interval_in_sql_alone(q: Q, catch_up: str, ran: list[int]) -> None:
    first = q.clock.now() + timedelta(minutes=15)
    put(q, every="15 min", catch_up=catch_up)
    to(q, first + timedelta(minutes=70))
    alone(q)
    assert dues(q) == [first + timedelta(minutes=n) for n in ran]
    shown = row(q)
    assert shown["next_due"] == first + timedelta(minutes=75)
    over = {"skip": 60, "last": 45, "all": None}[catch_up]
    assert shown["passed_over"] == (None if over is None else first + timedelta(minutes=over))
    assert len(q.events("missed")) == (over is not None)


@pytest.mark.parametrize("catch_up", ["skip", "last", "all"])
def test_a_due_time_that_passed_less_than_a_minute_ago_was_not_missed(
    q: Q, noon: datetime, catch_up: str
) -> None:
    put(q, cron="*/15 * * * *", catch_up=catch_up)
    q.tick()
    to(q, noon + timedelta(seconds=59.9))
    q.tick_once()
    assert dues(q) == [noon]


@pytest.mark.parametrize("cron", [True, False], ids=["cron", "every"])
def test_all_catches_up_a_hundred_at_most_and_those_are_the_last(q: Q, cron: bool) -> None:
    start = q.clock.now().replace(second=0, microsecond=0) + timedelta(minutes=1)
    to(q, start)
    put(q, catch_up="all", **({"cron": "* * * * *"} if cron else {"every": "1 min"}))
    if cron:
        plan(q)
    to(q, start + timedelta(minutes=250, seconds=30))
    for _ in range(120):
        if not q.tick_once()["again"]:
            break
    assert dues(q) == [start + timedelta(minutes=n) for n in range(151, 251)]
    assert row(q)["next_due"] == start + timedelta(minutes=251)
    (missed,) = q.events("missed")
    assert "were missed" in missed["reason"]


def test_in_sql_alone_what_is_stored_runs_late_unless_it_is_to_be_skipped(q: Q, noon: datetime) -> None:
    for catch_up in ("skip", "last", "all"):
        put(q, catch_up, "*/15 * * * *", task=catch_up, catch_up=catch_up)
    plan(q)
    to(q, noon + timedelta(hours=3))
    alone(q)
    assert sorted(job["task"] for job in q.sql("select * from gangq.jobs")) == ["all", "last"]
    assert dues(q) == [noon, noon]
    assert row(q, "skip")["why"] == f"{noon:%Y-%m-%d %H:%M:%S} UTC was missed"
    assert [row(q, name)["next_due"] for name in ("skip", "last", "all")] == [None] * 3


def test_a_caller_that_can_compute_is_asked_before_a_late_due_time_is_run(q: Q, noon: datetime) -> None:
    put(q, cron="*/15 * * * *")
    plan(q)
    to(q, noon + timedelta(hours=3))
    ticked = q.one("tick", force=True, decides=True)
    assert (ticked["detail"]["submit_schedules"], ticked["unplanned"], jobs(q)) == (0, 1, [])
    assert plan(q) is True, "it is due by now: tick again"
    assert q.one("tick", force=True, decides=True)["detail"]["submit_schedules"] == 1
    assert dues(q) == [noon + timedelta(hours=3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("day", "expected"),
    [
        # 02:30 does not exist in Oslo on 28 March 2027; on 31 October it comes twice.
        ("2027-03-27", ["03-27 01:30", "03-28 01:00", "03-29 00:30"]),
        ("2027-10-30", ["10-30 00:30", "10-31 00:30", "11-01 01:30"]),
    ],
)
def test_a_night_in_which_the_clock_changes_has_one_run(q: Q, day: str, expected: list[str]) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    to(q, start)
    put(q, "n", "30 2 * * *", tz="Europe/Oslo")
    for half_hours in range(2 * 60):
        to(q, start + timedelta(minutes=30 * half_hours))
        q.tick()
    assert [f"{due:%m-%d %H:%M}" for due in dues(q)] == expected


def test_a_clock_that_is_set_back_doubles_nothing(q: Q, noon: datetime) -> None:
    put(q)
    put(q, "i", every="1 min", task="other")
    q.tick()
    to(q, noon)
    q.tick()
    before = len(jobs(q))
    to(q, noon - timedelta(seconds=90))
    q.tick()
    put(q, payload={"n": 2}, cron="*/1 * * * *")
    q.call("pause_schedule", name="i")
    q.call("resume_schedule", name="i")
    q.tick()
    assert row(q)["next_due"] == noon + timedelta(minutes=1)
    to(q, noon + timedelta(seconds=0.5))
    q.tick()
    assert len(jobs(q)) == before


# While it runs ----------------------------------------------------------------------------------------------


def test_nothing_is_submitted_while_the_last_one_has_not_ended(q: Q, noon: datetime) -> None:
    put(q, skip_if_running=True)
    q.tick()
    to(q, noon)
    q.tick()
    first = jobs(q)[0]["id"]
    for minutes in (1, 2, 3):
        to(q, noon + timedelta(minutes=minutes))
        q.tick()
    shown = row(q)
    assert [job["id"] for job in jobs(q)] == [first], "it waits for a worker, and counts"
    assert (shown["passed_over"], shown["why"]) == (
        noon + timedelta(minutes=3),
        f"job {first} of it has not ended",
    )
    assert shown["last_due"] == noon
    (missed,) = q.events("missed")
    assert missed["reason"] == shown["why"]
    q.worker().take().complete()
    to(q, noon + timedelta(minutes=4))
    q.tick()
    assert row(q)["last_due"] == noon + timedelta(minutes=4)
    assert len(jobs(q)) == 1


def test_a_gang_counts_until_it_has_ended(q: Q, noon: datetime) -> None:
    put(q, skip_if_running=True, work={"size": 2})
    q.tick()
    to(q, noon)
    q.tick()
    gang = row(q)["last_gang"]
    to(q, noon + timedelta(minutes=1))
    q.tick()
    assert row(q)["why"] == f"gang g{gang} of it has not ended"
    q.call("cancel", gang_ids=[gang])
    to(q, noon + timedelta(minutes=2))
    q.tick()
    assert row(q)["last_gang"] != gang


def test_without_that_they_pile_up(q: Q, noon: datetime) -> None:
    put(q)
    q.tick()
    for minutes in range(3):
        to(q, noon + timedelta(minutes=minutes))
        q.tick()
    assert len(jobs(q)) == 3


# Paused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [{"cron": "* * * * *"}, {"every": "1 min"}], ids=["cron", "every"])
def test_nothing_is_submitted_in_a_pause_and_nothing_of_it_is_caught_up(
    q: Q, noon: datetime, when: dict[str, Any]
) -> None:
    put(q, catch_up="all", **when)
    q.tick()
    q.call("pause_schedule", name="s")
    shown = row(q)
    assert (shown["paused"], shown["paused_until"], shown["next_due"], shown["problem"]) == (
        True, None, None, None,
    )  # fmt: skip
    to(q, noon + timedelta(minutes=10, seconds=30))
    assert q.tick_once()["unplanned"] == 0
    assert jobs(q) == []
    q.call("resume_schedule", name="s")
    q.call("resume_schedule", name="s")
    q.tick()
    shown = row(q)
    assert (shown["paused"], jobs(q)) == (False, [])
    expected = noon + timedelta(minutes=11)
    assert shown["next_due"] == (expected if "cron" in when else expected - timedelta(seconds=1))
    assert [e["kind"] for e in q.events() if "schedule" in e["kind"] and e["kind"] != "set_schedule"] == [
        "pause_schedule",
        "resume_schedule",
    ]


@pytest.mark.parametrize("when", [{"cron": "* * * * *"}, {"every": "1 min"}], ids=["cron", "every"])
def test_a_pause_with_an_end_ends_by_itself_and_a_due_time_at_its_end_is_run(
    q: Q, noon: datetime, when: dict[str, Any]
) -> None:
    to(q, noon)
    put(q, **when)
    q.tick()
    until = noon + timedelta(minutes=5)
    q.call("pause_schedule", name="s", until=until)
    q.tick()
    shown = row(q)
    assert (shown["paused"], shown["paused_until"], shown["next_due"]) == (True, until, until)
    to(q, until - timedelta(seconds=1))
    q.tick()
    assert jobs(q) == []
    to(q, until)
    q.tick()
    assert dues(q) == [until]
    assert (row(q)["paused"], row(q)["paused_until"]) == (False, None)
    assert row(q)["next_due"] == until + timedelta(minutes=1)


def test_a_pause_can_be_made_longer_shorter_or_endless(q: Q, noon: datetime) -> None:
    put(q)
    q.call("pause_schedule", name="s", until=noon + timedelta(minutes=5))
    q.call("pause_schedule", name="s", until=noon + timedelta(minutes=2))
    q.tick()
    assert row(q)["next_due"] == noon + timedelta(minutes=2)
    q.call("pause_schedule", name="s")
    assert (row(q)["paused"], row(q)["next_due"]) == (True, None)
    q.call("resume_schedule", name="s")
    q.tick()
    assert row(q)["next_due"] == noon


def test_a_pause_outlasts_a_change(q: Q, noon: datetime) -> None:
    put(q)
    q.call("pause_schedule", name="s")
    put(q, cron="*/5 * * * *", payload={"n": 1})
    q.tick()
    assert (row(q)["paused"], row(q)["next_due"]) == (True, None)
    q.call("pause_schedule", name="s", until=noon + timedelta(minutes=7))
    put(q, every="1 min")
    assert row(q)["next_due"] >= noon + timedelta(minutes=7)


@pytest.mark.parametrize("until", ["-1 s", "0 s"])
def test_a_pause_ends_in_the_future(q: Q, until: str) -> None:
    put(q)
    with refused(INVALID, "has passed"):
        q.sql(f"select gangq.pause_schedule('s', gangq.now() + interval '{until}')")
    with refused(INVALID, "until is infinity"):
        q.sql("select gangq.pause_schedule('s', 'infinity')")


# By hand ----------------------------------------------------------------------------------------------------


def test_run_now_submits_paused_or_not_and_leaves_the_due_times_alone(q: Q, noon: datetime) -> None:
    put(q, payload={"n": 1})
    q.tick()
    (now,) = q.call("run_schedule_now", name="s")
    assert now == {"job_id": jobs(q)[0]["id"], "gang_id": None}
    assert (row(q)["next_due"], row(q)["last_due"], row(q)["last_job"]) == (noon, None, now["job_id"])
    q.call("pause_schedule", name="s")
    q.call("run_schedule_now", name="s")
    assert [job["payload"] for job in jobs(q)] == [{"n": 1}] * 2
    assert [e["data"] for e in q.events("scheduled")] == [{"schedule": "s", "by_hand": True}] * 2


def test_run_now_does_not_run_twice_what_must_not(q: Q, noon: datetime) -> None:
    put(q, skip_if_running=True)
    (now,) = q.call("run_schedule_now", name="s")
    with refused(WRONG_STATE, f"job {now['job_id']} of it has not ended"):
        q.call("run_schedule_now", name="s")
    q.tick()
    to(q, noon)
    q.tick()
    assert len(jobs(q)) == 1, "a due time is skipped for it, too"


def test_run_now_raises_what_the_submission_would(q: Q) -> None:
    put(q, work={"queue": "default"})
    q.sql("select gangq.set_queue('default', '{\"draining\": true}')")
    with refused(WRONG_STATE, "queue default is draining"):
        q.call("run_schedule_now", name="s")
    assert row(q)["last_at"] is None


def test_a_schedule_that_is_forgotten_submits_no_more_and_its_jobs_go_on(q: Q, noon: datetime) -> None:
    put(q)
    q.tick()
    to(q, noon)
    q.tick()
    q.call("forget_schedule", name="s")
    to(q, noon + timedelta(hours=1))
    q.tick()
    assert len(jobs(q)) == 1
    assert q.sql("select * from gangq.schedules") == []
    put(q)
    q.tick()
    assert len(jobs(q)) == 1, "made again, it does not run what was before"


@pytest.mark.parametrize("verb", ["pause_schedule", "resume_schedule", "run_schedule_now", "forget_schedule"])
def test_an_unknown_name_is_refused_with_one_like_it(q: Q, verb: str) -> None:
    put(q, "nightly")
    with refused(MISSING, "schedule 'nigtly' does not exist; there is nightly"):
        q.call(verb, name="nigtly")
    with refused(MISSING, "does not exist"):
        q.call(verb, name=None)
    with refused(MISSING, "does not exist"):
        q.call(verb, name="x" * 100_000)


# Refused ----------------------------------------------------------------------------------------------------


def refusal(q: Q, noon: datetime, *, minutes: int = 0) -> tuple[str, bool]:
    """Why `s` was not submitted at this due time, while `other` was."""
    to(q, noon + timedelta(minutes=minutes))
    before = len(jobs(q))
    q.tick()
    shown = row(q)
    assert shown["passed_over"] == noon + timedelta(minutes=minutes)
    assert q.events("tick_error") == []
    return shown["why"], len(jobs(q)) == before + 1


def test_a_ceiling_holds_when_it_is_submitted_and_a_refusal_stops_nothing_else(q: Q, noon: datetime) -> None:
    a_role(q.db, "cron_test", "gangq_submitter", login=True)
    q.sql("set session authorization cron_test")
    put(q, work={"priority": 50})
    put(q, "other", task="other")
    q.sql("reset session authorization")
    q.tick()
    q.sql("select gangq.set_queue('default', '{\"ceilings\": {\"cron_test\": 10}}')")
    why, went_on = refusal(q, noon)
    assert why == "priority 50 is above 10, the ceiling of cron_test in queue 'default' (42501)"
    assert went_on
    assert [e["reason"] for e in q.events("missed")] == [why]
    refusal(q, noon, minutes=1)
    assert len(q.events("missed")) == 1, "the same reason is told once"
    q.sql("select gangq.set_queue('default', '{\"ceilings\": {\"cron_test\": 50}}')")
    to(q, noon + timedelta(minutes=2))
    q.tick()
    assert row(q)["last_due"] == noon + timedelta(minutes=2)
    assert row(q)["passed_over"] == noon + timedelta(minutes=1)


def test_a_queue_that_drains_a_gang_too_large_and_hardware_nobody_has_are_refused(
    q: Q, noon: datetime
) -> None:
    q.sql("select gangq.set_queue('lab')")
    q.worker()
    put(q, "drains", work={"queue": "lab"})
    put(q, "large", work={"size": 2, "gpus": 4})
    put(q, "hard", work={"gpus": 9})
    put(q, "waits", work={"gpus": 9, "wait_for_hardware": True})
    put(q, "odd", work={"selector": [{"key": "a", "op": "~", "values": []}]})
    put(q, "other")
    q.tick()
    q.sql("select gangq.set_queue('lab', '{\"draining\": true}')")
    to(q, noon)
    q.tick()
    why = {row["name"]: row["why"] for row in q.sql("select * from gangq.schedules")}
    assert why["drains"] == "queue lab is draining (GQ004)"
    assert "GQ001" in why["large"]
    assert "GQ001" in why["hard"]
    assert "GQ001" in why["odd"]
    assert (why["waits"], why["other"]) == (None, None)
    assert len(jobs(q)) == 2
    assert q.events("tick_error") == []


def test_who_may_not_submit_any_more_submits_nothing(q: Q, noon: datetime) -> None:
    a_role(q.db, "cron_test", "gangq_submitter", login=True)
    q.sql("set session authorization cron_test")
    put(q)
    q.sql("reset session authorization")
    put(q, "other", task="other")
    q.tick()
    q.sql("revoke gangq_submitter from cron_test")
    why, went_on = refusal(q, noon)
    assert (why, went_on) == ("cron_test may not submit any more (42501)", True)
    assert put(q) == "changed", "an admin takes it over"
    to(q, noon + timedelta(minutes=1))
    q.tick()
    assert row(q)["submitter"] == "postgres"
    assert row(q)["last_due"] == noon + timedelta(minutes=1)


def test_a_login_that_left_the_role_it_stored_in_submits_nothing(q: Q, noon: datetime) -> None:
    a_role(q.db, "alice_test", "gangq_submitter")
    a_role(q.db, "app_test", "alice_test", login=True)
    q.sql("set session authorization app_test; set role alice_test")
    put(q)
    q.sql("reset role; reset session authorization")
    put(q, "other", task="other")
    q.tick()
    to(q, noon)
    q.tick()
    job = q.sql("select * from gangq.jobs where task = 'report'")[0]
    assert (job["submitter"], job["login"]) == ("alice_test", "app_test")
    q.sql("revoke alice_test from app_test")
    assert refusal(q, noon, minutes=1)[0] == ("alice_test (login app_test) may not submit any more (42501)")


def test_a_task_that_was_never_there_waits_like_any_job(q: Q, noon: datetime) -> None:
    put(q, task="nobody runs this")
    q.tick()
    to(q, noon)
    q.tick()
    assert [job["state"] for job in jobs(q)] == ["pending"]


# Whose ------------------------------------------------------------------------------------------------------


@pytest.fixture
def logins(q: Q) -> None:
    for name, role in (
        ("s1_test", "gangq_submitter"), ("s2_test", "gangq_submitter"), ("w1_test", "gangq_worker"),
        ("a1_test", "gangq_admin"), ("v1_test", "gangq_viewer"),
    ):  # fmt: skip
        a_role(q.db, name, role, login=True)


def as_(q: Q, login: str) -> None:
    q.sql(f"reset role; set session authorization {login}")


CHANGES = {
    "set_schedule": {"cron": "0 4 * * *", "task": "evil"},
    "pause_schedule": {},
    "resume_schedule": {},
    "run_schedule_now": {},
    "forget_schedule": {},
}


@pytest.mark.parametrize("verb", CHANGES)
def test_only_who_stored_it_and_admins_may_change_it(q: Q, logins: None, verb: str) -> None:
    as_(q, "s1_test")
    put(q, payload={"password": "hunter2"})
    as_(q, "s2_test")
    with refused(NOT_ALLOWED, "s2_test may not") as error:
        q.call(verb, name="s", **CHANGES[verb])
    assert "hunter2" not in str(error.value)
    for login in ("w1_test", "v1_test"):
        as_(q, login)
        with refused(NOT_ALLOWED, "permission denied"):
            q.call(verb, name="s", **CHANGES[verb])
    as_(q, "a1_test")
    q.call(verb, name="s", **CHANGES[verb])
    if verb == "set_schedule":
        assert (row(q)["submitter"], row(q)["task"]) == ("a1_test", "evil"), "it is the admin's now"


@pytest.mark.parametrize("verb", CHANGES)
def test_in_a_shared_queue_every_submitter_may(q: Q, logins: None, verb: str) -> None:
    q.sql("select gangq.set_queue('default', '{\"others\": \"shared\"}')")
    as_(q, "s1_test")
    put(q)
    as_(q, "s2_test")
    q.call(verb, name="s", **CHANGES[verb])
    if verb == "set_schedule":
        assert row(q)["submitter"] == "s2_test"
    if verb == "run_schedule_now":
        q.sql("reset session authorization")
        assert jobs(q)[0]["submitter"] == "s1_test", "on behalf of who stored it"


def test_the_same_definition_of_another_login_is_no_change_for_a_worker_and_no_oracle_for_others(
    q: Q, logins: None
) -> None:
    as_(q, "s1_test")
    put(q, payload={"password": "hunter2"})
    as_(q, "s2_test")
    for payload in ({"password": "hunter2"}, {"password": "x"}):
        with refused(NOT_ALLOWED, "s2_test may not change schedule 's', which is of s1_test"):
            put(q, payload=payload)
    q.sql("reset session authorization; grant gangq_worker to s2_test")
    as_(q, "s2_test")
    assert put(q, payload={"password": "hunter2"}) == "same"
    assert row(q)["submitter"] == "s1_test"


def test_who_may_read_payload_and_work(q: Q, logins: None) -> None:
    as_(q, "s1_test")
    put(q, payload={"password": "hunter2"}, work={"size": 1, "payloads": [{"password": "hunter2"}]})
    for login, readable in (
        ("s1_test", True), ("s2_test", False), ("w1_test", False), ("v1_test", False), ("a1_test", True),
    ):  # fmt: skip
        as_(q, login)
        shown = row(q)
        assert (shown["readable"], "hunter2" in str(shown)) == (readable, readable), login
        assert (shown["name"], shown["cron"]) == ("s", "* * * * *")
        with refused(NOT_ALLOWED):
            q.sql("select * from gangq.schedules_table")


# Computed ---------------------------------------------------------------------------------------------------


def due(q: Q, name: str = "s", **more: Any) -> dict[str, Any]:
    """What a caller that computes would say of a schedule."""
    stored = q.sql("select * from gangq.schedules_table where name = %(name)s", name=name)[0]
    return {
        "name": name, "cron": stored["cron"], "tz": stored["tz"], "after": stored["after_at"].isoformat(),
        **{key: at.isoformat() if isinstance(at, datetime) else at for key, at in more.items()},
    }  # fmt: skip


def test_what_is_unplanned_is_said_with_all_that_is_needed(q: Q, noon: datetime) -> None:
    put(q, cron="5 * * * *", tz="Asia/Kolkata", catch_up="all")
    put(q, "i", every="1 h")
    assert q.call("unplanned_schedules") == [
        {
            "name": "s", "cron": "5 * * * *", "tz": "Asia/Kolkata", "catch_up": "all",
            "after": q.clock.now(), "now": q.clock.now(),
        }
    ]  # fmt: skip


def test_a_hundred_are_computed_at_once(q: Q) -> None:
    q.sql("select gangq.set_schedule('s' || n, '* * * * *', 'report') from generate_series(1, 130) n")
    assert alone(q)["unplanned"] == 130
    assert len(q.call("unplanned_schedules")) == 100
    assert plan(q) is True
    assert alone(q)["unplanned"] == 30
    assert plan(q) is False
    assert alone(q)["unplanned"] == 0


def test_what_was_computed_from_something_else_is_left_out(q: Q, noon: datetime) -> None:
    put(q)
    old = due(q, due=noon)
    put(q, cron="30 * * * *")
    assert q.one("plan_schedules", plans=[old]) is False
    put(q, cron="30 * * * *", tz="Asia/Kolkata")
    assert q.one("plan_schedules", plans=[{**old, "cron": "30 * * * *"}]) is False
    assert row(q)["next_due"] is None
    new = due(q, due=noon)
    q.one("plan_schedules", plans=[new])
    q.one("plan_schedules", plans=[{**new, "due": (noon + timedelta(minutes=5)).isoformat()}])
    assert row(q)["next_due"] == noon, "the first that computed it"
    q.call("pause_schedule", name="s")
    q.one("plan_schedules", plans=[due(q, due=noon)])
    assert row(q)["next_due"] is None, "it is paused"
    put(q, "i", every="1 h")
    before = row(q, "i")
    q.one("plan_schedules", plans=[due(q, "i", due=noon)])
    assert row(q, "i") == before


def test_a_change_of_what_is_submitted_leaves_the_due_time_as_it_is(q: Q, noon: datetime) -> None:
    put(q)
    put(q, "i", every="10 s")
    q.tick()
    before = [row(q, name)["next_due"] for name in ("s", "i")]
    to(q, noon - timedelta(seconds=0.5))
    put(q, payload={"n": 2}, catch_up="all")
    put(q, "i", every="10 s", payload={"n": 2})
    assert [row(q, name)["next_due"] for name in ("s", "i")] == before
    to(q, noon + timedelta(seconds=9))
    alone(q)
    assert [job["payload"] for job in jobs(q)] == [{"n": 2}] * 2


@pytest.mark.parametrize(
    ("more", "mentioning"),
    [
        ({"due": timedelta(seconds=1)}, "cannot be due at"),
        ({"due": timedelta(seconds=-59)}, "cannot be due at"),
        ({"due": timedelta(minutes=-60)}, "cannot be due at"),
        ({"due": None}, "cannot be due at"),
        ({"due": timedelta(), "problem": "x"}, "cannot be due at"),
        ({"due": timedelta(), "missed": timedelta()}, "cannot be due at"),
        ({"due": timedelta(), "missed": timedelta(hours=-2)}, "cannot be due at"),
        ({"due": None, "problem": "x", "missed": timedelta(hours=2)}, "cannot be due at"),
        ({"due": "infinity"}, "due is infinity"),
        ({"due": "soon"}, "due cannot be"),
        ({"due": timedelta(), "at": 1}, "no option 'at'"),
    ],
)
def test_no_caller_can_have_a_schedule_run_more_than_once_a_minute(
    q: Q, noon: datetime, more: dict[str, Any], mentioning: str
) -> None:
    put(q)
    given = {key: noon + value if isinstance(value, timedelta) else value for key, value in more.items()}
    with refused(INVALID, mentioning):
        q.one("plan_schedules", plans=[due(q, **given)])


@pytest.mark.parametrize("plans", [None, {}, 1, [1], [None], [[]], [{"name": None}], [{}] * 1001])
def test_plans_are_objects(q: Q, plans: Any) -> None:
    put(q)
    with refused(INVALID):
        q.one("plan_schedules", plans=plans)


def test_an_expression_that_cannot_be_computed_is_shown_and_tried_again(q: Q, noon: datetime) -> None:
    put(q, cron="99 * * * *")
    put(q, "other", cron="30 * * * *")
    q.tick()
    assert row(q)["problem"] == "cron expression '99 * * * *' cannot be read: Bad minute"
    assert row(q, "other")["next_due"] == noon + timedelta(minutes=30)
    assert alone(q)["unplanned"] == 0, "not at once again"
    q.later(11)
    assert alone(q)["unplanned"] == 1
    put(q, cron="59 * * * *")
    assert row(q)["problem"].startswith("not computed yet")
    q.tick()
    assert (row(q)["problem"], row(q)["next_due"]) == (None, noon + timedelta(minutes=59))


def test_a_missed_due_time_that_cannot_be_computed_anew_is_run_as_it_is_stored(q: Q, noon: datetime) -> None:
    put(q, cron="0 * * * *")
    q.tick()
    to(q, noon + timedelta(hours=5))
    q.one("plan_schedules", plans=[due(q, problem="no tzdata")])
    assert q.one("tick", force=True, decides=True)["detail"]["submit_schedules"] == 1
    assert dues(q) == [noon]


def test_workers_and_hosts_compute_and_nobody_else(q: Q, logins: None) -> None:
    put(q)
    a_role(q.db, "h1_test", "gangq_host", login=True)
    for login in ("s1_test", "v1_test"):
        as_(q, login)
        with refused(NOT_ALLOWED):
            q.call("unplanned_schedules")
        with refused(NOT_ALLOWED):
            q.call("plan_schedules", plans=[])
    for login in ("w1_test", "h1_test"):
        as_(q, login)
        assert len(q.call("unplanned_schedules")) == 1
    q.tick()
    assert row(q)["next_due"] is not None, "by a login that may not submit"


def test_a_job_is_its_owners_whoever_ticks(q: Q, logins: None, noon: datetime) -> None:
    as_(q, "s1_test")
    put(q)
    as_(q, "w1_test")
    q.tick()
    q.sql("reset session authorization")
    to(q, noon)
    as_(q, "w1_test")
    q.tick()
    q.sql("reset session authorization")
    assert [(job["submitter"], job["login"]) for job in jobs(q)] == [("s1_test", "s1_test")]
    assert q.events("scheduled")[0]["actor"] == "w1_test"


# Declared ---------------------------------------------------------------------------------------------------


def test_what_could_not_be_computed_is_tried_again_once_a_clock_that_was_ahead_is_set_back(q: Q) -> None:
    put(q, cron="0 0 31 2 *")
    q.later(400 * 86400)
    plan(q)
    assert alone(q)["unplanned"] == 0, "not at once"
    q.later(-400 * 86400)
    assert alone(q)["unplanned"] == 1


@pytest.mark.parametrize("verb", ["declare_schedules", "declare_services"])
def test_names_that_are_null_are_not_taken_for_none(q: Q, verb: str) -> None:
    put(q)
    q.call("declare_schedules", source="x", names=["s"])
    with refused(INVALID, "names is null"):
        q.call(verb, source="x", names=None)
    assert row(q)["undeclared_at"] is None


def test_what_a_program_does_not_declare_any_more_is_marked_and_goes_on(q: Q, noon: datetime) -> None:
    put(q, "a")
    put(q, "b", task="other")
    put(q, "by hand")
    assert q.call("declare_schedules", source="tasks:app", names=["a", "b"]) == []
    assert [row(q, name)["source"] for name in ("a", "b", "by hand")] == ["tasks:app"] * 2 + [None]
    (gone,) = q.call("declare_schedules", source="tasks:app", names=["a"])
    assert gone == {"declare_schedules": "b"}
    assert (row(q, "a")["undeclared_at"], row(q, "b")["undeclared_at"]) == (None, q.clock.now())
    assert [e["data"] for e in q.events("undeclared")] == [{"schedule": "b", "source": "tasks:app"}]
    since = q.clock.now()
    q.later(0.5)
    assert len(q.call("declare_schedules", source="tasks:app", names=["a"])) == 1
    assert row(q, "b")["undeclared_at"] == since
    q.tick()
    to(q, noon)
    q.tick()
    assert len(jobs(q)) == 3, "all of them go on"
    assert q.call("declare_schedules", source="tasks:app", names=["a", "b"]) == []
    assert row(q, "b")["undeclared_at"] is None
    assert q.call("declare_schedules", source="other:app", names=["a"]) == []
    assert row(q, "a")["source"] == "other:app", "the newest declaration wins"
    assert q.call("declare_schedules", source="tasks:app", names=["b"]) == []


def test_a_declaration_leaves_the_schedules_of_others_alone(q: Q, logins: None) -> None:
    as_(q, "s1_test")
    put(q, "a")
    q.call("declare_schedules", source="tasks:app", names=["a"])
    as_(q, "s2_test")
    assert q.call("declare_schedules", source="tasks:app", names=[]) == []
    assert q.call("declare_schedules", source="mine:app", names=["a"]) == []
    assert (row(q, "a")["source"], row(q, "a")["undeclared_at"]) == ("tasks:app", None)


@pytest.mark.parametrize("source", [None, "", "x" * 201])
def test_a_source_has_a_name(q: Q, source: str | None) -> None:
    with refused(INVALID, "source"):
        q.call("declare_schedules", source=source, names=[])
    with refused(TOO_LARGE):
        q.sql(
            "select gangq.declare_schedules('x', array(select md5(n::text) from generate_series(1, 9999) n))"
        )
