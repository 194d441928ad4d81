"""What each verb and view costs with 100,000 jobs in every state: no growing scan, bounded buffers.

Verbs by their SQL, and what an operator opens by the queries of the client and of the command line. The whole call is
measured from outside, so that what its inner statements read is counted too: buffers by
`explain (analyze, buffers)`, sequential scans by the counters PostgreSQL keeps for the running transaction.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor

from gangq.cli import queries
from gangq.client import Client
from gangq.client.verb import Query
from gangq.client.verbs import Verbs
from gangq.embedded import Server

pytestmark = [pytest.mark.every_server, pytest.mark.slow]

MANY = 100_000
WORKERS = 1_000
# Bounded by the size of the fleet and what it runs, by the number of kinds of job or of targets, or by one: these may
# be scanned.
MAY_BE_SCANNED = {
    "progress",
    "incarnations",
    "leases",
    "device_registry",
    "device_claimants",
    "device_holds",
    "sleepers",
    "places",
    "shapes",
    "queues_table",
    "settings",
    "tick_state",
    "migrations",
    "retried",
    "unsettled",
    "lock_rows",
    "sequence_base",
    "worker_names",
    "notification_targets",
    "outbox",
}

FILL = (
    Path(__file__)
    .with_name("fill.sql")
    .read_text()
    .replace(":many", str(MANY))
    .replace(":workers", str(WORKERS))
)


@pytest.fixture(scope="module")
def full(server: Server, template: str) -> Iterator[str]:
    """A database with 100,000 jobs in each state."""
    dsn = server.create_database("plans", template=template)
    with psycopg.connect(dsn, autocommit=True) as conn:
        # Where it comes by while this is being filled, rows lie on up to twice as many pages.
        for (table,) in conn.execute(
            "select oid::regclass::text from pg_class where relnamespace = 'gangq'::regnamespace and relkind = 'r'"
        ).fetchall():
            conn.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
        for statement in FILL.split(";\n"):
            if statement.strip():
                conn.execute(statement.encode())
        # As ticks have done while all this ended.
        conn.execute("select gangq.count_ended()")
    yield dsn
    server.drop_database("plans")


def cost(dsn: str, sql: str) -> tuple[int, dict[str, int]]:
    """Buffers touched by a warm run of `sql`, and rows it reads by scanning tables that must not be scanned.

    `{idle}`, `{seated}`, `{busy}`, `{job}` and `{token}` in it: an idle worker, one with eight open places, a busy
    one, a running job and its token.
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        names = conn.execute(
            "select (select max(id) from gangq.incarnations where name = 'idle'), i.id, j.id, j.token, "
            "(select max(id) from gangq.incarnations where name = 'seated') "
            "from gangq.incarnations i join gangq.live_jobs j on j.incarnation = i.id where i.name = 'busy7' limit 1"
        ).fetchone()
        assert names is not None
        conn.execute("update gangq.places set until = gangq.place_until(gangq.now())")
        sql = sql.format(idle=names[0], busy=names[1], job=names[2], token=names[3], seated=names[4])
    return measured(dsn, sql)


def measured(dsn: str, sql: str) -> tuple[int, dict[str, int]]:
    """Buffers touched by a warm run of `sql`, and rows it reads by scanning tables that must not be scanned.

    Of two runs the one disturbed least: where some session changes many catalogue rows, be it in another database
    (a tick that makes partitions, a migration), all sessions of the server forget their catalogue caches. The next
    statement reads the catalogue anew: a retry of 188 buffers touched 573 to 982.
    """
    with psycopg.connect(dsn, autocommit=True) as counted:
        # The first run warms catalogue caches and plans: a worker's connection is as warm.
        with counted.transaction(force_rollback=True):
            counted.execute(sql.encode())
        return min((_run(counted, sql) for _ in range(2)), key=lambda run: run[0])


def _run(counted: psycopg.Connection[Any], sql: str) -> tuple[int, dict[str, int]]:
    with counted.transaction(force_rollback=True):
        before = _scans(counted)
        row = counted.execute(("explain (analyze, buffers, format json) " + sql).encode()).fetchone()
        assert row is not None
        plan: dict[str, Any] = row[0][0]["Plan"]
        scanned = {table: n - before.get(table, 0) for table, n in _scans(counted).items()}
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return buffers, {table: n for table, n in scanned.items() if n > 100 and table not in MAY_BE_SCANNED}


