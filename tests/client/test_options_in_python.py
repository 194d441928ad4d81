"""What is said of one submission: once under a key, at a moment, in a transaction; and tasks that are handed on."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from types import ModuleType
from typing import Any

import psycopg
import pytest

from gangq import App, Client, Context, Role
from gangq.errors import InvalidInput
from gangq.task_options import WatchOptions


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


def end(client: Client, queue: str = "default") -> None:
    """Claim the job that waits, and complete it."""
    worker = client.register_worker(name=f"w-{queue}", host="h1", queues=[queue]).incarnation
    (claim,) = client.claim(incarnation=worker)
    client.complete(job_ids=[claim.job_id], tokens=[claim.token])


# Unique


def test_a_key_stands_for_the_job_submitted_with_it_and_the_handle_says_so(app: App) -> None:
    task = app.declare_task("t")
    first = task.options(unique="ds-7").submit(n=1)
    again = task.options(unique="ds-7").submit(n=2)
    assert again == first
    assert (first.existed, again.existed, again.replaced) == (False, True, False)
    assert first.row().payload == {"n": 1}
    assert not task.options(unique="ds-8").submit().existed
    assert not task.submit().existed
    assert not app.job(first.id).existed


def test_a_key_is_kept_as_long_as_is_said(app: App, clock: Any) -> None:
    task = app.declare_task("t", unique="ds-7", unique_for="1h")
    first = task.submit()
    end(app.client)
    assert task.submit() == first
    clock.advance(3601)
    assert task.submit() != first


def test_what_waits_gets_the_new_payload_moment_and_priority(app: App) -> None:
    task = app.declare_task("t")
    first = task.options(unique="k", delay="1d").submit(n=1)
    at = datetime(2100, 1, 1, tzinfo=UTC)
    again = task.options(unique="k", replace=True, run_at=at, priority=5).submit(n=2)
    assert (again == first, again.existed, again.replaced) == (True, True, True)
    row = first.row()
    assert (row.payload, row.due_at, row.priority) == ({"n": 2}, at, 5)


@pytest.mark.parametrize("moment", ["2100-01-01", date(2100, 1, 1), datetime(2100, 1, 1)])
def test_what_is_no_moment_is_refused_where_it_is_written(app: App, moment: Any) -> None:
    with pytest.raises(InvalidInput, match=r"run_at is .*time zone"):
        app.declare_task("t").options(run_at=moment)


def test_a_gang_is_submitted_once_too(app: App) -> None:
    task = app.declare_task("t").options(unique="k")
    first = task.gang(2, strategy="spread").submit(n=1)
    again = task.gang(3).submit_each([{}] * 3)
    assert (again, again.job_ids, again.existed, first.existed) == (first, first.job_ids, True, False)
    with pytest.raises(InvalidInput, match="replace is for single jobs"):
        task.options(replace=True).gang(2).submit()
    with pytest.raises(InvalidInput, match="stands for gang"):
        task.submit()


def test_a_key_of_a_transaction_that_is_rolled_back_stands_for_nothing(app: App, dsn: str) -> None:
    task = app.declare_task("t").options(unique="k")
    with psycopg.connect(dsn) as conn:
        inside = task.options(connection=conn).submit()
        gang = task.gang(2, connection=conn, unique="of gangs").submit()
        assert task.options(connection=conn).submit().existed
        conn.rollback()
    assert app.client.jobs() == []
    assert (task.submit().existed, task.gang(2, unique="of gangs").submit().existed) == (False, False)
    assert (inside.existed, gang.existed) == (False, False)


def test_a_key_stands_for_one_thing(app: App) -> None:
    task = app.declare_task("t")
    with pytest.raises(InvalidInput, match="a key stands for one job"):
        task.options(unique="k").submit_many([{}, {}])
    for alone in ({"unique_for": "1h"}, {"replace": True}):
        with pytest.raises(InvalidInput, match="without unique"):
            task.options(**alone)  # type: ignore[arg-type]
    for wrong in (0, "soon", -1):
        with pytest.raises(InvalidInput, match="unique_for is"):
            task.options(unique="k", unique_for=wrong)
    with pytest.raises(InvalidInput, match="the option unique, which is for one submission"):
        app.schedule(task=task.options(unique="k"), every="1h")
    with pytest.raises(InvalidInput, match="unique_key"):
        task.options(unique="").submit()


def test_the_async_task_says_so_too(app: App) -> None:
    task = app.declare_task("t").options(unique="k").aio

    async def twice() -> None:
        async with app.aio:
            first, again = await task.submit(n=1), await task.submit(n=1)
            assert (first == again, first.existed, again.existed) == (True, False, True)
            gang = task.options(unique="g").gang(2)
            assert [(await gang.submit()).existed, (await gang.submit_each([{}, {}])).existed] == [
                False,
                True,
            ]

    asyncio.run(twice())


# Moments


def test_a_delay_is_counted_by_the_clock_of_the_database(app: App, clock: Any) -> None:
    clock.advance(86400)
    task = app.declare_task("t")
    for delay in (90, "90s", timedelta(seconds=90)):
        assert task.options(delay=delay).submit().row().due_at == clock.now() + timedelta(seconds=90)
    gang = task.gang(2, delay="1h").submit()
    assert gang.row().not_before == clock.now() + timedelta(hours=1)


def test_a_delay_in_a_transaction_is_asked_of_its_connection(app: App, dsn: str, clock: Any) -> None:
    with psycopg.connect(dsn) as conn:
        job = app.declare_task("t").options(delay="1m", connection=conn).submit()
    assert job.row().due_at == clock.now() + timedelta(minutes=1)


def test_a_moment_is_one_moment(app: App) -> None:
    at = datetime(2100, 1, 1, tzinfo=UTC)
    task = app.declare_task("t").options(run_at=at)
    assert task.submit().row().due_at == at
    with pytest.raises(InvalidInput, match="both run_at and delay"):
        task.options(delay=1)
    with pytest.raises(InvalidInput, match="without a time zone"):
        task.options(run_at=datetime(2100, 1, 1)).submit()


# Lengths of time


def test_a_length_of_time_is_said_in_three_ways(app: App) -> None:
    for way in (90, "90s", timedelta(seconds=90)):
        task = app.task(
            name=f"t{way}", budget=way, stall_timeout=way, load_grace=way, health_window=way, long_phase=way
        )(lambda ctx: None)
        assert task.watch == WatchOptions(90, 90, 90, 90)
        assert task.submit().row().budget_s == 90
        gang = task.gang(2, timeout_s=way, claim_deadline_s=way).submit()
        assert gang.row().id == gang.id


def test_what_is_none_is_as_if_it_were_left_out(app: App) -> None:
    task = app.declare_task("t", priority=5)
    assert task.options(priority=None).defaults == {}
    assert task.options(priority=None, queue=None, unique=None).submit().row().priority == 0


# A task is its function


def trained(ctx: Context, lr: float, epochs: int = 3) -> dict[str, float]:
    """Train."""
    return {"lr": lr, "epochs": epochs}


def test_a_task_has_name_docstring_and_signature_of_its_function(app: App) -> None:
    task = app.task(name="other", gpus=1)(trained)
    one: Any
    for one in (task, task.options(priority=1), task.aio):
        assert (one.name, one.__name__, one.__doc__) == ("other", "trained", "Train.")
        assert inspect.unwrap(one) is trained
    assert inspect.signature(task) == inspect.signature(trained)


def test_arguments_are_given_by_position_too(app: App) -> None:
    task = app.task(trained)
    assert task.submit(0.1).row().payload == {"lr": 0.1}
    assert task.submit(0.1, epochs=5).row().payload == {"lr": 0.1, "epochs": 5}
    gang = task.gang(2).submit(0.1, 4)
    assert gang.members[1].row().payload == {"lr": 0.1, "epochs": 4}
    given: Any
    for given, why in (((1, 2, 3), "3 are given by position"), ((), "missing a required argument: 'lr'")):
        with pytest.raises(InvalidInput, match=why):
            task.submit(*given)
    with pytest.raises(InvalidInput, match="'lr' is given by position and by name"):
        task.submit(0.1, lr=0.2)  # type: ignore[misc]
    with pytest.raises(InvalidInput, match="not known here: pass its arguments by name"):
        app.declare_task("elsewhere").submit(1)


def test_a_payload_may_have_any_name_but_the_contexts(app: App) -> None:
    row = app.declare_task("t").submit(self=1, task=2, payload=3).row()
    assert row.payload == {"self": 1, "task": 2, "payload": 3}
    assert app.declare_task("u").gang(1).submit(self=1, size=2).members[0].row().payload["size"] == 2


def test_a_task_is_pickled_as_that_of_its_app(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    task = app.task(trained)
    with pytest.raises(pickle.PicklingError, match="variable of a module"):
        pickle.dumps(task)
    module = ModuleType("some_tasks")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_tasks", module)
    assert pickle.loads(pickle.dumps(task)) is task
    other = pickle.loads(pickle.dumps(task.options(priority=7, selector="gpu").aio))
    assert (type(other), other.defaults) == (type(task.aio), {"priority": 7, "selector": "gpu"})
    job = task.submit(0.1)
    assert pickle.loads(pickle.dumps(job)).state() == "pending"


def test_roles_are_of_other_tasks_so_their_arguments_are_not_those_of_the_task(app: App) -> None:
    task = app.task(trained)
    gang = task.gang(roles=[Role("a", 1, task="elsewhere"), Role("b", 1)]).submit(lr=0.5)
    assert [member.row().task for member in gang.members] == ["elsewhere", "trained"]
    with pytest.raises(InvalidInput, match="missing a required argument: 'lr'"):
        task.gang(roles=[Role("a", 1)]).submit()
    with pytest.raises(InvalidInput, match="either a size or roles"):
        task.gang(2, roles=[Role("a", 1)]).submit(lr=0.5)  # type: ignore[call-overload]
