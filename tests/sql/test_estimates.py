"""How long work will run: its budget, or less where what ended of its task says so."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import Q, Worker, gpus


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
        "select gangq.learn_runtimes(array[jsonb_populate_record(null::gangq.attempt_history, jsonb_build_object("
        "  'shape_id', %(shape)s::integer, 'started_at', now(), "
        "  'ended_at', now() + make_interval(secs => 1 + (n * 37) %% 100)))], now()) "
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
