"""Notifications: who is told of what, each at least once, in bounded space, at no cost to what succeeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, NOT_ALLOWED, WRONG_STATE, Q, Row, gpus, refused
from sql.services import Replicas, gangs, put

EVERYTHING = [
    "batch_done",
    "crash_loop",
    "device_quarantined",
    "gang_failed",
    "job_failed",
    "trip",
    "update_halted",
    "worker_quarantined",
]


def target(q: Q, name: str = "oncall", **more: Any) -> str:
    q.call("add_notification", target=name, **more)
    return name


def told(q: Q, name: str = "oncall") -> list[Row]:
    """What waits for a target, in order."""
    return q.sql("select * from gangq.undelivered where target = %(name)s order by id", name=name)


def kinds(q: Q, name: str = "oncall") -> list[str]:
    return [row["kind"] for row in told(q, name)]


def fetch(q: Q, name: str = "oncall", **more: Any) -> Row:
    found: Row = q.one("fetch_notification", target=name, **more)
    return found


def acknowledge(q: Q, found: Row, error: str | None = None, name: str = "oncall") -> str:
    named = {"target": name, "id": found["id"], "delivery": found["delivery"], "error": error}
    return str(q.one("acknowledge_notification", **named))


def state_of(q: Q, name: str = "oncall") -> Row:
    return q.sql("select * from gangq.notifications where target = %(name)s", name=name)[0]


def fail_one(q: Q, **more: Any) -> int:
    """A job that fails for good."""
    job = q.submit(max_attempts=1, **more)
    worker = q.worker(f"w{job}", queues=[more.get("queue", "default")])
    assert worker.take().fail() == "failed"
    worker.retire()
    return int(job)


# What is told -----------------------------------------------------------------------------------------------


def test_a_job_that_failed_for_good_is_told_with_what_is_known_of_it(q: Q) -> None:
    target(q)
    job = q.submit(max_attempts=2)
    worker = q.worker()
    assert worker.take().fail() == "scheduled"
    assert kinds(q) == [], "it is tried again"
    q.later(600)
    worker.beat()
    q.tick()
    assert worker.take().fail("out of cheese") == "failed"
    (row,) = told(q)
    body = row["body"]
    assert (body["kind"], body["job_id"], body["task"], body["queue"]) == (
        "job_failed",
        job,
        "work",
        "default",
    )
    assert (body["worker"], body["host"]) == ("w1", "host-w1")
    assert body["submitter"] == q.value("select gangq.caller()")
    assert body["data"] == {"cause": "fail", "attempts": 2, "error": {"message": "out of cheese"}}
    assert (row["job_id"], row["state"], row["at"]) == (job, "waiting", q.clock.now())


@pytest.mark.parametrize("end", ["fail", "crash", "trip", "requeue", "release"])
def test_however_a_single_job_fails_for_good_it_is_told_once(q: Q, end: str) -> None:
    target(q, kinds=["job_failed"])
    q.call("configure", max_stops=1)
    q.submit(max_attempts=1)
    q.sql("update gangq.live_jobs set max_trips = 1, max_crashes = 1")
    for _ in range(2):
        worker = q.worker()
        claims = worker.claim()
        if not claims:
            break
        if end == "crash":
            worker.report_dead()
        elif end == "trip":
            claims[0].trip()
        else:
            getattr(claims[0], end)()
        worker.retire()
        q.later(60)
        q.tick()
    assert q.value("select state from gangq.jobs") == "failed"
    assert kinds(q) == ["job_failed"]


def test_what_is_cancelled_or_done_is_no_failure(q: Q) -> None:
    target(q)
    q.call("cancel", job_ids=[q.submit()])
    q.submit()
    worker = q.worker()
    worker.take().complete()
    gang = q.submit_gang(2, wait_for_hardware=True)
    gang.cancel()
    assert kinds(q) == []


def test_a_gang_that_failed_is_told_once_and_not_as_its_members(q: Q) -> None:
    target(q, kinds=["gang_failed", "job_failed"], queue="default")
    gang, claims = q.running_gang(*q.workers(2), max_attempts=1)
    claims[0].fail()
    claims[1].ack()
    assert gang.state == "failed"
    (row,) = told(q)
    assert (row["kind"], row["gang_id"], row["body"]["task"]) == ("gang_failed", gang.id, "train")
    assert row["body"]["reason"] == gang.row["reason"]


def test_a_trip_is_told_with_its_code_and_devices_and_one_that_only_notifies_is_not(q: Q) -> None:
    target(q, kinds=["trip"])
    worker = q.worker(devices=gpus(1000))
    q.call("set_task", task="quiet", notify_only=["stall"])
    q.submit(task="quiet")
    assert worker.take().trip(exit_in_s=5) == "notify"
    q.submit(gpus=1)
    claim = next(c for c in worker.claim())
    claim.trip(code=85)
    (row,) = told(q)
    data = row["body"]["data"]
    assert (data["code"], data["class"], data["devices"]) == (85, "fault", ["G0"])
    assert row["body"]["job_id"] == claim.job_id


def test_quarantines_of_devices_and_workers_are_told_whoever_makes_them(q: Q) -> None:
    target(q, kinds=["device_quarantined", "worker_quarantined"])
    worker = q.worker(devices=gpus(1000, 1000, 1000), slots=3)
    q.call("quarantine", device_uuid="G2", reason="sparks")
    q.call("quarantine", worker="w1", reason="smoke")
    q.call("unquarantine", worker="w1")
    q.submit(gpus=1)
    worker.claim()[0].trip(code=85)
    q.submit(gpus=1)
    (stubborn,) = worker.claim()
    q.call("displace_job", job_id=stubborn.job_id)
    q.live_on(400, worker)
    q.call("report_stuck", worker="w1", incarnation=worker.incarnation, evidence={"pid": 4})
    found = [(row["kind"], row["body"]["data"].get("device")) for row in told(q)]
    first, second = sorted({"G0", "G1"} - {None})
    assert found[0] == ("device_quarantined", "G2")
    assert found[1] == ("worker_quarantined", None)
    assert sorted(found[2:4]) == [("device_quarantined", first), ("device_quarantined", second)]
    assert found[4] == ("worker_quarantined", None)
    assert {row["body"]["worker"] for row in told(q)} == {"w1"}
    assert "reboot host" in told(q)[4]["reason"]


def fail_a_replica(fleet: Replicas, revision: int) -> None:
    """One of this revision fails, and its gang with it."""
    fleet.turn()
    gang = next(g["gang_id"] for g in gangs(fleet.q) if g["revision"] == revision)
    claim = fleet.of_gang(gang)[0]
    del fleet.claims[claim.job_id]
    claim.fail("no such model")
    fleet.turn()
    fleet.q.tick()


def test_a_crash_loop_and_an_update_that_halts_are_told_by_the_queue_of_the_service(q: Q) -> None:
    q.call("set_queue", name="other")
    for name in ("default", "other"):
        target(q, name, kinds=["crash_loop", "update_halted"], queue=name)
    fleet = Replicas.of_hosts(q, 2)
    put(q)
    fleet.settle(2)
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fail_a_replica(fleet, 2)
    assert kinds(q, "default") == ["update_halted"]
    for _ in range(3):
        q.live_on(60, *fleet.workers)
        fail_a_replica(fleet, 1)
    assert kinds(q, "default") == ["update_halted", "crash_loop"]
    body = told(q, "default")[1]["body"]
    assert (body["queue"], body["task"], body["data"]["service"]) == ("default", "serve", "chat")
    assert "no such model" in body["reason"] or "spent its 1 attempt" in body["reason"]
    assert kinds(q, "other") == []


def test_the_check_that_most_events_end_at_names_exactly_the_events_that_are_told(q: Q) -> None:
    body = q.value("select prosrc from pg_proc where proname = 'log_event'")
    named = q.value(
        "select array_agg(distinct event order by event) filter (where event <> '') "
        "from gangq.notification_kinds"
    )
    assert f"kind = any ('{{{','.join(named)}}}'::text[])" in body


def test_it_is_told_exactly_when_it_has_happened(q: Q) -> None:
    target(q)
    q.submit(max_attempts=1)
    claim = q.worker().take()
    with q.db.transaction(force_rollback=True):
        assert claim.fail() == "failed"
        assert kinds(q) == ["job_failed"]
    assert kinds(q) == []
    assert q.state(claim.job_id) == "running"


# Targets ----------------------------------------------------------------------------------------------------


def test_filters_choose_by_queue_submitter_and_task(q: Q) -> None:
    me = q.value("select gangq.caller()")
    for queue in ("lab.vision", "other"):
        q.call("set_queue", name=queue)
    target(q, "lab", queue="lab")
    target(q, "mine", submitter=me)
    target(q, "others", submitter="somebody")
    target(q, "train", task="train")
    target(q, "all")
    one = fail_one(q, queue="lab.vision")
    two = fail_one(q, queue="other", task="train")
    jobs = {
        name: [row["job_id"] for row in told(q, name)] for name in ("lab", "mine", "others", "train", "all")
    }
    assert jobs == {"lab": [one], "mine": [one, two], "others": [], "train": [two], "all": [one, two]}
    q.worker("w")
    q.call("quarantine", worker="w")
    assert [kinds(q, name)[-1:] for name in ("mine", "all")] == [["job_failed"], ["worker_quarantined"]]


def test_a_target_without_kinds_is_told_of_everything_that_its_filter_can_pass(q: Q) -> None:
    target(q, "all")
    target(q, "some", task="train")
    assert state_of(q, "all")["kinds"] == EVERYTHING
    found = ["batch_done", "crash_loop", "gang_failed", "job_failed", "trip", "update_halted"]
    assert state_of(q, "some")["kinds"] == found


def test_adding_it_again_changes_it_and_keeps_what_waits(q: Q) -> None:
    target(q)
    fail_one(q)
    target(q, kinds=["trip"])
    fail_one(q)
    assert (kinds(q), state_of(q)["kinds"]) == (["job_failed"], ["trip"])


def test_what_makes_no_sense_is_refused_with_what_does(untouched: Q) -> None:
    q = untouched
    with refused(INVALID, "no kind") as caught:
        target(q, kinds=["job_done"])
    assert "job_failed" in (caught.value.diag.message_hint or "")  # type: ignore[attr-defined]
    for wrong in ({"kinds": []}, {"name": None}, {"max_attempts": 0}, {"name": "-x"}, {"name": "a\nb"}):
        with refused(INVALID):
            target(q, **{"name": "x", **wrong})  # type: ignore[arg-type]
    with refused(INVALID, "has no queue, submitter or task"):
        target(q, kinds=["worker_quarantined"], task="train")
    with refused(MISSING):
        target(q, queue="nowhere")
    for verb in ("remove_notification", "test_notification", "retry_notifications", "fetch_notification"):
        with refused(MISSING, "notification target 'nobody' does not exist"):
            q.call(verb, target="nobody")


def test_there_are_100_targets_at_most(q: Q) -> None:
    for n in range(100):
        target(q, f"t{n}")
    with refused(WRONG_STATE, "100"):
        target(q, "one-more")
    with refused(WRONG_STATE):
        target(q, "t100")
    target(q, "t99", kinds=["trip"])


def test_what_is_removed_is_told_nothing_and_its_name_can_be_used_anew(q: Q) -> None:
    target(q)
    fail_one(q)
    q.call("remove_notification", target="oncall")
    target(q)
    assert (kinds(q), state_of(q)["delivered"]) == ([], 0)


# Delivery ---------------------------------------------------------------------------------------------------


def test_what_was_fetched_is_nobody_elses_until_its_lease_ends(q: Q) -> None:
    target(q)
    one, two = fail_one(q), fail_one(q)
    first, second = fetch(q, lease_s=30), fetch(q, lease_s=30)
    assert [first["body"]["job_id"], second["body"]["job_id"]] == [one, two]
    assert (first["delivery"], first["body"]["delivery"], first["body"]["target"]) == (1, 1, "oncall")
    nothing = fetch(q)
    assert (nothing["id"], nothing["next_in_s"]) == (None, pytest.approx(30))
    assert acknowledge(q, second) == "delivered"
    q.later(31)
    again = fetch(q)
    assert (again["id"], again["delivery"], again["body"]["id"]) == (first["id"], 2, first["id"])
    assert acknowledge(q, first, "too late") == "stale", "its second delivery is in progress"
    assert acknowledge(q, first) == "delivered", "it has arrived all the same"
    assert acknowledge(q, again) == "stale"
    assert (fetch(q)["id"], fetch(q)["next_in_s"]) == (None, None)
    assert (state_of(q)["delivered"], state_of(q)["waiting"]) == (2, 0)


def test_after_a_failure_it_waits_longer_each_time_and_all_others_for_a_moment(q: Q) -> None:
    target(q)
    for _ in range(2):
        fail_one(q)
    for nth in range(14):
        found = fetch(q)
        assert acknowledge(q, found, "HTTP 500") == "waiting"
        pause, longest = fetch(q)["next_in_s"], min(60, 2**nth)
        assert longest / 2 <= pause <= longest
        due = q.value("select due_at from gangq.outbox where id = %(id)s", id=found["id"])
        longest = min(3600, 5 * 2 ** (found["delivery"] - 1))
        assert longest / 2 <= (due - q.clock.now()).total_seconds() <= longest
        # Both in turn: whose backoff has lasted longest comes first.
        assert found["delivery"] == nth // 2 + 1
        q.later(3601)
    assert (state_of(q)["failures"], state_of(q)["error"]) == (14, "HTTP 500")
    acknowledge(q, fetch(q))
    assert (state_of(q)["failures"], state_of(q)["error"], state_of(q)["paused_until"]) == (0, None, None)


def test_a_clock_that_was_ahead_and_is_set_back_pauses_a_target_no_longer_than_a_failure_does(q: Q) -> None:
    target(q)
    q.later(400 * 86400)
    fail_one(q)
    acknowledge(q, fetch(q), "HTTP 500")
    q.later(-400 * 86400)
    made = q.one("test_notification", target="oncall")
    assert fetch(q)["id"] == made


def test_what_no_delivery_gets_across_is_given_up_with_the_reason_and_does_not_stop_the_others(q: Q) -> None:
    target(q, max_attempts=2)
    fail_one(q)
    poison = fetch(q)
    acknowledge(q, poison, "HTTP 400")
    q.later(61)
    fail_one(q)
    assert acknowledge(q, again := fetch(q), "HTTP 422") == "dead"
    assert again["id"] == poison["id"]
    q.later(61)
    assert acknowledge(q, fetch(q)) == "delivered"
    assert fetch(q)["next_in_s"] is None
    (dead,) = told(q)
    assert (dead["state"], dead["error"], dead["attempts"]) == ("dead", "HTTP 422", 2)
    found = state_of(q)
    assert (found["dead"], found["dead_error"], found["waiting"]) == (1, "HTTP 422", 0)
    assert q.one("retry_notifications", target="oncall") == 1
    assert acknowledge(q, fetch(q)) == "delivered"


def test_what_backs_off_is_tried_at_once_when_an_operator_says_so_and_a_delivery_is_left_alone(q: Q) -> None:
    target(q)
    for _ in range(2):
        fail_one(q)
    acknowledge(q, failed := fetch(q, lease_s=3600), "HTTP 500")
    q.later(61)
    waits, delivered = fetch(q, lease_s=3600), fetch(q, lease_s=3600)
    assert delivered["id"] == failed["id"], "the one that has failed before is being delivered"
    acknowledge(q, waits, "HTTP 500")
    assert fetch(q)["id"] is None
    assert q.one("retry_notifications", target="oncall") == 0, "none was given up"
    again = fetch(q)
    assert (again["id"], again["delivery"]) == (waits["id"], waits["delivery"] + 1)
    assert fetch(q)["id"] is None, "the other one is being delivered"
    assert [acknowledge(q, found) for found in (delivered, again)] == ["delivered"] * 2


def test_one_whose_runners_die_is_given_up_too(q: Q) -> None:
    target(q, max_attempts=2)
    fail_one(q)
    for _ in range(2):
        assert fetch(q, lease_s=10)["id"] is not None
        q.later(11)
    assert fetch(q)["id"] is None
    assert "never said" in state_of(q)["dead_error"]


def test_a_reason_is_cut_and_an_acknowledgement_of_nothing_changes_nothing(q: Q) -> None:
    target(q)
    fail_one(q)
    found = fetch(q)
    acknowledge(q, found, "x" * 10000)
    assert len(state_of(q)["error"]) < 600
    for id, delivery in ((found["id"] + 1, 1), (found["id"], 2), (found["id"], 0)):
        assert acknowledge(q, {"id": id, "delivery": delivery}) == "stale"
    assert len(told(q)) == 1
    for lease_s in (0, -1, 3601):
        with refused(INVALID):
            fetch(q, lease_s=lease_s)


def test_a_test_is_told_to_its_target_alone(q: Q) -> None:
    target(q)
    target(q, "other")
    made = q.one("test_notification", target="oncall")
    assert (fetch(q)["id"], fetch(q, "other")["id"]) == (made, None)


def test_whoever_listens_hears_of_what_waits(q: Q, dsn: str) -> None:
    target(q, kinds=["job_failed"])
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen gangq_notify")
        q.worker("w")
        q.call("quarantine", worker="w")
        fail_one(q)
        assert len([*listener.notifies(timeout=2, stop_after=1)]) == 1
        assert [*listener.notifies(timeout=0)] == []


# Bounded ----------------------------------------------------------------------------------------------------


def fill(q: Q, count: int, name: str = "oncall") -> None:
    q.sql(
        "insert into gangq.outbox (target_id, at, kind, body, due_at) "
        "select x.id, gangq.now(), 'test', '{}', gangq.now() "
        "from gangq.notification_targets x, generate_series(1, %(count)s) where x.name = %(name)s",
        count=count,
        name=name,
    )


def test_only_the_newest_are_kept_and_the_next_that_is_told_says_how_many_are_gone(q: Q) -> None:
    target(q)
    target(q, "other")
    fill(q, 30)
    fill(q, 5, "other")
    newest = [row["id"] for row in told(q)][20:]
    assert q.value("select gangq.trim_outbox(200, 10)") == 20
    assert [row["id"] for row in told(q)] == newest
    assert (state_of(q)["dropped"], state_of(q)["dropped_at"]) == (20, q.clock.now())
    assert len(told(q, "other")) == 5
    assert fetch(q)["body"]["dropped"] == 20
    (event,) = q.events("dropped")
    assert event["data"] == {"target": "oncall"}


def test_a_step_drops_its_most_of_all_targets_together(q: Q) -> None:
    for name in ("oncall", "other"):
        target(q, name)
        fill(q, 30, name)
    assert q.value("select gangq.trim_outbox(25, 10)") == 25
    assert [q.value("select gangq.trim_outbox(25, 10)") for _ in range(2)] == [15, 0]
    assert [len(told(q, name)) for name in ("oncall", "other")] == [10, 10]


def test_what_nobody_fetches_goes_after_a_week_in_a_tick(q: Q) -> None:
    target(q)
    fill(q, 3)
    q.later(6 * 86400)
    q.tick()
    assert len(told(q)) == 3
    q.later(2 * 86400)
    q.tick()
    assert (told(q), state_of(q)["dropped"]) == ([], 3)


def test_what_was_written_while_its_target_was_removed_is_forgotten(q: Q) -> None:
    target(q)
    fill(q, 3)
    q.sql("delete from gangq.notification_targets")
    q.later(601)
    q.tick()
    assert q.value("select count(*) from gangq.outbox") == 0


# What it costs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def looks_at_targets(q: Q, most: int) -> Iterator[None]:
    """How often what is called here looks into the tables of notifications, or writes there."""
    count = (
        "select coalesce(sum(seq_scan + coalesce(idx_scan, 0) + n_tup_ins), 0) from pg_stat_xact_user_tables "
        "where schemaname = 'gangq' and relname in ('outbox', 'notification_targets')"
    )
    with q.db.transaction():
        before = q.value(count)
        yield
        assert q.value(count) - before == most


@pytest.fixture
def busy(q: Q) -> Q:
    """A target that wants everything, and much that waits for it."""
    target(q)
    fill(q, 2000)
    return q


def test_a_job_that_succeeds_or_is_tried_again_looks_at_no_target(busy: Q) -> None:
    q = busy
    worker = q.worker(slots=8)
    q.submit(count=4)
    gang = q.submit_gang(2)
    with looks_at_targets(q, 0):
        claims = worker.claim()
        claims[0].complete()
        assert claims[1].fail() == "scheduled"
        claims[2].release()
    q.tick()
    with looks_at_targets(q, 0):
        for claim in worker.claim():
            claim.complete()
        assert gang.state == "done"


def buffers(q: Q, statement: str) -> int:
    with q.db.transaction(force_rollback=True):
        q.sql(statement)
    with q.db.transaction(force_rollback=True):
        plan = q.sql(f"explain (analyze, buffers, format json) {statement}")[0]["QUERY PLAN"][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_what_a_failure_costs_does_not_grow_with_what_waits_and_is_one_look_where_nobody_wants_it(
    q: Q,
) -> None:
    q.submit(max_attempts=1)
    claim = q.worker().take()
    statement = f"select gangq.fail({claim.job_id}, {claim.token})"
    without = buffers(q, statement)
    target(q, kinds=["trip"])
    assert buffers(q, statement) <= without + 2
    with q.db.transaction(force_rollback=True), looks_at_targets(q, 1):
        q.sql(statement)
    target(q)
    few = buffers(q, statement)
    assert without < few <= without + 60
    fill(q, 20000)
    assert buffers(q, statement) <= few + 10


@pytest.mark.own_database  # What other tests have deleted lies in front in the index until a vacuum.
def test_to_fetch_and_to_acknowledge_read_little_however_much_waits(busy: Q) -> None:
    q = busy
    fill(q, 20000)
    q.sql("analyze gangq.outbox")
    assert buffers(q, "select gangq.fetch_notification('oncall')") <= 60
    found = fetch(q)
    named = f"'oncall', {found['id']}, {found['delivery']}"
    assert buffers(q, f"select gangq.acknowledge_notification({named})") <= 40
    assert buffers(q, f"select gangq.acknowledge_notification({named}, 'HTTP 500')") <= 60


# Who may ----------------------------------------------------------------------------------------------------


def test_only_an_admin_says_who_is_told_and_a_notifier_delivers_and_reads_nothing_else(q: Q) -> None:
    target(q)
    fail_one(q)
    with q.db.transaction(force_rollback=True):
        q.sql("create role notifier_test; grant gangq_notifier to notifier_test")
        q.sql("set local session authorization notifier_test")
        found = fetch(q)
        assert found["body"]["kind"] == "job_failed"
        assert acknowledge(q, found) == "delivered"
        for statement in (
            "select gangq.add_notification('x')",
            "select gangq.remove_notification('oncall')",
            "select gangq.test_notification('oncall')",
            "select gangq.submit('x')",
            "select * from gangq.jobs",
            "select * from gangq.undelivered",
            "select * from gangq.outbox",
            "select * from gangq.notification_targets",
        ):
            with refused(NOT_ALLOWED), q.db.transaction():
                q.sql(statement)


def test_a_viewer_sees_how_far_each_target_is_and_no_error_of_a_job(q: Q) -> None:
    target(q)
    fail_one(q)
    with q.db.transaction(force_rollback=True):
        q.sql("set local role gangq_viewer")
        assert [row["body"] for row in told(q)] == [None]
        assert state_of(q)["waiting"] == 1


def test_what_a_body_holds_is_bounded_and_has_no_traceback(q: Q) -> None:
    target(q)
    q.submit(max_attempts=1)
    claim = q.worker().take()
    error = {
        "type": "E",
        "message": "m" * 100000,
        "traceback": "secret",
        "log_tail": "secret",
        "x": {"y": "z" * 9999},
    }
    q.one("fail", job_id=claim.job_id, token=claim.token, error=error)
    (row,) = told(q)
    assert "secret" not in str(row["body"])
    assert len(str(row["body"])) < 12000


def test_a_repeated_failover_gives_no_number_twice(q: Q) -> None:
    """The number tells receivers what they have had: it is shifted as all ids are, by timeline."""
    target(q)
    base = q.value("select base from gangq.id_base()")
    q.sql("update gangq.sequence_base set base = base + 1000000")
    assert q.one("test_notification", target="oncall") > base + 1000000
    fail_one(q)
    assert told(q)[1]["id"] > base + 1000000
    assert q.clock.now() - told(q)[1]["at"] < timedelta(seconds=1)
