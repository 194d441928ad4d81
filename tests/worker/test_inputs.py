"""What came of the jobs that a job waited for, inside its handler; and docs/manual/dependencies.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import Fleet, fleet_of, short_leases, until_state

PAGE = (Path(__file__).parents[2] / "docs/manual/dependencies.md").read_text(encoding="utf-8")

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


def test_the_page_runs(dsn: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_leases(client)
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    files = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert PAGE.count("```") == 2 * len(files) + 2
    env = {
        **os.environ,
        "GANGQ_DSN": dsn,
        "TEST_DSN": dsn,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with fleet_of(dsn, tmp_path) as fleet:
        fleet.define(files["tasks.py"])
        fleet.start(light=2, slots=2)
        (tmp_path / "sweep.py").write_text(files["sweep.py"])
        run = [sys.executable, "sweep.py"]
        swept = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        (expected,) = re.findall(r"# (40 .*)", files["sweep.py"])
        assert swept.stdout.strip() == expected, swept.stderr
        shell = ["bash", "-euc", commands + 'echo "id $total"']
        shown = subprocess.run(shell, env=env, capture_output=True, text=True, timeout=60)
        assert shown.returncode == 0, shown.stderr
        (total,) = re.findall(r"^id (\d+)$", shown.stdout, re.MULTILINE)
        assert until_state(client, int(total), "done", "failed", timeout=40).result == 70
