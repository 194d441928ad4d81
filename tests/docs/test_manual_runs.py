"""Every command and every piece of code that the README and the manual show is run, page by page, in its order.

A page has a database of its own, and a worker where `WORKERS` says with which options; the how-to pages share one
database and two workers, and the commands between backquotes of all pages another one. `# tasks.py` in a page's
Python is the App of its worker. Python of a page runs in one process, piece by piece. A `sh` block runs command by
command: `gangq` in this process, because starting Python a hundred times costs half a minute, and everything else in
a shell. `x=$(gangq ...)` sets a variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from manual_pages import (
    BLOCKS,
    ELSEWHERE,
    HOWTO,
    INLINE,
    INLINE_BLOCKS,
    NOT_HERE,
    PAGES,
    TOP,
    Block,
    blocks,
    tasks_of,
)
from psycopg.conninfo import conninfo_to_dict

from cli.cli_process import GANGQ, environment, eventually, ok
from gangq.client import Client
from gangq.embedded import Server

pytestmark = pytest.mark.slow

WORKERS = {
    "README": ["--devices 4x24GiB"],
    "batches": ["--devices none --slots 4"],
    "coming-from": ["--devices none --slots 4"],
    "dependencies": ["--devices none --slots 2 --light 2"],
    "hooks": ["--slots 0"],
    "howto": ["--devices 1x24GiB --light 4 --address 127.0.0.1"] * 2,
    INLINE: ["--devices 64x80GiB --slots 11 --light 4"],
    "placing": ["--devices 64x80GiB --slots 11 --label gpu=h100 --label driver=550 --label rack=r1"],
    "schedules": ["--slots 2"],
    "services": ["--devices none --slots 3 --address 127.0.0.1"],
    "tasks": ["--devices none --slots 2"],
    "tutorial": ["--devices 2x8GiB --slots 4"],
    "waiting": ["--devices none --slots 2"],
}
"""The options of the workers of a page, or of all how-to pages."""
FAILS = {"coming-from": {"f"}, "dependencies": {"shard"}, "hooks": {"train"}}
"""The tasks of the jobs that fail on a page with a worker of its own."""
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
    "render.sh": "#!/bin/sh\necho picture $GANGQ_ARRAY_INDEX\n",
    "job.sh": "#!/bin/sh\n",
    "page": "#!/bin/sh\ncat > page.json\n",
    "oncall.url": "http://127.0.0.1:9/",
    "oncall.secret": "a secret of the receiver",
    "spec.json": '{"task": "train", "size": 2, "gpus": 8}',
}
"""In place of programs and packages that are large and want a GPU, and of files of the reader."""
INSTEAD = {
    r"postgresql://\w+@db\.example/jobs": "{dsn}",
    r"GANGQ_DSN=embedded": "GANGQ_DSN='{dsn}'",
    r"/etc/gangq/notify/": "",
    r"/usr/local/bin/page": "{directory}/page",
    r"^gangq worker off\|drain\|on NAME": "gangq worker on a0",
    r"^(gangq (worker(?! on)|notify run)\b.*?)( +#.*)?$": r"\1 --once",
    r"127\.0\.0\.1:(9187|8000)": "127.0.0.1:{port}",
    r"--port 8000": "--port {port}",
    r"--metrics 9188": "--metrics {free}",
    r"^gangq web\b": "gangq web --port {port}",
    r"^gangq (cordon|drain-host|uncordon|undrain) \w+": r"gangq \1 {host}",
    r"--url URL": "--url http://127.0.0.1:9/",
    r"--array (.*)-99%4": r"--array \g<1>-12%4",
    r"--worker NAME": "--worker a0",
    r"--ceilings alice=": "--ceilings {user}=",
    r"--address ADDRESS": "--address 127.0.0.1",
    r"--request-id UUID": "--request-id 6f0a1f7e-3a55-4b86-9d6c-0c4a1c6f2b11",
    r"--(step|light|max-running-jobs|max-trips) N\b": r"--\1 2",
    r"^gangq (beat|gang)\b": r"gangq run --gang 2 -- gangq \1",
    r"^gangq snooze\b": "gangq run --detach -- gangq snooze",
    r"^gangq completion install$": "gangq completion show bash",
    r"^gangq systemd install( --user)?$": "gangq systemd install --dir units",
}
"""What of a command cannot be as printed: addresses, the end of a program that runs on, a hundred processes, names.
And what is for the inside of a job, or would write into the home of whoever runs this."""
INLINE_INSTEAD = {
    r"--cancel 17": "--cancel $later",
    r"(?<=^gangq priority 50) 12\b": " $later",
    r"(?<=explain) 8\b| (12|17|ID)\b": " $job",
    r" g[37]\b": " $gang",
    r" b(12|20)\b": " $batch",
    r"--device (H:0|UUID)": "--device $device",
}
"""The ids in the commands between backquotes: those of `INLINE_ONCE` and `INLINE_BEFORE`."""
INLINE_ONCE = """
gangq queue create research
gangq queue create q
gangq queue create Q
gangq queue create gpu
gangq queue create render
gangq queue create shared-work
gangq submit render --limit-key licence --limit 2
gangq submit render --limit-key api --rate 10/1m
later=$(gangq submit render --due 1d)
device=$(gangq devices -o uuid | tail -n 1)
"""
INLINE_BEFORE = """
psql -qd "$GANGQ_DSN" -c "select gangq.stop_service(name) from gangq.services"
psql -qd "$GANGQ_DSN" -c "select gangq.uncordon(host => host) from gangq.workers where ended_at is null"
job=$(gangq submit render)
gang=$(gangq submit render --gang 2 --gpus 1)
batch=$(gangq submit render --name reports --count 3)
gangq wait $job $gang $batch
"""
"""What the commands between backquotes find: before all of them, and before those of each page."""
SERVES = {"gangq metrics --listen": "metrics", "gangq web": "", "uvicorn": "docs"}
"""Commands that run until they are stopped, and the path of a page that they serve."""
BEFORE: dict[tuple[str, int | str], tuple[str, str]] = {
    **{(INLINE, block.number): ("sh", INLINE_BEFORE) for block in INLINE_BLOCKS},
    (INLINE, INLINE_BLOCKS[0].number): ("sh", INLINE_ONCE + INLINE_BEFORE),
    ("batches", 1): ("sql", "alter sequence gangq.job_ids restart 12"),
    ("notifications", 0): ("sh", "gangq queue create research\ngangq queue create research.vision\n"),
    ("placing", 3): (
        "sh",
        """psql -qd "$GANGQ_DSN" -c "alter sequence gangq.gang_ids restart 7"