def _scans(conn: psycopg.Connection[Any]) -> dict[str, int]:
    rows = conn.execute(
        "select relname, seq_tup_read from pg_stat_xact_user_tables where schemaname = 'gangq'"
    )
    return dict(rows.fetchall())


@pytest.fixture(scope="module")
def idle(full: str) -> str:
    """The same database, with one idle worker registered."""
    with psycopg.connect(full, autocommit=True) as conn:
        conn.execute(
            "select gangq.register_worker('idle', 'host0', '{default,gpu}', options => '{\"prefetch\": 100}')"
        )
        conn.execute(
            "select gangq.set_queue('lab', '{\"maximum\": {\"jobs\": 500}}'), "
            "gangq.set_queue('lab.limited', '{\"submitter_maximum\": {\"jobs\": 400}}')"
        )
        conn.execute(
            "select count(*) from gangq.submit('t', 'lab.limited', array_fill('{}'::jsonb, array[30000]))"
        )
        conn.execute(
            "select gangq.open_place(i.incarnation, (select min(j.id) from gangq.live_jobs j "
            "join gangq.shapes s on s.id = j.shape_id where s.model = 'm')) "
            "from gangq.register_worker('seated', 'host0', '{default}', 8) i, generate_series(1, 8)"
        )
        for table, first in (("requests_before", 0), ("requests", MANY)):
            conn.execute(
                f"insert into gangq.{table} (request_id, login, job_ids) "
                "select lpad(n::text, 32, '0')::uuid, session_user, array[n] "
                f"from generate_series({first}, {first} + {MANY} - 1) n".encode()
            )
        conn.execute("vacuum analyze gangq.incarnations, gangq.leases")
    return full


_MOVED, _KEPT, _NEW = (f"{n:032d}" for n in (7, MANY + 7, 2 * MANY + 7))


def _asked(request_id: str, **more: Any) -> str:
    """The options of a submission, as a text that is formatted later."""
    return (
        json.dumps({"request_id": str(uuid.UUID(request_id)), **more}).replace("{", "{{").replace("}", "}}")
    )


"""Ids of calls whose answers are in requests_before, in requests, and nowhere."""


