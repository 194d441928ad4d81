"""Handlers in processes of their own: forked from one that has imported the App, unless that cannot be."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gangq.client import Client
from gangq.worker import forkserver
from gangq.worker.forkserver import ForkServer
from worker.worker_process import Fleet, WorkerProcess, eventually, fleet_of, short_leases, until_state

SLOW_TO_IMPORT = """
import random, threading, multiprocessing
time.sleep(0.5)
(HERE / f"import-{os.getpid()}").touch()
COUNT = 0
OPENED = open(HERE / "opened", "a+")

@app.task
def noop(ctx):
    pass

@app.task
def tells(ctx):
    global COUNT
    COUNT += 1
    OPENED.write(f"{ctx.job.id}\\n"); OPENED.flush()
    return {"count": COUNT, "pid": os.getpid(), "random": random.random(), "environ": dict(os.environ),
            "shown": Path("/proc/self/environ").read_text().split("\\0"),
            "files": sorted(os.listdir("/proc/self/fd")),
            "name": Path("/proc/self/comm").read_text().strip(), "cwd": os.getcwd(),
            "session": os.getsid(0) == os.getpid(), "imported": len(list(HERE.glob("import-*")))}

def square(n):
    return n * n

@app.task
def multiplies(ctx):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, [1, 2, 3])

@app.task
def ends_its_forks(ctx):
    ended = []
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            time.sleep(1)
            os._exit(0)
        os.kill(pid, 15)
        ended.append(os.waitpid(pid, 0)[1])
    return ended

@app.task
def leaves(ctx):
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    import atexit
    atexit.register(lambda: print("said at exit", flush=True))

@app.task
def hangs(ctx):
    (HERE / "hangs").write_text(str(os.getpid()))
    while True:
        time.sleep(1)
"""


def submit(client: Client, task: str, **options: Any) -> int:
    return client.submit(task=task, payloads=[{}], wait_for_hardware=True, **options)[0]


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client)
    with fleet_of(dsn, tmp_path) as running:
        running.define("from pathlib import Path\n" + SLOW_TO_IMPORT)
        yield running


@pytest.mark.parametrize(("lane", "needs"), [("light", {}), ("slots", {"memory_mb": 1})])
def test_twenty_jobs_in_processes_of_their_own_follow_one_another_at_once(
    client: Client, fleet: Fleet, lane: str, needs: dict[str, int]
) -> None:
    fleet.start(devices="none", **{"slots": 0, "light": 0, lane: 2})
    until_state(client, submit(client, "noop", **needs), "done")
    ids = client.submit(task="noop", payloads=[{}] * 20, **needs)
    ended = max(until_state(client, one, "done").finished_at for one in ids)
    assert ended is not None
    began = min(client.job(id=one).claimed_at for one in ids)
    # To execute each of them took 21 s. Alone on two processors it is half a second; others run beside this test.
    print(f"20 jobs of {lane}: {(ended - began).total_seconds():.2f} s")
    assert (ended - began).total_seconds() < 5


def test_each_job_has_a_process_as_it_was_after_the_import(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    worker = fleet.start(slots=0, light=2)
    one, two = (until_state(client, submit(client, "tells"), "done").result for _ in range(2))
    assert one["pid"] != two["pid"] != worker.process.pid
    assert (one["count"], two["count"]) == (1, 1)
    assert one["random"] != two["random"]
    # By the worker itself and by the process that all are forked from.
    assert one["imported"] == two["imported"] == 2
    assert one["session"] is two["session"] is True
    assert two["environ"]["GANGQ_JOB_ID"] != one["environ"]["GANGQ_JOB_ID"]
    assert not [line for line in one["shown"] if line.startswith(("GANGQ_DSN", "GANGQ_KEY"))]
    # Standard streams, what the module has opened, and the one that looks.
    assert len(one["files"]) == 7, one["files"]  # And the line to its worker, and where it writes its stacks.
    assert one["name"].startswith("python"), one["name"]
    assert (tmp_path / "opened").read_text().split() == [
        one["environ"]["GANGQ_JOB_ID"],
        two["environ"]["GANGQ_JOB_ID"],
    ]


def test_a_handler_may_fork_and_leave_threads_and_say_something_at_its_exit(
    client: Client, fleet: Fleet
) -> None:
    fleet.start(slots=0, light=2)
    assert until_state(client, submit(client, "multiplies"), "done").result == [1, 4, 9]
    left = submit(client, "leaves")
    until_state(client, left, "done")
    assert "said at exit" in "".join(row.chunk for row in client.logs(job_id=left))


@pytest.mark.parametrize(
    "lane", [{"slots": 0, "light": 2}, {"slots": 0, "light": 1}], ids=["child", "inline"]
)
def test_a_fork_of_a_handler_dies_of_sigterm_however_early_that_comes(
    client: Client, fleet: Fleet, lane: dict[str, int]
) -> None:
    worker = fleet.start(**lane)
    assert until_state(client, submit(client, "ends_its_forks"), "done").result == [15] * 5
    assert worker.process.poll() is None, "the signal was for the fork and not for the worker"


def test_an_app_that_starts_threads_is_not_forked(client: Client, fleet: Fleet) -> None:
    fleet.define(
        "import threading; threading.Thread(target=time.sleep, args=(1e6,), daemon=True, name='feeder').start()\n"
        + SLOW_TO_IMPORT
    )
    worker = fleet.start(slots=0, light=2)
    assert until_state(client, submit(client, "tells"), "done").result["imported"] == 3
    assert "handlers_spawned" in worker.log


def test_an_app_that_opens_a_gpu_is_not_forked(client: Client, fleet: Fleet) -> None:
    fleet.define(
        "from gangq.worker import forkserver; forkserver._GPU_FILES = ('/dev/zero',)\n"
        "GPU = open('/dev/zero')\n" + SLOW_TO_IMPORT
    )
    worker = fleet.start(slots=0, light=2)
    assert until_state(client, submit(client, "tells"), "done").result["imported"] == 3
    assert "handlers_spawned" in worker.log


def test_the_app_is_imported_where_the_worker_began_and_not_where_a_handler_has_gone(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define("""
(HERE / f"import-{os.getpid()}").write_text(os.getcwd())

