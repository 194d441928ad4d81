"""What came of the jobs that a job waited for, inside its handler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import Fleet, fleet_of, short_leases, until_state

TASKS = """
@app.task(max_attempts=1)
def step(ctx, n):
    if n < 0:
        raise ValueError(f"{n} is negative")
    return {"n": n}

@app.task(max_attempts=1)
def unstorable(ctx):
    return object()

def said(value):
    return [type(value).__name__, str(value)] if isinstance(value, gangq.GangqError) else value

@app.task
def collect(ctx):
    assert ctx.inputs is ctx.inputs
    return {str(id): said(value) for id, value in ctx.inputs.items()}
"""


@pytest.fixture(params=["inline", "isolated"])
def fleet(
    request: pytest.FixtureRequest, dsn: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    """One worker that runs handlers in its own process, or in a child each."""
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    short_leases(client)
    with fleet_of(dsn, tmp_path) as made:
        made.define(TASKS)
        made.start(light=1 if request.param == "inline" else 2, slots=2)
        yield made


def test_a_handler_sees_what_came_of_what_it_waited_for(fleet: Fleet, client: Client) -> None:
    (cancelled,) = client.submit(task="nobody-has-it")
    done, failed = client.submit(task="step", payloads=[{"n": 1}, {"n": -1}])
    (unstored,) = client.submit(task="unstorable")
    gang = client.submit_gang(task="step", payloads=[{"n": 2}, {"n": 3}], size=2, wait_for_hardware=True)
    (alone,) = client.submit(task="collect")
    (job,) = client.submit(
        task="collect",
        after=[done, *gang.job_ids],
        after_any=[cancelled, unstored],
        after_failed=[failed],
    )
    client.cancel(job_ids=[cancelled], reason="not needed")
    found = until_state(client, job, "done", "failed", timeout=40).result
    assert found is not None, client.job(id=job).error
    assert found[str(done)] == {"n": 1}
    assert [found[str(member)] for member in gang.job_ids] == [{"n": 2}, {"n": 3}]
    assert found[str(failed)] == ["JobFailed", f"job {failed} failed: ValueError: -1 is negative"]
    assert found[str(cancelled)] == ["JobCancelled", f"job {cancelled} was cancelled: Cancelled: not needed"]
    assert found[str(unstored)][0] == "ResultNotStored"
    assert len(found) == 6
    assert until_state(client, alone, "done", "failed").result == {}
