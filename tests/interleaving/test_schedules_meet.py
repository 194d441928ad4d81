"""Ticks, changes and runs by hand of one schedule that meet: a due time is submitted once, and nobody stalls."""

from __future__ import annotations

import pytest

from gangq.decider.schedules import plan_schedules
from interleaving.sessions import Arena, Connection, both_ends, call, value, verb
from sql.drive import in_steps


def due_now(meeting: Arena, *names: str, **more: object) -> None:
    """Schedules that are due at this moment."""
    for name in names or ("s",):
        call(meeting.db, "set_schedule", name=name, cron="* * * * *", task="t", **more)
    in_steps(meeting.db, plan_schedules())
    row = meeting.db.execute("select min(due_at) as at from gangq.schedules_table").fetchone()
    assert row is not None
    meeting.clock.set(row["at"])


def jobs(meeting: Arena) -> int:
    row = meeting.db.execute("select count(*) as n from gangq.live_jobs").fetchone()
    assert row is not None
    return int(row["n"])


def submit_due(conn: Connection) -> int:
    return int(value(conn, "submit_schedules", can_plan=True))


@both_ends
def test_two_that_submit_at_once_submit_a_due_time_once(meeting, end):
    due_now(meeting)
    met = meeting.meet(submit_due, submit_due, end)
    assert (met.first, met.later.value, met.later.waited) == (1, 0, False), "the second waits for nobody"
    assert jobs(meeting) == (end == "commit")
    submit_due(meeting.db)
    assert jobs(meeting) == 1, "what was rolled back is due again"


def test_two_share_out_what_is_due(meeting):
    due_now(meeting, "a", "b", "c")

    def first_alone(conn: Connection) -> int:
        return int(value(conn, "submit_schedules", can_plan=True, most=1))

    met = meeting.meet(first_alone, submit_due)
    assert (met.first, met.later.value) == (1, 2)
    assert jobs(meeting) == 3


@both_ends
def test_a_tick_that_was_killed_loses_and_doubles_nothing(meeting, end):
    due_now(meeting)
    dying = meeting.connect(autocommit=False)
    assert call(dying, "tick", force=True, decides=True)[0]["detail"]["submit_schedules"] == 1
    if end == "commit":
        dying.commit()
    meeting.db.execute("select pg_terminate_backend(%s, 5000)", (dying.info.backend_pid,))
    meeting.tick()
    assert jobs(meeting) == 1


