"""The floor these tests stand on: the lease they use, workers, a restarter, and what must hold after each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gangq.client import Client
from process.evidence import Journal
from worker.worker_process import Fleet, WorkerProcess, eventually, until_state

HEARTBEAT_S = 0.5
LEASE_S = 6.0
MARGIN_S = 1.5
GRACE_S = 1.0

PATIENCE_S = 40.0
"""For what takes a lease at most; the machine may be busy."""

TASKS = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from process.evidence import Journal, live
JOURNAL = HERE / "journal"

@app.task
def lives(ctx, deaf=False):
    return live(JOURNAL, ctx.job.id, ctx.token, stopping=(lambda: False) if deaf else (lambda: ctx.stopping))

@app.task
def quick(ctx):
    return os.getpid()
"""


class Floor:
    """A database with short leases, a fleet, and the journal that all work writes."""

    def __init__(self, client: Client, fleet: Fleet, directory: Path) -> None:
        self.client = client
        self.fleet = fleet
        self.directory = directory
        self.journal = Journal(directory / "journal")

    def configure(self, **settings: Any) -> None:
        """Other numbers than the usual ones."""
        self.client.configure(**settings)

    def start(self, name: str, *, ready: bool = True, **options: Any) -> WorkerProcess:
        """Start a worker; with ``ready``, return once it listens."""
        worker = self.fleet.start(name, **options)
        if ready:
            self.until_listening(worker)
        return worker

    def until_listening(self, worker: WorkerProcess, times: int = 1) -> None:
        eventually(
            lambda: worker.log.count("INFO listening") >= times,
            f"{worker.name} listens\n{worker.log}",
            PATIENCE_S,
        )

    def inline(self, task: str = "lives", **options: Any) -> int:
        payload = options.pop("payload", {})
        return self.client.submit(task=task, payloads=[payload], **options)[0]

    def command(self, *flags: str, **options: Any) -> int:
        options.setdefault("wait_for_hardware", True)  # Its worker may be about to register.
        return self.client.submit(task="command", payloads=[self.work(*flags)], **options)[0]

    def work(self, *flags: str) -> dict[str, Any]:
        """A command's payload whose processes write the journal."""
        script = str(Path(__file__).with_name("evidence.py"))
        return {"argv": [sys.executable, "-S", script, str(self.journal.path), *flags]}

    def until_at_work(self, job: int, processes: int = 1, timeout: float = PATIENCE_S) -> list[int]:
        """Wait until this many processes of the job work; return their pids."""
        found: list[int] = []

        def look() -> bool:
            found[:] = self.journal.living(job)
            return len(found) >= processes

        eventually(look, f"{processes} processes of job {job} are at work", timeout)
        return found

    def until_done(self, *jobs: int, timeout: float = PATIENCE_S) -> list[Any]:
        return [until_state(self.client, job, "done", timeout=timeout) for job in jobs]

    def go(self) -> None:
        """Let every first attempt finish its work."""
        Path(f"{self.journal.path}.go").touch()

    def worker_row(self, name: str) -> Any:
        return next((w for w in self.client.workers() if w.name == name), None)

    def check(self) -> None:
        """What holds at the end of every test here."""
        assert self.journal.entries("overlap") == []
        assert self.client.violations() == []


class Restarter:
    """What systemd does: starts a worker again when its process has ended."""

    def __init__(self, floor: Floor, **fleet: dict[str, Any]) -> None:
        self._floor = floor
        self._options = fleet
        self._stop = threading.Event()
        self.now: dict[str, WorkerProcess] = {name: floor.fleet.start(name, **o) for name, o in fleet.items()}
        self.codes: list[int] = []
        """Exit codes, as they came."""
        self._thread = threading.Thread(target=self._run, name="restarter", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for name, worker in self.now.items():
                code = worker.process.poll()
                if code is not None and not self._stop.is_set():
                    self.codes.append(code)
                    self.now[name] = self._floor.fleet.start(name, **self._options[name])

    def __enter__(self) -> Restarter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)


@contextmanager
def floor_of(dsn: str, client: Client, directory: Path) -> Iterator[Floor]:
    """A `Floor` for the length of a test, and its last judgement."""
    client.configure(
        heartbeat_s=HEARTBEAT_S,
        lease_s=LEASE_S,
        lease_margin_s=MARGIN_S,
        grace_s=GRACE_S,
        flag_after_s=2,
        ack_timeout_s=4,
        claim_deadline_s=8,
        candidate_silence_s=3,
        pass_over_s=2,
        gang_backoff_s=0.1,
        gang_backoff_max_s=0.5,
    )
    client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.2)
    fleet = Fleet(dsn, directory)
    try:
        fleet.define(TASKS)
        floor = Floor(client, fleet, directory)
        yield floor
        floor.check()
    finally:
        fleet.close()
