"""A worker that was killed, and one that cannot be: told apart, reported, and nothing started beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from gangq.errors import Unfit
from gangq.gpu import Detection
from gangq.proc import cgroup, oom, procfs
from gangq.worker import fitness
from gangq.worker.options import WorkerOptions
from process.supervised import PATIENCE_S, Start, starter
from worker.worker_process import eventually

_LIMIT = 192 << 20
NOTHING = Detection((), None)


@pytest.fixture
def start(tmp_path: Path, dsn: str) -> Iterator[Start]:
    with starter(tmp_path, "") as begin:
        yield begin


# -- kills ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cage() -> Iterator[tuple[str, ...]]:
    """The beginning of a command line whose rest runs in a memory cgroup of 192 MiB."""
    made = _cgroup()
    if made is None:
        pytest.skip("no memory cgroup can be made here: needs root and a cgroup file system that is writable")
    yield ("sh", "-c", f'echo $$ > {made}/cgroup.procs && exec "$0" "$@"')
    eventually(lambda: not (made / "cgroup.procs").read_text(), "nobody is in the cgroup", PATIENCE_S)
    made.rmdir()


def _cgroup() -> Path | None:
    name = f"gangq-test-{uuid.uuid4().hex[:8]}"
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max"), ("unified", "memory.max")):
        place = Path("/sys/fs/cgroup") / root / name
        with contextlib.suppress(OSError):
            place.mkdir()
            if (place / limit).exists():
                (place / limit).write_text(str(_LIMIT))
                for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                    with contextlib.suppress(OSError):
                        (place / swap).write_text(str(_LIMIT if "memsw" in swap else 0))
                return place
            place.rmdir()
    return None


def test_a_kill_for_want_of_memory_is_told_and_its_job_tripped(
    start: Start, cage: tuple[str, ...], client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    run = start("spends_memory", silence_s=20.0, prefix=cage, TEST_DSN=dsn, TEST_WORKER="w1")
    run.until_marked()
    assert run.exit_code(60) == 86
    row = client.job(id=job)
    assert (row.state, row.trips, row.crashes) == ("pending", 1, 0)
    (trip,) = client.trips(job_id=job)
    assert (trip.code, trip.reason, trip.outcome) == (86, "OutOfMemory", "scheduled")


def test_a_plain_kill_in_the_same_cgroup_is_a_crash(
    start: Start, cage: tuple[str, ...], client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    run = start("lives", prefix=cage, TEST_DSN=dsn, TEST_WORKER="w1")
    run.until_marked()
    os.kill(run.worker().pid, signal.SIGKILL)
    assert run.exit_code() == 137
    row = client.job(id=job)
    assert (row.state, row.trips, row.crashes) == ("pending", 0, 1)
    (dead,) = client.events(kind="dead")
    assert dead.data is not None
    assert (dead.data["by"], dead.data["signal"], dead.data["tree_dead"]) == ("its supervisor", 9, True)
    assert client.workers(name="w1")[0].state == "dead"


def test_a_job_is_free_soon_after_its_worker_was_killed(start: Start, client: Client, dsn: str) -> None:
    client.submit(task="any")
    run = start("starts_a_tree", TEST_DSN=dsn, TEST_WORKER="w1")
    run.until_marked()
    os.kill(run.worker().pid, signal.SIGKILL)
    eventually(lambda: [job.state for job in client.jobs()] == ["pending"], "it is claimable again", 4)
    assert run.exit_code() == 137
    assert run.left() == []


def test_a_worker_that_ends_without_retiring_is_reported(start: Start, client: Client, dsn: str) -> None:
    job = client.submit(task="any")[0]
    run = start("exits", 77, TEST_DSN=dsn, TEST_WORKER="w1")
    assert run.exit_code() == 77
    assert client.workers(name="w1")[0].state == "dead"
    assert (client.job(id=job).state, client.job(id=job).crashes) == ("pending", 1)


def test_one_that_left_word_that_it_lapsed_is_charged_no_crash(
    start: Start, client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    run = start("lapses", TEST_DSN=dsn, TEST_WORKER="w1")
    assert run.exit_code() == 77
    assert client.workers(name="w1")[0].state == "retired"
    row = client.job(id=job)
    assert (row.state, row.crashes, row.trips) == ("pending", 0, 0)


def test_a_trip_that_its_worker_could_not_report_is_reported_for_it(
    start: Start, client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    assert start("exits", 76, TEST_DSN=dsn, TEST_WORKER="w1").exit_code() == 76
    row = client.job(id=job)
    assert (row.state, row.trips, row.crashes) == ("pending", 1, 0)


def test_a_worker_that_retired_is_not_reported(start: Start, client: Client, dsn: str) -> None:
    run = start("finishes", TEST_DSN=dsn, TEST_WORKER="w1", TEST_IDLE="1")
    assert run.exit_code() == 0
    assert "reported" not in run.log
    assert client.workers(name="w1")[0].state == "live"


def test_without_a_database_it_ends_all_the_same(start: Start) -> None:
    run = start("exits", 3, TEST_REGISTERS="1")
    assert run.exit_code(15) == 3
    assert "death_not_reported" in run.log


# -- what nothing can kill -----------------------------------------------------------------------------------


@pytest.fixture
def silent_file(tmp_path: Path) -> Iterator[Path]:
    """A file on a file system that never answers."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a process in state D is made with a mount of /dev/fuse, which needs root")
    place = Path("/tmp") / f"gangq-silent-{uuid.uuid4().hex[:8]}"
    place.mkdir()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("silent_mount.py")), str(place)], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        if server.stdout.readline() != b"mounted\n":
            pytest.skip("/dev/fuse is there and cannot be mounted")
        yield place / "file"
    finally:
        # Everybody who waits for an answer gets an error.
        server.kill()
        server.communicate()
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def test_an_unkillable_worker_is_flagged_first_and_nothing_starts_beside_it(
    start: Start, silent_file: Path, client: Client, dsn: str
) -> None:
    job = client.submit(task="any")[0]
    run = start("reads", silent_file, TEST_DSN=dsn, TEST_WORKER="w1")
    run.until_marked()
    worker = run.worker()
    eventually(lambda: "request_wait_answer" in str(procfs.threads(worker.pid)), "it waits", PATIENCE_S)
    os.kill(worker.pid, signal.SIGKILL)
    # Whoever sees its supervisor gone finds the flag set.
    assert run.exit_code() == 87
    assert client.workers(name="w1")[0].reboot_needed
    assert procfs.same(worker) is not None
    assert procfs.await_end([worker]) == [worker]
    row = client.workers(name="w1")[0]
    assert row.quarantined is not None
    assert "cannot be killed: reboot host" in row.quarantined
    # Nothing is freed early: the process may still write.
    assert client.job(id=job).state == "running"
    (stuck,) = client.events(kind="stuck")
    assert stuck.data is not None
    assert stuck.data["pid"] == worker.pid
    with pytest.raises(Unfit, match=r"does not start beside .* Reboot the host"):
        fitness.check(client, WorkerOptions(name="w1", host="here").resolved(), NOTHING, {})
    # Another name has nothing to do with it.
    fitness.check(client, WorkerOptions(name="w2", host="here").resolved(), NOTHING, {})


