"""Placement wrongs nobody: no gang hides behind others, nobody starts what it may not, no innocent is passed over."""

from __future__ import annotations

import pytest

from sql.drive import Q

CROWD = 220
"""More than one pass may place, and more of a kind than a pass looks at."""

CROWDS = {
    "alike": {"size": "1", "cpus": "0"},
    "of ten sizes": {"size": "1 + n % 10", "cpus": "0"},
    "each of another shape": {"size": "1", "cpus": "n"},
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_gang_that_fits_is_placed_however_many_that_do_not_come_before_it(q: Q, crowd: str) -> None:
    needs = CROWDS[crowd]
    q.sql(
        f"select gangq.submit_gang('huge', {needs['size']}, gpus => 8, priority => 9, "
        f"options => jsonb_build_object('cpus', {needs['cpus']}))"
        f" from generate_series(1, {CROWD}) n"
    )
    gang = q.submit_gang(2, priority=-9)
    q.workers(2)
    assert q.place()["placed"] == 1
    assert gang.state == "reserved"


@pytest.mark.parametrize("size", [2, 1], ids=["alike", "smaller"])
def test_a_gang_is_placed_however_many_are_backing_off_before_it(q: Q, size: int) -> None:
    q.sql(f"select gangq.submit_gang('train', {size}) from generate_series(1, {CROWD}) n")
    q.sql("update gangq.live_gangs set not_before = gangq.now() + interval '1 hour'")
    gang = q.submit_gang(2)
    q.workers(2)
    q.tick_once()
    assert gang.state == "reserved"


def test_of_more_gangs_alike_than_a_pass_looks_at_all_that_fit_are_placed(q: Q) -> None:
    q.sql("select gangq.submit_gang('train', 1) from generate_series(1, 260) n")
    q.worker(slots=300)
    assert q.place() == {"placed": 200, "again": True}, "the first pass has not seen them all"
    q.tick()
    assert q.sql("select state, count(*) as n from gangq.gangs group by state") == [
        {"state": "reserved", "n": 260}
    ]


# Quarantine after the reservation ---------------------------------------------------------------------------


def test_a_worker_quarantined_after_the_reservation_does_not_start_its_members(q: Q) -> None:
    gang, (one, two) = q.submit_gang(2), q.workers(2)
    q.tick()
    q.call("quarantine", worker="w1")
    assert one.claim() == []
    assert gang.states == ["reserved", "reserved"]
    q.tick()
    assert (gang.state, gang.row["attempts"]) == ("blocked", 0), "it does not wait for its deadline"
    gang.skip_backoff()
    q.tick()
    assert gang.state == "blocked"
    q.call("unquarantine", worker="w1")
    gang.restart(one, two)


def test_a_sibling_that_has_claimed_is_told_when_a_worker_of_its_gang_is_quarantined(q: Q) -> None:
    gang, (one, two) = q.submit_gang(2), q.workers(2)
    q.tick()
    (claim,) = two.claim()
    q.call("quarantine", worker="w1")
    assert one.claim() == []
    q.tick()
    assert (gang.state, gang.row["drain_cause"]) == ("draining", "placement_miss")
    assert two.beat(claim) == {claim.job_id: "preempt"}
    claim.ack()
    assert (gang.state, [m["attempts"] for m in gang.members]) == ("blocked", [0, 0])


# Who is passed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [0, 1], ids=["nobody had claimed", "one had claimed"])
@pytest.mark.parametrize("why", ["drains", "is quarantined", "retires", "dies"])
def test_who_still_has_time_to_claim_is_not_passed_over_because_another_worker_stops(
    q: Q, why: str, claimed: int
) -> None:
    gang, workers = q.submit_gang(3), q.workers(3)
    q.tick()
    early, stopping, waiting = workers
    claims = early.claim() if claimed else []
    if why == "is quarantined":
        q.call("quarantine", worker=stopping.name)
    elif why == "dies":
        stopping.report_dead()
    else:
        stopping.retire(final=why == "retires")
    q.tick()
    assert gang.state == ("draining" if claimed else "blocked")
    assert [w.row["passed_over_until"] for w in (early, waiting)] == [None, None]
    for claim in claims:
        claim.ack()
    q.worker("w4")
    gang.skip_backoff()
    q.tick()
    assert gang.state == "reserved", "it is placed again at once, with those two"


def test_who_missed_the_deadline_is_passed_over_though_another_worker_stopped_too(q: Q) -> None:
    gang, (one, two, three) = q.submit_gang(3, claim_deadline_s=5), q.workers(3)
    q.tick()
    one.claim()
    two.retire(final=False)
    q.later(6)
    q.tick()
    assert gang.state == "draining"
    assert one.row["passed_over_until"] is None
    assert three.row["passed_over_until"] > q.clock.now()
