"""YuniKorn's acceptance cases for gangs, Y01 to Y31: one test for each that concerns scheduling.

YuniKorn holds places with placeholder pods that real pods replace one by one; here a gang is reserved in one
transaction: an allocated placeholder is a member that is reserved, its replacement is the claim, a task group is a
role. Theirs has one timer for placeholders, ours two: of a gang that has no places yet (`timeout_s`), and of one
whose members do not claim theirs (`claim_deadline_s`).

Not translated, and why:

| cases | reason |
|---|---|
| Y13, Y14, Y18, Y19, Y20, Y29 | real pods smaller or larger than their placeholders: a member asks only once |
"""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, PLACED, STALE, WRONG_STATE, Claim, Q, Worker, ack_all, refused

LED: dict[str, Any] = {
    "roles": [{"name": "driver", "count": 1}, {"name": "server", "count": 2}],
    "completion": "driver",
    "failure_policy": "restart_member",
}
"""A gang that has come to its end when its driver has, whatever its servers do."""


def busy(q: Q, worker: Worker) -> Claim:
    """Something else runs there for as long as anybody knows. No pass runs before the claim: it would choose a worker
    of its own.
    """
    job = q.submit(budget_s=1e6, **PLACED)
    q.one("open_place", incarnation=worker.incarnation, job_id=job)
    return Claim(q, q.one("claim", incarnation=worker.incarnation), worker.incarnation)


@pytest.mark.parametrize("policy", ["priority", "fifo", "fair", "largest_first"])
def test_y01_gangs_are_safe_in_every_order_of_the_queue(q: Q, policy: str) -> None:
    q.call("set_queue", name="default", policy=policy)
    q.workers(3)
    first, second = q.submit_gang(2), q.submit_gang(2)
    q.tick()
    assert sorted([first.state, second.state]) == ["blocked", "reserved"]
    assert {tuple(set(gang.states)) for gang in (first, second)} == {("blocked",), ("reserved",)}


@pytest.mark.parametrize("limited", ["research.vision", "research"])
def test_y01_a_gang_above_the_maximum_of_its_queue_or_one_above_it_is_rejected(q: Q, limited: str) -> None:
    """Of several gangs that fit each by itself but not together, the later ones wait."""
    q.call("set_queue", name="research.vision")
    q.call("set_queue", name=limited, maximum={"cpus": 3})
    q.worker(slots=8, cpus=8, queues=["research.vision"])
    with refused(INVALID, f"4 cpus at once, and the maximum of queue {limited} is 3"):
        q.submit_gang(4, cpus=1, queue="research.vision")
    first, second = (q.submit_gang(3, cpus=1, queue="research.vision") for _ in range(2))
    q.tick()
    assert (first.state, second.state) == ("reserved", "blocked")


@pytest.mark.parametrize("policy", ["fifo", "fair"])
def test_y02_any_queue_takes_gangs_a_parent_too(q: Q, policy: str) -> None:
    """Theirs takes them in a leaf of first-in-first-out order only."""
    q.call("set_queue", name="research.vision", policy=policy)
    q.call("set_queue", name="research", policy=policy)
    q.worker(slots=4, queues=["research.vision", "research"])
    gangs = [q.submit_gang(2, queue=queue) for queue in ("research", "research.vision")]
    q.tick()
    assert [gang.state for gang in gangs] == ["reserved"] * 2


def test_y03_a_gang_that_is_reserved_and_taken_back_has_used_nothing(q: Q) -> None:
    q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    assert gang.state == "reserved"
    q.one("rollback_gang", gang_id=gang.id, reason="test")
    assert (gang.state, gang.row["attempts"], [m["attempts"] for m in gang.members]) == ("blocked", 0, [0, 0])