@pytest.mark.parametrize(
    ("sql", "most"),
    [
        ("select * from gangq.claim({idle}, gen_random_uuid())", 150),
        ("select * from gangq.claim({idle}, gen_random_uuid(), 100)", 3500),
        ("select * from gangq.claim({seated}, gen_random_uuid())", 150),
        ("select * from gangq.claim({seated}, gen_random_uuid(), 8)", 600),
        ("select * from gangq.limit_hit('lab.limited', null, 'me', 1, 1, 0, 0, 0)", 100),
        ("select * from gangq.complete(array[{job}], array[{token}])", 150),
        (
            "select * from gangq.complete_and_claim({busy}, array[{job}], array[{token}], "
            "request_id => gen_random_uuid())",
            900,
        ),
        ("select * from gangq.fail({job}, {token})", 300),
        ("select * from gangq.requeue({job}, {token})", 300),
        ("select * from gangq.release(array[{job}], array[{token}])", 300),
        ("select * from gangq.heartbeat({idle})", 60),
        ("select * from gangq.heartbeat({busy})", 300),
        (
            "select * from gangq.heartbeat({busy}, array[{job}], array[{token}], array['{{\"step\": 1}}'::jsonb])",
            400,
        ),
        ("select * from gangq.save_checkpoint({job}, {token}, 1, 'x')", 30),
        ("select * from gangq.load_checkpoint({job}, {token})", 15),
        ("select * from gangq.inputs({job}, {token})", 15),
        ("select * from gangq.append_log(array[{job}], array[{token}], array[1], array['x'])", 30),
        ("select * from gangq.trip({busy}, {job}, {token}, 75, '{{}}')", 300),
        ("select * from gangq.register_worker('another', 'host0', '{{default,gpu}}')", 200),
        ("select * from gangq.cordon(host => 'host0')", 200),
        ("select * from gangq.submit('fits')", 120),
        ("select * from gangq.submit('fits', options => '{{\"model\": \"m\"}}')", 150),
        (f"select * from gangq.submit('fits', request_id => '{_NEW}')", 150),
        (f"select * from gangq.submit('fits', request_id => '{_KEPT}')", 120),
        (f"select * from gangq.submit('fits', request_id => '{_MOVED}')", 120),
        (f"select * from gangq.submit('other', request_id => '{_MOVED}')", 120),
        ("select * from gangq.submit('fits', after => array[{job}])", 40),
        ("select * from gangq.watch_terms('fits')", 20),
        ("select * from gangq.retry(job_ids => array[1000001000])", 200),
        ("select * from gangq.retry_failed(name => 'sweep')", 100),
        ("select * from gangq.retry_failed(since => now() - interval '1 hour', most => 10)", 4000),
        ("select * from gangq.retry_failed(task => 'fits', dry_run => true)", 4000),
        ("select * from gangq.retry_failed(submitter => 'nobody', dry_run => true)", 4000),
        (
            "select * from gangq.set_priority(5, job_ids => array[(select min(j.id) from gangq.live_jobs j)])",
            800,
        ),
        (
            "select * from gangq.submit_gang('train', 4, queue => 'gpu', gpus => 8, "
            "options => '{{\"wait_for_hardware\": true}}')",
            600,
        ),
        (
            "select * from gangq.submit_gang('train', 4, queue => 'gpu', gpus => 8, "
            f"options => '{_asked(_NEW, wait_for_hardware=True)}')",
            650,
        ),
        ("select * from gangq.cancel(array[{job}])", 150),
        (
            "select * from gangq.cancel(array[(select min(j.id) from gangq.live_jobs j where j.id < 100)])",
            150,
        ),
        ("select * from gangq.cancel(gang_ids => array[1000::bigint])", 6000),
        # Six for each of the 100,000 light jobs that run: they share slots with what is placed, so a board tells
        # when they end. Bounded by the fleet, and by nothing that waits or has ended.
        ("select gangq.board()", 700_000),
        ("select * from gangq.reap_expired()", 1500),
        ("select * from gangq.flag_dead_workers()", 1500),
        ("select * from gangq.settle_dependents()", 4500),
        ("select * from gangq.promote_due()", 100),
        ("select * from gangq.rollback_stale()", 100),
        ("select * from gangq.judge_progress()", 50),
        ("select * from gangq.lift_avoided()", 200),
        ("select * from gangq.time_out()", 200),
        ("select * from gangq.move_away()", 50),
        ("select * from gangq.trim_outbox()", 10000),
        ("select * from gangq.count_ended()", 400),
        ("select * from gangq.fetch_notification('oncall')", 60),
        ("select gangq.tell('trip', gangq.now(), null, null, {job}, {busy}, 'r', '{{}}')", 60),
        ("select * from gangq.tick(true)", 11000),
        ("select * from gangq.keep_partitions(true)", 6000),
        # Last, because of all 300 jobs of that worker they leave a dead row for those that come after. Each of
        # these jobs leaves an event too, which tells the token of a lost claim from a last word repeated.
        ("select * from gangq.retire_worker({busy})", 8500),
        ("select * from gangq.report_dead('busy7', {busy}, '{{\"proof\": \"x\"}}')", 8500),
    ],
)
def test_a_verb_reads_little_whatever_waits_runs_or_has_ended(idle: str, sql: str, most: int) -> None:
    buffers, scanned = cost(idle, sql)
    assert not scanned, f"{sql} scans {scanned}"
    assert buffers <= most, f"{sql} touches {buffers} buffers"


