"""An installation of the second release, at work, gets roles, planned starts and queue trees under its gangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from gangq import schema
from gangq.client import Client
from gangq.errors import Busy

# What the second release leaves behind while it works. Gangs: 1 runs, 2 is reserved, 3 drains, 4 is due in
# an hour, 5 waits and has a worker kept for it, 6 waits for job 13, which runs alone; 7 has failed.
AT_WORK = """
insert into gangq.queues_table (name, policy) values ('large', 'largest_first'), ('line', 'fifo');
insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels)
values ('default', 'train', 1, 100, 0, 0, '{}'), ('default', 'train', 0, 0, 10, 1, '{}'),
  ('large', 'train', 0, 0, 10, 1, '{}');
insert into gangq.incarnations (id, name, host, address, kind, slots, memory_mb, cpus, queues, registered_at)
select nextval('gangq.incarnation_ids'), 'w' || n, 'h' || n, 'h' || n, 'command', 4, 40, 4,
  '{default,large,line}', now()
from generate_series(1, 2) n;
insert into gangq.leases (incarnation, expires_at, renewed_at, lease_s)
select n, now() + interval '1000 s', now(), 1000 from generate_series(1, 2) n;
insert into gangq.device_registry (uuid, host, index, vram_mb, source, offered_by, seen_at)
select 'G' || n, 'h1', n, 100, 'nvml', 1, now() from generate_series(0, 1) n;
insert into gangq.device_claimants select id, 1 from gangq.device_registry;

insert into gangq.live_gangs (id, order_key, shape_id, size, epoch, priority, max_attempts, max_crashes, max_trips,
  state, checkpoint_mode, claim_deadline_s, submitted_at, submitter, not_before, reserved_at, deadline_at, go_at,
  drain_started_at, drain_cause)
select nextval('gangq.gang_ids'), (1000::bigint << 50) + n, s, 2, 1, 0, 3, 3, 3, state, 'each', 30, now(), 'me',
  case when n = 4 then now() + interval '1 hour' end, case when n < 3 then now() end,
  case when state = 'reserved' then now() + interval '1000 s' end, case when n in (1, 3) then now() end,
  case when n = 3 then now() end, case when n = 3 then 'preempt' end
from (values (1, 1, 'running'), (2, 2, 'reserved'), (3, 2, 'draining'), (4, 2, 'blocked'), (5, 3, 'blocked'),
  (6, 2, 'waiting')) as g(n, s, state);
insert into gangq.live_jobs (id, order_key, gang_id, rank, state, shape_id, token, incarnation, ran_on, claimed_at,
  deadline_at, told_at, stop_reason, waits_on, attempts, max_attempts, max_crashes, max_trips, priority, submitted_at,
  submitter, payload)
select nextval('gangq.job_ids'), (1000::bigint << 50) + 10 + n, g, (n - 1) % 2, state, s,
  case when claimed then 100 + n end, worker, case when g in (1, 3) then 1 else worker end,
  case when claimed then now() end, case when state = 'reserved' then now() + interval '1000 s' end,
  case when state = 'preempting' then now() end, case when state = 'preempting' then 'preempt' end,
  case when state = 'waiting' then 1 else 0 end, 1, 3, 3, 3, 0, now(), 'me', jsonb_build_object('n', n)
from (
  select n, g, s, state, worker, state in ('running', 'preempting') as claimed
  from (values (1, 1, 1, 'running', 1), (2, 1, 1, 'running', 1), (3, 2, 2, 'reserved', 2), (4, 2, 2, 'reserved', 2),
    (5, 3, 2, 'preempting', 1), (6, 3, 2, 'preempted', null), (7, 4, 2, 'blocked', null), (8, 4, 2, 'blocked', null),
    (9, 5, 3, 'blocked', null), (10, 5, 3, 'blocked', null), (11, 6, 2, 'waiting', null),
    (12, 6, 2, 'waiting', null)) as m(n, g, s, state, worker)) x
order by n;
insert into gangq.live_jobs (id, order_key, state, shape_id, token, incarnation, ran_on, claimed_at, attempts,
  max_attempts, max_crashes, max_trips, priority, submitted_at, submitter, payload)