gangq submit train --gang 2 --gpus 8
psql -qd "$GANGQ_DSN" -c "alter sequence gangq.gang_ids restart 12"
gangq submit train --gang 2 --gpus 8
""",
    ),
    ("tutorial", 11): ("sh", "uvicorn api:web --port 8000"),
    ("waiting", 0): (
        "sh",
        """psql -qd "$GANGQ_DSN" -c "alter sequence gangq.job_ids restart 12; alter sequence gangq.gang_ids restart 7"
gangq submit train
gangq submit train --gang 2
""",
    ),
}
"""What a block finds: the ids that it names."""
AFTER = {
    ("dependencies", 1): ("python", "assert (total.result(), told.result()) == (40, ['no such shard'])"),
    ("dependencies", 2): (
        "sh",
        """gangq wait "$total" --timeout 1m
test "$(psql -Atd "$GANGQ_DSN" -c "select result from gangq.jobs where id = $total")" = 70
""",
    ),
    ("howto-transactions", 5): (
        "python",
        """
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
""",
    ),
    ("metrics", 2): (
        "python",
        """
from starlette.testclient import TestClient

assert "\\ngangq_up 1" in TestClient(web).get("/metrics").text
""",
    ),
    ("notifications", 3): ("python", "assert not is_from_gangq(b'secret', 't=1,v1=0', b'{}')"),
}
"""What calls the functions that a block only defines, and looks at what it submits."""
RESTARTED = 'trap : TERM; until "$@"; do sleep 0.1; kill -0 $PPID || exit; done'
"""What a service manager does: a trip ends a worker. On SIGTERM the shell waits for the worker's end. It does not
outlive tests that are killed.
"""
INTERPRETER = """
import json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<page>", "exec"), names)
        ended = "done"
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        ended = "failed"
    print(f"\\0{ended}", flush=True)
"""
"""Runs one piece of Python after another in one process."""


OTHER_TASKS = """
import gangq

app = gangq.App()


@app.task
def train(ctx):
    ctx.wait_stopping(600)
"""
"""Of a worker of a page without tasks."""
INLINE_TASKS = """
import gangq

app = gangq.App()
for name in ("ask", "evaluate", "render", "report", "train"):
    app.task(name=name)(lambda ctx: "done")


@app.task
def serve(ctx):
    ctx.ready()
    ctx.wait_stopping(600)
