"""Services that are scaled by their load or by the depth of a queue: in whole gangs, with delays, no flapping."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, MISSING, Q, Row, refused
from sql.services import Replicas, gangs, put, service, whole

pytestmark = pytest.mark.slow

MORE: dict[str, Any] = {
    "min_replicas": 2,
    "max_replicas": 8,
    "gang": 2,
    "up_after_s": 30,
    "down_after_s": 300,
}


@pytest.fixture
def fleet(q: Q) -> Replicas:
    """Four hosts with room for two replicas each."""
    return Replicas.of_hosts(q, 4)


def scaling(q: Q) -> Row:
    (found,) = q.sql("select * from gangq.scaling")
    return found


def say(fleet: Replicas, load: float) -> None:
    for claim in fleet.claims.values():
        if fleet.goes(claim):
            fleet.q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)


def go_on(fleet: Replicas, seconds: float, load: float | None = None, step: float = 5) -> None:
    """Time passes, while every replica says that it is so busy."""
    while seconds > 0:
        if load is not None:
            say(fleet, load)
        fleet.turn()
        fleet.q.later(min(step, seconds))
        seconds -= step
    fleet.turn()


def test_it_goes_up_and_down_by_whole_gangs_between_its_limits(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **MORE)
    seen = []
    go_on(fleet, 10, 1.0)
    assert service(q)["replicas"] == 2
    for load, time_s in ((1.0, 200), (0.0, 400)):
        for _ in range(time_s // 10):
            go_on(fleet, 10, load)
            seen.append(service(q)["replicas"])
            assert len(whole(q)) * 2 >= min(seen[-1], 2)
    assert seen == sorted(seen[: seen.index(8)]) + seen[seen.index(8) :], "not down before it was at its most"
    assert set(seen) <= {2, 4, 6, 8}
    assert seen[-1] == 2
    assert len(whole(q)) == len(gangs(q)) == 1
    assert q.events("service_scales")[-1]["data"]["to"] == 2
    assert scaling(q)["scaled_why"].startswith("load 0")


def test_what_it_wants_is_said_with_why_and_since_when_and_done_when_the_delay_is_over(
    q: Q, fleet: Replicas
) -> None:
    put(q, target_load=0.5, **MORE)
    go_on(fleet, 5, 0.5)
    assert scaling(q)["wants"] is None
    since = q.clock.now()
    go_on(fleet, 5, 1.0)
    told = scaling(q)
    assert (told["wants"], told["since"], told["why"]) == (4, since, "load 1.00, target 0.5")
    assert (told["due_at"] - since).total_seconds() == 30
    explained = str(q.call("explain_gang", gang_id=gangs(q)[0]["gang_id"]))
    assert "4 are asked for since" in explained
    assert "load 1.00, target 0.5" in explained
    go_on(fleet, 20, 1.0)
    assert service(q)["replicas"] == 2
    go_on(fleet, 10, 1.0)
    assert service(q)["replicas"] == 4
    assert scaling(q)["wants"] is None
    assert scaling(q)["scaled_why"] == "load 1.00, target 0.5"


def test_the_most_that_it_may_have_is_in_whole_gangs_too(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 1, slots=3)
    put(q, target_load=1e-6, **{**MORE, "gang": 3, "max_replicas": 100000, "up_after_s": 0})
    fleet.turn()
    say(fleet, 1e9)
    # It is ready, good, and scaled. A whole tick would go on and make 33332 gangs.
    q.sql("select gangq.keep_services(most => 3)")
    assert service(q)["replicas"] == 99999


def test_another_delay_counts_from_when_more_was_asked_for_and_is_shown(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **MORE)
    go_on(fleet, 10, 1.0)
    assert scaling(q)["wants"] == 4
    put(q, task=None, up_after_s=300)
    go_on(fleet, 5, 1.0)
    told = scaling(q)
    assert (told["due_at"] - told["since"]).total_seconds() == 300


def test_what_another_target_asks_for_is_asked_for_anew(q: Q, fleet: Replicas) -> None:
    q.call("set_queue", name="asks")
    put(q, target_load=0.5, **MORE)
    go_on(fleet, 25, 1.0)
    assert scaling(q)["wants"] == 4
    q.call("pause_task", task="ask")
    q.submit("ask", count=19, queue="asks")
    put(q, task=None, target_depth=5, depth_of="asks")
    assert scaling(q)["wants"] is None
    go_on(fleet, 25)
    assert service(q)["replicas"] == 2
    go_on(fleet, 10)
    assert service(q)["replicas"] == 4


def test_what_was_asked_for_too_short_a_time_is_not_done(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **MORE)
    for _ in range(10):
        go_on(fleet, 25, 1.0)
        go_on(fleet, 5, 0.5)
    assert q.events("service_scales") == []


def test_the_same_work_never_asks_for_more_and_then_for_fewer(q: Q, fleet: Replicas) -> None:
    """Whatever the work is: once the number has settled it stays."""
    put(q, target_load=0.7, **{**MORE, "up_after_s": 0, "down_after_s": 0})
    go_on(fleet, 10, 0.7)
    for work in (0.3, 0.69, 0.71, 0.77, 1.39, 1.41, 1.5, 2.1, 2.2, 2.8, 1.9, 1.26, 1.24, 0.7):
        for _ in range(6):
            go_on(fleet, 5, work / max(1, len(whole(q))))
        count = len(q.events("service_scales"))
        for _ in range(10):
            go_on(fleet, 5, work / max(1, len(whole(q))))
        assert len(q.events("service_scales")) == count, work


def test_a_load_that_swings_about_the_target_changes_nothing(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, replicas=6, **{**MORE, "up_after_s": 0, "down_after_s": 0})
    go_on(fleet, 10, 0.5)
    for load in (0.54, 0.31) * 5:
        go_on(fleet, 10, load)
    assert q.events("service_scales") == []


def test_a_stale_load_is_unknown_and_not_zero(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, replicas=8, **{**MORE, "down_after_s": 0})
    go_on(fleet, 10, 0.5)
    go_on(fleet, 600)
    assert service(q)["replicas"] == 8
    assert service(q)["load"] is None
    first = fleet.of_gang(gangs(q)[0]["gang_id"])
    for _ in range(10):
        for claim in first:
            q.call("report_load", job_id=claim.job_id, token=claim.token, load=0.0)
        go_on(fleet, 30)
    assert service(q)["replicas"] == 8, "three of four gangs may be as busy as they should be"
    go_on(fleet, 60, 0.0)
    assert service(q)["replicas"] == 2


def test_what_was_idle_and_says_nothing_any_more_is_not_removed_for_that(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, replicas=8, **MORE)
    go_on(fleet, 20, 0.0)
    assert scaling(q)["wants"] == 2
    go_on(fleet, 600)
    assert scaling(q)["wants"] is None
    assert service(q)["replicas"] == 8


def test_a_member_that_says_nothing_does_not_halve_the_load_of_its_gang(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **MORE)
    fleet.turn()
    first = fleet.of_gang(gangs(q)[0]["gang_id"])[0]
    q.call("report_load", job_id=first.job_id, token=first.token, load=0.8)
    assert service(q)["load"] == pytest.approx(0.8)


def test_what_leaves_is_the_gang_with_the_least_work_and_one_that_says_nothing_stays(
    q: Q, fleet: Replicas
) -> None:
    put(q, replicas=8, gang=2)
    fleet.settle(2)
    busy, idle, silent, half = [g["gang_id"] for g in gangs(q)]
    for gang, load in ((busy, 1.0), (idle, 0.1), (half, 0.5)):
        for claim in fleet.of_gang(gang):
            q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)
    put(q, task=None, replicas=4)
    fleet.settle(3)
    assert set(whole(q)) == {busy, silent}


def test_loads_write_their_own_row_and_none_else(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **MORE)
    go_on(fleet, 10, 0.5)
    before = q.sql("select xmin, * from gangq.scaling_table")
    go_on(fleet, 60, 0.52)
    assert q.sql("select xmin, * from gangq.scaling_table") == before


def test_it_is_scaled_by_the_depth_of_a_queue(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 4)
    q.call("set_queue", name="asks")
    put(q, target_depth=5, depth_of="asks", **{**MORE, "up_after_s": 10, "down_after_s": 20})
    q.call("pause_task", task="ask")
    ids = q.submit("ask", count=19, queue="asks")
    go_on(fleet, 5)
    assert (scaling(q)["wants"], scaling(q)["why"]) == (
        4,
        "19 jobs in queue asks, target 5 for each of 2 replicas",
    )
    go_on(fleet, 10)
    assert service(q)["replicas"] == 4
    q.call("cancel", job_ids=ids[:10])
    go_on(fleet, 30)
    assert service(q)["replicas"] == 2


def test_more_jobs_than_are_counted_are_said_to_be_more(q: Q, fleet: Replicas) -> None:
    q.call("set_queue", name="asks")
    put(q, target_depth=5, depth_of="asks", **MORE)
    q.call("pause_task", task="ask")
    q.submit("ask", count=100, queue="asks")
    go_on(fleet, 5)
    assert scaling(q)["why"] == "at least 80 jobs in queue asks, target 5 for each of 2 replicas"


def test_the_default_queue_has_the_name_of_the_service_and_exists(q: Q) -> None:
    with refused(MISSING, "chat"):
        put(q, target_depth=5, **MORE)
    q.call("set_queue", name="chat")
    put(q, target_depth=5, **MORE)
    assert scaling(q)["depth_of"] == "chat"


@pytest.mark.parametrize(
    ("options", "mentioning"),
    [
        ({"target_load": 0.5}, "has a maximum"),
        ({"max_replicas": 4}, "has one target"),
        ({"max_replicas": 4, "target_load": 1, "target_depth": 1}, "has one target"),
        ({"max_replicas": 4, "target_load": 1, "depth_of": "default"}, "depth_of is for target_depth"),
        ({"max_replicas": 4, "min_replicas": 5, "target_load": 1}, "min_replicas is 5"),
        ({"max_replicas": 4, "target_load": 0}, "target_load"),
        ({"max_replicas": 4, "target_load": 1, "up_after_s": -1}, "up_after_s"),
        ({"max_replicas": 100001, "target_load": 1}, "max_replicas"),
    ],
)
def test_what_is_wrong_is_said(q: Q, options: dict[str, Any], mentioning: str) -> None:
    with refused(INVALID, mentioning):
        put(q, **options)


def test_its_number_is_kept_within_its_limits_and_max_0_ends_the_scaling(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **{**MORE, "min_replicas": 3, "max_replicas": 5})
    assert service(q)["replicas"] == 4, "limits are rounded up to whole gangs, as replicas are"
    put(q, task=None, replicas=20)
    assert service(q)["replicas"] == 6
    assert put(q, task=None, max_replicas=0) == "changed"
    assert q.sql("select * from gangq.scaling") == []
    put(q, task=None, replicas=8)
    assert service(q)["replicas"] == 8


def test_a_program_that_declares_it_again_undoes_no_scaling_and_ends_what_it_does_not_declare(
    q: Q, fleet: Replicas
) -> None:
    declared: dict[str, Any] = {"source": "tasks:app", "replicas": 2, "target_load": 0.5, **MORE}
    put(q, **declared)
    go_on(fleet, 60, 1.0)
    assert service(q)["replicas"] == 4
    assert put(q, **declared) == "same"
    assert service(q)["replicas"] == 4
    put(q, source="tasks:app", replicas=2, gang=2)
    assert q.sql("select * from gangq.scaling") == []


@pytest.mark.parametrize("rolled_back", [False, True])
def test_what_is_asked_for_is_asked_for_anew_when_the_size_of_its_gangs_changes(
    q: Q, rolled_back: bool
) -> None:
    fleet = Replicas.of_hosts(q, 6)
    put(q, target_load=0.5, replicas=6, **{**MORE, "gang": 3, "max_replicas": 12})
    put(q, task=None, gang=2)
    go_on(fleet, 15, 0.6)
    assert (scaling(q)["replicas"], scaling(q)["wants"]) == (6, 8)
    if rolled_back:
        q.call("roll_back_service", name="chat", to_revision=1)
    else:
        put(q, task=None, gang=3)
    for _ in range(20):
        go_on(fleet, 5, 0.6)
        assert service(q)["replicas"] % 3 == 0
        assert q.violations() == []
    assert service(q)["replicas"] == 12


def test_rolled_back_to_smaller_gangs_it_has_no_more_than_its_maximum(q: Q) -> None:
    put(q, target_load=0.5, replicas=4, **{**MORE, "max_replicas": 4})
    put(q, task=None, gang=3)
    assert service(q)["replicas"] == 6, "its maximum in whole gangs"
    q.call("roll_back_service", name="chat", to_revision=1)
    assert service(q)["replicas"] == 4


def test_stopped_it_is_not_scaled(q: Q, fleet: Replicas) -> None:
    put(q, target_load=0.5, **{**MORE, "up_after_s": 0})
    go_on(fleet, 10, 0.5)
    q.call("stop_service", name="chat")
    go_on(fleet, 60, 2.0)
    assert service(q)["state"] == "stopped"
    assert gangs(q) == []
    assert q.events("service_scales") == []


@pytest.mark.parametrize("how", ["stop", "set", "delete"])
def test_stopped_it_is_asked_for_nothing_any_more_and_no_tick_is_due_for_it(
    q: Q, fleet: Replicas, how: str
) -> None:
    put(q, target_load=0.5, **MORE)
    go_on(fleet, 10, 1.0)
    assert scaling(q)["wants"] == 4
    if how == "set":
        put(q, task=None, stopped=True)
    else:
        q.call(f"{how}_service", name="chat")
    q.tick()
    told = scaling(q)
    assert (told["wants"], told["since"], told["due_at"], told["why"]) == (None, None, None, None)
    fleet.stops = False
    q.later(100)
    fleet.turn()
    steps = q.sql("select name from gangq.tick_steps(gangq.now()) where due")
    assert "keep_services" not in [row["name"] for row in steps]


def test_what_is_due_for_a_service_waits_for_no_safety_tick(q: Q, fleet: Replicas) -> None:
    """A tick that comes soon after another does what is due and nothing else."""
    put(q)
    fleet.turn()
    q.later(1)
    fleet.turn()
    (claim,) = fleet.claims.values()
    fleet.claims.clear()
    q.tick()
    claim.fail("no such model")
    (soon,) = q.sql("select * from gangq.tick()")
    assert gangs(q) == [], "it is seen that its gang has ended"
    wait = (service(q)["next_try_at"] - q.clock.now()).total_seconds()
    assert soon["detail"] == {"keep_services": 1}
    assert soon["next_in_s"] == pytest.approx(wait, abs=0.02)
    q.later(wait)
    q.db.execute("select * from gangq.tick()")
    assert len(gangs(q)) == 1
