"""Async handlers: alone in the main thread or in a process of their own, and many in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_process import Fleet, eventually, fleet_of, short_leases, until_state

from gangq.client import Client

TASKS = """
import asyncio

@app.task(isolate=ISOLATED)
async def task(ctx, how="returns"):
    assert gangq.current() is ctx
    if how == "raises":
        await asyncio.sleep(0)
        raise ValueError("bad")
    if how == "waits":
        (HERE / f"waits-{ctx.job.id}").touch()
        try:
            await asyncio.sleep(60)
        finally:
            (HERE / f"cancelled-{ctx.job.id}").touch()
    ctx.beat(step=1)
    print("said by", ctx.job.id)
    return os.getpid()
"""


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client)
    with fleet_of(dsn, tmp_path) as running:
        yield running


def submit(client: Client, how: str = "returns", task: str = "task", **options: object) -> int:
    options.setdefault("max_attempts", 1)
    return client.submit(task=task, payloads=[{"how": how}], **options)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_one_alone_runs_in_an_event_loop_of_its_own(client: Client, fleet: Fleet, isolate: bool) -> None:
    fleet.define(TASKS.replace("ISOLATED", str(isolate)))
    worker = fleet.start(slots=0, light=1)
    done = until_state(client, submit(client), "done")
    assert (done.result == worker.process.pid) is not isolate
    assert "".join(row.chunk for row in client.logs(job_id=done.id)).endswith(f"said by {done.id}\n")
    failed = until_state(client, submit(client, "raises"), "failed")
    assert failed.error is not None
    assert (failed.error["type"], failed.error["message"]) == ("ValueError", "bad")


def test_in_the_main_thread_it_is_cancelled_at_the_end_of_its_grace_and_the_worker_lives_on(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(TASKS.replace("ISOLATED", "False"))
    worker = fleet.start(slots=0, light=1)
    job = submit(client, "waits")
    eventually((tmp_path / f"waits-{job}").exists, "the handler waits")
    client.cancel(job_ids=[job])
    until_state(client, job, "cancelled")
    assert (tmp_path / f"cancelled-{job}").exists()
    assert until_state(client, submit(client), "done").result == worker.process.pid
