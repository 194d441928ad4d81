"""Elastic gangs: an epoch takes as many members as there was room for, and the others wait for the next one."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from sql.drive import INVALID, Gang, Q, Worker, ack_all, gpus, refused
from sql.epochs import reserve, run, submit_roles, who

ROLES = (("driver", 1, 1), ("executor", 2, 4))


def placed(q: Q, executors: int, **options: object) -> tuple[Gang, list[Worker], list]:  # type: ignore[type-arg]
    gang = submit_roles(q, *ROLES, **options)
    workers = q.workers(1 + executors)
    return gang, workers, run(gang, workers, gang.job_ids[: 1 + executors])


def test_the_epoch_says_how_many_they_are(q: Q) -> None:
    gang, _, claims = placed(q, 2)
    assert gang.states == ["running"] * 3 + ["blocked"] * 2
    assert [(c["rank"], c["world_size"]) for c in claims] == [(0, 3), (1, 3), (2, 3)]
    assert gang.row["world_size"] == 3
    assert [row["role"] for row in gang.members] == ["driver"] + ["executor"] * 4


def test_members_hear_their_role_and_their_rank_in_it(q: Q) -> None:
    _, _, claims = placed(q, 3)
    rows = claims[2].barrier()
    assert [(row["rank"], row["role"], row["role_rank"]) for row in rows] == [
        (0, "driver", 0),
        (1, "executor", 0),
        (2, "executor", 1),
        (3, "executor", 2),
    ]


def test_ranks_are_contiguous_across_roles_that_are_not_full(q: Q) -> None:
    gang = submit_roles(q, ("a", 1, 3), ("b", 1, 2))
    workers = q.workers(2)
    claims = run(gang, workers, [gang.job_ids[0], gang.job_ids[3]])
    assert [(c["rank"], c.job_id) for c in claims] == [(0, gang.job_ids[0]), (1, gang.job_ids[3])]
    assert who(gang) == {0: 0, 3: 1}
    assert [row["node_rank"] for row in claims[1].barrier()] == [0, 1]


def test_it_is_done_when_all_that_were_placed_are_done(q: Q) -> None:
    gang, _, claims = placed(q, 2)
    after = q.submit(after=gang.job_ids)
    for claim in claims:
        claim.complete()
    assert (gang.state, gang.states) == ("done", ["done"] * 3 + ["cancelled"] * 2)
    q.tick()
    assert q.state(after) == "pending"


def test_a_drain_leaves_those_without_a_part_where_they_are(q: Q) -> None:
    gang, workers, claims = placed(q, 2)
    claims[2].fail()
    assert gang.states == ["preempting", "preempting", "preempted", "blocked", "blocked"]
    ack_all(claims[:2])
    assert (gang.state, gang.row["world_size"], gang.states) == ("blocked", None, ["blocked"] * 5)
    assert q.violations() == [], "their ranks went with the epoch"
    gang.skip_backoff()
    more = [*workers, q.worker("w4"), q.worker("w5")]
    again = run(gang, more)
    assert [(c["rank"], c["world_size"], c["epoch"]) for c in again] == [(rank, 5, 2) for rank in range(5)]


def test_a_reservation_not_claimed_in_time_is_forgotten_with_its_ranks(q: Q) -> None:
    gang = submit_roles(q, *ROLES)
    workers = q.workers(3)
    assert reserve(gang, gang.job_ids[:3], workers)
    q.later(70)
    q.sql("update gangq.queues_table set paused = true")
    q.tick()
    assert (gang.state, gang.row["world_size"]) == ("blocked", None)
    assert q.sql("select 1 from gangq.live_jobs where epoch_rank is not null") == []


def test_one_member_claimed_and_another_not_drains_uncharged(q: Q) -> None:
    gang = submit_roles(q, *ROLES)
    workers = q.workers(3)
    assert reserve(gang, gang.job_ids[:3], workers)
    first = workers[0].take()
    q.sql("update gangq.queues_table set paused = true")
    q.live_on(70, workers[0])
    assert gang.states == ["preempting"] + ["blocked"] * 4
    first.ack()
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 5)


@pytest.mark.parametrize("when", ["running", "reserved", "blocked"])
def test_cancelling_ends_all_members(q: Q, when: str) -> None:
    gang = submit_roles(q, *ROLES)
    workers = q.workers(3)
    if when != "blocked":
        assert reserve(gang, gang.job_ids[:3], workers)
    claims = gang.claimed_by(*workers) if when == "running" else []
    gang.cancel()
    ack_all(claims)
    assert (gang.state, gang.states) == ("cancelled", ["cancelled"] * 5)


def test_a_released_member_drains_the_epoch(q: Q) -> None:
    gang, _, claims = placed(q, 2)
    claims[1].release()
    ack_all([claims[0], claims[2]])
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 5)


def test_retrying_an_ended_one_brings_all_its_members_back(q: Q) -> None:
    gang, _, claims = placed(q, 2, policy="shrink", completion="driver")
    claims[0].complete()
    ack_all(claims[1:])
    assert gang.state == "done"
    q.call("retry", gang_ids=[gang.id])
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 5)
    assert [row["role"] for row in gang.members] == ["driver"] + ["executor"] * 4
    workers = [q.worker(f"again{n}") for n in range(4)]
    again = run(gang, workers, gang.job_ids[:4])
    assert [c["world_size"] for c in again] == [4] * 4
    assert (gang.row["failure_policy"], gang.row["completion"]) == ("shrink", "driver")


@pytest.mark.parametrize(
    "chosen",
    [[0], [0, 1], [1, 2, 3], [0, 1, 3], [0, 2, 1], [0, 1, 1]],
    ids=["no executor", "too few", "no driver", "a gap", "out of order", "one twice"],
)
def test_no_other_set_of_members_is_an_epoch(q: Q, chosen: list[int]) -> None:
    gang = submit_roles(q, *ROLES)
    workers = q.workers(4)
    with refused(INVALID, "no epoch"):
        reserve(gang, [gang.job_ids[n] for n in chosen], workers[: len(chosen)])
    with refused(INVALID, "workers given"):
        reserve(gang, gang.job_ids[:3], workers[:2])
    assert gang.states == ["blocked"] * 5


def of_two_shapes(q: Q) -> Gang:
    """A driver without a device that needs memory, and executors with a large one each."""
    needs = {
        "queue": "default",
        "task": "train",
        "gpus": 1,
        "vram_mb": 80,
        "memory_mb": 10,
        "cpus": 0,
        "labels": {},
    }
    large = q.value(
        "select gangq.keep_shape(jsonb_populate_record(null::gangq.shapes, %(needs)s), null)",
        needs=Jsonb(needs),
    )
    return submit_roles(q, *ROLES, shapes={"executor": large}, gpus=1, vram_mb=10, memory_mb=50)


def test_each_member_holds_devices_by_its_own_shape_the_smallest_that_suffice(q: Q) -> None:
    gang = of_two_shapes(q)
    worker = q.worker(slots=4, memory_mb=100, devices=gpus(10, 80, 90, 100))
    claims = run(gang, [worker] * 3, gang.job_ids[:3])
    assert [[d["uuid"] for d in c["devices"]] for c in claims] == [["G0"], ["G1"], ["G2"]]


def test_who_needs_the_large_devices_chooses_before_who_does_not(q: Q) -> None:
    gang = of_two_shapes(q)
    worker = q.worker(slots=4, memory_mb=100, devices=gpus(80, 80, 90))
    claims = run(gang, [worker] * 3, gang.job_ids[:3])
    assert [[d["uuid"] for d in c["devices"]] for c in claims] == [["G2"], ["G0"], ["G1"]]


@pytest.mark.parametrize("lacks", ["slots", "memory", "devices", "queue", "live"])
def test_what_is_full_or_not_for_it_reserves_nobody(q: Q, lacks: str) -> None:
    gang = of_two_shapes(q)
    offer = {"slots": 3, "memory_mb": 70, "devices": gpus(10, 80, 80)}
    offer |= {
        "slots": {"slots": 2},
        "memory": {"memory_mb": 69},
        "devices": {"devices": gpus(10, 79, 80)},
        "queue": {"queues": ["other"]},
        "live": {},
    }[lacks]
    q.call("set_queue", name="other")
    worker = q.worker(**offer)
    if lacks == "live":
        worker.retire(final=False)
    assert not reserve(gang, gang.job_ids[:3], [worker] * 3)
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 5)
    assert q.sql("select 1 from gangq.device_holds") == []


def test_with_just_enough_it_is_placed(q: Q) -> None:
    gang = of_two_shapes(q)
    worker = q.worker(slots=3, memory_mb=70, devices=gpus(10, 80, 80))
    assert reserve(gang, gang.job_ids[:3], [worker] * 3)
