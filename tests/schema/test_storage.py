"""How tables are stored: what comes and goes is vacuumed by its dead rows, what only grows is dropped by the day."""

from __future__ import annotations

import re
from typing import Any

import psycopg

Db = psycopg.Connection[dict[str, Any]]

SETTLED = {
    "migrations",
    "settings",
    "queues_table",
    "shapes",
    "gang_kinds",
    "kind_roles",
    "task_settings",
    "transitions",
    "cordons",
    "device_registry",
    "device_claimants",
    "retried",
    "sequence_base",
}
"""Written by people, at a registration, or once for each thing of its kind."""

REWRITTEN = {
    "decider",
    "live_jobs",
    "live_gangs",
    "leases",
    "progress",
    "incarnations",
    "device_holds",
    "device_readings",
    "places",
    "lows",
    "schedules_table",
    "scaling_table",
    "services_table",
    "service_gangs_table",
    "replicas",
    "plans",
    "unique_keys",
    "verdicts",
    "runtimes",
    "beat_gaps",
    "counters",
    "notification_targets",
    "outbox",
    "tick_state",
    "lock_rows",
}
"""Of the others, those whose rows are updated where they stand."""

ONLY_GROWS = {"history", "gang_history", "attempt_history", "events", "passes", "evidence", "logs"}

TURNED = {"requests", "requests_before"}
"""Written once and emptied as a whole every hour."""


def options(db: Db) -> dict[str, dict[str, float]]:
    """The storage parameters of every table that is no part of another."""
    rows = db.execute(
        "select c.relname, array(select split_part(o, '=', 1) from unnest(c.reloptions) o) as names, "
        "array(select replace(split_part(o, '=', 2), 'off', '0')::float8 from unnest(c.reloptions) o) as values "
        "from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'r' and not c.relispartition"
    )
    return {row["relname"]: dict(zip(row["names"], row["values"], strict=True)) for row in rows}


def test_every_table_whose_rows_come_and_go_is_vacuumed_by_its_dead_rows(db: Db) -> None:
    found = options(db)
    assert found.keys() >= SETTLED
    for table in found.keys() - SETTLED - TURNED:
        assert found[table].get("autovacuum_vacuum_scale_factor", 1) <= 0.02, table
        assert found[table].get("autovacuum_vacuum_threshold", 1e9) <= 1000, table


def test_every_table_whose_rows_are_rewritten_keeps_room_for_that_on_its_pages(db: Db) -> None:
    found = options(db)
    assert {table for table in found if found[table].get("fillfactor", 100) < 90} == REWRITTEN


def test_what_is_emptied_as_a_whole_is_never_updated_deleted_or_vacuumed(db: Db) -> None:
    found = options(db)
    assert [found[table]["autovacuum_enabled"] for table in TURNED] == [0, 0]
    for row in db.execute("select prosrc from pg_proc where pronamespace = 'gangq'::regnamespace").fetchall():
        assert not re.search("(update|delete from) gangq.requests", row["prosrc"])


def test_what_only_grows_is_kept_by_the_day_and_nothing_is_ever_updated_or_deleted_there(db: Db) -> None:
    rows = db.execute(
        "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'p' "
        "and not c.relispartition"
    ).fetchall()
    assert {row["relname"] for row in rows} == ONLY_GROWS
    texts = db.execute(
        "select p.proname, p.prosrc from pg_proc p where p.pronamespace = 'gangq'::regnamespace"
    ).fetchall()
    for row in texts:
        for table in ONLY_GROWS:
            assert f"delete from gangq.{table}" not in row["prosrc"], row["proname"]
            assert f"update gangq.{table}" not in row["prosrc"], row["proname"]


_INDEXES = (
    "select x.indrelid::regclass::text as part, x.indisvalid as valid, pg_get_indexdef(x.indexrelid) as definition "
    "from pg_index x join pg_class c on c.oid = x.indexrelid where c.relnamespace = 'gangq'::regnamespace"
)


def test_a_new_installation_has_every_index_on_every_part(db: Db) -> None:
    assert [row for row in db.execute(_INDEXES) if not row["valid"]] == []
