"""Seconds from a death to the whole gang at work again, with the settings of a new installation.

Two hosts with two workers each hold one gang of four ranks, each a command. A round kills one thing with SIGKILL
and waits until every rank has begun under a later epoch. Each round has a gang of its own, so none is at its last
attempt.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gangq.client import Client
from process.machines import Machine, kept_running

HOSTS = 2
WORKERS_PER_HOST = 2
RANKS = HOSTS * WORKERS_PER_HOST
RESTART_S = 1.0
"""What systemd waits with systemd/restart-steps.conf before the first restart."""
_PATIENCE_S = 180.0
_LOOKS_EVERY_S = 0.01
_RUNS_BEFORE_S = (0.5, 3.0)

_RANK = """
import os, sys, time
line = "%s %s %s %.3f\\n" % (os.environ["GANGQ_EPOCH"], os.environ["RANK"], os.getpid(), time.time())
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(file, line.encode())
time.sleep(3600)
"""


class Ranks:
    """What the ranks of one gang have written: epoch, rank, pid and instant of each beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begun(self) -> list[tuple[int, int, int, float]]:
        text = self.path.read_text() if self.path.exists() else ""
        rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(int(epoch), int(rank), int(pid), float(at)) for epoch, rank, pid, at in rows]

    def until_whole(self, after_epoch: int) -> list[tuple[int, int, int, float]]:
        """Wait until every rank has begun in one epoch after that; the beginnings, by rank."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            begun = [row for row in self.begun() if row[0] > after_epoch]
            last = [row for row in begun if row[0] == max(begun)[0]]
            if len(last) == RANKS:
                return sorted(last, key=lambda row: row[1])
            time.sleep(_LOOKS_EVERY_S)
        raise RuntimeError(f"the gang was not whole within {_PATIENCE_S:g} s: {self.begun()}")


def kill_rank(pids: Sequence[int], machines: Sequence[Machine], dice: random.Random) -> None:
    """The process of one rank."""
    os.kill(dice.choice(pids), signal.SIGKILL)


def kill_worker(pids: Sequence[int], machines: Sequence[Machine], dice: random.Random) -> None:
    """The worker of one rank; its supervisor lives."""
    dice.choice(machines).worker().kill()


def kill_host(pids: Sequence[int], machines: Sequence[Machine], dice: random.Random) -> None:
    """The workers of one host and their supervisors."""
    host = dice.choice(machines).host
    both = [p for m in machines if m.host == host for p in (m.worker().pid, m.process.pid)]
    for pid in both:
        os.kill(pid, signal.SIGKILL)


DEATHS: dict[str, Callable[[Sequence[int], Sequence[Machine], random.Random], None]] = {
    "rank": kill_rank,
    "worker": kill_worker,
    "host's workers": kill_host,
}


def seconds_to_whole(dsn: str, directory: Path, rounds: int, seed: int = 1) -> dict[str, list[float]]:
    """For each kind of death the seconds of every round; the kinds take turns."""
    dice = random.Random(seed)
    machines = [
        Machine(
            f"w{n}", f"h{n // WORKERS_PER_HOST}", dsn, directory, "--devices", "none", restart_s=RESTART_S
        )
        for n in range(RANKS)
    ]
    took: dict[str, list[float]] = {kind: [] for kind in DEATHS}
    with Client(dsn) as client, kept_running(machines):
        for turn in range(rounds):
            for kind, kill in DEATHS.items():
                ranks = Ranks(directory / f"{kind.replace(' ', '-')}-{turn}")
                argv = [sys.executable, "-S", "-c", _RANK, str(ranks.path)]
                gang = client.submit_gang(
                    task="command", size=RANKS, payload={"argv": argv}, wait_for_hardware=True
                )
                whole = ranks.until_whole(after_epoch=0)
                time.sleep(dice.uniform(*_RUNS_BEFORE_S))
                killed_at = time.time()
                kill([pid for _, _, pid, _ in whole], machines, dice)
                again = ranks.until_whole(after_epoch=whole[0][0])
                took[kind].append(max(at for _, _, _, at in again) - killed_at)
                client.cancel(gang_ids=[gang.gang_id])
                _until_over(client, gang.gang_id)
    return took


def _until_over(client: Client, gang_id: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    while client.gang(id=gang_id).finished_at is None:
        if time.monotonic() > until:
            raise RuntimeError(f"gang {gang_id} does not end")
        time.sleep(0.05)
