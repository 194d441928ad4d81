"""From the end of one placed job to the start of the next: as short under a limit as without one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from databases import Connection
from gangq.client import Client
from worker.worker_process import Fleet, eventually, fleet_of

pytestmark = pytest.mark.slow

TASKS = """
@app.task
def one(ctx): ...

@app.task
def other(ctx): ...
"""
JOBS = 12
POLL_S = 1.0
"""Without the wake-up at an end the next pass came 0.9 s after it, with it 0.05 s."""


@pytest.fixture
def fleet(dsn: str, tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(dsn, tmp_path) as running:
        running.define(TASKS)
        yield running


def gaps(db: Connection, queue: str) -> list[float]:
    """Seconds from each end to the next start, in the order of the starts, once all have ended."""

    def ended() -> list[dict[str, Any]]:
        return db.execute(
            "select extract(epoch from h.claimed_at)::float8 as began, "
            "extract(epoch from h.finished_at)::float8 as ended "
            "from gangq.history h join gangq.shapes s on s.id = h.shape_id where s.queue = %s order by 1",
            [queue],
        ).fetchall()

    eventually(lambda: len(ended()) == JOBS, f"all of queue {queue} have ended", 60)
    rows = ended()
    return [after["began"] - before["ended"] for before, after in pairwise(rows)]


@pytest.mark.parametrize("kinds", [["one"], ["one", "other"]], ids=["one kind", "two kinds in turns"])
def test_an_end_under_a_limit_starts_the_next_as_soon_as_one_without(
    db: Connection, client: Client, fleet: Fleet, kinds: list[str]
) -> None:
    for queue in ("free", "limited"):
        client.set_queue(name=queue)
    fleet.start("free", queues=["free"], devices="none", slots=1, memory_mb=9)
    fleet.start("limited", queues=["limited"], devices="none", slots=2, memory_mb=9)
    limit: dict[str, Any] = {"limit_key": "seat", "limit": 1}
    for queue, more in (("free", {}), ("limited", limit)):
        for n in range(JOBS):
            # Each of another priority: in turns, every one of them needs a pass.
            client.submit(
                task=kinds[n % len(kinds)],
                queue=queue,
                memory_mb=1,
                priority=(JOBS - n) * (len(kinds) > 1),
                **more,
            )
    free, limited = (gaps(db, queue) for queue in ("free", "limited"))
    print(f"median gap {median(free):.3f} s, with a limit {median(limited):.3f} s")
    assert median(free) < POLL_S / 2
    assert median(limited) < median(free) + POLL_S / 2