@both_ends
def test_two_run_by_hand_at_once_are_one_where_it_must_not_run_twice(meeting, end):
    call(meeting.db, "set_schedule", name="s", cron="* * * * *", task="t", options={"skip_if_running": True})

    def by_hand(conn: Connection) -> int:
        return int(call(conn, "run_schedule_now", name="s")[0]["job_id"])

    met = meeting.meet(by_hand, by_hand, end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert jobs(meeting) == 1


@both_ends
def test_a_run_by_hand_and_a_due_time_are_one_where_it_must_not_run_twice(meeting, end):
    due_now(meeting, options={"skip_if_running": True})
    meeting.meet(lambda conn: call(conn, "run_schedule_now", name="s"), submit_due, end)
    assert jobs(meeting) == (end == "commit")
    submit_due(meeting.db)
    assert jobs(meeting) == 1


@both_ends
def test_of_two_that_make_a_schedule_at_once_the_second_changes_what_the_first_made(meeting, end):
    one = verb("set_schedule", name="s", cron="* * * * *", task="t")
    two = verb("set_schedule", name="s", cron="*/5 * * * *", task="t")
    met = meeting.meet(one, two, end)
    assert (met.first, met.later.value, met.later.waited) == (
        "made",
        "changed" if end == "commit" else "made",
        True,
    )
    assert value(meeting.db, "set_schedule", name="s", cron="*/5 * * * *", task="t") == "same"


@both_ends
@pytest.mark.parametrize("name", ["pause_schedule", "forget_schedule"])
def test_what_is_paused_or_forgotten_while_it_is_submitted_is_submitted_before(meeting, end, name):
    due_now(meeting)
    met = meeting.meet(submit_due, lambda conn: call(conn, name, name="s"), end)
    assert met.later.waited
    met.later.result()
    assert jobs(meeting) == (end == "commit")
    meeting.clock.advance(120)
    meeting.tick()
    assert jobs(meeting) == (end == "commit")


@both_ends
@pytest.mark.parametrize(
    "change",
    [
        verb("set_schedule", name="s", cron="*/7 * * * *", task="t"),
        lambda conn: call(conn, "pause_schedule", name="s"),
        lambda conn: call(conn, "forget_schedule", name="s"),
    ],
)
def test_a_schedule_that_is_being_changed_is_left_out_and_the_others_go_on(meeting, end, change):
    due_now(meeting, "s", "other")
    met = meeting.meet(change, submit_due, end)
    assert (met.later.value, met.later.waited) == (1, False)
    meeting.tick()
    assert jobs(meeting) == (1 if end == "commit" else 2)


@both_ends
def test_what_is_computed_while_it_is_changed_is_not_stored(meeting, end):
    call(meeting.db, "set_schedule", name="s", cron="0 * * * *", task="t")
    met = meeting.meet(
        verb("set_schedule", name="s", cron="30 * * * *", task="t"),
        lambda conn: in_steps(conn, plan_schedules()),
        end,
    )
    met.later.result()
    assert not met.later.waited
    meeting.tick()
    row = meeting.db.execute("select next_due from gangq.schedules").fetchone()
    assert row is not None
    assert row["next_due"].minute == (30 if end == "commit" else 0)


def test_two_that_compute_at_once_store_it_once(meeting):
    call(meeting.db, "set_schedule", name="s", cron="0 * * * *", task="t")
    met = meeting.meet(
        lambda conn: in_steps(conn, plan_schedules()), lambda conn: in_steps(conn, plan_schedules())
    )
    assert (met.first, met.later.result(), met.later.waited) == (False, False, False)


def test_an_open_configure_that_takes_a_level_away_holds_up_gangs_that_name_it_and_no_other_schedule(meeting):
    call(meeting.db, "configure", topology=["rack", "host"])
    call(meeting.db, "set_schedule", name="job", cron="* * * * *", task="t")
    due_now(meeting, "gang1", "gang2", work={"size": 1, "require": "rack", "wait_for_hardware": True})
    holder = meeting.connect(autocommit=False)
    call(holder, "configure", topology=["host"])
    waits = meeting.connect(statement_timeout="3000")
    (row,) = call(waits, "tick", force=True, decides=True)
    assert row["detail"]["submit_schedules"] == -1
    assert (row["again"], jobs(meeting)) == (True, 1)
    assert (
        meeting.db.execute("select name from gangq.schedules where passed_over is not null").fetchall() == []
    )
    holder.rollback()
    call(holder, "configure", tick_s=1)
    meeting.tick()
    assert jobs(meeting) == 3


def test_a_change_waits_two_seconds_and_then_says_that_it_is_busy(meeting):
    due_now(meeting)
    holder = meeting.connect(autocommit=False)
    submit_due(holder)
    met = meeting.connect(statement_timeout="5000")
    with pytest.raises(Exception, match="lock timeout"):
        call(met, "pause_schedule", name="s")
    holder.commit()


def test_programs_that_declare_at_once_wait_for_one_another_and_never_for_ever(meeting):
    due_now(meeting, "a", "b")
    meeting.meet(
        lambda conn: call(conn, "declare_schedules", source="x", names=["b", "a"]),
        lambda conn: call(conn, "declare_schedules", source="x", names=["a", "b"]),
    )
    assert value(meeting.db, "declare_schedules", source="x", names=["a"]) == "b"