OPENED: list[tuple[str, Query[Any], int]] = [
    ("gangq ls", Verbs.jobs(limit=50), 500),
    ("gangq ls --state running", Verbs.jobs(state="running", limit=50), 4000),
    ("gangq ls --state preempting", Verbs.jobs(state=["preempting"], limit=50), 20),
    ("gangq ls --state waiting", Verbs.jobs(state="waiting", limit=50), 16000),
    ("gangq ls --state failed", Verbs.jobs(state="failed", limit=50), 1400),
    ("gangq ls --state failed --state cancelled", Verbs.jobs(state=["failed", "cancelled"], limit=50), 2400),
    ("gangq ls --state done", Verbs.jobs(state="done", limit=50), 500),
    ("gangq ls --gang g5", Verbs.jobs(gang_id=5, limit=50), 500),
    ("gangq ls --name sweep --tag lr", Verbs.jobs(name="sweep", tag="lr", limit=50), 500),
    ("gangq ls batches", Verbs.batches(limit=50), 500),
    ("gangq wait b5", Verbs.batch_states(ids=[5]), 40),
    ("gangq wait b5: its jobs", Verbs.job_states(batch_id=5), 500),
    ("gangq ls gangs", Verbs.gangs(limit=50), 200),
    ("gangq ls gangs --state blocked", Verbs.gangs(state="blocked", limit=50), 700),
    ("gangq ls gangs --state failed", Verbs.gangs(state="failed", limit=50), 600),
    ("gangq show 100", Verbs.jobs(ids=[100]), 40),
    ("gangq show 1000000100", Verbs.jobs(ids=[1000000100]), 40),
    ("gangq show 100: its attempts", Verbs.attempts(job_id=100), 40),
    ("gangq show 1000000100: its attempts", Verbs.attempts(job_id=1000000100), 60),
    ("attempts of a gang", Verbs.attempts(gang_id=5), 600),
    ("gangq show 100: its events", Verbs.events(job_id=100), 20),
    ("gangq show 100: its evidence", Verbs.evidence(job_id=100), 20),
    ("gangq show g5", Verbs.gangs(ids=[5]), 100),
    ("gangq show g1000000100", Verbs.gangs(ids=[1000000100]), 40),
    ("gangq show g5: its members", Verbs.jobs(gang_id=5), 500),
    ("gangq show g5: its timeline", Verbs.timeline(gang_id=5), 300),
    ("gangq show g5: its drains", Verbs.drains(gang_id=5), 100),
    ("gangq show g5: its trips", queries.trips(gang_id=5), 100),
    ("gangq logs 100", queries.logs_after({100: (0, -1)}), 20),
    ("gangq logs 100 --follow", Verbs.job_states(ids=[100, 1000000100]), 50),
    ("gangq logs g5 --follow", Verbs.gang_states(ids=[5, 1000000100]), 50),
    ("gangq events", queries.newest_events(50), 50),
    ("gangq events b5", Verbs.events(batch_id=5), 200),
    ("gangq events --follow", Verbs.events(after_id=MANY - 10), 150),
    ("events of one kind", Verbs.events(kind="drain", limit=50), 60),
    ("gangq explain 100", Verbs.explain_job(job_id=100), 800),
    ("gangq explain g1000", Verbs.explain_gang(gang_id=1000), 9000),
    ("gangq drains", Verbs.drains(limit=50), 5000),
    ("gangq trips", queries.trips(since=datetime.now(UTC) - timedelta(days=7), limit=50), 300),
    ("trips of one job", Verbs.trips(job_id=100), 60),
    ("gangq notify list", Verbs.notifications(), 1000),
    # A million live jobs are counted. What has ended is not read.
    ("gangq metrics", Verbs.metrics(), 300000),
    ("what was not delivered", Verbs.undelivered(limit=50), 200),
    (
        "what can be told",
        Query("gangq.notification_kinds", "select * from gangq.notification_kinds", {}, list),
        0,
    ),
    ("gangq queue", Verbs.queues(), 15000),
    ("gangq queue set gpu", Verbs.queues(name="gpu"), 15000),
    ("gangq task", Verbs.tasks(), 20),
    ("gangq limit list", Verbs.limits(), 50000),
    ("gangq schedule list", Verbs.schedules(), 300),
    ("gangq service list", Verbs.services(), 100),
    ("gangq service show", Verbs.service_gangs(service="chat"), 100),
    ("how a service is scaled", Verbs.scaling(service="chat"), 100),
    ("gangq service endpoints", Verbs.endpoints(service="chat"), 100),
    ("gangq workers --name busy7", Verbs.workers(name="busy7"), 850),
    ("gangq workers --host host1", Verbs.workers(host="host1"), 7000),
    ("gangq devices", Verbs.devices(), 100),
    ("gangq cordon", Verbs.cordoned(), 20),
    ("gangq bounce", Verbs.flagged(host="host1"), 100),
    ("what waits", Verbs.waiting(limit=50), 14000),
    (
        "where single jobs may start",
        Query("gangq.places_open", "select * from gangq.places_open", {}, list),
        300,
    ),
    ("what waits in a queue", Verbs.waiting(queue="gpu"), 14000),
    ("gangq doctor: retention", Verbs.retention(), 200),
    ("gangq doctor: trips", queries.trips(since=datetime.now(UTC) - timedelta(days=1)), 300),
    ("gangq doctor: the tick", queries.last_tick(), 10),
    ("gangq doctor: stray rows", queries.stray_rows(), 100),
    ("schedules", Query("gangq.schedules", "select * from gangq.schedules", {}, list), 100),
    ("who is charged", Query("gangq.causes", "select * from gangq.causes", {}, list), 0),
    ("trip classes", Query("gangq.trip_classes", "select * from gangq.trip_classes", {}, list), 0),
    ("who was displaced", Query("gangq.preemptions", "select * from gangq.preemptions", {}, list), 100),
    ("which devices tripped", Query("gangq.device_trips", "select * from gangq.device_trips", {}, list), 300),
    ("gangq web: planned starts", Query("gangq.planned", "select * from gangq.planned", {}, list), 7000),
    (
        "gangq web: the last beats of a gang",
        Query("gangq.member_beats", "select * from gangq.member_beats where gang_id = 5", {}, list),
        600,
    ),
    (
        "gangq web: who displaced a gang",
        Query("gangq.preemptions", "select * from gangq.preemptions where gang_id = 5 order by at", {}, list),
        100,
    ),
    (
        "gangq web: jobs of a batch",
        Query(
            "gangq.jobs",
            "select id, array_index, state, host, attempts, claimed_at, finished_at from gangq.jobs "
            "where batch_id = 5 order by state <> 'failed', array_index limit 200",
            {},
            list,
        ),
        500,
    ),
    (
        "gangq web: paused tasks",
        Query("gangq.tasks", "select distinct task, paused_until from gangq.tasks where paused", {}, list),
        20,
    ),
    # These say what each worker has free, or what is placed, so they read what runs: every job of it, in every place.
    ("gangq web: the fleet", Query("gangq.fleet", "select * from gangq.fleet", {}, list), 7000),
    ("gangq web: what runs", Query("gangq.running", "select * from gangq.running", {}, list), 130000),
    ("gangq workers", Verbs.workers(), 850000),
    (
        "capacity",
        Query("gangq.capacity", "select * from gangq.capacity order by queue, host", {}, list),
        155000,
    ),
]
# By its nature gangq.violations holds every live job against every rule; gangq doctor gives it 30 s.


