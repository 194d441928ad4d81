"""A tick called in a transaction that is then left open: the server hangs up on it, and maintenance goes on."""

from __future__ import annotations

import time

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


def test_a_pass_left_open_in_a_transaction_does_not_stop_the_next_one(meeting):
    frozen = meeting.connect(autocommit=False)
    (row,) = frozen.execute("select gangq.board() as board").fetchall()
    call(frozen, "apply", **{"pass": row["board"]["pass_number"], "decisions": "[]"})
    assert patience(frozen) == "5s"
    frozen.rollback()
    assert patience(frozen) == "0", "only that transaction was in anybody's way"
