"""The tick: one at a time, in the right order, bounded; and the partitions it keeps."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from sql.drive import NOT_ALLOWED, Q, gpus, refused

DAY = 86400


def partitions(q: Q, parent: str) -> list[str]:
    return [
        row["name"]
        for row in q.sql(
            "select c.relname as name from pg_inherits i join pg_class c on c.oid = i.inhrelid "
            "where i.inhparent = %(parent)s::regclass and c.relname ~ '_[0-9]{8}$' order by 1",
            parent=f"gangq.{parent}",
        )
    ]


KEPT = "select name from gangq.kept_by_day()"
PARENTS = ("history_short", "history_long", "gang_history_short", "gang_history_long", "events", "logs")


def test_a_tick_does_everything_and_says_how_much(q: Q) -> None:
    q.submit_gang(1)
    q.worker()
    row = q.one("tick", decides=True)
    assert (row["ran"], row["again"], row["decide"]) == (True, False, True)
    assert set(row["detail"].values()) == {0}


def source(q: Q, function: str) -> str:
    return str(q.value("select prosrc from pg_proc where oid = %(of)s::regproc", of=f"gangq.{function}"))


def moments(source: str, comparison: str) -> set[str]:
    """The columns, with their tables, that a function compares with its time t."""
    found = set()
    for query in re.findall(r"\(\s*select .*?(?=\(\s*select |\Z)", source, re.DOTALL):
        of = {alias: table for table, alias in re.findall(r"(?:from|join) gangq\.(\w+) (\w)\b", query)}
        found |= {
            f"{of[alias]}.{column}" for alias, column in re.findall(rf"(\w)\.(\w+) {comparison} t\b", query)
        }
    return found


def test_each_step_of_a_tick_can_be_done_and_none_is_forgotten(q: Q) -> None:
    steps = [row["name"] for row in q.sql("select name from gangq.tick_steps(gangq.now())")]
    assert len(steps) == len(set(steps)) > 15
    assert {q.value("select gangq.tick_step(%(step)s, false)", step=step) for step in steps} == {0}
    assert q.sql("select data from gangq.events where kind = 'tick_error'") == []
    # apply does this one, in the last part of a pass, after what could start has.
    assert set(re.findall(r"when '(\w+)' then return", source(q, "tick_step"))) - set(steps) == {"time_out"}


def test_a_step_that_has_done_its_most_is_what_the_tick_takes_for_more_to_do(q: Q) -> None:
    most = dict(
        re.findall(
            r"(\w+) (\d+)",
            q.value(
                "select string_agg(s.name || ' ' || a.most, ', ') "
                "from gangq.tick_steps(gangq.now()) s "
                "cross join lateral substring(pg_get_function_arguments(('gangq.' || s.name)::regproc) "
                "from 'most integer DEFAULT ([0-9]+)') as a(most)"
            ),
        )
    )
    # Of a hundred gangs it returns what it did to them, and the next tick goes on behind them.
    assert most.pop("judge_progress") == "100"
    # So many batches it looks at; it ends 200 at most.
    assert most.pop("end_batches") == "1000"
    assert len(most) > 8
    assert set(most.values()) == {re.findall(r"done >= (\d+)", source(q, "run_steps"))[0]}


@pytest.mark.parametrize("what", ["schedule", "service"])
def test_a_tick_submits_few_large_gangs_of_what_is_stored(q: Q, what: str) -> None:
    """A login may store hundreds of gangs of 100,000, and a tick holds up the next one."""
    more = {"every": "1 second", "work": {"size": 200, "wait_for_hardware": True}}
    if what == "service":
        more = {"gang": 200, "work": {"wait_for_hardware": True}}
    for name in ("a", "b", "c"):
        q.call(f"set_{what}", name=name, task="t", **more)
    q.clock.advance(1)
    step = "submit_schedules(can_plan => false, most => 4)" if what == "schedule" else "keep_services(4)"
    gangs = []
    for _ in range(3):
        q.sql(f"select gangq.{step}")
        gangs.append(q.value("select count(*) from gangq.live_gangs"))
    assert gangs == [2, 3, 3]


def test_each_moment_at_which_a_step_is_due_is_one_that_ticks_are_planned_for(q: Q) -> None:
    due, planned = moments(source(q, "tick_steps"), "<="), moments(source(q, "next_due"), ">")
    assert due >= {"live_jobs.due_at", "queues_table.paused_until", "scaling_table.due_at"}
    assert due - planned == set(), "such a step waits for the next safety tick"
    # A gang that has backed off is for the decider, whose turn a tick gives.
    assert planned - due == {"live_gangs.not_before"}


def test_a_tick_that_has_just_run_does_not_run_again_unless_forced(q: Q) -> None:
    assert q.one("tick")["ran"] is True
    row = q.one("tick")
    assert (row["ran"], row["next_in_s"]) == (False, pytest.approx(1, abs=0.05))
    assert q.one("tick", force=True)["ran"] is True
    q.later(1)
    assert q.one("tick")["ran"] is True


def test_a_tick_that_has_just_run_still_serves_what_is_due_and_nothing_else(q: Q) -> None:
    assert q.one("tick")["ran"] is True
    job = q.submit(due_at=q.value("select gangq.now() + interval '0.3 s'"))
    gang = q.submit_gang(1)
    q.worker()
    assert q.one("tick")["ran"] is False
    q.later(0.3)
    row = q.one("tick")
    assert (row["ran"], row["detail"]) == (True, {"promote_due": 1})
    assert (q.state(job), gang.state) == ("pending", "blocked")
    # The rest of the maintenance comes when it would have come anyway.
    assert row["next_in_s"] == pytest.approx(0.7, abs=0.05)
    assert q.one("tick")["ran"] is False


def test_a_due_job_that_somebody_holds_is_not_asked_for_all_the_time(q: Q, dsn: str) -> None:
    job = q.submit(due_at=q.value("select gangq.now() + interval '0.1 s'"))
    q.later(0.2)
    with psycopg.connect(dsn) as holder:
        holder.execute("select from gangq.live_jobs for update")
        assert q.one("tick")["next_in_s"] == pytest.approx(1, abs=0.05)
        q.later(0.1)
        row = q.one("tick")
        assert (row["detail"], row["next_in_s"]) == ({"promote_due": 0}, pytest.approx(0.9, abs=0.05))
    assert q.one("tick")["detail"] == {"promote_due": 1}
    assert q.state(job) == "pending"


def test_a_tick_is_asked_of_three_live_workers_wherever_the_choice_begins(q: Q, dsn: str) -> None:
    workers = q.workers(7)
    workers[0].retire()
    workers[3].retire()
    q.later(20)
    live = [worker for worker in workers if worker not in (workers[0], workers[3], workers[6])]
    for worker in live:
        worker.beat()
    with psycopg.connect(dsn, autocommit=True) as ear:
        for worker in workers:
            ear.execute(f'listen "gangq_{worker.incarnation}"'.encode())
        asked: set[str] = set()
        for _ in range(30):
            q.sql("select gangq.wake_tick(true)")
            told = [n.channel for n in ear.notifies(timeout=2, stop_after=3)]
            assert len(set(told)) == 3
            asked |= set(told)
        assert asked == {f"gangq_{worker.incarnation}" for worker in live}
        assert list(ear.notifies(timeout=0)) == []


@pytest.mark.own_database
def test_to_ask_for_a_tick_reads_three_workers_and_not_the_fleet(q: Q) -> None:
    q.sql("select gangq.register_worker('w' || n, 'h', '{default}') from generate_series(1, 500) n")
    q.sql("analyze gangq.leases, gangq.incarnations")
    with q.db.transaction():
        read = (
            "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_user_tables "
            "where schemaname = 'gangq'"
        )
        before = q.value(read)
        q.sql("select gangq.wake_tick(true)")
        assert q.value(read) - before <= 20


def test_a_tick_that_finds_one_running_comes_again_until_one_has_begun_after_it_asked(q: Q) -> None:
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction():
        assert runner.one("tick", force=True)["ran"] is True
        row = q.one("tick", force=True)
        turn = row["next_turn"]
        assert (row["ran"], row["next_in_s"]) == (False, pytest.approx(0.02))
        late = q.submit(due_at=q.value("select gangq.now() + interval '0.1 s'"))
        q.later(0.2)
        assert q.one("tick", force=True, turn=turn)["next_turn"] == turn, "the same run is waited for"
    # The one that ran had begun before it was asked, and did not see this job.
    assert q.state(late) == "scheduled"
    row = q.one("tick", force=True, turn=turn)
    assert (row["ran"], row["next_turn"], q.state(late)) == (True, None, "pending")


def test_a_turn_that_is_running_by_now_is_not_put_off_to_a_later_one(q: Q) -> None:
    """Otherwise one who always finds a tick running would never be served."""
    with q.connected(q.db.info.dsn) as runner:
        with runner.db.transaction():
            runner.one("tick", force=True)
            turn = q.one("tick", force=True)["next_turn"]
        with runner.db.transaction():
            assert runner.one("tick", force=True)["ran"] is True
            assert q.one("tick", force=True, turn=turn)["next_turn"] == turn
    row = q.one("tick", force=True, turn=turn)
    assert (row["ran"], row["next_turn"]) == (False, None)


def test_many_that_ask_during_one_tick_are_served_by_one_more(q: Q) -> None:
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction():
        runner.one("tick", force=True)
        turns = [q.one("tick", force=True)["next_turn"] for _ in range(3)]
    assert [q.one("tick", force=True, turn=turn)["ran"] for turn in turns] == [True, False, False]


def test_a_tick_that_was_rolled_back_serves_nobody(q: Q) -> None:
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction(force_rollback=True):
        runner.one("tick", force=True)
        turn = q.one("tick", force=True)["next_turn"]
    assert q.one("tick", force=True, turn=turn)["ran"] is True


def test_a_tick_that_did_only_what_was_due_serves_nobody_who_waits_for_a_whole_one(q: Q) -> None:
    q.submit(due_at=q.value("select gangq.now() + interval '0.1 s'"))
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction():
        runner.one("tick", force=True)
        turn = q.one("tick", force=True)["next_turn"]
    q.later(0.2)
    assert q.one("tick")["detail"] == {"promote_due": 1}
    row = q.one("tick", force=True, turn=turn)
    assert (row["ran"], row["next_turn"]) == (True, None)
    assert "reap_expired" in row["detail"]


def test_an_unforced_tick_that_found_one_running_does_nothing_when_that_is_over(q: Q) -> None:
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction():
        runner.one("tick")
        turn = q.one("tick")["next_turn"]
        assert turn is not None
    row = q.one("tick", turn=turn)
    assert (row["ran"], row["next_turn"]) == (False, None)


def test_no_number_that_a_login_can_lock_stops_anything(q: Q) -> None:
    """Advisory locks are anybody's: all keys that gangq ever used, and a thousand more."""
    keys = [4873961273421, 4873961273422]
    q.submit_gang(1)
    with q.connected(q.db.info.dsn) as stranger:
        for key in keys:
            stranger.sql(f"select pg_advisory_lock({key})")
        for space in range(1734438257, 1734438262):
            stranger.sql(f"select pg_advisory_lock({space}, hashtext('w1')), pg_advisory_lock({space}, 0)")
            stranger.sql(f"select pg_advisory_lock({space}, n) from generate_series(1, 200) n")
        worker = q.worker()
        q.tick()
        claim = worker.take()
        assert claim.complete() == "done"
        q.call("set_taints", worker="w1", taints=["slow"])
        q.call("quarantine", worker="w1")
        assert q.call("retry", gang_ids=[1])[0]["state"] == "blocked"


