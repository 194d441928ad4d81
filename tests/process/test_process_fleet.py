"""Whole fleets: distributed gangs that really meet, and work that is done once whoever dies meanwhile."""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest

from process.floor import PATIENCE_S, TASKS, Floor, Restarter
from worker.worker_process import eventually

_MEETS = """
import json, os, socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
mine = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GANGQ_EPOCH")}
if rank == 0:
    # At once and without SO_REUSEADDR: the port must be free for it now, and for nobody else until now.
    with socket.socket() as server:
        server.bind(address)
        server.listen(world)
        others = [server.accept()[0] for _ in range(world - 1)]
        told = [json.loads(other.makefile().readline()) for other in others]
        everybody = sorted([mine, *told], key=lambda m: int(m["RANK"]))
        for other in others:
            other.sendall(json.dumps(everybody).encode() + b"\\n")
else:
    while True:
        try:
            other = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    other.sendall(json.dumps(mine).encode() + b"\\n")
    everybody = json.loads(other.makefile().readline())
print(json.dumps(everybody), flush=True)
"""


def test_a_distributed_gang_of_commands_meets_at_the_address_it_was_given(floor: Floor) -> None:
    # Two workers on two pretend hosts, two slots each: nobody can hold it alone.
    for name in ("a", "b"):
        floor.start(name, slots=2, host=f"host-{name}", address="127.0.0.1")
    payload = {"argv": [sys.executable, "-S", "-c", _MEETS]}
    gangs = [
        floor.client.submit_gang(task="command", size=4, payload=payload, max_attempts=1) for _ in range(3)
    ]
    for gang in gangs:
        eventually(
            lambda gang=gang: floor.client.gang(id=gang.gang_id).finished_at, "it has ended", PATIENCE_S
        )  # type: ignore[misc]
        row = floor.client.gang(id=gang.gang_id)
        assert (row.state, row.epoch) == ("done", 1), row
        said = {"".join(log.chunk for log in floor.client.logs(job_id=job)) for job in gang.job_ids}
        assert len(said) == 1
        everybody = json.loads(said.pop())
        assert [(m["RANK"], m["NODE_RANK"], m["LOCAL_RANK"], m["LOCAL_WORLD_SIZE"]) for m in everybody] == [
            ("0", "0", "0", "2"),
            ("1", "0", "1", "2"),
            ("2", "1", "0", "2"),
            ("3", "1", "1", "2"),
        ]


class Killer(threading.Thread):
    """SIGKILLs one of a restarter's workers every second."""

    def __init__(self, running: Restarter, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._running = running
        self._rng = random.Random(seed)
        self.enough = threading.Event()
        self.kills = 0

    def run(self) -> None:
        while not self.enough.wait(1.0):
            name = self._rng.choice(sorted(self._running.now))
            worker = self._running.now[name]
            if worker.process.poll() is None:
                worker.signal(signal.SIGKILL)
                self.kills += 1


@pytest.mark.soak
def test_40_jobs_are_done_once_while_a_worker_is_killed_every_second(floor: Floor) -> None:
    floor.configure(lease_s=20, lease_margin_s=5)
    floor.client.set_queue(name="default", max_crashes=100)
    floor.fleet.define(
        TASKS
        + """
@app.task
def works(ctx):
    journal = Journal(JOURNAL)
    journal.note("start", ctx.job.id, ctx.token, ticks=start_ticks(os.getpid()))
    for pid in journal.living(ctx.job.id, but=ctx.token):
        journal.note("overlap", ctx.job.id, ctx.token, other=pid)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        journal.note("alive", ctx.job.id, ctx.token)
        time.sleep(0.02)
    journal.note("end", ctx.job.id, ctx.token)
    return ctx.token
""".replace("@app.task", "from process.evidence import start_ticks\n@app.task", 1)
    )
    handlers = floor.client.submit(task="works", payloads=[{}] * 30, max_attempts=100)
    commands = floor.client.submit(
        task="command", payloads=[floor.work("--below", "--seconds", "0.5")] * 10, max_attempts=100
    )
    jobs = [*handlers, *commands]
    broken: list[Any] = []
    with Restarter(floor, k1={}, k2={}, k3={}) as running:
        killer = Killer(running, seed=7)
        killer.start()
        until = time.monotonic() + 150
        while set(floor.client.job_states(ids=jobs).values()) != {"done"} and time.monotonic() < until:
            broken += floor.client.violations()
            if killer.kills >= 20:
                killer.enough.set()
            time.sleep(0.2)
        killer.enough.set()
        killer.join()
    rows = [floor.client.job(id=job) for job in jobs]
    assert {row.state for row in rows} == {"done"}
    assert broken == []
    assert killer.kills >= 5
    assert sum(row.crashes for row in rows) >= 3
    for row in rows:
        # Nothing was charged but crashes, and the result is that of the last attempt.
        assert row.attempts == 1
        assert len(floor.journal.attempts(row.id)) <= 1 + row.crashes + row.stops
        assert row.token == floor.journal.attempts(row.id)[-1]
        if row.id in handlers:
            assert row.result == row.token
    for job in jobs:
        assert floor.journal.living(job) == []
