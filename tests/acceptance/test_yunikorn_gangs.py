"""YuniKorn's acceptance cases for gangs, Y01 to Y31: one test for each that concerns scheduling.

YuniKorn holds places with placeholder pods that real pods replace one by one; here a gang is reserved in one
transaction: an allocated placeholder is a member that is reserved, its replacement is the claim.

Not translated, and why:

| cases | reason |
|---|---|
| Y02 | task groups on a parent queue are refused there; here any queue takes gangs, in any order (Y01) |
| Y11, Y12, Y15, Y17, Y23 | which placeholder a real pod may replace: each member has its own reservation |
| Y13, Y14, Y18, Y19, Y20, Y29 | real pods smaller or larger than their placeholders: a member asks once |
| Y30 | accounting of placeholders beside real allocations: there is one allocation |
"""

from __future__ import annotations

import pytest

from sql.drive import STALE, WRONG_STATE, Q, refused


@pytest.mark.parametrize("policy", ["priority", "fifo", "fair", "largest_first"])
def test_y01_gangs_are_safe_in_every_order_of_the_queue(q: Q, policy: str) -> None:
    q.call("set_queue", name="default", policy=policy)
    q.workers(3)
    first, second = q.submit_gang(2), q.submit_gang(2)
    q.tick()
    assert sorted([first.state, second.state]) == ["blocked", "reserved"]
    assert {tuple(set(gang.states)) for gang in (first, second)} == {("blocked",), ("reserved",)}


def test_y03_a_gang_that_is_reserved_and_taken_back_has_used_nothing(q: Q) -> None:
    q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    assert gang.state == "reserved"
    q.one("rollback_gang", gang_id=gang.id, reason="test")
    assert (gang.state, gang.row["attempts"], [m["attempts"] for m in gang.members]) == ("blocked", 0, [0, 0])


def test_y04_y09_the_last_claim_makes_the_gang_run_and_only_once(q: Q) -> None:
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
    claim.ack()
    assert gang.states == ["blocked", "blocked"]


def test_y16_y22_a_member_whose_worker_has_gone_is_placed_on_another(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    workers[0].report_dead()
    q.settle()
    spare = q.worker("w3")
    gang.skip_backoff()
    gang.start(workers[1], spare)
    assert sorted(gang.placed_on) == ["w2", "w3"]


def test_y21_y24_a_reservation_lost_with_its_node_is_lost_for_the_whole_gang(q: Q) -> None:
    workers = q.workers(3)
    gang = q.submit_gang(3)
    q.tick()
    workers[1].report_dead()
    q.settle()
    assert gang.states == ["blocked"] * 3
    behind = q.submit_gang(2)
    q.tick()
    assert behind.state == "reserved", "what is left is for whoever fits"


def test_y25_a_gang_cancelled_before_any_member_ran_ends_cleanly(q: Q) -> None:
    q.workers(2)
    waiting, reserved = q.submit_gang(5, wait_for_hardware=True), q.submit_gang(2)
    q.tick()
    waiting.cancel()
    reserved.cancel()
    assert (waiting.state, reserved.state) == ("cancelled", "cancelled")
    assert q.value("select count(*) from gangq.live_jobs") == 0
    assert q.sql("select * from gangq.plans") == q.sql("select * from gangq.earmarks") == []


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
    q.sql("update gangq.queues_table set max_running_gangs = 1 where name = 'default'")
    workers = q.workers(4)
    first, second = q.submit_gang(2), q.submit_gang(2)
    q.tick()
    assert (first.state, second.state) == ("reserved", "blocked")
    (verdict,) = q.sql("select * from gangq.verdicts")
    assert (verdict["gate"], verdict["numbers"]["limit"], verdict["numbers"]["used"]) == (
        "running_limit",
        1,
        1,
    )
    assert q.sql("select * from gangq.earmarks") == []
    claims = first.claimed_by(*workers)
    for claim in claims:
        claim.complete()
    q.tick()
    assert second.state == "reserved"


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
