"""What a command starts and lets go of ends all the same: in a control group of the worker's, and without one.

Needs root, which becomes a user that is not root, and which makes a control group of version 2 and hands it to that
user. CI runs as root (``.ci/run``); elsewhere, and where no such group can be made, these tests are skipped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from gangq.proc import cgroup, procfs
from process import other_user
from process.supervised import command_line
from process.unprivileged import UnprivilegedWorkers
from worker.worker_process import eventually, until_state

_DAEMON = """
import os, sys, time
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
os.execve("/bin/sleep", ["sleep", "601"], {})
"""

_LOOKS_BACK = """
import os, subprocess, sys, time
daemon, place = sys.argv[1:]
def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
if os.path.exists(f"{place}/daemon"):
    seen = state(open(f"{place}/daemon").read())
    with open(f"{place}/writing", "w") as file:
        file.write(seen)
    os.rename(f"{place}/writing", f"{place}/seen")  # Whoever sees the file sees its text.
daemon = daemon.replace("os.execve", f"open('{place}/daemon', 'w').write(str(os.getpid())); os.execve")
subprocess.run([sys.executable, "-c", daemon])
time.sleep(600)
"""


@pytest.fixture
def unit(unprivileged: UnprivilegedWorkers) -> Iterator[UnprivilegedWorkers]:
    """Workers in a control group that is delegated to their user, as in a unit with ``Delegate=yes``."""
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    place = next((Path(words[1]) for words in mounted if words[2] == "cgroup2"), Path("/nowhere"))
    place /= f"gangq-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as problem:
        pytest.skip(f"no control group of version 2 can be made here: {problem}")
    try:
        if not (place / "cgroup.kill").exists():
            pytest.skip("this kernel is older than 5.14: no control group can be ended at once")
        for path in (
            place,
            place / "cgroup.procs",
            place / "cgroup.subtree_control",
            place / "cgroup.threads",
        ):
            os.chown(path, other_user.UID, other_user.UID)
        unprivileged.cgroup = place
        yield unprivileged
    finally:
        unprivileged.close()
        cgroup.kill(str(place))
        eventually(lambda: cgroup.remove(str(place)), "the control group is empty")


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["command", "isolated handler"])
def test_a_daemon_that_cleared_its_environment_is_dead_before_its_job_runs_again_whoever_was_killed(
    unit: UnprivilegedWorkers, client: Client, isolated: bool
) -> None:
    unit.worker("w1")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _LOOKS_BACK, _DAEMON, str(unit.directory)]
    task = "isolated" if isolated else "command"
    job = client.submit(task=task, payloads=[{"argv": argv}], max_crashes=3)[0]
    (daemon,) = eventually(lambda: unit.processes("sleep"), "the daemon runs", 40)
    assert not Path(f"/proc/{daemon.pid}/environ").read_bytes()
    (attempt,) = (path for path in unit.cgroup.iterdir() if path.is_dir())
    assert daemon.pid in cgroup.members(str(attempt))
    assert f"-{job}-{client.job(id=job).token}" in attempt.name
    # At one instant, as nobody's cgroup.kill would: the daemon stays, and belongs to nobody.
    victims = [*unit.processes("gangq-super"), *unit.processes("gangq:")]
    # Supervisor, worker and guardian; and what a handler is forked from.
    assert len(victims) == 3 + isolated
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            procfs.send(victim, sent)
    eventually(lambda: all(procfs.same(victim) is None for victim in victims), "all of them are dead")
    assert procfs.same(daemon) is not None
    unit.worker("w1")
    assert procfs.same(daemon) is None
    assert not attempt.exists()
    eventually((unit.directory / "seen").exists, "the job runs again", 40)
    assert (unit.directory / "seen").read_text() in ("gone", "Z")
    assert client.job(id=job).crashes == 1


def test_in_a_control_group_a_daemon_ends_although_its_guardian_was_killed(
    unit: UnprivilegedWorkers, client: Client
) -> None:
    # Without a supervisor nobody adopts what the guardian leaves.
    unit.worker("w1", "--no-supervisor")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _LOOKS_BACK, _DAEMON, str(unit.directory)]
    job = client.submit(task="command", payloads=[{"argv": argv}], max_attempts=1, max_crashes=1)[0]
    (daemon,) = eventually(lambda: unit.processes("sleep"), "the daemon runs", 40)
    procfs.strike([e for e in unit.processes("gangq:") if b"guardian.py" in command_line(e.pid)])
    until_state(client, job, "failed", timeout=40)
    assert procfs.same(daemon) is None
    assert not [path for path in unit.cgroup.iterdir() if path.is_dir()]


def test_the_control_group_of_a_command_is_removed_with_all_that_is_in_it(
    unit: UnprivilegedWorkers, client: Client
) -> None:
    unit.worker("w1")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _DAEMON]
    job = client.submit(task="command", payloads=[{"argv": argv}])[0]
    until_state(client, job, "done", timeout=40)
    assert not unit.processes("sleep")
    assert not [path for path in unit.cgroup.iterdir() if path.is_dir()]


def test_a_daemon_that_cleared_its_environment_ends_although_its_guardian_was_killed(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    unprivileged.worker("w1")
    script = (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {_DAEMON!r}]); time.sleep(600)"
    )
    job = client.submit(
        task="command", payloads=[{"argv": [sys.executable, "-c", script]}], max_attempts=1, max_crashes=1
    )[0]
    (daemon,) = eventually(lambda: unprivileged.processes("sleep"), "the daemon runs", 40)
    assert not Path(f"/proc/{daemon.pid}/environ").read_bytes()
    procfs.strike([e for e in unprivileged.processes("gangq:") if b"guardian.py" in command_line(e.pid)])
    until_state(client, job, "failed", timeout=40)
    assert procfs.same(daemon) is None


@pytest.mark.parametrize("role", ["server", "guardian"])
def test_what_a_process_says_of_itself_spares_it_nothing(
    unprivileged: UnprivilegedWorkers, client: Client, role: str
) -> None:
    worker = unprivileged.worker("w1")
    argv = ["sh", "-c", "setsid sleep 602 & sleep 603"]
    job = client.submit(task="command", payloads=[{"argv": argv, "env": {"GANGQ_ROLE": role}}])[0]
    left = eventually(lambda: len(found := unprivileged.processes("sleep")) == 2 and found, "both run", 40)
    assert not any(b"GANGQ_ROLE" in Path(f"/proc/{entry.pid}/environ").read_bytes() for entry in left)
    assert client.job(id=job).state == "running"
    procfs.strike(unprivileged.processes("gangq:"))
    worker.wait(40)
    assert [entry for entry in left if procfs.same(entry)] == []
