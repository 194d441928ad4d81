"""The clock of the database was an hour ahead and is set back: nothing waits until it is there again."""

from __future__ import annotations

import uuid

import pytest

from sql.drive import Q, Worker, gpus
from sql.services import Replicas, put, service
from sql.test_progress import Team

HOUR = 3600.0


def ahead(q: Q, *workers: Worker) -> None:
    """The clock jumps ahead."""
    q.tick()
    q.later(HOUR)
    q.live_on(1, *workers)


def set_back(q: Q) -> None:
    """A tick while the clock is ahead, and one when it is not any more."""
    q.tick()
    q.later(-HOUR)
    q.tick()


def test_the_lease_of_a_worker_that_is_not_heard_again_ends(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take()
    ahead(q, worker)
    set_back(q)
    q.live_on(110)
    assert q.state(job) == "running", "it has a whole lease to be heard"
    q.live_on(20)
    assert q.state(job) == "pending"


def test_after_a_restart_too_and_a_lease_renewed_since_stays_as_it_is(q: Q) -> None:
    """A failover to a host with another clock is the usual case."""
    q.submit(count=2)
    lost, heard = q.workers(2)
    lost.take()
    heard.take()
    ahead(q, lost, heard)
    q.tick()
    q.later(-HOUR)
    q.sql("update gangq.tick_state set server_started_at = server_started_at - interval '1 day'")
    heard.beat()
    renewed = "select * from gangq.leases where incarnation = %(id)s"
    before = q.sql(renewed, id=heard.incarnation)
    q.tick()
    assert q.events("outage")[-1]["reason"] == "the server restarted"
    assert q.sql(renewed, id=heard.incarnation) == before
    q.live_on(130, heard)
    assert (lost.row["state"], heard.row["state"]) == ("dead", "live")


def test_a_flag_goes_when_its_worker_is_heard_again(q: Q) -> None:
    q.submit()
    worker = q.worker()
    worker.take()
    ahead(q, worker)
    q.live_on(40)
    assert worker.row["flagged_at"] is not None
    set_back(q)
    assert worker.row["flagged_at"] is not None
    q.live_on(10, worker)
    assert worker.row["flagged_at"] is None


def test_what_never_confirms_a_stop_is_forced(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take()
    ahead(q, worker)
    q.call("cancel", job_ids=[job])
    set_back(q)
    q.live_on(180, worker)
    assert q.state(job) == "cancelled"


def test_a_reservation_that_nobody_claims_ends(q: Q) -> None:
    workers = q.workers(2, slots=1)
    ahead(q, *workers)
    gang = q.submit_gang(2, claim_deadline_s=30)
    set_back(q)
    assert gang.state == "reserved"
    q.live_on(50, *workers)
    assert len(q.events("rollback")) == 1


@pytest.mark.parametrize("waited", [False, True])
def test_a_gang_that_has_backed_off_is_placed(q: Q, waited: bool) -> None:
    workers = q.workers(2, slots=1)
    ahead(q, *workers)
    gang = q.submit_gang(2, claim_deadline_s=5)
    q.tick()
    q.live_on(6, *workers, step=6)
    backoff = gang.row["not_before"] - q.clock.now()
    if waited:
        # Its backoff was over, and it waited for room.
        q.call("cordon", worker="w1")
        q.live_on(60, *workers)
    set_back(q)
    left = gang.row["not_before"] - q.clock.now()
    assert left.total_seconds() < 0 if waited else left == backoff
    if waited:
        q.call("uncordon", worker="w1")
    q.live_on(60, *workers)
    assert len(q.events("reserve", gang_id=gang.id)) == 2


def test_what_people_gave_as_a_moment_stays(q: Q) -> None:
    due = q.value("select gangq.now() + interval '3 hours'")
    job, gang = q.submit(due_at=due), q.submit_gang(1, due_at=due)
    before = gang.live
    ahead(q)
    set_back(q)
    assert q.job(job)["due_at"] == due
    assert gang.live == before


@pytest.mark.parametrize("how", ["fail", "trip"])
def test_a_job_waits_for_its_backoff_or_for_its_process_and_no_longer(q: Q, how: str) -> None:
    a, b = q.submit(gpus=1, max_attempts=5), q.submit(gpus=1)
    worker = q.worker(devices=gpus(1, 1))
    ahead(q, worker)
    claims = worker.claim()
    if how == "fail":
        claims[0].fail(retry_in_s=300)
    else:
        claims[0].trip(exit_in_s=300)
    due = q.job(a)["due_at"] - q.clock.now()
    set_back(q)
    assert q.job(a)["due_at"] - q.clock.now() == due
    if how == "trip":
        assert worker.row["exits_at"] == q.job(a)["due_at"], "report_dead finds the job by that"
    q.live_on(310, worker) if how == "fail" else q.live_on(310)
    assert q.state(a) == "pending"
    if how == "trip":
        assert q.state(b) == "pending"
        assert q.sql("select * from gangq.device_holds") == []


@pytest.mark.parametrize("gang", [False, True])
def test_a_process_that_tripped_since_the_clock_was_set_back_is_waited_for_in_full(q: Q, gang: bool) -> None:
    """It is gone before the clock is there again, so its end looks like one from before."""
    worker = q.worker(devices=gpus(1))
    ahead(q, worker)
    if gang:
        (claim,) = q.submit_gang(1, gpus=1).start(worker)
    else:
        q.submit(gpus=1)
        claim = worker.take()
    q.sql(
        "update gangq.incarnations set passed_over_until = gangq.now()"
    )  # which is moved, beside what is not
    q.tick()
    q.later(-HOUR)
    worker.beat()
    claim.trip(exit_in_s=300)
    waits = (
        "select (select exits_at from gangq.incarnations), (select until from gangq.device_holds), "
        "(select due_at from gangq.live_jobs), (select not_before from gangq.live_gangs)"
    )
    before = q.sql(waits)
    q.tick()
    assert q.sql(waits) == before


def test_a_worker_that_was_passed_over_gets_work_again(q: Q) -> None:
    workers = q.workers(2, slots=1)
    ahead(q, *workers)
    gang = q.submit_gang(2, claim_deadline_s=5)
    q.tick()
    q.live_on(6, *workers, step=6)
    assert workers[0].row["passed_over_until"] > q.clock.now()
    gang.cancel()
    set_back(q)
    q.live_on(200, *workers)
    assert workers[0].row["passed_over_until"] < q.clock.now()


def test_a_gang_that_stands_still_is_drained(q: Q) -> None:
    team = Team(q)
    q.later(HOUR)
    team.beats(*[{"step": 1}] * 3)
    set_back(q)
    team.go_on(1260, *[{"step": 1}] * 3)
    assert team.gang.state == "draining"


def test_the_time_in_which_a_gang_was_not_eligible_counts_on(q: Q) -> None:
    ahead(q)
    q.call("set_queue", name="default", paused=True)
    gang = q.submit_gang(1, timeout_s=100, timeout_style="hard")
    set_back(q)
    for _ in range(15):
        q.live_on(10)
    q.call("set_queue", name="default", paused=False)
    q.live_on(50)
    assert gang.state == "blocked"
    q.live_on(60)
    assert gang.state == "failed"


def test_a_gang_that_began_to_wait_while_the_clock_was_ahead_times_out(q: Q) -> None:
    ahead(q)
    gang = q.submit_gang(1, timeout_s=100, timeout_style="hard", wait_for_hardware=True)
    set_back(q)
    q.live_on(90)
    assert gang.state == "blocked"
    q.live_on(20)
    assert gang.state == "failed"


def test_a_service_whose_gang_failed_makes_the_next_one(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 1)
    put(q)
    ahead(q, *fleet.workers)
    fleet.settle(3)
    (claim,) = fleet.claims.values()
    fleet.claims.clear()
    claim.fail()
    set_back(q)
    wait = (service(q)["next_try_at"] - q.clock.now()).total_seconds()
    assert 0 < wait <= 2
    q.live_on(5, *fleet.workers)
    fleet.settle(3)
    assert len(fleet.claims) == 1


def test_a_submission_that_is_repeated_within_an_hour_is_the_same(q: Q) -> None:
    request_id = uuid.uuid4()
    job = q.submit(request_id=request_id)
    ahead(q)
    set_back(q)
    assert q.submit(request_id=request_id) == job


@pytest.mark.parametrize("ends", ["before the tick", "after it"])
def test_a_key_stands_as_long_as_was_asked_for(q: Q, ends: str) -> None:
    jobs = []

    def existed(key: str, keep_s: float) -> bool:
        row = q.one("submit_unique", unique_key=key, task="work", keep_s=keep_s)
        jobs.append(row["job_id"])
        if ends == "before the tick":
            q.call("cancel", job_ids=jobs)
        return bool(row["existed"])

    ahead(q)
    assert not existed("before", 600)
    q.tick()
    q.later(-HOUR)
    assert not existed("since", 2 * HOUR)
    q.tick()
    q.call("cancel", job_ids=jobs)
    q.live_on(590, step=60)
    assert existed("before", 600)
    q.live_on(20)
    assert not existed("before", 600)
    q.live_on(2 * HOUR - 650, step=600)
    assert existed("since", 1)


def test_a_notification_that_is_not_delivered_yet_is_given_out(q: Q) -> None:
    q.call("add_notification", target="oncall")
    ahead(q)
    q.call("test_notification", target="oncall")
    set_back(q)
    assert q.one("fetch_notification", target="oncall")["id"] is not None


def test_a_service_goes_back_to_the_revision_that_was_good_last(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 1)
    ahead(q, *fleet.workers)
    put(q, version="1")
    fleet.settle(3)
    set_back(q)
    for version in ("2", "3"):
        put(q, task=None, version=version)
        fleet.settle(8)
    assert service(q)["good_revision"] == 3
    assert q.one("roll_back_service", name="chat") == 2


def test_what_is_stored_at_the_very_moment_stays_as_it_is(q: Q) -> None:
    worker = q.worker()
    ahead(q, worker)
    q.tick()
    q.later(-HOUR)
    worker.beat()
    # By another session, after this tick has read the clock.
    q.sql("update gangq.leases set renewed_at = gangq.now() + interval '0.9 s'")
    before = q.sql("select * from gangq.leases")
    q.tick()
    assert q.sql("select * from gangq.leases") == before


STAYS = {
    # What people gave, or what only says when something was.
    "batches_table": "submitted_at finished_at",
    "beat_gaps": "updated_at",
    "checkpoints": "saved_at",
    "cordons": "since deadline",
    "counters": "changed_at",
    "device_holds": "since",
    "device_readings": "at",
    "incarnations": "registered_at worked_at ended_at",
    "limit_keys": "made_at",
    "live_gangs": "submitted_at",
    "live_jobs": "submitted_at finished_at",
    "migrations": "applied_at",
    "notification_targets": "created_at delivered_at dropped_at",
    "outbox": "at dead_at",
    "queues_table": "paused_until created_at",
    "retried": "finished_at",
    "runtimes": "updated_at",
    "scaling_table": "scaled_at",
    # Its due times are of the calendar, and none is run twice.
    "schedules_table": "set_at counts_from after_at due_at planned_at paused_at paused_until last_due last_at "
    "passed_over undeclared_at",
    "service_gangs_table": "made_at",
    "service_revisions": "set_at",
    "services_table": "set_at undeclared_at",
    "sleepers": "since",
    "task_options": "declared_at",
    "task_pauses": "since until",
}
SELF_HEALING = {
    # One that is too far ahead counts as over where it is read, or the next tick or pass sets it anew.
    "decider": "until decided_at",
    "limit_keys": "full_at",
    "notification_targets": "paused_until",
    "places": "ends_by until",
    "plans": "starts_at",
    "queues_table": "full_at",
    "tick_state": "last_at server_started_at outage_ended_at partitions_checked_at judged_at interrupted_at "
    "counted_from",
}


def stored(q: Q) -> set[tuple[str, str]]:
    """The columns with a moment, by table; history is partitioned, and stays."""
    rows = q.sql(
        "select c.relname, a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid "
        "where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'r' and not c.relispartition "
        "and a.atttypid = 'timestamptz'::regtype and not a.attisdropped"
    )
    return {(row["relname"], row["attname"]) for row in rows}


def listed(columns: dict[str, str]) -> set[tuple[str, str]]:
    return {(table, column) for table, names in columns.items() for column in names.split()}


def later_than(q: Q, seconds: float) -> set[tuple[str, str]]:
    """Those that `gangq.move_back` moves, with a moment later than this many seconds from now."""
    return {
        (table, column)
        for table, column in stored(q) - listed(STAYS) - listed(SELF_HEALING)
        if q.value(
            f"select exists (select from gangq.{table} where {column} > "
            "gangq.now() + make_interval(secs => %(seconds)s))",
            seconds=seconds,
        )
    }


def test_no_moment_of_what_runs_or_waits_stays_ahead(q: Q) -> None:
    """A new column belongs to `gangq.move_back`, to `STAYS` or to `SELF_HEALING`."""
    q.later(HOUR)
    team = Team(q, failure_policy="restart_member", checkpoint_mode="each")
    team.beats(*[{"step": 1}] * 3)
    team.claims[1].fail()
    fleet = Replicas(q, *(q.worker(f"r{n}", host=f"node{n}", slots=2, cpus=2) for n in range(2)))
    put(q, replicas=1, linger_s=60, options={"max_replicas": 3, "target_load": 1.0, "up_after_s": 100})
    fleet.settle(5)
    put(q, "weak", replicas=1)
    fleet.settle(5)
    replica, weak = fleet.claims.values()
    weak.fail()
    q.call("report_load", job_id=replica.job_id, token=replica.token, load=2.0)
    tripping = q.worker("tripping", devices=gpus(1))
    q.submit(gpus=1)
    tripping.take().trip(exit_in_s=300)
    q.submit_gang(2, claim_deadline_s=300)
    q.submit_gang(9, wait_for_hardware=True)
    q.tick()
    q.call("cancel", gang_ids=[team.gang.id])
    q.call("submit_unique", unique_key="k", task="work", keep_s=600)
    q.call("add_notification", target="oncall")
    q.call("test_notification", target="oncall")
    # What takes longer to come about, or comes about otherwise in tests of its own.
    q.sql("update gangq.progress set lags_since = gangq.now() where beat_at is not null")
    q.sql(
        "update gangq.incarnations set flagged_at = gangq.now(), passed_over_until = gangq.now() + interval '60 s'"
    )
    q.sql(
        "update gangq.service_gangs_table set stop_at = gangq.now() + interval '600 s' where service = 'chat'"
    )
    q.sql(
        "update gangq.live_gangs set missing_since = gangq.now(), not_before = gangq.now() + interval '60 s' "
        "where service is not null and state = 'running'"
    )
    assert listed(STAYS) | listed(SELF_HEALING) <= stored(q)
    moved = stored(q) - listed(STAYS) - listed(SELF_HEALING)
    assert moved - later_than(q, -HOUR / 2) == set()
    set_back(q)
    assert later_than(q, HOUR / 2) == set()
    q.sql("update gangq.live_gangs set missing_since = null where service is not null")  # It lacks none.
