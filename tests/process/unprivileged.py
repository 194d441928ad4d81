"""Workers of a user that is not root. Their address has a password, which the server does not ask for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gangq.client import Client
from gangq.proc import procfs
from process import other_user
from process.wire import Wire
from worker.worker_process import eventually, short_leases, until_state

GANGQ = str(Path(sys.executable).with_name("gangq"))
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


class UnprivilegedWorkers:
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
        os.chown(directory / "tasks_here.py", other_user.UID, other_user.UID)

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
        before = self.log.count(" registered ") if self.log_path.exists() else 0
        process = self.run(
            GANGQ,
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

    def processes(self, name: str) -> list[procfs.Stat]:
        """What of that user is called so."""
        return [
            entry
            for entry in procfs.table().values()
            if entry.comm.startswith(name) and entry.alive and other_user.UID in procfs.user_ids(entry.pid)
        ]

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


@contextmanager
def unprivileged_workers(dsn: str, client: Client) -> Iterator[UnprivilegedWorkers]:
    """For the length of a test; skips where this user cannot become another one."""
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
            running = UnprivilegedWorkers(directory, address, client)
            try:
                yield running
            finally:
                running.close()
