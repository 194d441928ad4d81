"""Leases where nobody but a slow cron ticks: every gap is long, and not every gap may pardon everybody."""

from __future__ import annotations

import pytest

from sql.drive import Q, Worker

GAP_S = 600
LEASE_S = 120


def cron(q: Q, *heard: Worker) -> None:
    """One gap between two runs of the cron, with heartbeats of these workers in it, and the tick that ends it."""
    q.live_on(GAP_S, *heard, tick=False)
    q.tick()


def test_a_silent_worker_is_pardoned_for_one_gap_and_judged_at_the_next(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take()
    q.tick()
    cron(q)
    assert (q.state(job), worker.row["state"]) == ("running", "live"), (
        "the cron may have been away, not the worker"
    )
    cron(q)
    row = q.job(job)
    assert (row["state"], row["crashes"], worker.row["state"]) == ("pending", 1, "dead")
    assert len(q.events("outage")) == 1


def test_each_sign_of_life_is_good_for_one_more_gap(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    claim = worker.take()
    q.tick()
    for grants in (1, 2, 3):
        cron(q)
        assert (q.state(job), len(q.events("outage"))) == ("running", grants)
        q.later(1)
        assert worker.beat(claim) == {claim.job_id: "continue"}
    cron(q)
    assert q.state(job) == "running"
    cron(q)
    assert (q.state(job), worker.row["state"]) == ("pending", "dead")


@pytest.mark.parametrize("gap", [25, 70, 100, 150, GAP_S])
def test_a_dead_worker_is_freed_at_the_first_tick_after_its_lease_however_seldom_anybody_ticks(
    q: Q, gap: int
) -> None:
    job, dead, alive = q.submit(), q.worker("dead"), q.worker("alive")
    dead.take()
    q.tick()
    # Its lease is counted from the tick that ends a long gap, because it could not have been heard in that.
    counted_from = gap if gap > 0.75 * LEASE_S else 0
    silent_s = 0
    while q.state(job) == "running":
        assert silent_s <= counted_from + LEASE_S, "this tick was to free it"
        q.live_on(gap, alive, tick=False)
        silent_s += gap
        q.tick()
    assert silent_s > counted_from + LEASE_S, "no tick before"
    assert (q.state(job), dead.row["state"], alive.row["state"]) == ("pending", "dead", "live")
    assert q.job(job)["crashes"] == 1
