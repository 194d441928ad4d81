"""Shapes are kept for ever: what was submitted once must not make every later claim dearer."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
from drive import Q
from psycopg.rows import dict_row

PAST = 50_000


def claim_cost(q: Q, incarnation: int, max_jobs: int) -> int:
    """Buffers that one claim touches on a warm connection; nothing is kept of it."""
    claim = f"select * from gangq.claim({incarnation}, '{uuid.uuid4()}', {max_jobs})"
    with psycopg.connect(q.db.info.dsn, autocommit=True, row_factory=dict_row) as warm:
        for _ in range(2):
            with warm.transaction(force_rollback=True):
                row = warm.execute("explain (analyze, buffers, format json) " + claim).fetchone()
        assert row is not None
        plan: dict[str, Any] = row["QUERY PLAN"][0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def past_shapes(q: Q) -> None:
    q.sql(
        "insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels) "
        f"select 'default', 'past', 0, 0, n, 0, '{{}}' from generate_series(1, {PAST}) n"
    )
    q.sql("vacuum analyze gangq.shapes")


def test_a_claim_among_50000_past_shapes_costs_what_it_costs_without_them(q: Q) -> None:
    worker = q.worker(slots=8)
    for n in range(4):
        q.submit(f"task {n}", count=5, memory_mb=0)
    q.sql("vacuum analyze gangq.live_jobs, gangq.shapes")
    before = {n: claim_cost(q, worker.incarnation, n) for n in (1, 8)}
    past_shapes(q)
    after = {n: claim_cost(q, worker.incarnation, n) for n in (1, 8)}
    assert all(after[n] <= before[n] + 40 for n in before), f"{before} grew to {after}"


def test_a_claim_that_finds_nothing_reads_no_past_shape(q: Q) -> None:
    worker = q.worker()
    past_shapes(q)
    assert claim_cost(q, worker.incarnation, 1) <= 60


def test_a_claim_visits_every_shape_that_waits_and_takes_the_best(q: Q) -> None:
    worker = q.worker(memory_mb=1)
    q.sql("select gangq.submit('fits', memory_mb => 1, priority => n) from generate_series(1, 3) n")
    q.sql(
        "select gangq.submit('too large', memory_mb => 1 + n, priority => 9, wait_for_hardware => true) "
        "from generate_series(1, 300) n"
    )
    best = q.submit("last of all", memory_mb=1, priority=8)
    assert worker.take().job_id == best
