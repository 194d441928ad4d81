"""Real workers that fall silent, a real database that flags them, and the host that restarts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli.cli_process import eventually, finished, objects, ok, running
from gangq.client import Client
from gangq.client.rows import FlaggedRow
from gangq.embedded import Server
from gangq.errors import Busy, DatabaseUnreachable, GangqError, IncarnationEnded, InvalidInput, NotAllowed
from gangq.host import deaths, seen
from gangq.host.backends import RestartCommand, Restarted
from gangq.host.bouncer import Action, Bouncer, Prover
from gangq.host.choice import choose
from gangq.host.deaths import Proof
from gangq.proc import procfs
from gangq.proc.proof import Evidence, HostIdentity, Survivor, process_identity
from gangq.worker import host_record
from gangq.worker.host_record import DIRECTORY_PREFIX
from gangq.worker.session import clean_stop_reason
from process import other_user, supervised
from worker.worker_process import Fleet, fleet_of, short_leases

HOST = socket.gethostname()
FLAG_S = 1.0
JUNK_HOSTS: tuple[Any, ...] = ("x", [], 1)
JUNK_PIDS: tuple[Any, ...] = ("1", "../1", None, -1, 0, True, 1 << 40, [])

_HANG = """
@app.task
def hang(ctx, gate):
    if not Path(gate).exists():
        Path(gate).touch()
        time.sleep(120)
    return "done"
"""

# Starts a worker in the background, as a service manager that is no systemd would; its pid goes to a file.
_START = """
import subprocess, sys
from pathlib import Path
with open({log!r}, "ab") as log:
    worker = subprocess.Popen({argv!r}, cwd={cwd!r}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True)
with Path({pids!r}).open("a") as out:
    print(worker.pid, file=out)
"""


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client, lease_s=60, flag_after_s=FLAG_S, tick_s=0.5)
    with fleet_of(dsn, tmp_path) as made:
        made.define(_HANG)
        yield made


@pytest.fixture
def start(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A command line that starts worker w1 again; what it has started is killed at the end."""
    program, pids = tmp_path / "start.py", tmp_path / "pids"
    argv = [
        sys.executable,
        "-m",
        "gangq",
        "worker",
        "tasks",
        "--name",
        "w1",
        "--devices",
        "none",
        "--no-supervisor",
    ]
    program.write_text(
        _START.format(log=str(tmp_path / "again.log"), argv=argv, cwd=str(tmp_path), pids=str(pids))
    )
    monkeypatch.setenv("TEST_DSN", dsn)
    yield f"{sys.executable} {program}"
    for pid in pids.read_text().split() if pids.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), signal.SIGKILL)
    again = tmp_path / "again.log"
    print(again.read_text() if again.exists() else "")


def frozen(
    fleet: Fleet, client: Client, tmp_path: Path, name: str = "w1", **more: Any
) -> tuple[Any, FlaggedRow, int]:
    """A worker that was stopped while it held a job, its flag, and the job."""
    gate = tmp_path / f"gate-{name}"
    worker = fleet.start(name, **more)
    job = client.submit(task="hang", payloads=[{"gate": str(gate)}])[0]
    eventually(gate.exists, f"{name} runs job {job}: {worker.log}")
    worker.signal(signal.SIGSTOP)
    return worker, flag_of(client, name), job


def flag_of(client: Client, name: str) -> FlaggedRow:
    def look() -> list[FlaggedRow]:
        client.tick(force=True)
        return [flag for flag in client.flagged() if flag.worker == name]

    (found,) = eventually(look, f"{name} is flagged")
    return found


def bounce(dsn: str, *args: object) -> tuple[int, list[dict[str, Any]], str]:
    """gangq bounce --once as a process of its own: its exit code, its answers, what it said."""
    done = finished(dsn, "bounce", "--once", "--json", *args, TEST_DSN=dsn)
    return done.returncode, objects(done.stdout), done.stderr


