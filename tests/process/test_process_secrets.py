"""What a job learns of its worker's database, as a user that is not root; and what that user can still prove."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gangq.client import Client
from gangq.proc import cgroup, procfs
from process import other_user, snoop
from process.supervised import command_line
from process.wire import Wire
from worker.worker_process import eventually, short_leases, until_state

SECRET = "S3CRET-in-the-address"
ALSO = "S3CRET-of-libpq"
_TASKS = """
import json, os, subprocess, sys, time
import gangq
app = gangq.App()

@app.task(isolate=True)
def isolated(ctx, argv):
    subprocess.run(argv, check=True)
    return sorted(name for name, value in os.environ.items() if "S3CRET" in value)

@app.task
def inline(ctx):
    return os.environ["GANGQ_DSN"].count("S3CRET")

@app.task
def freezes(ctx, ready):
    open(ready, "w").close()
    import re
    re.match(r"(a+)+$", "a" * 60 + "b")

@app.task
def forks(ctx, ready):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    open(ready, "w").close()
    time.sleep(600)
"""


class House:
    """Workers of a user that is not root, in a directory of that user's."""

    def __init__(self, directory: Path, dsn: str, client: Client) -> None:
        self.directory = directory
        self.dsn = dsn
        self.client = client
        self.cgroup: Path | None = None
        """The control group that workers are started in."""
        self.started: list[subprocess.Popen[bytes]] = []
        self.log_path = directory / "log"
        (directory / "tasks_here.py").write_text(_TASKS)
        for path in (directory / "tasks_here.py",):
            os.chown(path, other_user.UID, other_user.UID)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def run(self, *argv: str, stdin: Path = Path(os.devnull), **environ: str) -> subprocess.Popen[bytes]:
        enter = []
        if self.cgroup is not None:
            enter = ["sh", "-c", f'echo $$ > {self.cgroup}/cgroup.procs && exec "$0" "$@"']
        with self.log_path.open("ab") as out, stdin.open("rb") as given:
            process = subprocess.Popen(
                [*enter, *other_user.prefix(), *argv],
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith(("GANGQ_", "PG", "XDG_"))},
                    "HOME": str(self.directory),
                    "XDG_RUNTIME_DIR": str(self.directory),
                    "GANGQ_DSN": self.dsn,
                    "PGPASSWORD": ALSO,
                    **environ,
                },
                cwd=self.directory,
                stdin=given,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def worker(
        self, name: str, *options: str, stdin: Path = Path(os.devnull), **environ: str
    ) -> subprocess.Popen[bytes]:
        """A worker under its supervisor, once it has registered."""
        gangq = str(Path(sys.executable).with_name("gangq"))
        before = self.log.count(" registered ") if self.log_path.exists() else 0
        process = self.run(
            gangq,
            *("worker", "tasks_here:app", "--name", name, "--devices", "none", *options),
            stdin=stdin,
            **environ,
        )
        eventually(
            lambda: self.log.count(" registered ") > before or process.poll() is not None,
            f"{name} has registered\n{self.log_path.read_text()}",
            40,
        )
        assert process.poll() is None, self.log
        return process

    def found_by(self, job_id: int, answer: Path, state: str = "done") -> dict[str, Any]:
        until_state(self.client, job_id, state, "failed", timeout=60)
        job = self.client.job(id=job_id)
        assert job.state == state, f"{job}\n{self.log}"
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        mine = [e for e in procfs.table().values() if other_user.UID in procfs.user_ids(e.pid)]
        procfs.strike(mine)
        print(f"---- log\n{self.log_path.read_text() if self.log_path.exists() else ''}")


@pytest.fixture
def house(dsn: str, client: Client) -> Iterator[House]:
    other_user.needed()
    short_leases(client, lease_s=60, heartbeat_s=1, grace_s=2)
    client.set_queue(name="other")
    with other_user.directory() as directory:
        given = conninfo_to_dict(dsn)
        upstream = f"{given['host']}/.s.PGSQL.{given.get('port', '5432')}"
        with Wire(upstream, directory / "wire") as wire:
            os.chmod(wire.directory, 0o755)
            os.chmod(wire.directory / ".s.PGSQL.5432", 0o666)
            address = make_conninfo(
                host=str(wire.directory),
                user=given["user"],
                dbname=given["dbname"],
                password=SECRET,
                sslmode="disable",
                gssencmode="disable",
            )
            running = House(directory, address, client)
            try:
                yield running
            finally:
                running.close()


