"""Services: replicas that stay up, in whole gangs; what is wanted is kept, and what is said is true."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from gangq.context import ServiceInfo
from gangq.worker.replicas import target_of
from sql.drive import INVALID, MISSING, NOT_ALLOWED, STALE, WRONG_STATE, Q, a_role, refused
from sql.services import Replicas, endpoints, gangs, put, service, whole


@pytest.fixture
def fleet(q: Q) -> Replicas:
    """Four hosts with room for two replicas each."""
    return Replicas.of_hosts(q, 4)


def kinds(q: Q) -> list[str]:
    """The events of services, in order."""
    return [e["kind"] for e in q.events() if (e["data"] or {}).get("service") and e["kind"] != "set_service"]


@contextlib.contextmanager
def as_login(q: Q, dsn: str, name: str) -> Iterator[Q]:
    with psycopg.connect(dsn, user=name, autocommit=True, row_factory=dict_row) as other:
        yield Q(other, q.clock)


# Wanted -----------------------------------------------------------------------------------------------------


def test_replicas_come_up_in_whole_gangs(q: Q, fleet: Replicas) -> None:
    assert put(q, replicas=4, gang=2) == "made"
    fleet.turn()
    assert [g["state"] for g in gangs(q)] == ["running"] * 2
    assert whole(q) == {g["gang_id"]: 2 for g in gangs(q)}
    fleet.turn()
    shown = service(q)
    assert (shown["state"], shown["replicas"], shown["ready_replicas"], shown["gangs"]) == ("ready", 4, 4, 2)
    assert shown["good_revision"] == 1
    assert kinds(q) == ["service_ready"] * 2


@pytest.mark.parametrize(
    ("asked", "gang", "kept"),
    [(5, 3, 6), (7, 3, 9), (1, 4, 4), (8, 4, 8), (None, 3, 3), (100000, 3, 99999)],
)
def test_replicas_are_rounded_up_to_whole_gangs(q: Q, asked: int | None, gang: int, kept: int) -> None:
    put(q, replicas=asked, gang=gang, stopped=True)
    assert service(q)["replicas"] == kept


def test_none_is_refused_unless_it_is_stopped(q: Q, fleet: Replicas) -> None:
    with refused(INVALID, "replicas is 0"):
        put(q, replicas=0)
    put(q, replicas=2, stopped=True)
    fleet.turn()
    assert (gangs(q), service(q)["state"]) == ([], "stopped")
    put(q, task=None, replicas=2)
    fleet.turn()
    assert len(gangs(q)) == 2, "set without stopped starts it"


def test_what_is_set_again_is_the_same_and_what_is_left_out_stays(q: Q) -> None:
    put(q, replicas=4, gang=2, payload={"model": "a"})
    assert put(q, replicas=4, gang=2, payload={"model": "a"}) == "same"
    assert put(q, task=None, surge=0) == "changed"
    shown = service(q)
    assert (shown["revision"], shown["surge"], shown["payload"]) == (1, 0, {"model": "a"})
    assert put(q, task=None, payload={"model": "b"}) == "changed"
    shown = service(q)
    assert (shown["revision"], shown["replicas"], shown["gang"]) == (2, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "mentioning"),
    [
        ({"name": ""}, "name is"),
        ({"name": None}, "a service has a name"),
        ({"task": None}, "has no task"),
        ({"task": ""}, "task is"),
        ({"replicas": -1}, "replicas is -1"),
        ({"replicas": 100001}, "replicas is 100001"),
        ({"gang": 0}, "gang is 0"),
        ({"work": {"min_size": 1}}, "all alike"),
        ({"work": {"roles": [{"name": "a", "count": 1}]}}, "all alike"),
        ({"work": {"payloads": [{}]}}, "all alike"),
        ({"work": {"completion": "a"}}, "all alike"),
        ({"work": {"failure_policy": "shrink"}}, "do not shrink"),
        ({"work": {"timeout_style": "soft"}}, "single jobs"),
        ({"work": {"after_any": [1]}}, "a service submits without after_any"),
        ({"work": {"gpu": 1}}, "no option 'gpu'"),
        ({"options": {"surg": None}}, "no option 'surg'"),
        ({"work": []}, "work is []"),
        ({"health": "healthz"}, "health is"),
        ({"health": "http://h:99999/"}, "health is http://h:99999/"),
        ({"health": "http://h:0/"}, "health is"),
        ({"health": "http://h:99999999999"}, "health is"),
        ({"health": "http://h:x/"}, "health is"),
        ({"health": "http://[h/"}, "health is"),
        ({"health": "http://::1/"}, "health is"),
        ({"health": "http://?x"}, "health is"),
        ({"surge": -1}, "surge is"),
        ({"ready_within_s": 0}, "ready_within_s is"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_set(q: Q, arguments: dict[str, Any], mentioning: str) -> None:
    with refused(INVALID, mentioning):
        q.call("set_service", **{"name": "chat", "task": "serve", **arguments})
    assert q.sql("select * from gangq.services_table") == []


@pytest.mark.parametrize(
    "health",
    [
        "/a:b?c=http://h:x/",
        "http://h",
        "http://h:65535",
        "http://user:word@h:80/a",
        "http://h/a:99999/",
        "http://10.0.0.1?a=b:c",
        "http://[::1]:8000/health",
        "http://[fe80::1%25eth0]/",
    ],
)
def test_a_health_url_that_a_worker_can_read_is_taken(q: Q, health: str) -> None:
    put(q, health=health)
    assert service(q)["health"] == health
    target_of(ServiceInfo(name="chat", revision=1, port=8000, health=health))


def test_only_who_stored_it_changes_it(q: Q, dsn: str) -> None:
    for name in ("gangq_test_alice", "gangq_test_bob"):
        a_role(q.db, name, "gangq_submitter", login=True)
    with as_login(q, dsn, "gangq_test_alice") as alice, as_login(q, dsn, "gangq_test_bob") as bob:
        put(alice, payload={"secret": 1})
        for verb in ("stop_service", "delete_service", "roll_back_service"):
            with refused(NOT_ALLOWED, "which is of gangq_test_alice"):
                bob.call(verb, name="chat")
        with refused(NOT_ALLOWED):
            put(bob, payload={"secret": 1})
        shown = service(bob)
        assert (shown["readable"], shown["payload"], shown["work"]) == (False, None, None)
        assert shown["submitter"] == "gangq_test_alice"
        assert service(alice)["payload"] == {"secret": 1}
    q.tick()
    assert q.value("select submitter from gangq.live_gangs") == "gangq_test_alice"


def test_a_submitter_that_may_not_submit_any_more_gets_no_gang_and_is_told(q: Q, dsn: str) -> None:
    a_role(q.db, "gangq_test_alice", "gangq_submitter", login=True)
    with as_login(q, dsn, "gangq_test_alice") as alice:
        put(alice)
    a_role(q.db, "gangq_test_alice", "gangq_viewer", login=True)
    q.tick()
    assert gangs(q) == []
    assert "may not submit any more" in service(q)["why"]


# Ready ------------------------------------------------------------------------------------------------------


def test_a_gang_is_no_endpoint_before_its_last_member_is_ready(q: Q, fleet: Replicas) -> None:
    put(q, gang=2)
    fleet.becomes_ready = lambda claim: claim["rank"] == 0
    fleet.turn()
    assert endpoints(q) == []
    (gang,) = gangs(q)
    assert (gang["state"], gang["ready_members"], gang["serves"]) == ("running", 1, False)
    fleet.becomes_ready = lambda _: True
    fleet.turn()
    assert [(e["rank"], e["port"], e["address"]) for e in endpoints(q)] == [
        (0, 10000, "node1"), (1, 10001, "node1"),
    ]  # fmt: skip


def test_a_replica_without_a_port_has_no_endpoint_and_its_gang_is_whole_all_the_same(
    q: Q, fleet: Replicas
) -> None:
    put(q, gang=2)
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    first, second = fleet.claims.values()
    q.call("report_ready", job_id=first.job_id, token=first.token, port=8000)
    q.call("report_ready", job_id=second.job_id, token=second.token)
    assert [(e["rank"], e["port"]) for e in endpoints(q)] == [(0, 8000)]


def test_a_replica_that_leaves_its_port_out_has_no_endpoint_any_more(q: Q, fleet: Replicas) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    assert len(endpoints(q)) == 1
    q.call("report_ready", job_id=claim.job_id, token=claim.token)
    assert endpoints(q) == []
    assert gangs(q)[0]["serves"]


def test_one_that_takes_no_requests_any_more_takes_its_gang_out(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    one = gangs(q)[0]["gang_id"]
    fleet.ready(fleet.of_gang(one)[1], ready=False)
    assert set(whole(q)) == {gangs(q)[1]["gang_id"]}
    fleet.ready(fleet.of_gang(one)[1])
    assert len(whole(q)) == 2


def test_a_replica_that_is_not_ready_in_time_is_replaced_with_its_gang(q: Q, fleet: Replicas) -> None:
    put(q, gang=2, ready_within_s=30)
    fleet.becomes_ready = lambda claim: claim["rank"] == 0
    fleet.turn()
    (old,) = gangs(q)
    q.live_on(29, *fleet.workers)
    assert not gangs(q)[0]["leaves"]
    q.live_on(2, *fleet.workers)
    assert re.fullmatch(r"rank 1 has not been ready for 3\d s", gangs(q)[0]["why"])
    fleet.becomes_ready = lambda _: True
    fleet.settle(4)
    (new,) = gangs(q)
    assert new["gang_id"] > old["gang_id"]
    assert new["serves"]
    (failed,) = q.events("service_failed")
    assert failed["gang_id"] == old["gang_id"]


def test_a_replica_that_says_its_load_first_has_no_longer_to_become_ready(q: Q, fleet: Replicas) -> None:
    put(q, ready_within_s=30)
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    q.live_on(25, *fleet.workers)
    (claim,) = fleet.claims.values()
    q.call("report_load", job_id=claim.job_id, token=claim.token, load=0.5)
    q.live_on(7, *fleet.workers)
    assert len(q.events("service_failed")) == 1


def test_a_member_that_waits_for_the_others_to_start_is_not_late(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2, slots=1)
    put(q, gang=2, ready_within_s=5)
    q.tick()
    fleet.workers[0].claim()
    q.live_on(8, *fleet.workers)
    assert gangs(q)[0]["state"] == "reserved"
    assert q.events("service_failed") == []


def test_an_outage_counts_against_no_replica(q: Q, fleet: Replicas) -> None:
    put(q, gang=2, ready_within_s=30)
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    q.later(100)
    fleet.turn()
    q.live_on(25, *fleet.workers)
    assert q.events("service_failed") == []


def test_what_another_claim_of_the_job_said_counts_for_nothing(q: Q, fleet: Replicas) -> None:
    put(q, gang=2)
    fleet.turn()
    old = fleet.of_gang(gangs(q)[0]["gang_id"])
    q.call("preempt_gang", gang_id=old[0]["gang_id"])
    assert endpoints(q) == []
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    q.sql("update gangq.live_gangs set not_before = null")
    fleet.turn()
    (gang,) = gangs(q)
    assert (gang["state"], gang["ready_members"]) == ("running", 0), "the same gang, in a new epoch"
    with refused(STALE):
        fleet.ready(old[0])
    assert endpoints(q) == []


def test_only_a_replica_may_say_that_it_is_ready(q: Q, fleet: Replicas) -> None:
    q.submit_gang(2, cpus=1)
    q.submit(model="m")
    q.tick()
    for claim in [c for w in fleet.workers for c in w.claim()]:
        with refused(WRONG_STATE, "no replica of a service"):
            fleet.ready(claim)
    with refused(MISSING):
        q.call("report_ready", job_id=12345, token=1)


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_port_is_one(q: Q, fleet: Replicas, port: int) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    with refused(INVALID, "port is"):
        q.call("report_ready", job_id=claim.job_id, token=claim.token, port=port)


@pytest.mark.parametrize("load", [-1, float("nan"), float("inf"), None])
def test_a_load_is_a_number(q: Q, fleet: Replicas, load: Any) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    with refused(INVALID, "load is"):
        q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)


def test_a_load_is_shown_and_makes_nobody_ready(q: Q, fleet: Replicas) -> None:
    put(q)
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    (claim,) = fleet.claims.values()
    q.call("report_load", job_id=claim.job_id, token=claim.token, load=0.5)
    assert endpoints(q) == []
    fleet.ready(claim)
    assert endpoints(q)[0]["load"] == 0.5


# What ends comes back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "complete", "trip", "release"])
def test_a_replica_that_ends_takes_its_gang_down_and_both_come_back(q: Q, fleet: Replicas, how: str) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    first, other = (g["gang_id"] for g in gangs(q))
    claim = fleet.of_gang(first)[1]
    del fleet.claims[claim.job_id]
    getattr(claim, how)()
    assert set(whole(q)) == {other}, "out of the endpoints in the transaction of its end"
    fleet.settle(6)
    assert service(q)["state"] == "ready"
    assert len(whole(q)) == 2
    assert other in whole(q), "the other gang was not touched"


def test_the_last_replica_that_returns_ends_its_gang_and_another_comes(q: Q, fleet: Replicas) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    fleet.claims.clear()
    claim.complete()
    fleet.settle(3)
    (gang,) = gangs(q)
    assert gang["gang_id"] > claim["gang_id"]
    (failed,) = q.events("service_failed")
    assert "its replicas have returned" in failed["reason"]


def test_a_crash_loop_is_said_and_slowed(q: Q, fleet: Replicas) -> None:
    put(q, gang=2)
    waits = []
    for _ in range(8):
        q.tick()
        fleet.turn()
        claim = min(fleet.claims.values(), key=lambda c: c.job_id)
        del fleet.claims[claim.job_id]
        claim.fail("no such model")
        fleet.turn()
        q.tick()
        shown = service(q)
        waits.append((shown["next_try_at"] - q.clock.now()).total_seconds())
        assert gangs(q) == [], "no gang is made before its time"
        assert "no such model" in str(shown["why"]) or "spent its 1 attempt" in shown["why"]
        q.live_on(waits[-1] + 0.5, *fleet.workers)
    assert service(q)["state"] == "crash_loop"
    assert [e["data"]["failures"] for e in q.events("service_failed")] == list(range(1, 9))
    assert len(q.events("crash_loop")) == 1
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits)), waits


def test_what_was_ready_for_a_minute_has_not_failed_in_a_row(q: Q, fleet: Replicas) -> None:
    put(q)
    for _ in range(4):
        fleet.settle(3)
        q.live_on(61, *fleet.workers)
        (claim,) = fleet.claims.values()
        fleet.claims.clear()
        claim.fail()
        fleet.settle(2)
    assert {e["data"]["failures"] for e in q.events("service_failed")} == {1}
    q.live_on(61, *fleet.workers)
    fleet.turn()
    q.live_on(61, *fleet.workers)
    assert service(q)["why"] is None


def test_a_lost_worker_takes_its_gangs_out_and_they_come_back_elsewhere(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    lost = fleet.workers[0]
    fleet.lose(lost)
    assert len(whole(q)) == 1
    fleet.settle(5)
    assert len(whole(q)) == 2
    assert "node1" not in {e["host"] for e in endpoints(q)}


def test_a_worker_that_is_flagged_takes_its_gangs_out_until_it_is_heard(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, ready_within_s=20)
    fleet.turn()
    silent, *others = fleet.workers
    q.live_on(35, *others)
    assert len(whole(q)) == 1
    assert q.events("service_failed") == [], "its silence is no fault of the replica"
    silent.beat(*fleet.of_gang(gangs(q)[0]["gang_id"]))
    q.tick()
    assert len(whole(q)) == 2


def test_a_gang_that_was_cancelled_by_hand_is_made_again_and_has_not_failed(q: Q, fleet: Replicas) -> None:
    put(q, gang=2)
    fleet.turn()
    (gang,) = gangs(q)
    q.call("cancel", gang_ids=[gang["gang_id"]])
    assert endpoints(q) == []
    fleet.settle(3)
    (again,) = gangs(q)
    assert again["gang_id"] > gang["gang_id"]
    assert q.events("service_failed") == []
    with refused(WRONG_STATE, "was of service 'chat'"):
        q.call("retry", gang_ids=[gang["gang_id"]])


def test_restart_member_replaces_the_lost_one_alone_and_the_gang_is_out_meanwhile(
    q: Q, fleet: Replicas
) -> None:
    put(
        q,
        gang=2,
        work={"cpus": 1, "failure_policy": "restart_member", "max_attempts": 5, "strategy": "spread"},
    )
    fleet.turn()
    (gang,) = gangs(q)
    claim = fleet.of_gang(gang["gang_id"])[1]
    del fleet.claims[claim.job_id]
    claim.fail()
    assert endpoints(q) == []
    q.sql("update gangq.live_gangs set not_before = null")
    fleet.settle(3)
    assert [g["gang_id"] for g in gangs(q)] == [gang["gang_id"]]
    assert len(endpoints(q)) == 2


def test_members_have_no_budget_and_one_attempt_unless_it_is_said(q: Q, fleet: Replicas) -> None:
    put(q)
    put(q, "b", work={"cpus": 1, "budget_s": 60, "max_attempts": 4})
    fleet.turn()
    found = q.sql("select budget_s, max_attempts from gangq.live_jobs order by id")
    assert sorted((row["budget_s"], row["max_attempts"]) for row in found) == [(60, 4), (1e9, 1)]


# Up and down ------------------------------------------------------------------------------------------------


def test_it_is_scaled_by_whole_gangs_and_what_stays_is_a_part_of_what_was(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    before = set(whole(q))
    put(q, task=None, replicas=8)
    fleet.settle(3)
    assert len(whole(q)) == 4
    assert before < set(whole(q))
    many = set(whole(q))
    put(q, task=None, replicas=1)
    fleet.settle(3)
    assert len(whole(q)) == 1
    assert set(whole(q)) < many
    assert len(gangs(q)) == 1


def test_who_has_the_least_to_do_leaves_first(q: Q, fleet: Replicas) -> None:
    put(q, replicas=6, gang=2)
    fleet.turn()
    for gang, load in zip(gangs(q), (0.9, 0.1, 0.5), strict=True):
        for claim in fleet.of_gang(gang["gang_id"]):
            q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)
    idle = gangs(q)[1]["gang_id"]
    put(q, task=None, replicas=4)
    fleet.turn()
    assert idle not in whole(q)
    assert len(whole(q)) == 2


@pytest.mark.parametrize("how", ["silent", "restarted"])
def test_a_gang_that_runs_and_does_not_serve_leaves_before_one_that_serves(
    q: Q, fleet: Replicas, how: str
) -> None:
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    first, serves = (gang["gang_id"] for gang in gangs(q))
    if how == "silent":
        q.live_on(35, *fleet.workers[1:])
    else:
        q.call("preempt_gang", gang_id=first)
        fleet.becomes_ready = lambda claim: claim["gang_id"] == serves
        fleet.turn()
        q.sql("update gangq.live_gangs set not_before = null")
        fleet.turn()
    assert [(gang["state"], gang["serves"]) for gang in gangs(q)] == [("running", False), ("running", True)]
    put(q, task=None, replicas=2)
    q.tick()
    assert set(whole(q)) == {serves}


def test_what_is_not_placed_leaves_before_what_serves(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2)
    put(q, replicas=6, gang=2)
    fleet.turn()
    assert [g["state"] for g in gangs(q)] == ["running", "running", "blocked"]
    assert service(q)["why"] == f"gang g{gangs(q)[2]['gang_id']} waits to be placed"
    put(q, task=None, replicas=4)
    fleet.turn()
    assert [g["state"] for g in gangs(q)] == ["running", "running"]
    assert len(whole(q)) == 2


def test_a_gang_leaves_the_endpoints_before_it_is_told_to_stop(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, linger_s=5)
    fleet.turn()
    put(q, task=None, replicas=2)
    q.tick()
    assert len(whole(q)) == 1
    q.live_on(4, *fleet.workers, step=4)
    assert [g["state"] for g in gangs(q)] == ["running", "running"], "it may finish what it has taken"
    q.live_on(2, *fleet.workers, step=2)
    assert sorted(g["state"] for g in gangs(q)) == ["draining", "running"]
    fleet.turn()
    fleet.turn()
    assert len(gangs(q)) == 1


def test_stopped_it_has_no_gangs_and_set_starts_it_again(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    q.call("stop_service", name="chat")
    q.call("stop_service", name="chat")
    fleet.settle(3)
    assert (gangs(q), service(q)["state"], service(q)["replicas"]) == ([], "stopped", 4)
    put(q, task=None)
    fleet.settle(3)
    assert len(whole(q)) == 2


def test_deleted_it_is_forgotten_once_its_last_gang_has_ended(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.turn()
    fleet.stops = False
    q.call("delete_service", name="chat")
    q.tick()
    assert service(q)["state"] == "deleting"
    fleet.stops = True
    fleet.settle(3)
    for table in ("services_table", "service_revisions", "service_gangs_table", "replicas"):
        assert q.sql(f"select * from gangq.{table}") == [], table
    assert len(q.events("service_gone")) == 1
    with refused(MISSING):
        q.call("stop_service", name="chat")


def test_a_program_that_declares_what_is_being_deleted_keeps_it(q: Q, fleet: Replicas) -> None:
    """A worker declares it once in its life: it must not matter whether the last gang has ended by then."""
    declared: dict[str, Any] = {"source": "tasks:app", "replicas": 2}
    put(q, **declared)
    fleet.turn()
    fleet.stops = False
    q.call("delete_service", name="chat")
    q.tick()
    assert put(q, **declared) == "changed"
    fleet.stops = True
    fleet.settle(3)
    assert service(q)["state"] != "deleting"
    assert len(whole(q)) == 2
    assert q.events("service_gone") == []


def test_what_a_replica_said_as_its_gang_was_forgotten_is_forgotten_with_the_next_one(
    q: Q, fleet: Replicas, dsn: str
) -> None:
    put(q, replicas=2)
    fleet.turn()
    late = min(fleet.claims.values(), key=lambda claim: claim.job_id)
    with psycopg.connect(dsn) as slow:
        # This transaction sees the replica as it was before its gang ended.
        slow.execute("set transaction isolation level repeatable read")
        slow.execute("select from gangq.live_jobs")
        del fleet.claims[late.job_id]
        late.complete()
        q.tick()
        slow.execute(
            "select gangq.report_load(job_id => %s, token => %s, load => 1)", (late.job_id, late.token)
        )
    assert [row["job_id"] for row in q.sql("select job_id from gangq.replicas order by 1")] == sorted(
        [late.job_id, *fleet.claims]
    )
    q.call("delete_service", name="chat")
    fleet.settle(3)
    assert q.sql("select * from gangq.replicas") == []


def test_a_report_that_is_not_committed_holds_up_no_new_gang(q: Q, fleet: Replicas, dsn: str) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    (ended,) = (gang["gang_id"] for gang in gangs(q))
    with psycopg.connect(dsn) as frozen:
        frozen.execute(
            "select gangq.report_load(job_id => %s, token => %s, load => 1)", (claim.job_id, claim.token)
        )
        fleet.claims.clear()
        claim.complete()
        q.tick()
        assert service(q)["failures"] == 1, "it is seen that its gang has ended"
        q.later(5)
        q.tick()
        assert [gang["gang_id"] > ended for gang in gangs(q)] == [True]


# Another revision -------------------------------------------------------------------------------------------


def test_a_new_gang_is_ready_before_an_old_one_is_told_to_stop(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, payload={"v": 1})
    fleet.settle(2)
    old = set(whole(q))
    put(q, task=None, payload={"v": 2})
    fleet.becomes_ready = lambda _: False
    fleet.settle(4)
    assert set(whole(q)) == old, "nothing has left"
    assert len(gangs(q)) == 3
    assert service(q)["state"] == "updating"
    fleet.becomes_ready = lambda _: True
    for _ in range(12):
        fleet.turn()
        assert len(whole(q)) >= 2
        assert len(gangs(q)) <= 3
        q.later(1)
    assert not old & set(whole(q))
    assert {g["revision"] for g in gangs(q)} == {2}
    assert service(q)["good_revision"] == 2
    assert {row["payload"]["v"] for row in q.sql("select payload from gangq.live_jobs")} == {2}


def test_more_gangs_are_replaced_at_a_time_where_that_was_asked(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, surge=2)
    fleet.settle(2)
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.settle(3)
    assert [g["revision"] for g in gangs(q)] == [1, 1, 2, 2]


def test_with_surge_0_an_old_gang_stops_first(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2)
    put(q, replicas=4, gang=2, surge=0)
    fleet.settle(2)
    put(q, task=None, version="2")
    least = 2
    for _ in range(12):
        fleet.turn()
        least = min(least, len(whole(q)))
        assert len(gangs(q)) <= 2
        q.later(1)
    assert least == 1
    assert {g["revision"] for g in gangs(q)} == {2}
    assert len(whole(q)) == 2


def test_with_surge_0_a_full_fleet_that_holds_one_of_two_gangs_is_updated_too(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 1)
    put(q, replicas=4, gang=2, surge=0)
    fleet.settle(2)
    put(q, task=None, version="2")
    fleet.settle(6)
    assert {g["revision"] for g in gangs(q)} == {2}
    assert len(whole(q)) == 1


def test_a_new_revision_is_good_once_all_of_it_is_ready_though_a_host_of_it_is_drained(
    q: Q, fleet: Replicas
) -> None:
    put(q, replicas=2)
    fleet.settle(2)
    put(q, task=None, version="2")
    while [gang["serves"] for gang in gangs(q) if gang["revision"] == 2] != [True, True]:
        fleet.turn()
        q.later(1)
    (moves, *_) = (gang for gang in gangs(q) if gang["revision"] == 2)
    drain(q, moves["hosts"][0])
    newest = max(gang["gang_id"] for gang in gangs(q))
    fleet.becomes_ready = lambda claim: claim["gang_id"] <= newest
    fleet.settle(3)
    (claim,) = fleet.of_gang(newest + 1)
    del fleet.claims[claim.job_id]
    claim.fail()
    fleet.settle(2)
    shown = service(q)
    assert (shown["state"], shown["good_revision"]) == ("updating", 2)


def test_an_update_that_has_halted_goes_on_only_when_it_is_told_to(q: Q, fleet: Replicas) -> None:
    put(q, replicas=2)
    fleet.settle(2)
    first = max(whole(q)) + 1
    fleet.becomes_ready = lambda claim: claim["gang_id"] <= first
    put(q, task=None, version="2")
    fleet.settle(4)
    (claim,) = fleet.of_gang(first + 1)
    del fleet.claims[claim.job_id]
    claim.fail()
    fleet.settle(2)
    assert service(q)["state"] == "halted"
    for claim in fleet.claims.values():
        load = float(claim["gang_id"] == first)
        q.call("report_load", job_id=claim.job_id, token=claim.token, load=load)
    put(q, task=None, replicas=1)
    fleet.settle(2)
    q.live_on(70, *fleet.workers)
    fleet.turn()
    assert list(whole(q)) == [first]
    assert service(q)["state"] == "halted"


@pytest.mark.parametrize("asks", [{"gpus": 90}, {"labels": {"gpu": "none"}}])
def test_with_surge_0_one_gang_at_most_leaves_for_what_no_worker_could_hold(
    q: Q, asks: dict[str, Any]
) -> None:
    fleet = Replicas.of_hosts(q, 3)
    put(q, replicas=6, gang=2, surge=0)
    fleet.settle(2)
    put(q, task=None, version="2", work=asks)
    fleet.settle(8)
    assert [gang["serves"] for gang in gangs(q)].count(True) == 2
    put(q, task=None, version="3", work={"gpus": 0, "labels": {}})
    fleet.settle(16)
    assert {gang["revision"] for gang in gangs(q)} == {3}
    assert len(whole(q)) == 3


def test_an_update_waits_for_room_and_says_so(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2)
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    put(q, task=None, version="2")
    fleet.settle(4)
    assert [g["revision"] for g in gangs(q) if g["serves"]] == [1, 1]
    shown = service(q)
    assert (shown["state"], shown["why"]) == (
        "updating",
        f"gang g{gangs(q)[-1]['gang_id']} waits to be placed",
    )


def test_an_update_halts_when_the_new_gang_fails_and_says_so(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, version="1")
    fleet.settle(2)
    old = set(whole(q))
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda claim: claim["gang_id"] in old
    fleet.turn()
    new = next(g["gang_id"] for g in gangs(q) if g["revision"] == 2)
    claim = fleet.of_gang(new)[0]
    del fleet.claims[claim.job_id]
    claim.fail("no such model")
    fleet.settle(4)
    assert set(whole(q)) == old
    assert {g["revision"] for g in gangs(q)} == {1}
    shown = service(q)
    assert shown["state"] == "halted"
    assert shown["why"].startswith("revision 2 did not become ready: ")
    assert len(q.events("update_halted")) == 1
    lost = fleet.of_gang(min(old))[0]
    del fleet.claims[lost.job_id]
    lost.fail()
    fleet.becomes_ready = lambda _: True
    fleet.settle(5)
    assert len(whole(q)) == 2, "what is lost meanwhile comes back"
    assert {g["revision"] for g in gangs(q)} == {1}, "of the revision that was good"


def test_an_update_halts_when_the_new_gang_is_not_ready_in_time(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, ready_within_s=30)
    fleet.settle(2)
    put(q, task=None, version="2")
    old = set(whole(q))
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    q.live_on(35, *fleet.workers)
    fleet.settle(3)
    assert service(q)["state"] == "halted"
    assert set(whole(q)) == old


def test_rolled_back_it_is_of_the_good_revision_again_and_then_tried_again(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, version="1", ready_within_s=30)
    fleet.settle(2)
    with refused(MISSING, "no other revision"):
        q.call("roll_back_service", name="chat")
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    q.live_on(35, *fleet.workers)
    assert service(q)["state"] == "halted"
    assert q.one("roll_back_service", name="chat") == 1
    fleet.becomes_ready = lambda _: True
    fleet.settle(3)
    shown = service(q)
    assert (shown["state"], shown["revision"], shown["version"]) == ("ready", 1, "1")
    assert q.one("roll_back_service", name="chat", to_revision=2) == 2
    fleet.settle(12)
    assert (service(q)["state"], service(q)["good_revision"]) == ("ready", 2)
    assert q.one("roll_back_service", name="chat") == 1, "the last other one that was good"
    with refused(MISSING, "has no revision 7"):
        q.call("roll_back_service", name="chat", to_revision=7)


def test_a_third_revision_takes_the_place_of_the_second_that_starts(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, version="1")
    fleet.settle(2)
    old = set(whole(q))
    put(q, task=None, version="2")
    fleet.becomes_ready = lambda _: False
    fleet.turn()
    put(q, task=None, version="3")
    fleet.settle(3)
    assert [g["revision"] for g in gangs(q)] == [1, 1, 3]
    assert set(whole(q)) == old


def test_gangs_of_another_size_replace_the_old_ones_without_a_gap(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=1)
    fleet.settle(2)
    put(q, task=None, gang=4)
    least = 4
    for _ in range(10):
        fleet.turn()
        least = min(least, len(endpoints(q)))
        q.later(1)
    assert least == 4
    assert [(g["revision"], g["members"]) for g in gangs(q)] == [(2, 4)]


def test_ten_revisions_are_kept(q: Q) -> None:
    for n in range(15):
        put(q, version=str(n))
    found = q.sql("select revision from gangq.service_revisions order by 1")
    assert [row["revision"] for row in found] == list(range(6, 16))


@pytest.mark.parametrize("needed", ["good", "running"])
def test_a_revision_that_is_still_needed_is_kept_longer(q: Q, fleet: Replicas, needed: str) -> None:
    fleet.becomes_ready = lambda _: needed == "good"
    put(q)
    fleet.settle(2)
    if needed == "good":
        q.call("stop_service", name="chat")
        fleet.settle(2)
        assert gangs(q) == []
    for n in range(12):
        put(q, version=str(n), stopped=needed == "good")
    found = [row["revision"] for row in q.sql("select revision from gangq.service_revisions order by 1")]
    assert found == [1, *range(4, 14)]


def test_a_gang_that_has_left_may_be_not_ready_without_having_failed(q: Q, fleet: Replicas) -> None:
    put(q, replicas=2, linger_s=100, ready_within_s=30)
    fleet.settle(2)
    put(q, task=None, replicas=1)
    q.tick()
    (leaves,) = (gang["gang_id"] for gang in gangs(q) if gang["leaves"])
    fleet.becomes_ready = lambda claim: claim["gang_id"] != leaves
    fleet.ready(fleet.of_gang(leaves)[0], ready=False)
    q.live_on(50, *fleet.workers)
    fleet.turn()
    assert q.events("service_failed") == []


def test_a_gang_that_ends_waits_for_its_backoff_though_all_others_are_steady(q: Q, fleet: Replicas) -> None:
    put(q, replicas=2)
    fleet.settle(2)
    q.live_on(70, *fleet.workers)
    claim = min(fleet.claims.values(), key=lambda c: c.job_id)
    del fleet.claims[claim.job_id]
    claim.fail()
    q.tick()
    q.tick()
    assert len(gangs(q)) == 1
    assert service(q)["next_try_at"] > q.clock.now()


# Hosts that are drained -------------------------------------------------------------------------------------


def drain(q: Q, host: str) -> None:
    q.call("cordon", host=host, drain=True)


def test_gangs_on_a_host_that_is_drained_move_once_others_are_ready(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    before = set(whole(q))
    drain(q, "node1")
    fleet.becomes_ready = lambda _: False
    fleet.settle(4)
    assert set(whole(q)) == before, "nothing stops before another is ready"
    fleet.becomes_ready = lambda _: True
    for _ in range(8):
        fleet.turn()
        assert len(whole(q)) >= 2
        q.later(1)
    assert len(whole(q)) == 2
    assert "node1" not in {e["host"] for e in endpoints(q)}
    assert q.value("select state from gangq.cordoned") == "drained"


def test_with_surge_0_the_same_gangs_move_to_other_hosts(q: Q, fleet: Replicas) -> None:
    put(q, replicas=4, gang=2, surge=0)
    fleet.settle(2)
    before = set(whole(q))
    assert "node1" in {e["host"] for e in endpoints(q)}
    drain(q, "node1")
    fleet.settle(8)
    assert set(whole(q)) == before
    assert "node1" not in {e["host"] for e in endpoints(q)}
    assert q.value("select state from gangq.cordoned") == "drained"


def test_without_room_elsewhere_a_gang_stays_until_the_deadline(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2)
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    q.call("cordon", host="node1", drain=True, deadline=q.clock.now() + timedelta(seconds=60))
    fleet.settle(5)
    assert len(whole(q)) == 2
    q.live_on(60, *fleet.workers)
    fleet.settle(2)
    assert len(whole(q)) == 1
    assert q.value("select state from gangq.cordoned") == "drained"


def test_a_drain_that_is_called_off_in_time_moves_nothing(q: Q) -> None:
    fleet = Replicas.of_hosts(q, 2)
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    before = set(whole(q))
    drain(q, "node1")
    fleet.settle(3)
    q.call("uncordon", host="node1")
    fleet.settle(3)
    assert set(whole(q)) == before
    assert len(gangs(q)) == 2


# Like all work ----------------------------------------------------------------------------------------------


def test_its_gangs_count_against_limits(q: Q, fleet: Replicas) -> None:
    q.call("set_queue", name="default", maximum={"cpus": 2})
    put(q, replicas=4, gang=2)
    fleet.settle(2)
    assert [g["state"] for g in gangs(q)] == ["running", "blocked"]
    waiting = gangs(q)[1]["gang_id"]
    assert service(q)["why"] == f"gang g{waiting} waits to be placed"
    assert "quota" in {row["gate"] for row in q.call("explain_gang", gang_id=waiting)}
    q.call("set_queue", name="default", maximum={})
    fleet.settle(2)
    assert len(whole(q)) == 2


@pytest.mark.parametrize("preemptible", [True, False])
def test_it_may_be_displaced_unless_it_is_declared_otherwise(q: Q, preemptible: bool) -> None:
    fleet = Replicas.of_hosts(q, 1)
    put(q, replicas=2, gang=2, work={"cpus": 1, "priority": 1, "preemptible": preemptible})
    fleet.settle(2)
    (served,) = whole(q)
    fleet.becomes_ready = lambda claim: bool(claim["gang_id"] == served)
    q.live_on(3600, *fleet.workers, step=60)
    rival = q.submit_gang(2, cpus=1, priority=9)
    fleet.settle(3)
    if not preemptible:
        assert set(whole(q)) == {served}
        assert rival.state == "blocked"
        return
    assert whole(q) == {}
    assert [g["state"] for g in gangs(q)] == ["blocked"]
    assert service(q)["failures"] == 0, "to make way is no failure"
    assert rival.state in ("reserved", "running")
    rival.cancel()
    fleet.settle(4)
    assert set(whole(q)) == {served}, "and comes back"


# Declared by programs ---------------------------------------------------------------------------------------


def test_what_was_scaled_or_stopped_by_hand_stays_when_a_program_declares_it_again(q: Q) -> None:
    declared: dict[str, Any] = {"source": "tasks:app", "replicas": 2}
    assert put(q, **declared) == "made"
    put(q, task=None, replicas=6)
    assert put(q, **declared) == "same"
    assert service(q)["replicas"] == 6
    put(q, **{**declared, "replicas": 3})
    assert service(q)["replicas"] == 3, "the program says another number than before"
    q.call("stop_service", name="chat")
    assert put(q, **{**declared, "replicas": 3}) == "same"
    assert service(q)["state"] == "stopped"


def test_what_is_declared_as_it_is_writes_nothing(q: Q) -> None:
    """Each start of each worker declares its services."""
    put(q, source="prog")
    version = "select xmin::text from gangq.services_table"
    made = q.value(version)
    assert put(q, source="prog") == "same"
    assert q.value(version) == made


def test_an_option_that_a_program_leaves_out_when_it_declares_it_again_has_its_default(q: Q) -> None:
    def options() -> tuple[Any, ...]:
        shown = service(q)
        return tuple(shown[name] for name in ("surge", "ready_within_s", "linger_s", "health", "version"))

    declared: dict[str, Any] = {"name": "chat", "task": "serve", "replicas": 2, "work": {"cpus": 1}}
    q.call(
        "set_service", **declared,
        source="tasks:app", surge=0, ready_within_s=60, linger_s=1, health="/up", version="a",
    )  # fmt: skip
    assert options() == (0, 60, 1, "/up", "a")
    q.call("set_service", name="chat", task="serve")
    assert options() == (0, 60, 1, "/up", "a"), "set by hand: what is left out stays"
    q.call("set_service", **declared, source="tasks:app")
    assert options() == (1, 600, 5, None, None)
    assert q.one("set_service", **declared, source="tasks:app") == "same"


def test_what_a_program_does_not_declare_any_more_is_marked_and_goes_on(q: Q, fleet: Replicas) -> None:
    put(q, source="tasks:app")
    put(q, "b", source="tasks:app")
    put(q, "c", source="other:app")
    fleet.turn()
    assert [
        row["declare_services"] for row in q.call("declare_services", source="tasks:app", names=["b"])
    ] == ["chat"]
    assert service(q)["undeclared_at"] is not None
    assert service(q)["ready_replicas"] == 1
    assert service(q, "c")["undeclared_at"] is None
    q.call("declare_services", source="tasks:app", names=["b", "chat"])
    assert service(q)["undeclared_at"] is None
    with refused(INVALID, "source"):
        q.call("declare_services", source="", names=[])


# Told -------------------------------------------------------------------------------------------------------


def heard(listener: psycopg.Connection[Any]) -> list[str]:
    return [n.payload for n in listener.notifies(timeout=0.3)]


def test_who_follows_the_endpoints_is_told_of_every_change(q: Q, fleet: Replicas, dsn: str) -> None:
    put(q, replicas=4, gang=2, linger_s=5)
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen gangq_endpoints")
        fleet.turn()
        assert "chat" in heard(listener)
        first = fleet.of_gang(gangs(q)[0]["gang_id"])
        fleet.ready(first[0], ready=False)
        assert heard(listener) == ["chat"]
        fleet.ready(first[0], ready=False)
        assert heard(listener) == [], "nothing has changed"
        fleet.ready(first[0])
        assert heard(listener) == ["chat"]
        first[1].fail()
        assert heard(listener) == ["chat"]
        put(q, task=None, replicas=2)
        q.tick()
        assert set(heard(listener)) <= {"chat"}
        silent = fleet.workers[1]
        q.live_on(35, *(w for w in fleet.workers if w is not silent))
        assert heard(listener)[-1:] == ["chat"], "a worker was flagged"


def test_who_follows_the_endpoints_is_told_of_the_last_replica_that_returns(
    q: Q, fleet: Replicas, dsn: str
) -> None:
    put(q)
    fleet.turn()
    (claim,) = fleet.claims.values()
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen gangq_endpoints")
        claim.complete()
        assert heard(listener) == ["chat"]
    fleet.claims.clear()


def test_services_are_gangs_like_all_others_where_work_is_shown(q: Q, fleet: Replicas) -> None:
    put(q, replicas=2, gang=2, work={"cpus": 1, "priority": 7})
    fleet.turn()
    (gang,) = q.sql("select * from gangq.gangs")
    assert (gang["service"], gang["name"], gang["priority"], gang["state"]) == ("chat", "chat", 7, "running")
    assert "chat" in str(q.call("explain_gang", gang_id=gang["id"]))
