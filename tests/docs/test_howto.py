"""The how-to pages: their Python runs, in its order, then their commands, in theirs; all beside the same two workers.

The first Python of a page that begins with `# tasks.py` is its part of one App, which both workers run. A `sh` block
is run line by line: `gangq` in this process, because starting Python forty times costs ten seconds, and all others
in a shell. `x=$(gangq ...)` sets a variable.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from cli.cli_process import GANGQ, environment, ok
from gangq.embedded import Server

MANUAL = Path(__file__).parents[2] / "docs/manual"
PAGES = sorted(path.stem for path in MANUAL.glob("howto-*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = {
    "sudo": "nothing is installed",
    "systemctl": "there is no service manager here",
    "journalctl": "there is no service manager here",
    "docker": "there is no Docker here",
    "gangq worker": "both workers run",
    "gangq metrics": "it runs until it is stopped",
    "gangq drain-host": "the workers are needed, and no host is called alpha",
    "gangq undrain": "the same",
    "gangq bounce": "it would look at the workers of other tests on this host",
    "pip": "nothing is fetched",
}
"""Commands of the pages that are only parsed (`test_pages.py`), by how they begin."""
STAND_INS = {
    "train.py": "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n",
    "torchrun": "#!/bin/sh\necho torchrun $*\n",
    "torch.py": "float16 = 'float16'\n",
    "diffusers.py": """
class Images:
    images = [type("Image", (), {"save": lambda self, path: open(path, "w").close()})()]

class DiffusionPipeline:
    from_pretrained = classmethod(lambda cls, name, torch_dtype: cls())
    to = lambda self, device: self

    def __call__(self, prompt, num_inference_steps, callback_on_step_end):
        for step in range(num_inference_steps):
            callback_on_step_end(self, step, 1000 - step, {})
        return Images()
""",
}
"""In place of programs and packages that are large and want a GPU."""
RESTARTED = 'trap : TERM; until "$@"; do :; done'
"""What a service manager does: a trip ends a worker. On SIGTERM the shell waits for the worker's end."""
CALLS = {
    "howto-transactions": """
from types import SimpleNamespace

from django.conf import settings
from fastapi.testclient import TestClient
from psycopg.conninfo import conninfo_to_dict

there = conninfo_to_dict(DSN)
names = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
given = {ours: there[theirs] for ours, theirs in names.items()}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **given}})
assert checkout(SimpleNamespace(POST={"item": "d"})).result(timeout="1m") == "invoice for 4"
with TestClient(web, raise_server_exceptions=False) as browser:
    placed = browser.post("/orders", params={"item": "e"}).json()
    assert app.job(placed["job"]).result(timeout="1m") == "invoice for 5"
    before = len(app.client.jobs(task="invoice"))
    assert browser.post("/orders", params={"item": "e"}).status_code == 500
    assert len(app.client.jobs(task="invoice")) == before
"""
}
"""What calls the functions that a page only defines."""


@dataclass(frozen=True)
class Page:
    """What is in a page's blocks."""

    name: str
    tasks: str
    python: str
    lines: list[str]
    others: list[tuple[str, str]]

    @classmethod
    def read(cls, name: str) -> Page:
        found = BLOCK.findall((MANUAL / f"{name}.md").read_text(encoding="utf-8"))
        python = [text for kind, text in found if kind == "python"]
        tasks = [text for text in python if text.startswith("# tasks.py\n")]
        scripts = [text for text in python if re.match(r"# (?!tasks)\w+\.py\n", text)]
        for script in scripts:
            compile(script, name, "exec")
        shell = "".join(text for kind, text in found if kind == "sh").replace("\\\n", " ")
        return cls(
            name,
            "".join(tasks),
            "\n".join(text for text in python if text not in [*tasks, *scripts]),
            [line for line in shell.splitlines() if line and not line.startswith("#")],
            [(kind, text) for kind, text in found if kind not in ("python", "sh")],
        )


@dataclass
class Place:
    """Where the pages run: a database with two workers, each with a GPU, in a directory with all their tasks."""

    dsn: str
    directory: Path
    server: Server

    @property
    def libpq(self) -> dict[str, str]:
        """The server, for commands that name only a database."""
        given = conninfo_to_dict(self.dsn)
        return {f"PG{key.upper()}": str(given[key]) for key in ("host", "port", "user")}

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.directory}:{Path(sys.executable).parent}:{self.server.binaries.bindir}:{os.environ['PATH']}"
        return {**environment(self.dsn), **self.libpq, "PATH": path}


@pytest.fixture(scope="module")
def place(
    server: Server, template: str, running: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("howto")
    head = "import gangq\n\napp = gangq.App()\n"
    tasks = "".join(Page.read(name).tasks.replace("app = gangq.App()\n", "") for name in PAGES)
    (directory / "tasks.py").write_text(head + tasks)
    for name, text in STAND_INS.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    with ExitStack() as stack:
        dsn = stack.enter_context(running.databases(server).own(template))
        there = Place(dsn, directory, server)
        stack.callback(running.databases(server).drop, "jobs_restored")
        for n in range(2):
            command = [
                *GANGQ,
                "worker",
                "tasks:app",
                "--name",
                f"w{n}",
                "--devices",
                "1x24GiB",
                "--light",
                "4",
            ]
            log = stack.enter_context((directory / f"w{n}.log").open("w"))
            worker = subprocess.Popen(
                ["bash", "-c", RESTARTED, "bash", *command, "--address", "127.0.0.1"],
                cwd=directory,
                env=there.environ,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(worker.wait, 30)
            stack.callback(os.killpg, worker.pid, signal.SIGTERM)
        yield there


def run_line(line: str, place: Place, variables: dict[str, str]) -> None:
    """Run one line of a `sh` block."""
    assigned = re.fullmatch(r"(\w+)=\$\((gangq .*)\)", line)
    command = assigned[2] if assigned else line
    if command.startswith("gangq ") and not re.search(r"[|>&;]", command.partition(" -- ")[0]):
        words = shlex.split(re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), command), comments=True)
        said = ok(place.dsn, *words[1:], **place.libpq)
        if assigned:
            variables[assigned[1]] = said.strip()
        return
    told = f"{line}\nprintf %s ${assigned[1]}" if assigned else line
    done = subprocess.run(
        ["bash", "-ec", told],
        cwd=place.directory,
        env={**place.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    if assigned:
        variables[assigned[1]] = done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_what_the_page_shows_runs(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page.read(name)
    monkeypatch.chdir(place.directory)
    if page.python:
        done = subprocess.run(
            [sys.executable, "-c", page.python + CALLS.get(name, "")],
            env=place.environ,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    variables: dict[str, str] = {}
    for line in page.lines:
        if not any(line.startswith(f"{start} ") for start in NOT_RUN):
            run_line(line, place, variables)
    for kind, text in page.others:
        if kind == "yaml":
            assert yaml.safe_load(text)
        else:
            assert kind in ("text", "ini", "toml", "dockerfile"), (
                f"a block of kind {kind!r} is run by nothing"
            )


@pytest.mark.parametrize("name", PAGES)
def test_a_page_for_somebody_in_a_hurry_is_short(name: str) -> None:
    assert len((MANUAL / f"{name}.md").read_text(encoding="utf-8").splitlines()) <= 120
