"""Shapes are kept for ever: what was submitted once must not make every later claim dearer."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from sql.drive import Q

pytestmark = [pytest.mark.every_server, pytest.mark.own_database, pytest.mark.slow]

PAST = 100_000


def claim_cost(q: Q, incarnation: int, max_jobs: int) -> int:
    return cost(q, f"select * from gangq.claim({incarnation}, '{uuid.uuid4()}', {max_jobs})")


def cost(q: Q, call: str) -> int:
    """Buffers that one call touches on a warm connection; nothing is kept of it."""
    with psycopg.connect(q.db.info.dsn, autocommit=True, row_factory=dict_row) as warm:
        for _ in range(2):
            with warm.transaction(force_rollback=True):
                row = warm.execute("explain (analyze, buffers, format json) " + call).fetchone()
        assert row is not None
        plan: dict[str, Any] = row["QUERY PLAN"][0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def past_shapes(q: Q) -> None:
    """What was submitted once: other numbers, and other labels, models, submitters and devices to avoid.

    Without the checks of references and with digests that are only as long as the true ones: in a third of the time.
    """
    q.sql("set session_replication_role = replica")
    for task, numbers, differing in (
        ("past", "0, n", "'{}', null, null, null"),
        ("work", "0, 0", "jsonb_build_object('run', n), null, null, null"),
        ("work", "0, 0", "'{}', 'model ' || n, null, null"),
        ("work", "0, 0", "'{}', null, 'user ' || n, null"),
        ("work", "0, 0", "'{}', null, null, array[n]"),
    ):
        q.sql(
            "insert into gangq.shapes "
            "(queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, submitter, avoid, digest) "
            f"select 'default', '{task}', 0, {numbers}, 0, {differing}, sha256(uuid_send(gen_random_uuid())) "
            f"from generate_series(1, {PAST // 5}) n"
        )
    q.sql(f"insert into gangq.gang_kinds (queue, spec) select 'default', n from generate_series(1, {PAST}) n")
    q.sql(
        "insert into gangq.kind_roles (kind_id, ordinal, name, shape_id, min_members, max_members, first_rank, "
        "strategy, balanced) select k.id, 1, 'member', s.id, 1, 1, 0, 'pack', false "
        "from (select id, row_number() over (order by id) as n from gangq.gang_kinds) k "
        "join (select id, row_number() over (order by id) as n from gangq.shapes) s using (n) "
        " where not exists (select 1 from gangq.kind_roles r where r.kind_id = k.id)"
    )
    q.sql("reset session_replication_role")
    q.sql("vacuum analyze")


def test_a_claim_among_100000_past_shapes_costs_what_it_costs_without_them(q: Q) -> None:
    worker = q.worker(slots=8)
    for n in range(4):
        q.submit(f"task {n}", count=5, memory_mb=0)
    q.sql("vacuum analyze gangq.live_jobs, gangq.shapes")
    before = {n: claim_cost(q, worker.incarnation, n) for n in (1, 8)}
    past_shapes(q)
    after = {n: claim_cost(q, worker.incarnation, n) for n in (1, 8)}
    assert all(after[n] <= before[n] + 40 for n in before), f"{before} grew to {after}"


CALLS = {
    "submit": "select gangq.submit('work')",
    "submit what is new": "select gangq.submit('work', options => "
    '\'{"labels": {"new": 1}, "wait_for_hardware": true}\')',
    "submit with a selector": "select gangq.submit('work', options => "
    '\'{"selector": [{"key": "a", "op": "absent"}]}\')',
    "submit_gang": "select * from gangq.submit_gang('work', 2, options => '{\"strategy\": \"spread\"}')",
    "submit to a fair queue": "select gangq.submit('work', queue => 'fair')",
    "tick": "select * from gangq.tick(true)",
    "waiting": "select * from gangq.waiting",
    "queues": "select * from gangq.queues",
    "idle workers": "select * from gangq.idle_beside_work(1)",
}


def test_nothing_that_runs_often_reads_past_shapes(q: Q) -> None:
    q.call("set_queue", name="fair", policy="fair")
    q.worker(slots=8, queues=["default", "fair"])
    q.worker("w2")
    q.submit("work", count=3, queue="fair")
    q.submit("work", count=3)
    q.submit_gang(5, task="work", wait_for_hardware=True)
    q.sql("vacuum analyze")
    before = {name: cost(q, call) for name, call in CALLS.items()}
    past_shapes(q)
    after = {name: cost(q, call) for name, call in CALLS.items()}
    # Indexes are a level deeper, and plans choose them where a short table was read as a whole.
    grown = {name: (before[name], after[name]) for name in CALLS if after[name] > before[name] * 1.5 + 100}
    assert not grown


def test_a_requirement_is_interned_once(q: Q) -> None:
    q.call("set_queue", name="fair", policy="fair")
    asked: list[dict[str, Any]] = [
        {"cpus": 0.1234},
        {"labels": {"a": 1, "b": [1.0]}},
        {"selector": [{"key": "a", "op": "in", "values": ["y", "x"]}], "tolerates": ["t", "s"]},
        {"model": "m", "queue": "fair"},
    ]
    for _ in range(2):
        for options in asked:
            q.submit(**options)
        q.submit(cpus=0.12340, labels={})
    assert q.value("select count(*) from gangq.shapes") == len(asked) + 1  # in a fair queue two
    assert q.value("select bool_and(s.digest = gangq.shape_digest(s)) from gangq.shapes s")


def test_a_claim_that_finds_nothing_reads_no_past_shape(q: Q) -> None:
    worker = q.worker()
    past_shapes(q)
    assert claim_cost(q, worker.incarnation, 1) <= 60


def test_a_claim_visits_every_shape_that_waits_and_takes_the_best(q: Q) -> None:
    worker = q.worker(memory_mb=1)
    q.sql(
        "select gangq.submit('fits', priority => n, options => '{\"memory_mb\": 1}') from generate_series(1, 3) n"
    )
    q.sql(
        "select gangq.submit('too large', priority => 9, "
        "options => jsonb_build_object('memory_mb', 1 + n, 'wait_for_hardware', true)) from generate_series(1, 300) n"
    )
    best = q.submit("last of all", memory_mb=1, priority=8)
    assert worker.take().job_id == best
