"""The plugin in the pytest of somebody's project, and docs/manual/testing.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from projects import outcomes, run_pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/manual/testing.md").read_text(encoding="utf-8")

JOBS = """
import gangq

app = gangq.App()
seen = []


@app.task
def light(ctx, n=0):
    seen.append(n)


@app.task(gpus=1)
def placed(ctx):
    return [device.vram_mb for device in ctx.devices]


@app.task(budget=0.2)
def slow(ctx):
    ctx.wait_stopping(1)
    return "slow"
"""

PROJECT = """
[tool.pytest.ini_options]
gangq_app = "jobs:app"
pythonpath = ["."]
"""


def test_the_project_of_the_page_passes(tmp_path: Path) -> None:
    files = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
    assert PAGE.count("```") == 2 * len(files)
    shown = run_pytest(tmp_path, files)
    found = outcomes(shown)
    wanted = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    assert len(wanted) == 10
    assert found == dict.fromkeys(wanted, "PASSED"), shown


def test_every_test_has_a_database_of_its_own(tmp_path: Path) -> None:
    test = """
import asyncio
import os
import sys
from datetime import datetime, timedelta, timezone

import gangq
import jobs
import pytest
from gangq.testing import drain, submitted
from jobs import app, light, placed, slow

before = app._dsn, app._clients.made, app.aio._clients.made


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_left_of_another(gangq_app, gangq_database, n):
    assert gangq_app is app
    assert app.dsn == os.environ["GANGQ_DSN"] == gangq_database
    assert submitted(app) == []
    light.submit(n=n)
    assert not drain(app).failed
    assert jobs.seen[-1] == n
    with gangq.App() as other:
        assert len(submitted(other)) == 1
    assert app.client.violations() == []


def test_the_app_is_as_it_was():
    assert (app._dsn, app._clients.made, app.aio._clients.made) == before == (None, None, None)
    assert "GANGQ_DSN" not in os.environ


def test_the_clock_moves_what_is_due(gangq_app, gangq_clock):
    at = gangq_clock.now()
    assert abs(at - datetime.now(timezone.utc)) < timedelta(minutes=1)
    job = light.options(run_at=at + timedelta(hours=2)).submit()
    for length in (3600, "59m", timedelta(seconds=30)):
        gangq_clock.advance(length)
    drain(app)
    assert job.state() == "scheduled"
    gangq_clock.advance("1m")
    drain(app)
    assert job.state() == "done"
    assert gangq_clock.set(datetime(2040, 1, 1, tzinfo=timezone.utc)).year == 2040
    assert app.client.submit(task="light") and submitted(app)[-1].submitted_at.year == 2040
    for wrong in ("soon", -1):
        with pytest.raises(gangq.GangqError, match="is no length of time"):
            gangq_clock.advance(wrong)
    with pytest.raises(gangq.GangqError, match="without a time zone"):
        gangq_clock.set(datetime(2040, 1, 1))


def test_a_worker_that_has_ended_is_no_reason_to_refuse(gangq_app, caplog):
    placed.submit()
    placed.options(gpus=2).gang(2).submit()
    drain(app)
    job = placed.options(gpus=4, vram_mb=80_000, labels={"site": "oslo"}).submit()
    gang = placed.options(gpus=8).gang(2).submit()
    drain(app)
    assert job.result(1) == [80_000] * 4
    assert gang.state() == "done"
    assert "no worker of queue" not in caplog.text


def test_a_watchdog_only_reports(gangq_app):
    job = slow.submit()
    drain(app)
    assert job.result(1) == "slow"
    # One for each budget that it runs over, so on a busy machine there may be two.
    assert {trip.outcome for trip in app.client.trips()} == {"notify"}


def test_async(gangq_app):
    async def main():
        async with app.aio:
            job = await light.aio.submit(n=5)
            await asyncio.to_thread(drain, app.aio)
            await job.result(1)
            assert jobs.seen[-1] == 5

    asyncio.run(main())


def test_a_device(gangq_device):
    assert (gangq_device.vram_mb, gangq_device.source) == (24 * 1024, "declared")
"""
    files = {"jobs.py": JOBS, "pyproject.toml": PROJECT, "test_own.py": test}
    shown = run_pytest(tmp_path, files)
    found = outcomes(shown)
    assert len(found) == 8, shown
    assert set(found.values()) == {"PASSED"}, shown


def test_without_a_setting_the_app_is_a_new_one(tmp_path: Path) -> None:
    test = """
from gangq.testing import assert_submitted, drain


def test_new(gangq_app):
    @gangq_app.task
    def hello(ctx, name):
        return f"hello {name}"

    job = hello.submit(name="you")
    drain(gangq_app)
    assert job.result(1) == "hello you"
    assert_submitted(hello, name="me")


def test_another(gangq_app):
    assert gangq_app.tasks == {}
"""
    shown = run_pytest(tmp_path, {"test_new.py": test})
    assert outcomes(shown) == {"test_new": "FAILED", "test_another": "PASSED"}
    assert (
        'at least 1 job of task \'hello\' with {"name": "me"} should have been submitted, and none was'
        in shown
    )
    assert 'job 1, done: {"name": "you"}' in shown


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("jobs:nothing", "the setting gangq_app is 'jobs:nothing': module 'jobs' has no 'nothing'"),
        ("jobs:seen", "the setting gangq_app is 'jobs:seen', which is no gangq.App"),
        ("owned:app", "the App owned:app has a dsn of its own"),
    ],
)
def test_a_setting_that_cannot_be_used_is_said(tmp_path: Path, setting: str, said: str) -> None:
    files = {
        "jobs.py": JOBS,
        "owned.py": "import gangq\napp = gangq.App('postgresql://production.invalid/jobs')\n",
        "pyproject.toml": PROJECT.replace("jobs:app", setting),
        "test_it.py": "def test_it(gangq_app): ...\n",
    }
    # Without a PostgreSQL: what is wrong is said before one would be started.
    shown = run_pytest(tmp_path, files, GANGQ_PG_BINDIR=str(tmp_path))
    assert outcomes(shown) == {"test_it": "ERROR"}
    assert said in shown


def test_without_a_postgresql_it_says_what_to_install(tmp_path: Path) -> None:
    files = {"test_it.py": "def test_it(gangq_database): ...\n\ndef test_without(): ...\n"}
    shown = run_pytest(tmp_path, files, GANGQ_PG_BINDIR=str(tmp_path))
    assert outcomes(shown) == {"test_it": "ERROR", "test_without": "PASSED"}
    assert "pip install 'gangq[embedded]'" in shown
    assert "Traceback" not in shown


def test_a_run_of_pytest_that_uses_no_fixture_loads_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, gangq.pytest_plugin; "
        "print(sorted(name for name in sys.modules if name.startswith('gangq') or name == 'psycopg'))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "['gangq', 'gangq.pytest_plugin']\n"
