"""What a worker must leave free for gangs that wait, and who may use it all the same; how long work will run.

Earmarks are written by hand here, as the admission pass would: no tick runs, so nothing takes them back.
"""

from __future__ import annotations

from typing import Any

import pytest
from drive import Gang, Q, Worker, gpus

HOUR = 3600


def keep(q: Q, worker: Worker, gang: Gang, kind: str = "plan", in_s: float = HOUR, **amounts: float) -> None:
    """This worker keeps so much for a gang: until its planned start, or until the promise lapses."""
    amounts = {"slots": 0, "gpus": 0, "memory_mb": 0, "cpus": 0, **amounts}
    q.sql(
        "insert into gangq.earmarks (incarnation, gang_id, order_key, kind, until, slots, gpus, memory_mb, cpus) "
        "select %(worker)s, g.id, g.order_key, %(kind)s, gangq.now() + make_interval(secs => %(in_s)s), "
        "%(slots)s, %(gpus)s, %(memory_mb)s, %(cpus)s from gangq.live_gangs g where g.id = %(gang)s",
        worker=worker.incarnation,
        gang=gang.id,
        kind=kind,
        in_s=in_s,
        **amounts,
    )


def taken(worker: Worker, max_jobs: int = 10) -> list[int]:
    return sorted(c.job_id for c in worker.claim(max_jobs))


# Amounts ----------------------------------------------------------------------------------------------------

KEPT: list[tuple[dict[str, float], dict[str, Any], int]] = [
    ({"slots": 3}, {}, 1),
    ({"slots": 3}, {"gpus": 1}, 1),
    ({"gpus": 3}, {"gpus": 1}, 1),
    ({"gpus": 4}, {"gpus": 1}, 0),
    ({"gpus": 4}, {"memory_mb": 1}, 4),
    ({"memory_mb": 750}, {"memory_mb": 100}, 2),
    ({"cpus": 6.5}, {"cpus": 0.5}, 3),
    ({"slots": 9}, {}, 0),
    ({"slots": 0}, {}, 4),
]


@pytest.mark.parametrize("max_jobs", [1, 10])
@pytest.mark.parametrize("kind", ["plan", "escrow"])
@pytest.mark.parametrize(("kept", "needs", "most"), KEPT)
def test_a_job_that_comes_later_has_the_room_that_is_not_kept(
    q: Q, kind: str, kept: dict[str, float], needs: dict[str, Any], most: int, max_jobs: int
) -> None:
    worker = q.worker(slots=4, memory_mb=1000, cpus=8, devices=gpus(1, 1, 1, 1))
    keep(q, worker, q.submit_gang(1), kind, **kept)
    q.submit(count=6, budget_s=2 * HOUR, **needs)
    assert sum(len(worker.claim(max_jobs)) for _ in range(6)) == most


def test_the_largest_devices_are_the_ones_that_are_kept(q: Q) -> None:
    worker = q.worker(slots=4, devices=gpus(80, 24, 80))
    keep(q, worker, q.submit_gang(1), gpus=2)
    q.submit(gpus=1, vram_mb=80, budget_s=2 * HOUR)
    small = q.submit(gpus=1, vram_mb=24, budget_s=2 * HOUR)
    assert taken(worker) == [small]


def test_what_several_gangs_are_promised_adds_up(q: Q) -> None:
    worker = q.worker(slots=4)
    for _ in range(3):
        keep(q, worker, q.submit_gang(1), slots=1)
    q.submit(count=4, budget_s=2 * HOUR)
    assert len(worker.claim()) == 1


@pytest.mark.parametrize("max_jobs", [1, 20])
def test_prefetched_jobs_leave_whole_slots_free(q: Q, max_jobs: int) -> None:
    worker = q.worker(slots=3, prefetch=4)
    keep(q, worker, q.submit_gang(1), slots=2)
    q.submit(count=20, budget_s=2 * HOUR)
    assert sum(len(worker.claim(max_jobs)) for _ in range(20)) == 4


# Order ------------------------------------------------------------------------------------------------------


def test_a_job_that_comes_before_the_planned_gang_may_use_what_is_kept(q: Q) -> None:
    worker = q.worker(slots=2)
    older = q.submit(budget_s=2 * HOUR)
    gang = q.submit_gang(1)
    keep(q, worker, gang, slots=2)
    q.submit(budget_s=2 * HOUR)
    urgent = q.submit(budget_s=2 * HOUR, priority=1)
    assert taken(worker) == [older, urgent]


def test_an_escrow_is_kept_from_everybody_until_it_lapses(q: Q) -> None:
    worker = q.worker(slots=1)
    urgent = q.submit(priority=1, budget_s=1)
    keep(q, worker, q.submit_gang(1), "escrow", in_s=20, slots=1)
    assert taken(worker) == []
    q.later(21)
    assert taken(worker) == [urgent]


def test_a_batch_does_not_run_on_past_a_gang_that_comes_between(q: Q) -> None:
    worker = q.worker(slots=3)
    older = q.submit(count=2, budget_s=2 * HOUR)
    keep(q, worker, q.submit_gang(1), slots=1)
    q.submit(count=2, budget_s=2 * HOUR)
    assert taken(worker) == older, "the third slot is kept from the younger two"


# Work that ends in time -------------------------------------------------------------------------------------


