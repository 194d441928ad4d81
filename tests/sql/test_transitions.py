"""The state machine: every pair of states, tried by hand as the owner, and the doors in and out."""

from __future__ import annotations

import itertools
import re
from typing import Any

import psycopg
import pytest

from gangq import schema
from sql.drive import WRONG_STATE, Q, refused

STATES = (
    "scheduled",
    "waiting",
    "blocked",
    "pending",
    "reserved",
    "running",
    "preempting",
    "preempted",
    "done",
    "failed",
    "cancelled",
)

# Columns that satisfy the table's CHECK in each state, so that only the trigger decides.
NOTHING: dict[str, Any] = {
    "token": None,
    "incarnation": None,
    "due_at": None,
    "claimed_at": None,
    "deadline_at": None,
    "told_at": None,
    "stop_reason": None,
    "finished_at": None,
    "waits_on": 0,
    "gang_id": None,
    "rank": None,
    "role": None,
}
HELD = {"token": 1, "incarnation": 1, "claimed_at": "2026-01-01"}
MEMBER = {"gang_id": 1, "rank": 0, "role": 1}
FITTING: dict[str, dict[str, Any]] = {
    "scheduled": {"due_at": "2026-01-01"},
    "waiting": {"waits_on": 1},
    "blocked": MEMBER,
    "pending": {},
    "reserved": {"incarnation": 1, "deadline_at": "2026-01-01", **MEMBER},
    "running": HELD,
    "preempting": {**HELD, "told_at": "2026-01-01", "stop_reason": "drain"},
    "preempted": MEMBER,
    "done": {"finished_at": "2026-01-01", **MEMBER},
    "failed": {"finished_at": "2026-01-01", **MEMBER},
    "cancelled": {"finished_at": "2026-01-01", **MEMBER},
}


def insert(q: Q, state: str, **other: Any) -> None:
    columns = {
        "id": 1,
        "order_key": 0,
        "submitted_at": "2026-01-01",
        "shape_id": 1,
        "priority": 0,
        "max_attempts": 3,
        "max_crashes": 3,
        "max_trips": 3,
        "submitter": "test",
        "state": state,
        **NOTHING,
        **FITTING[state],
        **other,
    }
    names = ", ".join(columns)
    q.sql(
        f"insert into gangq.live_jobs ({names}) values ({', '.join(f'%({n})s' for n in columns)})", **columns
    )


def outcome(q: Q, old: str, new: str) -> str:
    """Try to update a job from one state to another; 'ok' or the SQLSTATE. Leaves nothing behind."""
    with q.db.transaction(force_rollback=True):
        q.sql("set local session_replication_role = replica")  # any state may be the starting point
        insert(q, old)
        q.sql("set local session_replication_role = origin")
        columns = {**NOTHING, **FITTING[new], "state": new}
        try:
            with q.db.transaction():
                q.sql(f"update gangq.live_jobs set {', '.join(f'{n} = %({n})s' for n in columns)}", **columns)
        except psycopg.Error as error:
            named = old in str(error) and new in str(error)
            return f"{error.sqlstate}" if named else f"{error.sqlstate}, but it does not name both states"
    return "ok"


def legal(q: Q) -> set[tuple[str, str]]:
    return {
        (row["old_state"], row["new_state"])
        for row in q.sql("select distinct old_state, new_state from gangq.transitions")
    }


def test_every_pair_of_states_is_allowed_exactly_when_the_table_lists_it(q: Q) -> None:
    allowed = legal(q)
    wrong = {
        (old, new): got
        for old, new in itertools.product(STATES, STATES)
        if (got := outcome(q, old, new)) != ("ok" if old == new or (old, new) in allowed else WRONG_STATE)
    }
    assert wrong == {}


def trigger_source(q: Q) -> str:
    return q.value("select prosrc from pg_proc where oid = 'gangq.check_transition'::regproc")


def test_the_triggers_constants_are_the_tables_pairs(q: Q) -> None:
    constants = {tuple(pair.split(">")) for pair in re.findall(r"'(\w+>\w+)'", trigger_source(q))}
    assert constants == {(old, new) for old, new in legal(q) if old}


def test_the_birth_triggers_constants_are_the_tables_births(q: Q) -> None:
    births = re.search(r"new\.state <> all \(array\[([^]]*)\]", trigger_source(q))
    assert births is not None
    assert set(re.findall(r"'(\w+)'", births[1])) == {new for old, new in legal(q) if not old}


def test_the_table_names_only_states_that_the_check_knows(q: Q) -> None:
    assert {state for pair in legal(q) for state in pair} - {""} == set(STATES)
    check = q.value("select prosrc from pg_proc where oid = 'gangq.is_sound'::regproc")
    assert set(re.findall(r"when '(\w+)'", check)) == set(STATES)


def test_every_listed_verb_exists_and_its_role_may_call_it(q: Q) -> None:
    for row in q.sql("select distinct verb, role from gangq.transitions"):
        granted = q.sql(
            "select has_function_privilege(%(role)s, p.oid, 'execute') as may from pg_proc p "
            "where p.pronamespace = 'gangq'::regnamespace and p.proname = %(verb)s",
            **row,
        )
        assert [g["may"] for g in granted] == (
            [True] if row["verb"] != "preempt_gang" else [granted[0]["may"]]
        ), row


