"""A watchdog acts: trip, suspect, the brake, devices withheld and quarantined, unproven deaths, stuck processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from drive import ENDED, INVALID, MISSING, STALE, Claim, Q, Worker, gpus, refused
from epochs import reserve, run, submit_roles


def running(q: Q, name: str = "w1", devices: list[dict[str, Any]] | None = None, **options: Any) -> Claim:
    """One job, claimed by one new worker."""
    q.submit(**options)
    return q.worker(name, devices=devices or []).take()


def tripping(q: Q, job_id: int, name: str, **offer: Any) -> Claim:
    """A new worker claims this pending job."""
    claim = q.worker(name, **offer).take()
    assert claim.job_id == job_id
    return claim


def health(q: Q) -> dict[str, str]:
    return {row["uuid"]: row["health"] for row in q.sql("select uuid, health from gangq.devices")}


def setting(q: Q, **values: Any) -> None:
    q.call("configure", **values)


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


# Devices ----------------------------------------------------------------------------------------------------


def test_devices_are_withheld_until_the_lease_would_have_ended_and_offered_after(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    q.later(20)
    claim.trip(exit_in_s=5)
    (held,) = q.sql("select * from gangq.device_holds")
    assert (held["kind"], held["incarnation"], held["job_id"]) == ("quarantine", claim.incarnation, None)
    assert "exiting after a trip (76)" in held["reason"]
    again = q.worker("w1", devices=gpus(8000))
    assert again.registration["withheld"] == ["G0"]
    q.live_on(99, again)
    assert q.state(claim.job_id) == "pending"
    assert again.claim() == []
    q.live_on(2, again)
    assert again.take().job_id == claim.job_id
    assert q.events("unquarantine")[0]["data"] == {"device": "G0"}


def test_devices_are_withheld_for_as_long_as_the_process_was_announced_when_that_is_longer(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=300)
    q.live_on(299)
    assert health(q) == {"G0": "exiting"}
    q.live_on(2)
    assert health(q) == {"G0": "ok"}


def test_what_is_given_back_wakes_the_worker_that_offers_it(q: Q, dsn: str) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=5)
    again = q.worker("w1", devices=gpus(8000))
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{again.incarnation}")
        Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
        assert "claim" in {n.payload for n in ear.notifies(timeout=2, stop_after=1)}


def test_a_proof_about_one_incarnation_gives_back_nothing_of_another(q: Q) -> None:
    one = running(q, "a", devices=gpus(8000, prefix="A"), gpus=1)
    one.trip(exit_in_s=60)
    two = running(q, "b", devices=gpus(8000, prefix="B"), gpus=1)
    two.trip(exit_in_s=60)
    Worker(q, "a", {"incarnation": one.incarnation}).report_dead()
    assert health(q) == {"A0": "ok", "B0": "exiting"}


def test_an_operators_quarantine_of_a_withheld_device_outlives_the_proof(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=5)
    q.call("quarantine", device_uuid="G0", reason="smells")
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert q.sql("select health, reason from gangq.devices") == [
        {"health": "quarantined", "reason": "smells"}
    ]


@pytest.mark.parametrize("exit_in_s", [None, 5])
def test_a_device_fault_quarantines_what_is_to_blame_until_an_operator_lifts_it(
    q: Q, exit_in_s: float | None
) -> None:
    claim = running(q, devices=gpus(8000, 8000), gpus=2)
    claim.trip(85, "Xid 79", devices=["G1", "somebody else's"], exit_in_s=exit_in_s)
    assert health(q) == {"G0": "ok" if exit_in_s is None else "exiting", "G1": "quarantined"}
    assert "Xid 79" in q.value("select reason from gangq.devices where uuid = 'G1'")
    assert [e["data"]["device"] for e in q.events("quarantine")] == ["G1"]
    if exit_in_s:
        Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "ok", "G1": "quarantined"}
    q.call("unquarantine", device_uuid="G1")
    assert health(q)["G1"] == "ok"


def test_a_device_of_another_job_cannot_be_blamed(q: Q) -> None:
    q.submit(count=2, gpus=1)
    one, two = q.worker(slots=2, devices=gpus(1, 1)).claim()
    theirs = two["devices"][0]["uuid"]
    one.trip(85, devices=[theirs])
    assert health(q)[theirs] == "ok"
    assert q.events("trip")[0]["data"]["blamed"] == [one["devices"][0]["uuid"]]
    assert two.complete() == "done"


def test_a_fault_of_the_application_quarantines_no_device(q: Q) -> None:
    claim = running(q, devices=gpus(8000, 8000), gpus=1)
    claim.trip(85, "Xid 31", evidence={"application": True, "xid": 31})
    assert health(q) == {"G0": "ok", "G1": "ok"}
    assert q.events("quarantine") == []


@pytest.mark.parametrize("code", [78, 85])
def test_the_job_never_comes_back_to_the_device_it_tripped_on(q: Q, code: int) -> None:
    q.submit(gpus=1)
    worker = q.worker(slots=2, devices=gpus(1, 2, 3))
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G0"]
    claim.trip(code, evidence={"application": True})
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G1"]
    claim.trip(code, evidence={"application": True})
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G2"]
    q.submit(gpus=1)
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G0"], "others may use it"


def test_another_device_of_the_worker_that_exits_is_one_that_could_take_the_job(q: Q) -> None:
    """Its next start offers it again."""
    claim = running(q, devices=gpus(1, 2), gpus=1)
    claim.trip(78, exit_in_s=5)
    assert avoided(q) == ["G0"]


@pytest.mark.parametrize("code", [75, 76, 80, 86])
def test_other_trips_say_nothing_against_the_device(q: Q, code: int) -> None:
    q.submit(gpus=1)
    worker = q.worker(devices=gpus(1, 2))
    worker.take().trip(code)
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G0"]


def test_where_it_could_run_nowhere_else_an_idle_device_is_tried_again_up_to_the_cap(q: Q) -> None:
    """The one GPU of a small installation: a job that wedges it is to fail, not to wait for ever."""
    job = q.submit(gpus=1, max_trips=1)
    worker = q.worker(devices=gpus(1))
    worker.take().trip(78)
    assert worker.take().trip(78) == "failed"
    assert q.state(job) == "failed"


def test_a_device_that_failed_is_avoided_even_where_there_is_no_other(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    claim.trip(85)
    worker = Worker(q, "w1", {"incarnation": claim.incarnation})
    assert worker.claim() == []
    q.sql("delete from gangq.device_holds")
    assert worker.claim() == [], "not even when somebody lifted the quarantine by hand"
    q.call("unquarantine", device_uuid="G0")
    assert worker.take().job_id == claim.job_id, (
        "unquarantine says that it may be used again, by this job too"
    )


def avoided(q: Q) -> list[str]:
    """The devices that the only live job avoids."""
    return [
        row["uuid"]
        for row in q.sql(
            "select r.uuid from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
            "join gangq.device_registry r on r.id = any (s.avoid) order by r.uuid"
        )
    ]


@pytest.mark.parametrize("how", ["retires", "drains", "is quarantined", "its device is"])
def test_the_device_it_avoids_is_good_again_when_the_other_worker_goes(q: Q, how: str) -> None:
    job = q.submit(gpus=1, vram_mb=1000)
    one = q.worker("a", devices=gpus(1000, prefix="A"))
    claim = one.take()
    other = q.worker("b", devices=gpus(1000, prefix="B"))
    claim.trip(78)
    q.tick()
    assert (avoided(q), one.claim(), q.events("unavoid")) == (["A0"], [], []), "the other could take it"
    if how in ("retires", "drains"):
        other.retire(final=how == "retires")
    elif how == "is quarantined":
        q.call("quarantine", worker="b")
    else:
        q.call("quarantine", device_uuid="B0")
    q.tick()
    (event,) = q.events("unavoid")
    assert (event["job_id"], event["data"]) == (job, {"devices": ["A0"]})
    assert one.take().job_id == job


@pytest.mark.parametrize("small", [{"memory_mb": 10}, {"cpus": 1}, {"labels": {"k": "v"}}, {"vram_mb": 2000}])
def test_a_device_on_a_worker_that_could_not_take_the_job_is_no_other(q: Q, small: dict[str, Any]) -> None:
    job = q.submit(**{"gpus": 1, "vram_mb": 1000, **small})
    one = q.worker(
        "a", devices=gpus(2000, prefix="A"), **{k: v for k, v in small.items() if k not in ("vram_mb",)}
    )
    q.worker("b", devices=gpus(1000, prefix="B"))
    one.take().trip(78)
    q.tick()
    assert one.take().job_id == job


def test_while_no_worker_could_take_it_at_all_it_goes_on_avoiding(q: Q) -> None:
    """All workers restart: whoever is back last must not find that the job went where it had tripped."""
    q.submit(gpus=1)
    one, other = (q.worker(n, devices=gpus(1, prefix=n)) for n in "ab")
    claim = one.take()
    claim.trip(78)
    one.retire()
    other.retire()
    q.tick()
    assert avoided(q) == ["a0"]
    q.worker("a", devices=gpus(1, prefix="a"))
    q.call("quarantine", worker="a")
    q.tick()
    assert avoided(q) == ["a0"]
    q.worker("b", devices=gpus(1, prefix="b"))
    q.call("unquarantine", worker="a")
    q.tick()
    assert avoided(q) == ["a0"]


def test_what_is_quarantined_stays_avoided_and_the_others_come_back(q: Q) -> None:
    job = q.submit(gpus=1, max_trips=9)
    worker = q.worker(slots=3, devices=gpus(1, 2, 3))
    worker.take().trip(85)
    worker.take().trip(78)
    assert avoided(q) == ["G0", "G1"]
    q.call("quarantine", device_uuid="G2")
    q.settle()
    assert (avoided(q), health(q)["G0"]) == (["G0"], "quarantined")
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G1"]
    assert q.state(job) == "running"


def test_a_hardware_fault_never_comes_back_by_itself(q: Q) -> None:
    running(q, devices=gpus(1), gpus=1).trip(85)
    q.live_on(100)
    assert (avoided(q), q.events("unavoid")) == (["G0"], [])


def test_a_gang_gets_back_what_it_avoids_when_it_fits_nowhere_else(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}-")) for n in range(3)]
    claims = gang.start(*workers)
    bad = claims[0]["devices"][0]["uuid"]
    claims[0].trip(78)
    claims[1].ack()
    spare = next(w for w in workers if w.incarnation not in {c.incarnation for c in claims})
    q.tick()
    assert (avoided(q), q.events("unavoid")) == ([bad, bad], [])
    spare.retire()
    used = {d["uuid"] for c in gang.restart(*workers[:2]) for d in c["devices"]}
    assert bad in used
    assert [(e["gang_id"], e["data"]) for e in q.events("unavoid")] == [(gang.id, {"devices": [bad]})]


def test_what_somebody_holds_locked_gets_its_device_back_a_tick_later(q: Q, dsn: str) -> None:
    job = q.submit(gpus=1)
    one, other = (q.worker(n, devices=gpus(1, prefix=n)) for n in "ab")
    one.take().trip(78)
    other.retire()
    with psycopg.connect(dsn) as third:
        third.execute("select 1 from gangq.live_jobs for update")
        assert q.one("tick", force=True)["detail"]["lift_avoided"] == 0, "it waits for nobody"
        assert avoided(q) == ["a0"]
    q.tick()
    assert one.take().job_id == job


def test_a_place_is_opened_on_the_worker_that_may_take_the_job_again(q: Q) -> None:
    job = q.submit(gpus=1)
    one = q.worker("a", devices=gpus(1, prefix="a"))
    claim = one.take()
    other = q.worker("b", devices=gpus(1, prefix="b"))
    claim.trip(78)
    assert one.claim() == []
    other.retire()
    q.tick()
    assert q.sql("select worker from gangq.places_open") == [{"worker": "a"}]
    assert one.take().job_id == job


def test_whoever_asks_is_told_what_to_do_about_an_avoided_device(q: Q) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(slots=2, devices=gpus(1, 2, 3))
    worker.take().trip(85, "Xid 79")
    worker.take().trip(78)
    (said,) = [r["detail"] for r in q.call("explain_job", job_id=job) if r["gate"] == "avoids"]
    fault, idle = said.split("; avoids ")
    assert "G0 (host-w1)" in fault
    assert "Xid 79" in fault
    assert "gangq.unquarantine('G0')" in fault
    assert "G1 (host-w1)" in idle
    assert "a tick lets it back when no other could take it" in idle
    assert "gangq.unquarantine('G1')" in idle


def test_unquarantine_of_one_device_leaves_the_others_avoided(q: Q) -> None:
    q.submit(gpus=1)
    worker = q.worker(devices=gpus(1, 2))
    worker.take().trip(85)
    worker.take().trip(85)
    q.call("unquarantine", device_uuid="G1")
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G1"]
    assert q.value("select avoid from gangq.shapes order by id desc limit 1") is not None


@pytest.mark.parametrize("code", [78, 85])
def test_a_gang_keeps_away_from_its_culprits_device_as_a_whole(q: Q, code: int) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}-")) for n in range(3)]
    one, two = gang.start(*workers)
    bad = one["devices"][0]["uuid"]
    one.trip(code)
    two.ack()
    claims = gang.restart(*workers)
    used = {d["uuid"] for c in claims for d in c["devices"]}
    assert len(used) == 2
    assert bad not in used
    q.call("unquarantine", device_uuid=bad)
    assert q.sql("select s.avoid from gangq.live_gangs g join gangq.shapes s on s.id = g.shape_id") == [
        {"avoid": None}
    ]


def test_a_gang_that_ends_by_its_trip_keeps_away_from_that_device_when_it_is_retried(q: Q) -> None:
    gang, worker = q.submit_gang(1, gpus=1, failure_policy="fail"), q.worker(devices=gpus(1))
    gang.start(worker)[0].trip(85)
    assert gang.state == "failed"
    q.call("retry", gang_ids=[gang.id])
    assert avoided(q) == ["G0"]


def test_a_submission_never_gets_a_shape_that_avoids(q: Q) -> None:
    q.submit(gpus=1)
    assert q.value("select gangq.shape_avoiding(id, array[1]) <> id from gangq.shapes")
    fresh = q.submit(gpus=1)
    avoid = q.value(
        "select s.avoid from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.id = %(i)s",
        i=fresh,
    )
    assert avoid is None


def trips_on(q: Q, count: int, code: int = 76, same: bool = False, **named: Any) -> None:
    """Trips of that many jobs on device G0, one after the other, all of one host."""
    worker = q.worker(devices=gpus(1))
    for _ in range(count):
        if not same or not q.sql("select 1 from gangq.live_jobs"):
            q.submit(gpus=1, max_trips=9)
        claim = worker.take()
        claim.trip(code, **named)
        if not same:
            q.call("cancel", job_ids=[claim.job_id])
    worker.retire()


def test_a_device_is_quarantined_at_the_third_different_job_that_trips_on_it(q: Q) -> None:
    trips_on(q, 2)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 2)
    trips_on(q, 1)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "quarantined"}, 3)
    assert "3 different jobs tripped on it" in q.value("select reason from gangq.devices")
    assert len(q.events("quarantine")) == 1


def test_it_stays_quarantined_though_its_worker_is_proven_gone(q: Q) -> None:
    trips_on(q, 2)
    claim = running(q, "w2", devices=gpus(1), gpus=1)
    claim.trip(exit_in_s=5)
    assert health(q) == {"G0": "quarantined"}
    Worker(q, "w2", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "quarantined"}


def test_the_number_is_a_setting(q: Q) -> None:
    setting(q, device_trips=1)
    trips_on(q, 1)
    assert health(q) == {"G0": "quarantined"}


def test_one_job_that_trips_over_and_over_does_not_cost_the_device(q: Q) -> None:
    trips_on(q, 5, same=True)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 1)


@pytest.mark.parametrize("code", [75, 86])
def test_budgets_and_memory_do_not_count_against_a_device(q: Q, code: int) -> None:
    trips_on(q, 4, code)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 0)


def test_faults_of_applications_do_not_count_against_a_device(q: Q) -> None:
    trips_on(q, 4, 85, evidence={"application": True})
    assert health(q) == {"G0": "ok"}


def test_trips_of_more_than_a_day_ago_do_not_count(q: Q) -> None:
    trips_on(q, 2)
    q.later(86400)
    trips_on(q, 2)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 2)


def test_a_job_that_trips_on_two_hosts_is_called_poison_once_and_counts_against_no_device(q: Q) -> None:
    job = q.submit(gpus=1, max_trips=5)
    for n, host in enumerate(("h1", "h1", "h2", "h3")):
        worker = q.worker(f"w{n}", host=host, devices=gpus(1, prefix=host))
        worker.take().trip()
        worker.retire()
        q.later(61)  # or the brake would hold the third
        assert len(q.events("poison")) == (0 if n < 2 else 1)
    (event,) = q.events("poison")
    assert (event["job_id"], event["data"]["hosts"]) == (job, ["h1", "h2"])
    assert {r["poison"] for r in q.sql("select poison from gangq.trips")} == {True}
    assert {r["trips_day"] for r in q.sql("select trips_day from gangq.devices")} == {0}
    assert q.state(job) == "pending", "only called so: the cap decides"


def test_the_trip_that_shows_that_a_job_is_poison_counts_against_no_device(q: Q) -> None:
    setting(q, device_trips=2)
    trips_on(q, 1)
    q.submit(gpus=1)
    elsewhere = q.worker("w2", devices=gpus(1, prefix="D"))
    elsewhere.take().trip()
    elsewhere.retire()
    q.worker(devices=gpus(1)).take().trip()
    assert len(q.events("poison")) == 1
    assert health(q)["G0"] == "ok"


# Notify, suspicion, brake -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"), [(75, "budget"), (76, "stall"), (78, "health"), (85, "fault"), (76, "gang")]
)
def test_a_class_that_only_notifies_stops_nothing_and_leaves_its_evidence(q: Q, code: int, kind: str) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    setting(q, notify_only=[kind])
    before = q.sql("select * from gangq.live_jobs"), q.sql("select * from gangq.device_holds")
    named = {"class": kind} if kind == "gang" else {}
    assert claim.trip(code, exit_in_s=5, evidence={"seen": 1}, **named) == "notify"
    assert (q.sql("select * from gangq.live_jobs"), q.sql("select * from gangq.device_holds")) == before
    assert q.value("select state from gangq.workers") == "live"
    assert [e["kind"] for e in q.events(job_id=claim.job_id)] == ["notify"]
    (row,) = q.sql("select * from gangq.trips")
    assert (row["outcome"], row["class"], row["evidence"]) == ("notify", kind, {"seen": 1})
    setting(q, notify_only=[])
    assert claim.trip(code, **named) == "pending", "the same claim may trip later"


def test_a_task_says_for_itself_what_only_notifies(q: Q) -> None:
    claim = running(q)
    setting(q, notify_only=["stall"])
    q.call("set_task", task="work", notify_only=["budget"])
    assert claim.trip(75, exit_in_s=5) == "notify"
    assert claim.trip(76) == "pending"


@pytest.mark.parametrize("code", [75, 76, 78, 85])
def test_dead_work_of_a_class_that_only_notifies_gets_its_end_and_blames_no_device(q: Q, code: int) -> None:
    """Nothing runs any more: left as it is, the job would be running for ever."""
    claim = running(q, devices=gpus(1, 2), gpus=1)
    setting(q, notify_only=["budget", "stall", "health", "fault"], device_trips=1)
    assert claim.trip(code) == "pending"
    assert (q.state(claim.job_id), q.job(claim.job_id)["trips"]) == ("pending", 1)
    (event,) = [e for e in q.events(job_id=claim.job_id) if e["kind"] in ("trip", "notify", "quarantine")]
    assert (event["kind"], event["data"]["notify_only"], event["data"]["blamed"]) == ("trip", True, [])
    assert (event["data"]["class"], event["data"]["outcome"]) == (
        {75: "budget", 76: "stall", 78: "health", 85: "fault"}[code],
        "pending",
    )
    assert health(q) == {"G0": "ok", "G1": "ok"}
    assert q.sql("select * from gangq.device_trips") == []
    worker = Worker(q, "w1", {"incarnation": claim.incarnation})
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G0"]


@pytest.mark.parametrize("exit_in_s", [None, 5])
def test_a_job_told_to_stop_ends_though_its_class_only_notifies_or_the_brake_is_on(
    q: Q, exit_in_s: float | None
) -> None:
    claims = fleet(q, 6)
    q.call("cancel", job_ids=[claims[0].job_id, claims[1].job_id])
    setting(q, notify_only=["stall"])
    assert claims[0].trip(exit_in_s=exit_in_s) == "cancelled"
    setting(q, notify_only=[])
    for claim in claims[2:]:
        claim.suspect()
    assert claims[1].trip(exit_in_s=exit_in_s) == "cancelled"
    assert [e["data"].get("notify_only") for e in q.events("trip")] == [True, None]


def test_dead_work_gets_its_end_while_the_brake_is_on(q: Q) -> None:
    claims = fleet(q, 4)
    assert [c.suspect() for c in claims][-1] == "held"
    assert claims[0].trip(76) == "pending"
    assert claims[1].trip(76, exit_in_s=5) == "held"


@pytest.mark.parametrize("code", [79, 80, 86, 87])
def test_facts_cannot_be_set_to_notify(q: Q, code: int) -> None:
    claim = running(q)
    setting(q, notify_only=["budget", "stall", "health", "fault", "gang"])
    assert claim.trip(code) == "pending"


def test_a_suspicion_is_an_event_with_evidence_and_changes_nothing(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    before = q.sql("select * from gangq.live_jobs")
    assert claim.suspect("stall", reason="no beat for 120 s", stack="File x") == "noted"
    assert q.sql("select * from gangq.live_jobs") == before
    (event,) = q.events("suspect")
    assert (event["reason"], event["worker"], event["job_id"]) == ("no beat for 120 s", "w1", claim.job_id)
    assert (event["data"]["class"], event["data"]["task"], event["data"]["devices"]) == (
        "stall",
        "work",
        ["G0"],
    )
    (kept,) = q.sql("select kind, data from gangq.evidence")
    assert kept == {"kind": "suspect", "data": {"reason": "no beat for 120 s", "stack": "File x"}}


def test_a_worker_that_knows_its_class_only_notifies_says_so_without_a_trip(q: Q) -> None:
    claim = running(q)
    named = {
        "incarnation": claim.incarnation,
        "job_id": claim.job_id,
        "token": claim.token,
        "class": "budget",
    }
    assert q.one("suspect", **named, evidence={"reason": "2100 s"}, notify=True) == "noted"
    (row,) = q.sql("select class, outcome, reason, evidence from gangq.trips")
    assert row == {
        "class": "budget",
        "outcome": "notify",
        "reason": "2100 s",
        "evidence": {"reason": "2100 s"},
    }
    assert (q.state(claim.job_id), q.events("suspect")) == ("running", [])


def test_a_suspicion_of_a_job_that_is_not_ours_any_more_is_refused(q: Q) -> None:
    claim = running(q)
    with refused(INVALID, "class"):
        claim.suspect("mood")
    for wrong in ({"token": claim.token - 1}, {"incarnation": 99}):
        named = {"incarnation": claim.incarnation, "job_id": claim.job_id, "token": claim.token, **wrong}
        with refused(STALE):
            q.one("suspect", **named, **{"class": "stall"})
    claim.complete()
    with refused(STALE):
        claim.suspect()
    assert q.events("suspect") == []


def fleet(q: Q, size: int) -> list[Claim]:
    """That many workers, each with a job."""
    q.submit(count=size)
    return [q.worker(f"w{n}").take() for n in range(size)]


@pytest.mark.parametrize("code", [76, 78])
def test_the_brake_holds_when_more_than_its_share_is_suspect_and_not_at_exactly_that(q: Q, code: int) -> None:
    claims = fleet(q, 15)
    for claim in claims[:3]:
        assert claim.suspect("stall") == "noted"
    assert claims[0].trip(code) == "pending", "3 of 15 is a fifth, not more"
    assert claims[3].suspect("health") == "held"
    before = q.sql("select * from gangq.live_jobs")
    assert claims[1].trip(code, exit_in_s=5, evidence={"seen": 1}) == "held"
    assert q.sql("select * from gangq.live_jobs") == before
    assert q.value("select state from gangq.workers where name = 'w1'") == "live"
    (event,) = q.events("held")
    assert (event["job_id"], event["data"]["outcome"]) == (claims[1].job_id, "held")
    assert q.sql("select evidence from gangq.trips where outcome = 'held'") == [{"evidence": {"seen": 1}}]


def test_the_one_that_trips_counts_as_suspect_itself(q: Q) -> None:
    claims = fleet(q, 14)
    claims[0].suspect()
    claims[1].suspect()
    assert claims[2].trip(exit_in_s=5) == "held"


def test_two_suspects_are_never_too_many_however_small_the_fleet(q: Q) -> None:
    claims = fleet(q, 2)
    claims[0].suspect()
    assert claims[1].trip(exit_in_s=5) == "scheduled"
    assert claims[0].trip(exit_in_s=5) == "scheduled"


def test_three_of_three_are(q: Q) -> None:
    claims = fleet(q, 3)
    assert [c.trip(exit_in_s=5) for c in claims] == ["scheduled", "scheduled", "held"]


def test_those_that_are_gone_after_their_trip_still_count_as_part_of_the_fleet(q: Q) -> None:
    claims = fleet(q, 15)
    assert [c.trip(exit_in_s=5) for c in claims[:4]] == ["scheduled"] * 3 + ["held"]


def test_a_worker_suspected_again_and_again_is_one(q: Q) -> None:
    claims = fleet(q, 10)
    for _ in range(9):
        claims[0].suspect()
    claims[1].suspect()
    assert claims[0].trip() == "pending"


def test_suspicions_of_more_than_a_minute_ago_do_not_brake(q: Q) -> None:
    claims = fleet(q, 10)
    for claim in claims:
        claim.suspect()
    q.later(59.9)
    assert claims[0].trip(exit_in_s=5) == "held"
    q.later(60)
    assert claims[0].trip() == "pending"


def test_those_that_beat_again_after_every_suspicion_do_not_brake(q: Q) -> None:
    """Their beats are rarer than their stall timeout: of ten such jobs a few are suspect in any minute, for good."""
    claims = fleet(q, 10)
    slow, hung = claims[:9], claims[9]
    assert [c.suspect() for c in slow][-1] == "held"
    q.later(65)
    for claim in slow:
        Worker(q, "", {"incarnation": claim.incarnation}).beat(claim, beats=[{"step": 1}])
    q.later(65)
    assert [c.suspect() for c in slow] == ["noted"] * 9
    assert hung.suspect() == "noted"
    assert hung.trip(exit_in_s=5) == "scheduled"


def test_in_a_long_outage_the_brake_stays_on(q: Q) -> None:
    """Nobody has beaten since the first suspicion: each counts as often as it is suspected."""
    claims = fleet(q, 10)
    for claim in claims:
        Worker(q, "", {"incarnation": claim.incarnation}).beat(claim, beats=[{"step": 1}])
    for _ in range(4):
        assert [c.suspect() for c in claims][-1] == "held"
        assert claims[3].trip(exit_in_s=5) == "held"
        q.later(130)


@pytest.mark.parametrize("again", ["another class", "the next attempt", "within the minute", "long after"])
def test_what_counts_as_suspected_before_is_the_same_class_and_claim_within_the_hour(
    q: Q, again: str
) -> None:
    claims = fleet(q, 3)
    for claim in claims:
        claim.suspect("health" if again == "another class" else "stall")
    q.later({"within the minute": 30, "long after": 3700}.get(again, 70))
    workers = [Worker(q, "", {"incarnation": c.incarnation}) for c in claims]
    q.sql("update gangq.leases set expires_at = gangq.now() + interval '120 s'")
    if again == "the next attempt":
        for claim in claims:
            claim.release()
        claims = [w.take() for w in workers]
    for worker, claim in zip(workers, claims, strict=True):
        worker.beat(claim, beats=[{"step": 1}])
    q.later(1)
    assert [c.suspect() for c in claims][-1] == "held"


@pytest.mark.parametrize("code", [75, 79, 80, 85, 86, 87])
def test_facts_are_not_braked(q: Q, code: int) -> None:
    claims = fleet(q, 5)
    for claim in claims:
        claim.suspect()
    assert claims[0].trip(code) == "pending"


@pytest.mark.parametrize("kind", ["budget", "fault", "gang", "frozen", "memory"])
def test_suspicions_of_other_classes_do_not_brake(q: Q, kind: str) -> None:
    claims = fleet(q, 5)
    for claim in claims:
        assert claim.suspect(kind) == "noted"
    assert claims[0].trip() == "pending"


def test_the_share_is_a_setting_and_exact(q: Q) -> None:
    claims = fleet(q, 10)
    setting(q, brake_share=0.7)
    for claim in claims[:7]:
        claim.suspect()
    assert claims[0].trip() == "pending", "7 of 10 is not more than 0.7"
    claims[7].suspect()
    assert claims[1].trip(exit_in_s=5) == "held"


def hung_gangs(q: Q, size: int, gangs: int) -> list[list[Claim]]:
    """That many running gangs, each member on a worker of its own."""
    found = []
    for n in range(gangs):
        gang = q.submit_gang(size)
        workers = [q.worker(f"g{n}w{m}") for m in range(size)]
        found.append(gang.start(*workers))
    return found


def test_the_members_of_one_gang_are_one_suspect(q: Q) -> None:
    """A collective that hangs makes all of them fall silent at once: that must not protect it."""
    (gang,) = hung_gangs(q, 4, 1)
    assert [c.suspect() for c in gang] == ["noted"] * 4
    assert gang[0].trip(exit_in_s=5) == "preempted"


def test_gangs_count_as_one_each_on_both_sides_of_the_share(q: Q) -> None:
    gangs = hung_gangs(q, 3, 3)
    idle = [q.worker(f"idle{n}") for n in range(12)]
    for gang in gangs[:2]:
        assert [c.suspect() for c in gang] == ["noted"] * 3
    assert gangs[2][0].suspect() == "noted", "3 of 15 is a fifth, not more"
    idle[0].retire()
    assert gangs[2][1].suspect() == "held"
    assert gangs[2][1].trip(exit_in_s=5) == "held"


def test_a_held_trip_is_let_go_after_its_time(q: Q) -> None:
    setting(q, brake_hold_s=900)
    claims = fleet(q, 5)

    def all_suspect() -> None:
        for worker in claims:
            Worker(q, "", {"incarnation": worker.incarnation}).beat(worker)
            worker.suspect()

    all_suspect()
    assert claims[0].trip(exit_in_s=5) == "held"
    for _ in range(9):
        q.later(95)
        all_suspect()
        assert claims[0].trip(exit_in_s=5) == "held"
    q.later(50)
    all_suspect()
    assert claims[1].trip(exit_in_s=5) == "held", "this one was never held before"
    assert claims[0].trip(exit_in_s=5) == "scheduled"


def test_a_beat_starts_the_time_of_a_held_trip_anew(q: Q) -> None:
    setting(q, brake_hold_s=100)
    claims = fleet(q, 5)
    assert [c.suspect() for c in claims][-1] == "held"
    assert claims[0].trip(exit_in_s=5) == "held"
    q.later(90)
    Worker(q, "", {"incarnation": claims[0].incarnation}).beat(claims[0], beats=[{"step": 1}])
    q.later(30)
    for claim in claims[1:]:
        claim.suspect()
    assert claims[0].trip(exit_in_s=5) == "held"
    q.later(101)
    for claim in claims[1:]:
        claim.suspect()
    assert claims[0].trip(exit_in_s=5) == "scheduled"


@pytest.mark.parametrize("shared", [["fs:nas:/data"], ["peer:10.0.0.7", "fs:nas:/data"]])
def test_a_held_trip_stays_held_while_others_wait_for_the_same_file_system_or_peer(
    q: Q, shared: list[str]
) -> None:
    setting(q, brake_hold_s=100)
    claims = fleet(q, 5)
    for _ in range(3):
        for claim in claims[1:]:
            claim.suspect(waits_for=["fs:nas:/data"])
        assert claims[0].trip(exit_in_s=5, evidence={"waits_for": shared}) == "held"
        q.later(130)
    for claim in claims[1:]:
        claim.suspect(waits_for=["fs:nas:/data"])
    assert claims[0].trip(exit_in_s=5, evidence={"waits_for": ["peer:10.0.0.9"]}) == "scheduled"


def test_the_others_of_its_gang_that_wait_for_the_same_peer_do_not_keep_a_trip_held(q: Q) -> None:
    setting(q, brake_hold_s=100)
    gangs = hung_gangs(q, 2, 3)
    for outcome in ("held", "preempted"):
        for number, gang in enumerate(gangs):
            for claim in gang:
                claim.suspect(waits_for=[f"peer:10.0.0.{number}"])
        assert gangs[0][0].trip(exit_in_s=5, evidence={"waits_for": ["peer:10.0.0.0"]}) == outcome
        q.later(101)


def test_a_held_trip_stays_held_for_a_lease_after_an_outage_of_the_database(q: Q) -> None:
    setting(q, brake_hold_s=100)
    claims = fleet(q, 5)
    for claim in claims:
        claim.suspect()
    assert claims[0].trip(exit_in_s=5) == "held"
    q.later(130)
    q.sql("update gangq.tick_state set outage_ended_at = gangq.now() - interval '60 s'")
    for claim in claims:
        claim.suspect()
    assert claims[0].trip(exit_in_s=5) == "held"
    q.later(61)
    for claim in claims:
        claim.suspect()
    assert claims[0].trip(exit_in_s=5) == "scheduled"


def test_a_command_about_to_be_tripped_is_held_on_record_and_let_go_like_a_handler(q: Q) -> None:
    """The worker of a command asks before it kills: its question is what the time counts from."""
    setting(q, brake_hold_s=100)
    claims = fleet(q, 5)

    def ask() -> str:
        return str(
            q.one(
                "suspect",
                incarnation=claims[0].incarnation,
                job_id=claims[0].job_id,
                token=claims[0].token,
                tripping=True,
                evidence={},
                **{"class": "stall"},
            )
        )

    for claim in claims:
        claim.suspect()
    assert ask() == "held"
    (held,) = q.events("held")
    assert (held["job_id"], held["data"]["outcome"]) == (claims[0].job_id, "held")
    q.later(101)
    for claim in claims:
        claim.suspect()
    assert ask() == "noted"


# A process that nothing can kill ----------------------------------------------------------------------------


def stuck(q: Q, claim: Claim, name: str = "w1", **evidence: Any) -> int:
    evidence = evidence or {"pid": 4711, "state": "D"}
    return int(q.one("report_stuck", worker=name, incarnation=claim.incarnation, evidence=evidence))


def test_a_stuck_process_keeps_everything_until_its_lease_ends_and_the_devices_for_good(q: Q) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    assert stuck(q, claim) == 1
    (row,) = q.sql("select * from gangq.workers")
    assert (row["reboot_needed"], row["state"]) == (True, "live")
    assert row["quarantined"] == "process 4711 cannot be killed: reboot host host-w1"
    assert (q.state(claim.job_id), q.value("select count(*) from gangq.device_holds")) == ("running", 1)
    q.live_on(119)
    assert q.state(claim.job_id) == "running", "nothing is freed early"
    q.live_on(2)
    assert q.state(claim.job_id) == "pending"
    assert health(q) == {"G0": "quarantined", "G1": "ok"}
    assert "4711" in q.value("select reason from gangq.devices where uuid = 'G0'")
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "quarantined", "G1": "ok"}, "until an operator lifts it"
    (event,) = q.events("stuck")
    assert (event["incarnation"], event["data"]["devices"]) == (claim.incarnation, ["G0"])


def test_a_worker_with_a_stuck_process_takes_nothing_under_its_name_until_it_is_unquarantined(q: Q) -> None:
    claim = running(q)
    stuck(q, claim)
    q.submit()
    q.live_on(130)
    again = q.worker("w1")
    assert again.claim() == []
    assert q.worker("w2").take()
    q.call("unquarantine", worker="w1")
    assert again.take()


def test_a_stuck_process_found_after_its_trip_keeps_its_devices_and_its_job_until_the_lease_is_over(
    q: Q,
) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    claim.trip(exit_in_s=5)
    assert stuck(q, claim) == 1
    q.live_on(10)
    assert q.state(claim.job_id) == "scheduled", "it was to be gone by now, and is not"
    assert q.call("unproven", worker="w1")[0]["incarnation"] == claim.incarnation
    q.live_on(111)
    assert (q.state(claim.job_id), health(q)) == ("pending", {"G0": "quarantined"})
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    assert health(q) == {"G0": "quarantined"}


@pytest.mark.parametrize("how", ["its lease ended", "it tripped", "it retired"])
def test_a_stuck_process_found_after_its_devices_were_given_back_takes_them_all(q: Q, how: str) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    if how == "it tripped":
        claim.trip(exit_in_s=5)
    elif how == "it retired":
        Worker(q, "w1", {"incarnation": claim.incarnation}).retire()
    q.live_on(130)
    assert (q.state(claim.job_id), health(q)) == ("pending", {"G0": "ok", "G1": "ok"})
    assert stuck(q, claim) == 2, "which of them it holds nobody knows any more"
    assert health(q) == {"G0": "quarantined", "G1": "quarantined"}
    assert {r["reason"] for r in q.sql("select reason from gangq.devices")} == {
        "process 4711 cannot be killed: reboot host host-w1"
    }
    assert q.worker("w2", devices=gpus(1, 2)).claim() == []
    assert q.events("stuck")[0]["data"]["devices"] == ["G0", "G1"]
    assert stuck(q, claim) == 2
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert set(health(q).values()) == {"quarantined"}, "until an operator lifts it"
    q.call("unquarantine", device_uuid="G0")
    assert health(q)["G0"] == "ok"


def test_a_trip_whose_devices_are_withheld_still_takes_no_more_than_those(q: Q) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    claim.trip(exit_in_s=5)
    q.live_on(20)
    q.call("keep_partitions", at_once=True)  # Which forgets leases that are over.
    assert stuck(q, claim) == 1
    assert health(q) == {"G0": "quarantined", "G1": "ok"}


def test_devices_that_another_job_holds_by_now_are_named_and_left_to_it(q: Q) -> None:
    said: list[str] = []
    q.db.add_notice_handler(lambda note: said.append(str(note.message_primary)))
    claim = running(q, devices=gpus(1, 2), gpus=1)
    q.live_on(130)
    theirs = tripping(q, claim.job_id, "w2", devices=gpus(1, 2))
    assert stuck(q, claim) == 1
    assert health(q) == {"G0": "ok", "G1": "quarantined"}
    assert theirs.complete() == "done"
    (event,) = q.events("stuck")
    assert event["data"]["held_by_others"] == [{"device": "G0", "job_id": claim.job_id, "worker": "w2"}]
    (line,) = [text for text in said if "UNKILLABLE" in text]
    assert f"device G0 by now (job {claim.job_id} of worker w2)" in line
    assert "gangq.quarantine('G0')" in line


def test_what_another_trip_withholds_for_a_while_is_then_kept_for_good(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    q.live_on(130)
    tripping(q, claim.job_id, "w2", devices=gpus(1)).trip(exit_in_s=5)
    assert health(q) == {"G0": "exiting"}
    assert stuck(q, claim) == 1
    q.live_on(300)
    assert health(q) == {"G0": "quarantined"}


def test_a_claim_of_one_of_the_devices_waits_for_the_report(q: Q, dsn: str) -> None:
    """It had seen the device free: without the lock on its worker it would collide on the key."""
    claim = running(q, devices=gpus(1), gpus=1)
    q.live_on(130)
    taker = q.worker("w2", devices=gpus(1))
    with psycopg.connect(dsn) as third, ThreadPoolExecutor(1) as pool:
        third.execute("select gangq.report_stuck('w1', %s, %s)", [claim.incarnation, '{"pid": 1}'])
        got = pool.submit(taker.claim)
        while not third.execute("select 1 from pg_locks where not granted").fetchone():
            assert not got.done(), got.result()
        third.commit()
        assert got.result() == []


@pytest.mark.parametrize("drained", ["before", "after"])
def test_a_gang_does_not_start_before_the_lease_of_a_member_that_cannot_be_killed_is_over(
    q: Q, drained: str
) -> None:
    q.call("set_queue", name="default", backoff_s=0.01)
    gang, (a, b, c) = q.submit_gang(2), q.workers(3)
    one, two = gang.start(a, b, c)
    ends = q.value("select expires_at from gangq.leases where incarnation = %(i)s", i=one.incarnation)
    one.trip(exit_in_s=3)
    if drained == "before":
        two.ack()
    stuck(q, one, q.value("select name from gangq.incarnations where id = %(i)s", i=one.incarnation))
    if drained == "after":
        two.ack()
    assert gang.state == "blocked"
    assert gang.live["not_before"] == ends


def test_gangs_that_back_off_for_longer_or_ran_elsewhere_keep_their_time(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=900, backoff_max_s=900)
    first, (a, b) = q.submit_gang(1), q.workers(2)
    (claim,) = first.start(a, b)
    other = q.submit_gang(1, due_at=q.value("select gangq.now() + interval '20 s'"))
    claim.trip(exit_in_s=3)
    before = first.live["not_before"], other.live["not_before"]
    stuck(q, claim, q.value("select name from gangq.incarnations where id = %(i)s", i=claim.incarnation))
    assert (first.live["not_before"], other.live["not_before"]) == before


def test_members_of_a_stuck_worker_leave_their_devices_in_quarantine(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    a, b = q.worker("a", devices=gpus(1, prefix="A")), q.worker("b", devices=gpus(1, prefix="B"))
    claims = {c.incarnation: c for c in gang.start(a, b)}
    stuck(q, claims[a.incarnation], "a")
    q.live_on(125, b)
    assert gang.state == "draining"
    claims[b.incarnation].ack()
    assert health(q) == {"A0": "quarantined", "B0": "ok"}


def test_a_stuck_report_repeated_is_harmless_and_one_that_makes_no_sense_is_refused(q: Q) -> None:
    claim = running(q)
    for evidence in (None, {}, [], "sure"):
        with refused(INVALID, "evidence"):
            q.call("report_stuck", worker="w1", incarnation=claim.incarnation, evidence=evidence)
    for name, incarnation in (("w2", claim.incarnation), ("w1", 99), ("w1", None)):
        with refused(MISSING):
            q.call("report_stuck", worker=name, incarnation=incarnation, evidence={"pid": 1})
    assert (stuck(q, claim), stuck(q, claim)) == (0, 0)
    assert len(q.events("stuck")) == 1


# The client library says the same ---------------------------------------------------------------------------


def test_the_clients_of_both_kinds_speak_these_verbs(q: Q, client: Any) -> None:
    job, worker = q.submit(gpus=1), q.worker(devices=gpus(1))
    claim = worker.take()
    assert (
        client.suspect(
            incarnation=worker.incarnation, job_id=job, token=claim.token, class_="stall", evidence={"n": 1}
        )
        == "noted"
    )
    assert (
        client.trip(
            incarnation=worker.incarnation,
            job_id=job,
            token=claim.token,
            code=78,
            error={"type": "Idle"},
            evidence={"n": 2},
            devices=["G0"],
            exit_in_s=5,
        )
        == "scheduled"
    )
    (left,) = client.unproven(worker="w1")
    assert (left.incarnation, left.exit_code) == (worker.incarnation, 78)
    (row,) = client.trips(job_id=job)
    assert (row.code, row.class_, row.devices, row.evidence) == (78, "health", ["G0"], {"n": 2})
    assert [e.kind for e in client.evidence(job_id=job)] == ["suspect", "trip"]
    assert client.devices()[0].health == "exiting"
    assert client.workers()[0].exit_code == 78
    assert client.report_stuck(worker="w1", incarnation=worker.incarnation, evidence={"pid": 1}) == 1
    assert client.workers()[0].reboot_needed is True
    assert client.report_dead(worker="w1", incarnation=worker.incarnation, evidence={"by": "t"}) == 1
    assert client.flagged() == []
    assert client.bounce(incarnation=worker.incarnation, host="elsewhere") == "unknown"
    client.bounced(incarnation=worker.incarnation, ok=False, detail={"why": "test"})
    assert client.jobs()[0].model is None
