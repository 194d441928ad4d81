"""The shipped units, run by a real systemd in user mode: what restarts, what does not, and who hears of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.host import units
from host import user_systemd
from host.user_systemd import Manager
from notify.receiver import receiver
from worker.worker_process import eventually, short_leases

MISSING = user_systemd.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

RESTARTED = (75, 76, 77, 78, 79, 80, 85, 86)
LEFT_ALONE = (87, 88)
TEMPLATE = "gangq-worker@.service"

# Says READY as a supervisor does, and ends with the code that the instance is called.
_ENDS_WITH = """
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
    out.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", "\\0", 1))
sys.exit(int(sys.argv[1]))
"""

_TASKS = """
import os, time
from pathlib import Path
from gangq import App
app = App()

@app.task
def hang(ctx, gate):
    with open(gate, "a") as out:
        print(ctx.job.attempt, os.getpid(), file=out)
    if len(Path(gate).read_text().splitlines()) == 1:
        time.sleep(120)
    return "done"
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """One service manager for all tests here; each uses instances of its own."""
    with user_systemd.manager(tmp_path_factory.mktemp("systemd")) as running:
        yield running


@pytest.fixture
def installed(manager: Manager, tmp_path: Path) -> Iterator[Manager]:
    """The units as `gangq systemd install --user` puts them there; what was started is stopped at the end."""
    places = units.Places(manager.units, manager.environment, manager.address)
    version = units.manager_version()
    steps = version is not None and version >= units.STEPS_SINCE
    for file in units.files(places, user=True, steps=steps, argv=units.program()):
        units.place(file, dry_run=False)
    manager.environment.write_text("")
    manager.address.write_text(units.shipped(units.ADDRESS))
    yield manager
    manager.try_("stop", "gangq-*")
    manager.try_("reset-failed")
    print((tmp_path / "unit.log").read_text() if (tmp_path / "unit.log").exists() else "")


def test_trip_codes_restart_a_worker_and_87_and_88_do_not(installed: Manager, tmp_path: Path) -> None:
    program = tmp_path / "ends_with.py"
    program.write_text(_ENDS_WITH)
    # Only what is run and how soon is changed: what is restarted and what is not is the unit's own.
    installed.drop_in(
        TEMPLATE,
        "[Service]\nExecStartPre=\nExecStopPost=\nExecStart=\nRestartSec=300ms\n"
        f"ExecStart={sys.executable} -I -S {program} %i\n",
    )
    installed.systemctl("daemon-reload")
    names = [f"gangq-worker@{code}.service" for code in (*RESTARTED, *LEFT_ALONE)]
    installed.systemctl("start", "--no-block", *names)
    for code in RESTARTED:
        eventually(
            lambda unit=f"gangq-worker@{code}.service": int(installed.show(unit)["NRestarts"]) >= 2,
            f"{code} is restarted",
        )
    for code in LEFT_ALONE:
        state = installed.show(f"gangq-worker@{code}.service")
        assert (state["ActiveState"], state["ExecMainStatus"], state["NRestarts"]) == (
            "failed",
            str(code),
            "0",
        )


class Fleet:
    """Workers as units of their own: gangq-worker@a, gangq-worker@b."""

    def __init__(self, manager: Manager, dsn: str, directory: Path) -> None:
        self.manager = manager
        self.dsn = dsn
        self.directory = directory
        (directory / "jobs_here.py").write_text(_TASKS)
        manager.environment.write_text(
            "GANGQ_WORKER_ARGS=jobs_here:app --devices none\nPYTHONUNBUFFERED=1\n"
            f"PYTHONPATH={directory}:{os.environ['PYTHONPATH']}\n"
        )
        manager.address.write_text(f"# the database\n{dsn}\n")
        manager.drop_in(
            TEMPLATE,
            "[Service]\nRestartSec=300ms\nWatchdogSec=3\nTimeoutStopSec=60\n"
            f"StandardOutput=append:{directory}/unit.log\nStandardError=append:{directory}/unit.log\n",
        )
        manager.systemctl("daemon-reload")

    def start(self, instance: str) -> str:
        """Start one, and return its unit; systemctl returns when it is READY."""
        unit = f"gangq-worker@{instance}.service"
        self.manager.systemctl("start", unit)
        return unit

    def name(self, instance: str) -> str:
        """What its worker is called: %H-%i."""
        return f"{self.manager.run('uname', '-n').stdout.strip()}-{instance}"