@pytest.mark.parametrize(("query", "most"), [pytest.param(q, n, id=name) for name, q, n in OPENED])
def test_what_an_operator_opens_reads_little(idle: str, query: Query[Any], most: int) -> None:
    with psycopg.connect(idle, cursor_factory=ClientCursor) as conn:
        sql = conn.cursor().mogrify(query.text, query.params)
    buffers, scanned = measured(idle, sql)
    assert not {t: n for t, n in scanned.items() if t not in ("live_gangs", "schedules_table")}, (
        f"{sql} scans {scanned}"
    )
    assert buffers <= most, f"{sql} touches {buffers} buffers"


@pytest.mark.own_database  # What others left behind would make tables look larger than they are.
def test_nothing_an_operator_opens_looks_dear_enough_to_be_compiled(
    dsn: str, client: Client, clock: Any
) -> None:
    """After a month: it is the number of days that makes it look so, whatever is in them. Compiling takes seconds."""
    for _ in range(5):
        clock.advance(7 * 86400)
        client.tick(force=True)
    opened = {name: (query.text, query.params) for name, query, _ in OPENED}
    opened |= {view: (f"select * from gangq.{view}", {}) for view in views(dsn)}
    dear = {}
    with psycopg.connect(dsn, cursor_factory=ClientCursor) as conn:
        for name, (text, params) in opened.items():
            row = conn.execute("explain (format json) " + conn.cursor().mogrify(text, params)).fetchone()
            assert row is not None
            if row[0][0]["Plan"]["Total Cost"] > 100_000:  # jit_above_cost
                dear[name] = row[0][0]["Plan"]["Total Cost"]
    assert dear == {}


def test_what_waits_looks_no_dearer_beside_many_jobs(idle: str) -> None:
    """It was compiled at every look, beside 20,000 jobs for 1.2 s."""
    with psycopg.connect(idle) as conn:
        row = conn.execute("explain (format json) select * from gangq.waiting").fetchone()
    assert row is not None
    assert row[0][0]["Plan"]["Total Cost"] <= 100_000