def snooping(secret: str, answer: Path) -> list[str]:
    return [sys.executable, "-I", "-S", snoop.__file__, secret[::-1], str(answer)]


def names(found: list[list[Any]]) -> set[str]:
    return {str(name).partition(":")[0] for _, name in found}


def test_a_job_finds_the_password_nowhere_in_worker_supervisor_or_guardian(
    house: House, client: Client
) -> None:
    house.worker("w1", "--light", "2")
    decoy = house.run("sleep", "600", DECOY="S3CRET-of-a-decoy", GANGQ_DSN="", PGPASSWORD="")
    answers = [house.directory / f"answer{n}" for n in range(4)]

    def seen_by(secret: str, answer: Path) -> dict[str, Any]:
        job = client.submit(task="command", payloads=[{"argv": snooping(secret, answer)}])[0]
        return house.found_by(job, answer)

    seen = seen_by("S3CRET-of-a-decoy", answers[0])
    assert [pid for pid, _, place in seen["found"] if place == "environ"] == [decoy.pid], "it can look"
    for secret, answer in ((SECRET, answers[1]), (ALSO, answers[2])):
        seen = seen_by(secret, answer)
        assert seen["found"] == []
        assert {"gangq", "gangq-super"} <= names(seen["closed"])
        assert not {"gangq", "gangq-super"} & names(seen["open"])
    isolated = client.submit(task="isolated", payloads=[{"argv": snooping(SECRET, answers[3])}])[0]
    seen = house.found_by(isolated, answers[3])
    assert seen["found"] == []
    assert client.job(id=isolated).result == []


def test_an_inline_handler_is_the_applications_own_code_and_finds_the_address(
    house: House, client: Client
) -> None:
    house.worker("w1")
    job = client.submit(task="inline")[0]
    assert until_state(client, job, "done").result == 1


@pytest.mark.parametrize("command", ["systemd report-death --name w1 --wait", "tick --loop", "bounce --loop"])
def test_what_runs_beside_workers_as_their_user_keeps_the_address_to_itself(
    house: House, command: str
) -> None:
    """The first as long as the database is away; the others for ever, where everything runs as one user."""
    gangq = str(Path(sys.executable).with_name("gangq"))
    away = make_conninfo(house.dsn, host=str(house.directory / "nowhere"))
    process = house.run(gangq, *command.split(), GANGQ_DSN=away if "--wait" in command else house.dsn)

    def closed() -> bool:
        """All of this is root's then."""
        begun = b"python" in command_line(process.pid).partition(b"\0")[0]
        return begun and os.stat(f"/proc/{process.pid}/environ").st_uid == 0

    eventually(closed, f"it is closed\n{house.log}", 15)


def test_the_address_given_on_the_command_line_does_not_stay_there(house: House, client: Client) -> None:
    house.worker("w1", "--dsn", house.dsn, GANGQ_DSN="")
    answer = house.directory / "answer"
    job = client.submit(task="command", payloads=[{"argv": snooping(SECRET, answer)}])[0]
    assert house.found_by(job, answer)["found"] == []


