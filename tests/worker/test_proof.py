"""Proof of death: what is found, what is not mistaken for it, and when no claim is made."""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gangq.proc import procfs, proof
from gangq.proc.proof import (
    HostIdentity,
    ProcessIdentity,
    confirm_gone,
    is_same_process,
    process_identity,
)
from gangq.worker.child import Child, Exit
from process import other_user, supervised
from worker.worker_process import eventually

Run = Callable[..., "subprocess.Popen[bytes]"]


def survivors(mark: str, identities: list[ProcessIdentity]) -> list[proof.Survivor]:
    """One reading."""
    return proof._look(mark, identities, uids={os.getuid()}).survivors


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """Random at its beginning, as a worker's: guardians are called by its first eight letters."""
    return f"{secrets.token_hex(4)}-{tmp_path.name}"


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, env={**os.environ, **(env or {})}, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        with process:  # Closes its pipes and waits.
            pass


def test_a_process_is_the_same_only_with_its_start_time_and_boot(run: Run) -> None:
    identity = process_identity(run("sleep", "1000").pid)
    assert is_same_process(identity)
    assert not is_same_process(replace(identity, start_ticks=identity.start_ticks - 1))
    assert not is_same_process(replace(identity, boot_id="another"))


def test_a_pid_without_a_process_has_no_identity() -> None:
    with pytest.raises(ProcessLookupError, match="4194305"):
        process_identity(4194305)


def test_a_zombie_is_dead(run: Run, mark: str) -> None:
    process = run("sleep", "1000", env={"GANGQ_MARK": mark})
    identity = process_identity(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not is_same_process(identity), "the zombie counts as gone")
    os.kill(process.pid, 0)  # Which says that it is alive.
    assert survivors(mark, [identity]) == []


def test_a_zombie_leader_whose_threads_run_on_is_alive(run: Run) -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = run(sys.executable, "-c", code)
    identity = process_identity(process.pid)
    eventually(lambda: " Z " in Path(f"/proc/{process.pid}/stat").read_text(), "it is a zombie")
    assert is_same_process(identity)


def test_a_signal_meant_for_an_earlier_process_does_not_reach_a_later_one_with_its_pid(run: Run) -> None:
    process = run("sleep", "1000")
    meant = procfs.stat(process.pid)
    assert meant is not None
    meant.start_ticks -= 1
    assert procfs.send(meant, signal.SIGKILL) is False
    assert procfs.strike([meant]) == []
    assert process.poll() is None


def test_marked_work_and_what_descends_from_it_is_found(run: Run, mark: str, tmp_path: Path) -> None:
    script = "env -i setsid sh -c 'echo $$ > pid; sleep 1000' & echo; wait"
    shell = run("sh", "-c", script, env={"GANGQ_MARK": f"{mark}/4"}, cwd=tmp_path)
    pid = tmp_path / "pid"
    unmarked = int(eventually(lambda: pid.exists() and pid.read_text(), "the pid is written"))
    found = {survivor.pid: survivor.why for survivor in survivors(mark, [])}
    assert found[shell.pid] == "mark"
    assert found[unmarked] == "descendant"
    assert confirm_gone(mark, [], host=HostIdentity.here(), kill=True).proves_death


