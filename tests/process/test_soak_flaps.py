"""Healthy jobs on eight workers while database and network flap (``make soak``): none is killed, restarted or lost.

``SOAK_MINUTES`` [60] says for how long. Real PostgreSQL with an asynchronous standby, real workers under their
supervisors, and a wire between them that is cut, refuses, swallows or delays. The lease is longer than the longest
flap. Before the promotion the wire swallows everything for a moment, so that the standby has all that was answered.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq import schema
from gangq.client import Client
from gangq.embedded import Server
from gangq.errors import GangqError
from process.machines import Machine, kept_running
from process.wire import Wire, wire_to
from worker.worker_process import eventually

SECONDS = float(os.environ.get("SOAK_MINUTES", "60")) * 60
WORKERS = 8
LONG_JOBS = 4
"""Jobs that run from the first minute to the last, on half of the workers."""
LEASE_S = 240.0
FLAP_S = (2.0, min(90.0, SECONDS / 5))
CALM_S = (5.0, min(20.0, SECONDS / 20))
JOB_S = (5.0, 40.0)
SETTLE_S = 150.0

_TASKS = """
import os, time
from pathlib import Path
from gangq.app import App
app = App(os.environ["SOAK_DSN"])
HERE = Path(__file__).parent

def note(*words):
    fd = os.open(HERE / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + chr(10)).encode())
    os.close(fd)

@app.task
def beats(ctx, for_s):
    note("begin", ctx.job.id)
    until, step = time.monotonic() + for_s, 0
    while time.monotonic() < until and not (HERE / "over").exists():
        step += 1
        ctx.beat(step=step)
        time.sleep(0.2)
    note("end", ctx.job.id)
    return step