"""
OPERATORS = {"|", ">", "<", "&", ";", "&&", "||", ">>"}


def words(command: str, punctuation_chars: bool = False) -> list[str]:
    """Its words, as a shell would have them."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=punctuation_chars)
    lexer.whitespace_split = True
    return list(lexer)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Place:
    """A database with its workers, in a directory with their tasks."""

    def __init__(self, dsn: str, server: Server, directory: Path, workers: list[str]) -> None:
        self.dsn, self.directory = dsn, directory
        given = conninfo_to_dict(dsn)
        self.libpq = {f"PG{key.upper()}": str(given[key]) for key in ("host", "port", "user")}
        path = f"{directory}:{Path(sys.executable).parent}:{server.binaries.bindir}:{os.environ['PATH']}"
        self.environ = {**environment(dsn), **self.libpq, "PATH": path}
        self._stack = ExitStack()
        for n, options in enumerate(workers):
            command = f"worker tasks:app --name a{n} {options}".split()
            self.start(["bash", "-c", RESTARTED, "bash", *GANGQ, *command])
        with Client(dsn) as client:
            eventually(lambda: len(client.workers()) == len(workers), "the workers are registered", 60)

    def start(self, command: list[str]) -> None:
        """Start a program that runs until the place is closed."""
        with (self.directory / "programs.log").open("a") as log:
            program = subprocess.Popen(
                command, cwd=self.directory, env=self.environ, stderr=log, start_new_session=True
            )
        self._stack.callback(program.wait, 30)
        self._stack.callback(os.killpg, program.pid, signal.SIGTERM)

    def close(self) -> None:
        self._stack.close()


class Page:
    """One page while it is run. Its blocks that come before the one that is asked for run first."""

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self._left = blocks(name)
        self._variables: dict[str, str] = {}
        self._port = free_port()
        self._stack = ExitStack()
        self._interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> list[str]:
        """Run the page up to this block; return which parts are not there to run all of it."""
        missing: list[str] = []
        while block in self._left:
            one = self._left.pop(0)
            missing = []
            for more in (
                BEFORE.get((one.page, one.number)),
                (one.kind, one.text),
                AFTER.get((one.page, one.number)),
            ):
                if more:
                    missing += self._run(Block(one.page, one.number, *more))
        return missing

    def _run(self, block: Block) -> list[str]:
        missing = []
        for command in block.commands():
            if part := block.not_here(command):
                missing.append(part)
            elif not block.elsewhere:
                getattr(self, f"_{block.kind}")(command)
        return missing

    def close(self) -> None:
        self._stack.close()

    def _as_here(self, text: str) -> str:
        for pattern, instead in {**INSTEAD, **(INLINE_INSTEAD if self.name == INLINE else {})}.items():
            there = instead.format(
                dsn=self.place.dsn,
                directory=self.place.directory,
                port=self._port,
                free=free_port(),
                user=self.place.libpq["PGUSER"],
                host=socket.gethostname(),
            )
            text = re.sub(pattern, there, text, flags=re.MULTILINE)
        return text

    # -- one for each kind of block --------------------------------------------------------------------------

    def _python(self, text: str) -> None:
        file = re.match(r"# (\w+\.py)\n", text)
        if file and file[1] == "tasks.py":
            return  # the worker has it
        if self._interpreter is None:
            self._interpreter = self._stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-uc", INTERPRETER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=self.place.directory,
                    env=self.place.environ,
                )
            )
            self._stack.callback(self._interpreter.stdin.close)  # type: ignore[union-attr]
        assert self._interpreter.stdin
        assert self._interpreter.stdout
        self._interpreter.stdin.write(json.dumps(self._as_here(text)) + "\n")
        self._interpreter.stdin.flush()
        said = ""
        late = threading.Timer(120, self._interpreter.kill)
        late.start()
        for line in self._interpreter.stdout:
            if line.startswith("\0"):
                break
            said += line
        late.cancel()
        assert line == "\0done\n", said

    def _sh(self, command: str) -> None:
        served = next((path for start, path in SERVES.items() if command.startswith(start)), None)
        if served is not None:
            self._port = free_port()
        command = self._as_here(command)
        assigned = re.fullmatch(r"(\w+)=\$\((gangq .*)\)", command)
        alone = assigned[2] if assigned else command
        if served is not None:
            self._serve(command, served)
        elif re.match(r"gangq (?!worker)", alone) and not OPERATORS & set(
            words(alone, punctuation_chars=True)
        ):
            said = self._gangq(alone)
            if assigned:
                self._variables[assigned[1]] = said.strip()
        elif assigned:
            self._variables[assigned[1]] = self._shell(f"{command}\nprintf %s ${assigned[1]}")
        else:
            self._shell(command)

    def _gangq(self, command: str) -> str:
        known = re.sub(r"\$(\w+)", lambda m: self._variables.get(m[1], m[0]), command)
        with contextlib.chdir(self.place.directory):
            return ok(self.place.dsn, *words(known)[1:], **self.place.libpq)

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.place.directory,
            env={**self.place.environ, **self._variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, command: str, path: str) -> None:
        """Start it, and read a page from it."""
        self.place.start(words(command))
        url = f"http://127.0.0.1:{self._port}/{path}"

        def answer() -> int:
            try:
                with urllib.request.urlopen(url, timeout=20) as found:
                    return int(found.status)
            except urllib.error.URLError:
                return 0

        eventually(lambda: answer() == 200, f"{command} answers", 60)

    def _sql(self, text: str) -> None:
        with psycopg.connect(self.place.dsn, autocommit=True) as db:
            db.execute(text.encode())

    def _psql(self, text: str) -> None:
        """Each query has the columns that are printed below it."""
        with psycopg.connect(self.place.dsn, autocommit=True) as db:
            for query, titles in re.findall(r"^\w+=# (.*;)\n(.*)$", text, re.MULTILINE):
                found = db.execute(query.encode()).description or []
                assert [column.name for column in found] == [title.strip() for title in titles.split("|")], (
                    query
                )

    def _text(self, text: str) -> None:
        """A drawing or an output."""

    def _json(self, text: str) -> None:
        json.loads(text)

    def _toml(self, text: str) -> None:
        tomllib.loads(text)