# -- counting kills ------------------------------------------------------------------------------------------


def test_a_kill_just_before_the_last_sign_of_life_counts(tmp_path: Path) -> None:
    count = tmp_path / "memory.events"
    count.write_text("low 0\noom_kill 0\n")
    # The group that the process is in has no count of its own: its parent has.
    watch = oom.OomWatch(cgroup.Group(2, [str(tmp_path / "below"), str(tmp_path)]))
    watch.look(10.0)
    assert not watch.killed()
    count.write_text("low 0\noom_kill 1\n")
    watch.look(11.5)
    assert watch.killed()
    # Somebody else's kill, long before this death.
    watch.look(13.0)
    assert not watch.killed()


def test_nobody_counts_where_there_is_no_group(tmp_path: Path) -> None:
    for group in (None, cgroup.Group(1, [str(tmp_path)])):
        watch = oom.OomWatch(group)
        watch.look(10.0)
        assert not watch.killed()


# -- the command itself --------------------------------------------------------------------------------------


def gangq(directory: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "GANGQ_"))}
    return subprocess.run(
        [sys.executable, "-m", "gangq", *args],
        env={**kept, **environ},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_the_private_server_outlives_the_worker_that_started_it(tmp_path: Path) -> None:
    place = {"GANGQ_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    try:
        done = gangq(tmp_path, "worker", "--embedded", "--once", "--devices", "none", **place)
        assert done.returncode == 0, done.stderr
        status = gangq(tmp_path, "db", "status", "--json", **place)
        assert json.loads(status.stdout)["running"], status
    finally:
        gangq(tmp_path, "db", "stop", **place)


def test_the_command_line_shows_what_was_given_and_no_dsn(tmp_path: Path, dsn: str, client: Client) -> None:
    given = ["worker", "--name", "w7", "--devices", "none", "--silence-s", "9s", "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gangq", *given],
        env={**os.environ, "GANGQ_DSN": dsn},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: [w for w in client.workers(name="w7") if w.state == "live"], "it is registered")
        (worker,) = [entry for entry in procfs.table().values() if entry.ppid == process.pid]
        lines = [
            Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1] for pid in (process.pid, worker.pid)
        ]
        assert lines[0][3].endswith(b"supervisor.py")
        assert lines[0][4:8] == [b"--silence", b"9.0", b"--start", b"600.0"]
        assert [line[-len(given) - 2 :] for line in lines] == [
            [b"-m", b"gangq", *map(str.encode, given)] for _ in lines
        ]
        assert client.predecessor(worker="w7")[0].pid == worker.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert client.workers(name="w7")[0].state == "retired"
    finally:
        process.kill()
        process.wait()


def test_without_a_supervisor_the_worker_is_the_process_itself(tmp_path: Path, dsn: str) -> None:
    done = gangq(tmp_path, "worker", "--once", "--no-supervisor", "--devices", "none", GANGQ_DSN=dsn)
    assert done.returncode == 0, done.stderr


def test_an_unfit_worker_exits_with_88(tmp_path: Path, dsn: str, client: Client) -> None:
    done = gangq(tmp_path, "worker", "--once", "--expect-gpus", "2", "--devices", "none", GANGQ_DSN=dsn)
    assert done.returncode == 88, done.stderr
    assert "GANGQ_EXPECT_GPUS asks for 2" in done.stderr


@pytest.mark.parametrize(("variable", "value"), [("GANGQ_SILENCE_S", "soon"), ("GANGQ_START_S", "0")])
def test_junk_in_the_environment_is_refused_by_name(
    tmp_path: Path, dsn: str, variable: str, value: str
) -> None:
    done = gangq(tmp_path, "worker", "--once", "--devices", "none", **{"GANGQ_DSN": dsn, variable: value})
    assert done.returncode == 2
    assert f"{variable} is '{value}': give a number" in done.stderr
