"""gangq.metrics(): what it counts is what happened, once each, however late it commits and whatever is forgotten."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sql.drive import PLACED, Q, Worker, a_role, ack_all, gpus, refused

Labels = tuple[tuple[str, str], ...]
JOBS = ("gangq_jobs_submitted_total", "gangq_jobs_started_total", "gangq_jobs_ended_total")


def samples(q: Q, name: str) -> dict[Labels, float]:
    """All values of one metric, by labels."""
    rows = q.sql("select * from gangq.metrics() m where m.name = %(name)s", name=name)
    return {tuple(sorted(row["labels"].items())): row["value"] for row in rows}


def value(q: Q, name: str, **labels: str) -> float:
    return samples(q, name)[tuple(sorted(labels.items()))]


def counted(q: Q, task: str = "work", queue: str = "default") -> tuple[float, float, dict[str, float]]:
    """Submitted, started, and ended by outcome."""
    of = {"queue": queue, "task": task}
    ended = {
        dict(labels)["outcome"]: n
        for labels, n in samples(q, "gangq_jobs_ended_total").items()
        if of.items() <= dict(labels).items()
    }
    started = samples(q, "gangq_jobs_started_total").get(tuple(sorted(of.items())), 0)
    return value(q, "gangq_jobs_submitted_total", **of), started, ended


def agrees_with_what_is_on_record(q: Q) -> None:
    """The counters are what a count of all that is live and of all of history gives."""
    entered: Counter[Labels] = Counter()
    begun: Counter[Labels] = Counter()
    over: Counter[Labels] = Counter()
    causes: Counter[Labels] = Counter()
    for row in q.sql(
        "select s.queue, s.task, 'live' as state from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
        "union all select s.queue, s.task, h.state from gangq.history h join gangq.shapes s on s.id = h.shape_id"
    ):
        entered[(("queue", row["queue"]), ("task", row["task"]))] += 1
        if row["state"] != "live":
            over[(("outcome", row["state"]), ("queue", row["queue"]), ("task", row["task"]))] += 1
    for row in q.sql("select queue, task, cause, token from gangq.attempts"):
        begun[(("queue", row["queue"]), ("task", row["task"]))] += 1
        causes[(("cause", row["cause"]), ("queue", row["queue"]), ("task", row["task"]))] += 1
    assert samples(q, "gangq_jobs_submitted_total") == entered
    assert samples(q, "gangq_jobs_started_total") == begun
    assert samples(q, "gangq_jobs_ended_total") == over
    ended = {labels: n for labels, n in causes.items() if ("cause", None) not in labels}
    live_and_done = q.sql(
        "select s.queue, s.task, count(*) as n from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
        "where j.state = 'done' and s.gpus = 0 group by 1, 2"
    )
    for row in live_and_done:  # Counted when their gang ends.
        labels = (("cause", "done"), ("queue", row["queue"]), ("task", row["task"]))
        ended[labels] -= row["n"]
    assert samples(q, "gangq_attempts_ended_total") == {k: n for k, n in ended.items() if n}


# Counters ---------------------------------------------------------------------------------------------------


def test_jobs_are_counted_by_queue_task_and_outcome_before_and_after_a_tick(q: Q) -> None:
    worker = q.worker(slots=5)
    q.submit(count=4)
    first, second, third = (worker.take() for _ in range(3))
    first.complete()
    second.fail(retryable=False)
    q.submit(task="other")
    expected = (4, 3, {"done": 1, "failed": 1})
    assert counted(q) == expected
    agrees_with_what_is_on_record(q)
    q.tick()
    assert counted(q) == expected
    assert q.value("select count(*) from gangq.uncounted()") == 0
    third.complete()
    assert counted(q) == (4, 3, {"done": 2, "failed": 1})
    agrees_with_what_is_on_record(q)
    assert counted(q, "other") == (1, 0, {})


def test_members_and_jobs_with_devices_are_counted_once_as_others_are(q: Q) -> None:
    workers = [q.worker(f"w{n}", slots=2, devices=gpus(1000, 1000, prefix=f"G{n}-")) for n in range(2)]
    for options in ({}, {"gpus": 1}):
        gang, claims = q.running_gang(*workers, **options)
        agrees_with_what_is_on_record(q)
        claims[0].complete()
        agrees_with_what_is_on_record(q)
        q.tick()
        agrees_with_what_is_on_record(q)
        claims[1].complete()
        assert gang.state == "done"
        agrees_with_what_is_on_record(q)
    gang, claims = q.running_gang(*workers, gpus=1)
    claims[0].fail()
    agrees_with_what_is_on_record(q)
    ack_all(claims[1:])
    agrees_with_what_is_on_record(q)
    gang.cancel()
    q.tick()
    q.submit(gpus=1)
    workers[0].take().trip(code=85)
    agrees_with_what_is_on_record(q)
    q.tick()
    agrees_with_what_is_on_record(q)


def test_a_retry_enters_the_queue_anew(q: Q) -> None:
    worker = q.worker()
    job = q.submit()
    worker.take().fail(retryable=False)
    q.call("retry", job_ids=[job])
    assert counted(q) == (2, 1, {"failed": 1})
    q.tick()
    worker.take().complete()
    assert counted(q) == (2, 2, {"failed": 1, "done": 1})
    agrees_with_what_is_on_record(q)


def test_counters_stay_when_history_is_dropped(q: Q) -> None:
    worker = q.worker()
    q.submit(count=3)
    for _ in range(3):
        worker.take().complete()
    q.tick()
    q.later(20 * 86400)
    q.sql("select gangq.keep_partitions(true)")
    assert q.value("select count(*) from gangq.history") == 0
    assert counted(q) == (3, 3, {"done": 3})
    q.submit()
    assert counted(q) == (4, 3, {"done": 3})


def test_what_ended_just_before_a_long_outage_is_counted_after_it(q: Q) -> None:
    worker = q.worker()
    q.submit(count=2)
    worker.take().complete()
    q.tick()
    worker.take().complete()
    q.later(5 * 86400)
    q.tick()
    assert counted(q) == (2, 2, {"done": 2})
    assert q.value("select count(*) from gangq.uncounted()") == 0


def test_the_counters_of_a_task_are_forgotten_a_month_after_its_last_job(q: Q) -> None:
    worker = q.worker()
    for task in ("old", "waits", "goes on"):
        q.submit(task=task)
        worker.take().complete()
    going = q.submit(task="goes on")
    q.tick()
    q.submit(task="waits")
    q.later(29 * 86400)
    q.tick()
    assert counted(q, "old") == (1, 1, {"done": 1})
    q.call("cancel", job_ids=[going])
    q.later(2 * 86400)
    q.tick()
    assert counted(q, "waits") == (2, 1, {"done": 1}), "a job of it is live"
    assert counted(q, "goes on") == (2, 1, {"done": 1, "cancelled": 1})
    tasks = {dict(labels)["task"] for name in JOBS for labels in samples(q, name)}
    assert tasks == {"waits", "goes on"}
    q.submit(task="old")
    assert counted(q, "old") == (1, 0, {})


def test_a_snoozed_attempt_is_counted_as_one_that_ended(q: Q) -> None:
    worker = q.worker()
    q.submit()
    claim = worker.take()
    q.call("snooze", job_id=claim.job_id, token=claim.token, for_s=5)
    assert value(q, "gangq_attempts_ended_total", queue="default", task="work", cause="snoozed") == 1
    agrees_with_what_is_on_record(q)
    q.later(6)
    q.tick()
    worker.take().complete()
    assert counted(q) == (1, 2, {"done": 1})
    agrees_with_what_is_on_record(q)


@pytest.mark.parametrize("between", ["nothing", "a tick", "two ticks"])
def test_what_commits_late_is_counted_once(q: Q, dsn: str, between: str) -> None:
    """A transaction ends a job, others end later ones and are counted, and then it commits."""
    worker = q.worker(slots=3)
    q.submit(count=3)
    late, soon, after = (worker.take() for _ in range(3))
    with q.connected(dsn) as other:
        other.db.execute("begin")
        other.call("complete", job_ids=[late.job_id], tokens=[late.token])
        soon.complete()
        q.later(60)
        for _ in range(["nothing", "a tick", "two ticks"].index(between)):
            q.tick()
        assert counted(q) == (3, 3, {"done": 1})
        after.complete()
        assert counted(other)[2]["done"] == 3, "its own is seen by itself"
        other.db.execute("commit")
    assert counted(q) == (3, 3, {"done": 3})
    q.tick()
    assert counted(q) == (3, 3, {"done": 3})
    q.tick()
    assert counted(q) == (3, 3, {"done": 3})


def test_what_a_tick_and_its_transaction_end_is_counted_once(q: Q, dsn: str) -> None:
    worker = q.worker(slots=3)
    q.submit(count=3)
    first, second, third = (worker.take() for _ in range(3))
    with q.connected(dsn) as other, q.db.transaction():
        first.complete()
        # The number of its transaction is higher, and it has ended.
        other.call("complete", job_ids=[second.job_id], tokens=[second.token])
        q.call("tick", force=True)
        third.complete()
        assert counted(q)[2] == {"done": 3}
    for _ in range(3):
        assert counted(q) == (3, 3, {"done": 3})
        q.tick()
    q.submit(max_attempts=1)
    worker.take()
    q.later(1000)
    for _ in range(4):
        q.tick()
        agrees_with_what_is_on_record(q)


def test_a_database_restored_into_a_cluster_of_lower_numbers_counts_what_ends_from_then_on(q: Q) -> None:
    worker = q.worker(slots=2)
    q.submit(count=2)
    worker.take().complete()
    q.tick()
    high = "(pg_current_xact_id()::text::bigint + 1000000)::text::xid8"
    q.sql(f"update gangq.history set written_in = {high}")
    q.sql(f"update gangq.tick_state set counted_below = {high}, uncounted = '{{}}'")
    q.later(1)
    q.tick()
    assert counted(q) == (2, 1, {"done": 1})
    q.later(1)
    worker.take().complete()
    for _ in range(2):
        assert counted(q) == (2, 2, {"done": 2})
        q.tick()


def test_what_ends_is_counted_once_a_clock_that_was_ahead_is_set_back(q: Q) -> None:
    worker = q.worker()
    q.submit(count=3)
    worker.take().complete()
    q.later(400 * 86400)
    q.tick()
    q.worker("w2").take().complete()
    q.tick()
    q.later(-400 * 86400)
    q.worker("w3").take().complete()
    for _ in range(2):
        q.tick()
        assert counted(q)[2] == {"done": 3}


def test_preemptions_drains_and_forced_ends_are_counted(q: Q) -> None:
    workers = q.workers(2)
    gang, claims = q.running_gang(*workers)
    assert value(q, "gangq_gangs_preempted_total") == 0
    q.call("preempt_gang", gang_id=gang.id)
    assert value(q, "gangq_gangs_preempted_total") == 1
    assert value(q, "gangq_preemptions_completed_total", outcome="blocked") == 0
    q.later(3)
    ack_all(claims)
    assert value(q, "gangq_preemptions_completed_total", outcome="blocked") == 1
    assert value(q, "gangq_drain_duration_seconds_sum") == 3
    within = {
        dict(labels)["le"]: n for labels, n in samples(q, "gangq_drain_duration_seconds_bucket").items()
    }
    assert [le for le, n in within.items() if n] == [
        le for le in within if le in ("5", "10", "30", "60", "120", "300", "+Inf")
    ]
    q.tick()
    assert len(gang.claimed_by(*workers)) == 2
    gang.cancel()
    q.live_on(400, *workers, step=30)
    assert gang.state == "cancelled"
    assert value(q, "gangq_force_drained_total") == 2
    assert value(q, "gangq_gangs_preempted_total") == 1, "a cancelled gang makes way for nobody"
    assert value(q, "gangq_drain_duration_seconds_count") == 2
    assert value(q, "gangq_preemptions_completed_total", outcome="cancelled") == 0


def test_trips_are_counted_by_class_and_what_nobody_knows_is_other(q: Q) -> None:
    worker = q.worker(slots=2)
    q.submit(count=2)
    worker.take().trip(code=76)
    q.call("configure", notify_only=["budget"])
    worker.take().trip(code=75, exit_in_s=5)
    assert value(q, "gangq_trips_total", **{"class": "stall", "outcome": "trip"}) == 1
    assert value(q, "gangq_trips_total", **{"class": "budget", "outcome": "notify"}) == 1
    assert value(q, "gangq_trips_total", **{"class": "health", "outcome": "trip"}) == 0
    q.sql("select gangq.log_event(gangq.now(), 'trip', data => '{\"class\": \"made up\"}')")
    assert value(q, "gangq_trips_total", **{"class": "other", "outcome": "trip"}) == 1


# Gauges -----------------------------------------------------------------------------------------------------


def states(q: Q, queue: str = "default") -> dict[str, float]:
    """How many jobs are in each state that has any."""
    found = samples(q, "gangq_jobs")
    return {dict(k)["state"]: n for k, n in found.items() if n and dict(k)["queue"] == queue}


def test_depth_is_told_by_queue_and_state(q: Q) -> None:
    q.call("set_queue", name="lab")
    workers = q.workers(2)
    gang, claims = q.running_gang(*workers)
    first = q.submit(queue="lab")
    q.submit(queue="lab", after=[first])
    q.submit(queue="lab", due_at=q.clock.now().replace(year=2100))
    q.submit_gang(3, queue="lab", roles=None)
    assert states(q) == {"running": 2}
    assert states(q, "lab") == {"pending": 1, "waiting": 1, "scheduled": 1, "blocked": 3}
    zeros = {dict(labels)["state"] for labels, n in samples(q, "gangq_jobs").items() if not n}
    assert zeros >= {"preempting", "preempted", "reserved"}
    q.call("preempt_gang", gang_id=gang.id)
    claims[0].ack()
    assert states(q) == {"preempting": 1, "preempted": 1}


def test_the_oldest_that_waits_is_told_in_seconds_of_each_queue(q: Q) -> None:
    q.call("set_queue", name="lab")
    q.submit()
    q.later(60)
    q.submit(priority=5)
    q.submit_gang(2, queue="lab")
    q.later(30)
    oldest = samples(q, "gangq_oldest_waiting_seconds")
    assert oldest == {(("queue", "default"),): 90, (("queue", "lab"),): 30}
    worker = q.worker()
    worker.take()
    assert value(q, "gangq_oldest_waiting_seconds", queue="default") == 90, "the one of 90 s has waited on"


def test_devices_are_told_by_model_and_what_they_do(q: Q) -> None:
    worker: Worker = q.worker(slots=4, devices=gpus(1000, 1000, 1000, 1000))
    other = q.worker("w2", devices=gpus(1000, prefix="H"))
    other.retire()
    q.submit(gpus=1, task="train")
    worker.take()
    q.submit_gang(1, gpus=1)
    q.tick()
    q.call("quarantine", device_uuid="G3", reason="hot")
    found = {dict(labels)["state"]: n for labels, n in samples(q, "gangq_devices").items()}
    assert found == {"busy": 1, "held": 1, "free": 1, "quarantined": 1}


def test_leases_workers_ticks_and_passes_are_told(q: Q) -> None:
    assert value(q, "gangq_worst_lease_age_seconds") == 0
    a, b = q.worker("a"), q.worker("b")
    q.submit(queue="default")
    a.take()
    q.tick()
    q.submit(**PLACED)
    q.tick()
    q.later(7)
    b.beat()
    assert value(q, "gangq_worst_lease_age_seconds") == 7
    assert value(q, "gangq_workers", state="live") == 2
    assert value(q, "gangq_last_tick_age_seconds") == 7
    assert value(q, "gangq_last_pass_age_seconds") == 7
    assert value(q, "gangq_last_pass_duration_seconds") == 0
    ticks = value(q, "gangq_ticks_total")
    q.live_on(60, b, step=2)
    assert value(q, "gangq_ticks_total") > ticks
    assert (value(q, "gangq_workers", state="live"), value(q, "gangq_workers", state="silent")) == (1, 1)
    q.live_on(300, b, step=5)
    assert value(q, "gangq_worst_lease_age_seconds") == 0, "one that has ended renews nothing"


def test_what_a_notification_target_was_not_told_yet_is_told(q: Q) -> None:
    q.call("add_notification", target="oncall")
    q.call("test_notification", target="oncall")
    q.later(9)
    assert value(q, "gangq_outbox_waiting", target="oncall") == 1
    assert value(q, "gangq_outbox_lag_seconds", target="oncall") == 9
    (row,) = q.call("fetch_notification", target="oncall")
    q.call("acknowledge_notification", target="oncall", id=row["id"], delivery=1)
    assert value(q, "gangq_outbox_delivered_total", target="oncall") == 1
    assert value(q, "gangq_outbox_lag_seconds", target="oncall") == 0


def test_a_transaction_that_is_left_open_is_seen(q: Q, dsn: str) -> None:
    with q.connected(dsn) as other:
        other.db.execute("begin isolation level repeatable read")
        other.db.execute("select 1")
        q.sql("select pg_sleep(0.05)")
        assert value(q, "gangq_oldest_transaction_seconds") >= 0.05


# Who, and with which labels ---------------------------------------------------------------------------------


def test_a_viewer_reads_them_and_a_login_without_a_role_does_not(q: Q) -> None:
    a_role(q.db, "watcher", "gangq_viewer")
    a_role(q.db, "nobody_at_all")
    with q.db.transaction():
        q.sql("set local role watcher")
        assert value(q, "gangq_queue_paused", queue="default") == 0
    with refused("42501"), q.db.transaction():
        q.sql("set local role nobody_at_all")
        q.sql("select * from gangq.metrics()")


def test_no_label_holds_a_job_a_login_or_what_a_job_says(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    q.submit(payloads=[{"secret": "hunter2"}], gpus=1, labels={})
    worker.take().fail("hunter2", retryable=False)
    q.tick()
    labels: dict[str, set[Any]] = {}
    for row in q.sql("select * from gangq.metrics()"):
        for name, text in row["labels"].items():
            labels.setdefault(name, set()).add(text)
    known = {"queue", "task", "state", "outcome", "cause", "class", "le", "model", "target"}
    assert set(labels) <= known
    assert "hunter2" not in str(labels)
    causes = {row["cause"] for row in q.sql("select cause from gangq.causes")} | {"done"}
    assert labels["cause"] <= causes


def test_a_standby_of_the_schema_answers_in_a_transaction_that_may_not_write(q: Q) -> None:
    q.submit()
    with q.db.transaction():
        q.sql("set transaction read only")
        assert value(q, "gangq_jobs", queue="default", state="pending") == 1


def test_no_series_is_told_twice(q: Q) -> None:
    workers = [q.worker(f"w{n}", devices=gpus(1000, prefix=f"G{n}-")) for n in range(2)]
    _, claims = q.running_gang(*workers, gpus=1)
    claims[0].fail()
    q.tick()
    ack_all(claims[1:])
    rows = q.sql("select name, labels, count(*) from gangq.metrics() group by 1, 2 having count(*) > 1")
    assert rows == []


def test_a_number_that_a_worker_says_of_its_pass_is_bounded(q: Q) -> None:
    for said in (1e30, -1e30, None):
        pass_number = q.value("select runs from gangq.lock_rows where name = 'pass'")
        q.call("apply", **{"pass": pass_number}, decisions=[], seen={"now": said})
        found = samples(q, "gangq_last_pass_duration_seconds").get((), 0)
        assert 0 <= found <= 1e6