def test_a_cause_charges_only_what_is_counted(q: Q) -> None:
    """Any other word would charge nothing."""
    causes = q.sql("select * from gangq.causes")
    assert {c["member"] for c in causes} == {"attempt", "crash", "trip", "stop", "snooze", "nothing"}
    own = {"never_started", "placement_miss", "preemption"}
    assert {c["gang"] for c in causes} == {"attempt", "crash", "trip", "nothing"} | own
    assert {c["ending"] for c in causes} == {"fault", "loss", "asked"}
    assert {c["hours"] for c in causes} == {"wasted", "displaced", "used"}
    assert all(c["event"] for c in causes)


@pytest.mark.parametrize("state", STATES)
def test_a_job_is_born_only_in_a_state_of_birth(q: Q, state: str) -> None:
    with q.db.transaction(force_rollback=True):
        if ("", state) in legal(q):
            insert(q, state)
            assert q.value("select state from gangq.live_jobs") == state
        else:
            with refused(WRONG_STATE, state):
                insert(q, state)


@pytest.mark.parametrize("state", STATES)
def test_state_and_columns_are_tied_by_a_check(q: Q, state: str) -> None:
    """Each column that a state needs, taken away, is refused even with the triggers off."""
    needed = [c for c in FITTING[state] if c != "rank" and (state, c) != ("preempting", "claimed_at")]
    forbidden = {
        "pending": HELD,
        "scheduled": HELD,
        "waiting": HELD,
        "blocked": HELD,
        "preempted": HELD,
        "done": HELD,
    }
    with q.db.transaction(force_rollback=True):
        q.sql("set local session_replication_role = replica")
        insert(q, state)
        for column in needed:
            empty = 0 if column == "waits_on" else None
            with pytest.raises(psycopg.errors.CheckViolation):
                with q.db.transaction():
                    q.sql(f"update gangq.live_jobs set {column} = %(empty)s", empty=empty)
        for column in ("token", "incarnation"):
            if state in forbidden:
                with pytest.raises(psycopg.errors.CheckViolation):
                    with q.db.transaction():
                        q.sql(f"update gangq.live_jobs set {column} = 7")


@pytest.mark.parametrize(
    "change",
    [
        "attempts = -1",
        "attempts = -1, state = 'running', token = 1, incarnation = 1, claimed_at = now()",
        "priority = 1001",
        "priority = -1001, state = 'running', token = 1, incarnation = 1, claimed_at = now()",
        "rank = 0",
    ],
)
def test_numbers_that_no_job_has_are_refused(q: Q, change: str) -> None:
    q.submit()
    with pytest.raises(psycopg.errors.CheckViolation, match="would have"):
        q.sql(f"update gangq.live_jobs set {change}")


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        ("pending", {"priority": 1001}),
        ("pending", {"attempts": -1}),
        ("pending", {"rank": 0}),
        ("blocked", {"rank": None}),
    ],
)
def test_a_job_with_such_a_number_is_not_born(q: Q, state: str, columns: dict[str, Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="would have"):
        insert(q, state, **columns)


def test_a_job_deleted_without_its_history_row_is_refused(q: Q) -> None:
    job = q.submit()
    with refused(WRONG_STATE, "history"):
        q.sql("delete from gangq.live_jobs")
    assert q.state(job) == "pending"


def test_a_job_deleted_beside_a_history_row_written_by_hand_is_refused(q: Q) -> None:
    job = q.submit()
    with refused(WRONG_STATE), q.db.transaction():
        q.sql(
            "insert into gangq.history (job_id, submitted_at, finished_at, shape_id, priority, attempts, "
            "max_attempts, "
            "crashes, max_crashes, trips, max_trips, stops, state, retention, submitter, login) select id, "
            "submitted_at, now(), "
            "shape_id, 0, 0, 3, 0, 3, 0, 3, 0, 'done', 'short', 'me', 'me' from gangq.live_jobs"
        )
        q.sql("delete from gangq.live_jobs")
    assert q.state(job) == "pending"
    assert q.sql("select * from gangq.history") == []


def test_truncate_is_refused_while_jobs_live(q: Q) -> None:
    job = q.submit()
    with refused(WRONG_STATE):
        q.sql("truncate gangq.live_jobs")
    assert q.state(job) == "pending"


def test_a_job_that_ended_is_in_history_and_nowhere_else(q: Q) -> None:
    q.submit()
    claim = q.worker().take()
    claim.complete({"r": 1})
    assert q.sql("select 1 from gangq.live_jobs") == []
    assert q.value("select count(*) from gangq.history") == 1
    job = q.job(claim.job_id)
    assert (job["state"], job["result"], job["token"]) == ("done", {"r": 1}, claim.token)
    assert job["finished_at"] is not None


def test_every_file_that_writes_a_state_is_named_where_the_transitions_are() -> None:
    files = {file.name.removesuffix(".sql"): file.text for file in schema.sql_files()}
    (head,) = re.findall(r"\A(.*?)^delete", files["020_transitions"], re.DOTALL | re.MULTILINE)
    insert = r"insert into gangq\.live_(?:jobs|gangs)\b"
    update = r"update gangq\.live_(?:jobs|gangs) \w+\s+set (?:(?!\bwhere\b|;).)*?(?<![.\w])state\b"
    writing = {
        name
        for name, text in files.items()
        if "foundation" not in name and re.search(f"{insert}|{update}", text, re.DOTALL)
    }
    assert len(writing) > 15
    assert {name for name in writing if name not in head} == set()
