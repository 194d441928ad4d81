"""What was submitted is found, and a failure says what was submitted instead."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest

from gangq import App, Context
from gangq.tasks import Task
from gangq.testing import FakeContext, assert_submitted, run, submitted


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


@pytest.fixture
def train(app: App) -> Task[..., None]:
    @app.task
    def train(
        ctx: Context, lr: float, epochs: int = 3, count: int = 0, tags: list[str] | None = None
    ) -> None: ...

    return train


@pytest.fixture
def report(app: App) -> Task[..., None]:
    @app.task
    def report(ctx: Context) -> None: ...

    return report


def test_submitted_lists_jobs_in_order(app: App, train: Task[..., None], report: Task[..., None]) -> None:
    train.options(priority=5).submit(lr=0.1)
    report.submit()
    train.gang(2).submit(lr=0.2)
    assert [job.task for job in submitted(app)] == ["train", "report", "train", "train"]
    assert [job.payload["lr"] for job in submitted(app.aio, train)] == [0.1, 0.2, 0.2]
    assert [job.priority for job in submitted(app, "train")] == [5, 0, 0]


def test_assert_submitted_looks_at_the_values_that_are_named(train: Task[..., None]) -> None:
    train.submit(lr=0.1, tags=["a"], count=3)
    train.submit(lr=0.2)
    assert_submitted(train)
    assert_submitted(train, lr=0.1)
    assert_submitted(train.aio, lr=0.1, count=1)
    assert_submitted(train, {"count": 3}, tags=("a",))
    assert_submitted(train, count=2)
    assert_submitted(train, lr=0.3, count=0)


def test_a_failure_says_what_was_submitted(train: Task[..., None], report: Task[..., None]) -> None:
    train.submit(lr=0.1, epochs=2)
    train.gang(2).submit(lr=0.2)
    report.submit()
    with pytest.raises(AssertionError) as failed:
        assert_submitted(train, lr=0.3)
    (gang,) = {job.gang_id for job in submitted(train.app) if job.gang_id}
    payloads = [json.dumps(job.payload) for job in submitted(train.app, train)]
    assert str(failed.value).splitlines() == [
        "at least 1 job of task 'train' with {\"lr\": 0.3} should have been submitted, and none was",
        "of task 'train':",
        f"  job 1, pending: {payloads[0]}",
        f"  job 2 of gang g{gang}, blocked: {payloads[1]}",
        f"  job 3 of gang g{gang}, blocked: {payloads[2]}",
        "of other tasks: 1 report",
    ]
    with pytest.raises(
        AssertionError, match="1 job of task 'train' should have been submitted, and 3 were\nthose:"
    ):
        assert_submitted(train, count=1)
    with pytest.raises(
        AssertionError, match=r"0 jobs of task 'train' with .* and 1 was\nthose:\n  job 1, .*\nof task"
    ):
        assert_submitted(train, lr=0.1, count=0)


def test_many_jobs_are_not_all_listed(train: Task[..., None]) -> None:
    train.submit_many([{"lr": n} for n in range(30)])
    with pytest.raises(AssertionError, match=r"\.\.\. and 10 more$"):
        assert_submitted(train, lr=0.5)


def test_what_is_not_committed_is_not_submitted(dsn: str, train: Task[..., None]) -> None:
    with psycopg.connect(dsn) as connection:
        train.options(connection=connection).submit(lr=0.1)
        with pytest.raises(AssertionError, match="nothing was submitted, or it is not committed"):
            assert_submitted(train)
    assert_submitted(train)


def test_what_a_handler_submitted_in_run_is_found_in_its_context() -> None:
    app = App()

    @app.task
    def child(ctx: Context, n: int) -> None: ...

    @app.task
    def parent(ctx: Context) -> None:
        child.submit_many([{"n": 1}, {"n": 2}])
        child.gang(2).submit(n=3)

    ctx = FakeContext()
    with pytest.raises(AssertionError, match=r"and none was\nnothing was submitted$"):
        assert_submitted(child, context=ctx)
    run(parent, context=ctx)
    assert_submitted(child, n=3, count=2, context=ctx)
    with pytest.raises(AssertionError, match="job 5 of gang g4"):
        assert_submitted(child, n=4, context=ctx)
    assert_submitted(parent, count=0, context=ctx)
