"""Limits of queues: nothing placed is ever above a maximum, and what is not limited runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sql.drive import PLACED, WRONG_STATE, Claim, Q, Worker, a_role, gpus, refused


@contextmanager
def submitter(q: Q, name: str) -> Iterator[None]:
    """Submit as another login: any of the roles that may."""
    q.sql(f"set role {a_role(q.db, name, 'gangq_submitter')}")
    try:
        yield
    finally:
        q.sql("reset role")


ONE, OTHER = "one_test", "other_test"


def fleet(q: Q, count: int = 4, **offer: Any) -> list[Worker]:
    offer = {"slots": 4, "memory_mb": 1000, "cpus": 8, **offer}
    return [
        q.worker(f"w{n}", devices=gpus(1, 1, 1, 1, prefix=f"W{n}-"), **offer) for n in range(1, count + 1)
    ]


def hit(q: Q, queue: str = "default", who: str = "me", **asked: int) -> Any:
    amounts = {"gangs": 0, "jobs": 1, "gpus": 0, "memory_mb": 0, "cpus": 0, **asked}
    return q.one("limit_hit", queue=queue, key=None, submitter=who, **amounts)


# Each limit -------------------------------------------------------------------------------------------------

LIMITS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"maximum": {"gpus": 3}}, {"gpus": 1}, 3),
    ({"maximum": {"gpus": 3}}, {"gpus": 2}, 1),
    ({"maximum": {"memory_mb": 250}}, {"memory_mb": 100}, 2),
    ({"maximum": {"cpus": 1.5}}, {"cpus": 0.5}, 3),
    ({"maximum": {"jobs": 3}}, {}, 3),
    ({"max_running_jobs": 2}, {"gpus": 1}, 2),
    ({"max_running_jobs": 0}, {}, 0),
    ({"maximum": {"jobs": 5}, "max_running_jobs": 2}, {}, 2),
    ({"submitter_maximum": {"jobs": 2}}, {}, 2),
    ({"submitter_maximum": {"gpus": 2}}, {"gpus": 1}, 2),
    ({"maximum": {"gpus": 0}}, {}, 6),
    ({"max_running_gangs": 0, "submitter_maximum": {"gangs": 0}}, {}, 6),
]


@pytest.mark.parametrize("max_jobs", [1, 10])
@pytest.mark.parametrize(("limit", "needs", "most"), LIMITS)
def test_claims_stop_at_the_limit_and_go_on_when_something_ends(
    q: Q, limit: dict[str, Any], needs: dict[str, Any], most: int, max_jobs: int
) -> None:
    q.call("set_queue", name="default", **limit)
    workers = fleet(q)
    q.submit(count=6, **needs)
    claims = [c for _ in range(4) for w in workers for c in w.claim(max_jobs)]
    assert len(claims) == most
    if 0 < most < 6:
        claims[0].complete()
        assert len([c for w in workers for c in w.claim(max_jobs)]) == 1


@pytest.mark.parametrize("max_jobs", [1, 10])
def test_a_limit_of_an_ancestor_counts_all_its_children_together(q: Q, max_jobs: int) -> None:
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    q.call("set_queue", name="a", maximum={"jobs": 3})
    for n in range(6):
        q.submit(queue=("a.x", "a.y")[n % 2])
    here, there = q.worker("w1", slots=9, queues=["a.x", "a.y"]), q.worker("w2", slots=9, queues=["a.y"])
    claims = [c for _ in range(4) for w in (here, there) for c in w.claim(max_jobs)]
    assert len(claims) == 3


def test_the_narrowest_limit_on_the_path_decides(q: Q) -> None:
    q.call("set_queue", name="a", maximum={"jobs": 5})
    q.call("set_queue", name="a.b", max_running_jobs=1)
    q.submit(count=6, queue="a.b")
    assert len(q.worker(slots=9, queues=["a.b"]).claim()) == 1


def test_members_of_gangs_count_against_the_limits_of_solo_jobs(q: Q) -> None:
    q.call("set_queue", name="default", maximum={"gpus": 3})
    worker = fleet(q, 1)[0]
    gang = q.submit_gang(2, gpus=1)
    q.tick()
    assert gang.state == "reserved"
    q.submit(count=3, gpus=1)
    assert [c["gang_id"] for c in worker.claim()] == [gang.id, gang.id, None]


@pytest.mark.parametrize("gang", [False, True], ids=["job", "gang"])
def test_what_another_submitter_retries_stands_in_his_place(q: Q, gang: bool) -> None:
    q.call("set_queue", name="default", others="shared", submitter_maximum={"jobs": 1})
    worker = fleet(q, 1)[0]
    with submitter(q, ONE):
        if gang:
            ended = q.submit_gang(1)
            ended.cancel()
        else:
            job = q.submit()
            q.call("cancel", job_ids=[job])
        q.submit()
    assert len(worker.claim()) == 1
    with submitter(q, OTHER):
        q.call("retry", gang_ids=[ended.id] if gang else [], job_ids=[] if gang else [job])
    q.tick()
    assert [(c["gang_id"], c.job_id) for c in worker.claim()] == (
        [(ended.id, ended.members[0]["id"])] if gang else [(None, job)]
    )
    assert q.sql(
        "select distinct s.submitter from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
        "where j.submitter = %(name)s",
        name=OTHER,
    ) == [{"submitter": OTHER}]


# What is not at its limit is taken --------------------------------------------------------------------------


def test_what_a_full_queue_may_not_start_another_queue_still_may(q: Q) -> None:
    q.call("set_queue", name="full", maximum={"jobs": 1})
    worker = q.worker(slots=9, queues=["full", "default"])
    first, *_ = q.submit(count=3, queue="full", priority=5)
    free = q.submit(count=2)
    assert [c.job_id for c in worker.claim()] == [first, *free]


def test_jobs_that_need_none_of_a_spent_resource_go_past_those_that_do(q: Q) -> None:
    q.call("set_queue", name="default", maximum={"gpus": 1})
    worker = fleet(q, 1)[0]
    first, *_ = q.submit(count=3, gpus=1)
    light = q.submit()
    assert [c.job_id for c in worker.claim()] == [first, light]


def test_a_batch_takes_from_mixed_queues_up_to_the_limit(q: Q) -> None:
    q.call("set_queue", name="limited", max_running_jobs=2)
    worker = q.worker(slots=9, queues=["limited", "default"])
    jobs = [q.submit(queue=("limited", "default")[n % 2]) for n in range(8)]
    assert [c.job_id for c in worker.claim()] == [jobs[0], jobs[2], *jobs[1::2]]


@pytest.mark.parametrize("max_jobs", [1, 20])
def test_what_a_limit_counts_is_not_prefetched(q: Q, max_jobs: int) -> None:
    q.call("set_queue", name="default", maximum={"jobs": 7})
    workers = [q.worker(f"w{n}", prefetch=5) for n in range(3)]
    q.submit(count=30)
    claims = [c for _ in range(8) for w in workers for c in w.claim(max_jobs)]
    assert len(claims) == 3


def test_jobs_that_were_prefetched_before_there_was_a_limit_count(q: Q) -> None:
    worker, other = q.worker(slots=0, prefetch=5), q.worker("w2", slots=9)
    q.submit(count=30)
    assert len(worker.claim(5)) == 5
    q.call("set_queue", name="default", maximum={"jobs": 7})
    assert len(other.claim()) == 2


def test_lowering_a_limit_stops_nothing_and_starts_nothing(q: Q) -> None:
    worker = q.worker(slots=9)
    q.submit(count=6)
    claims = worker.claim(4)
    q.call("set_queue", name="default", maximum={"jobs": 2})
    assert worker.claim() == []
    for claim in claims[:2]:
        claim.complete()
    assert worker.claim() == []
    claims[2].complete()
    assert len(worker.claim()) == 1


# Submitters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_jobs", [1, 10])
@pytest.mark.parametrize("when", ["before the limit", "after it"])
def test_one_submitter_at_his_limit_does_not_hold_up_another(q: Q, when: str, max_jobs: int) -> None:
    def limit() -> None:
        q.call("set_queue", name="default", submitter_maximum={"jobs": 2})

    if when == "after it":
        limit()
    with submitter(q, ONE):
        ones = q.submit(count=50)
    with submitter(q, OTHER):
        others = q.submit(count=3)
    if when == "before the limit":
        limit()
        q.tick()
    worker = q.worker(slots=20)
    claims = [c for _ in range(6) for c in worker.claim(max_jobs)]
    assert sorted(c.job_id for c in claims) == sorted(ones[:2] + others[:2])
    claims[0].complete()
    (last,) = worker.claim()
    assert last.job_id == ones[2]


def test_a_batch_takes_from_between_the_jobs_of_a_submitter_at_his_limit(q: Q) -> None:
    jobs: dict[str, list[int]] = {ONE: [], OTHER: []}
    for _ in range(6):
        for name, ids in jobs.items():
            with submitter(q, name):
                ids.append(q.submit())
    q.call("set_queue", name="default", submitter_maximum={"jobs": 4})
    q.tick()
    worker = q.worker(slots=20)
    claims = worker.claim(20)
    assert sorted(c.job_id for c in claims) == sorted(jobs[ONE][:4] + jobs[OTHER][:4])
    with submitter(q, ONE):
        urgent = q.submit(count=2, priority=1)
    assert worker.claim() == []
    claims[0].complete()
    assert [c.job_id for c in worker.claim()] == [urgent[0]]


def test_a_submitters_limit_counts_the_children_of_the_queue(q: Q) -> None:
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    q.call("set_queue", name="a", submitter_maximum={"jobs": 1})
    with submitter(q, ONE):
        q.submit(queue="a.x")
        q.submit(queue="a.y")
    with submitter(q, OTHER):
        q.submit(queue="a.y")
    claims = q.worker(slots=9, queues=["a.x", "a.y"]).claim()
    who = [q.job(c.job_id)["submitter"] for c in claims]
    assert sorted(who) == sorted([ONE, OTHER])


def test_a_submitters_jobs_keep_their_own_shape_after_a_trip(q: Q) -> None:
    q.call("set_queue", name="default", submitter_maximum={"jobs": 9}, backoff_s=0)
    worker = q.worker(devices=gpus(1, 1))
    q.submit(gpus=1)
    claim = worker.take()
    q.worker("w2", devices=gpus(1, prefix="X"))
    claim.trip(78)
    shapes = q.sql("select submitter, avoid is not null as avoids from gangq.shapes order by id")
    owner = q.value("select session_user::text")
    assert shapes[1:] == [{"submitter": owner, "avoids": False}, {"submitter": owner, "avoids": True}]


@pytest.mark.parametrize("setting", [{"submitter_maximum": {"gangs": 1}}, {"policy": "fair"}])
def test_a_gang_is_seen_however_many_alike_another_submitter_has_before_it(
    q: Q, setting: dict[str, Any]
) -> None:
    q.call("set_queue", name="default", **setting)
    q.workers(2)
    with submitter(q, ONE):
        q.sql("select gangq.submit_gang('train', 1) from generate_series(1, 201)")
    with submitter(q, OTHER):
        late = q.submit_gang(1)
    q.place()
    assert late.state == "reserved"
    assert q.value("select count(*) from gangq.live_gangs where state = 'reserved'") == 2


# limit_hit --------------------------------------------------------------------------------------------------


def test_limit_hit_names_the_gate_and_the_numbers(q: Q) -> None:
    q.call("set_queue", name="a", maximum={"gpus": 4}, max_running_gangs=1)
    q.call("set_queue", name="a.b", max_running_jobs=3, submitter_maximum={"gpus": 2})
    q.worker(slots=9, devices=gpus(*[1] * 8), queues=["a.b", "a"])
    assert hit(q, "a.b", gpus=2, jobs=3, gangs=1) is None
    assert hit(q, "a.b", jobs=4) == {
        "gate": "running_limit", "queue": "a.b", "resource": "jobs", "limit": 3, "used": 0, "asked": 4
    }  # fmt: skip
    assert hit(q, "a.b", gpus=3)["gate"] == "submitter_limit"
    assert hit(q, "a", gpus=5) == {
        "gate": "quota", "queue": "a", "resource": "gpus", "limit": 4, "used": 0, "asked": 5
    }  # fmt: skip
    gang = q.submit_gang(2, queue="a.b", gpus=1)
    q.tick()
    assert gang.state == "reserved"
    assert hit(q, "a.b", gangs=1) == {
        "gate": "running_limit", "queue": "a", "resource": "gangs", "limit": 1, "used": 1, "asked": 1
    }  # fmt: skip
    me = q.value("select submitter from gangq.live_gangs")
    assert hit(q, "a.b", who=me, gpus=1)["used"] == 2
    assert hit(q, "a.b", who="somebody else", gpus=1) is None
    assert hit(q, "default", gpus=1000) is None


# Fair order -------------------------------------------------------------------------------------------------


def queues_of(q: Q, claims: list[Claim]) -> list[str]:
    return [q.job(c.job_id)["queue"] for c in claims]


@pytest.mark.parametrize("max_jobs", [1, 20])
def test_below_a_fair_queue_the_child_with_the_least_share_goes_first(q: Q, max_jobs: int) -> None:
    q.call("set_queue", name="a", policy="fair")
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    q.submit(count=20, queue="a.x")
    q.submit(count=20, queue="a.y")
    worker = q.worker(slots=8, queues=["a.x", "a.y"])
    claims = [c for _ in range(8) for c in worker.claim(max_jobs)]
    assert sorted(queues_of(q, claims)) == ["a.x"] * 4 + ["a.y"] * 4


def test_a_weight_of_three_has_three_times_the_share(q: Q) -> None:
    q.call("set_queue", name="a", policy="fair")
    q.call("set_queue", name="a.x", weight=3)
    q.call("set_queue", name="a.y")
    q.submit(count=20, queue="a.y")
    q.submit(count=20, queue="a.x")
    worker = q.worker(slots=8, queues=["a.x", "a.y"])
    assert sorted(queues_of(q, worker.claim(8))) == ["a.x"] * 6 + ["a.y"] * 2


def test_the_share_that_counts_is_the_dominant_one(q: Q) -> None:
    q.call("set_queue", name="a", policy="fair")
    for name in ("a.cpu", "a.gpu"):
        q.call("set_queue", name=name)
    q.worker("other", slots=12, queues=["default"])
    worker = q.worker(slots=8, devices=gpus(1, 1, 1, 1), queues=["a.cpu", "a.gpu"])
    q.submit(count=20, queue="a.gpu", gpus=1)
    q.submit(count=20, queue="a.cpu")
    # A device is a quarter of all there are, a slot a twentieth.
    assert sorted(queues_of(q, worker.claim(7))) == ["a.cpu"] * 5 + ["a.gpu"] * 2


def test_priority_comes_before_the_share(q: Q) -> None:
    q.call("set_queue", name="a", policy="fair")
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    q.submit(count=3, queue="a.x", priority=1)
    q.submit(count=3, queue="a.y")
    worker = q.worker(slots=8, queues=["a.x", "a.y"])
    assert queues_of(q, worker.claim(4)) == ["a.x"] * 3 + ["a.y"]


def test_in_a_fair_queue_submitters_have_equal_shares(q: Q) -> None:
    q.call("set_queue", name="default", policy="fair")
    with submitter(q, ONE):
        q.submit(count=500)
    with submitter(q, OTHER):
        q.submit(count=20)
    claims = q.worker(slots=8).claim(8)
    who = [q.job(c.job_id)["submitter"] for c in claims]
    assert sorted(who) == sorted([ONE] * 4 + [OTHER] * 4)


def test_a_fair_queues_turn_among_others_is_that_of_its_oldest_job(q: Q) -> None:
    q.call("set_queue", name="a", policy="fair")
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    first = q.submit(queue="a.x")
    plain = q.submit(**PLACED)
    q.submit(count=3, queue="a.y")
    worker = q.worker(slots=8, queues=["a.x", "a.y", "default"])
    assert [c.job_id for c in worker.claim(2)] == [first, plain]


@pytest.mark.parametrize("policy", ["priority", "fifo", "largest_first"])
def test_without_fairness_solo_jobs_go_by_age(q: Q, policy: str) -> None:
    q.call("set_queue", name="default", policy=policy)
    jobs = [q.submit(task=("t", "u")[n % 2]) for n in range(6)]
    assert [c.job_id for c in q.worker(slots=9).claim()] == jobs


def test_a_fair_queue_keeps_its_limits(q: Q) -> None:
    q.call("set_queue", name="a", policy="fair", maximum={"jobs": 5})
    q.call("set_queue", name="a.x", max_running_jobs=1)
    q.call("set_queue", name="a.y")
    q.submit(count=9, queue="a.x")
    q.submit(count=9, queue="a.y")
    worker = q.worker(slots=9, queues=["a.x", "a.y"])
    assert sorted(queues_of(q, worker.claim())) == ["a.x"] + ["a.y"] * 4


def test_a_warm_model_does_not_go_past_a_limit(q: Q) -> None:
    q.call("set_queue", name="default", max_running_jobs=2)
    worker = q.worker(slots=9)
    worker.claim(model="m")
    cold, warm = q.submit(count=2), q.submit(task="m", count=3, model="m")
    assert [c.job_id for c in worker.claim(model="m")] == warm[:2]
    assert q.state(cold[0]) == "pending"


def test_what_was_placed_since_the_pass_looked_is_not_placed_beside(q: Q) -> None:
    q.call("set_queue", name="default", maximum={"jobs": 2})
    workers = q.workers(3)
    gang = q.submit_gang(2)
    carry_out = q.decided()
    q.call("open_place", incarnation=workers[2].incarnation, job_id=q.submit())  # not the gang's worker
    assert "limits of queue default: 1 jobs are used, 2 more would be" in carry_out()[f"g{gang.id}"]
    assert gang.state == "blocked"


@pytest.mark.parametrize("limited", [False, True])
def test_a_limit_that_is_lowered_and_a_pause_since_the_pass_looked_are_kept(q: Q, limited: bool) -> None:
    changes: dict[str, Any] = {
        "gpus": {"maximum": {"gpus": 0}},
        "gangs": {"max_running_gangs": 0},
        "jobs": {"max_running_jobs": 1},
        "each": {"submitter_maximum": {"gangs": 0}},
        "paused": {"paused": True},
        "same": {},
    }
    for name in changes:
        q.call("set_queue", name=f"{name}.child", **({"maximum": {"jobs": 8}} if limited else {}))
    q.worker(queues=[f"{name}.child" for name in changes], slots=20, devices=gpus(*[80000] * 12))
    gangs = {name: q.submit_gang(2, queue=f"{name}.child", gpus=1) for name in changes}
    carry_out = q.decided()
    for name, change in changes.items():
        for queue in (name, f"{name}.child") if limited else (name,):
            q.call("set_queue", name=queue, **change)
    outcomes = carry_out()
    assert len(outcomes) == len(gangs)
    assert [name for name, gang in gangs.items() if outcomes[f"g{gang.id}"] == "done"] == ["same"]
    assert outcomes[f"g{gangs['paused'].id}"] == "its queue is paused"


def test_who_places_a_gang_by_hand_keeps_to_the_limits_too(q: Q) -> None:
    q.call("set_queue", name="small", maximum={"jobs": 3})
    worker = q.worker(queues=["small"], slots=8)
    first, second = q.submit_gang(2, queue="small"), q.submit_gang(2, queue="small")
    assert q.one("reserve_gang", gang_id=first.id, incarnations=[worker.incarnation] * 2)
    with refused(WRONG_STATE, "queue small: 2 jobs are used, 2 more would be, and 3 is the limit"):
        q.call("reserve_gang", gang_id=second.id, incarnations=[worker.incarnation] * 2)
    q.call("set_queue", name="small", maximum=None)
    assert q.one("reserve_gang", gang_id=second.id, incarnations=[worker.incarnation] * 2)