def events(db: psycopg.Connection[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return db.execute("select * from gangq.events where kind = %s order by id", (kind,)).fetchall()


def test_a_frozen_worker_is_restarted_and_its_job_runs_again(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, start: str, tmp_path: Path
) -> None:
    worker, flag, job = frozen(fleet, client, tmp_path)
    code, answers, said = bounce(dsn, "--map", f"w1=command:{start}", "--kill-after", "5", "--verify", "30")
    assert code == 0, (answers, said)
    assert [a["action"] for a in answers] == ["bounced", "verified"]
    assert all(a["incarnation"] == flag.incarnation for a in answers)
    assert worker.exit_code() == -signal.SIGKILL
    eventually(lambda: client.job(id=job).state == "done", f"job {job} runs again")
    (bounced,) = events(db, "bounced")
    assert bounced["data"]["ok"] is True
    (successor,) = client.workers(name="w1")
    assert bounced["data"]["successor"] == successor.incarnation > flag.incarnation
    (dead,) = events(db, "dead")
    assert (dead["incarnation"], dead["data"]["proves_death"]) == (flag.incarnation, True)
    # Its job did not wait for the lease, which is a minute long; the crash is charged to it once.
    assert client.job(id=job).crashes == 1
    assert bounce(dsn) == (0, [], ""), "nothing is left to do, and nothing is said"


def test_a_login_that_has_only_the_role_of_the_bouncer_does_all_of_it_and_reads_no_payload(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, start: str, tmp_path: Path
) -> None:
    worker, flag, job = frozen(fleet, client, tmp_path)
    db.execute("create role only_bounces login in role gangq_host")
    try:
        login = make_conninfo(dsn, user="only_bounces")
        how = ("--map", f"w1=command:{start}", "--kill-after", "5", "--verify", "30")
        done = finished(login, "bounce", "--once", "--json", *how, TEST_DSN=dsn)
        assert done.returncode == 0, done
        assert [answer["action"] for answer in objects(done.stdout)] == ["bounced", "verified"]
        assert worker.exit_code() == -signal.SIGKILL
        eventually(lambda: client.job(id=job).state == "done", f"job {job} runs again")
        assert {event["actor"] for kind in ("dead", "bounced") for event in events(db, kind)} == {
            "only_bounces"
        }
        assert client.workers(name="w1")[0].incarnation > flag.incarnation
        with Client(login) as host, pytest.raises(NotAllowed):
            host.submit(task="hang")
        with Client(login) as host:
            assert host.job(id=job).payload is None
    finally:
        db.execute("drop role only_bounces")


def test_where_every_process_is_stopped_and_nobody_ticks_the_bouncer_flags_by_itself(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, start: str, tmp_path: Path
) -> None:
    short_leases(client, lease_s=30, flag_after_s=FLAG_S, tick_s=0.5)
    (tmp_path / "tasks.py").write_text(
        "import os, time\nfrom pathlib import Path\nfrom gangq.app import App\napp = App(os.environ['TEST_DSN'])\n"
        + _HANG
    )
    gate = tmp_path / "gate"
    options = ("--name", "w1", "--devices", "none")
    with running(dsn, tmp_path, "w1", "worker", "tasks:app", *options) as worker:
        job = client.submit(task="hang", payloads=[{"gate": str(gate)}])[0]
        worker.until(gate.exists, "it runs the job")
        ticked = "select from gangq.tick_state where last_at is not null"
        worker.until(lambda: db.execute(ticked).fetchall(), "it has ticked: else there is no gap to notice")
        supervisor = psutil.Process(worker.process.pid)
        everything = [supervisor, *supervisor.children(recursive=True)]
        assert len(everything) >= 2, "a supervisor and its worker"
        for process in everything:
            process.suspend()
        # Nobody has ticked for so long that judging gives everybody one more period.
        db.execute("update gangq.tick_state set last_at = last_at - interval '25 seconds'")
        said = []
        how = ("--map", f"w1=command:{start}", "--kill-after", "5", "--verify", "30")

        def restarted() -> bool:
            said.extend(bounce(dsn, *how)[1])
            return [answer["action"] for answer in said] == ["bounced", "verified"]

        eventually(restarted, f"w1 is restarted: {said}", 60)
        eventually(lambda: client.job(id=job).state == "done", f"job {job} runs again")
        assert [e["reason"] for e in events(db, "outage")] != []
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_worker_that_is_gone_is_only_reported_dead(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    worker, flag, job = frozen(fleet, client, tmp_path)
    worker.signal(signal.SIGKILL)
    worker.exit_code()
    before = client.job(id=job).state
    code, answers, _ = bounce(dsn, "--report-only")
    assert (code, [a["action"] for a in answers]) == (0, ["would"])
    assert before == client.job(id=job).state == "running", "report-only reports nothing to the database"
    marker = tmp_path / "restarted"
    code, answers, _ = bounce(dsn, "--map", f"w1=command:touch {marker}")
    assert (code, [a["action"] for a in answers]) == (0, ["dead"])
    assert "jobs freed: 1" in answers[0]["text"]
    assert client.job(id=job).state in ("pending", "scheduled")
    assert not marker.exists(), "to start it again is for its service manager"
    assert events(db, "bounce") == []
    assert client.flagged() == []
    assert flag.incarnation == answers[0]["incarnation"]


@pytest.mark.parametrize(
    ("prove", "refused"),
    [(deaths.prove, []), (lambda identity, within_s, kill_worker="": None, ["replaced"])],
)
def test_a_worker_that_was_replaced_meanwhile_is_not_bounced(
    prove: Prover,
    refused: list[str],
    db: psycopg.Connection[dict[str, Any]],
    client: Client,
    fleet: Fleet,
    tmp_path: Path,
) -> None:
    worker, flag, _ = frozen(fleet, client, tmp_path)
    calls: list[str] = []

    class Replaced(Recorder):
        """Its flag was read; before the database is asked, somebody else restarts it."""

        def flagged(self) -> list[FlaggedRow]:
            found = client.flagged(host=HOST)
            worker.signal(signal.SIGKILL)
            worker.exit_code()
            fleet.start("w1")
            eventually(
                lambda: any(w.incarnation > flag.incarnation for w in client.workers(name="w1")),
                "w1 is replaced",
            )
            return found

    # Seen from the host it is gone; seen from a container, or another host of that name, the database has to say so.
    assert (acted(Replaced(client), calls, prove=prove), calls) == ([], [])
    assert [e["data"]["answer"] for e in events(db, "bounce_refused")] == refused
    assert client.workers(name="w1")[0].state == "live"
    assert events(db, "bounce") == []


def test_a_worker_that_is_heard_again_is_not_bounced(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    worker, flag, _ = frozen(fleet, client, tmp_path)
    calls: list[str] = []

    class Heard(Recorder):
        def flagged(self) -> list[FlaggedRow]:
            worker.signal(signal.SIGCONT)
            eventually(lambda: client.flagged() == [], "w1 is heard again")
            return [flag]

    assert (acted(Heard(client), calls), calls) == ([], [])


def test_a_worker_is_not_restarted_more_often_than_the_installation_allows(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    client.configure(bounces_per_hour=1)
    worker, flag, _ = frozen(fleet, client, tmp_path)
    assert client.bounce(incarnation=flag.incarnation, host=HOST) == "go"
    marker = tmp_path / "restarted"
    assert bounce(dsn, "--map", f"*=command:touch {marker}") == (0, [], ""), "another bouncer is at it"
    # Older than two minutes, and it did not help.
    db.execute("update gangq.events set at = at - interval '3 minutes' where kind = 'bounce'")
    code, answers, _ = bounce(dsn, "--map", f"*=command:touch {marker}")
    assert (code, [a["action"] for a in answers]) == (1, ["refused"])
    assert "bounces_per_hour" in answers[0]["text"]
    assert not marker.exists()
    assert worker.process.poll() is None


def test_when_two_hosts_of_a_small_fleet_are_flagged_nobody_is_restarted(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    first, _, _ = frozen(fleet, client, tmp_path, "w1")
    second, _, _ = frozen(fleet, client, tmp_path, "w2", host="elsewhere")
    marker = tmp_path / "restarted"
    code, answers, _ = bounce(dsn, "--map", f"*=command:touch {marker}")
    assert (code, [a["action"] for a in answers]) == (1, ["refused"])
    assert all("the fault is elsewhere" in a["text"] and "database" in a["text"] for a in answers)
    assert not marker.exists()
    assert {e["data"]["answer"] for e in events(db, "bounce_refused")} == {"fleet"}
    assert first.process.poll() is second.process.poll() is None


def test_report_only_leaves_no_trace_and_what_is_not_ours_or_not_known_is_left_alone(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    worker, _, _ = frozen(fleet, client, tmp_path)
    marker = tmp_path / "restarted"
    code, answers, _ = bounce(dsn, "--report-only", "--map", f"w1=command:touch {marker}")
    assert (code, [a["action"] for a in answers]) == (0, ["would"])
    assert f"touch {marker}" in answers[0]["text"]
    code, answers, _ = bounce(dsn)
    assert (code, [a["action"] for a in answers]) == (1, ["unmapped"])
    assert "--map 'w1=command:" in answers[0]["text"]
    assert bounce(dsn, "--host", "elsewhere") == (0, [], "")
    assert not marker.exists()
    assert worker.process.poll() is None
    assert events(db, "bounce") == events(db, "bounce_refused") == []


def test_a_restart_that_brings_nobody_back_is_said_and_recorded(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    worker, _, job = frozen(fleet, client, tmp_path)
    code, answers, _ = bounce(dsn, "--map", "w1=command:true", "--verify", "1s")
    assert (code, [a["action"] for a in answers]) == (1, ["bounced", "unverified"])
    assert worker.exit_code() == -signal.SIGKILL
    assert client.job(id=job).state in ("pending", "scheduled"), "it is dead for all that"
    assert [e["data"]["ok"] for e in events(db, "bounced")] == [False]


def test_a_command_that_fails_is_said_and_recorded(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    frozen(fleet, client, tmp_path)
    code, answers, _ = bounce(dsn, "--map", "w1=command:false")
    assert (code, [a["action"] for a in answers]) == (1, ["failed"])
    assert "false ended with 1" in answers[0]["text"]
    assert [e["data"]["ok"] for e in events(db, "bounced")] == [False]


def test_the_loop_outlives_the_database_and_stops_when_told(
    server: Server, dsn: str, client: Client, fleet: Fleet, start: str, tmp_path: Path
) -> None:
    options = ("--map", f"w1=command:{start}", "--kill-after", "2", "--every", "0.2")
    with running(dsn, tmp_path, "bounce", "bounce", "--loop", "--json", *options) as loop:
        with away(server, conninfo_to_dict(dsn)["dbname"]):
            loop.until(lambda: "trying again" in loop.err, "it has noticed")
        _, flag, job = frozen(fleet, client, tmp_path)
        loop.until(lambda: [a["action"] for a in objects(loop.out)] == ["bounced", "verified"], "w1 is back")
        assert loop.process.poll() is None
        eventually(lambda: client.job(id=job).state == "done", f"job {job} runs again")
        loop.interrupt(signal.SIGTERM)
        assert loop.code() == 0
        assert objects(loop.out)[0]["incarnation"] == flag.incarnation


@contextmanager
def away(server: Server, name: str) -> Iterator[None]:
    """That database takes no connections, and has none."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute(f"alter database {name} allow_connections false")
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
        try:
            yield
        finally:
            conn.execute(f"alter database {name} allow_connections true")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--once"),
        (("--once", "--loop"), "one of them"),
        (("--once", "--map", "w1"), "maps no worker"),
        (("--once", "--kill-after", "soon"), "no length of time"),
        (("--loop", "--every", "0"), "more than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(dsn: str, args: tuple[str, ...], said: str) -> None:
    done = finished(dsn, "bounce", *args)
    assert done.returncode == 2
    assert said in done.stderr


def test_once_without_a_database_ends_with_3(tmp_path: Path) -> None:
    done = finished(f"host={tmp_path} dbname=nothing", "bounce", "--once")
    assert done.returncode == 3
    assert done.stderr


# What a database that comes and goes, or a process that does not die, makes of it: with pretended parts.


class Recorder:
    """The database as the bouncer sees it, some of it pretended."""

    def __init__(self, client: Client | None = None) -> None:
        self._client = client

    def flagged(self) -> list[FlaggedRow]:
        raise NotImplementedError

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        assert self._client is not None
        return getattr(self._client, verb)  # type: ignore[no-any-return]


class Backend:
    """Restarts nothing, and says what it was told to."""

    kills_first = False

    def __init__(self, calls: list[str], done: Restarted | None = None) -> None:
        self._calls = calls
        self._done = done or Restarted(True, "restarted")

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        self._calls.append(environ["GANGQ_WORKER"])
        return self._done


def acted(database: Recorder, calls: list[str], **more: Any) -> list[Action]:
    """One round of a bouncer over that database; its actions."""
    actions: list[Action] = []
    real = database.flagged
    database.__dict__["flagged"] = lambda host: real()
    made(database, calls, actions, **{"prove": deaths.prove, **more}).round()
    return actions


@contextmanager
def pretended(
    flag: FlaggedRow | None = None,
) -> Iterator[tuple[Any, list[tuple[str, dict[str, Any]]], dict[str, Any]]]:
    """A pretended database: what it was told, and the verbs that fail now."""
    told: list[tuple[str, dict[str, Any]]] = []
    failing: dict[str, Any] = {}

    class Pretended:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def __getattr__(self, verb: str) -> Callable[..., Any]:
            def call(**arguments: Any) -> Any:
                if verb == "tick":
                    return None
                if verb in failing:
                    raise failing[verb]
                told.append((verb, arguments))
                return {"flagged": [flag], "bounce": "go", "workers": self.rows}.get(verb, 0)

            return call

    yield Pretended(), told, failing


FLAG = FlaggedRow("w1", HOST, 7, None, [1], 4711, {}, 40.0)  # type: ignore[arg-type]


def made(database: Any, calls: list[str], actions: list[Action], **more: Any) -> Bouncer:
    backend = more.pop("backend", Backend)(calls, more.pop("done", None))
    backend.kills_first = more.pop("kills_first", False)
    given = {
        "choose": lambda worker, identity: backend,
        "prove": lambda identity, within_s, kill_worker="": None,
        **more,
    }
    return Bouncer(database, host=HOST, say=actions.append, **given)


def test_a_process_that_sigkill_does_not_end_is_reported_stuck_by_a_later_round_if_the_database_is_away() -> (
    None
):
    survivor = Proof(False, {"survivors": [4711]}, stuck=(4711,))
    with pretended(FLAG) as (database, told, failing):
        calls: list[str] = []
        actions: list[Action] = []
        looks = iter([None, survivor, survivor, survivor])
        bouncer = made(database, calls, actions, prove=lambda identity, within_s, kill_worker="": next(looks))
        failing["report_stuck"] = DatabaseUnreachable("away")
        with pytest.raises(DatabaseUnreachable):
            bouncer.round()
        assert actions == [], "said only once it is so"
        failing.clear()
        bouncer.verify()
        assert told[-1][0] == "bounced"
        assert told[-1][1]["ok"] is False
        bouncer.round()
        assert told[-1][0] == "report_stuck"
        assert told[-1][1]["evidence"]["pid"] == 4711
        assert calls == ["w1"], "nothing is restarted beside it"
        assert [a.action for a in actions] == ["stuck"]
        assert "does not die of SIGKILL: reboot host" in actions[0].text
        assert "are quarantined" in actions[0].text
        assert not bouncer.ok
        assert not bouncer.waiting


def test_report_only_quarantines_nothing_although_a_process_is_stuck() -> None:
    survivor = Proof(False, {}, stuck=(4711,))
    with pretended(FLAG) as (database, told, _):
        actions: list[Action] = []
        bouncer = made(
            database,
            [],
            actions,
            prove=lambda identity, within_s, kill_worker="": survivor,
            report_only=True,
        )
        bouncer.round()
        assert [a.action for a in actions] == ["stuck"]
        assert "Nothing is reported" in actions[0].text
        assert "report_stuck" not in [verb for verb, _ in told]


def test_only_the_heartbeat_of_a_new_incarnation_verifies_a_restart() -> None:
    with pretended(FLAG) as (database, told, _):
        actions: list[Action] = []
        now = [0.0]
        bouncer = made(database, [], actions, verify_s=10, clock=lambda: now[0])
        bouncer.round()
        for incarnation, state, beats in ((7, "live", 5), (8, "live", 0), (8, "dead", 5)):
            row = SimpleNamespace(
                incarnation=incarnation, state=state, registered_at=100, renewed_at=100 + beats
            )
            database.rows = [row]
            bouncer.verify()
            assert bouncer.waiting, row
        database.rows = [SimpleNamespace(incarnation=8, state="live", registered_at=100, renewed_at=101)]
        now[0] = 11
        bouncer.verify()
        assert [a.action for a in actions] == ["bounced", "verified"]
        assert told[-1][1]["detail"]["successor"] == 8


def test_the_time_of_the_successor_begins_when_the_restart_is_over() -> None:
    with pretended(FLAG) as (database, _, _):
        actions: list[Action] = []
        now = [0.0]

        class Slow(Backend):
            def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
                now[0] += 45
                return super().restart(kill_after_s, environ)

        bouncer = made(database, [], actions, backend=Slow, verify_s=10, clock=lambda: now[0])
        bouncer.round()
        now[0] += 9
        bouncer.verify()
        assert bouncer.waiting
        now[0] += 1
        bouncer.verify()
        assert [a.action for a in actions] == ["bounced", "unverified"]


def test_nothing_is_started_beside_a_process_that_was_killed_and_does_not_die() -> None:
    survivor = Proof(False, {"survivors": [4711]}, stuck=(4711,))
    for report_only, expected in ((False, ["flagged", "report_stuck"]), (True, ["flagged"])):
        with pretended(FLAG) as (database, told, _):
            calls: list[str] = []
            actions: list[Action] = []
            always = {
                "prove": lambda identity, within_s, kill_worker="": survivor,
                "report_only": report_only,
            }
            made(database, calls, actions, **always).round()
            assert [verb for verb, _ in told] == expected
            assert ([a.action for a in actions], calls) == (["stuck"], [])
            assert "process 4711 does not die of SIGKILL: reboot host" in actions[0].text
            assert ("are quarantined" in actions[0].text) == (not report_only)


def test_a_process_that_dies_of_the_kill_of_somebody_else_is_only_reported_dead() -> None:
    looks = iter([Proof(False, {}, stuck=(4711,)), Proof(True, {"checked": 3})])
    with pretended(FLAG) as (database, told, _):
        calls: list[str] = []
        made(database, calls, [], prove=lambda identity, within_s, kill_worker="": next(looks)).round()
        assert ([verb for verb, _ in told], calls) == (["flagged", "report_dead"], [])


def test_an_outcome_that_the_database_did_not_hear_is_told_again_and_nothing_is_restarted_twice() -> None:
    with pretended(FLAG) as (database, told, failing):
        calls: list[str] = []
        actions: list[Action] = []
        bouncer = made(database, calls, actions, done=Restarted(False, "no such container"))
        bouncer.round()
        failing["bounced"] = DatabaseUnreachable("away")
        for _ in range(3):
            with pytest.raises(DatabaseUnreachable):
                bouncer.verify()
            bouncer.round()
        assert calls == ["w1"]
        failing.clear()
        bouncer.verify()
        assert [verb for verb, _ in told].count("bounced") == 1
        assert [a.action for a in actions] == ["failed"]


def test_a_restart_without_proof_reports_no_death() -> None:
    with pretended(FLAG) as (database, told, _):
        made(database, [], []).round()
        assert "report_dead" not in [verb for verb, _ in told]


LIVES = Proof(False, {"by": "nobody"})
KILL, LOOK = Proof(True, {"by": "the kill"}), Proof(True, {"by": "a look"})


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize(
    ("killed", "found", "by"),
    [
        (KILL, None, "the kill"),
        (None, LOOK, "a look"),
        (LIVES, LOOK, "a look"),
        (LIVES, LIVES, None),
        (None, None, None),
    ],
)
def test_a_death_is_proven_by_the_kill_else_by_a_look(
    killed: Proof | None, found: Proof | None, by: str | None, ok: bool
) -> None:
    looks = iter([None, killed, found])
    with pretended(FLAG) as (database, told, _):
        actions: list[Action] = []
        bouncer = made(
            database,
            [],
            actions,
            done=Restarted(ok, "asked"),
            kills_first=True,
            prove=lambda identity, within_s, kill_worker="": next(looks),
        )
        bouncer.round()
        reported = [arguments["evidence"]["by"] for verb, arguments in told if verb == "report_dead"]
        assert reported == ([] if by is None else [by])
        assert [a.action for a in actions] == ["bounced" if ok else "failed"]


def test_nothing_is_started_beside_a_process_that_survives_the_kill_before_a_restart() -> None:
    survivor = Proof(False, {}, stuck=(4711,))
    looks = iter([LIVES, survivor])
    with pretended(FLAG) as (database, told, _):
        calls: list[str] = []
        actions: list[Action] = []
        bouncer = made(
            database,
            calls,
            actions,
            kills_first=True,
            prove=lambda identity, within_s, kill_worker="": next(looks),
        )
        bouncer.round()
        assert ([a.action for a in actions], calls) == (["stuck"], [])
        assert told[-1][0] == "report_stuck", "said only once it is so"
        assert "are quarantined" in actions[0].text
        assert bouncer.waiting, "the database is yet to be told what became of the restart"


def test_a_command_is_told_no_pid_because_any_workers_login_can_write_it_into_the_database() -> None:
    with pretended(FLAG._replace(pid=4711)) as (database, _, _):
        given: list[Mapping[str, str]] = []

        class Told(Backend):
            def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
                given.append(environ)
                return super().restart(kill_after_s, environ)

        made(database, [], [], backend=Told).round()
        assert given == [{"GANGQ_WORKER": FLAG.worker, "GANGQ_INCARNATION": str(FLAG.incarnation)}]


def test_only_what_is_started_by_a_command_is_killed_first() -> None:
    for kills_first, expected in ((False, ["", ""]), (True, ["", FLAG.worker, ""])):
        kills: list[str] = []

        def prove(
            identity: Mapping[str, Any], within_s: float, kill_worker: str = "", kills: list[str] = kills
        ) -> None:
            kills.append(kill_worker)

        with pretended(FLAG) as (database, _, _):
            made(database, [], [], kills_first=kills_first, prove=prove).round()
        assert kills == expected
    assert RestartCommand(["x"]).kills_first


def test_a_line_about_a_flag_that_stands_is_said_once() -> None:
    def unmapped(worker: str, identity: Mapping[str, Any]) -> Backend:
        raise InvalidInput("map it")

    with pretended(FLAG) as (database, _, _):
        actions: list[Action] = []
        bouncer = made(database, [], actions, choose=unmapped)
        bouncer.round()
        bouncer.round()
        assert [a.action for a in actions] == ["unmapped"]


@pytest.mark.parametrize("refusal", [NotAllowed("not yours"), IncarnationEnded("over"), InvalidInput("junk")])
def test_what_is_refused_for_one_flag_does_not_keep_the_others_waiting(refusal: GangqError) -> None:
    told: list[tuple[str, int]] = []

    class Refuses:
        def tick(self) -> None:
            pass

        def flagged(self, host: str) -> list[FlaggedRow]:
            return [FLAG, FLAG._replace(worker="w2", incarnation=8)]

        def bounce(self, *, incarnation: int, **_: object) -> str:
            if incarnation == 7:
                raise refusal
            return "go"

        def bounced(self, *, incarnation: int, **_: object) -> None:
            told.append(("bounced", incarnation))
            if incarnation == 8:
                raise refusal

    calls: list[str] = []
    actions: list[Action] = []
    bouncer = made(Refuses(), calls, actions, done=Restarted(False, "no such container"))
    bouncer.round()
    assert calls == ["w2"]
    assert [(a.worker, a.action) for a in actions] == [("w1", "failed"), ("w2", "failed")]
    assert str(refusal) in actions[0].text
    assert not bouncer.ok
    bouncer.verify()
    assert "is not recorded" in actions[2].text
    assert not bouncer.waiting, "it would be refused for ever"


def test_an_outcome_that_may_be_told_a_moment_later_is_not_dropped() -> None:
    with pretended(FLAG) as (database, told, failing):
        actions: list[Action] = []
        bouncer = made(database, [], actions, done=Restarted(False, "no such container"))
        bouncer.round()
        failing["bounced"] = Busy("a lock")
        bouncer.verify()
        assert bouncer.waiting
        failing.clear()
        bouncer.verify()
        assert told[-1][0] == "bounced"
        assert [a.action for a in actions] == ["failed"]
        assert not bouncer.waiting


def test_a_refusal_of_one_outcome_does_not_keep_the_others_waiting() -> None:
    told: list[int] = []

    class Refuses:
        def tick(self) -> None:
            pass

        def flagged(self, host: str) -> list[FlaggedRow]:
            return [FLAG, FLAG._replace(worker="w2", incarnation=8)]

        def bounce(self, **_: object) -> str:
            return "go"

        def bounced(self, *, incarnation: int, **_: object) -> None:
            if incarnation == 7:
                raise NotAllowed("not yours")
            told.append(incarnation)

    bouncer = made(Refuses(), [], [], done=Restarted(False, "no such container"))
    bouncer.round()
    bouncer.verify()
    assert told == [8]


def test_an_incarnation_that_has_ended_already_is_no_error(tmp_path: Path) -> None:
    left = tmp_path / f"{DIRECTORY_PREFIX}x"
    left.mkdir()
    identity = {
        "mark": "m",
        "host": asdict(HostIdentity.here()),
        "process": asdict(process_identity(os.getpid())),
        "directory": str(left),
    }
    with pretended() as (database, _, failing):
        failing["retire_worker"] = failing["report_dead"] = IncarnationEnded("over")
        assert deaths.report_dead(database, "w1", 7, identity, {}) == 0
        (left / "drained").write_text("7")
        assert deaths.report_dead(database, "w1", 7, identity, {}) == 0


_HERE = asdict(HostIdentity.here())


@pytest.mark.parametrize(
    "junk",
    [
        *(None, ["a"], "x", 7, {}, {"mark": "m"}),
        *(
            {"mark": "m", "host": _HERE, "process": {"pid": pid, "start_ticks": 1, "boot_id": None}}
            for pid in JUNK_PIDS
        ),
        *(
            {"mark": "m", "host": host, "process": {"pid": 1, "start_ticks": 1, "boot_id": None}}
            for host in JUNK_HOSTS
        ),
        *(
            {"mark": mark, "host": _HERE, "process": {"pid": 1, "start_ticks": 1, "boot_id": None}}
            for mark in ("", 1, None)
        ),
        {"mark": "m", "host": _HERE, "process": {"pid": 1, "start_ticks": "x", "boot_id": _HERE["boot_id"]}},
    ],
)
def test_junk_instead_of_an_identity_proves_nothing(junk: Any) -> None:
    assert deaths.prove(junk, within_s=0.1, kill_worker="w1") is None
    with pretended(FLAG._replace(identity=junk)) as (database, _, _):
        actions: list[Action] = []
        chosen = partial(choose, see=seen.lineage)
        made(database, [], actions, choose=chosen, prove=deaths.prove).round()
        assert [a.action for a in actions] == ["unmapped"]
        assert deaths.report_dead(database, "w1", 7, junk, {}) == 0


def _fifo(place: Path, number: int) -> None:
    os.mkfifo(place)


def _zero(place: Path, number: int) -> None:
    place.symlink_to("/dev/zero")


def _link(place: Path, number: int) -> None:
    (place.parent / "elsewhere").write_text(str(number))
    place.symlink_to("elsewhere")


def _big(place: Path, number: int) -> None:
    with place.open("w") as out:
        out.write(str(number))
        out.truncate(1 << 33)


def _directory(place: Path, number: int) -> None:
    place.mkdir()


@pytest.mark.parametrize("what", [_fifo, _zero, _link, _big, _directory])
def test_a_note_that_is_no_small_file_is_no_clean_stop_and_keeps_nobody_waiting(
    what: Callable[[Path, int], None], tmp_path: Path
) -> None:
    left = tmp_path / f"{DIRECTORY_PREFIX}x"
    left.mkdir()
    for name in ("lapsed", "drained", "trip", "death"):
        what(left / name, 7)
    code = (
        "import sys, resource; from pathlib import Path; from gangq.worker.session import clean_stop_reason\n"
        "from types import SimpleNamespace; from gangq.worker.death_main import report_end\n"
        "client = SimpleNamespace(report_dead=lambda **_: 0)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        f"assert report_end(client, 'w1', 7, Path({str(left)!r}), {os.getuid()}, {{}}) == (None, 0)\n"
        f"sys.exit(clean_stop_reason(Path({str(left)!r}), 7, {os.getuid()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", ["the directory is a link", "another user's", "it is read as a note"])
def test_a_note_counts_only_in_the_workers_own_directory(what: str, tmp_path: Path) -> None:
    left = tmp_path / f"{DIRECTORY_PREFIX}x"
    left.mkdir()
    (left / "drained").write_text("7")
    asked, uid = left, os.getuid()
    if "link" in what:
        asked = tmp_path / f"{DIRECTORY_PREFIX}y"
        asked.symlink_to(left)
    if "another" in what:
        uid += 1
    assert clean_stop_reason(asked, 7, uid) == ("drained" if "read" in what else None)


# In a container: says what a worker in it would register.
_CONTAINER = """
import json, os, subprocess, time
from dataclasses import asdict
from gangq.proc.proof import HostIdentity, process_identity
subprocess.Popen(["sleep", "60"], start_new_session=True)
host, process = asdict(HostIdentity.here()), asdict(process_identity(os.getpid()))
print(json.dumps({"mark": "m", "host": host, "process": process}), flush=True)
time.sleep(60)
"""
# As the first process of a host: who sees such a container end.
_HOST = """
import contextlib, json, os, subprocess, sys
from dataclasses import replace
from gangq.host import deaths
from gangq.proc.proof import HostIdentity
container, inside, other, asks = json.loads(sys.argv[1])
deaths._FIRST_NAMESPACE = os.stat("/proc/self/ns/pid").st_ino
started = subprocess.Popen([*container, sys.executable, "-c", inside], stdout=subprocess.PIPE)
identity = json.loads(started.stdout.readline())
print("lives", deaths.prove(identity, within_s=0.1).why_not)
started.kill()
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
proof = deaths.prove(identity, within_s=0.1)
print("has ended", proof.dead, proof.evidence["namespace_ended"], proof.evidence["proves_death"])
host = HostIdentity.of(identity["host"])
print("another boot", deaths.namespace_ended(replace(host, boot_id="another")))
print("not known", deaths.namespace_ended(replace(host, pid_namespace=None)))
given = json.dumps([deaths._FIRST_NAMESPACE, identity["host"]])
asked = subprocess.run([*other, sys.executable, "-c", asks, given], stdout=subprocess.PIPE, text=True, check=True)
print("another user", asked.stdout.strip())
deaths._FIRST_NAMESPACE = 1
print("asked in a container", deaths.namespace_ended(host))
"""
_ASKS = """
import json, sys
from gangq.host import deaths
from gangq.proc.proof import HostIdentity
deaths._FIRST_NAMESPACE, host = json.loads(sys.argv[1])
print(deaths.namespace_ended(HostIdentity.of(host)))
"""


def test_a_worker_whose_pid_namespace_has_no_process_left_is_dead_for_root_of_the_host() -> None:
    other_user.needed()
    supervised.needs_namespaces()
    given = json.dumps([supervised.AS_PID_1, _CONTAINER, other_user.prefix(), _ASKS])
    argv = [*supervised.AS_PID_1, sys.executable, "-c", _HOST, given]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "lives it ran in another pid namespace, which is not seen to have ended",
        "has ended True True True",
        "another boot False",
        "not known False",
        "another user False",
        "asked in a container False",
    ]


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_directory_that_cannot_be_one_is_no_clean_stop(name: str) -> None:
    process = {"pid": 1, "start_ticks": 1, "boot_id": None}
    identity = {"mark": "m", "host": _HERE, "process": process, "directory": f"/tmp/{DIRECTORY_PREFIX}{name}"}
    registered = deaths.Registered.of(identity)
    assert registered is not None
    assert registered.directory is not None
    assert clean_stop_reason(registered.directory, 7, registered.host.uid) is None


def test_one_that_is_slow_to_give_its_memory_back_is_dead_and_not_stuck() -> None:
    code = (
        "import mmap, time; m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "for at in range(0, 1 << 30, 4096): m[at] = 1\n"
        "print('big', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as big:
        assert big.stdout is not None
        assert big.stdout.readline() == b"big\n"
        identity = {"mark": "no such mark", "host": _HERE, "process": asdict(process_identity(big.pid))}
        big.kill()
        proof = deaths.prove(identity, within_s=0.0)
        assert proof is not None
        assert (proof.dead, proof.stuck) == (True, ())


def _claimed(
    pid: int, directory: Path, mark: str = "0123456789abcdef", uid: int | None = None
) -> dict[str, Any]:
    """What a worker's login wrote into the database."""
    here = asdict(HostIdentity.here())
    return {
        "mark": mark,
        "host": here if uid is None else {**here, "uid": uid},
        "process": asdict(process_identity(pid)),
        "directory": str(directory),
    }


def _left_by(worker: str, pid: int, place: Path, mark: str = "0123456789abcdef") -> Path:
    """A private directory with what a worker wrote into it."""
    directory = place / f"{DIRECTORY_PREFIX}x"
    directory.mkdir(mode=0o700)
    host_record.write(directory, worker, mark, process_identity(pid))
    return directory


@pytest.mark.parametrize(
    "record", ["none", "another worker's", "open to others", "another process's", "another mark's"]
)
def test_no_process_is_killed_because_the_database_says_that_it_is_a_worker(
    record: str, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "60"], env={"GANGQ_WORKER": "w1"}) as bystander:
        directory = tmp_path / f"{DIRECTORY_PREFIX}x"
        if record != "none":
            pid = os.getpid() if record == "another process's" else bystander.pid
            mark = "f" * 16 if record == "another mark's" else "0123456789abcdef"
            _left_by("w2" if record == "another worker's" else "w1", pid, tmp_path, mark)
        if record == "open to others":
            directory.chmod(0o755)
        proof = deaths.prove(_claimed(bystander.pid, directory), within_s=0.5, kill_worker="w1")
        assert proof is not None
        assert (proof.dead, proof.why_not) == (False, f"processes {bystander.pid} of it live")
        assert bystander.poll() is None
        bystander.kill()


def test_nothing_of_another_user_than_the_one_who_wrote_the_record_is_killed(tmp_path: Path) -> None:
    """The bouncer is root: who copies another worker's mark must not make it end the jobs of that worker."""
    other_user.needed()
    its_job = {"GANGQ_MARK": "0123456789abcdef/1", "PATH": os.environ["PATH"]}
    with (
        subprocess.Popen([*other_user.prefix(), "sleep", "60"], env=its_job) as victim,
        subprocess.Popen(["sleep", "60"]) as worker,
    ):
        eventually(lambda: other_user.UID in procfs.user_ids(victim.pid), "it is another user's")
        directory = _left_by("w1", worker.pid, tmp_path)
        forged = _claimed(worker.pid, directory, uid=other_user.UID)
        deaths.prove(forged, within_s=0.5, kill_worker="w1")
        assert (worker.poll(), victim.poll()) == (None, None)
        deaths.prove(_claimed(worker.pid, directory), within_s=0.5, kill_worker="w1")
        assert worker.wait(5) == -signal.SIGKILL
        assert victim.poll() is None
        victim.kill()


def test_a_worker_that_left_word_of_an_innocent_end_is_retired_and_a_crashed_one_dead(
    db: psycopg.Connection[dict[str, Any]], client: Client, tmp_path: Path
) -> None:
    left = tmp_path / f"{DIRECTORY_PREFIX}x"
    left.mkdir()
    for name, state in (("innocent", "retired"), ("crashed", "dead")):
        incarnation = client.register_worker(name=name, host=HOST, queues=["default"]).incarnation
        (left / "drained").write_text(str(incarnation if name == "innocent" else 0))
        identity = {
            "mark": "m",
            "host": asdict(HostIdentity.here()),
            "process": {"pid": 1, "start_ticks": 1, "boot_id": None},
            "directory": str(left),
        }
        deaths.report_dead(client, name, incarnation, identity, {"by": "a test"})
        assert client.workers(name=name)[0].state == state


@pytest.mark.parametrize(
    "junk",
    [
        {"class": "\ud800"},
        {"class": "\0"},
        {"code": "\ud800"},
        {"job": {}},
        {"job": 10**40},
        {"token": [1, "x"]},
        {"error": float("nan")},
        {"error": "\ud800"},
        {"error": []},
        {"evidence": "x"},
        {"devices": 5},
        {"devices": [{}]},
        {"devices": ["\ud800"]},
        {"devices": {"\0": 1}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("file", ["trip", "death"])
def test_junk_in_a_file_that_a_job_can_write_keeps_no_bouncer_from_its_work(
    file: str, junk: dict[str, Any], client: Client, tmp_path: Path
) -> None:
    left = tmp_path / f"{DIRECTORY_PREFIX}x"
    left.mkdir()
    incarnation = client.register_worker(name="w1", host=HOST, queues=["default"]).incarnation
    said = {"incarnation": incarnation, "job": 1, "token": 1, "code": 75, "exit_code": 75, "error": {}}
    (left / file).write_text(json.dumps({**said, **junk}))
    process = {"pid": 1, "start_ticks": 1, "boot_id": None}
    identity = {"mark": "m", "host": _HERE, "process": process, "directory": str(left)}
    deaths.report_dead(client, "w1", incarnation, identity, {"by": "a test"})
    assert client.workers(name="w1")[0].state == "dead"


# gangq systemd report-death


def report_death(dsn: str, name: str, *args: str, **env: str) -> list[dict[str, Any]]:
    return objects(ok(dsn, "systemd", "report-death", "--name", name, "--json", *args, **env))


def test_a_worker_that_was_killed_is_reported_dead_by_name(
    dsn: str, db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    worker, flag, job = frozen(fleet, client, tmp_path)
    (lives,) = report_death(dsn, "w1")
    assert (lives["dead"], lives["jobs"]) == (False, 0)
    assert "lives" in lives["detail"]
    assert client.job(id=job).state == "running"
    worker.signal(signal.SIGKILL)
    worker.exit_code()
    said = {"SERVICE_RESULT": "watchdog", "EXIT_CODE": "killed", "EXIT_STATUS": "KILL", "INVOCATION_ID": "i"}
    (dead,) = report_death(dsn, "w1", **said)
    assert (dead["incarnation"], dead["dead"], dead["jobs"]) == (flag.incarnation, True, 1)
    assert client.job(id=job).state in ("pending", "scheduled")
    (event,) = events(db, "dead")
    assert (event["data"]["by"], event["data"]["result"]) == ("its service manager", "watchdog")
    assert report_death(dsn, "w1") == report_death(dsn, "never-was") == []
    assert [w.name for w in client.workers()] == ["w1"], "asking who holds the name registers nobody"


def test_what_cannot_be_proven_from_here_is_left_to_its_lease(dsn: str, client: Client) -> None:
    elsewhere = {
        "mark": "m",
        "host": {**_HERE, "boot_id": "another", "machine": "another"},
        "process": {"pid": 1, "start_ticks": 1, "boot_id": "another"},
    }
    for name, identity, why in (("junk", {}, "cannot be read"), ("far", elsewhere, "it ran on another host")):
        client.register_worker(name=name, host="elsewhere", queues=["default"], identity=identity)
        (found,) = report_death(dsn, name)
        assert (found["dead"], found["jobs"]) == (False, 0)
        assert why in found["detail"]
        assert "its lease ends" in found["detail"]
        assert client.workers(name=name)[0].state == "live"


@pytest.mark.parametrize(
    ("same_machine", "same_namespace", "left", "unreadable", "hidden", "why"),
    [
        (False, False, (), (), False, "it ran on another host"),
        (True, False, (), (), False, "it ran in another pid namespace, which is not seen to have ended"),
        (True, True, (), (31, 32), False, "processes 31, 32 may be of it and cannot be read: ask as root"),
        (True, True, (), (), True, "/proc may hide processes of it (hidepid): ask as root"),
        (True, True, (41,), (31,), True, "processes 41 of it live"),
    ],
)
def test_why_a_death_cannot_be_proven_is_said_as_it_is(
    same_machine: bool,
    same_namespace: bool,
    left: tuple[int, ...],
    unreadable: tuple[int, ...],
    hidden: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Evidence(
        "m",
        None,
        same_machine,
        True,
        same_namespace,
        survivors=tuple(Survivor(pid, 1, "sh", "mark") for pid in left),
        unreadable=unreadable,
        hidden=hidden,
    )
    monkeypatch.setattr(deaths, "confirm_gone", lambda *_, **__: found)
    process = {"pid": 1, "start_ticks": 1, "boot_id": None}
    last = SimpleNamespace(
        incarnation=7, ended_at=None, identity={"mark": "m", "host": _HERE, "process": process}
    )
    database = SimpleNamespace(unproven=lambda worker: [], predecessor=lambda worker: [last])
    (answer,) = deaths.prove_and_report(database, "w1", within_s=0.1, evidence={})  # type: ignore[arg-type]
    assert not answer.dead
    assert f"({why})" in answer.detail


def test_what_waits_for_a_database_goes_on_when_it_is_there(
    server: Server, template: str, tmp_path: Path
) -> None:
    dsn = server.dsn("late_database")
    with (
        running(dsn, tmp_path, "wait", "systemd", "report-death", "--name", "w1", "--wait") as waiting,
        running(dsn, tmp_path, "loop", "bounce", "--loop", "--every", "0.2") as loop,
    ):
        for process in (waiting, loop):
            process.until(lambda process=process: process.err.count("trying again") >= 2, "it waits")
        server.create_database("late_database", template=template)
        assert waiting.code(30) == 0
        loop.interrupt(signal.SIGTERM)
        assert loop.code() == 0
    server.drop_database("late_database")
    assert finished(dsn, "systemd", "report-death", "--name", "w1").returncode == 3