def test_only_the_lock_of_migrate_is_an_advisory_one(q: Q) -> None:
    assert (
        q.sql(
            "select proname from pg_proc where pronamespace = 'gangq'::regnamespace and prosrc ~ 'advisory'"
        )
        == []
    )


@pytest.mark.parametrize("role", ["gangq_viewer", "gangq_submitter", "gangq_worker", "gangq_admin"])
def test_nobody_locks_the_rows_of_locks_but_through_a_function(q: Q, role: str) -> None:
    for table in ("lock_rows", "worker_names"):
        for lock in (
            "select from gangq.{} for update",
            "select from gangq.{} for key share",
            "lock table gangq.{} in row exclusive mode",
        ):
            with refused(NOT_ALLOWED), q.db.transaction():
                q.sql(f"set local role {role}")
                q.sql(lock.format(table))


def test_readers_of_the_state_do_not_wait_for_a_tick_left_open(q: Q) -> None:
    with q.connected(q.db.info.dsn) as runner, runner.db.transaction():
        runner.one("tick", force=True)
        with q.db.transaction():
            q.sql("set local lock_timeout = '1ms'")
            assert q.sql("select * from gangq.tick_state")
            assert q.sql("select * from gangq.lock_rows")
            q.call("reap_expired")


def test_names_without_a_worker_are_forgotten(q: Q) -> None:
    q.worker("a").retire()
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select * from gangq.worker_names") == []
    q.worker("a")


