"""Calling a handler as a worker does, without one."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import gangq
from gangq import App, Context, Job
from gangq.errors import InvalidInput, NotSerializable, ResultNotStored, StaleToken, Stopped
from gangq.hooks import Outcome
from gangq.testing import FakeContext, run

app = App("postgresql://nowhere.invalid/none")


@app.task(queue="gpu", priority=7, budget=60, max_attempts=5)
def train(ctx: Context, lr: float, epochs: int = 3, *, tags: list[str] | None = None) -> Any:
    start = ctx.checkpoint.step if ctx.checkpoint else 0
    for epoch in range(start, epochs):
        if ctx.stopping:
            return None
        ctx.beat(step=epoch + 1, total=epochs)
        ctx.save_checkpoint(epoch + 1, b"state")
    return {"lr": lr, "epochs": epochs, "tags": tags, "job": ctx.job.task, "payload": dict(ctx.job.payload)}


def test_it_calls_the_handler_with_what_comes_out_of_json() -> None:
    ctx = FakeContext()
    found = run(train, 0.1, tags=("a", "b"), context=ctx)
    assert found == {
        "lr": 0.1,
        "epochs": 3,
        "tags": ["a", "b"],
        "job": "train",
        "payload": {"lr": 0.1, "tags": ["a", "b"]},
    }
    assert (ctx.job.queue, ctx.job.priority, ctx.job.budget_s, ctx.job.max_attempts) == ("gpu", 7, 60, 5)
    assert run(train.aio, lr=0.1) == {**found, "tags": None, "payload": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'lr'"),
        ((), {"lr": 1, "momentum": 1}, "got an unexpected keyword argument 'momentum'"),
        ((), {"lr": 1, "ctx": 1}, "'ctx' is the context, which the worker gives"),
        ((1, 2, 3), {}, "3 are given by position; it takes"),
        ((1,), {"lr": 2}, "'lr' is given by position and by name"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_as_submit_refuses_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match="the arguments do not fit task 'train': ") as refused:
        run(train, *args, **kwargs)
    assert said in str(refused.value)
    if not args:
        with pytest.raises(InvalidInput) as submitted:
            train.submit(**kwargs)
        assert str(submitted.value) == str(refused.value)


def test_arguments_that_are_no_json_are_refused() -> None:
    with pytest.raises(NotSerializable, match=r"payload has object at \$\.lr"):
        run(train, lr=object())


def test_the_result_is_what_would_be_stored() -> None:
    @app.task
    def returns(ctx: Context, what: str) -> Any:
        return {
            "tuple": lambda: (1, 2),
            "nan": lambda: [float("nan")],
            "set": lambda: {"of": {1}},
            "coroutine": lambda: _coroutine(),
        }[what]()

    async def _coroutine() -> None: ...

    assert run(returns, "tuple") == [1, 2]
    assert run(returns, "nan") == [None]
    with pytest.raises(ResultNotStored, match=r"the result of task 'returns' has set at \$\.of"):
        run(returns, "set")
    with pytest.raises(TypeError, match="runs nothing when it is called"):
        run(returns, "coroutine")


def test_what_the_handler_raises_is_raised_and_nothing_is_left_behind() -> None:
    @app.task
    def breaks(ctx: Context) -> None:
        assert gangq.current() is ctx
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run(breaks)
    with pytest.raises(gangq.GangqError, match="no job runs here"):
        gangq.current()


def test_an_async_handler_runs_to_its_end_and_can_be_awaited_where_an_event_loop_runs() -> None:
    @app.task
    async def doubles(ctx: Context, n: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        assert gangq.current() is ctx
        return n, 2 * n

    @app.task
    async def stops(ctx: Context) -> None:
        await asyncio.sleep(0)
        ctx.raise_if_stopping()

    async def awaits() -> tuple[int, int]:
        context = FakeContext()
        gangq.context.set_current(context)
        try:
            return await doubles(context, 2)
        finally:
            gangq.context.set_current(None)

    assert run(doubles, 1) == [1, 2]
    assert run(doubles.aio, 1) == [1, 2]
    assert asyncio.run(awaits()) == (2, 4)
    told = FakeContext()
    told.stop()
    with pytest.raises(Stopped):
        run(stops, context=told)


def test_a_handler_may_run_another() -> None:
    @app.task
    def outer(ctx: Context) -> bool:
        run(train, lr=1)
        return gangq.current() is ctx

    assert run(outer) is True


def test_a_job_that_is_told_to_stop_is_handed_back() -> None:
    ctx = FakeContext(stop_at=2)
    with pytest.raises(Stopped, match="returned None after it saw that it should stop"):
        run(train, lr=0.1, context=ctx)
    assert sorted(ctx.checkpoints) == [1, 2]
    again = ctx.next_attempt()
    assert run(train, lr=0.1, context=again)["epochs"] == 3
    assert [beat["step"] for beat in again.beats] == [3]


def test_a_job_that_is_told_too_late_is_done() -> None:
    @app.task
    def finishes(ctx: Context) -> None:
        return None

    ctx = FakeContext()
    ctx.stop()
    assert run(finishes, context=ctx) is None


def test_what_a_job_returns_that_has_lost_its_claim_is_not_stored() -> None:
    @app.task
    def loses(ctx: Context, looks: bool, completes: bool = False) -> Any:
        if completes:
            ctx.complete(object(), "completed")
        assert isinstance(ctx, FakeContext)
        ctx.lose()
        return None if looks and ctx.stopping else "lost"

    for looks in (False, True):
        with pytest.raises(StaleToken, match="not the present claim of job 1"):
            run(loses, looks)
    # A worker takes no notice either.
    assert run(loses, looks=False, completes=True) == "completed"


def test_what_it_completes_with_is_its_result() -> None:
    @app.task
    def completes(ctx: Context) -> str:
        ctx.complete(object(), (1, 2))
        return "ignored"

    ctx = FakeContext()
    assert run(completes, context=ctx) == [1, 2]
    assert ctx.completed


def test_a_device_is_visible_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    @app.task
    def looks(ctx: Context) -> Any:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert run(looks) == "7"
    assert run(looks, context=FakeContext(devices="2x24GiB")) == "0,1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run(looks, context=FakeContext(devices="1x24GiB")) == "0"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_task_of_which_only_the_name_is_known_cannot_be_run() -> None:
    with pytest.raises(InvalidInput, match="task 'far' is implemented elsewhere: import what implements it"):
        run(app.declare_task("far"))


def test_no_database_was_asked() -> None:
    assert isinstance(app.job(1), Job)
    assert app._clients.made is None or app._clients.made._pool is None


def test_a_handler_that_cannot_run_has_no_further_attempt_as_in_a_worker() -> None:
    app = App()
    ended: list[Outcome] = []
    app.on_end(lambda ctx, outcome: ended.append(outcome))

    async def later() -> None: ...

    @app.task
    def coroutine(ctx: Context) -> Any:
        return later()

    with pytest.raises(TypeError, match="runs nothing when it is called"):
        run(coroutine)
    assert [outcome.final for outcome in ended] == [True]
