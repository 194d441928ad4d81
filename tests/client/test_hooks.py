"""Hooks of an App around handlers that run here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gangq import App, Context, Outcome
from gangq.errors import Fail, HookFailed, InvalidInput, RetryLater, Snoozed, Stopped
from gangq.retry import Retry
from gangq.testing import FakeContext, drain, run

NOWHERE = "postgresql://nowhere.invalid/none"


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        made.client.set_queue(name="default", backoff_s=0.01, backoff_max_s=0.01)
        yield made


def recorded(app: App) -> list[Any]:
    """Declare two hooks of each kind, and return what they are called with."""
    seen: list[Any] = []
    for name in ("a", "b"):
        app.on_worker_start(lambda name=name: seen.append(("worker start", name)))
        app.on_worker_stop(lambda name=name: seen.append(("worker stop", name)))
        app.on_start(lambda ctx, name=name: seen.append(("start", name)))
        app.on_failure(lambda ctx, outcome, name=name: seen.append(("failure", name)))
        app.on_end(lambda ctx, outcome, name=name: seen.append(("end", name)))
    return seen


def test_starts_come_in_order_and_ends_reversed_and_those_of_the_worker_once() -> None:
    app = App(NOWHERE)
    seen = recorded(app)

    @app.task
    def task(ctx: Context, fails: bool = False) -> int:
        seen.append("handler")
        return 1 // (not fails)

    begun = [("worker start", "a"), ("worker start", "b")]
    around = [("start", "a"), ("start", "b"), "handler"]
    ends = [("end", "b"), ("end", "a")]
    assert run(task) == 1
    assert seen == begun + around + ends
    with pytest.raises(ZeroDivisionError):
        run(task, fails=True)
    assert seen == [*begun, *around, *ends, *around, ("failure", "b"), ("failure", "a"), *ends]


def test_a_hook_that_raises_before_the_handler_is_its_error_and_after_it_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App(NOWHERE)
    outcomes: list[Outcome] = []

    @app.on_start
    def refuses(ctx: Context) -> None:
        if ctx.job.payload["before"]:
            raise LookupError("no run")

    @app.on_end
    def is_called_last(ctx: Context, outcome: Outcome) -> None:
        outcomes.append(outcome)

    @app.on_failure
    @app.on_end
    def raises(ctx: Context, outcome: Outcome) -> None:
        raise SystemExit("too late")

    @app.task
    def task(ctx: Context, before: bool) -> str:
        return "done"

    assert run(task, before=False) == "done"
    with pytest.raises(LookupError):
        run(task, before=True)
    assert [(one.state, one.result) for one in outcomes] == [("done", "done"), ("failed", None)]
    assert isinstance(outcomes[1].error, LookupError)
    assert [record.message for record in caplog.records] == ["hook_failed"] * 3


@pytest.mark.parametrize(
    ("problem", "attempt", "state", "final"),
    [
        (ValueError(), 1, "failed", False),
        (ValueError(), 3, "failed", True),
        (OSError(), 1, "failed", True),
        (Fail("bad input"), 1, "failed", True),
        (RetryLater(1), 1, "later", False),
        (RetryLater(1), 3, "failed", True),
        (Snoozed(1), 1, "later", False),
        (Snoozed(1), 3, "later", False),
        (Stopped("left"), 1, "failed", False),
        (KeyboardInterrupt(), 1, "failed", False),
    ],
    ids=repr,
)
def test_an_outcome_says_whether_it_failed_and_for_good(
    problem: BaseException, attempt: int, state: str, final: bool
) -> None:
    app = App(NOWHERE)
    ended: list[Outcome] = []
    failed: list[Outcome] = []
    app.on_end(lambda ctx, outcome: ended.append(outcome))
    app.on_failure(lambda ctx, outcome: failed.append(outcome))

    @app.task(retry=Retry(3, never=(OSError,)))
    def task(ctx: Context) -> None:
        raise problem

    with pytest.raises(type(problem)):
        run(task, context=FakeContext(attempt=attempt))
    assert ended == [Outcome(state, None, problem, final)]  # type: ignore[arg-type]
    assert failed == (ended if state == "failed" else [])


def test_a_stop_is_no_failure_and_a_hook_that_looks_for_one_is_not_the_handler() -> None:
    app = App(NOWHERE)
    ended: list[str] = []
    app.on_end(lambda ctx, outcome: ended.append(outcome.state) if ctx.stopping else None)

    @app.task
    def leaves(ctx: Context, how: str) -> str | None:
        if how == "raises":
            ctx.raise_if_stopping()
        if how == "looks" and ctx.stopping:
            return None
        return "whole" if how == "whole" else None

    for how, raised in [("raises", True), ("looks", True), ("whole", False), ("never looked", False)]:
        ctx = FakeContext()
        ctx.stop()
        if raised:
            with pytest.raises(Stopped):
                run(leaves, how, context=ctx)
        else:
            run(leaves, how, context=ctx)
    assert ended == ["stopped", "stopped", "done", "done"]


def test_what_runs_nothing_is_no_hook() -> None:
    app = App(NOWHERE)

    async def waits(*_: object) -> None: ...

    def yields(*_: object) -> Iterator[None]:
        yield

    async def yields_later(*_: object) -> AsyncIterator[None]:
        yield

    for declare in (app.on_worker_start, app.on_worker_stop, app.on_start, app.on_end, app.on_failure):
        for hook in (waits, yields, yields_later):
            with pytest.raises(
                InvalidInput, match=f"the hook .*{hook.__name__} runs nothing when it is called"
            ):
                declare(hook)
    assert app.on_worker_start(children=True)(recorded) is recorded


def test_drain_calls_all_of_them_and_reports_what_the_handler_did(app: App) -> None:
    seen = recorded(app)

    @app.task(max_attempts=1)
    def task(ctx: Context, fails: bool) -> int:
        return 1 // (not fails)

    task.submit_many([{"fails": False}, {"fails": True}])
    assert str(drain(app)) == "1 done; 1 failed"
    starts, ends = [("start", "a"), ("start", "b")], [("end", "b"), ("end", "a")]
    failure = [("failure", "b"), ("failure", "a")]
    worker = [("worker start", "a"), ("worker start", "b")], [("worker stop", "b"), ("worker stop", "a")]
    assert seen == [*worker[0], *starts, *ends, *starts, *failure, *ends, *worker[1]]


def test_a_worker_whose_start_hook_raises_claims_nothing(app: App) -> None:
    away = True

    @app.on_worker_start
    def connects() -> None:
        if away:
            raise ConnectionError("no tracking server")

    @app.task
    def task(ctx: Context) -> int:
        return os.getpid()

    job = task.submit()
    with pytest.raises(
        HookFailed, match=r"connects of on_worker_start raised ConnectionError: no tracking server"
    ):
        drain(app)
    assert (job.state(), app.client.workers()) == ("pending", [])
    away = False
    assert drain(app).ended[0].result == os.getpid()


def test_a_start_hook_that_has_returned_is_not_called_again_because_a_later_one_raised(app: App) -> None:
    called: list[str] = []

    @app.on_worker_start
    def opens() -> None:
        called.append("opens")

    @app.on_worker_start
    def connects() -> None:
        called.append("connects")
        if len(called) == 2:
            raise ConnectionError("no tracking server")

    @app.task
    def task(ctx: Context) -> None: ...

    with pytest.raises(HookFailed):
        run(task)
    run(task)
    run(task)
    assert called == ["opens", "connects", "connects"]