def test_a_tick_skips_what_somebody_has_locked_and_does_the_rest(q: Q) -> None:
    locked, free = q.submit_gang(1), q.submit_gang(1)
    q.workers(2)
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.live_gangs where id = %(id)s for update", id=locked.id)
        assert q.place() == {"placed": 1, "again": True}
        assert (locked.state, free.state) == ("blocked", "reserved")
    q.tick()
    assert locked.state == "reserved"


def test_a_stale_reservation_is_rolled_back_and_its_room_given_on_in_one_tick(q: Q) -> None:
    first, worker = q.submit_gang(1, claim_deadline_s=5), q.worker()
    q.tick()
    q.call("configure", pass_over_s=0)
    second = q.submit_gang(1)
    q.later(6)
    worker.beat()
    q.tick()
    assert (first.state, second.state) == ("blocked", "reserved")


def test_a_tick_runs_at_once_after_the_clock_was_set_back(q: Q) -> None:
    assert q.one("tick")["ran"] is True
    q.later(-60)
    assert q.one("tick")["ran"] is True


def test_a_step_that_fails_is_an_event_and_a_warning_and_the_others_go_on(q: Q) -> None:
    due = q.submit(due_at=q.value("select gangq.now() + interval '1 s'"))
    q.later(1)
    warned: list[str] = []
    q.db.add_notice_handler(lambda said: warned.append(str(said.message_primary)))
    with q.db.transaction(force_rollback=True):
        q.sql("alter function gangq.flag_dead_workers rename to gone")
        row = q.one("tick", force=True)
        assert (row["ran"], row["again"], row["detail"]["flag_dead_workers"]) == (True, False, 0)
        assert q.state(due) == "pending"
        (event,) = q.events("tick_error")
        assert event["data"] == {"step": "flag_dead_workers", "sqlstate": "42883"}
    assert [text.partition(":")[2][:30] for text in warned] == [" step flag_dead_workers failed"]


