"""A tick called in a transaction that is then left open: the server hangs up on it, and maintenance goes on."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from interleaving.sessions import DEADLINE_S, Connection, call


def patience(conn: Connection) -> str:
    row = conn.execute("select current_setting('idle_in_transaction_session_timeout') as now").fetchone()
    assert row is not None
    return str(row["now"])


@pytest.mark.parametrize(("own", "then"), [("0", "5s"), ("1min", "5s"), ("5s", "5s"), ("300ms", "300ms")])
def test_a_transaction_that_ticked_may_idle_for_five_seconds_at_most(meeting, own, then):
    conn = meeting.connect(autocommit=False, idle_in_transaction_session_timeout=own)
    (row,) = call(conn, "tick", force=True)
    assert row["ran"]
    assert patience(conn) == then
    conn.commit()
    assert patience(conn) == own, "only that transaction was in anybody's way"


@pytest.mark.parametrize("judge", ["reap_expired", "flag_dead_workers", "rollback_stale"])
def test_a_transaction_that_judged_may_idle_as_short(meeting, judge):
    """Until it ends nobody else can judge."""
    conn = meeting.connect(autocommit=False)
    call(conn, judge)
    assert patience(conn) == "5s"


def test_a_tick_left_open_in_a_transaction_does_not_stop_the_next_one(meeting):
    frozen = meeting.connect(autocommit=False, idle_in_transaction_session_timeout="300ms")
    call(frozen, "tick", force=True)
    other = meeting.connect(statement_timeout="1000")
    asked = time.monotonic()
    (row,) = call(other, "tick", force=True)
    assert not row["ran"], "it waits for nobody in the database"
    while not row["ran"] and time.monotonic() < asked + DEADLINE_S:
        time.sleep(row["next_in_s"])
        (row,) = call(other, "tick", force=True, turn=row["next_turn"])
    assert row["ran"]
    assert time.monotonic() - asked < DEADLINE_S / 2
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        frozen.execute("select 1")
    assert frozen.closed


def board(conn: Connection) -> dict[str, Any]:
    row = conn.execute("select gangq.board() as board").fetchone()
    assert row is not None
    seen: dict[str, Any] = row["board"]
    return seen


def test_a_pass_left_open_in_a_transaction_delays_decisions_and_no_other_maintenance(meeting):
    gang, _ = meeting.gang(1)
    meeting.worker("w1")
    due = meeting.job(due_at=meeting.db.execute("select gangq.now() as now").fetchone()["now"])
    frozen = meeting.connect(autocommit=False, idle_in_transaction_session_timeout="1500ms")
    call(frozen, "apply", **{"pass": board(frozen)["pass_number"], "decisions": "[]"})
    assert patience(frozen) == "1500ms"
    other = meeting.connect(statement_timeout="1000")
    (row,) = call(other, "tick", force=True, decides=True)
    assert (row["ran"], row["decide"], row["again"]) == (True, False, True), "nobody else can decide"
    assert 0 < row["next_in_s"] <= 0.05
    assert meeting.state(due) == "pending"
    asked = time.monotonic()
    while not row["decide"] and time.monotonic() < asked + DEADLINE_S:
        time.sleep(row["next_in_s"])
        (row,) = call(other, "tick", force=True, decides=True)
    assert row["decide"]
    meeting.place()
    assert meeting.gang_row(gang)["state"] == "reserved"
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        frozen.execute("select 1")


def test_a_transaction_that_applied_may_idle_for_five_seconds_at_most(meeting):
    conn = meeting.connect(autocommit=False)
    call(conn, "apply", **{"pass": board(conn)["pass_number"], "decisions": "[]"})
    assert patience(conn) == "5s"
    conn.rollback()
    assert patience(conn) == "0", "only that transaction was in anybody's way"