def test_the_memory_of_work_that_is_found_otherwise_is_not_read(
    run: Run, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stuck in the kernel and have locked that: then the look would not end."""
    shell = run("sh", "-c", "setsid sh -c 'echo $$ > pid; sleep 1000' & wait", cwd=tmp_path)
    pid = tmp_path / "pid"
    child = int(eventually(lambda: pid.exists() and pid.read_text(), "the child runs"))
    read: list[int] = []
    monkeypatch.setattr(procfs, "mark_of", read.append)
    found = {one.pid: one.why for one in survivors(mark, [process_identity(shell.pid)])}
    assert (found[shell.pid], found[child]) == ("recorded", "descendant")
    assert os.getppid() in read
    assert not found.keys() & {*read}


def test_a_longer_mark_is_somebody_elses(run: Run, mark: str) -> None:
    run("sleep", "1000", env={"GANGQ_MARK": f"{mark}0"})
    run("sleep", "1000", env={"GANGQ_MARK": f"{mark}0/1"})
    assert survivors(mark, []) == []


def test_what_is_left_of_a_recorded_process_group_is_found_and_killed(run: Run, mark: str) -> None:
    # A data loader forked by an inline handler: no mark, an orphan by now, but in the dead worker's group.
    leader = run(
        "sh",
        "-c",
        "sleep 1000 & echo $!; read x",
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert leader.stdout is not None
    assert leader.stdin is not None
    orphan = int(leader.stdout.readline())
    identity = process_identity(leader.pid)
    leader.stdin.close()
    leader.wait()
    # On a busy machine the shell may have forked and not yet become what it starts.
    eventually(lambda: Path(f"/proc/{orphan}/comm").read_text() == "sleep\n", "the shell has become sleep")
    assert [(s.pid, s.why, s.name) for s in survivors(mark, [identity])] == [(orphan, "group", "sleep")]
    # What was in the group before its leader is a stranger.
    assert survivors(mark, [replace(identity, start_ticks=identity.start_ticks + 10**6)]) == []
    evidence = confirm_gone(mark, [identity], host=HostIdentity.here(), kill=True)
    assert evidence.proves_death


def test_a_reused_pid_is_not_taken_for_the_recorded_process(run: Run, mark: str) -> None:
    # It leads a group with a member, whose group number is then the recorded pid as well.
    stranger = run("sh", "-c", "read x | cat", start_new_session=True, stdin=subprocess.PIPE)
    eventually(lambda: sum(e.pgrp == stranger.pid for e in procfs.table().values()) > 1, "it has forked")
    now = process_identity(stranger.pid)
    former = ProcessIdentity(now.pid, now.start_ticks - 100, now.boot_id)
    assert survivors(mark, [former]) == []
    assert confirm_gone(mark, [former], host=HostIdentity.here(), kill=True).proves_death
    assert stranger.poll() is None


def test_a_process_that_was_recorded_before_a_reboot_is_another_one(run: Run, mark: str) -> None:
    identity = process_identity(run("sleep", "1000").pid)
    assert [survivor.why for survivor in survivors(mark, [identity])] == ["recorded"]
    assert survivors(mark, [replace(identity, boot_id="before")]) == []


@pytest.mark.parametrize("name", ["gangq:12345678", procfs.SUPERVISOR_NAME])
def test_a_closed_process_of_another_worker_leaves_no_doubt(
    mark: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def closed(_: int) -> str:
        raise PermissionError

    monkeypatch.setattr(procfs, "mark_of", closed)
    entry = procfs.stat(os.getpid())
    assert entry is not None
    entry.comm = "sleep"
    with pytest.raises(PermissionError):
        proof._carries(entry, mark)
    entry.comm = name
    assert not proof._carries(entry, mark)


def test_survivors_are_no_proof_until_they_are_gone(run: Run, mark: str) -> None:
    process = run("sleep", "1000", env={"GANGQ_MARK": mark})
    identity = process_identity(process.pid)
    host = HostIdentity.here()
    evidence = confirm_gone(mark, [identity], host=host, timeout_s=0.2)
    assert not evidence.proves_death
    assert [survivor.pid for survivor in evidence.survivors] == [process.pid]
    assert process.poll() is None
    assert confirm_gone(mark, [identity], host=host, kill=True).proves_death
    assert process.wait(5) == -signal.SIGKILL
    as_json = json.loads(json.dumps(evidence.as_json()))
    assert as_json["proves_death"] is False
    assert as_json["survivors"][0]["why"] == "recorded"


def test_one_clean_reading_is_no_proof(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = proof.Survivor(1, 1, "late", "mark")
    passes = iter([[], [one], [], []])
    monkeypatch.setattr(proof, "_look", lambda *_, **__: proof._Pass(survivors=next(passes)))
    assert confirm_gone(mark, [], host=HostIdentity.here()).proves_death
    assert list(passes) == []


def test_with_only_some_users_what_is_anothers_is_not_killed(
    run: Run, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run("sleep", "1000", env={"GANGQ_MARK": mark})
    ended: list[str] = []
    monkeypatch.setattr(proof.cgroup, "left_by", lambda _: [str(tmp_path)])
    monkeypatch.setattr(proof.cgroup, "kill", ended.append)
    host, me = HostIdentity.here(), os.getuid()
    evidence = confirm_gone(mark, [], host=host, kill=True, only=[me + 1], timeout_s=0.3)
    assert [survivor.pid for survivor in evidence.survivors] == [process.pid]
    assert (process.poll(), ended) == (None, [])
    assert confirm_gone(mark, [], host=host, kill=True, only=[me]).proves_death
    assert set(ended) == {str(tmp_path)}


@pytest.fixture
def guarded(mark: str, tmp_path: Path) -> Iterator[Child]:
    command = ["sh", "-c", "env -i setsid sleep 1000 & sleep 1000"]
    with Child.start(
        command, dict(os.environ), cwd=tmp_path, log_path=tmp_path / "log", mark=f"{mark}/1"
    ) as child:
        yield child


def killed(mark: str, child: Child) -> Exit:
    identities = [process_identity(child.guardian_pid), process_identity(child.pid)]
    assert confirm_gone(mark, identities, host=HostIdentity.here(), kill=True).proves_death
    ended = child.wait(10)
    assert ended is not None
    return ended


def test_work_under_a_guardian_is_killed_before_the_guardian(mark: str, guarded: Child) -> None:
    ended = killed(mark, guarded)
    # The guardian lived to tell: had it been struck first, the end would be "guardian_lost".
    assert (ended.signal, ended.tree_dead, ended.cause) == (signal.SIGKILL, True, "exit")


def test_a_guardian_that_is_slow_to_tell_is_awaited(
    mark: str, guarded: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_GUARDIAN_S", 5.0)  # However slow this machine is.
    os.kill(guarded.guardian_pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as beside:
        ended = beside.submit(killed, mark, guarded)
        eventually(lambda: psutil.Process(guarded.pid).status() == psutil.STATUS_ZOMBIE, "it is killed")
        time.sleep(0.2)  # Some more looks, at the guardian alone.
        os.kill(guarded.guardian_pid, signal.SIGCONT)
        assert ended.result(10).cause == "exit"


def test_a_guardian_that_is_frozen_is_killed_too(mark: str, guarded: Child) -> None:
    os.kill(guarded.guardian_pid, signal.SIGSTOP)
    assert killed(mark, guarded).cause == "guardian_lost"


def test_another_boot_of_this_machine_is_proof_at_once(run: Run, mark: str) -> None:
    run("sleep", "1000", env={"GANGQ_MARK": mark})
    here = HostIdentity.here()
    assert confirm_gone(mark, [], host=replace(here, boot_id="before")).proves_death is (
        here.machine is not None
    )


def test_another_machine_of_that_name_proves_nothing(mark: str) -> None:
    elsewhere = replace(HostIdentity.here(), boot_id="other", machine="other")
    evidence = confirm_gone(mark, [], host=elsewhere)
    assert not evidence.same_machine
    assert not evidence.proves_death
    assert not confirm_gone(mark, [], host=replace(elsewhere, machine=None)).proves_death


def test_machines_that_do_not_tell_which_they_are_prove_nothing_by_a_reboot(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(HostIdentity.here(), machine=None)
    monkeypatch.setattr(HostIdentity, "here", lambda: here)
    assert not confirm_gone(mark, [], host=replace(here, boot_id="before")).proves_death


def test_another_pid_namespace_proves_nothing(mark: str) -> None:
    evidence = confirm_gone(mark, [], host=replace(HostIdentity.here(), pid_namespace=1))
    assert not evidence.same_namespace
    assert not evidence.proves_death
    assert not confirm_gone(mark, [], host=replace(HostIdentity.here(), pid_namespace=None)).proves_death


def test_a_proc_in_which_this_process_has_another_pid_proves_nothing(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "realpath", lambda _: f"/proc/{os.getpid() + 1}")
    assert not confirm_gone(mark, [], host=HostIdentity.here()).proves_death


def test_who_is_above_a_process_is_told_where_a_reading_makes_two_each_others_parent() -> None:
    """As /proc does when a parent ends during the reading, and its number goes to a child of its child."""

    class Table(dict[int, procfs.Stat]):
        asked = 0

        def get(self, pid: int, default: Any = None) -> Any:
            self.asked += 1
            assert self.asked < 10
            return super().get(pid, default)

    rest = "0 0 0 0 " + "0 " * 30
    pairs = ((7, 8), (8, 7))
    table = Table({pid: procfs.Stat(f"{pid} (a) S {parent} {rest}".encode()) for pid, parent in pairs})
    assert {7, 8} <= procfs.ancestors(table, 7)


def test_whose_a_living_process_is_is_an_error_where_it_cannot_be_read() -> None:
    files = resource.RLIMIT_NOFILE
    limits = resource.getrlimit(files)
    resource.setrlimit(files, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            procfs.user_ids(os.getpid())
    finally:
        resource.setrlimit(files, limits)
    assert procfs.user_ids(os.getpid()) == {os.getuid()}
    assert procfs.user_ids(4194304) == set()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="changing users needs root and setpriv"
)
def test_an_unreadable_process_that_could_be_ours_leaves_the_evidence_incomplete(run: Run, mark: str) -> None:
    # Not dumpable, as after a setuid exec: its environment belongs to root though its user is ours.
    hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); print('hidden', flush=True); time.sleep(1000)"
    look = (
        "import json, sys; from gangq.proc.proof import HostIdentity, ProcessIdentity, confirm_gone\n"
        "ident = [ProcessIdentity(1, int(sys.argv[2]), None)] if int(sys.argv[2]) else []\n"
        "found = confirm_gone(sys.argv[1], ident, host=HostIdentity.here(), timeout_s=0.2)\n"
        "print(json.dumps(found.as_json()))\n"
    )
    # User ids of nobody, and of this run alone.
    as_user = ("setpriv", "--reuid", str(200_000 + os.getpid()), "--regid", "54321", "--clear-groups")
    if subprocess.run([*as_user, sys.executable, "-c", "import gangq.proc.proof"], check=False).returncode:
        pytest.skip("another user cannot run this Python: it lies in a closed directory")
    hidden = run(*as_user, sys.executable, "-c", hide, stdout=subprocess.PIPE)
    assert hidden.stdout is not None
    assert hidden.stdout.readline() == b"hidden\n"

    def evidence(user: tuple[str, ...], earliest: int = 0) -> dict[str, Any]:
        argv = [*user, sys.executable, "-c", look, mark, str(earliest)]
        return json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)

    seen = evidence(as_user)
    assert (seen["unreadable"], seen["complete"], seen["proves_death"]) == ([hidden.pid], False, False)
    other_user = ("setpriv", "--reuid", "199999", "--regid", "54322", "--clear-groups")
    assert evidence(other_user)["proves_death"]
    # Born before the first process of the incarnation, it cannot be its work.
    assert evidence(as_user, process_identity(hidden.pid).start_ticks + 1)["proves_death"]


_HIDDEN = """
import ctypes, json, os, sys, time
from dataclasses import replace
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity, confirm_gone, process_identity

def fork(uid, dumpable, then):
    if (pid := os.fork()) == 0:
        os.setgroups([groups[0]] if uid != worker and groups else [])
        os.setgid(uid)
        os.setuid(uid)
        ctypes.CDLL(None).prctl(4, dumpable)
        then()
        os._exit(0)
    return pid

def ask():
    found = confirm_gone("of-nobody", [process], host=host, timeout_s=0.1)
    print(json.dumps([found.proves_death, found.hidden]), flush=True)

worker, asker, dumpable, *groups = map(int, sys.argv[1:])
lives = fork(worker, dumpable, lambda: time.sleep(60))
process, host = process_identity(lives), replace(HostIdentity.here(), uid=worker)
os.waitpid(fork(asker, 1, ask), 0)
os.kill(lives, 9)
os.waitpid(lives, 0)
os.waitpid(fork(asker, 1, ask), 0)
"""


@pytest.mark.parametrize(
    ("options", "asker", "dumpable", "groups", "sees"),
    [
        ("hidepid=0", 1002, 0, (), True),
        ("hidepid=2", 1001, 0, (), False),
        ("hidepid=1", 1001, 0, (), False),
        ("hidepid=4", 1001, 0, (), False),
        ("hidepid=2", 1002, 1, (), False),
        ("hidepid=2", 0, 0, (), True),
        ("hidepid=2,gid=77", 1002, 0, (77,), True),
        ("hidepid=2,gid=77", 1002, 0, (78,), False),
        ("hidepid=4,gid=77", 1002, 0, (77,), False),
    ],
)
def test_where_processes_are_hidden_no_death_is_proven(
    options: str, asker: int, dumpable: int, groups: tuple[int, ...], sees: bool
) -> None:
    """A worker is closed to its own user, so under hidepid it is hidden from that user, too."""
    other_user.needed()
    supervised.needs_namespaces()
    mounted = f'mount -t proc -o {options} proc /proc && exec "$@"'
    words = map(str, (1001, asker, dumpable, *groups))
    argv = [*supervised.AS_PID_1, "sh", "-c", mounted, "sh", sys.executable, "-c", _HIDDEN, *words]
    said = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.splitlines()
    assert [json.loads(line) for line in said] == [[False, not sees], [sees, not sees]]


_BIG = (
    "import mmap, time; m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    "m.madvise(mmap.MADV_NOHUGEPAGE)\n"
    "for at in range(0, 1 << 30, 4096): m[at] = 1\n"
    "print('big', flush=True); time.sleep(1000)"
)


def test_what_is_merely_exiting_is_waited_for_and_not_called_unkillable(run: Run) -> None:
    big = run(sys.executable, "-c", _BIG, stdout=subprocess.PIPE)
    assert big.stdout is not None
    assert big.stdout.readline() == b"big\n"
    target = procfs.stat(big.pid)
    assert target is not None
    assert not procfs.dying(big.pid)
    assert procfs.await_end([target]) == [], "nobody has killed it: not waited for"
    assert procfs.same(target) is not None
    big.kill()
    assert procfs.dying(big.pid), "a gigabyte is given back in no time: take more"
    assert procfs.await_end([target]) == []
    assert procfs.same(target) is None


def test_only_state_d_for_a_second_on_end_is_unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    seen: list[tuple[bool, str]] = []
    monkeypatch.setattr(procfs, "tids", lambda pid: [pid])
    monkeypatch.setattr(procfs, "_end_of_thread", lambda pid, tid: seen[0])
    now = [100.0]
    monkeypatch.setattr(procfs.time, "monotonic", lambda: now[0])

    def looks(*states: tuple[bool, str]) -> bool:
        found = procfs.StuckWatch()
        stuck: list[procfs.Stat] = []
        for state in states:
            seen[:] = [state]
            stuck = found.stuck([me])
            now[0] += 0.5
        return stuck == [me]

    waits, runs, alive = (True, "D"), (True, "R"), (False, "D")
    assert looks(waits, waits, waits)
    assert not looks(waits, waits)
    assert not looks(waits, runs, waits)
    assert not looks(runs, runs, runs)
    assert not looks(alive, alive, alive), "SIGKILL has not reached it"


JUNK = [None, 1, "x", [], ["pid"], {}, {"pid": 1}]
NO_PROCESS = [
    *JUNK,
    *(
        {"pid": pid, "start_ticks": 1, "boot_id": None}
        for pid in ("1", "../1", 0, -1, 1 << 40, True, None, 1.0)
    ),
    *({"pid": 5, "start_ticks": ticks, "boot_id": None} for ticks in ("x", None, -1, [])),
    *({"pid": 5, "start_ticks": 1, "boot_id": boot_id} for boot_id in (1, [], {})),
]
WRONG: list[dict[str, Any]] = [
    {"boot_id": 1},
    {"machine": []},
    {"pid_namespace": "1"},
    {"uid": None},
    {"uid": "0"},
]
NO_HOST = [
    *JUNK,
    *({"boot_id": "b", "machine": "m", "pid_namespace": 1, "uid": 1, **wrong} for wrong in WRONG),
]


def test_what_is_no_identity_is_none() -> None:
    assert [ProcessIdentity.of(junk) for junk in NO_PROCESS] == [None] * len(NO_PROCESS)
    assert [HostIdentity.of(junk) for junk in NO_HOST] == [None] * len(NO_HOST)


def test_an_identity_is_read_back_as_it_was_recorded() -> None:
    process, host = process_identity(os.getpid()), HostIdentity.here()
    assert ProcessIdentity.of(json.loads(json.dumps({**asdict(process), "more": 1}))) == process
    assert HostIdentity.of(json.loads(json.dumps(asdict(host)))) == host


def test_the_host_identity_is_stable_and_does_not_hand_out_the_machine_id() -> None:
    assert HostIdentity.here() == HostIdentity.here()
    path = Path("/etc/machine-id")
    if path.exists():
        assert path.read_text().strip() not in str(HostIdentity.here())


def test_a_file_of_many_pages_is_read_whole_and_no_further_than_asked() -> None:
    """The kernel gives a page of it at a time."""
    whole = procfs.read("/proc/self/smaps", 1 << 24)
    assert whole is not None
    assert len(whole) > 2 * procfs.PAGE
    assert whole.endswith(b"\n")
    assert b"[stack]" in whole
    some = procfs.read("/proc/self/smaps", 3 * procfs.PAGE)
    assert some is not None
    assert procfs.PAGE < len(some) <= 3 * procfs.PAGE
    assert procfs.read("/proc/self/nothing") is None