def test_y04_the_last_claim_makes_the_gang_run_and_only_once(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    workers[0].claim()
    assert (gang.state, gang.live["go_at"]) == ("reserved", None)
    workers[1].claim()
    assert gang.state == "running"
    at = gang.live["go_at"]
    q.settle()
    assert gang.live["go_at"] == at


def test_y05_a_soft_timeout_makes_single_jobs_of_a_gang_that_finds_no_place(q: Q) -> None:
    workers = q.workers(3)
    other = busy(q, workers[2])
    gang = q.submit_gang(3, timeout_s=100, timeout_style="soft")
    q.live_on(99, *workers, step=9)
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 3)
    assert workers[0].claim() == [], "it waits for all its places"
    q.live_on(1, *workers)
    assert (gang.state, gang.members) == ("cancelled", [])
    assert gang.row["reason"].startswith("not placed within 100 s: ")
    assert gang.row["reason"].endswith("its members run as single jobs")
    first, second = workers[0].take(), workers[1].take()
    other.complete()
    assert [c.job_id for c in (first, second, workers[2].take())] == gang.job_ids
    assert first["gang_id"] is None
    assert first.complete() == "done", "no sibling is waited for"


def test_y06_a_hard_timeout_fails_a_gang_that_finds_no_place(q: Q) -> None:
    workers = q.workers(3)
    other = busy(q, workers[2])
    gang = q.submit_gang(3, timeout_s=100, timeout_style="hard")
    q.live_on(99, *workers, step=9)
    assert gang.state == "blocked"
    q.live_on(1, *workers)
    assert (gang.state, gang.states) == ("failed", ["failed"] * 3)
    assert gang.row["reason"].startswith("not placed within 100 s: ")
    other.complete()
    q.tick()
    assert [worker.claim() for worker in workers] == [[], [], []]
    assert q.sql("select * from gangq.plans") == []


@pytest.mark.parametrize("style", ["soft", "hard"])
def test_y05_y06_what_is_told_to_stop_is_counted_until_it_confirms_and_no_timeout_strikes_before(
    q: Q, style: str
) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2, timeout_s=15, timeout_style=style, claim_deadline_s=10)
    q.tick()
    (claim,) = workers[0].claim()
    q.live_on(90, *workers)
    assert (gang.state, gang.states) == ("draining", ["preempting", "blocked"])
    assert [worker.free["slots"] for worker in workers] == [0, 1]
    claim.ack()
    assert (gang.state, workers[0].free["slots"]) == ("blocked", 1)
    busy(q, workers[0])
    gang.skip_backoff()
    q.live_on(20, *workers, step=5)
    assert gang.state == {"soft": "cancelled", "hard": "failed"}[style]


def test_y07_a_reservation_half_claimed_in_time_is_given_up_whole(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2, claim_deadline_s=10)
    q.tick()
    (claim,) = workers[0].claim()
    q.later(11)
    for worker in workers:
        worker.beat()
    q.tick()
    assert gang.state == "draining", "the one that came is told to stop"
    assert gang.states == ["preempting", "blocked"], "the place that was not claimed is free at once"
    claim.ack()
    assert gang.states == ["blocked", "blocked"]


def test_y08_a_reservation_taken_back_already_is_not_taken_back_again_at_its_deadline(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2, claim_deadline_s=10)
    q.tick()
    (claim,) = workers[0].claim()
    assert q.one("preempt_gang", gang_id=gang.id)
    told_at = claim.live["told_at"]
    q.live_on(30, *workers)
    assert (gang.states, claim.live["told_at"]) == (["preempting", "blocked"], told_at)
    claim.ack()
    row = gang.row
    assert (row["state"], row["preemptions"], row["placement_misses"]) == ("blocked", 1, 0)
    assert len(q.events("drain", gang_id=gang.id)) == 1


def test_y09_when_the_rest_has_come_to_its_end_a_place_not_claimed_is_given_back(q: Q) -> None:
    workers = q.workers(3)
    gang = q.submit_gang(**LED)
    claims = gang.start(*workers)
    claims[2].fail()
    gang.skip_backoff()
    q.tick()
    assert gang.states == ["running", "running", "reserved"]
    claims[0].complete()
    assert gang.states == ["done", "preempting", "blocked"]
    assert workers[2].claim() == []
    claims[1].ack()
    assert (gang.state, gang.states) == ("done", ["done", "cancelled", "cancelled"])
    assert [worker.free["slots"] for worker in workers] == [1, 1, 1]