@pytest.mark.parametrize("way", ["descriptor", "credential", "environment"])
def test_a_job_that_watches_other_workers_start_and_die_finds_the_password_in_nothing_but_an_environment(
    house: House, client: Client, way: str
) -> None:
    given = house.directory / "given"
    given.mkdir()
    (given / "dsn").write_text(house.dsn)
    # Root's, as what StandardInput=file: names in a unit; a credential is the unit's own user's.
    (given / "dsn").chmod(0o644 if way == "credential" else 0o600)
    environ: dict[str, Any] = {"GANGQ_DSN": "", "PGPASSWORD": ""}
    if way == "descriptor":
        environ |= {"stdin": given / "dsn", "GANGQ_DSN_FD": "0"}
    elif way == "credential":
        environ |= {"CREDENTIALS_DIRECTORY": str(given)}
    else:
        environ = {}
    house.worker("a", stdin=given / "dsn", GANGQ_DSN="", PGPASSWORD="", GANGQ_DSN_FD="0")
    answer, enough = house.directory / "answer", house.directory / "enough"
    job = client.submit(task="command", payloads=[{"argv": [*snooping(SECRET, answer), str(enough)]}])[0]
    until_state(client, job, "running")
    eventually(
        lambda: any(b"snoop.py" in command_line(e.pid) for e in processes_of(house, "python")), "it looks"
    )
    decoy = house.run("sleep", "2", PGPASSWORD=SECRET, GANGQ_DSN="")
    for name in ("b", "c"):
        before = {entry.pid for entry in processes_of(house, "gangq:")}
        house.worker(name, "--queue", "other", **environ)
        (born,) = [e for e in processes_of(house, "gangq:") if e.pid not in before]
    reports = house.log.count("worker_ended")
    procfs.strike([born])
    eventually(lambda: house.log.count("worker_ended") > reports, "its supervisor has reported it", 20)
    assert "report_skipped" not in house.log
    decoy.wait(10)
    enough.touch()
    found = house.found_by(job, answer)["found"]
    print(f"---- found: {json.dumps(found, indent=1)}")
    assert found.pop(f"environ of sleep {decoy.pid}") > 1, "it can look"
    if way == "environment":
        # From the start of its interpreter until its first line.
        found = {where: s for where, s in found.items() if not where.startswith("environ of ")}
    assert found == {}


def processes_of(house: House, name: str) -> list[procfs.Stat]:
    """What of that user is called so."""
    return [
        entry
        for entry in procfs.table().values()
        if entry.comm.startswith(name) and entry.alive and other_user.UID in procfs.user_ids(entry.pid)
    ]


def test_a_successor_proves_its_predecessor_dead_beside_workers_whose_memory_it_cannot_read(
    house: House, client: Client
) -> None:
    victim = house.worker("w1")
    killed = [entry.pid for entry in processes_of(house, "gangq")]
    house.worker("w2", "--queue", "other")
    job = client.submit(task="command", payloads=[{"argv": ["sleep", "600"]}])[0]
    until_state(client, job, "running")
    eventually(lambda: processes_of(house, "sleep"), "the command runs")
    guardians = [e for e in processes_of(house, "gangq:") if b"guardian.py" in command_line(e.pid)]
    assert len(guardians) == 1
    (at_work,) = processes_of(house, "sleep")
    # The supervisor, the worker and the guardian at once: nobody is left to end the command or to report.
    procfs.strike([e for pid in killed if (e := procfs.stat(pid))] + guardians)
    victim.wait(10)
    house.worker("w1")
    assert "predecessor_reported_dead" in house.log
    assert procfs.same(at_work) is None
    assert client.job(id=job).state != "failed"


def mark_of(db: psycopg.Connection[dict[str, Any]], worker: str) -> str:
    """Of its latest incarnation."""
    row = db.execute(
        "select identity ->> 'mark' as mark from gangq.incarnations where name = %s order by id desc limit 1",
        [worker],
    ).fetchone()
    assert row is not None
    return str(row["mark"])


def test_what_a_handler_forked_is_found_although_its_memory_cannot_be_read(
    house: House, client: Client, db: psycopg.Connection[dict[str, Any]]
) -> None:
    victim = house.worker("w1")
    house.worker("w2", "--queue", "other")
    ready = house.directory / "ready"
    job = client.submit(task="forks", payloads=[{"ready": str(ready)}])[0]
    eventually(ready.exists, "the handler has forked")
    forked = processes_of(house, procfs.work_name(mark_of(db, "w1")))
    assert len(forked) == 2
    # Not through its supervisor: that would end the whole tree.
    procfs.strike([entry for entry in processes_of(house, "gangq-super") if entry.pid == victim.pid])
    victim.wait(10)
    house.worker("w1")
    assert all(procfs.same(entry) is None for entry in forked)
    assert until_state(client, job, "running", "scheduled", "pending").crashes == 1


def test_a_frozen_worker_is_found_killed_and_its_stacks_are_kept(house: House, client: Client) -> None:
    worker = house.worker("w1", "--silence-s", "2")
    job = client.submit(task="freezes", payloads=[{"ready": str(house.directory / "ready")}])[0]
    assert worker.wait(40) == 80
    (trip,) = client.trips(job_id=job)
    assert "in freezes" in json.dumps(trip.evidence)


