"""An installation of the first release, at work, gets the watchdogs' tables under its running jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from gangq import schema
from gangq.client import Client

# What the first release leaves behind while it works: a job and a gang that run with devices, one that
# waits, one that ended, and a device that an operator has quarantined.
AT_WORK = """
insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels)
values ('default', 'train', 1, 100, 0, 0, '{}'), ('default', 'train', 0, 0, 0, 0, '{}');
insert into gangq.incarnations (id, name, host, address, kind, slots, memory_mb, cpus, queues,
  registered_at)
values (nextval('gangq.incarnation_ids'), 'w1', 'h1', 'h1', 'command', 4, 0, 0, '{default}', now());
insert into gangq.leases (incarnation, expires_at, renewed_at, lease_s) values (1, now() + interval '120
  s', now(), 120);
insert into gangq.device_registry (uuid, host, index, vram_mb, source, offered_by, seen_at)
select 'G' || n, 'h1', n, 100, 'nvml', 1, now() from generate_series(0, 3) n;
insert into gangq.device_claimants select id, 1 from gangq.device_registry;
insert into gangq.live_gangs (id, order_key, shape_id, size, epoch, priority, max_attempts, max_crashes,
  max_trips, state,
  checkpoint_mode, claim_deadline_s, submitted_at, go_at, submitter)
values (nextval('gangq.gang_ids'), (1000::bigint << 50) + 1, 1, 2, 1, 0, 3, 3, 3, 'running', 'each', 30,
  now(), now(), 'me');
insert into gangq.live_jobs (id, order_key, token, incarnation, ran_on, gang_id, rank, submitted_at,
  claimed_at, shape_id,
  priority, attempts, max_attempts, max_crashes, max_trips, state, submitter, payload)
select nextval('gangq.job_ids'), (1000::bigint << 50) + n, 100 + n, 1, 1, case when n < 3 then 1 end,
  case when n < 3 then n - 1 end,
  now(), now(), 1, 0, 1, 3, 3, 3, 'running', 'me', '{}' from generate_series(1, 3) n;
insert into gangq.live_jobs (id, order_key, submitted_at, shape_id, priority, max_attempts, max_crashes,
  max_trips, state,
  submitter, payload)
values (nextval('gangq.job_ids'), (1000::bigint << 50) + 9, now(), 2, 0, 3, 3, 3, 'pending', 'me', '{"n":
  4}');
insert into gangq.device_holds (device_id, kind, job_id, token, since)
select r.id, 'job', r.id, 100 + r.id, now() from gangq.device_registry r where r.index < 3;
insert into gangq.device_holds (device_id, kind, reason, since) values (4, 'quarantine', 'smells', now());
insert into gangq.progress (job_id, token, beat_at, data) values (3, 103, now(), '{"step": 7}');
insert into gangq.history (job_id, token, submitted_at, finished_at, shape_id, priority, attempts,
  max_attempts, crashes,
  max_crashes, trips, max_trips, stops, state, retention, submitter, payload)
values (99, 7, now(), now(), 2, 0, 1, 3, 0, 3, 1, 3, 0, 'done', 'short', 'me', '{}');
insert into gangq.events (at, kind, job_id, token, reason, data)
values (now(), 'trip', 99, 7, 'Stalled', '{"type": "Stalled", "code": "theirs", "trips": 1}');
insert into gangq.tick_state (singleton, last_at) values (true, now()) on conflict (singleton) do update
  set last_at = now();
"""


@pytest.fixture
def old(empty_dsn: str, migrate_to: Callable[[str], None]) -> str:
    """A database of the first release with work in it; migrate() then brings it here."""
    migrate_to("0001_foundation")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(AT_WORK.encode())
    return empty_dsn


def rows(dsn: str, statement: str) -> list[dict[str, Any]]:
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        return conn.execute(statement.encode()).fetchall()


TABLES = (
    "live_jobs",
    "live_gangs",
    "incarnations",
    "leases",
    "device_registry",
    "device_holds",
    "progress",
    "history",
    "shapes",
    "settings",
    "queues_table",
)


def test_a_database_at_work_is_migrated_and_loses_nothing(
    old: str, migrate_to: Callable[[str], None]
) -> None:
    before = {table: rows(old, f"select * from gangq.{table} order by 1") for table in TABLES}
    migrate_to("0002_watchdogs")
    for table in TABLES:
        after = rows(old, f"select * from gangq.{table} order by 1")
        kept = [{key: row[key] for key in was} for row, was in zip(after, before[table], strict=True)]
        assert kept == before[table], table
    report = schema.migrate(old, log=lambda _: None)
    assert report.applied == tuple(f.name for f in schema.migrations()[2:])
    assert rows(old, "select * from gangq.violations") == []


def test_what_ran_when_it_was_migrated_goes_on_and_is_watched(old: str) -> None:
    schema.migrate(old, log=lambda _: None)
    with Client(old) as client:
        told = client.heartbeat(incarnation=1, job_ids=[3], tokens=[103], beats=[{"step": 8}])
        assert {(i.job_id, i.action) for i in told} == {(1, "continue"), (2, "continue"), (3, "continue")}
        stalled = {"type": "Stalled", "message": "no step"}
        assert client.trip(incarnation=1, job_id=3, token=103, code=78, error=stalled) == "pending"
        assert client.trip(incarnation=1, job_id=1, token=101, code=76, error=stalled) == "preempted"
        assert client.ack_preempted(job_id=2, token=102) == "preempted"
        assert client.gang(id=1).state == "blocked"
        assert {d.uuid: d.health for d in client.devices()} == {
            "G0": "ok",
            "G1": "ok",
            "G2": "ok",
            "G3": "quarantined",
        }
        assert sorted(c.job_id for c in client.claim(incarnation=1, max_jobs=9)) == [3, 4]
        assert [t.code for t in client.trips(job_id=99)] == [None], "an old trip is shown as far as it goes"
        assert client.violations() == []


def test_the_numbers_are_the_documented_defaults(old: str) -> None:
    schema.migrate(old, log=lambda _: None)
    (settings,) = rows(old, "select * from gangq.settings")
    wanted = {
        "budget_s": 2100,
        "budget_gpu_s": 8100,
        "stall_timeout_s": 120,
        "load_grace_s": 1200,
        "health_window_s": 300,
        "device_trips": 3,
        "notify_only": [],
    }
    assert {key: settings[key] for key in wanted} == wanted
    assert float(settings["brake_share"]) == pytest.approx(0.2)


def test_migrating_it_takes_no_longer_than_its_locks_allow_while_somebody_reads(old: str) -> None:
    """A reader's transaction holds a table that gets columns: the migration gives up, and changes
    nothing."""
    with psycopg.connect(old) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_WAIT_FOR_TABLE", "50ms")
        reader.execute("select * from gangq.settings")
        with pytest.raises(schema.Busy):
            schema.migrate(old, log=lambda _: None)
    assert rows(old, "select to_regclass('gangq.evidence') as it") == [{"it": None}]
    assert schema.migrate(old, log=lambda _: None).applied == tuple(f.name for f in schema.migrations()[1:])
