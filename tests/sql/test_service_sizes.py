"""A service whose gangs change their size: every update ends, and what is promised meanwhile is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sql.drive import Q
from sql.services import Replicas, endpoints, gangs, put, service

SIZES = range(1, 5)


def turns(q: Q, fleet: Replicas, most: int = 40) -> Iterator[tuple[int, int]]:
    """Turns until every gang is of the wanted revision: after each, how many replicas are ready and exist."""
    for _ in range(most):
        fleet.turn()
        yield len(endpoints(q)), sum(gang["members"] for gang in gangs(q))
        if service(q)["state"] == "ready":
            return
        q.later(1)
    raise AssertionError(f"the update has not ended: {service(q)}, {gangs(q)}")


def settled(q: Q, fleet: Replicas) -> None:
    for _ in turns(q, fleet):
        pass


@pytest.mark.parametrize("surge", [0, 1, 2])
@pytest.mark.parametrize("old", SIZES)
def test_gangs_of_any_size_replace_those_of_any_other(q: Q, old: int, surge: int) -> None:
    fleet = Replicas.of_hosts(q, 5, slots=4)
    for new in SIZES:
        put(q, replicas=6, gang=old, surge=surge, version=f"before {new}")
        settled(q, fleet)
        had = len(endpoints(q))
        put(q, task=None, gang=new, version="new")
        wanted = service(q)["replicas"]
        for ready, existing in turns(q, fleet):
            if surge == 0:
                assert ready > wanted - new - old
                assert existing <= wanted
            else:
                assert ready >= had
                assert existing < wanted + surge * old + new
        assert {gang["members"] for gang in gangs(q)} == {new}
        assert len(endpoints(q)) == wanted
        put(q, task=None, stopped=True)
        fleet.settle(2)


def test_with_surge_0_a_halted_service_gets_gangs_of_the_good_revision_larger_than_itself(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2, slots=4)
    put(q, replicas=4, gang=4, surge=0, ready_within_s=30)
    settled(q, fleet)
    fleet.turn()
    put(q, task=None, replicas=1, gang=1, version="bad")
    fleet.becomes_ready = lambda _: False
    fleet.settle(3)
    q.live_on(35, *fleet.workers)
    assert service(q)["state"] == "halted"
    fleet.becomes_ready = lambda _: True
    fleet.settle(6)
    assert [(gang["revision"], gang["serves"]) for gang in gangs(q)] == [(1, True)]


def test_whether_its_gangs_could_ever_run_is_asked_once_a_kind_and_not_for_each_of_them(q: Q) -> None:
    """Without a worker for them each of 200 was asked about at each step: the tick that made them took 13 s."""
    put(q, replicas=30)
    with q.db.transaction():
        q.db.execute("set local track_functions = 'all'")
        q.db.execute("select gangq.tick(force => true)")
        row = q.db.execute(
            "select calls from pg_stat_xact_user_functions where funcname = 'kind_infeasible'"
        ).fetchone()
    assert len(gangs(q)) == 30
    assert row is not None
    assert row["calls"] <= 2 * 30 + 5, "as each is made, and once a step"