_DAEMON = """
import os, sys, time
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
os.execve("/bin/sleep", ["sleep", "601"], {})
"""


@pytest.fixture
def unit(house: House) -> Iterator[House]:
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
        house.cgroup = place
        yield house
    finally:
        house.close()
        cgroup.kill(str(place))
        eventually(lambda: cgroup.remove(str(place)), "the control group is empty")


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


@pytest.mark.parametrize("isolated", [False, True], ids=["command", "isolated handler"])
def test_a_daemon_that_cleared_its_environment_is_dead_before_its_job_runs_again_whoever_was_killed(
    unit: House, client: Client, isolated: bool
) -> None:
    unit.worker("w1")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _LOOKS_BACK, _DAEMON, str(unit.directory)]
    task = "isolated" if isolated else "command"
    job = client.submit(task=task, payloads=[{"argv": argv}], max_crashes=3)[0]
    (daemon,) = eventually(lambda: processes_of(unit, "sleep"), "the daemon runs", 40)
    assert not Path(f"/proc/{daemon.pid}/environ").read_bytes()
    (attempt,) = (path for path in unit.cgroup.iterdir() if path.is_dir())
    assert daemon.pid in cgroup.members(str(attempt))
    assert f"-{job}-{client.job(id=job).token}" in attempt.name
    # At one instant, as nobody's cgroup.kill would: the daemon stays, and belongs to nobody.
    victims = [*processes_of(unit, "gangq-super"), *processes_of(unit, "gangq:")]
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
    unit: House, client: Client
) -> None:
    # Without a supervisor nobody adopts what the guardian leaves.
    unit.worker("w1", "--no-supervisor")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _LOOKS_BACK, _DAEMON, str(unit.directory)]
    job = client.submit(task="command", payloads=[{"argv": argv}], max_attempts=1, max_crashes=1)[0]
    (daemon,) = eventually(lambda: processes_of(unit, "sleep"), "the daemon runs", 40)
    procfs.strike([e for e in processes_of(unit, "gangq:") if b"guardian.py" in command_line(e.pid)])
    until_state(client, job, "failed", timeout=40)
    assert procfs.same(daemon) is None
    assert not [path for path in unit.cgroup.iterdir() if path.is_dir()]


def test_the_control_group_of_a_command_is_removed_with_all_that_is_in_it(
    unit: House, client: Client
) -> None:
    unit.worker("w1")
    assert unit.cgroup is not None
    argv = [sys.executable, "-c", _DAEMON]
    job = client.submit(task="command", payloads=[{"argv": argv}])[0]
    until_state(client, job, "done", timeout=40)
    assert not processes_of(unit, "sleep")
    assert not [path for path in unit.cgroup.iterdir() if path.is_dir()]


def test_a_daemon_that_cleared_its_environment_ends_although_its_guardian_was_killed(
    house: House, client: Client
) -> None:
    house.worker("w1")
    script = (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {_DAEMON!r}]); time.sleep(600)"
    )
    job = client.submit(
        task="command", payloads=[{"argv": [sys.executable, "-c", script]}], max_attempts=1, max_crashes=1
    )[0]
    (daemon,) = eventually(lambda: processes_of(house, "sleep"), "the daemon runs", 40)
    assert not Path(f"/proc/{daemon.pid}/environ").read_bytes()
    procfs.strike([e for e in processes_of(house, "gangq:") if b"guardian.py" in command_line(e.pid)])
    until_state(client, job, "failed", timeout=40)
    assert procfs.same(daemon) is None


@pytest.mark.parametrize("role", ["server", "guardian"])
def test_what_a_process_says_of_itself_spares_it_nothing(house: House, client: Client, role: str) -> None:
    worker = house.worker("w1")
    argv = ["sh", "-c", "setsid sleep 602 & sleep 603"]
    job = client.submit(task="command", payloads=[{"argv": argv, "env": {"GANGQ_ROLE": role}}])[0]
    left = eventually(lambda: len(found := processes_of(house, "sleep")) == 2 and found, "both run", 40)
    assert not any(b"GANGQ_ROLE" in Path(f"/proc/{entry.pid}/environ").read_bytes() for entry in left)
    assert client.job(id=job).state == "running"
    procfs.strike(processes_of(house, "gangq:"))
    worker.wait(40)
    assert [entry for entry in left if procfs.same(entry)] == []
