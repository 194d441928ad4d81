"""Ticks, changes and words of replicas of one service that meet: no gang too many, and nobody stalls."""

from __future__ import annotations

from typing import Any

import psycopg

from interleaving.sessions import Arena, Connection, both_ends, call, value


def put(meeting: Arena, **more: Any) -> None:
    call(meeting.db, "set_service", name="s", task="serve", replicas=4, gang=2, **more)


def count(meeting: Arena, table: str) -> int:
    row = meeting.db.execute(f"select count(*) as n from gangq.{table}").fetchone()
    assert row is not None
    return int(row["n"])


def keep(conn: Connection) -> int:
    return int(value(conn, "keep_services"))


@both_ends
def test_two_ticks_at_once_make_a_gang_once(meeting, end):
    put(meeting)
    met = meeting.meet(keep, keep, end)
    assert (met.first, met.later.value, met.later.waited) == (2, 0, False), "the second waits for nobody"
    keep(meeting.db)
    assert count(meeting, "live_gangs") == count(meeting, "service_gangs_table") == 2


@both_ends
def test_a_tick_that_was_killed_loses_and_doubles_nothing(meeting, end):
    put(meeting)
    dying = meeting.connect(autocommit=False)
    keep(dying)
    if end == "commit":
        dying.commit()
    meeting.db.execute("select pg_terminate_backend(%s, 5000)", (dying.info.backend_pid,))
    keep(meeting.db)
    assert count(meeting, "live_gangs") == count(meeting, "service_gangs_table") == 2


@both_ends
def test_a_tick_waits_for_no_change_of_the_service_and_sees_it_next(meeting, end):
    put(meeting)

    def more(conn: Connection) -> Any:
        return value(conn, "set_service", name="s", replicas=8)

    met = meeting.meet(more, keep, end)
    assert (met.later.value, met.later.waited) == (0, False)
    keep(meeting.db)
    assert count(meeting, "live_gangs") == (4 if end == "commit" else 2)


@both_ends
def test_a_gang_that_another_holds_is_told_to_stop_later_and_the_others_now(meeting, end):
    put(meeting)
    keep(meeting.db)
    call(meeting.db, "stop_service", name="s")
    row = meeting.db.execute("select min(id) as id from gangq.live_gangs").fetchone()
    assert row is not None

    def hold(conn: psycopg.Connection[Any]) -> None:
        conn.execute("select from gangq.live_gangs where id = %s for update", (row["id"],))

    met = meeting.meet(hold, keep, end)
    assert (met.later.value, met.later.waited) == (-1, False)
    assert count(meeting, "live_gangs") == 1
    keep(meeting.db)
    assert count(meeting, "live_gangs") == count(meeting, "service_gangs_table") == 0


@both_ends
def test_two_that_make_a_service_at_once_make_one(meeting, end):
    def make(conn: Connection) -> Any:
        return value(conn, "set_service", name="s", task="serve", replicas=2)

    met = meeting.meet(make, make, end)
    assert met.later.waited
    assert (met.first, met.later.value) == ("made", "same" if end == "commit" else "made")
    assert count(meeting, "service_revisions") == 1