def test_a_step_that_has_waited_in_vain_is_tried_again_soon_and_is_no_error(q: Q) -> None:
    q.submit()
    q.worker().take().complete()
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select from gangq.tick_state for update")
        row = q.one("tick", force=True)
        assert row["detail"]["count_ended"] == -1
        assert (row["again"], row["next_in_s"]) == (True, pytest.approx(0.05))
    assert q.tick()["again"] is False


# Partitions -------------------------------------------------------------------------------------------------


def test_today_and_the_next_two_days_have_their_partitions_from_the_start(q: Q) -> None:
    for parent in PARENTS:
        assert len(partitions(q, parent)) == 3, parent


def test_partitions_are_made_two_days_ahead_as_days_pass(q: Q) -> None:
    before = partitions(q, "events")
    q.later(3 * DAY)
    q.tick()
    after = partitions(q, "events")
    assert after[: len(before)] == before
    assert len(after) == len(before) + 3
    assert q.value("select count(*) from gangq.events_rest") == 0


def test_a_day_begins_at_midnight_utc_however_the_ticking_session_writes_dates(q: Q) -> None:
    """IST is read back as Israel's time: with bounds in words of the session they would begin at 03:30."""
    q.later(3 * DAY)
    with q.connected(q.db.info.dsn) as other:
        other.sql("set datestyle = 'SQL, DMY'")
        other.sql("set timezone = 'Asia/Kolkata'")
        other.tick()
    bounds = q.sql(
        "select pg_get_expr(relpartbound, oid) as bound from pg_class "
        "where relnamespace = 'gangq'::regnamespace and relkind = 'r' and relname ~ '_[0-9]{8}$'"
    )
    assert len(bounds) >= 6 * len(PARENTS)
    assert [row["bound"] for row in bounds if row["bound"].count(" 00:00:00+00'") != 2] == []


