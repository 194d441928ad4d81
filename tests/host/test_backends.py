"""How one worker is restarted: with programs that record how they were called, and with real ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangq.errors import InvalidInput
from gangq.host import backends, seen
from gangq.host.backends import DockerContainer, RestartCommand, SystemdUnit
from gangq.host.choice import WorkerMap, choose
from gangq.host.commands import run
from gangq.proc import procfs
from gangq.proc.proof import process_identity
from gangq.worker import host_record
from gangq.worker.host_record import DIRECTORY_PREFIX
from process import other_user

_DOCKER = """#!{python}
import json, sys
from pathlib import Path
here = Path({directory!r})
with (here / "calls").open("a") as out:
    print(json.dumps(sys.argv[1:]), file=out)
if sys.argv[1] == "inspect":
    print("WARNING: Error loading config file: permission denied", file=sys.stderr)
    print((here / "pid").read_text())
elif (here / "refuses").exists():
    sys.exit("Error response from daemon: tried to kill container, but did not receive an exit event")
"""

_SYSTEMCTL = """#!{python}
import json, os, signal, sys
from pathlib import Path
here = Path({directory!r})
words = [word for word in sys.argv[1:] if word != "--user"]
with (here / "calls").open("a") as out:
    print(json.dumps(sys.argv[1:]), file=out)
main = (here / "main").read_text()
if words[:2] == ["show", "--property=SubState"]:
    print((here / "state").read_text())
elif words[0] == "show":
    print(main)
elif words[0] == (here / "refuses").read_text():
    sys.exit("Access denied")
elif words[0] == "restart":
    os.kill(int(main), signal.SIGTERM)
elif words[0] == "kill":
    (here / "state").write_text("dead")
    os.kill(int(main), signal.SIGKILL)
