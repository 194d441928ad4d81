"""A queue takes back what it is guaranteed from those that borrow, whatever their priority, and never in circles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql.drive import Gang, Q, Worker, ack_all


def queues(q: Q, **guaranteed: dict[str, Any] | None) -> None:
    """Queues by name (a_x: a.x), with what each is guaranteed."""
    for name, resources in guaranteed.items():
        q.call("set_queue", name=name.replace("_", "."))
        q.sql(
            "update gangq.queues_table set guaranteed = %(g)s where name = %(n)s",
            g=json.dumps(resources or {}),
            n=name.replace("_", "."),
        )


def fleet(q: Q, count: int) -> list[Worker]:
    names = [row["name"] for row in q.sql("select name from gangq.queues_table")]
    return [q.worker(f"w{n + 1}", queues=names) for n in range(count)]


def states(*gangs: Gang) -> list[str]:
    return [gang.state for gang in gangs]


def test_what_was_lent_is_claimed_back_from_a_higher_priority(q: Q) -> None:
    queues(q, a={"jobs": 2}, b=None)
    workers = fleet(q, 4)
    borrowed = [q.running_gang(*pair, queue="b", priority=9) for pair in (workers[:2], workers[2:])]
    q.beyond_min_run(*workers)
    back = q.submit_gang(2, queue="a")
    q.tick()
    assert sorted(states(*(gang for gang, _ in borrowed))) == ["draining", "running"]
    gone, claims = next((gang, claims) for gang, claims in borrowed if gang.state == "draining")
    ack_all(claims)
    q.tick()
    assert states(gone, back) == ["blocked", "reserved"]
    back.claimed_by(*workers)
    q.beyond_min_run(*workers)
    q.settle()
    assert states(gone, back) == ["blocked", "running"], (
        "of higher priority, but below a guarantee nobody reaches"
    )


@pytest.mark.parametrize(
    "why", ["beyond its guarantee", "no guarantee", "guarantee of something else", "young"]
)
def test_nothing_is_claimed_back(q: Q, why: str) -> None:
    guaranteed = {
        "beyond its guarantee": {"jobs": 1},
        "no guarantee": None,
        "guarantee of something else": {"gpus": 8},
        "young": {"jobs": 2},
    }
    queues(q, a=guaranteed[why], b=None)
    workers = fleet(q, 2)
    low, _ = q.running_gang(*workers, queue="b")
    if why != "young":
        q.beyond_min_run(*workers)
    q.submit_gang(2, queue="a")
    q.settle()
    assert low.state == "running"


def test_nobody_falls_below_its_own_guarantee(q: Q) -> None:
    queues(q, a={"jobs": 2}, b={"jobs": 2}, c=None)
    workers = fleet(q, 4)
    within, _ = q.running_gang(*workers[:2], queue="b", priority=-5)
    borrower, _ = q.running_gang(*workers[2:], queue="c", priority=5)
    q.beyond_min_run(*workers)
    q.submit_gang(2, queue="a")
    q.tick()
    assert states(within, borrower) == ["running", "draining"], "not the cheapest: the one that borrows"


def test_a_guarantee_protects_from_higher_priority_in_other_queues_and_not_in_its_own(q: Q) -> None:
    queues(q, a=None, b={"jobs": 2})
    workers = fleet(q, 2)
    within, _ = q.running_gang(*workers, queue="b")
    q.beyond_min_run(*workers)
    outside = q.submit_gang(2, queue="a", priority=9)
    q.settle()
    assert within.state == "running"
    outside.cancel()
    q.submit_gang(2, queue="b", priority=9)
    q.tick()
    assert within.state == "draining"


def test_several_victims_together_leave_a_queue_its_guarantee(q: Q) -> None:
    """Each of three could go alone; all three together would leave it one short of two."""
    queues(q, a={"jobs": 3}, b={"jobs": 2}, c=None)
    workers = fleet(q, 4)
    inside = [q.running_gang(worker, queue="b", priority=-5)[0] for worker in workers]
    q.beyond_min_run(*workers)
    asking = q.submit_gang(3, queue="a")
    q.settle()
    assert set(states(*inside)) == {"running"}
    assert asking.state == "blocked"
    two = q.submit_gang(2, queue="a", priority=1)
    q.tick()
    assert sorted(states(*inside)) == ["draining", "draining", "running", "running"]
    assert two.state == "blocked"
    q.submit_gang(1, queue="a", priority=1)
    q.tick()
    assert sorted(states(*inside)) == ["draining", "draining", "running", "running"], (
        "what leaves no longer counts"
    )


def test_of_a_tree_each_node_counts_that_does_not_hold_the_gang_too(q: Q) -> None:
    queues(q, a={"jobs": 3}, a_x={"jobs": 2}, a_y=None, b=None)
    workers = fleet(q, 3)
    sibling, _ = q.running_gang(*workers, queue="a.y", priority=5)
    q.beyond_min_run(*workers)
    q.submit_gang(2, queue="b", priority=9)
    q.settle()
    assert sibling.state == "running", "a would fall below its guarantee"
    q.submit_gang(2, queue="a.x")
    q.tick()
    assert sibling.state == "draining", "inside a nothing is lost"


def test_two_queues_never_reclaim_from_each_other_in_turns(q: Q) -> None:
    queues(q, a={"jobs": 2}, b={"jobs": 2})
    workers = fleet(q, 4)
    over = [q.running_gang(*pair, queue="b") for pair in (workers[:2], workers[2:])]
    q.beyond_min_run(*workers)
    back = q.submit_gang(2, queue="a")
    q.tick()
    gone, claims = next((gang, claims) for gang, claims in over if gang.state == "draining")
    ack_all(claims)
    q.tick()
    back.claimed_by(*workers)
    for _ in range(3):
        q.beyond_min_run(*workers)
        q.settle()
    assert states(back, gone) == ["running", "blocked"]
    assert len(q.events("preempt")) == 1