@app.task
def goes(ctx):
    os.chdir("/usr")

@app.task(isolate=True)
def alone(ctx):
    pass
""")
    fleet.start(slots=0, light=1)
    until_state(client, submit(client, "goes"), "done")
    until_state(client, submit(client, "alone"), "done")
    assert [found.read_text() for found in tmp_path.glob("import-*")] == [str(tmp_path)] * 2


def test_where_the_directory_in_which_the_worker_began_was_removed_its_jobs_say_what_to_do(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define("""
if (HERE / "began").is_dir():
    os.chdir(HERE / "began")

@app.task
def leaves(ctx):
    os.chdir(HERE)
    os.rmdir("began")

@app.task(isolate=True)
def alone(ctx):
    pass
""")
    (tmp_path / "began").mkdir()
    worker = fleet.start(slots=0, light=1)
    until_state(client, submit(client, "leaves"), "done")
    error = until_state(client, submit(client, "alone", max_attempts=1), "failed").error
    assert error is not None
    assert error["message"].endswith(
        "create that directory on this host, or submit with a cwd that every host has"
    )
    assert "runner_fault" not in worker.log


def test_an_app_that_ignores_the_ends_of_its_children_is_imported_once(client: Client, fleet: Fleet) -> None:
    fleet.define("signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + SLOW_TO_IMPORT)
    fleet.start(slots=0, light=2)
    rows = [until_state(client, submit(client, "tells"), "done") for _ in range(3)]
    assert [row.result["imported"] for row in rows] == [2] * 3


@pytest.mark.slow
def test_an_app_that_cannot_be_imported_a_second_time_fails_its_jobs_with_the_reason(
    client: Client, fleet: Fleet
) -> None:
    fleet.define(
        "if list(HERE.glob('import-*')): raise OSError('the licence server is away')\n" + SLOW_TO_IMPORT
    )
    worker = fleet.start(slots=0, light=2)
    failed = until_state(client, submit(client, "tells", max_attempts=1), "failed")
    assert (failed.error["type"], failed.error["message"]) == ("OSError", "the licence server is away")
    assert "handlers_spawned" in worker.log


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def forkservers(worker: WorkerProcess) -> list[psutil.Process]:
    """Those that run."""
    found = []
    for child in psutil.Process(worker.process.pid).children():
        # It may end between two questions: a zombie has no command line.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("gangq.worker.forkserver" in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "idle"])
def test_the_process_they_are_forked_from_is_started_again(client: Client, fleet: Fleet, kill: bool) -> None:
    fleet.define(
        f"from gangq.worker import forkserver; forkserver.IDLE_S = {60 if kill else 0.3}\n" + SLOW_TO_IMPORT
    )
    worker = fleet.start(slots=0, light=2)
    assert not forkservers(worker), "it starts with the first job that needs it"
    until_state(client, submit(client, "noop"), "done")
    if kill:
        forkservers(worker)[0].kill()
    eventually(lambda: not forkservers(worker), "it has ended")
    assert until_state(client, submit(client, "tells"), "done").result["imported"] == 3


def test_nothing_outlives_a_worker_that_is_killed(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start(slots=0, light=2)
    submit(client, "hangs")
    where = tmp_path / "hangs"
    eventually(lambda: where.exists() and where.read_text(), "the handler runs")
    handler = psutil.Process(int(where.read_text()))
    family = [handler, *handler.parents()[:1], *forkservers(worker)]
    worker.signal(signal.SIGKILL)
    eventually(lambda: all(has_ended(one) for one in family), "all have ended")


def test_a_handler_ends_with_its_guardian(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(slots=0, light=2)
    job = submit(client, "hangs", max_attempts=1)
    where = tmp_path / "hangs"
    eventually(lambda: where.exists() and where.read_text(), "the handler runs")
    handler = psutil.Process(int(where.read_text()))
    handler.parent().kill()
    failed = until_state(client, job, "failed")
    assert "guardian" in failed.error["message"]
    assert has_ended(handler)


AN_APP = """
import os
from pathlib import Path
from gangq.app import App

