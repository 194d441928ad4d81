"""Runners of one target, an operator who changes it, a tick, and the jobs that fail meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import Arena, Later, Verb, both_ends, call, first_of_two, meet, value, verb


@pytest.fixture
def told(meeting: Arena) -> list[int]:
    """A target, and two notifications that wait for it."""
    call(meeting.db, "add_notification", target="oncall")
    return [value(meeting.db, "test_notification", target="oncall") for _ in range(2)]


def fetch(lease_s: float = 60) -> Verb:
    return lambda conn: call(conn, "fetch_notification", target="oncall", lease_s=lease_s)[0]


def acknowledge(found: dict[str, Any], error: str | None = None) -> Verb:
    named = {"target": "oncall", "id": found["id"], "delivery": found["delivery"], "error": error}
    return verb("acknowledge_notification", **named)


def failing(arena: Arena) -> Verb:
    """A job fails for good."""
    job, token = arena.running(arena.worker("w1"), max_attempts=1)
    return verb("fail", job_id=job, token=token)


def waiting(arena: Arena) -> int:
    return len(arena.db.execute("select from gangq.outbox").fetchall())


@both_ends
def test_two_runners_are_given_two_notifications_and_neither_waits(meeting, told, end):
    met = meeting.meet(fetch(), fetch(), end)
    assert not met.later.waited
    assert [met.first["id"], met.later.value["id"]] == told


@both_ends
def test_a_runner_that_finds_the_only_one_taken_is_told_when_to_come_again(meeting, told, end):
    acknowledge(fetch()(meeting.db))(meeting.db)
    met = meeting.meet(fetch(), fetch(), end)
    assert (met.later.waited, met.first["id"], met.later.value["id"]) == (False, told[1], None)
    assert met.later.value["next_in_s"] == pytest.approx(0.1)


@first_of_two
def test_what_arrived_as_its_lease_ended_is_delivered_whoever_is_first(meeting, told, turn):
    first = fetch(lease_s=10)(meeting.db)
    acknowledge(fetch()(meeting.db))(meeting.db)
    meeting.clock.advance(11)
    met, acknowledged, again = meet(meeting, acknowledge(first), fetch(), turn, "commit")
    assert acknowledged == "delivered"
    # The one who fetches never waits; the one who acknowledges waits for whoever fetches.
    assert met.later.waited is (turn == 1)
    assert again["id"] == (None if turn == 0 else first["id"])
    assert waiting(meeting) == 0


@both_ends
@pytest.mark.parametrize("what", ["add", "remove", "acknowledge", "fetch", "trim"])
def test_a_job_that_fails_waits_for_nobody_who_changes_or_tells_its_target(meeting, told, end, what):
    fail = failing(meeting)
    found = fetch()(meeting.db)
    first: Verb = {
        "add": verb("add_notification", target="oncall", task="t"),
        "remove": verb("remove_notification", target="oncall"),
        "acknowledge": acknowledge(found, "HTTP 500"),
        "fetch": fetch(),
        "trim": lambda conn: conn.execute("select gangq.trim_outbox(200, 1)").fetchall(),
    }[what]
    met = meeting.meet(first, fail, end)
    assert (met.later.waited, met.later.value) == (False, "failed")
    meeting.clock.advance(601)
    meeting.tick()
    expected = {"remove": 0, "trim": 2} if end == "commit" else {}
    assert waiting(meeting) == expected.get(what, 3)


@both_ends
def test_nobody_waits_for_a_job_that_fails(meeting, told, end):
    fail = failing(meeting)
    for other in (
        fetch(),
        verb("add_notification", target="oncall"),
        verb("retry_notifications", target="oncall"),
    ):
        holder = meeting.connect(autocommit=False)
        fail(holder)
        other(meeting.db)  # Which gives up after 2 s if it has to wait.
        holder.rollback()
    met = meeting.meet(fail, verb("remove_notification", target="oncall"), end)
    assert not met.later.waited
    meeting.clock.advance(601)
    meeting.tick()
    assert waiting(meeting) == 0, "what it wrote for a target that is gone is forgotten"


def test_a_target_is_removed_while_it_is_retried_without_a_deadlock(meeting, told):
    found = [fetch()(meeting.db) for _ in told]
    # A row that changes moves to the end: a scan of the table now meets the second first.
    for one in reversed(found):
        acknowledge(one, "HTTP 500")(meeting.db)
    blocker = meeting.connect(autocommit=False)
    blocker.execute("select from gangq.outbox where id = %s for update", (told[0],))
    retried = Later(meeting.connect(), verb("retry_notifications", target="oncall")).start(meeting.db)
    by_scan = meeting.connect(enable_indexscan="off")
    removed = Later(by_scan, verb("remove_notification", target="oncall")).start(meeting.db)
    assert (retried.waited, removed.waited) == (True, True)
    blocker.commit()
    assert (retried.join().sqlstate, removed.join().sqlstate) == (None, None)
    assert waiting(meeting) == 0


@pytest.mark.parametrize("what", ["acknowledge", "fetch", "add"])
def test_a_tick_passes_over_what_is_locked(meeting, told, what):
    found = fetch()(meeting.db)
    first: Verb = {
        "acknowledge": acknowledge(found),
        "fetch": fetch(),
        "add": verb("add_notification", target="oncall"),
    }[what]
    meeting.clock.advance(8 * 86400)
    met = meeting.meet(first, lambda conn: value(conn, "trim_outbox"))
    assert not met.later.waited
    meeting.tick()
    assert waiting(meeting) == 0
