"""What docs/manual/architecture.md says of processes, threads, exit codes and files is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import gangq.worker
from gangq.cli.worker import worker as cli_worker
from gangq.client import Client
from gangq.watchdogs import ExitCode
from gangq.worker.options import WorkerOptions
from worker.worker_process import Fleet, until_state

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "src/gangq"
SOURCES = [
    PACKAGE / "logqueue.py",
    PACKAGE / "metrics/serve.py",
    PACKAGE / "proc/killing.py",
    *(path for room in ("worker", "watchdogs", "gpu") for path in (PACKAGE / room).glob("*.py")),
]
PAGE = (TOP / "docs/manual/architecture.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"(?m)^\| `.*$", PAGE)]
THREADS = [row[0].strip("`") for row in ROWS]
NO_THREADS = {"gangq-", "gangq-w-", "gangq-call", "gangq-lookup"}
"""Names in the source that begin like a thread's: prefixes, of a directory too; a memory file beside an executor."""


def test_the_map_of_the_worker_names_each_of_its_modules_once() -> None:
    modules = [path.stem for path in (PACKAGE / "worker").glob("[a-z]*.py")]
    assert sorted(re.findall(r"`(\w+)`", gangq.worker.__doc__ or "")) == sorted(modules)


def test_every_option_of_a_worker_is_one_of_its_command_too() -> None:
    of_command = {parameter.name for parameter in cli_worker.params}
    beside = {
        *("app", "dsn", "embedded", "json", "log_level"),
        *("supervisor", "expect_gpus", "silence_s", "start_s"),
    }
    assert of_command - beside == {field.name for field in fields(WorkerOptions)}


def test_a_worker_with_a_job_in_each_lane_has_the_threads_it_names(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task(gpus=1)
def placed(ctx):
    ctx.beat(step=1)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        names = sorted(one.name for one in threading.enumerate())
        if "gangq-stall" in names and any(name.startswith("gangq-job-") for name in names):
            break
        time.sleep(0.02)
    return names

@app.task
def light(ctx):
    while not ctx.stopping:
        time.sleep(0.02)
""")
    fleet.start(devices="1x1GiB", slots=1, light=1)
    beside = client.submit(task="light", payloads=[{}])[0]
    until_state(client, beside, "running")
    job = client.submit(task="placed", payloads=[{}], gpus=1)[0]
    names = until_state(client, job, "done").result
    client.cancel(job_ids=[beside])
    assert [name for name in names if not any(fnmatchcase(name, one) for one in THREADS)] == []
    # No driver reads the device of this worker.
    assert {one for one in THREADS if not any(fnmatchcase(name, one) for name in names)} == {"gangq-sampler"}
    assert len(THREADS) <= 9, "eight, and one for each job in a child process"


def test_no_thread_has_a_name_that_the_page_does_not_know() -> None:
    known = set(re.findall(r"`(gangq-[\w*-]+)`", PAGE))
    names = {name for path in SOURCES for name in thread_names(path)}
    assert {"gangq-control", "gangq-job-*", "gangq-exit-work", "gangq-limits", "gangq-stall"} <= names
    assert names - known - NO_THREADS == set()
    made_of_parts = {"gangq-*-tell", "gangq-call_*", "gangq-lookup_*"}
    assert known - made_of_parts - names == set()


def test_what_any_thread_may_read_of_a_job_is_written_by_the_job_alone_under_its_lock() -> None:
    job = ast.parse((PACKAGE / "worker/jobs.py").read_text(encoding="utf-8"))
    active = next(node for node in job.body if isinstance(node, ast.ClassDef) and node.name == "ActiveJob")
    begun = next(one for one in active.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    locked = [
        node
        for node in ast.walk(active)
        if isinstance(node, ast.With)
        and "self._lock" in [ast.unparse(one.context_expr) for one in node.items]
    ]
    later = [name for one in active.body if one is not begun for name, _ in written(one)]
    assert sorted(later) == sorted(name for one in locked for name, _ in written(one))
    fields = {name for name, _ in written(begun)} - {"result"}
    assert {"gang", "lost", "work_end"} <= fields
    found = [
        f"{path.name}: {owner}.{name}"
        for path in (PACKAGE / "worker").glob("*.py")
        for name, owner in written(ast.parse(path.read_text(encoding="utf-8")))
        if name in fields and owner.rpartition(".")[2] in ("job", "_job", "_active")
    ]
    assert found == []


def written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The public attributes that are assigned in it, each with the expression whose attribute it is."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and not one.attr.startswith("_"):
                    yield one.attr, ast.unparse(one.value)


def thread_names(path: Path) -> Iterator[str]:
    """Every text in a source file that begins like the name of a thread, what is filled in as a star."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if re.fullmatch(r"gangq-[\w*-]*", text) and not re.fullmatch(r"gangq-\w+-", text):
            yield text


def test_the_parents_of_a_handler_and_of_a_command_are_those_of_its_picture(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def parents(ctx):
    found = [os.getppid()]
    while found[-1] > 1 and len(found) < 6:
        found.append(int(Path(f"/proc/{found[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return found
""")
    worker = fleet.start(devices="none", slots=0, light=2)
    handler = client.submit(task="parents", payloads=[{}])[0]
    upwards = until_state(client, handler, "done").result
    script = "read -r _ _ _ above _ < /proc/$PPID/stat; echo $above"
    command = client.submit(task="command", payloads=[{"argv": ["sh", "-c", script]}])[0]
    until_state(client, command, "done")
    printed = "".join(row.chunk for row in client.logs(job_id=command))
    assert upwards.index(worker.process.pid) == len(between("handler")), upwards
    assert [int(printed)] == [worker.process.pid]
    assert between("command") == ["guardian"]


def between(name: str) -> list[str]:
    """The processes between the worker and this one in the page's picture, the nearest one first."""
    drawn = re.findall(r"(?m)^([ │]*[└├]─ )(\w+(?: \w+)*)", PAGE)
    labels = [(len(lines), label) for lines, label in drawn]
    at = next(place for place, (_, label) in enumerate(labels) if label == name)
    depth = labels[at][0]
    found: list[str] = []
    for above, label in reversed(labels[:at]):
        if above < depth:
            depth = above
            if label == "worker":
                return found
            found.append(label)
    raise AssertionError(f"{name} is not below the worker")


def test_every_exit_code_is_named_and_no_other() -> None:
    before_the_way = PAGE.partition("## The way of a job")[0]
    named = {int(code) for code in re.findall(r"\b([78]\d)\b", before_the_way)}
    assert named == {int(code) for code in ExitCode}
    rows = re.findall(r"(?m)^\| (\d[\d, +n]*) \| ", before_the_way)
    assert {int(code) for row in rows for code in re.findall(r"\b[78]\d\b", row)} == named


def test_the_programs_beside_a_worker_import_nothing_of_gangq() -> None:
    """They are started for every command and beside every worker, and must outlive whatever breaks it."""
    script = (
        "import sys; sys.path.append(sys.argv[1]); import proc.guardian, proc.supervision; "
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('gangq', 'psycopg', 'psutil')))"
    )
    room = str(TOP / "src/gangq")
    run = [sys.executable, "-I", "-S", "-c", script, room]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "[]\n"
