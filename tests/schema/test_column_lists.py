"""Columns that SQL writes out by name: one that is added later is in each list, or is left out on purpose."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

Db = psycopg.Connection[dict[str, Any]]

NOT_STARTED = {
    *(
        "attempts",
        "crashes",
        "trips",
        "stops",
        "snoozes",
        "claimed_at",
        "deadline_at",
        "told_at",
        "finished_at",
    ),
    *(
        "token",
        "incarnation",
        "request_id",
        "epoch_rank",
        "returned",
        "light",
        "stop_reason",
        "devices",
        "unmet",
    ),
    *("result", "error"),
}
"""What no job has that has just become live."""

OF_RETRIES = {"final_token", "taken_token", "ran_on"}
OF_MEMBERS = {"gang_id", "rank", "role"}
OF_BATCHES = {"batch_id", "array_index"}
LEFT_OUT = {
    "submit": OF_RETRIES | OF_MEMBERS,
    "write_gang": OF_RETRIES | OF_BATCHES | {"due_at"},  # a gang has not_before
    # A schedule waits for nothing, and is no part of a job or a trace.
    "submit_scheduled": OF_RETRIES | OF_MEMBERS | {"waits_on", "awaited", "wants", "parent", "trace"},
    "retry_jobs": set[str](),
}


def columns(db: Db, table: str) -> list[str]:
    rows = db.execute(
        "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped "
        "order by attnum",
        [f"gangq.{table}"],
    )
    return [row["attname"] for row in rows]


def lists(db: Db, before: str) -> dict[str, list[str]]:
    """The list of columns that follows this, in each function that has one."""
    rows = db.execute(
        "select proname, substring(prosrc from %s) as listed from pg_proc "
        "where pronamespace = 'gangq'::regnamespace and prosrc ~ %s",
        [rf"{before}\s*\(([^)]*)\)", before],
    )
    return {row["proname"]: re.split(r",\s*", row["listed"]) for row in rows if row["listed"]}


def test_whatever_makes_a_job_writes_every_column_that_a_job_may_begin_with(db: Db) -> None:
    written = lists(db, r"insert into gangq\.live_jobs(?: as \w)?")
    left_out = {name: set(columns(db, "live_jobs")) - set(listed) for name, listed in written.items()}
    assert left_out == {name: NOT_STARTED | more for name, more in LEFT_OUT.items()}


@pytest.mark.parametrize(
    ("function", "table"), [("keep_schedule", "schedules_table"), ("keep_service", "services_table")]
)
def test_a_row_that_is_written_as_a_whole_lists_its_columns_in_their_order(
    db: Db, function: str, table: str
) -> None:
    """They are set from (select (s).*), by position."""
    assert lists(db, rf"update gangq\.{table} x\s+set")[function] == columns(db, table)