"""


class Stub:
    """A program on the PATH that writes down how it was called."""

    def __init__(self, directory: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        program = directory / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text.format(python=sys.executable, directory=str(directory)))
        program.chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", str(program.parent))

    @property
    def calls(self) -> list[list[str]]:
        path = self.directory / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path, "docker", _DOCKER, monkeypatch)
    (tmp_path / "pid").write_text(str(os.getpid()))
    return made


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path, "systemctl", _SYSTEMCTL, monkeypatch)
    put(made, 0)
    return made


def put(systemctl: Stub, main: int, *, refuses: str = "", state: str = "stop-post") -> None:
    """A unit with that main process, a verb that is refused, and its state once it is told to stop."""
    (systemctl.directory / "state").write_text(state)
    (systemctl.directory / "main").write_text(str(main))
    (systemctl.directory / "refuses").write_text(refuses)


@contextlib.contextmanager
def main_process(*, heeds: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """The main process of a unit, that ends by SIGTERM if it heeds that."""
    does = "SIG_DFL" if heeds else "SIG_IGN"
    code = f"import signal, time; signal.signal(15, signal.{does}); print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started
        started.kill()


UNIT = "gangq-worker@0.service"


# Docker


def test_docker_is_asked_to_restart_the_container_with_the_time_before_sigkill(docker: Stub) -> None:
    assert DockerContainer("gangq-gpu-0").restart(15, {}).ok
    assert docker.calls == [
        ["inspect", "--type", "container", "--format", "{{.State.Pid}}", "--", "gangq-gpu-0"],
        ["restart", "-t", "15", "--", "gangq-gpu-0"],
    ]


def test_a_container_that_is_not_running_is_left_alone(docker: Stub) -> None:
    (docker.directory / "pid").write_text("0")
    done = DockerContainer("gangq-gpu-0").restart(1, {})
    assert not done.ok
    assert "docker start gangq-gpu-0" in done.detail
    assert [call[0] for call in docker.calls] == ["inspect"]


def test_what_docker_refuses_is_passed_on(docker: Stub) -> None:
    (docker.directory / "refuses").write_text("")
    done = DockerContainer("gangq-gpu-0").restart(1, {})
    assert not done.ok
    assert "did not receive an exit event" in done.detail
    assert "reboot" in done.detail


def test_without_docker_the_restart_is_false_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = DockerContainer("gangq-gpu-0").restart(1, {})
    assert not done.ok
    assert "docker could not be started" in done.detail


# systemd


@pytest.mark.parametrize("user", [[], ["--user"]])
def test_a_unit_is_restarted_without_waiting_for_its_stop_and_what_reports_its_death_is_not_killed(
    systemctl: Stub, user: list[str]
) -> None:
    with main_process() as main:
        put(systemctl, main.pid)
        done = SystemdUnit(UNIT, user=bool(user)).restart(15, {})
        assert done.ok, done
        assert "in its own time" in done.detail
        assert systemctl.calls == [
            [*user, "show", "--property=MainPID", "--value", "--", UNIT],
            [*user, "restart", "--no-block", "--", UNIT],
            [*user, "show", "--property=SubState", "--value", "--", UNIT],
        ]


def test_a_unit_whose_main_process_leaves_others_that_do_not_stop_is_killed_as_a_whole(
    systemctl: Stub,
) -> None:
    """A worker below a program that is the main process, where the unit does not kill the rest of itself at once."""
    with main_process() as main:
        put(systemctl, main.pid, state="final-sigterm")
        done = SystemdUnit(UNIT).restart(0.5, {})
        assert done.ok
        assert "after SIGKILL" in done.detail
        assert systemctl.calls[-1] == ["kill", "--signal=SIGKILL", "--", UNIT]


def test_a_unit_that_does_not_stop_is_killed_as_a_whole(systemctl: Stub) -> None:
    with main_process(heeds=False) as main:
        put(systemctl, main.pid)
        began = time.monotonic()
        done = SystemdUnit(UNIT).restart(1, {})
        assert time.monotonic() - began >= 1
        assert done.ok
        assert "after SIGKILL, 1 s" in done.detail
        assert systemctl.calls[2:] == [["kill", "--signal=SIGKILL", "--", UNIT]]
        assert main.wait(5) == -signal.SIGKILL


def test_a_unit_that_survives_sigkill_needs_a_reboot(
    systemctl: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_AFTER_KILL_S", 0.2)
    with main_process(heeds=False) as main:
        put(systemctl, main.pid, refuses="kill")
        done = SystemdUnit(UNIT).restart(0.2, {})
        assert not done.ok
        assert f"process {main.pid} of {UNIT} did not end" in done.detail
        assert "Access denied" in done.detail
        assert "reboot" in done.detail


def test_a_unit_that_is_not_running_is_left_alone_because_it_was_stopped_or_ended_for_good(
    systemctl: Stub,
) -> None:
    done = SystemdUnit(UNIT).restart(2, {})
    assert not done.ok
    assert f"systemctl start {UNIT}" in done.detail
    assert "87: reboot" in done.detail
    assert {call[0] for call in systemctl.calls} == {"show"}


def test_what_the_service_manager_refuses_is_passed_on(systemctl: Stub) -> None:
    with main_process() as main:
        put(systemctl, main.pid, refuses="restart")
        done = SystemdUnit(UNIT).restart(2, {})
        assert (done.ok, main.poll()) == (False, None)
        assert "Access denied" in done.detail


def test_without_systemctl_the_restart_is_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = SystemdUnit(UNIT).restart(1, {})
    assert not done.ok
    assert "systemctl could not be started" in done.detail


# Commands


def test_a_command_is_a_list_of_words_and_knows_the_worker(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import os, sys; open({str(out)!r}, 'w').write(repr((sys.argv[1:], os.environ['GANGQ_WORKER'])))"
    backend = RestartCommand([sys.executable, "-c", code, "a b", "$HOME; rm -rf /"])
    assert backend.restart(1, {"GANGQ_WORKER": "w1"}).ok
    assert out.read_text() == repr((["a b", "$HOME; rm -rf /"], "w1"))


def test_a_program_of_the_host_is_told_no_address_of_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGQ_DSN", "secret-one")
    monkeypatch.setenv("PGPASSWORD", "secret-two")
    said = run(["env"], 10, {"GANGQ_WORKER": "w1"}).output
    assert "GANGQ_WORKER=w1" in said
    assert "secret" not in said


def test_a_command_that_fails_is_quoted_with_what_it_said() -> None:
    code = "import sys; print('looking'); sys.exit('no such\\nthing')"
    done = RestartCommand([sys.executable, "-c", code]).restart(1, {})
    assert not done.ok
    assert "ended with 1: looking no such thing" in done.detail


def test_what_a_program_answers_is_kept_apart_from_its_warnings() -> None:
    code = "import sys; print('x' * 3000, 'answer', end=''); print('warning', file=sys.stderr, end='')"
    done = run([sys.executable, "-c", code], 10)
    assert (len(done.output), done.output[-7:], done.errors) == (2000, " answer", "warning")


def test_a_program_whose_output_can_be_kept_nowhere_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    done = RestartCommand(["touch", str(tmp_path / "ran")]).restart(1, {})
    assert not done.ok
    assert done.detail.startswith("touch could not be started: No such file or directory")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("stuck", [True, False], ids=["stuck in the kernel", "another user's, by sudo"])
def test_a_program_that_cannot_be_killed_is_not_said_to_be_killed(
    stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def goes_nowhere(group: int, number: int) -> None:
        left.append(group)
        if not stuck:
            raise PermissionError

    monkeypatch.setattr(os, "killpg", goes_nowhere)
    assert run(["sleep", "60"], 0.1).why == "sleep did not end within 0 s and could not be killed"
    monkeypatch.undo()
    os.killpg(left[0], signal.SIGKILL)


def test_a_program_that_does_not_end_is_killed_with_its_group() -> None:
    began = time.monotonic()
    done = run([sys.executable, "-c", "import os, time; print(os.fork(), flush=True); time.sleep(100)"], 1.0)
    assert time.monotonic() - began < 5
    assert (done.ok, done.code) == (False, None)
    assert "did not end within 1 s" in done.why
    child = max(map(int, done.output.split()))
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < until, f"its child {child} lives"
        time.sleep(0.02)


def test_what_a_command_leaves_in_the_background_lives_and_is_not_waited_for() -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import subprocess, sys; print(subprocess.Popen({sleeper}).pid)"
    began = time.monotonic()
    done = run([sys.executable, "-c", code], 30.0)
    assert done.ok
    assert time.monotonic() - began < 20
    os.kill(int(done.output), signal.SIGKILL)


# Which


@pytest.mark.parametrize(
    "text",
    [
        *(
            "w1",
            "w1=",
            "w1=docker",
            "w1=docker:",
            "=docker:c",
            "w1=podman:c",
            "w1=unit:../x",
            "w1=unit:x.socket",
        ),
        *("w1=docker:-f", "w1=docker:a b", "w1=command:'", "w1=unit:--now"),
    ],
)
def test_a_mapping_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        WorkerMap.parse(text)


@pytest.mark.parametrize("name", ["gangq-worker@node1.example.com", "my.worker", "gangq.service", "target"])
def test_a_unit_without_the_suffix_of_a_service_gets_it(name: str) -> None:
    backend = WorkerMap.parse("*=unit:{worker}").backend(name)
    assert str(backend) == f"systemctl restart {name.removesuffix('.service')}.service"


@pytest.mark.parametrize("name", ["gangq.socket", "gangq.timer", "user.slice", "multi-user.target"])
def test_a_unit_that_is_no_service_is_refused_by_what_it_is(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{name}' is a {name.partition('.')[2]}, and a worker runs as a"):
        WorkerMap.parse(f"w=unit:{name}")


def anywhere(worker: str, identity: object) -> tuple[int, ...]:
    """Sees every worker in this process."""
    del worker, identity
    return (os.getpid(),)


def nowhere(worker: str, identity: object) -> str:
    return f"no {worker} here"


def test_a_mapping_fits_by_name_and_fills_in_the_name(docker: Stub) -> None:
    maps = [WorkerMap.parse("a-*=docker:box-{worker}"), WorkerMap.parse("*=command:sv restart '{worker}'")]
    assert str(choose("a-1", {}, see=anywhere, maps=maps)) == "docker restart box-a-1"
    assert str(choose("b;c d", {}, see=anywhere, maps=maps)) == "sv restart 'b;c d'"
    with pytest.raises(InvalidInput):
        choose("a-$x", {}, see=anywhere, maps=maps)
    assert (
        str(WorkerMap.parse("w=unit:gangq-worker@0").backend("w"))
        == "systemctl restart gangq-worker@0.service"
    )
    assert str(WorkerMap.parse("w=user-unit:x").backend("w")) == "systemctl --user restart x.service"


def test_what_a_worker_registered_is_used_when_nothing_is_mapped(
    systemctl: Stub,
) -> None:
    put(systemctl, os.getpid())
    assert str(choose("w", {"unit": "gangq-worker@0.service"}, see=anywhere)) == (
        "systemctl restart gangq-worker@0.service"
    )
    mine = {"user_unit": "gangq-worker@0.service", "host": {"uid": os.getuid()}}
    assert str(choose("w", mine, see=anywhere)) == "systemctl --user restart gangq-worker@0.service"


def test_a_worker_cannot_have_another_service_restarted_by_saying_it_is_one(
    systemctl: Stub,
) -> None:
    put(systemctl, os.getpid())
    with pytest.raises(InvalidInput, match=r"--trust 'sshd\.service'"):
        choose("w", {"unit": "sshd.service"}, see=anywhere)
    assert "sshd" in str(choose("w", {"unit": "sshd.service"}, see=anywhere, trusted=["ssh*"]))
    with pytest.raises(InvalidInput):
        choose("w", {"unit": "--force"}, see=anywhere)


TRAPS = (
    "webserver=docker:{worker}",
    "webserver=docker:webserver",
    "*=unit:{worker}",
    "*=command:restart {worker}",
)


@pytest.mark.parametrize("text", TRAPS)
def test_what_is_not_seen_on_this_host_is_not_restarted_whatever_maps_say(
    docker: Stub, systemctl: Stub, text: str
) -> None:
    (docker.directory / "pid").write_text("1")
    put(systemctl, 1)
    with pytest.raises(InvalidInput, match="no webserver here"):
        choose("webserver", {}, see=nowhere, maps=[WorkerMap.parse(text)])
    assert not any("restart" in call for call in docker.calls + systemctl.calls)


@pytest.mark.parametrize("text", [*TRAPS[:3], None])
def test_a_unit_or_container_that_does_not_hold_the_worker_is_left_alone(
    docker: Stub, systemctl: Stub, text: str | None
) -> None:
    (docker.directory / "pid").write_text("1")
    put(systemctl, 1)
    maps = [WorkerMap.parse(text)] if text else []
    with pytest.raises(InvalidInput, match="does not belong to the main process"):
        choose("webserver", {"unit": "gangq-worker@0.service"}, see=anywhere, maps=maps)


def test_a_command_without_the_name_in_it_is_the_operators_own_word() -> None:
    found = choose("w", {}, see=nowhere, maps=[WorkerMap.parse("w=command:sv restart w")])
    assert str(found) == "sv restart w"


# Which process is that worker


MARK = "0123456789abcdef"

_WORKER = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from gangq.proc import kernel
from gangq.proc.proof import HostIdentity, process_identity
from gangq.worker import host_record
mark, comm, directory = sys.argv[1:]
process, host = process_identity(os.getpid()), HostIdentity.here()
Path(directory).mkdir(mode=0o700)
host_record.write(Path(directory), "w1", mark, process)
kernel.set_name(comm.encode())
registered = {"mark": mark, "directory": directory, "host": asdict(host), "process": asdict(process)}
print(json.dumps(registered), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def worker_process(
    directory: Path, *, comm: str = procfs.work_name(MARK), inside: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process that says of itself what a worker called w1 does, and what that would register."""
    argv = [*inside, sys.executable, "-c", _WORKER, MARK, comm, str(directory / f"{DIRECTORY_PREFIX}x")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        try:
            yield started, json.loads(started.stdout.readline())
        finally:
            started.kill()


# In a pid namespace of its own, as a container is, and with a directory that only it can see.
def contained(directory: Path) -> tuple[str, ...]:
    mount = f'mount -t tmpfs tmpfs {directory} && exec "$@"'
    namespaces = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
    return (*namespaces, "--mount-proc", "sh", "-c", mount, "sh")


in_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "--pid", "true"]).returncode != 0,
    reason="no namespaces can be made here",
)