"""


class Site:
    """The server that is primary now, its standby, and the wire through which workers reach them."""

    def __init__(self, primary: Server, standby: Server, wire: Wire, name: str) -> None:
        self.primary = primary
        self.standby: Server | None = standby
        self.wire = wire
        self._name = name

    @property
    def dsn(self) -> str:
        """Of the primary itself, past the wire."""
        return self.primary.dsn(self._name)

    def promote(self) -> None:
        """The primary is gone, the standby takes its place."""
        assert self.standby is not None
        self.wire.freeze(new_ones_too=True)
        with (
            psycopg.connect(self.dsn, autocommit=True) as here,
            psycopg.connect(self.standby.dsn(self._name), autocommit=True) as there,
        ):
            eventually(lambda: _caught_up(here, there), "the standby has everything", 60)
        self.primary.kill()
        with psycopg.connect(self.standby.dsn(self._name), autocommit=True) as there:
            there.execute("select pg_promote(true, 60)")
        self.primary, self.standby = self.standby, None
        self.wire.upstream = _socket(self.primary)
        self.wire.thaw()
        self.wire.cut()


def _caught_up(here: psycopg.Connection[Any], there: psycopg.Connection[Any]) -> bool:
    (now,) = here.execute("select pg_current_wal_lsn()").fetchone() or ("",)
    (ok,) = there.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", (now,)).fetchone() or (False,)
    return bool(ok)


def _socket(server: Server) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(server.dsn())
    return f"{parts['host']}/.s.PGSQL.{parts.get('port') or 5432}"


@contextlib.contextmanager
def standby_of(primary: Server, directory: Path) -> Iterator[Server]:
    """An asynchronous standby, from a copy of the running primary."""
    data = directory / "standby"
    parts = psycopg.conninfo.conninfo_to_dict(primary.dsn())
    with psycopg.connect(primary.dsn("postgres"), autocommit=True) as conn:
        conn.execute("select pg_backup_start('standby', true)")
        left_out = shutil.ignore_patterns(
            "postmaster.*", "server.log", ".s.PGSQL*", "binaries-*", "pg_replslot"
        )
        shutil.copytree(primary.data_dir, data, ignore=left_out, ignore_dangling_symlinks=True)
        (data / "pg_replslot").mkdir(mode=0o700)
        row = conn.execute("select labelfile from pg_backup_stop(false)").fetchone()
    assert row is not None
    (data / "backup_label").write_text(row[0])
    (data / "standby.signal").touch()
    for owned in [data, *data.rglob("*")]:
        about = primary.data_dir.stat()
        os.chown(owned, about.st_uid, about.st_gid)
    follows = f"host={parts['host']} port={parts.get('port') or 5432} user=postgres"
    server = Server(
        data,
        binaries=primary.binaries,
        durable=True,
        settings={"primary_conninfo": follows, "hot_standby": "on"},
    )
    try:
        yield server.start(60)
    finally:
        with contextlib.suppress(GangqError):
            server.kill()


def _resets(site: Site, for_s: float) -> None:
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        site.wire.cut()
        time.sleep(1)


def _refused(site: Site, for_s: float) -> None:
    site.wire.cut(refuse=True)
    time.sleep(for_s)
    site.wire.cut()


def _blackhole(site: Site, for_s: float) -> None:
    site.wire.freeze(new_ones_too=True)
    time.sleep(for_s)
    site.wire.thaw()


def _dead_lines(site: Site, for_s: float) -> None:
    """What stood is swallowed; what comes works."""
    site.wire.freeze(new_ones_too=False)
    time.sleep(for_s)
    site.wire.cut()


def _slow(site: Site, for_s: float) -> None:
    site.wire.slow_s = 1.0
    time.sleep(for_s)
    site.wire.slow_s = 0.0


def _restart(site: Site, for_s: float) -> None:
    site.primary.kill()
    time.sleep(for_s)
    site.primary.start(60)


FLAPS: dict[str, Callable[[Site, float], None]] = {
    "connections reset": _resets,
    "connections refused": _refused,
    "blackhole": _blackhole,
    "dead connections": _dead_lines,
    "slow replies": _slow,
    "server killed and restarted": _restart,
}


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + SETTLE_S + 600)
def test_healthy_jobs_outlive_every_flap(server: Server, tmp_path: Path) -> None:
    if server.binaries.major < 15:
        pytest.skip("the copy of a running server is made as PostgreSQL 15 and newer want it")
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    rng = random.Random(seed)
    print(f"\nSOAK_MINUTES={SECONDS / 60:g} SOAK_SEED={seed}")
    (tmp_path / "tasks.py").write_text(_TASKS)
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(Server.temporary(binaries=server.binaries, durable=True))
        dsn = primary.create_database("soak")
        schema.migrate(dsn, log=lambda _: None)
        # A path for a socket has 107 bytes.
        short = Path(stack.enter_context(_temporary()))
        standby = stack.enter_context(standby_of(primary, short))
        wire, through = stack.enter_context(wire_to(dsn, short / "w"))
        site = Site(primary, standby, wire, "soak")
        with Client(dsn) as client:
            client.configure(lease_s=LEASE_S)
            backlog = int((WORKERS - LONG_JOBS) * SECONDS / (sum(JOB_S) / 2)) + WORKERS
            long_s = SECONDS + 3600
            jobs = client.submit(task="beats", payloads=[{"for_s": long_s}] * LONG_JOBS, budget_s=long_s)
            jobs += client.submit(
                task="beats", payloads=[{"for_s": rng.uniform(*JOB_S)} for _ in range(backlog)]
            )
        options = ("tasks:app", "--devices", "none", "--no-commands")
        machines = [
            Machine(f"w{n}", f"h{n}", through, tmp_path, *options, SOAK_DSN=through) for n in range(WORKERS)
        ]
        stack.callback(_kill, site)
        with kept_running(machines):
            flaps = _flap(site, rng, tmp_path)
            (tmp_path / "over").touch()
            with Client(site.dsn) as client:
                eventually(lambda: _open(client, jobs) == 0, "all jobs end", SETTLE_S)
                _tell(client, jobs, machines, flaps, tmp_path)


def _kill(site: Site) -> None:
    """Whichever server is the primary at the end."""
    with contextlib.suppress(GangqError):
        site.primary.kill()


def _flap(site: Site, rng: random.Random, directory: Path) -> Counter[str]:
    """Flaps and calm, one after the other, until the time is over; a promotion half way."""
    began, counted = time.monotonic(), Counter[str]()
    eventually(lambda: len(_journal(directory, "begin")) >= WORKERS, "every worker runs a job", 120)
    kinds: list[str] = []
    while (passed := time.monotonic() - began) < SECONDS:
        if site.standby is not None and passed > SECONDS / 2:
            kind, for_s = "promotion of the standby", 0.0
            site.promote()
        else:
            kinds = kinds or rng.sample(sorted(FLAPS), len(FLAPS))
            kind, for_s = kinds.pop(), min(rng.uniform(*FLAP_S), max(2.0, SECONDS - passed))
            FLAPS[kind](site, for_s)
        counted[kind] += 1
        ended = len(_journal(directory, "end"))
        print(f"{passed:6.0f} s  {kind} for {for_s:.0f} s; jobs ended so far: {ended}", flush=True)
        time.sleep(rng.uniform(*CALM_S))
    return counted


def _journal(directory: Path, word: str) -> list[int]:
    path = directory / "journal"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # One that is being written may be there by half.
    return [int(line.split()[1]) for line in lines if line.startswith(word) and line.endswith("\n")]


def _open(client: Client, jobs: list[int]) -> int:
    with client.connection() as conn:
        row = conn.execute("select count(*) from gangq.live_jobs where id = any (%s)", (jobs,)).fetchone()
    assert row is not None
    return int(row[0])


def _tell(
    client: Client, jobs: list[int], machines: list[Machine], flaps: Counter[str], directory: Path
) -> None:
    with client.connection() as conn:
        rows = conn.execute(
            "select state, count(*), sum(trips), sum(crashes), sum(stops) from gangq.jobs where id = any (%s) "
            "group by state",
            (jobs,),
        ).fetchall()
    begun = Counter(_journal(directory, "begin"))
    numbers = {
        "healthy jobs": len(jobs),
        "flaps": sum(flaps.values()),
        "jobs killed (trips, crashes, stops)": sum(int(n or 0) for row in rows for n in tuple(row)[2:]),
        "jobs restarted": sum(count - 1 for count in begun.values()),
        "jobs lost (not done)": len(jobs) - sum(int(row[1]) for row in rows if row[0] == "done"),
        "workers that ended": sum(len(machine.codes) for machine in machines),
    }
    table = [*((f"  {kind}", count) for kind, count in sorted(flaps.items()))]
    for machine in machines:
        if machine.codes:
            words = machine.log.read_text(errors="replace").splitlines()
            print(f"{machine.log.name} ended with {machine.codes}; its last errors:")
            print(*[line for line in words if " ERROR " in line or " CRITICAL " in line][-8:], sep="\n")
    for what, number in [*list(numbers.items())[:2], *table, *list(numbers.items())[2:]]:
        print(f"| {what:<40} | {number:>6} |")
    assert client.violations() == []
    assert list(numbers.values())[2:] == [0, 0, 0, 0], (numbers, [m.codes for m in machines])


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gangq-soak-", ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o711)
        yield made
