"""Batches in Python: what submit_many with a name returns, and what a job of one knows of its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import gangq
from gangq import App, Context
from gangq.errors import InvalidInput, JobCancelled, JobFailed, NotFound, WaitTimeout
from gangq.testing import FakeContext, drain


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


def test_its_jobs_have_the_indexes_of_any_sequence_of_whole_numbers(app: App) -> None:
    @app.task
    def place(ctx: Context) -> int | None:
        return ctx.index

    batch = place.submit_many([{}, {}, {}], name="some", indexes=range(3, 12, 4))
    drain(app)
    assert batch.results() == [3, 7, 11]
    for wrong in ([1.5, 2, 3], ["a", 2, 3], 7):
        with pytest.raises(InvalidInput, match="indexes"):
            place.submit_many([{}, {}, {}], name="some", indexes=wrong)  # type: ignore[arg-type]


def test_a_name_makes_a_batch_whose_results_are_in_order(app: App) -> None:
    @app.task
    def square(ctx: Context, n: int) -> list[int | None]:
        return [n * n, ctx.index]

    batch = square.submit_many(({"n": n} for n in range(3)), name="sweep", tags=["lr", "a"], at_most=2)
    alone = square.submit(n=9)
    assert (len(batch), [job.id for job in batch], batch[-1]) == (3, batch.job_ids, [*batch][2])
    assert (batch[:2], batch.id) == ([batch[0], batch[1]], batch.job_ids[0])
    assert repr(batch) == f"<Batch b{batch.id}>", "nothing was asked yet"
    row = batch.progress()
    assert (row.name, row.tags, row.size, row.at_most) == ("sweep", ["a", "lr"], 3, 2)
    assert (row.state, row.waiting) == ("waiting", 3)
    assert repr(batch) == f"<Batch b{batch.id} (square) waiting: sweep, 0 of 3 done>"
    with pytest.raises(WaitTimeout, match=f"batch b{batch.id} has not ended within 0.05 s"):
        batch.wait(timeout="50ms")
    drain(app)
    assert batch.wait() == "done"
    assert batch.results() == [[0, 0], [1, 1], [4, 2]]
    assert alone.result() == [81, None]
    assert str(batch.status()) == f"Batch b{batch.id} (square) done: sweep, 3 of 3 done"
    assert app.batch(batch.id) == batch
    assert app.batch(batch.id).job_ids == batch.job_ids
    assert {*gangq.as_completed([batch, alone])} == {batch, alone}
    assert "Batch" in batch._repr_html_()


def test_of_a_batch_with_failures_the_first_is_raised_and_all_are_returned_on_request(app: App) -> None:
    broken = True

    @app.task(max_attempts=1)
    def checks(ctx: Context, n: int) -> int:
        if broken and n == 1:
            raise ValueError("bad n")
        return n

    batch = checks.submit_many([{"n": n} for n in range(4)], name="sweep")
    batch[3].cancel("not needed")
    drain(app)
    assert (batch.state(), batch.wait()) == ("failed", "failed")
    with pytest.raises(
        JobFailed,
        match=rf"batch b{batch.id} \(sweep, 2 of 4 done, 1 failed, 1 cancelled\): job {batch.job_ids[1]} "
        r"\(index 1\) failed after 1 of 1 attempts: ValueError: bad n",
    ) as caught:
        batch.results()
    assert caught.value.job_id == batch.job_ids[1]
    zero, one, two, three = batch.results(return_exceptions=True)
    assert (zero, two) == (0, 2)
    assert isinstance(one, JobFailed)
    assert isinstance(three, JobCancelled)
    broken = False
    assert batch.retry_failed() == 1
    assert batch.retry_failed() == 0
    assert batch.state() == "running"
    drain(app)
    with pytest.raises(JobCancelled, match=r"\(index 3\) was cancelled: not needed"):
        batch.results()
    assert batch.results(return_exceptions=True)[:3] == [0, 1, 2]


def test_cancelling_a_batch_leaves_what_has_ended(app: App) -> None:
    @app.task
    def task(ctx: Context, n: int) -> int:
        return n

    batch = task.submit_many([{"n": n} for n in range(3)], name="sweep", at_most=1)
    batch[0].cancel()
    assert (batch.progress().waiting, batch.progress().cancelled) == (2, 1)
    assert batch.cancel("enough") == "cancelled"
    assert batch.cancel() == "cancelled"
    assert batch.progress().cancelled == 3
    assert app.client.events(job_id=batch.job_ids[2], kind="cancel")[0].reason == "enough"


def test_what_waits_for_a_batch_starts_after_its_last_job(app: App) -> None:
    order: list[Any] = []

    @app.task(max_attempts=1)
    def trial(ctx: Context, n: int) -> int:
        order.append(n)
        if n == 2:
            raise ValueError
        return n

    @app.task
    def report(ctx: Context) -> int:
        order.append("report")
        return len(ctx.inputs)

    good = trial.submit_many([{"n": 0}, {"n": 1}], name="good")
    bad = trial.submit_many([{"n": 2}, {"n": 3}], name="bad")
    gang = app.declare_task("g").gang(1).submit()
    gang.cancel()
    after = report.options(after=[good], priority=9).submit()
    after_any = report.options(after_any=[good, bad, gang], priority=9).submit()
    never = report.options(after=[bad]).submit()
    drain(app)
    assert after.result() == 2
    assert after_any.state() == "done"
    assert never.state() == "cancelled"
    assert set(order[: order.index("report")]) >= {0, 1}


def test_batches_without_a_job_a_name_or_a_list_of_tags_are_refused(app: App) -> None:
    task = app.declare_task("t")
    with pytest.raises(InvalidInput, match="a batch such as 'sweep' has a job at least"):
        task.submit_many([], name="sweep")
    assert task.submit_many([]) == []
    with pytest.raises(InvalidInput, match="at_most is given without name"):
        task.submit_many([{}], at_most=2)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="tags is 'nightly': pass a list of strings"):
        task.submit_many([{}], name="sweep", tags="nightly")
    with pytest.raises(NotFound, match="batch b12345 does not exist"):
        app.batch(12345)


def test_a_repeated_submission_is_the_same_batch(app: App) -> None:
    task = app.declare_task("t").options(request_id="01890000-0000-7000-8000-000000000001")
    assert task.submit_many([{}, {}], name="a") == task.submit_many([{}, {}], name="a")
    assert len(app.client.batches()) == 1


def test_an_async_batch_has_the_same_methods(app: App) -> None:
    @app.task
    def square(ctx: Context, n: int) -> int:
        return n * n

    async def attempt() -> None:
        async with app.aio:
            batch = await square.aio.submit_many([{"n": n} for n in range(3)], name="sweep")
            assert (len(batch), batch[1].id) == (3, batch.job_ids[1])
            assert (await batch.progress()).waiting == 3
            await asyncio.to_thread(drain, app)
            assert await batch.results(timeout="1m") == [0, 1, 4]
            assert [await job for job in batch] == [0, 1, 4]
            assert await batch == [0, 1, 4]
            assert await batch.retry_failed() == 0
            assert (await app.aio.batch(batch.id)).job_ids == batch.job_ids
            assert (await batch.cancel(), await batch.state()) == ("done", "done")
            assert "3 of 3" in str(await batch.status())

    asyncio.run(attempt())


def test_a_fake_context_has_a_place_in_a_batch() -> None:
    assert FakeContext(index=3).index == 3
    assert FakeContext().index is None