class Pages:
    """The page that is open. The how-to pages share one place, and each other page has its own."""

    def __init__(
        self, server: Server, template: str, running: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        self._server, self._template, self._databases = server, template, running.databases(server)
        self._directories = tmp_path_factory
        self._shared, self._own = ExitStack(), ExitStack()
        self._howto: Place | None = None
        self._page: Page | None = None

    def _place(self, stack: ExitStack, name: str, *pages: str) -> Place:
        directory = self._directories.mktemp(name)
        tasks = INLINE_TASKS if name == INLINE else tasks_of(*pages) or OTHER_TASKS
        for file, text in {**STAND_INS, "tasks.py": tasks}.items():
            (directory / file).write_text(text)
            (directory / file).chmod(0o755)
        if name == "tutorial":
            shutil.copytree(TOP / "examples/team", directory, dirs_exist_ok=True)
        dsn = stack.enter_context(self._databases.own(self._template))
        place = Place(dsn, self._server, directory, WORKERS.get(name, []))
        stack.callback(place.close)
        return place

    def open(self, name: str) -> Page:
        if self._page is None or self._page.name != name:
            self._own.close()
            if name in HOWTO:
                self._howto = self._howto or self._place(self._shared, "howto", *HOWTO)
                place = self._howto
                self._own.callback(self._databases.drop, "jobs_restored")
            else:
                place = self._place(self._own, name, name)
            self._page = Page(name, place)
            self._own.callback(self._page.close)
        return self._page

    def close(self) -> None:
        self._own.close()
        self._shared.close()


@pytest.fixture(scope="module")
def pages(
    server: Server, template: str, running: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pages]:
    opened = Pages(server, template, running, tmp_path_factory)
    yield opened
    opened.close()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind != "text"], ids=str)
def test_what_the_page_shows_runs(block: Block, pages: Pages) -> None:
    page = pages.open(block.page)
    missing = page.run(block)
    last = block == [one for one in blocks(block.page) if one.kind != "text"][-1]
    if last and block.page in WORKERS:
        with Client(page.place.dsn) as client:
            assert {job.task for job in client.jobs(state="failed")} == FAILS.get(block.page, set())
    if missing:
        pytest.skip("; ".join(dict.fromkeys(missing)))


def test_nothing_is_said_to_be_missing_that_no_page_needs() -> None:
    """And what is run elsewhere is: the test that is named reads the page."""
    for kind, starts in NOT_HERE.items():
        commands = [
            (block, command) for block in BLOCKS if block.kind == kind for command in block.commands()
        ]
        for start, part in starts.items():
            assert any(
                block.not_here(command) == part and command.startswith(start) for block, command in commands
            ), start
    for (page, _), test in ELSEWHERE.items():
        assert any(block.page == page and block.elsewhere == test for block in BLOCKS)
        assert f"docs/manual/{page}.md" in (TOP / test).read_text(encoding="utf-8")
    named = {(block.page, block.number) for block in BLOCKS}
    assert {*BEFORE, *AFTER} <= named


def test_the_stack_on_the_page_of_a_hang_is_that_of_its_own_code() -> None:
    page = PAGES["howto-postmortem"].read_text(encoding="utf-8")
    code = tasks_of("howto-postmortem").splitlines()
    stack = re.findall(r'tasks.py", line (\d+), in \w+\n +(.*)', page)
    assert len(stack) == 2
    assert [code[int(line) - 1].strip() for line, _ in stack] == [text for _, text in stack]
    assert f"tasks.py:{stack[-1][0]};" in page


@pytest.mark.parametrize("name", HOWTO)
def test_a_page_for_somebody_in_a_hurry_is_short(name: str) -> None:
    assert len(PAGES[name].read_text(encoding="utf-8").splitlines()) <= 120