def views(dsn: str) -> set[str]:
    """Those that an operator may read."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'v' "
            "and has_table_privilege('gangq_viewer', c.oid, 'select')"
        ).fetchall()
    return {name for (name,) in rows}


def test_every_view_is_opened_here(idle: str) -> None:
    opened = {query.name.removeprefix("gangq.") for _, query, _ in OPENED}
    assert views(idle) - opened == {"violations"}


TRIPPED = """
set session_replication_role = replica;
select count(*) from (
  select gangq.register_worker('w' || n, 'host' || n, '{default}', slots => 8, devices => (
    select jsonb_agg(jsonb_build_object('uuid', format('G%s-%s', n, d), 'index', d, 'vram_mb', 1))
    from generate_series(0, 7) d))
  from generate_series(1, 200) n) x;
with seen as (
  insert into gangq.evidence (at, kind, job_id, token, incarnation, data)
  select clock_timestamp() - n * interval '4 s', 'trip', 1000 + n, n, 1 + n % 200, '{}'
  from generate_series(1, 20000) n
  returning at, job_id, token, incarnation)
insert into gangq.events (at, kind, job_id, token, incarnation, worker, data)
select s.at, 'trip', s.job_id, s.token, s.incarnation, 'w' || s.incarnation, jsonb_build_object(
  'code', 78, 'class', 'health', 'host', 'host' || s.incarnation,
  'blamed', jsonb_build_array(format('G%s-%s', s.incarnation, s.job_id / 200 % 8))) from seen s;
insert into gangq.events (at, kind, job_id)
select clock_timestamp() - n * interval '0.8 s', 'claim', n from generate_series(1, 100000) n;
insert into gangq.progress (job_id, token, beat_at, data)
select n, n, clock_timestamp(), '{}' from generate_series(1, 100000) n;
update gangq.settings set device_trips = 30000;
set session_replication_role = origin;
vacuum analyze
"""


def test_a_trip_that_blames_eight_devices_reads_little_of_what_else_tripped_today(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement in TRIPPED.split(";\n"):
            conn.execute(statement.encode())
        conn.execute("select gangq.open_place(7, j) from gangq.submit('work', gpus => 8) j")
        conn.execute("select gangq.claim(7)")
        job = conn.execute("select id, token from gangq.live_jobs").fetchone()
        assert job is not None
    sql = f'select gangq.trip(7, {job[0]}, {job[1]}, 78, \'{{"type": "Idle"}}\', exit_in_s => 5)'
    with psycopg.connect(dsn, autocommit=True) as counted:
        with counted.transaction(force_rollback=True):
            counted.execute(sql.encode())
        with counted.transaction(force_rollback=True):
            before = _scans(counted)
            row = counted.execute(("explain (analyze, buffers, format json) " + sql).encode()).fetchone()
            assert row is not None
            scanned = {table: n - before.get(table, 0) for table, n in _scans(counted).items()}
            quarantined = counted.execute("select count(*) from gangq.device_holds where until is null")
            assert quarantined.fetchone() == (0,)
    plan: dict[str, Any] = row[0][0]["Plan"]
    assert not {t: n for t, n in scanned.items() if n > 100 and t not in MAY_BE_SCANNED}
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 6000


def test_the_guard_sees_a_sequential_scan(idle: str) -> None:
    _, scanned = cost(idle, "select count(*) from gangq.live_jobs where submitter <> 'nobody'")
    assert scanned["live_jobs"] > MANY


def test_metrics_cost_as_much_after_a_year_of_history_and_little_beside_20_000_waiting_jobs(
    dsn: str, client: Client
) -> None:
    client.register_worker(name="w", host="h", queues=["default"])
    for _ in range(4):
        client.submit(task="t", payloads=[{}] * 5000)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("vacuum analyze gangq.live_jobs")
    few, _ = measured(dsn, Verbs.metrics().text)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "insert into gangq.history (job_id, token, submitted_at, claimed_at, finished_at, incarnation, shape_id, "
            "priority, attempts, max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention, "
            "submitter, login) select 1e9 + n, n, now(), now(), now(), 1, s.id, 0, 1, 3, 0, 3, 0, 3, 0, 'done', "
            "'short', 'me', 'me' from generate_series(1, 50000) n, gangq.shapes s"
        )
        conn.execute("select gangq.count_ended()")
        conn.execute("vacuum analyze gangq.history")
    many, scanned = measured(dsn, Verbs.metrics().text)
    assert not {t: n for t, n in scanned.items() if t != "live_gangs"}
    assert few <= 2500
    assert many <= few + 100