def test_a_worker_is_seen_by_its_process_and_what_that_has_recorded(tmp_path: Path) -> None:
    with worker_process(tmp_path) as (started, identity):
        found = seen.lineage("w1", identity)
        assert isinstance(found, tuple)
        assert found[0] == started.pid
        assert os.getpid() in found
        assert "is worker w1" in seen.lineage("webserver", identity)
    assert "no process of this host" in seen.lineage("w1", identity)


@in_namespaces
def test_a_worker_in_a_container_is_seen_by_what_it_has_recorded_there(tmp_path: Path) -> None:
    with worker_process(tmp_path, inside=contained(tmp_path)) as (started, identity):
        assert not Path(identity["directory"]).exists()
        found = seen.lineage("w1", identity)
        assert isinstance(found, tuple)
        assert started.pid in found
        assert found[0] != identity["process"]["pid"]
        assert "is worker w1" in seen.lineage("webserver", identity)


def test_what_is_not_called_as_a_worker_is_none_whatever_its_user_records(tmp_path: Path) -> None:
    with worker_process(tmp_path, comm="nginx") as (_, identity):
        assert "no gangq worker" in seen.lineage("w1", identity)


@pytest.mark.parametrize("record", ["none", "open to others", "another process's", "another mark's"])
def test_what_has_not_recorded_itself_is_no_worker(tmp_path: Path, record: str) -> None:
    with worker_process(tmp_path) as (started, identity):
        directory = Path(identity["directory"])
        if record == "none":
            (directory / "worker").unlink()
        elif record == "open to others":
            directory.chmod(0o755)
        else:
            pid = os.getpid() if record == "another process's" else started.pid
            mark = "f" * 16 if record == "another mark's" else MARK
            host_record.write(directory, "w1", mark, process_identity(pid))
        assert "no gangq worker" in seen.lineage("w1", identity)