values (nextval('gangq.job_ids'), (1000::bigint << 50) + 9, 'running', 2, 113, 1, 1, now(), 1, 3, 3, 3, 0, now(),
  'me', '{}');
insert into gangq.dependencies (job_id, on_job_id) values (11, 13), (12, 13);
insert into gangq.device_holds (device_id, kind, job_id, token, since)
select r.id, 'job', r.id, 100 + r.id, now() from gangq.device_registry r;
insert into gangq.earmarks (incarnation, gang_id, order_key) values (2, 5, (1000::bigint << 50) + 5);
insert into gangq.gang_history (gang_id, finished_at, submitted_at, shape_id, size, epoch, priority, attempts,
  max_attempts, crashes, max_crashes, trips, max_trips, placement_misses, never_started, preemptions, state,
  retention, checkpoint_mode, claim_deadline_s, submitter)
values (nextval('gangq.gang_ids'), now(), now(), 2, 2, 3, 0, 3, 3, 0, 3, 0, 3, 0, 0, 0, 'failed', 'long', 'each', 30,
  'me');
insert into gangq.history (job_id, gang_id, rank, token, submitted_at, finished_at, shape_id, priority, attempts,
  max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention, submitter, payload)
select nextval('gangq.job_ids'), 7, n, 200 + n, now(), now(), 2, 0, 3, 3, 0, 3, 0, 3, 0, 'failed', 'long', 'me', '{}'
from generate_series(0, 1) n;
insert into gangq.tick_state (singleton, last_at) values (true, now()) on conflict (singleton) do update
  set last_at = now();