def test_a_job_that_ends_before_the_planned_start_may_use_what_is_kept(q: Q) -> None:
    worker = q.worker(slots=2, devices=gpus(1, 1))
    keep(q, worker, q.submit_gang(1), slots=2, gpus=2)
    q.submit(gpus=1, budget_s=HOUR + 1)
    short = q.submit(gpus=1, budget_s=HOUR)
    assert taken(worker) == [short]
    q.later(1)
    q.submit(gpus=1, budget_s=HOUR)
    assert taken(worker) == [], "by now it would end too late"


@pytest.mark.parametrize("max_jobs", [1, 10])
def test_short_jobs_of_one_kind_go_past_the_long_ones_before_them(q: Q, max_jobs: int) -> None:
    worker = q.worker(slots=3)
    keep(q, worker, q.submit_gang(1), slots=3)
    q.submit(count=3, budget_s=2 * HOUR)
    short = q.submit(count=4, budget_s=60)
    assert sorted(j for _ in range(4) for j in taken(worker, max_jobs)) == short[:3]


def test_only_the_first_job_of_a_slot_counts_on_ending_in_time(q: Q) -> None:
    worker = q.worker(slots=2, prefetch=10)
    keep(q, worker, q.submit_gang(1), slots=2)
    q.submit(count=30, budget_s=HOUR / 2)
    assert len(worker.claim(30)) == 2


def test_work_without_a_budget_is_taken_to_run_as_long_as_the_installation_lets_it(q: Q) -> None:
    q.call("configure", budget_s=60, budget_gpu_s=2 * HOUR)
    worker = q.worker(slots=2, devices=gpus(1))
    keep(q, worker, q.submit_gang(1), slots=2, gpus=1)
    q.submit(gpus=1)
    plain = q.submit()
    assert taken(worker) == [plain]


def test_a_plan_that_is_overdue_is_kept_from_all_that_come_later(q: Q) -> None:
    worker = q.worker(slots=1)
    keep(q, worker, q.submit_gang(1), in_s=-1, slots=1)
    q.submit(budget_s=1)
    assert taken(worker) == []


def test_another_worker_is_not_held_by_the_earmark(q: Q) -> None:
    one, two = q.worker("w1"), q.worker("w2")
    keep(q, one, q.submit_gang(1), slots=1)
    job = q.submit(budget_s=2 * HOUR)
    assert (taken(one), taken(two)) == ([], [job])


def test_earmarks_and_limits_hold_together(q: Q) -> None:
    q.call("set_queue", name="default", max_running_jobs=3)
    worker = q.worker(slots=9)
    keep(q, worker, q.submit_gang(1), slots=7)
    q.submit(count=5, budget_s=2 * HOUR)
    short = q.submit(count=5, budget_s=60)
    claims = taken(worker)
    assert len(claims) == 3
    assert claims[-1] == short[0]


# Estimates --------------------------------------------------------------------------------------------------


def estimate(q: Q, gpus: int = 1, budget_s: float | None = None) -> Any:
    return q.one("estimate_s", queue="default", task="work", gpus=gpus, budget_s=budget_s)


def run(q: Q, worker: Worker, seconds: float, **needs: Any) -> None:
    q.submit(**{"gpus": 1, **needs})
    claim = worker.take()
    q.live_on(seconds, worker, step=60, tick=False)
    claim.complete()


def test_the_history_of_a_task_lowers_its_estimate_and_never_raises_it(q: Q) -> None:
    q.call("configure", budget_s=50, budget_gpu_s=5000)
    assert (estimate(q), estimate(q, gpus=0), estimate(q, budget_s=7)) == (5000, 50, 7)
    worker = q.worker(devices=gpus(1))
    for n in range(10):
        assert estimate(q) == 5000, f"{n} ends are too few"
        run(q, worker, 30 if n == 4 else 20)
    assert (estimate(q), estimate(q, budget_s=7)) == (30, 7)
    assert q.sql("select queue, task, samples from gangq.runtimes") == [
        {"queue": "default", "task": "work", "samples": 10}
    ]


def test_the_estimate_settles_where_nine_of_ten_ends_are_shorter(q: Q) -> None:
    q.submit(gpus=1)
    shape = q.value("select max(id) from gangq.shapes")
    # 1 to 100 seconds, each as often, in an order that mixes them.
    q.sql(
        "select gangq.learn_runtimes(array[%(shape)s::integer], array[1 + (n * 37) %% 100]::float8[], now()) "
        "from generate_series(1, 3000) n",
        shape=shape,
    )
    assert q.value("select p90_s from gangq.runtimes") == pytest.approx(90, rel=0.15)


def test_plain_solo_jobs_and_those_that_were_not_done_teach_nothing(q: Q) -> None:
    worker = q.worker(devices=gpus(1))
    run(q, worker, 5, gpus=0)
    q.submit(gpus=1)
    worker.take().fail(retryable=False)
    q.call("cancel", job_ids=[q.submit(gpus=1)])
    assert q.sql("select * from gangq.runtimes") == []


def test_a_gang_is_one_end_as_long_as_its_longest_member(q: Q) -> None:
    workers = q.workers(2)
    claims = q.submit_gang(2).start(*workers)
    for claim in claims:
        q.live_on(60, *workers, step=60, tick=False)
        claim.complete()
    (row,) = q.sql("select task, samples, p90_s from gangq.runtimes")
    assert row == {"task": "train", "samples": 1, "p90_s": 120}
