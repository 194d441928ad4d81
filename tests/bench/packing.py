"""Whole hosts that single jobs leave free: eight real workers with eight declared GPUs each, half of them in use.

Jobs of one GPU arrive at random and last for a random time. Placed on the fullest host that has room they leave 2.9
hosts free on average, placed at random 0.1 (both simulated, over months); if running jobs could be moved, 3.6.
"""

from __future__ import annotations

import contextlib
import random
import time

import psycopg
from measures import Result, Sizes
from psycopg.rows import dict_row
from stage import Stage, wait_until
from systems import System

from gangq.client import Client

_HOSTS = 8
_GPUS = 8
_MEAN_S = 20.0
_LOOK_S = 0.5
_USED = "select host, count(job_id)::integer as used from gangq.devices group by host"


def whole_hosts(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The mean number of hosts without a job, once the fleet has been filled to a half."""
    chance = random.Random(1)
    names = [f"host-{n}" for n in range(1, _HOSTS + 1)]
    with (
        stage.database(system) as dsn,
        psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as look,
        Client(dsn, min_size=1, max_size=1) as client,
        contextlib.ExitStack() as stack,
    ):
        for name in names:
            stack.enter_context(stage.process("host_work.py", name, dsn, f"{_GPUS}x24GiB"))
        wait_until(lambda: len(client.workers()) == _HOSTS, "every worker is registered")

        def submit(jobs: int) -> None:
            for _ in range(jobs):
                argv = ["sleep", f"{chance.expovariate(1 / _MEAN_S):.2f}"]
                client.submit(task="command", payloads=[{"argv": argv}], gpus=1)

        submit(_HOSTS * _GPUS // 2)
        free, used = [], []
        began = time.monotonic()
        due = began
        while (now := time.monotonic()) < began + sizes.packing_s:
            while due <= now:
                submit(1)
                due += chance.expovariate(_HOSTS * _GPUS / 2 / _MEAN_S)
            time.sleep(_LOOK_S)
            if now > began + 3 * _MEAN_S:
                hosts = [row["used"] for row in look.execute(_USED).fetchall()]
                free.append(hosts.count(0))
                used.append(sum(hosts))
    mean_used = sum(used) / len(used)
    return [
        Result(
            f"whole hosts free, {_HOSTS} hosts of {_GPUS} GPUs half in use (2.5 or more)",
            "hosts",
            sum(free) / len(free),
            notes={"used": mean_used, "ideal": (_HOSTS * _GPUS - mean_used) / _GPUS},
        )
    ]