def test_partitions_past_their_retention_are_dropped_whole(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker()
    worker.take().complete()
    worker.take().fail(retryable=False)
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)
    assert [row["state"] for row in q.sql("select state from gangq.history")] == ["failed"]
    q.later(24 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select state from gangq.history") == []
    assert [e["kind"] for e in q.events() if e["kind"] == "fail"] == []


def test_what_a_queue_keeps_for_ever_is_never_dropped(q: Q) -> None:
    q.call("set_queue", name="precious", retention_done="forever")
    job = q.submit(queue="precious")
    q.worker(queues=["precious"]).take().complete()
    q.later(400 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.state(job) == "done"


def test_a_job_finished_on_a_day_without_a_partition_is_caught_and_dropped_in_its_time(q: Q) -> None:
    q.later(40 * DAY)
    job = q.submit()
    q.worker().take().complete()
    assert q.value("select count(*) from gangq.history_short_rest") == 1
    assert q.state(job) == "done"
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select * from gangq.history") == []


def test_what_was_caught_goes_as_a_whole_with_the_last_of_it(q: Q) -> None:
    q.later(40 * DAY)
    q.submit(count=2)
    q.worker("a").take().complete()
    file = q.value("select pg_relation_filenode('gangq.history_short_rest')")
    q.later(5 * DAY)
    q.worker("b").take().complete()
    q.later(3 * DAY)
    q.call("keep_partitions", at_once=True)
    # One is past its time: while the other is not, nothing is deleted row by row.
    assert q.value("select count(*) from gangq.history_short_rest") == 2
    assert q.value("select pg_relation_filenode('gangq.history_short_rest')") == file
    q.later(5 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.value("select count(*) from gangq.history_short_rest") == 0
    assert q.value("select pg_relation_size('gangq.history_short_rest')") == 0
    assert q.value("select pg_relation_filenode('gangq.history_short_rest')") != file


def test_what_ends_while_old_rows_are_about_to_go_stays(q: Q) -> None:
    q.call("configure", retention_short="20 days")
    q.later(40 * DAY)
    q.submit(count=2)
    q.worker("a").take().complete()
    claim = q.worker("b").take()
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)  # of later days: from now on only what is caught is locked
    q.call("configure", retention_short="7 days")
    waits = (
        "select exists (select 1 from pg_locks "
        "where relation = 'gangq.history_short_rest'::regclass and not granted)"
    )
    dsn = q.db.info.dsn
    with q.connected(dsn) as other, q.connected(dsn) as keeper, ThreadPoolExecutor() as threads:
        with other.db.transaction():
            q.later(-1 * DAY)
            other.call("complete", job_ids=[claim.job_id], tokens=[claim.token])
            q.later(1 * DAY)
            keeping = threads.submit(keeper.call, "keep_partitions", at_once=True)
            # Committed while the lock is waited for: 100 ms at most, after which the rows wait for another pass.
            while not (q.value(waits) or keeping.done()):
                pass
        keeping.result()
    assert q.state(claim.job_id) == "done"


@pytest.mark.parametrize("table", ["events", "history_short"])
def test_rows_caught_on_one_day_do_not_keep_the_other_days_from_their_partitions(q: Q, table: str) -> None:
    q.later(40 * DAY)
    q.submit()
    q.worker().take().complete()  # with an event, both in the default partitions
    q.call("keep_partitions", at_once=True)
    names = partitions(q, table)
    tomorrow = q.value("select to_char((gangq.now() at time zone 'UTC') + interval '1 day', 'YYYYMMDD')")
    assert f"{table}_{tomorrow}" in names


def test_partitions_are_looked_after_every_ten_minutes_only(q: Q) -> None:
    assert q.one("keep_partitions") == 0
    q.sql("drop table gangq.logs_" + q.value("select to_char(gangq.now() at time zone 'UTC', 'YYYYMMDD')"))
    assert q.one("keep_partitions") == 0
    q.later(601)
    assert q.one("keep_partitions") >= 1


def test_partitions_are_looked_after_again_once_a_clock_that_was_ahead_is_set_back(q: Q) -> None:
    tomorrow = "to_char((gangq.now() at time zone 'UTC') + interval '1 day', 'YYYYMMDD')"
    q.later(400 * DAY)
    q.tick()
    turned = q.value("select requests_turned_at from gangq.tick_state")
    q.later(-400 * DAY)
    q.tick()
    assert q.value(f"select to_regclass('gangq.events_' || {tomorrow}) is not null")
    assert q.value("select requests_turned_at from gangq.tick_state") < turned


def test_incarnations_long_over_are_forgotten_but_not_a_quarantine(q: Q) -> None:
    q.worker("a").retire()
    q.worker("b").retire()
    q.call("quarantine", worker="b")
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)
    assert [row["name"] for row in q.sql("select name from gangq.workers")] == ["b"]


def test_how_a_worker_was_proven_dead_is_shown_when_its_incarnation_is_forgotten(q: Q) -> None:
    q.worker().report_dead()
    q.later(8 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select * from gangq.incarnations") == []
    (shown,) = q.sql("select kind, data from gangq.job_evidence")
    assert (shown["kind"], shown["data"]["by"]) == ("dead", "test")


def test_the_lease_of_a_worker_that_went_with_a_trip_is_kept_until_half_an_hour_after_it_is_over(
    q: Q,
) -> None:
    """So long its devices are withheld. Half an hour later it is forgotten: until then the view flagged reads it."""
    worker = q.worker(devices=gpus(1000))
    q.submit(gpus=1)
    worker.take().trip(exit_in_s=5)
    assert worker.row["ended_at"] is not None
    leases = "select incarnation from gangq.leases"
    q.call("keep_partitions", at_once=True)
    assert q.sql(leases) == [{"incarnation": worker.incarnation}]
    q.later(300)
    q.call("keep_partitions", at_once=True)
    assert len(q.sql(leases)) == 1
    q.later(1800)
    q.call("keep_partitions", at_once=True)
    assert q.sql(leases) == []


def test_a_row_held_by_somebody_keeps_nothing_from_being_made_or_dropped(q: Q) -> None:
    """What nothing refers to any more is deleted in the same step: partitions do not wait for that."""
    q.worker("a").retire()
    q.later(8 * DAY)
    before = partitions(q, "events")
    with q.connected(q.db.info.dsn) as operator, operator.db.transaction():
        operator.sql("select from gangq.incarnations for update")
        assert q.one("tick", force=True)["detail"]["keep_partitions"] == 3 * len(q.sql(KEPT))
    after = partitions(q, "events")
    assert set(before) < set(after)
    assert q.sql("select name from gangq.workers") == [{"name": "a"}]
    q.later(601)
    q.tick()
    assert q.sql("select name from gangq.workers") == []


def test_checkpoints_of_jobs_long_over_are_forgotten(q: Q) -> None:
    q.submit()
    claim = q.worker().take()
    claim.save(1)
    claim.fail(retryable=False)
    q.later(31 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select * from gangq.checkpoints") == []


def test_what_a_live_job_has_told_and_saved_is_kept_however_long_ago(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    claim.save(1)
    worker.beat(claim, beats=[{"step": 5}])
    q.later(31 * DAY)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select step from gangq.checkpoints") == [{"step": 1}]
    assert q.sql("select step from gangq.progress") == [{"step": 5}]