def test_what_another_user_has_recorded_of_a_process_makes_it_no_worker(tmp_path: Path) -> None:
    other_user.needed()
    with worker_process(tmp_path) as (_, identity):
        for path in (Path(identity["directory"]), Path(identity["directory"]) / "worker"):
            os.chown(path, other_user.UID, -1)
        forged = {**identity, "host": {**identity["host"], "uid": other_user.UID}}
        for told in (identity, forged):
            assert "no gangq worker" in seen.lineage("w1", told)


def test_a_process_that_only_has_the_pid_is_not_the_worker(tmp_path: Path) -> None:
    with worker_process(tmp_path) as (_, identity):
        for where, field, other in (
            ("process", "start_ticks", identity["process"]["start_ticks"] - 1),
            ("process", "boot_id", "another"),
            ("process", "pid", 1),
            ("host", "pid_namespace", 1),
        ):
            forged = {**identity, where: {**identity[where], field: other}}
            assert isinstance(seen.lineage("w1", forged), str)
    for junk in (None, {}, [], {"host": 1, "process": 2}):
        assert isinstance(seen.lineage("w1", junk), str)  # type: ignore[arg-type]


def test_another_users_unit_is_for_that_users_bouncer() -> None:
    with pytest.raises(InvalidInput, match="4711"):
        choose("w", {"user_unit": "gangq-worker@0.service", "host": {"uid": 4711}}, see=anywhere)


@pytest.mark.parametrize("junk", ["x", ["uid"], 1, None, {"uid": None}, {"uid": "0"}, {}])
def test_junk_that_stands_where_the_host_should_restarts_nothing(junk: object) -> None:
    with pytest.raises(InvalidInput, match="run gangq bounce as that user"):
        choose("w", {"user_unit": "gangq-worker@0.service", "host": junk}, see=anywhere)


@pytest.mark.parametrize("junk", [None, ["a"], "unit", 1, {"unit": 1, "user_unit": []}])
def test_junk_instead_of_an_identity_is_none(junk: Any) -> None:
    with pytest.raises(InvalidInput, match="does not run as a unit"):
        choose("w", junk, see=anywhere)


def test_a_worker_that_is_no_unit_has_to_be_mapped() -> None:
    with pytest.raises(InvalidInput, match="--map NAME=docker:CONTAINER or --map 'w=command:"):
        choose("w", {"mark": "m", "unit": None}, see=anywhere)
