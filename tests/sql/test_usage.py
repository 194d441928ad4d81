"""Every attempt is on record with where it ran and why it ended, and usage adds up what it cost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, Q, Row, Worker, gpus, refused
from sql.services import Replicas, put

HOUR = 3600


def attempts(q: Q, job_id: int) -> list[Row]:
    return q.sql("select * from gangq.attempts where job_id = %(id)s order by token", id=job_id)


def causes(q: Q, job_id: int) -> list[str | None]:
    return [row["cause"] for row in attempts(q, job_id)]


def recorded(q: Q) -> int:
    return int(q.value("select count(*) from gangq.attempt_history"))


def used(q: Q, **named: Any) -> list[Row]:
    named.setdefault("by", [])
    return q.call("usage", **named)


def hours(q: Q, **named: Any) -> tuple[float, float, float]:
    """GPU hours in all, wasted and displaced, to the second."""
    (row,) = used(q, **named)
    first, second, third = (round(row[f"{what}_hours"], 3) for what in ("gpu", "wasted", "displaced"))
    return first, second, third


def spend(q: Q, seconds: float, *workers: Worker) -> None:
    q.live_on(seconds, *workers, step=60, tick=False)


# What is recorded -------------------------------------------------------------------------------------------


def test_an_attempt_is_on_record_with_host_devices_times_and_cause(q: Q) -> None:
    worker = q.worker(host="alpha", devices=gpus(1000, 1000, 1000))
    job = q.submit(gpus=2, task="train")
    began = q.clock.now()
    claim = worker.take()
    (row,) = attempts(q, job)
    assert (row["cause"], row["ended_at"], row["token"]) == (None, None, claim.token), "it runs"
    spend(q, 120, worker)
    claim.complete()
    (row,) = attempts(q, job)
    given = [device["uuid"] for device in claim["devices"]]
    assert (row["worker"], row["host"], row["gpus"], row["devices"]) == ("w1", "alpha", 2, given)
    assert (row["started_at"], row["ended_at"]) == (began, began + timedelta(seconds=120))
    assert (row["cause"], row["queue"], row["task"]) == ("done", "default", "train")
    assert row["submitter"] == q.value("select gangq.caller()")


def test_every_attempt_of_a_job_says_why_it_ended(q: Q) -> None:
    job = q.submit(gpus=1, max_attempts=9)
    expected: list[str | None] = []

    def again(cause: str, host: str, devices: str) -> None:
        expected.append(cause)
        q.later(700)
        q.tick()
        assert causes(q, job) == expected
        assert (attempts(q, job)[-1]["host"], attempts(q, job)[-1]["devices"]) == (host, [devices])

    def start(name: str, prefix: str) -> tuple[Worker, Any]:
        worker = q.worker(name, devices=gpus(1000, prefix=prefix))
        return worker, worker.take()

    worker, claim = start("a", "A")
    claim.fail()
    worker.retire()
    again("fail", "host-a", "A0")
    worker, claim = start("b", "B")
    worker.report_dead()
    again("crash", "host-b", "B0")
    worker, claim = start("c", "C")
    claim.trip(code=85)  # Its device is quarantined before the attempt has ended.
    worker.retire()
    again("trip", "host-c", "C0")
    worker, claim = start("d", "D")
    claim.trip(code=76, exit_in_s=5)  # Its devices are withheld.
    again("trip", "host-d", "D0")
    worker, claim = start("e", "E")
    q.call("displace_job", job_id=job)
    claim.ack()
    worker.retire()
    again("preempt", "host-e", "E0")
    worker, claim = start("f", "F")
    claim.release()
    worker.retire()
    again("release", "host-f", "F0")
    worker, claim = start("g", "G")
    q.call("cancel", job_ids=[job])
    claim.ack()
    again("cancel", "host-g", "G0")
    assert q.state(job) == "cancelled"


def test_one_whose_worker_falls_silent_is_lost_when_its_lease_is_over(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    job = q.submit(gpus=1)
    worker.take()
    began = q.clock.now()
    q.later(200)
    q.tick()
    (row,) = attempts(q, job)
    assert (row["cause"], row["ended_at"] - began) == ("crash", timedelta(seconds=200))


def test_one_that_spends_the_last_attempt_is_recorded_once(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    job = q.submit(gpus=1, max_attempts=1)
    assert worker.take().fail() == "failed"
    assert causes(q, job) == ["fail"]


def test_a_job_without_devices_that_is_done_costs_no_row_and_is_shown_from_its_history(q: Q) -> None:
    worker = q.worker(slots=3)
    done, again = q.submit(), q.submit(max_attempts=2)
    first, second = worker.claim(2)
    first.complete()
    assert recorded(q) == 0
    second.fail()
    assert recorded(q) == 1, "what did not end done is recorded"
    q.later(700)
    q.tick()
    worker = q.worker("w2")
    worker.take().complete()
    assert causes(q, again) == ["fail", "done"]
    (row,) = attempts(q, done)
    assert (row["cause"], row["worker"], row["host"], row["devices"]) == ("done", "w1", "host-w1", [])
    assert recorded(q) == 1


def test_each_member_of_a_gang_has_an_attempt_in_each_epoch_that_it_ran_in(q: Q) -> None:
    workers = [q.worker(n, devices=gpus(1000, prefix=n.upper())) for n in ("a", "b")]
    gang, claims = q.running_gang(*workers, gpus=1, max_attempts=5)
    claims[0].fail()
    claims[1].ack()
    claims = gang.restart(*workers)
    for claim in claims:
        claim.complete()
    found = q.sql("select * from gangq.attempts where gang_id = %(id)s order by epoch, rank", id=gang.id)
    assert [(r["epoch"], r["rank"], r["cause"]) for r in found] == [
        (1, 0, "fail"),
        (1, 1, "fail"),
        (2, 0, "done"),
        (2, 1, "done"),
    ]
    assert {tuple(r["devices"]) for r in found} == {("A0",), ("B0",)}
    assert all(r["ended_at"] for r in found)


@pytest.mark.parametrize("devices", [0, 1])
def test_members_of_one_gang_end_for_different_causes_and_none_twice(q: Q, devices: int) -> None:
    workers = [q.worker(n, devices=gpus(1000, prefix=n)) for n in ("a", "b", "c")]
    gang, claims = q.running_gang(*workers, gpus=devices, failure_policy="shrink", min_size=1)
    claims[0].complete()
    claims[1].fail()
    found = q.sql("select rank, cause from gangq.attempts where gang_id = %(id)s order by token", id=gang.id)
    assert {(r["rank"], r["cause"]) for r in found} == {(0, "done"), (1, "fail"), (2, None)}
    claims[2].complete()
    assert gang.state == "done"
    found = q.sql("select token, cause from gangq.attempts where gang_id = %(id)s", id=gang.id)
    assert {r["token"]: r["cause"] for r in found} == {
        claims[0].token: "done",
        claims[1].token: "fail",
        claims[2].token: "done",
    }
    assert len(found) == 3


def test_a_member_that_leaves_an_elastic_gang_is_displaced_and_keeps_the_epoch_that_it_began_in(q: Q) -> None:
    workers = [q.worker(n, devices=gpus(1000, prefix=n)) for n in ("a", "b")]
    gang, claims = q.running_gang(*workers, gpus=1, min_size=1, failure_policy="shrink")
    assert q.one("shrink_gang", gang_id=gang.id, job_ids=[claims[1].job_id])
    claims[1].ack()
    (row,) = attempts(q, claims[1].job_id)
    assert (row["cause"], row["epoch"]) == ("preempt", 1)
    assert gang.live["epoch"] == 2


def test_what_is_rolled_back_was_no_attempt(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    job = q.submit(gpus=1)
    claim = worker.take()
    with q.db.transaction(force_rollback=True):
        claim.complete()
    assert causes(q, job) == [None]


def test_attempts_outlive_the_history_of_their_job_and_go_after_a_month(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    job = q.submit(gpus=1)
    worker.take().complete()
    q.later(9 * 86400)
    q.tick()
    q.tick()
    assert q.sql("select from gangq.history") == []
    (row,) = attempts(q, job)
    assert (row["worker"], row["host"]) == ("w1", "host-w1"), "its incarnation is forgotten by now"
    q.later(23 * 86400)
    q.tick()
    assert recorded(q) == 0


# What it adds up to -----------------------------------------------------------------------------------------


def test_hours_are_devices_times_time_and_what_runs_counts_so_far(q: Q) -> None:
    worker = q.worker(devices=gpus(*[1000] * 4), slots=4)
    q.submit(gpus=2)
    q.submit()
    done, light = worker.claim(2)
    spend(q, HOUR, worker)
    assert hours(q) == (2, 0, 0)
    done.complete()
    light.complete()
    spend(q, HOUR, worker)
    assert hours(q) == (2, 0, 0)
    q.submit(gpus=1)
    worker.take()
    spend(q, HOUR / 2, worker)
    assert hours(q) == (2.5, 0, 0)


def test_a_clock_that_is_set_back_takes_no_hours_away(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    q.submit(gpus=1)
    claim = worker.take()
    q.later(-HOUR)
    assert hours(q) == (0, 0, 0)
    claim.complete()
    assert hours(q) == (0, 0, 0)


def test_wasted_are_failures_and_losses_displaced_what_made_way(q: Q) -> None:
    worker = q.worker(devices=gpus(1000, 1000))
    q.call("set_queue", name="default", min_run_s=0)
    job = q.submit(gpus=1, max_attempts=5, budget_s=9 * HOUR)
    for end in ("fail", "trip", "displace", "complete"):
        q.later(0)
        claim = worker.take()
        spend(q, HOUR, worker)
        if end == "displace":
            q.call("displace_job", job_id=job)
            claim.ack()
        else:
            getattr(claim, end)()
        spend(q, 1200, worker)
        q.tick()
    assert hours(q) == (4, 2, 1)


def test_the_members_that_fall_with_a_failed_one_are_wasted_too_and_those_not_needed_are_not(q: Q) -> None:
    workers = [q.worker(n, devices=gpus(1000, prefix=n)) for n in ("a", "b")]
    gang, claims = q.running_gang(*workers, gpus=1, max_attempts=1, budget_s=9 * HOUR)
    spend(q, HOUR, *workers)
    claims[0].fail()
    claims[1].ack()
    assert (gang.state, hours(q)) == ("failed", (2, 2, 0))
    roles = [
        {"name": "driver", "count": 1, "gpus": 1, "budget_s": 9 * HOUR},
        {"name": "executor", "count": 1, "gpus": 1, "budget_s": 9 * HOUR},
    ]
    other = q.submit_gang(roles=roles, completion="driver")
    claims = other.start(*workers)
    spend(q, HOUR, *workers)
    claims[0].complete()
    claims[1].ack()
    assert (other.state, hours(q)) == ("done", (4, 2, 0))


def test_usage_is_grouped_as_asked_and_looks_back_no_further(q: Q) -> None:
    q.call("set_queue", name="lab")
    worker = q.worker(devices=gpus(1000, 1000), queues=["default", "lab"], slots=2)
    for queue, task in (("default", "train"), ("lab", "train"), ("lab", "render")):
        q.submit(queue=queue, task=task, gpus=1)
        claim = worker.take()
        spend(q, HOUR, worker)
        claim.complete()
    me = q.value("select gangq.caller()")
    found = [tuple(row.values())[:6] for row in used(q, by=["queue", "submitter"])]
    assert found == [(me, "lab", None, None, 2, 2.0), (me, "default", None, None, 1, 1.0)]
    by_task = {row["task"]: row["gpu_hours"] for row in used(q, by=["task"])}
    assert by_task == {"train": 2.0, "render": 1.0}
    assert used(q, by=["submitter", "queue", "task"])[0].keys() == used(q)[0].keys()
    # Of the one that ended in that time, only what lies in it.
    assert hours(q, since=timedelta(minutes=90)) == (1.5, 0, 0)
    spend(q, HOUR, worker)
    assert used(q, since=timedelta(minutes=30)) == []


def test_a_service_is_shown_with_its_hours_also_when_its_gangs_and_their_history_are_gone(q: Q) -> None:
    worker = q.worker(devices=gpus(1000, 1000), slots=2)
    fleet = Replicas(q, worker)
    put(q, replicas=2, gang=2, work={"gpus": 1})
    fleet.turn()
    spend(q, 1800, worker)
    assert {row["service"]: row["gpu_hours"] for row in used(q, by=["service"])} == {"chat": pytest.approx(1)}
    q.call("stop_service", name="chat")
    fleet.settle(3)
    q.submit(gpus=1)
    claim = worker.take()
    spend(q, 1800, worker)
    claim.complete()
    q.sql("delete from gangq.gang_history")
    found = {row["service"]: row["gpu_hours"] for row in used(q, by=["service"])}
    assert found == {"chat": pytest.approx(1, abs=0.01), None: pytest.approx(0.5, abs=0.01)}


def test_what_makes_no_sense_is_refused(untouched: Q) -> None:
    for since in (timedelta(0), timedelta(days=-1), None):
        with refused(INVALID):
            untouched.call("usage", since=since)
    for by in (["host"], [None], None):
        with refused(INVALID):
            untouched.call("usage", by=by)


def test_a_viewer_sees_hours_and_attempts(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    job = q.submit(gpus=1)
    worker.take().complete()
    with q.db.transaction(force_rollback=True):
        q.sql("set local role gangq_viewer")
        assert causes(q, job) == ["done"]
        assert len(used(q)) == 1


# What it costs ----------------------------------------------------------------------------------------------


def test_a_light_job_that_is_done_writes_and_reads_nothing_of_attempts(q: Q) -> None:
    count = (
        "select coalesce(sum(seq_scan + coalesce(idx_scan, 0) + n_tup_ins), 0) from pg_stat_xact_user_tables "
        "where relname like 'attempt_history%'"
    )
    q.submit(count=3)
    worker = q.worker(slots=3)
    with q.db.transaction():
        before = q.value(count)
        for claim in worker.claim():
            claim.complete()
        assert q.value(count) == before
    worker = q.worker("w2", devices=gpus(1000))
    q.submit(gpus=1)
    claim = worker.take()
    with q.db.transaction():
        before = q.value(count)
        claim.complete()
        assert q.value(count) == before + 1


@pytest.mark.own_database
def test_to_add_up_a_month_reads_each_attempt_once_and_no_history(q: Q, db: psycopg.Connection[Any]) -> None:
    worker = q.worker(devices=gpus(1000))
    q.submit(gpus=1)
    worker.take().complete()
    q.sql(
        "insert into gangq.attempt_history "
        "(job_id, token, incarnation, started_at, ended_at, shape_id, cause, submitter) "
        "select n, n, 1, gangq.now() - interval '1 hour', gangq.now(), "
        "(select max(id) from gangq.shapes), 'done', 'me' from generate_series(1, 20000) n"
    )
    with db.transaction(force_rollback=True):
        q.sql("select gangq.usage()")  # The first call reads the catalogue.
        plan = q.sql("explain (analyze, buffers, format json) select gangq.usage()")[0]["QUERY PLAN"][0][
            "Plan"
        ]
    pages = q.value(
        "select sum(pg_relation_size(c.oid)) / 8192 from pg_class c where relname ~ '^attempt_history_[0-9r]'"
    )
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= pages
