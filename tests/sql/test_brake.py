"""Classes that only notify, suspicions, and the brake that holds trips of a whole fleet."""

from __future__ import annotations

import pytest

from sql.drive import INVALID, STALE, Claim, Q, Worker, gpus, refused
from sql.tripped import health, running, setting

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


def test_a_trip_held_before_the_clock_was_set_back_is_let_go_after_its_time_from_now(q: Q) -> None:
    setting(q, brake_hold_s=100)
    claims = fleet(q, 5)
    outcomes: list[str] = []
    for moved in (-3600, 60, 60):
        for claim in claims:
            Worker(q, "", {"incarnation": claim.incarnation}).beat(claim)
            claim.suspect()
        outcomes.append(claims[0].trip(exit_in_s=5))
        q.later(moved)
    for claim in claims:
        Worker(q, "", {"incarnation": claim.incarnation}).beat(claim)
        claim.suspect()
    assert [*outcomes, claims[0].trip(exit_in_s=5)] == ["held", "held", "held", "scheduled"]


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
