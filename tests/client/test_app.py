"""The App: declaring tasks, submitting them, and the handles that wait for what comes of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from databases import OwnServer
from gangq import App, AsyncClient, Client, Context, Gang, Job, Retry, Role, context, embedded, handle_steps
from gangq.client.rows import StateChange
from gangq.client.verb import Steps
from gangq.errors import (
    DatabaseUnreachable,
    GangqError,
    InvalidInput,
    JobCancelled,
    JobFailed,
    NotAllowed,
    NotFound,
    NotSerializable,
    Snoozed,
    Stopped,
    UnknownTask,
)
from gangq.handles import AsyncBatch, AsyncGang, AsyncJob, Batch
from gangq.testing import FakeContext
from gangq.worker.context_impl import job_log


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


class Worker:
    """Claims and ends jobs, as a worker would."""

    def __init__(self, client: Client, name: str = "w1", slots: int = 4) -> None:
        self.client = client
        self.incarnation = client.register_worker(
            name=name, host="h1", queues=["default"], slots=slots, light=slots
        ).incarnation

    def finish(self, *results: Any) -> None:
        claims = self.client.claim(incarnation=self.incarnation, max_jobs=len(results))
        assert len(claims) == len(results)
        claims.sort(key=lambda claim: claim.job_id)
        self.client.complete(
            job_ids=[claim.job_id for claim in claims],
            tokens=[claim.token for claim in claims],
            results=list(results),
        )

    def fail(self, **error: str) -> None:
        (claim,) = self.client.claim(incarnation=self.incarnation)
        self.client.fail(job_id=claim.job_id, token=claim.token, error=error, retryable=False)


# Tasks


def test_a_task_stays_callable_and_is_known_by_name(app: App) -> None:
    @app.task(queue="gpu", gpus=2, budget=60, isolate=True)
    def train(ctx: Context, epochs: int, lr: float = 0.1) -> dict[str, float]:
        return {"epochs": epochs, "lr": lr}

    @app.task
    def plain(ctx: Context) -> int:
        return 1

    @app.task(name="other")
    def named(ctx: Context) -> None: ...

    nobody: Any = None
    assert train(nobody, epochs=3) == {"epochs": 3, "lr": 0.1}
    assert plain(nobody) == 1
    assert list(app.tasks) == ["train", "plain", "other"]
    assert app.get_task("train") is train
    assert (train.defaults["gpus"], train.defaults["budget"], train.isolate, plain.isolate) == (
        2,
        60,
        True,
        False,
    )


def test_wrong_declarations_are_refused_with_what_is_right(app: App) -> None:
    app.declare_task("elsewhere", queue="default")
    with pytest.raises(InvalidInput, match="'elsewhere' is declared twice"):
        app.declare_task("elsewhere")
    with pytest.raises(InvalidInput, match="'command'"):
        app.declare_task("command")
    with pytest.raises(InvalidInput, match=r"'gpu'.*gpus"):
        app.task(gpu=1)
    with pytest.raises(InvalidInput, match="pass another name"):
        app.task(functools.partial(lambda ctx, n: n, n=1))
    with pytest.raises(UnknownTask, match=r"'elsewere' \(it has: elsewhere\)"):
        app.get_task("elsewere")
    nobody: Any = None
    with pytest.raises(InvalidInput, match="implemented elsewhere"):
        app.get_task("elsewhere")(nobody)


def test_options_reach_the_job_and_leave_the_task_as_it_was(app: App, db: psycopg.Connection[Any]) -> None:
    app.client.set_queue(name="gpu")
    task = app.declare_task("t", labels={"zone": "a"}, priority=3)
    first = task.submit(n=0)
    changed = task.options(
        queue="gpu",
        gpus=1,
        vram_mb=8000,
        memory_mb=512,
        cpus=0.5,
        budget=30,
        max_attempts=7,
        priority=9,
        after=[first],
    )
    row = changed.submit(n=1).row()
    assert (row.queue, row.gpus, row.vram_mb, row.memory_mb, row.cpus) == ("gpu", 1, 8000, 512, 0.5)
    assert (row.budget_s, row.max_attempts, row.priority, row.state) == (30.0, 7, 9, "waiting")
    assert (row.labels, row.payload, row.task) == ({"zone": "a"}, {"n": 1}, "t")
    assert "queue" not in task.defaults
    with pytest.raises(InvalidInput, match="'colour'"):
        task.options(colour=1)


def test_many_payloads_are_one_statement_and_keep_their_order(app: App) -> None:
    task = app.declare_task("t")
    handles = task.submit_many([{"n": n} for n in range(50)])
    assert [handle.row().payload["n"] for handle in handles[::7]] == list(range(0, 50, 7))
    assert task.submit_many([]) == []
    with pytest.raises(NotSerializable, match=r"payloads\[1\] is int.*JSON object"):
        task.submit_many([{}, 5])  # type: ignore[list-item]
    with pytest.raises(NotSerializable, match=r"payloads\[0\] has bytes at \$\.x"):
        task.submit(x=b"")


def test_a_submission_repeated_with_its_request_id_gives_the_same_handles(app: App) -> None:
    task, mine, other = app.declare_task("t"), uuid.uuid4(), str(uuid.uuid4())
    jobs = task.options(request_id=mine).submit_many([{}, {}])
    gang = task.gang(2, request_id=other).submit()
    assert task.options(request_id=mine).submit_many([{}, {}]) == jobs
    assert task.gang(2, request_id=other).submit() == gang
    assert len(app.client.jobs()) == 4
    with pytest.raises(
        InvalidInput, match=f"request_id {mine} was given to another call before, which submitted 2 jobs"
    ):
        task.options(request_id=mine).submit()


def test_what_is_waited_for_is_named_by_handles_of_jobs_and_gangs_or_by_ids_of_jobs(app: App) -> None:
    task = app.declare_task("t")
    jobs = task.submit_many([{}] * 5)
    gang = task.gang(2).submit()
    assert gang.id == jobs[0].id == 1, "a number is a job, also where a gang has the same"

    def awaited(*after: Any) -> list[int]:
        waits = task.options(after=after).submit()
        (gate,) = (reason for reason in app.client.explain_job(job_id=waits.id) if reason.gate == "state")
        return [int(id) for id in re.findall(r"\d+", gate.detail)]

    assert awaited(gang) == gang.job_ids
    assert awaited(jobs[3], gang, 2) == [2, jobs[3].id, *gang.job_ids]
    assert awaited(app.gang(gang.id)) == gang.job_ids
    aio = AsyncGang(lambda: app.aio.client, gang.id, gang.job_ids), app.aio.job(jobs[1].id)
    assert awaited(*aio) == [jobs[1].id, *gang.job_ids]
    later = task.gang(2, after=[gang]).submit()
    assert {member.state for member in app.client.jobs(ids=later.job_ids)} == {"waiting"}
    for wrong in ([gang.row()], ["g1"], [True], [None], gang, 7, "7"):
        with pytest.raises(InvalidInput, match="handles"):
            task.options(after=wrong).submit()
        with pytest.raises(InvalidInput, match="handles"):
            app.client.submit(task="t", after=wrong)  # type: ignore[arg-type]


def test_arguments_that_the_function_cannot_take_are_refused_at_submit(app: App) -> None:
    @app.task
    def train(ctx: Context, epochs: int, /, lr: float = 0.1) -> None: ...

    @app.task
    def fit(context: Context, epochs: int, lr: float = 0.1) -> None: ...

    @app.task
    def anything(ctx: Context, **given: Any) -> None: ...

    @functools.wraps(fit.function)  # type: ignore[arg-type]
    def gives_more(ctx: Context, **given: Any) -> None: ...

    wrapped = app.task(name="wrapped")(gives_more)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"epochz": 3}, "missing a required argument: 'epochs'"),
        ({"epochs": 3, "rl": 1}, "unexpected keyword argument 'rl'; it takes .epochs: "),
        ({}, "task 'fit': missing a required argument"),
        ({"context": 1, "epochs": 3}, "'context' is the context, which the worker gives"),
    ]
    for payload, said in refusals:
        for refused in (
            lambda payload=payload: fit.submit(**payload),
            lambda payload=payload: fit.submit_many([{"epochs": 1}, payload]),
            lambda payload=payload: fit.gang(2).submit(**payload),
            lambda payload=payload: fit.gang(2).submit_each([{"epochs": 1}, payload]),
            lambda payload=payload: anything.gang(roles=[Role("r", 1, task=fit, payload=payload)]).submit(),
            lambda payload=payload: asyncio.run(fit.aio.submit(**payload)),
        ):
            with pytest.raises(InvalidInput, match=said):
                refused()
    with pytest.raises(InvalidInput, match=r"positional.only"):
        train.submit(epochs=3)
    assert app.client.jobs() == []
    fit.submit(epochs=3, lr=0.2)
    fit.gang(2).submit(epochs=1)
    fit.gang(roles=[Role("r", 1, payload={"epochs": 1})]).submit()
    anything.submit(whatever=1)
    wrapped.submit(whatever=1)
    app.declare_task("elsewhere").submit(nobody="knows")


def test_functions_that_run_nothing_when_called_are_refused_at_declaration(app: App) -> None:
    def generator(ctx: Context) -> Iterator[int]:
        yield 1

    async def async_generator(ctx: Context) -> AsyncIterator[int]:
        yield 1

    def no_context() -> None: ...

    refusals = [
        (generator, "without yield"),
        (async_generator, "without yield"),
        (no_context, r"no_context\(ctx\)"),
    ]
    for function, said in refusals:
        with pytest.raises(InvalidInput, match=said):
            app.task(function)  # type: ignore[arg-type, call-overload]
    assert app.tasks == {}


def test_a_login_that_may_not_read_payloads_is_told_so_instead_of_none(
    app: App, dsn: str, db: psycopg.Connection[Any]
) -> None:
    task = app.declare_task("t", max_attempts=1)
    done, nothing, failed = task.submit_many([{}] * 3)
    gang = task.gang(1).submit()
    worker = Worker(app.client)
    worker.finish({"acc": 0.9}, None)
    worker.fail(type="ValueError", message="secret")
    app.client.tick(force=True)
    worker.finish(1)
    db.execute("create role only_sees login in role gangq_viewer")
    try:
        with App(make_conninfo(dsn, user="only_sees")) as viewer:
            for handle in (viewer.job(done.id), viewer.job(nothing.id), viewer.gang(gang.id)):
                with pytest.raises(
                    NotAllowed,
                    match=r"may not read the result of job \d+ .* Its submitter, .* every submitter\.$",
                ):
                    handle.result(timeout=20)
            with pytest.raises(JobFailed, match="this login may not read its error"):
                viewer.job(failed.id).result(timeout=20)
            with pytest.raises(NotAllowed, match="may not read the output of job") as refused:
                viewer.job(done.id).logs()
            assert "Grant this login" not in str(refused.value)
    finally:
        db.execute("drop role only_sees")
    assert (done.result(), nothing.result(), gang.result()) == ({"acc": 0.9}, None, 1)


def test_submitting_in_the_callers_transaction(app: App, dsn: str) -> None:
    task = app.declare_task("t")
    with psycopg.connect(dsn) as conn:
        handle = task.options(connection=conn).submit()
        gang = task.gang(2, connection=conn).submit()
        with pytest.raises(NotFound, match="not committed"):
            handle.wait(timeout=5)
    assert (handle.state(), gang.state()) == ("pending", "blocked")


def test_a_command_is_a_job_with_its_words(app: App) -> None:
    row = app.submit_command(["echo", "a b"], env={"A": "1"}, cwd="/tmp", cpus=0.5).row()
    assert (row.task, row.cpus) == ("command", 0.5)
    assert row.payload == {"argv": ["echo", "a b"], "shell": False, "env": {"A": "1"}, "cwd": "/tmp"}
    assert app.submit_command("echo $A | wc", shell=True).row().payload["argv"] == ["echo $A | wc"]
    gang = app.submit_command(["true"], gang=2, name="pair", checkpoint_mode="rank0")
    assert isinstance(gang, Gang)
    assert (len(gang.job_ids), gang.row().name) == (2, "pair")


@pytest.mark.parametrize(
    ("argv", "options", "said"),
    [
        ("echo hi", {}, r"\['echo', 'hi'\]"),
        ([], {}, "empty"),
        (["a", "b"], {"shell": True}, "one string"),
        (["a", 1], {}, "argv holds 1, which is int"),
        (["a"], {"env": {"A": 1}}, "env holds 1"),
    ],
)
def test_a_command_that_cannot_be_one_is_refused(app: App, argv: Any, options: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        app.submit_command(argv, **options)


def test_an_app_without_a_database_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    with App() as app, pytest.raises(InvalidInput, match="no database is named: set GANGQ_DSN"):
        app.declare_task("t").submit()


def test_inside_jobs_an_app_submits_through_the_one_that_runs_unless_a_database_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App()
    try:
        for job in (FakeContext(), FakeContext()):
            context.set_current(job)
            assert app.client.through is job
        monkeypatch.setenv("GANGQ_SOCKET", "/nowhere")
        monkeypatch.delenv("GANGQ_DSN", raising=False)
        assert app.client.through is job
        monkeypatch.setenv("GANGQ_DSN", "dbname=own")
        assert app.client.through is None
        assert App("dbname=given").client.through is None
    finally:
        context.set_current(None)


def test_nothing_is_resolved_before_the_first_use(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    asked: list[str | None] = []

    def resolve(given: str | None) -> str:
        asked.append(given)
        return dsn

    monkeypatch.setattr(embedded, "resolve_dsn", resolve)
    with App() as app:
        task = app.declare_task("t")
        assert asked == []
        task.submit()
        assert (asked, app.dsn) == ([None], dsn)
        task.submit()
        assert asked == [None]
    with pytest.raises(InvalidInput, match="both dsn and client"):
        App(dsn, client=Client(dsn))


# Handles


def test_a_result_is_waited_for_while_the_job_runs(app: App) -> None:
    handle = app.declare_task("t").submit()
    worker = Worker(app.client)
    later = threading.Timer(0.2, worker.finish, args=({"loss": 0.5},))
    later.start()
    assert handle.result(timeout=20) == {"loss": 0.5}
    later.join()
    assert (handle.wait(timeout=0), handle.state(), handle.logs()) == ("done", "done", "")
    assert app.job(handle.id) == handle
    assert len({app.job(handle.id), handle}) == 1


def test_handles_of_two_apps_are_not_equal(app: App, dsn: str) -> None:
    job = app.declare_task("t").submit()
    with App(dsn) as other:
        assert other.job(job.id) != job
        assert other.job(job.id) == other.job(job.id)


def test_waiting_ends_at_its_timeout_and_says_the_state(app: App) -> None:
    handle = app.declare_task("t").submit()
    started = time.monotonic()
    with pytest.raises(
        TimeoutError, match=rf"job {handle.id} has not ended within 0.1 s; job {handle.id} is pending"
    ) as over:
        handle.result(timeout=0.1)
    assert isinstance(over.value, GangqError)
    assert 0.1 <= time.monotonic() - started < 5
    with pytest.raises(NotFound, match="job 987654"):
        app.job(987654).wait(timeout=5)
    with pytest.raises(NotFound, match="gang g987654"):
        app.gang(987654)


def test_the_attempts_of_a_retry_policy_are_said_once(app: App) -> None:
    @app.task(retry=Retry(7))
    def train(ctx: Context) -> None: ...

    assert train.submit().row().max_attempts == 7
    assert train.options(max_attempts=2).submit().row().max_attempts == 2
    assert train.aio.retry == train.retry == Retry(7)
    with pytest.raises(InvalidInput, match="both retry and max_attempts"):
        app.task(retry=Retry(7), max_attempts=2)(lambda ctx: None)


def test_a_failure_carries_the_last_error_and_a_retry_runs_it_again(app: App) -> None:
    handle = app.declare_task("t").submit()
    worker = Worker(app.client)
    worker.fail(type="ValueError", message="bad shape", traceback="...")
    with pytest.raises(
        JobFailed, match=rf"job {handle.id} \(task t\) failed after 1 of 3 attempts: ValueError: bad shape"
    ) as caught:
        handle.result(timeout=20)
    assert (caught.value.job_id, caught.value.error["traceback"]) == (handle.id, "...")
    assert handle.retry() == "pending"
    worker.finish(7)
    assert handle.result(timeout=20) == 7


@pytest.mark.parametrize("written", [handle_steps.cancel, handle_steps.retry])
def test_a_job_that_was_cancelled_or_retried_is_not_asked_for_its_state_besides(
    written: Callable[[Job[Any]], Steps[str]],
) -> None:
    """A second statement may fail after the first one took effect, and reads its payload and result."""
    steps = written(App("dbname=d").job(5))
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send([StateChange(5, None, "preempting")])
    assert ended.value.value == "preempting"


@pytest.mark.parametrize("kind", ["job", "gang", "batch"])
def test_what_is_retried_between_its_end_and_the_reading_of_its_result_is_waited_for_again(
    app: App, kind: str
) -> None:
    task = app.declare_task("t").options(max_attempts=1)
    handle: Any = task.gang(1).submit() if kind == "gang" else task.submit()
    written: Any = {"job": handle_steps.result, "gang": handle_steps.gang_results}.get(kind)
    if kind == "batch":
        handle, written = task.submit_many([{}], name="b"), handle_steps.batch_results
    [job_id] = handle.job_ids
    handle.cancel()
    steps = written(handle, timeout=20)
    step = steps.send(app.client.execute(next(steps)))
    app.client.retry(**({"gang_ids": [handle.id]} if kind == "gang" else {"job_ids": [job_id]}))
    while not isinstance(step, float):
        step = steps.send(app.client.execute(step))
    handle.cancel("again")

    def rest() -> None:
        step = steps.send(None)
        while True:
            step = steps.send(app.client.execute(step))

    with pytest.raises(JobCancelled, match="again"):
        rest()


def test_a_cancelled_job_has_no_result(app: App) -> None:
    handle = app.declare_task("t").submit()
    assert handle.cancel(reason="changed my mind") == "cancelled"
    with pytest.raises(JobCancelled, match=r"was cancelled: changed my mind$") as caught:
        handle.result(timeout=20)
    assert (caught.value.job_id, caught.value.reason) == (handle.id, "changed my mind")
    follower = app.declare_task("later", after=[app.declare_task("first").submit()]).submit()
    app.job(follower.id - 1).cancel("not needed")
    app.client.tick(force=True)
    with pytest.raises(JobCancelled, match=rf"was cancelled: .*{follower.id - 1}"):
        follower.result(timeout=20)


@pytest.mark.parametrize("name", ["budget", "stall_timeout", "load_grace", "health_window", "long_phase"])
def test_a_length_of_time_is_no_truth_value(app: App, name: str) -> None:
    wrong: Any
    for wrong in (True, 0, -1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(InvalidInput, match=f"{name} is {wrong!r}: .* seconds"):
            app.task(**{name: wrong})


def test_a_handlers_fields_stay_on_its_log_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gangq.task.t")
    job_log(context.JobInfo(7, 99, 1, 3, "default", "t"), None).info("x", extra={"loss": 0.3})
    (record,) = caplog.records
    assert (record.__dict__["loss"], record.__dict__["job"]) == (0.3, 7)


def test_the_output_shown_is_that_of_the_latest_attempt(app: App) -> None:
    handle = app.declare_task("t").submit()
    worker = Worker(app.client)
    for text in ("first\n", "second\n"):
        (claim,) = app.client.claim(incarnation=worker.incarnation)
        app.client.append_log(
            job_ids=[claim.job_id] * 2, tokens=[claim.token] * 2, seqs=[0, 1], chunks=[text, "end\n"]
        )
        app.client.release(job_ids=[claim.job_id], tokens=[claim.token])
    assert handle.logs() == "second\nend\n"


def test_a_gang_gives_its_results_by_rank(app: App) -> None:
    gang = app.declare_task("t").gang(3, name="trio").submit_each([{"r": r} for r in range(3)])
    assert (gang.note is None, len(gang.members)) == (False, 3)
    worker = Worker(app.client)
    app.client.tick(force=True)
    worker.finish("a", "b", "c")
    assert gang.results(timeout=20) == ["a", "b", "c"]
    assert gang.result() == "a"
    assert gang.members[1].result() == "b"
    assert "reserve" in {step.what for step in gang.timeline()}
    assert {event.gang_id for event in gang.events()} == {gang.id}
    assert gang.logs() == ["", "", ""]
    assert app.gang(gang.id).job_ids == gang.job_ids


def test_a_gang_that_fails_or_is_cancelled_says_so(app: App) -> None:
    task = app.declare_task("t", max_attempts=1)
    gang = task.gang(1).submit(n=1)
    worker = Worker(app.client)
    app.client.tick(force=True)
    worker.fail(type="OSError", message="disk full")
    app.client.tick(force=True)
    with pytest.raises(JobFailed, match=rf"gang g{gang.id} \(task t\) failed.*OSError: disk full") as caught:
        gang.result(timeout=20)
    assert caught.value.job_id == gang.job_ids[0]
    other = task.gang(2).submit()
    assert other.cancel(reason="no need") == "cancelled"
    running = task.gang(1).submit()
    app.client.tick(force=True)
    (claim,) = app.client.claim(incarnation=worker.incarnation)
    assert running.cancel(reason="too hot") == "draining"
    app.client.ack_preempted(job_id=claim.job_id, token=claim.token)
    for cancelled, why in ((other, "no need"), (running, "too hot")):
        job_id = cancelled.job_ids[0]
        for handle, named in ((cancelled, f"gang g{cancelled.id}"), (app.job(job_id), f"job {job_id}")):
            with pytest.raises(JobCancelled, match=rf"^{named} \(task t\) was cancelled: {why}$") as stopped:
                handle.result(timeout=20)
            assert stopped.value.reason == why


@pytest.mark.slow
def test_waiting_survives_a_restart_of_the_database(
    own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gangq.handles")
    with own_server(durable=True) as server:
        with App(client=Client(server.dsn(), timeout_s=0.5)) as app:
            handle = app.declare_task("t").submit()
            ended: list[str] = []
            waiter = threading.Thread(target=lambda: ended.append(handle.wait(timeout=60)))
            waiter.start()
            server.kill()
            deadline = time.monotonic() + 20
            while not caplog.records:
                assert time.monotonic() < deadline, "the outage was not noticed"
                time.sleep(0.02)
            server.start()
            with Client(server.dsn()) as other:
                Worker(other).finish(1)
            waiter.join(60)
            assert ended == ["done"]


# asyncio


def test_each_outage_is_waited_out_for_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(handle_steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    steps: Any = handle_steps.wait(Job(lambda: None, 1))
    down = DatabaseUnreachable("down")
    next(steps)

    def asks_again_after(pause: object) -> None:
        assert isinstance(pause, float)
        steps.send(None)

    for _ in range(2):
        asks_again_after(steps.throw(down))
        now[0] += 299
        asks_again_after(steps.throw(down))
        asks_again_after(steps.send({1: "running"}))
    asks_again_after(steps.throw(down))
    now[0] += 301
    with pytest.raises(DatabaseUnreachable):
        steps.throw(down)


@pytest.mark.parametrize(("sync", "aio"), [(Job, AsyncJob), (Gang, AsyncGang), (Batch, AsyncBatch)])
def test_the_async_handles_have_the_same_methods(sync: type, aio: type) -> None:
    def public(kind: type) -> dict[str, Any]:
        return {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}

    assert public(sync).keys() == public(aio).keys()
    for name, method in public(sync).items():
        if callable(method):
            assert inspect.signature(method) == inspect.signature(public(aio)[name]), name
            assert inspect.iscoroutinefunction(public(aio)[name])
            assert method.__doc__


def test_the_async_app_submits_and_waits(app: App) -> None:
    task = app.declare_task("t")

    async def attempt() -> None:
        async with app.aio as aio:
            handle = await task.aio.submit(n=1)
            many = await aio.get_task("t").options(priority=5).submit_many([{}, {}])
            gang = await aio.tasks["t"].gang(2).submit(g=1)
            command = await aio.submit_command(["true"])
            team = await aio.submit_command(["true"], gang=2)
            assert isinstance(team, AsyncGang)
            assert (await command.row()).payload["argv"] == ["true"]
            assert (await many[0].row()).priority == 5
            assert await gang.cancel() == "cancelled"
            assert (await aio.gang(gang.id)).job_ids == gang.job_ids
            with pytest.raises(TimeoutError):
                await handle.wait(timeout=0.05)
            for other in (*many, command):
                await other.cancel()
            worker = Worker(app.client)
            waiting = asyncio.create_task(handle.result(timeout=20))
            await asyncio.to_thread(worker.finish, [1, 2])
            assert await waiting == [1, 2]
            await team.cancel()
            pair = await task.aio.gang(2).submit()
            worker.client.tick(force=True)
            await asyncio.to_thread(worker.finish, "first", "second")
            assert await pair == "first"
            with pytest.raises(UnknownTask):
                aio.get_task("u")

    asyncio.run(attempt())


def test_the_async_client_works_in_a_second_event_loop(dsn: str) -> None:
    client = AsyncClient(dsn)

    async def attempt() -> None:
        assert await client.jobs() == []
        assert client._pool is not None
        assert client._pool.get_stats()["connections_num"] == 1, "one that is being made would be cancelled"

    asyncio.run(attempt())

    async def attempt_and_close() -> None:
        await attempt()
        await client.close()

    asyncio.run(attempt_and_close())


# The context


def test_there_is_no_current_context_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGQ_SOCKET", raising=False)
    with pytest.raises(GangqError, match="no job runs here"):
        context.current()


class Pretend(Context):
    """A context that was told to stop."""

    job = context.JobInfo(7, 99, 1, 3, "default", "t")
    gang = None
    devices = ()
    checkpoint = None
    inputs: Mapping[int, Any] = MappingProxyType({})
    log = None  # type: ignore[assignment]
    stopping = True

    def beat(self, step: Any = None, total: Any = None, phase: Any = None, **data: Any) -> None: ...

    def set_model(self, name: str | None) -> None: ...

    def wait_stopping(self, timeout: float | None = None) -> bool:
        return True

    def save_checkpoint(self, step: int, data: bytes) -> None: ...

    def complete(self, connection: object, result: Any = None) -> None: ...

    def snooze(self, delay: Any) -> NoReturn:
        raise Snoozed(0)

    def submit_child(self, verb: str, arguments: Any) -> dict[str, Any]:
        return {}


def test_the_current_context_is_found_from_threads_of_the_handler_too(tmp_path: Path) -> None:
    mine = Pretend()
    context.set_current(mine)
    try:
        found: list[Context] = []
        thread = threading.Thread(target=lambda: found.append(context.current()))
        thread.start()
        thread.join()
        assert (found, context.current(), mine.token, mine.attempt) == ([mine], mine, 99, 1)
        with pytest.raises(Stopped, match="job 7"):
            mine.raise_if_stopping()
    finally:
        context.set_current(None)
    with pytest.raises(GangqError):
        context.current()
