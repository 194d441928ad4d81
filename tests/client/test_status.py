"""Handles as they are shown, and waiting for many of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gangq
from gangq import App, Client
from gangq.errors import InvalidInput, JobFailed, WaitTimeout
from gangq.status import Status


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        yield made


def register(client: Client, slots: int = 4) -> int:
    return client.register_worker(
        name="w1", host="h1", queues=["default"], slots=slots, light=slots
    ).incarnation


class Printer:
    """What IPython hands to `_repr_pretty_`."""

    def __init__(self) -> None:
        self.shown = ""

    def text(self, shown: str) -> None:
        self.shown += shown


def pretty(handle: Any) -> str:
    printer = Printer()
    handle._repr_pretty_(printer, False)
    return printer.shown


def test_a_job_is_shown_with_state_and_why_it_waits_and_how_far_it_is(app: App) -> None:
    job = app.declare_task("train").submit()
    assert repr(job) == f"<Job {job.id}>", "nothing was asked yet"
    said = pretty(job)
    assert said.startswith(f"<Job {job.id} (train) pending: ")
    assert "no " in said
    assert repr(job) == said, "as it was seen last"
    incarnation = register(app.client)
    (claim,) = app.client.claim(incarnation=incarnation)
    beat = {"step": 3, "total": 10, "phase": "save", "loss": 0.25}
    app.client.heartbeat(incarnation=incarnation, job_ids=[job.id], tokens=[claim.token], beats=[beat])
    assert pretty(job) == f"<Job {job.id} (train) running: save 3/10 loss=0.25>"
    app.client.fail(job_id=job.id, token=claim.token, error={"type": "OSError", "message": "no\x1b[2J disk"})
    with pytest.raises(WaitTimeout):
        job.wait(timeout=0)
    assert job.state() == "scheduled"
    assert repr(job) == f"<Job {job.id} (train) scheduled: OSError: no\N{REPLACEMENT CHARACTER}[2J disk>"
    assert "due" in str(job.status())
    assert "\x1b" not in str(app.declare_task("\x1b[2J").submit().status())


def test_in_a_notebook_nothing_of_a_job_is_markup(app: App) -> None:
    job = app.declare_task("<b>&").submit()
    shown = job._repr_html_()
    assert shown.startswith(f"<div><b>Job {job.id}</b> <code>pending</code> &lt;b&gt;&amp;: ")
    status = job.status()
    assert (status.task, status.state, status._repr_html_()) == ("<b>&", "pending", shown)
    assert "<script>" not in Status("Job", 1, "t", "failed", "<script>")._repr_html_()


def test_a_job_that_cannot_be_asked_for_says_why(app: App) -> None:
    nobody = app.job(987654)
    assert pretty(nobody).startswith("<Job 987654: job 987654 does not exist")
    assert "does not exist" in nobody._repr_html_()
    with App("postgresql://nobody@127.0.0.1:1/x?connect_timeout=1") as away:
        assert "cannot reach" in pretty(away.job(1)) or "127.0.0.1" in pretty(away.job(1))


def test_a_gang_is_shown_by_its_slowest_member(app: App) -> None:
    gang = app.declare_task("ddp").gang(2).submit()
    assert pretty(gang).startswith(f"<Gang g{gang.id} (ddp) blocked: ")
    incarnation = register(app.client)
    app.client.tick(force=True)
    claims = sorted(app.client.claim(incarnation=incarnation, max_jobs=2), key=lambda claim: claim.job_id)
    assert gang.state() == "running"
    app.client.heartbeat(
        incarnation=incarnation,
        job_ids=[claim.job_id for claim in claims],
        tokens=[claim.token for claim in claims],
        beats=[{"step": 7, "total": 9}, {"step": 5, "total": 9}],
    )
    assert pretty(gang) == f"<Gang g{gang.id} (ddp) running: rank 1 at 5/9>"


# Many at once


def finish(client: Client, incarnation: int, count: int = 1) -> None:
    claims = client.claim(incarnation=incarnation, max_jobs=count)
    client.complete(
        job_ids=[claim.job_id for claim in claims],
        tokens=[claim.token for claim in claims],
        results=[claim.payload for claim in claims],
    )


def test_jobs_and_gangs_are_given_out_as_they_end(app: App) -> None:
    task = app.declare_task("t")
    incarnation = register(app.client)
    first, second = task.submit(n=1), task.options(delay="1h").submit(n=2)
    gang = task.gang(2).submit(n=3)
    finish(app.client, incarnation)
    ended = gangq.as_completed([second, gang, first, first], timeout="1m")
    assert next(ended) == first
    later = threading.Timer(0.2, second.cancel)
    later.start()
    assert next(ended) == second
    later.join()
    app.client.tick(force=True)
    finish(app.client, incarnation, 2)
    app.client.tick(force=True)
    assert [*ended] == [gang]
    assert [*gangq.as_completed([])] == []


def test_waiting_for_many_ends_at_its_timeout(app: App) -> None:
    jobs = app.declare_task("t").submit_many([{}, {}])
    with pytest.raises(WaitTimeout, match=rf"job {jobs[0].id} and 1 more have not ended within 0.05 s"):
        next(gangq.as_completed(jobs, timeout="50ms"))


def test_only_jobs_of_one_app_are_waited_for_together(app: App, dsn: str) -> None:
    other: Any
    with App(dsn) as another:
        for other in (another.job(1), app.aio.job(1), 7):
            with pytest.raises(InvalidInput, match="of one App"):
                next(gangq.as_completed([app.job(1), other]))


def test_an_async_handle_that_is_awaited_is_its_result(app: App) -> None:
    task = app.declare_task("t", max_attempts=1).aio
    incarnation = register(app.client)

    async def attempt() -> None:
        async with app.aio:
            jobs = await task.submit_many([{"n": 1}, {"n": 2}])
            await asyncio.to_thread(finish, app.client, incarnation, 2)
            assert await jobs[0] == {"n": 1}
            assert await asyncio.gather(*jobs) == [{"n": 1}, {"n": 2}]
            assert {(await one)["n"] for one in asyncio.as_completed(jobs)} == {1, 2}
            assert str(await jobs[0].status()) == f"Job {jobs[0].id} (t) done"
            failed = await task.submit()
            (claim,) = await asyncio.to_thread(app.client.claim, incarnation=incarnation)
            app.client.fail(job_id=failed.id, token=claim.token, error={"type": "E"}, retryable=False)
            with pytest.raises(JobFailed):
                await failed

    asyncio.run(attempt())