app = App("host=nowhere")
here = Path(__file__).parent

def forked():
    if (here / "dies").exists():
        (here / f"forked-{os.getpid()}").touch()
        os.kill(os.getpid(), 9)

os.register_at_fork(after_in_parent=forked)
"""


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """One that has imported an App, and waits half a second for an answer."""
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.5)
    (tmp_path / "an_app.py").write_text(AN_APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer(os.environ, str(tmp_path), f"w-{tmp_path.name}")
    assert server.warm("an_app:app", lambda: False)
    yield server
    server.close()


def test_a_guardian_that_may_have_been_forked_is_not_asked_for_again(forks: ForkServer) -> None:
    process = forks._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        forks.fork(theirs)
    assert process.poll() is not None


def test_a_guardian_for_whose_pidfd_there_is_no_room_is_not_asked_for_again(forks: ForkServer) -> None:
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    with ours, theirs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(OSError, match="cannot be waited for"):
                forks.fork(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_guardian_that_was_forked_by_what_then_died_is_not_asked_for_again(
    forks: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "dies").touch()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="ended while it was to fork"):
        forks.fork(theirs)
    assert len(list(tmp_path.glob("forked-*"))) == 1


@pytest.mark.parametrize("room", [0, 1], ids=["not for the channel", "not for its end"])
def test_a_guardian_that_the_fork_server_has_no_file_to_wait_for_is_ended(
    forks: ForkServer, room: int
) -> None:
    process = forks._process
    assert process is not None
    files = Path(f"/proc/{process.pid}/fd")
    # It has one of its worker, and opens no more by itself.
    eventually(lambda: "anon_inode:[pidfd]" in map(os.readlink, files.iterdir()), "it waits to be asked")
    taken = {int(file.name) for file in files.iterdir()}
    most = min(set(range(len(taken) + 1)) - taken) + room
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, pytest.raises(OSError, match="Too many open files"):
            forks.fork(theirs)
        ours.settimeout(5)
        assert ours.recv(1) == b"", "a guardian listens"


def test_a_fork_server_that_ended_before_it_was_asked_is_started_again(forks: ForkServer) -> None:
    process = forks._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.2, process.kill)
    timer.start()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            guardian = forks.fork(theirs)
        assert guardian.poll() is None
    guardian.wait(10)
    timer.join()


def test_a_fork_server_that_has_ended_is_started_again(forks: ForkServer) -> None:
    process = forks._process
    assert process is not None
    process.kill()
    process.wait()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            guardian = forks.fork(theirs)
        assert guardian.poll() is None
    guardian.wait(10)
