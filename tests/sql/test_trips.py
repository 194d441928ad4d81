"""A watchdog acts: what becomes of the job, and of others on the same worker, host and gang."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import ENDED, INVALID, MISSING, STALE, Claim, Q, Worker, gpus, refused
from sql.epochs import reserve, run, submit_roles
from sql.tripped import health, running, tripping

# What becomes of the job ------------------------------------------------------------------------------------


def test_work_proven_dead_is_pending_at_once_and_its_worker_lives_on(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    assert claim.trip(75, "8100 s") == "pending"
    job = q.job(claim.job_id)
    assert (job["state"], job["trips"], job["attempts"], job["crashes"]) == ("pending", 1, 0, 0)
    assert job["error"] == {"type": "Stalled", "message": "8100 s", "code": 75}
    assert q.sql("select state, health from gangq.devices") == [{"state": "free", "health": "ok"}]
    (worker,) = q.sql("select * from gangq.workers")
    assert (worker["state"], worker["exits_at"], worker["exit_code"]) == ("live", None, None)
    assert Worker(q, "w1", {"incarnation": claim.incarnation}).take().job_id == claim.job_id


def test_when_the_whole_process_goes_its_incarnation_ends_and_the_job_waits_for_it_to_be_gone(q: Q) -> None:
    claim = running(q)
    q.sql("update gangq.incarnations set model = 'llama'")
    q.submit_gang(1)
    assert claim.trip(exit_in_s=5) == "scheduled"
    (row,) = q.sql("select * from gangq.workers")
    assert (row["state"], row["exit_code"], row["model"]) == ("dead", 76, None)
    assert row["exits_at"] == q.clock.now() + (row["exits_at"] - row["ended_at"])
    assert (row["exits_at"] - row["ended_at"]).total_seconds() == 5
    job = q.job(claim.job_id)
    assert (job["state"], job["due_at"], job["trips"], job["attempts"]) == (
        "scheduled",
        row["exits_at"],
        1,
        0,
    )
    assert q.sql("select * from gangq.capacity") == [], "it stops counting at once"
    assert q.value("select gangq.candidates(gangq.now())") == []
    other = q.worker("w2")
    q.later(4.9)
    q.tick()
    assert [c["gang_id"] for c in other.claim()] == [1], "the gang found the worker that is left"
    assert q.state(claim.job_id) == "scheduled"
    q.later(0.1)
    q.tick()
    assert tripping(q, claim.job_id, "w3")["attempt"] == 1


def test_the_dying_process_may_say_nothing_more(q: Q) -> None:
    claim = running(q)
    claim.trip(exit_in_s=5)
    worker = Worker(q, "w1", {"incarnation": claim.incarnation})
    with refused(ENDED):
        worker.beat(claim)
    with refused(ENDED):
        worker.claim()
    with refused(STALE):
        claim.complete()


def test_proof_of_death_makes_the_job_pending_at_once(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=300)
    worker = Worker(q, "w1", {"incarnation": claim.incarnation})
    (left,) = q.call("unproven", worker="w1")
    assert (left["incarnation"], left["host"], left["exit_code"]) == (claim.incarnation, "host-w1", 76)
    assert worker.report_dead() == 1
    assert q.state(claim.job_id) == "pending"
    assert q.call("unproven", worker="w1") == []
    assert health(q) == {"G0": "ok"}
    assert worker.report_dead() == 0, "repeats are harmless"
    assert len(q.events("dead")) == 1
    assert q.job(claim.job_id)["crashes"] == 0, "a trip is charged once"


def test_proof_of_death_wakes_who_sleeps(q: Q, dsn: str) -> None:
    claim = running(q)
    claim.trip(exit_in_s=60)
    sleeper = q.worker("w2")
    assert sleeper.claim(sleep=True) == []
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    assert q.sql("select * from gangq.sleepers") == []


def test_a_trip_wakes_who_sleeps_or_the_tick_that_knows_when_it_is_due(q: Q, dsn: str) -> None:
    q.submit(count=2)
    one, two = (q.worker(name).take() for name in ("w1", "w2"))
    assert q.worker("w3").claim(sleep=True) == []
    one.trip()
    assert q.sql("select * from gangq.sleepers") == []
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_tick")
        two.trip(exit_in_s=0.5)
        assert [n.channel for n in ear.notifies(timeout=2, stop_after=1)] == ["gangq_tick"]
    assert q.tick()["next_in_s"] == pytest.approx(0.5, abs=0.01)


def test_the_next_start_of_a_worker_finds_every_unproven_one_of_its_name_and_of_no_other(q: Q) -> None:
    for name in ("w1", "w1", "w2"):
        q.submit(max_trips=9)
        q.worker(name, boot_id="boot", pid=7, identity={"start": 5}).take().trip(exit_in_s=1)
        q.later(2)
        q.tick()
    found = q.call("unproven", worker="w1")
    assert [(r["boot_id"], r["pid"], r["identity"]) for r in found] == [("boot", 7, {"start": 5})] * 2


@pytest.mark.parametrize("max_trips", [1, 3])
def test_exactly_as_many_trips_as_the_cap_are_forgiven(q: Q, max_trips: int) -> None:
    job = q.submit(max_trips=max_trips, max_attempts=1)
    worker = q.worker()
    for n in range(1, max_trips + 1):
        assert worker.take().trip() == "pending"
        assert (q.job(job)["trips"], q.job(job)["attempts"]) == (n, 0)
    last = worker.take()
    assert last.trip(message="once more") == "failed"
    ended = q.job(job)
    assert (ended["state"], ended["trips"], ended["error"]["message"]) == (
        "failed",
        max_trips + 1,
        "once more",
    )
    assert last.trip() == "repeated"
    assert [r["outcome"] for r in q.sql("select outcome from gangq.trips order by at, trips")] == (
        ["pending"] * max_trips + ["failed"]
    )


def test_the_cap_is_read_when_it_trips(q: Q) -> None:
    job = q.submit(max_trips=3)
    worker = q.worker()
    worker.take().trip()
    claim = worker.take()
    q.sql("update gangq.live_jobs set max_trips = 1")
    assert claim.trip() == "failed"
    assert q.state(job) == "failed"


def test_at_the_cap_the_process_still_goes_and_its_devices_are_withheld(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1, max_trips=1)
    claim.trip(exit_in_s=0)
    q.settle()
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    again = tripping(q, claim.job_id, "w1", devices=gpus(8000))
    assert again.trip(exit_in_s=5) == "failed"
    assert (q.state(claim.job_id), health(q)) == ("failed", {"G0": "exiting"})
    assert Worker(q, "w1", {"incarnation": again.incarnation}).report_dead() == 0
    assert health(q) == {"G0": "ok"}


def test_a_tripped_job_goes_to_the_front_of_its_priority_and_never_above_it(q: Q) -> None:
    worker = q.worker()
    older = q.submit(due_at=q.value("select gangq.now() + interval '1 s'"))
    job = q.submit()
    claim = worker.take()
    assert claim.job_id == job
    urgent, later = q.submit(priority=1), q.submit()
    q.later(2)
    q.tick()
    claim.trip()
    order = []
    for _ in range(4):
        claim = worker.take()
        order.append(claim.job_id)
        claim.complete()
    assert order == [urgent, job, older, later]


def test_it_keeps_the_front_also_when_it_had_to_wait_for_its_process(q: Q) -> None:
    older = q.submit(due_at=q.value("select gangq.now() + interval '1 s'"))
    claim = running(q)
    claim.trip(exit_in_s=5)
    q.later(6)
    q.tick()
    worker = q.worker("w2", prefetch=2)
    assert [c.job_id for c in worker.claim()] == [claim.job_id, older]


def test_a_trip_repeated_with_its_token_is_harmless(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    assert claim.trip(exit_in_s=5) == "scheduled"
    before = q.sql("select * from gangq.live_jobs"), q.sql("select * from gangq.incarnations")
    assert claim.trip(exit_in_s=5) == "repeated"
    assert (q.sql("select * from gangq.live_jobs"), q.sql("select * from gangq.incarnations")) == before
    assert len(q.events("trip")) == 1
    q.later(6)
    q.tick()
    tripping(q, claim.job_id, "w2", devices=gpus(8000, prefix="H"))
    assert claim.trip(exit_in_s=5) == "repeated", "also when another worker has the job"
    assert q.state(claim.job_id) == "running"


def test_a_trip_of_an_earlier_attempt_makes_that_of_a_later_one_no_repetition(q: Q) -> None:
    claim = running(q)
    claim.trip()
    again = tripping(q, claim.job_id, "w2")
    again.release()
    with refused(STALE):
        again.trip(exit_in_s=5)


@pytest.mark.parametrize("ending", ["complete", "fail", "release", "reaped"])
def test_a_trip_after_another_end_of_the_attempt_is_refused_and_ends_no_worker(q: Q, ending: str) -> None:
    claim = running(q)
    if ending == "reaped":
        q.live_on(130)
    else:
        getattr(claim, ending)()
    state = q.sql("select state, exits_at from gangq.incarnations")
    with refused(STALE):
        claim.trip(exit_in_s=5)
    assert q.sql("select state, exits_at from gangq.incarnations") == state
    assert q.events("trip") == []


@pytest.mark.parametrize(
    ("wrong", "sqlstate"),
    [
        ({"token": 5}, STALE),
        ({"token": None}, STALE),
        ({"job_id": 4711}, MISSING),
        ({"incarnation": 99}, INVALID),
        ({"incarnation": None}, INVALID),
        ({"code": 1}, INVALID),
        ({"code": 77}, INVALID),
        ({"code": None}, INVALID),
        ({"class": "heath"}, INVALID),
        ({"exit_in_s": -1}, INVALID),
        ({"exit_in_s": 601}, INVALID),
        ({"exit_in_s": "nan"}, INVALID),
        ({"error": None}, INVALID),
        ({"error": []}, INVALID),
    ],
)
def test_a_trip_that_makes_no_sense_is_refused_and_changes_nothing(
    q: Q, wrong: dict[str, Any], sqlstate: str
) -> None:
    claim = running(q)
    named = {
        "incarnation": claim.incarnation,
        "job_id": claim.job_id,
        "token": claim.token,
        "code": 76,
        "error": {"type": "Stalled"},
        **wrong,
    }
    with refused(sqlstate):
        q.call("trip", **named)
    assert (q.state(claim.job_id), q.sql("select * from gangq.evidence")) == ("running", [])


def test_a_job_told_to_cancel_that_trips_is_cancelled_uncharged_by_the_trip(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    q.call("cancel", job_ids=[claim.job_id])
    assert claim.trip(exit_in_s=5) == "cancelled"
    assert (q.job(claim.job_id)["state"], q.job(claim.job_id)["trips"]) == ("cancelled", 0)
    assert health(q) == {"G0": "exiting"}, "told to stop is not stopped"


@pytest.mark.parametrize("stops", [19, 20])
def test_the_event_of_a_job_told_to_stop_says_what_became_of_it(q: Q, stops: int) -> None:
    claim = running(q)
    q.call("configure", max_stops=20)
    q.sql("update gangq.live_jobs set stops = %(stops)s", stops=stops)
    q.call("displace_job", job_id=claim.job_id)
    outcome = claim.trip(exit_in_s=None)
    assert outcome == ("pending" if stops < 20 else "cancelled")
    (event,) = q.events("trip")
    assert (event["data"]["outcome"], event["data"]["trips"]) == (outcome, 0)
    assert q.state(claim.job_id) == outcome


def test_the_event_of_a_replacement_that_never_began_counts_no_trip(q: Q) -> None:
    """Its gang is charged for one that never started."""
    gang, workers = submit_roles(q, ("worker", 3, 3), policy="restart_member"), q.workers(3)
    claims = run(gang, workers)
    for claim in claims[1:]:
        claim.fail()
    gang.skip_backoff()
    assert reserve(gang, [claim.job_id for claim in claims[1:]], workers[1:])
    q.later(1)
    again = workers[1].take()
    again.trip(exit_in_s=None)
    (event,) = q.events("trip")
    assert event["data"]["trips"] == q.job(again.job_id)["trips"] == 0


def test_the_event_says_what_happened_and_the_evidence_lies_apart(q: Q) -> None:
    claim = running(q, devices=gpus(8000, 9000), gpus=2)
    claim.trip(78, "idle for 300 s", exit_in_s=5, devices=["G1"], evidence={"stack": "File x"})
    (event,) = q.events("trip")
    assert (event["reason"], event["worker"], event["token"]) == ("Stalled", "w1", claim.token)
    assert event["data"] == {
        "code": 78,
        "class": "health",
        "message": "idle for 300 s",
        "task": "work",
        "queue": "default",
        "host": "host-w1",
        "worker": "w1",
        "rank": None,
        "devices": ["G0", "G1"],
        "blamed": ["G1"],
        "application": False,
        "charged": True,
        "trips": 1,
        "outcome": "scheduled",
        "exit_in_s": 5,
    }
    (kept,) = q.sql("select * from gangq.evidence")
    assert (kept["kind"], kept["job_id"], kept["token"], kept["data"]) == (
        "trip",
        claim.job_id,
        claim.token,
        {"stack": "File x"},
    )
    assert kept["at"] == event["at"]
    (row,) = q.sql("select * from gangq.trips")
    assert (row["code"], row["class"], row["outcome"], row["devices"]) == (
        78,
        "health",
        "scheduled",
        ["G0", "G1"],
    )
    assert (row["evidence"], row["poison"], row["trips"]) == ({"stack": "File x"}, False, 1)


def test_evidence_without_end_does_not_keep_a_trip_from_happening(q: Q) -> None:
    claim = running(q)
    assert claim.trip(evidence={str(n): "ab" * 1000 for n in range(2500)}) == "pending"
    assert "cut" in q.value("select data from gangq.evidence")
    assert tripping(q, claim.job_id, "w2").trip(evidence=None) == "pending"


def test_a_viewer_sees_the_trip_and_not_the_evidence(q: Q) -> None:
    claim = running(q)
    claim.suspect(reason="silent", stack="hunter2")
    claim.trip(evidence={"stack": "hunter2"})
    with q.db.transaction(force_rollback=True):
        q.sql("create role viewer_test; grant gangq_viewer to viewer_test")
        q.sql("set local session authorization viewer_test")
        (row,) = q.sql("select * from gangq.trips")
        assert (row["code"], row["evidence"]) == (76, None)
        assert "hunter2" not in str(q.sql("select * from gangq.events"))
        with refused("42501"):
            q.sql("select * from gangq.evidence")


def test_the_view_of_trips_survives_what_other_languages_put_into_an_error(q: Q) -> None:
    claim = running(q)
    q.one(
        "requeue",
        job_id=claim.job_id,
        token=claim.token,
        error={"code": "E99999999999", "devices": 7, "rank": [], "type": "Theirs"},
    )
    (row,) = q.sql("select * from gangq.trips")
    assert (row["code"], row["devices"], row["rank"], row["reason"]) == (None, [], None, "Theirs")
    assert health(q) == {}


# Others on the same worker, host and gang -------------------------------------------------------------------


def test_no_other_worker_of_the_host_is_touched(q: Q) -> None:
    q.submit(count=2)
    one, other = q.worker("lane-1", host="box"), q.worker("lane-2", host="box")
    tripped, healthy = one.take(), other.take()
    tripped.trip(exit_in_s=0)
    q.settle()
    assert other.beat(healthy) == {healthy.job_id: "continue"}
    q.live_on(200, other)
    assert (healthy.live["token"], other.row["state"], other.row["flagged_at"]) == (
        healthy.token,
        "live",
        None,
    )
    assert healthy.complete() == "done"


def test_prefetched_jobs_that_had_not_begun_go_back_at_once_and_uncharged(q: Q) -> None:
    ids = q.submit(count=3)
    claims = q.worker(prefetch=3).claim()
    assert len(claims) == 3
    assert claims[0].trip(exit_in_s=5) == "scheduled"
    for job in ids[1:]:
        row = q.job(job)
        assert (row["state"], row["attempts"]) == ("pending", 0)
        assert (row["crashes"], row["trips"], row["stops"]) == (0, 0, 0)
        assert "over another job (76)" in q.events("release", job_id=job)[0]["reason"]


def one_after_the_other(q: Q) -> tuple[Worker, Claim, Claim]:
    """Two prefetched jobs: the first was claimed before the second, which comes before it by priority."""
    worker = q.worker(prefetch=2)
    q.submit(priority=-1)
    first = worker.take()
    q.submit()
    return worker, first, worker.take()


def test_the_prefetched_job_that_was_claimed_first_is_the_one_that_runs(q: Q) -> None:
    _, first, second = one_after_the_other(q)
    assert first.trip(exit_in_s=5) == "scheduled"
    assert q.state(second.job_id) == "pending", "at once: it had not begun"


def test_of_prefetched_jobs_the_one_that_was_claimed_first_is_charged_a_crash(q: Q) -> None:
    worker, first, second = one_after_the_other(q)
    assert worker.report_dead() == 2
    charged = [(q.job(c.job_id)["crashes"], q.job(c.job_id)["stops"]) for c in (first, second)]
    assert charged == [(1, 0), (0, 0)]


def test_of_placed_jobs_on_a_worker_that_prefetches_each_is_charged_a_crash(q: Q) -> None:
    jobs = q.submit(count=2, gpus=1)
    worker = q.worker(slots=2, prefetch=2, devices=gpus(1, 1))
    assert len(worker.claim()) == 2
    worker.report_dead()
    assert [q.job(job)["crashes"] for job in jobs] == [1, 1]


def test_the_second_of_two_prefetched_jobs_may_trip_before_the_end_of_the_first_is_reported(q: Q) -> None:
    _, first, second = one_after_the_other(q)
    assert second.trip(exit_in_s=5) == "scheduled"
    assert (q.state(first.job_id), q.job(second.job_id)["trips"]) == ("running", 1)


def test_other_slots_of_a_command_worker_keep_their_jobs_until_the_process_is_gone(q: Q) -> None:
    devices = gpus(1, 1)
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(slots=2, devices=devices)
    claims = worker.claim()
    assert claims[0].trip(80, exit_in_s=5) == "scheduled"
    q.tick()
    assert q.state(second) == "running", "its child may still run"
    q.later(5)
    q.tick()
    row = q.job(second)
    assert (row["state"], row["crashes"], row["stops"], row["attempts"]) == ("pending", 0, 0, 0)
    assert q.state(first) == "pending"
    assert health(q) == {"G0": "exiting", "G1": "exiting"}, "nobody has seen it gone"
    worker.report_dead()
    assert health(q) == {"G0": "ok", "G1": "ok"}


def test_housekeeping_before_the_process_is_gone_gives_no_device_back(q: Q) -> None:
    q.submit(count=2, gpus=1)
    q.worker(slots=2, devices=gpus(1, 1)).claim()[0].trip(80, exit_in_s=5)
    q.sql("select gangq.keep_partitions(true)")
    q.later(5)
    q.tick()
    assert health(q) == {"G0": "exiting", "G1": "exiting"}


def test_proof_of_death_frees_the_other_slots_at_once(q: Q) -> None:
    first, second = q.submit(count=2)
    worker = q.worker(slots=2)
    worker.claim()[0].trip(80, exit_in_s=60)
    assert q.state(second) == "running"
    assert worker.report_dead() == 2
    assert (q.state(first), q.state(second), q.job(second)["crashes"]) == ("pending", "pending", 0)


def test_two_children_of_one_worker_that_trip_in_the_same_moment_wait_for_the_same_end(q: Q) -> None:
    first, second = q.submit(count=2)
    worker = q.worker(slots=2)
    one, two = worker.claim()
    one.trip(75, exit_in_s=5)
    q.later(1)
    assert two.trip(75, exit_in_s=5) == "scheduled"
    assert q.job(first)["due_at"] == q.job(second)["due_at"] == worker.row["exits_at"]
    assert worker.report_dead() == 2


def test_a_trip_of_a_worker_judged_in_between_waits_for_nobody(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    q.sql("select gangq.end_incarnation(%(i)s, 'dead', gangq.now())", i=claim.incarnation)
    assert claim.trip(exit_in_s=5) == "pending"
    assert (q.job(claim.job_id)["trips"], q.job(claim.job_id)["crashes"]) == (1, 0)
    assert health(q) == {"G0": "ok"}


def test_a_trip_of_a_worker_judged_in_between_changes_nothing_of_how_that_ended(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker(slots=2)
    one, two = worker.claim()
    q.sql("select gangq.end_incarnation(%(i)s, 'dead', gangq.now())", i=worker.incarnation)
    one.trip(exit_in_s=5)
    assert worker.row["exit_code"] is None
    assert q.job(two.job_id)["crashes"] == 1, "its worker was lost, and did not stop over another job"


def test_a_members_trip_drains_its_gang_with_it_as_the_culprit(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    one, two = gang.start(a, b)
    assert one.trip(exit_in_s=5) == "preempted"
    assert (gang.state, q.state(one.job_id), q.state(two.job_id)) == ("draining", "preempted", "preempting")
    (drain,) = q.sql("select * from gangq.drains")
    assert (drain["cause"], drain["trigger_job"]) == ("trip", one.job_id)
    assert two.ack() == "preempted"
    assert (gang.state, gang.live["trips"], gang.live["attempts"]) == ("blocked", 1, 0)
    assert [(m["trips"], m["attempts"]) for m in gang.members] == [(1, 0), (0, 0)]
    assert q.events("trip")[0]["data"]["rank"] == 0
    assert q.sql("select epoch, rank from gangq.trips") == [{"epoch": 1, "rank": 0}]
    assert one.trip(exit_in_s=5) == "repeated"


def test_a_gang_is_not_placed_again_while_the_member_that_tripped_may_still_run(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=0.01)
    gang, workers = q.submit_gang(2), q.workers(3)
    claims = gang.start(*workers)
    tripped = claims[0].incarnation
    claims[0].trip(exit_in_s=60)
    claims[1].ack()
    assert (gang.live["not_before"] - q.clock.now()).total_seconds() == 60
    others = [w for w in workers if w.incarnation != tripped]
    q.live_on(59, *others)
    assert gang.state == "blocked"
    q.live_on(2, *others)
    assert gang.state == "reserved"
    gang.cancel()


def waits_a_minute(q: Q, job: int) -> None:
    """Nobody gets it before the process that tripped is gone; then somebody does."""
    q.later(59)
    q.tick()
    assert (q.state(job), q.worker("w2").claim()) == ("scheduled", [])
    q.later(1)
    q.tick()
    assert tripping(q, job, "w3").job_id == job


@pytest.mark.parametrize("verb", ["set_priority", "submit_unique"])
def test_no_change_to_a_job_starts_it_while_the_process_that_tripped_may_still_run(q: Q, verb: str) -> None:
    unique = {"unique_key": "k", "task": "work", "priority": 5}
    job = q.one("submit_unique", **unique)["job_id"]
    q.worker("w1").take().trip(exit_in_s=60)
    if verb == "set_priority":
        assert q.one("set_priority", job_ids=[job], priority=5)["state"] == "scheduled"
    else:
        assert q.one("submit_unique", **unique, replaces=True)["replaced"] is False
    waits_a_minute(q, job)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_job_that_is_retried_waits_for_the_process_that_tripped(q: Q, end: str) -> None:
    job, worker = q.submit(max_trips=1), q.worker("w1")
    if end == "failed":
        assert worker.take().trip() == "pending"
    worker.take().trip(exit_in_s=60)
    if end == "cancelled":
        q.one("cancel", job_ids=[job])
    assert q.state(job) == end
    assert q.one("retry", job_ids=[job])["state"] == "scheduled"
    waits_a_minute(q, job)


def test_proof_of_death_frees_a_retried_job_too(q: Q) -> None:
    job, worker = q.submit(), q.worker("w1")
    worker.take().trip(exit_in_s=60)
    q.one("cancel", job_ids=[job])
    assert q.one("retry", job_ids=[job])["state"] == "scheduled"
    assert worker.report_dead() == 1
    assert q.state(job) == "pending"
    q.later(1)
    q.one("cancel", job_ids=[job])
    assert q.one("retry", job_ids=[job])["state"] == "pending"


def test_a_gang_that_is_retried_waits_for_the_process_that_tripped(q: Q) -> None:
    gang, worker = q.submit_gang(1), q.worker("w1")
    gang.start(worker)[0].trip(exit_in_s=60)
    gang.cancel()
    assert gang.state == "cancelled"
    assert q.one("retry", gang_ids=[gang.id])["state"] == "blocked"
    assert (gang.live["not_before"] - q.clock.now()).total_seconds() == 60
    other = q.worker("w2")
    q.live_on(59, other)
    assert (gang.state, gang.live["epoch"]) == ("blocked", 1), "it was placed once, before"
    q.live_on(1, other)
    assert gang.state == "reserved"
    gang.cancel()


def test_a_gang_of_one_waits_for_its_process_too(q: Q) -> None:
    """Here the drain is over within the trip itself."""
    q.call("set_queue", name="default", backoff_s=0.01)
    gang, worker = q.submit_gang(1), q.worker()
    gang.start(worker)[0].trip(exit_in_s=60)
    assert gang.state == "blocked"
    assert (gang.live["not_before"] - q.clock.now()).total_seconds() == 60


def test_members_of_one_worker_are_all_stopped_by_the_trip_of_one(q: Q) -> None:
    gang, worker = q.submit_gang(3, gpus=1), q.worker(slots=3, devices=gpus(1, 1, 1))
    claims = gang.start(worker)
    claims[1].trip(80, exit_in_s=5)
    assert gang.states == ["preempting", "preempted", "preempting"]
    q.later(5)
    q.tick()
    assert gang.state == "blocked"
    assert set(health(q).values()) == {"exiting"}
    assert [m["trips"] for m in gang.members] == [0, 1, 0]
    assert [m["crashes"] for m in gang.members] == [0, 0, 0]


def test_members_of_another_gang_on_that_worker_are_handed_back_uncharged(q: Q) -> None:
    gang, worker, second = q.submit_gang(2), q.worker("a"), q.worker("b")
    job = q.submit()
    claim = worker.take()
    members = gang.start(worker, second)
    assert claim.job_id == job
    claim.trip(80, exit_in_s=5)
    assert gang.state == "running", "its member may still run"
    q.later(5)
    q.tick()
    assert gang.state == "draining"
    assert gang.live["drain_cause"] == "other_job"
    next(m for m in members if m.incarnation == second.incarnation).ack()
    assert (gang.state, gang.live["crashes"], gang.live["attempts"]) == ("blocked", 0, 0)


def test_a_member_only_reserved_there_rolls_its_gang_back(q: Q) -> None:
    job = q.submit()
    worker = q.worker(slots=2)
    claim = worker.take()
    gang = q.submit_gang(1)
    q.tick()
    assert (gang.state, claim.job_id) == ("reserved", job)
    claim.trip(80, exit_in_s=0)
    assert gang.state == "blocked"
    assert gang.live["attempts"] == 0


@pytest.mark.parametrize("how", ["drained", "cancelled"])
def test_a_member_told_to_stop_that_trips_counts_as_stopped_and_is_charged_nothing(q: Q, how: str) -> None:
    gang, workers = q.submit_gang(2, gpus=1), [q.worker(n, devices=gpus(1, prefix=n)) for n in "ab"]
    one, two = gang.start(*workers)
    if how == "drained":
        one.fail()
    else:
        gang.cancel()
        one.ack()
    assert two.trip(79, exit_in_s=5) == "preempted"
    assert gang.state == ("blocked" if how == "drained" else "cancelled")
    assert q.job(two.job_id)["trips"] == 0
    assert sorted(health(q).values()) == ["exiting", "ok"]


def test_a_member_at_its_cap_ends_its_gang(q: Q) -> None:
    gang, worker = q.submit_gang(1, max_trips=1), q.worker()
    gang.start(worker)[0].trip()
    assert gang.state == "blocked"
    gang.restart(worker)[0].trip()
    assert gang.state == "failed"
    assert "tripped a watchdog 2 times" in gang.row["reason"]


@pytest.mark.parametrize("kind", ["job", "gang"])
def test_what_is_retried_after_its_process_is_gone_waits_for_nothing(q: Q, kind: str) -> None:
    """Nothing has proven it: exits_at stands as it was."""
    worker = q.worker()
    gang = q.submit_gang(1) if kind == "gang" else None
    job = gang.job_ids[0] if gang else q.submit()
    claim = gang.start(worker)[0] if gang else worker.take()
    claim.trip(exit_in_s=5)
    ended = {"gang_ids": [gang.id]} if gang else {"job_ids": [job]}
    q.call("cancel", **ended)
    assert q.state(job) == "cancelled"
    q.later(6)
    q.call("retry", **ended)
    assert (q.job(job)["due_at"], claim.live["ran_on"]) == (None, None)
    assert q.state(job) == ("blocked" if gang else "pending")
    if gang:
        assert gang.live["not_before"] is None