"""

TABLES = (
    "live_jobs",
    "live_gangs",
    "incarnations",
    "leases",
    "device_registry",
    "device_holds",
    "dependencies",
    "history",
    "gang_history",
    "shapes",
    "settings",
)


@pytest.fixture
def old(empty_dsn: str, migrate_to: Callable[[str], None]) -> str:
    """A database of the second release with work in it; migrate() then brings it here."""
    migrate_to("0002_watchdogs")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(AT_WORK.encode())
    return empty_dsn


def rows(dsn: str, statement: str) -> list[dict[str, Any]]:
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        return conn.execute(statement.encode()).fetchall()


def states(client: Client) -> str:
    """Of gangs 1 to 7."""
    found = client.gang_states(ids=range(1, 8))
    return " ".join(found[n] for n in range(1, 8))


def test_a_database_at_work_is_migrated_and_loses_nothing(old: str) -> None:
    before = {table: rows(old, f"select * from gangq.{table} order by 1") for table in TABLES}
    report = schema.migrate(old, log=lambda _: None)
    assert report.applied == tuple(f.name for f in schema.migrations()[2:])
    assert report.applied[0] == "0003_placement"
    for table in TABLES:
        after = rows(old, f"select * from gangq.{table} order by 1")
        kept = [{key: row[key] for key in was} for row, was in zip(after, before[table], strict=True)]
        assert kept == before[table], table
    assert rows(old, "select * from gangq.violations") == []


def test_every_gang_gets_the_kind_that_says_what_it_asked_for(old: str) -> None:
    schema.migrate(old, log=lambda _: None)
    gangs = rows(
        old,
        "select g.id, g.world_size, k.queue, r.name, r.shape_id = g.shape_id as same, r.min_members, r.max_members, "
        "r.first_rank, r.strategy, g.failure_policy, g.timeout_style from gangq.live_gangs g "
        "join gangq.gang_kinds k on k.id = g.kind_id join gangq.kind_roles r on r.kind_id = k.id order by g.id",
    )
    assert [(g["id"], g["world_size"], g["queue"]) for g in gangs] == [
        (1, 2, "default"),
        (2, 2, "default"),
        (3, 2, "default"),
        (4, None, "default"),
        (5, None, "large"),
        (6, None, "default"),
    ]
    alike = {"name": "member", "same": True, "min_members": 2, "max_members": 2, "first_rank": 0}
    alike |= {"strategy": "pack", "failure_policy": "restart_gang", "timeout_style": "requeue"}
    assert all({key: g[key] for key in alike} == alike for g in gangs)
    assert rows(old, "select count(*) as kinds from gangq.gang_kinds") == [{"kinds": 3}]


def test_what_nobody_asked_for_becomes_what_planned_starts_serve_and_a_policy_that_was_chosen_stays(
    old: str,
) -> None:
    schema.migrate(old, log=lambda _: None)
    policies = {q["name"]: q["policy"] for q in rows(old, "select name, policy from gangq.queues_table")}
    assert policies == {"default": "priority", "large": "priority", "line": "fifo"}
    with Client(old) as client:
        client.set_queue(name="new")
        client.set_queue(name="large", policy="largest_first")
    policies = {q["name"]: q["policy"] for q in rows(old, "select name, policy from gangq.queues_table")}
    assert (policies["new"], policies["large"]) == ("priority", "largest_first")


def test_a_gang_waits_for_its_timeout_from_when_it_is_due(old: str) -> None:
    schema.migrate(old, log=lambda _: None)
    late = rows(
        old,
        "select id from gangq.live_gangs where timeout_s = 900 "
        "and timeout_at < greatest(clock_timestamp() - interval '60 s', not_before) + interval '900 s'",
    )
    assert late == []


def test_gangs_in_every_state_go_on_to_their_ends(old: str) -> None:
    schema.migrate(old, log=lambda _: None)
    with Client(old) as client:
        assert states(client) == "running reserved draining blocked blocked waiting failed"
        told = client.heartbeat(incarnation=1, job_ids=[1, 2, 5, 13], tokens=[101, 102, 105, 113])
        assert {(i.job_id, i.action) for i in told} == {
            (1, "continue"),
            (2, "continue"),
            (5, "preempt"),
            (13, "continue"),
        }

        reserved = client.claim(incarnation=2, max_jobs=9)
        assert [(c.job_id, c.gang_id, c.rank, c.world_size) for c in reserved] == [(3, 2, 0, 2), (4, 2, 1, 2)]
        assert [m.rank for m in client.barrier(job_id=3, token=reserved[0].token)] == [0, 1]

        client.tick(force=True)
        assert states(client) == "running running draining blocked reserved waiting failed"
        placed = client.claim(incarnation=2, max_jobs=9)
        assert [c.job_id for c in placed] == [9, 10]
        assert client.ack_preempted(job_id=5, token=105) == "preempted"
        assert client.gang(id=3).state == "blocked"

        ends = [(1, 101), (2, 102), (13, 113), *((c.job_id, c.token) for c in (*reserved, *placed))]
        client.complete(job_ids=[job for job, _ in ends], tokens=[token for _, token in ends])
        assert {s.state for s in client.retry(gang_ids=[7])} == {"blocked"}
        for _ in range(2):  # what one tick sets free is seen by the next
            client.tick(force=True)
        assert states(client) == "done done reserved blocked done reserved reserved"
        last = [c for worker in (1, 2) for c in client.claim(incarnation=worker, max_jobs=9)]
        assert sorted(c.gang_id or 0 for c in last) == [3, 3, 6, 6, 7, 7]
        client.complete(job_ids=[c.job_id for c in last], tokens=[c.token for c in last])
        assert states(client) == "done done done blocked done done done"
        assert client.violations() == []
        assert client.events(kind="tick_error") == []


def test_old_gangs_and_new_ones_wait_in_one_order(old: str) -> None:
    """The kinds that the migration made are judged like any other, and who came first is placed first."""
    schema.migrate(old, log=lambda _: None)
    with Client(old) as client:
        new = client.submit_gang(task="train", size=2, queue="large", memory_mb=10, cpus=1)
        client.tick(force=True)
        assert (client.gang(id=5).state, client.gang(id=new.gang_id).state) == ("reserved", "blocked")
        assert client.violations() == []


def test_somebody_who_reads_makes_it_give_up_and_change_nothing(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(old) as reader, monkeypatch.context() as patch:
        patch.setattr(schema, "_WAIT_FOR_TABLE", "50ms")
        reader.execute("select * from gangq.live_gangs")
        with pytest.raises(Busy):
            schema.migrate(old, log=lambda _: None)
    assert rows(old, "select to_regclass('gangq.cordons') as it") == [{"it": None}]
    assert rows(old, "select policy from gangq.queues_table where name = 'large'") == [
        {"policy": "largest_first"}
    ]
    applied = schema.migrate(old, log=lambda _: None).applied
    assert applied == tuple(file.name for file in schema.migrations()[2:])
