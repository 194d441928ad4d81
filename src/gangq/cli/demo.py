"""`gangq demo`: a training gang survives the death of one of its ranks, on a private PostgreSQL.

Four worker processes on two pretend hosts, sixteen solo jobs, and a gang of four that trains a classifier.
Half way the worker of one rank is killed with SIGKILL and started again, as systemd would. The demo then checks
what the database says happened, and fails unless all of it did. Takes well under a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gangq import schema
from gangq.cli import output
from gangq.cli.look import TIMELINE
from gangq.client import Client
from gangq.client.rows import JobRow
from gangq.embedded import Server
from gangq.errors import GangqError
from gangq.proc import killing

DATABASE = "gangq_demo"
HOSTS = {"alpha-0": "alpha", "alpha-1": "alpha", "beta-0": "beta", "beta-1": "beta"}
STEPS = 300
TILES = 16
VICTIM_RANK = 2
ENOUGH_ACCURACY = 0.95
LIMIT_S = 90.0
START_S = 30.0


@dataclass
class Fleet:
    """The demo's worker processes, by name."""

    dsn: str
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start, or start again, one worker."""
        environment = {
            **os.environ,
            "GANGQ_DSN": self.dsn,
            "PYTHONPATH": str(_examples()),
            "OMP_NUM_THREADS": "1",
        }
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gangq", "worker", "digits_app:app", "--queue", "demo"),
                    *("--name", name, "--host", HOSTS[name], "--address", "127.0.0.1"),
                    *("--devices", "1x24GiB"),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> int:
        """SIGKILL one worker, as the kernel or a power cut would; returns its pid."""
        process = self.processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait()
        return process.pid

    def stop(self) -> None:
        """Ask all workers to stop, then make sure."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for process in self.processes.values():
            killing.end_group(process, max(0.1, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise if a worker ended by itself, with the end of its log."""
        for name, process in self.processes.items():
            if process.poll() not in (None, -signal.SIGKILL):
                tail = (self.logs / f"{name}.log").read_text(errors="replace")[-2000:]
                raise GangqError(f"worker {name} ended with code {process.returncode}; its log ends:\n{tail}")


def run(console: Console | None = None) -> int:
    """Run the demo; return 0 if everything it promises was seen to happen, else 1."""
    console = console or Console()
    server = Server()
    was_running = server.status().running
    server.start()
    try:
        # It is left there to be looked at.
        server.drop_database(DATABASE)
        dsn = server.create_database(DATABASE)
        schema.migrate(dsn, log=lambda _: None)
        with tempfile.TemporaryDirectory(prefix="gangq-demo-") as logs, Client(dsn) as client:
            version = server.status().version
            console.print(f"[bold]private PostgreSQL[/] {version} in {server.data_dir}, database {DATABASE}")
            return _play(console, client, Fleet(dsn, Path(logs)))
    finally:
        if not was_running:
            server.stop()


def _play(console: Console, client: Client, fleet: Fleet) -> int:
    started = time.monotonic()
    # Steps come with heartbeats: with one in 5 s the training may be over before a step of its second half is seen.
    client.configure(heartbeat_s=1)
    client.set_queue(name="demo", backoff_s=0.2)
    for name in HOSTS:
        fleet.start(name)
    try:
        _until(fleet, lambda: len(client.workers()) == len(HOSTS), "the workers to register")
        console.print(f"[bold]4 workers[/] on 2 pretend hosts: {', '.join(HOSTS)}, one declared GPU each")
        tiles = client.submit(
            task="render_tile", queue="demo", gpus=1, payloads=[{"tile": n} for n in range(TILES)]
        )
        gang = client.submit_gang(
            task="train_digits",
            size=4,
            queue="demo",
            gpus=1,
            vram_mb=8_000,
            payload={"steps": STEPS},
            priority=10,
            checkpoint_mode="rank0",
            name="digits",
        )
        console.print(
            f"[bold]submitted[/] {TILES} solo jobs and gang g{gang.gang_id}: 4 ranks, priority 10\n"
        )
        killed = _watch(console, client, fleet, gang.gang_id, tiles)
    finally:
        fleet.stop()
    return _verdict(console, client, gang.gang_id, tiles, killed, time.monotonic() - started)


def _watch(console: Console, client: Client, fleet: Fleet, gang_id: int, tiles: list[int]) -> str:
    """Show progress, kill one rank's worker half way, wait for everything to end; return whom it killed."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    killed = ""
    last_state = ""
    deadline = time.monotonic() + LIMIT_S
    with Progress(*columns, console=console) as progress:
        training = progress.add_task("training", total=STEPS)
        solo = progress.add_task("solo jobs", total=len(tiles))
        while time.monotonic() < deadline:
            fleet.check()
            gang = client.gang(id=gang_id)
            members = client.jobs(gang_id=gang_id, limit=None)
            step = max((int((m.progress or {}).get("step", 0)) for m in members), default=0)
            done = sum(job.state == "done" for job in client.jobs(ids=tiles, limit=None))
            shown = f"gang g{gang_id}, epoch {gang.epoch}: {gang.state}"
            cause = f" ({gang.drain_cause})" if gang.state == "draining" and gang.drain_cause else ""
            if shown != last_state:
                progress.console.print(f"  {_clock()}  {shown}{cause}")
                last_state = shown
            progress.update(training, completed=STEPS if gang.state == "done" else step, description=shown)
            progress.update(solo, completed=done)
            if not killed and gang.state == "running" and step >= STEPS // 2:
                killed = _kill_rank(progress.console, fleet, members)
            if gang.finished_at is not None and done == len(tiles):
                break
            time.sleep(0.05)
    return killed


def _kill_rank(console: Console, fleet: Fleet, members: list[JobRow]) -> str:
    victim = next(m.worker for m in members if m.rank == VICTIM_RANK)
    assert victim is not None
    pid = fleet.kill(victim)
    console.print(f"  {_clock()}  [bold red]kill -9 {pid}[/]: worker {victim}, which ran rank {VICTIM_RANK}")
    fleet.start(victim)
    console.print(f"  {_clock()}  worker {victim} started again, as systemd would")
    return victim


def _verdict(
    console: Console, client: Client, gang_id: int, tiles: list[int], killed: str, took_s: float
) -> int:
    gang = client.gang(id=gang_id)
    members = sorted(client.jobs(gang_id=gang_id, limit=None), key=lambda member: member.rank or 0)
    result = members[0].result or {}
    drains = client.drains(gang_id=gang_id)
    accuracy = float(result.get("accuracy") or 0)
    resumed = int(result.get("resumed_from") or 0)
    table = Table(title=f"life of gang g{gang_id}", title_justify="left")
    for column in TIMELINE:
        table.add_column(column.title)
    for event in client.timeline(gang_id=gang_id):
        table.add_row(*(output.plain(column.cell(event)) for column in TIMELINE))
    console.print(table)
    checks = {
        f"the worker of rank {VICTIM_RANK} was killed half way": bool(killed),
        "its gang was drained": bool(drains),
        "every survivor acknowledged, nobody had to be forced": bool(drains)
        and all(drain.acked == drain.moved and not drain.forced for drain in drains),
        f"the gang was placed again and finished in epoch {gang.epoch}": gang.state == "done"
        and gang.epoch >= 2,
        f"training resumed from the checkpoint of step {resumed}, not from the start": resumed > 0,
        f"held-out accuracy is {accuracy:.1%} (at least {ENOUGH_ACCURACY:.0%})": accuracy >= ENOUGH_ACCURACY,
        f"all {len(tiles)} solo jobs are done": all(
            job.state == "done" for job in client.jobs(ids=tiles, limit=None)
        ),
        "gangq.violations is empty": not client.violations(),
    }
    for what, held in checks.items():
        console.print(f"  [{'green' if held else 'bold red'}]{'yes' if held else 'NO '}[/]  {what}")
    console.print(f"\n{took_s:.0f} s. Look around with:  {sys.argv[0]} db psql {DATABASE}")
    return 0 if all(checks.values()) else 1


def _until(fleet: Fleet, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        fleet.check()
        if time.monotonic() > deadline:
            raise GangqError(
                f"waited {START_S:.0f} s for {what} in vain; the workers' logs are in {fleet.logs}"
            )
        time.sleep(0.05)


def _examples() -> Path:
    """The digits example: shipped in the wheel, or beside src/ in a checkout."""
    shipped = Path(__file__).resolve().parents[1] / "examples" / "digits"
    return shipped if shipped.is_dir() else Path(__file__).resolve().parents[3] / "examples" / "digits"


def _clock() -> str:
    now = time.time()
    return time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