def test_y10_a_member_told_to_stop_already_is_not_told_again_when_the_rest_has_come_to_its_end(q: Q) -> None:
    workers = q.workers(3)
    roles = [{"name": "driver", "count": 1}, {"name": "server", "count": 2, "min": 1}]
    gang = q.submit_gang(roles=roles, completion="driver")
    claims = gang.start(*workers)
    assert q.one("shrink_gang", gang_id=gang.id, job_ids=[claims[2].job_id])
    told_at = claims[2].live["told_at"]
    q.later(5)
    claims[0].complete()
    assert gang.states == ["done", "preempting", "preempting"]
    assert claims[2].live["told_at"] == told_at < claims[1].live["told_at"]
    claims[1].ack()
    assert gang.state == "draining", "it waits for both"
    claims[2].ack()
    assert (gang.state, gang.states) == ("done", ["done", "cancelled", "cancelled"])
    assert [m["stops"] for m in gang.members] == [0, 0, 1]


def test_y11_y15_a_place_is_for_the_member_of_its_own_role_only(q: Q) -> None:
    driver, executor = q.worker("w1", labels={"role": "a"}), q.worker("w2", labels={"role": "b"})
    roles = [
        {"name": "driver", "count": 1, "labels": {"role": "b"}},
        {"name": "executor", "count": 1, "labels": {"role": "a"}},
    ]
    gang = q.submit_gang(roles=roles)
    behind = q.submit_gang(2)
    solo = q.submit(**PLACED)
    q.tick()
    assert gang.placed_on == ["w2", "w1"]
    assert [[c.job_id for c in worker.claim()] for worker in (driver, executor)] == [
        [gang.job_ids[1]],
        [gang.job_ids[0]],
    ]
    assert (behind.state, q.state(solo)) == ("blocked", "pending")


def test_y12_y23_a_member_without_a_place_is_claimed_by_nobody(q: Q) -> None:
    """The normal way, one by one where there is room, is not for members: they would hold what the others need."""
    workers = q.workers(2)
    other = busy(q, workers[0])
    gang = q.submit_gang(2)
    q.tick()
    assert [worker.claim() for worker in workers] == [[], []]
    assert gang.states == ["blocked", "blocked"]
    other.complete()
    q.tick()
    assert len(gang.claimed_by(*workers)) == 2