@pytest.fixture
def fleet(installed: Manager, dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client, lease_s=60, flag_after_s=1)
    yield Fleet(installed, dsn, tmp_path)
    # While there is a database to retire from.
    installed.try_("stop", "gangq-*")


def test_a_job_finds_the_address_in_no_environment_while_another_worker_of_its_user_starts(
    installed: Manager, fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    log = f"[Service]\nStandardOutput=append:{tmp_path}/unit.log\nStandardError=append:{tmp_path}/unit.log\n"
    installed.drop_in("gangq-tick.service", log)
    installed.systemctl("daemon-reload")
    fleet.start("f")
    (tmp_path / "sought").write_text(fleet.dsn)
    (tmp_path / "decoy").write_text("TEST_DECOY=1")
    look = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -cFf"
    script = (
        f"cat; touch {tmp_path}/looks; while ! [ -e {tmp_path}/enough ]; do {look} {tmp_path}/sought; done"
    )
    (job,) = client.submit(
        task="command",
        payloads=[{"argv": ["sh", "-c", f"{script}; {look} {tmp_path}/decoy"], "env": {"TEST_DECOY": "1"}}],
    )
    eventually((tmp_path / "looks").exists, "it looks")
    fleet.start("g")
    installed.systemctl("start", "gangq-tick.service")
    (tmp_path / "enough").touch()
    eventually(lambda: client.job(id=job).state in ("done", "failed"), "it has looked")
    *found, decoys = "".join(row.chunk for row in client.logs(job_id=job)).split()
    assert int(decoys) > 0, "it can look"
    assert len(found) > 5
    assert set(found) == {"0"}
    ticker = installed.show("gangq-tick.service")
    assert (ticker["SubState"], ticker["NRestarts"]) == ("running", "0")


def test_settings_of_an_earlier_release_that_name_the_database_still_count(
    installed: Manager, fleet: Fleet, client: Client
) -> None:
    fleet.manager.address.write_text(units.shipped(units.ADDRESS))
    settings = fleet.manager.environment.read_text()
    fleet.manager.environment.write_text(f"{settings}GANGQ_DSN={fleet.dsn}\n")
    fleet.start("h")
    (job,) = client.submit(task="command", payloads=[{"argv": ["cat"]}])
    eventually(lambda: client.job(id=job).state == "done", "it runs jobs")
    assert client.logs(job_id=job) == []


def attempts(gate: Path) -> int:
    return len(gate.read_text().splitlines()) if gate.exists() else 0


def freeze(pids: list[int]) -> None:
    """Stop all processes of a unit: its supervisor as well, which could have helped."""
    assert len(pids) >= 2, f"a supervisor and its worker, not {pids}"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.slow
def test_a_frozen_worker_is_killed_by_its_watchdog_reported_dead_and_its_job_runs_again_elsewhere(
    fleet: Fleet, db: psycopg.Connection[dict[str, Any]], client: Client, tmp_path: Path
) -> None:
    first = fleet.start("a")
    gate = tmp_path / "gate"
    (job,) = client.submit(task="hang", payloads=[{"gate": str(gate)}])
    eventually(lambda: attempts(gate) == 1, "the job runs")
    assert client.job(id=job).worker == fleet.name("a")
    fleet.start("b")
    before = fleet.manager.show(first)
    freeze(fleet.manager.processes_of(first))
    eventually(lambda: client.job(id=job).state == "done", "the job runs again", 30)
    assert attempts(gate) == 2
    eventually(lambda: fleet.manager.show(first)["InvocationID"] != before["InvocationID"], "it is restarted")
    (dead,) = db.execute(
        "select e.* from gangq.events e where e.kind = 'dead' and e.worker = %s", (fleet.name("a"),)
    ).fetchall()
    # From ExecStopPost=: nobody else was left to say it, and the lease is a minute long.
    assert (dead["data"]["by"], dead["data"]["result"]) == ("its service manager", "watchdog")
    assert dead["data"]["proves_death"] is True


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_its_worker_along_and_the_death_is_reported(
    fleet: Fleet, db: psycopg.Connection[dict[str, Any]], client: Client, tmp_path: Path
) -> None:
    unit = fleet.start("c")
    gate = tmp_path / "gate"
    (job,) = client.submit(task="hang", payloads=[{"gate": str(gate)}])
    eventually(lambda: attempts(gate) == 1, "the job runs")
    fleet.manager.systemctl("kill", "--signal=SIGKILL", "--kill-who=main", unit)
    eventually(lambda: client.job(id=job).state == "done", "the job runs again, here or there", 30)
    reports = db.execute("select data ->> 'by' as by from gangq.events where kind = 'dead'").fetchall()
    assert {"by": "its service manager"} in reports


def test_a_worker_that_is_stopped_as_asked_retires_and_nothing_is_reported(
    fleet: Fleet, db: psycopg.Connection[dict[str, Any]], client: Client
) -> None:
    unit = fleet.start("d")
    assert fleet.manager.show(unit)["SubState"] == "running"
    fleet.manager.systemctl("stop", unit)
    assert fleet.manager.show(unit)["Result"] == "success"
    assert client.workers(name=fleet.name("d"))[0].state == "retired"
    assert db.execute("select 1 from gangq.events where kind in ('dead', 'reap')").fetchall() == []


@pytest.mark.slow
def test_a_flagged_worker_is_restarted_as_its_unit(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    # Without a watchdog: it is the bouncer's turn.
    fleet.manager.drop_in("gangq-worker@e.service", "[Service]\nWatchdogSec=0\n")
    fleet.manager.systemctl("daemon-reload")
    unit = fleet.start("e")
    gate = tmp_path / "gate"
    (job,) = client.submit(task="hang", payloads=[{"gate": str(gate)}])
    eventually(lambda: attempts(gate) == 1, "the job runs")
    freeze(fleet.manager.processes_of(unit))

    def flagged() -> bool:
        client.tick(force=True)
        return client.flagged() != []

    eventually(flagged, "it is flagged")
    how = ["--map", f"{fleet.name('e')}=user-unit:{unit}", "--kill-after", "1", "--json"]
    done = fleet.manager.run(*units.program(), "bounce", "--once", *how, GANGQ_DSN=fleet.dsn)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, [a["action"] for a in answers]) == (0, ["bounced", "verified"]), done
    assert "SIGKILL" in answers[0]["text"], "a stopped process does not heed SIGTERM"
    eventually(lambda: client.job(id=job).state == "done", "the job runs again")


def test_notifications_are_delivered_with_what_the_credentials_say(
    installed: Manager, dsn: str, client: Client
) -> None:
    client.add_notification(target="oncall")
    place = installed.environment.parent / "notify"
    place.mkdir(exist_ok=True)
    with receiver() as there:
        for name, text in (("dsn", dsn), ("url", there.url), ("secret", "0123456789abcdef")):
            (place / f"oncall.{name}").write_text(f"{text}\n")
        installed.systemctl("start", "gangq-notify@oncall.service")
        client.test_notification(target="oncall")
        eventually(lambda: there.bodies, "the test is delivered")
        assert there.said[0]["kind"] == "test"
        assert "Gangq-Signature" in there.headers[0]
        eventually(lambda: client.notifications()[0].delivered == 1, "it is acknowledged")
        installed.systemctl("stop", "gangq-notify@oncall.service")
        assert installed.show("gangq-notify@oncall.service")["Result"] == "success"


def test_the_bouncer_and_its_timer_run(installed: Manager, fleet: Fleet) -> None:
    installed.drop_in("gangq-bounce.timer", "[Timer]\nOnBootSec=\nOnBootSec=0\nOnUnitInactiveSec=500ms\n")
    log = (
        f"StandardOutput=append:{fleet.directory}/unit.log\nStandardError=append:{fleet.directory}/unit.log\n"
    )
    installed.drop_in("gangq-bounce.service", f"[Service]\n{log}")
    installed.systemctl("daemon-reload")
    installed.systemctl("start", "gangq-bounce.timer")
    eventually(
        lambda: installed.show("gangq-bounce.service")["ExecMainExitTimestampMonotonic"] != "0", "it has run"
    )
    state = installed.show("gangq-bounce.service")
    assert (state["Result"], state["ExecMainStatus"]) == ("success", "0")
    assert installed.show("gangq-bounce.timer")["Persistent"] == "no"
