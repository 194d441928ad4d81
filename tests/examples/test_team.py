"""examples/team, the project of the tutorial, runs for real: a worker, the web service, the notebook, its tests.

Each program is started by the command in the first line of its file.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gangq.client import Client

TOP = Path(__file__).resolve().parents[2]
TEAM = TOP / "examples" / "team"
TUTORIAL = (TOP / "docs/manual/tutorial.md").read_text(encoding="utf-8")


def command_of(file: str) -> list[str]:
    first = (TEAM / file).read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    return shlex.split(first.removeprefix("# "))


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    kept = {
        name: os.environ[name] for name in ("HOME", "PYTHONPATH", "XDG_RUNTIME_DIR") if name in os.environ
    }
    # Where the tests make a PostgreSQL.
    return {**kept, "PATH": path, "TMPDIR": os.environ["XDG_RUNTIME_DIR"], **more}


@contextmanager
def started(command: list[str], dsn: str) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=TEAM, env=environment(GANGQ_DSN=dsn))
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def output_of(command: list[str], **more: str) -> str:
    done = subprocess.run(
        command, cwd=TEAM, env=environment(**more), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def once(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.2)
    return found


@pytest.fixture
def web(dsn: str, client: Client) -> Iterator[httpx.Client]:
    """The web service."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as running:
        running.enter_context(started([*command_of("api.py"), "--port", str(port)], dsn))
        browser = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20))

        def answers() -> bool:
            try:
                return browser.get("/docs").status_code == 200
            except httpx.ConnectError:
                return False

        once(answers, "the web service")
        yield browser


@pytest.mark.slow
def test_the_project_runs(
    dsn: str, client: Client, web: httpx.Client, request: pytest.FixtureRequest
) -> None:
    def begin(name: str, **more: int) -> dict[str, Any]:
        answer = web.post("/experiments", params={"name": name, "dataset": "digits", **more})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def show(name: str) -> dict[str, Any]:
        found: dict[str, Any] = web.get(f"/experiments/{name}").json()
        assert found["sweep"]["running"] <= 3
        assert len(client.jobs(task="simulate", state="running")) <= 2
        return found

    client.configure(heartbeat_s=0.5)
    worker = ExitStack()
    request.addfinalizer(worker.close)
    worker.enter_context(started(command_of("tasks.py"), dsn))

    # Two experiments share a data set. What is refused is not submitted either.
    first, second = begin("first", epochs=1000), begin("second", epochs=100)
    assert not first["existed"]
    assert second["existed"]
    assert second["prepared"] == first["prepared"]
    assert web.post("/experiments", params={"name": "first", "dataset": "other"}).status_code == 409
    assert len(client.jobs(task="prepare")) == 1

    # The first is cancelled while it trains, with what waits for it.
    once(lambda: "running" in show("first")["training"], "the first to train")
    assert web.delete("/experiments/first").status_code == 204
    once(lambda: show("first")["state"] == "cancelled", "the first to be cancelled")

    # The worker is restarted while the second trains. Its gang goes on from its checkpoint.
    once(lambda: re.search(r"rank \d at \d", show("second")["training"]), "progress of the second")
    (training,) = client.gangs(state="running")
    worker.close()
    worker.enter_context(started(command_of("tasks.py"), dsn))
    ended = once(lambda: (found := show("second"))["state"] == "done" and found, "the second experiment")
    assert all(job.result["resumed_from"] > 0 for job in client.jobs(gang_id=training.id))
    assert ended["sweep"] == {"done": 30, "running": 0, "of": 30}
    assert ended["report"] == {"best_rate": 0.6, "weight": pytest.approx(3, abs=0.1), "passed": 6}
    assert [job.attempts for job in client.jobs(task="publish", state="done")] == [3]

    # The schedule's job submits a third.
    output_of(["gangq", "schedule", "run-now", "retrain"], GANGQ_DSN=dsn)
    (batch,) = once(lambda: client.batches(name="nightly"), "what the schedule submits")
    assert batch.size == 30
    client.cancel(job_ids=[job.id for job in client.jobs(batch_id=batch.id, limit=None)])

    # The notebook, beside them.
    assert "'passed': 6" in output_of(command_of("notebook.py"), GANGQ_DSN=dsn)


@pytest.mark.slow
def test_its_own_tests_pass() -> None:
    assert " passed" in output_of([*command_of("test_team.py"), "-p", "no:cacheprovider"])


def test_the_tutorial_is_the_project() -> None:
    """Its pieces of a file, put together, are the file, and it starts each program as the file says."""
    pieces = re.findall(r"```(?:python|toml)\n(.*?)\n```", TUTORIAL, re.DOTALL)
    of_files = 0
    for path in [*TEAM.glob("*.py"), TEAM / "pyproject.toml"]:
        text = path.read_text(encoding="utf-8")
        found = [piece for piece in pieces if piece in text]
        assert "\n\n\n".join(found) + "\n" == text, path.name
        assert text.splitlines()[0].removeprefix("# ") in TUTORIAL.replace("`", "\n").splitlines(), path.name
        of_files += len(found)
    assert of_files == len(pieces)