def test_y16_a_member_whose_worker_has_gone_is_placed_on_another(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    workers[0].report_dead()
    q.settle()
    spare = q.worker("w3")
    gang.skip_backoff()
    gang.start(workers[1], spare)
    assert sorted(gang.placed_on) == ["w2", "w3"]


def test_y17_what_is_of_no_gang_runs_beside_a_reservation_in_what_that_leaves(q: Q) -> None:
    worker = q.worker(slots=3)
    gang = q.submit_gang(2)
    q.tick()
    solo = q.submit(count=2, **PLACED)
    assert (gang.state, worker.free["slots"]) == ("reserved", 1)
    claims = worker.claim()
    assert {c.job_id for c in claims} == {*gang.job_ids, solo[0]}
    assert q.state(solo[1]) == "pending"


def test_y21_a_place_that_was_taken_away_is_not_claimed_any_more(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    assert q.one("preempt_gang", gang_id=gang.id)
    assert [worker.claim() for worker in workers] == [[], []]
    assert (gang.state, gang.row["preemptions"]) == ("blocked", 1)
    claims = gang.start(*workers)
    assert [c["epoch"] for c in claims] == [2, 2]


def test_y22_a_member_whose_worker_may_not_take_it_any_more_is_placed_on_another(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    q.call("quarantine", worker="w1", reason="its fan")
    spare = q.worker("w3")
    assert workers[0].claim() == []
    q.tick()
    assert gang.states == ["blocked", "blocked"]
    gang.skip_backoff()
    gang.start(workers[1], spare)
    assert sorted(gang.placed_on) == ["w2", "w3"]


def test_y24_a_reservation_lost_with_its_node_is_lost_for_the_whole_gang(q: Q) -> None:
    workers = q.workers(3)
    gang = q.submit_gang(3)
    q.tick()
    workers[1].report_dead()
    q.settle()
    assert gang.states == ["blocked"] * 3
    behind = q.submit_gang(2)
    q.tick()
    assert behind.state == "reserved", "what is left is for whoever fits"


def test_y24_when_one_of_seven_is_displaced_all_seven_are(q: Q) -> None:
    """Theirs went on with six placeholders."""
    q.call("set_queue", name="default", min_run_s=0)
    workers = q.workers(7)
    gang = q.submit_gang(7)
    claims = gang.start(*workers)
    above = q.submit_gang(1, priority=9)
    q.tick()
    assert gang.states == ["preempting"] * 7
    ack_all(claims)
    q.tick()
    assert (gang.state, above.state) == ("blocked", "reserved")


def test_y25_a_gang_cancelled_before_any_member_ran_ends_cleanly(q: Q) -> None:
    q.workers(2)
    waiting, reserved = q.submit_gang(5, wait_for_hardware=True), q.submit_gang(2)
    q.tick()
    waiting.cancel()
    reserved.cancel()
    assert (waiting.state, reserved.state) == ("cancelled", "cancelled")
    assert q.value("select count(*) from gangq.live_jobs") == 0
    assert q.sql("select * from gangq.plans") == []


def test_y26_a_release_confirmed_twice_is_harmless(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    claims = gang.start(*workers)
    claims[0].fail()
    assert [claims[1].ack(), claims[1].ack()] == ["preempted", "repeated"]
    assert gang.states == ["blocked"] * 2
    gang.restart(*workers)
    assert claims[1].ack() == "repeated"
    assert gang.state == "running", "the first epoch's release stops nothing of the second"


def test_y27_a_scheduler_that_comes_back_goes_on_from_what_is_reserved(q: Q, dsn: str) -> None:
    """There is no scheduler to restart: whoever ticks next sees the same reservations."""
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    with q.connected(dsn) as other:
        other.tick()
        assert (gang.state, gang.row["epoch"]) == ("reserved", 1)
    assert len(gang.claimed_by(*workers)) == 2
    assert gang.state == "running"


def test_y28_beyond_the_most_running_gangs_of_a_queue_the_next_waits_without_holding_anything(q: Q) -> None:
    q.call("set_queue", name="default", max_running_gangs=1)
    workers = q.workers(4)
    first, second = q.submit_gang(2), q.submit_gang(2)
    q.tick()
    assert (first.state, second.state) == ("reserved", "blocked")
    (verdict,) = q.sql("select * from gangq.verdicts")
    numbers = verdict["numbers"]
    assert (verdict["gate"], numbers["limit"], numbers["limit"] - numbers["have"]) == ("running_limit", 1, 1)
    assert q.sql("select * from gangq.plans") == []
    claims = first.claimed_by(*workers)
    for claim in claims:
        claim.complete()
    q.tick()
    assert second.state == "reserved"


def test_y30_what_a_gang_uses_is_the_same_reserved_running_and_told_to_stop(q: Q) -> None:
    workers = q.workers(2, cpus=4)
    gang = q.submit_gang(2, cpus=3)

    def used() -> list[tuple[int, int, float]]:
        rows = q.sql("select gangs, jobs, cpus from gangq.queue_usage(array['default'])")
        return [(row["gangs"], row["jobs"], float(row["cpus"])) for row in rows]

    assert used() == []
    q.tick()
    assert (gang.state, used()) == ("reserved", [(1, 2, 6.0)])
    claims = gang.claimed_by(*workers)
    assert (gang.state, used()) == ("running", [(1, 2, 6.0)])
    gang.cancel()
    assert (gang.state, used()) == ("draining", [(1, 2, 6.0)])
    ack_all(claims)
    assert used() == []


def test_y31_gangs_that_hold_places_come_before_nobody_and_after_nobody_who_waits(q: Q) -> None:
    """What is reserved is no longer in the order of what waits: it keeps its places whoever comes."""
    q.workers(2)
    low = q.submit_gang(2, priority=0)
    q.tick()
    high = q.submit_gang(2, priority=9)
    q.tick()
    assert (low.state, high.state) == ("reserved", "blocked")


def test_a_stale_claim_of_an_earlier_epoch_changes_nothing(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    old = gang.start(*workers)
    old[0].fail()
    old[1].ack()
    gang.restart(*workers)
    with refused(STALE):
        old[1].complete()
    with refused(WRONG_STATE):
        q.call("reserve_gang", gang_id=gang.id, incarnations=[w.incarnation for w in workers])
    assert gang.state == "running"
