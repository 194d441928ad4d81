"""The log of decisions: what a pass saw and decided is written down, and decides the same when it is run again."""

from __future__ import annotations

from typing import Any

import pytest
from drive import NOT_ALLOWED, Q, gpus, refused

Row = dict[str, Any]


def passes(q: Q) -> list[Row]:
    return q.sql("select * from gangq.passes order by at")


def same(q: Q) -> list[bool | None]:
    return [row["same"] for row in q.call("replay")]


@pytest.fixture
def recording(q: Q) -> Q:
    q.sql("update gangq.settings set record_decisions = true, topology = '{rack,host}'")
    return q


def busy_hour(q: Q) -> None:
    """Queues with limits and fair shares, roles, domains, selectors, planned starts, passes that end early."""
    q.call("set_queue", name="a.b", policy="fair", maximum={"gpus": 9}, weight=1.7)
    q.call("set_queue", name="a", submitter_maximum={"gpus": 8})
    workers = [
        q.worker(
            f"w{n}",
            host=f"h{n // 2}",
            slots=4,
            memory_mb=4000,
            cpus=7.5,
            queues=["default", "a.b"],
            labels={"rack": "ab"[n % 2], "zone": "eu"},
            devices=gpus(100, 200, 200, prefix=f"W{n}-"),
        )
        for n in range(4)
    ]
    q.submit("solo", count=2, gpus=1, budget_s=77.7)
    workers[0].claim(max_jobs=2)
    for n in range(6):
        q.submit_gang(
            1 + n % 3, gpus=1, queue=["default", "a.b"][n % 2], priority=n % 4 - 1, budget_s=100 / 3 + n
        )
        q.submit_gang(
            None,
            roles=[
                {"name": "x", "count": 1, "cpus": 0.333},
                {"name": "y", "count": 2, "min": 1, "gpus": 1, "prefer": "rack"},
            ],
            selector=[{"key": "zone", "op": "in", "values": ["eu", "us"]}],
            apart="pair",
        )
        q.live_on(13.7, *workers, tick=False)
        q.one("admit", max_gangs=2)


def test_a_pass_that_decides_a_start_is_written_down_and_its_events_carry_the_digest(q: Q) -> None:
    q.worker()
    gang = q.submit_gang(1)
    q.tick()
    (row,) = passes(q)
    (start,) = row["decisions"]["decisions"]
    assert (start["action"], start["gang_id"], row["board"]) == ("start", gang.id, None)
    (event,) = q.events("reserve")
    assert event["data"]["digest"] == row["digest"]
    assert len(row["digest"]) == 32


def test_a_pass_that_decides_nothing_is_not_written_down(recording: Q) -> None:
    q = recording
    q.tick()
    q.submit_gang(1)
    q.tick()
    assert passes(q) == []


def test_what_was_not_recorded_cannot_be_run_again_and_says_so(q: Q) -> None:
    q.worker()
    q.submit_gang(1)
    q.tick()
    (row,) = q.call("replay")
    assert row["same"] is None
    assert "record_decisions" in row["difference"]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_a_recorded_stretch_decides_the_same_again_in_any_session(recording: Q, zone: str) -> None:
    q = recording
    q.sql("set timezone = 'America/St_Johns'")
    busy_hour(q)
    q.sql(f"set timezone = '{zone}'")
    q.sql("set extra_float_digits = 0")
    q.sql("set datestyle = 'SQL, DMY'")
    rows = q.sql("select same, difference, digest from gangq.replay()")
    q.sql("reset datestyle")
    assert len(rows) >= 3
    assert {(row["same"], row["difference"]) for row in rows} == {(True, None)}
    recorded = passes(q)
    assert any(d["action"] == "plan" for row in recorded for d in row["decisions"]["decisions"])
    assert [row["digest"] for row in rows] == [row["digest"] for row in recorded]


def test_a_board_comes_back_exactly_as_it_was(recording: Q) -> None:
    q = recording
    busy_hour(q)
    assert q.value(
        "select bool_and(gangq.digest_of(jsonb_populate_record(null::gangq.board, p.board)) = p.digest) "
        "from gangq.passes p"
    )


def test_the_first_difference_is_named(recording: Q) -> None:
    q = recording
    q.workers(2)
    gang = q.submit_gang(1)
    q.tick()
    q.sql("update gangq.passes set decisions = jsonb_set(decisions, '{decisions,0,incarnations,0}', '2')")
    (row,) = q.call("replay")
    assert row["same"] is False
    assert row["difference"].startswith(f"decision 1 of 1 was start gang {gang.id} on workers [2]")
    assert "is start gang 1 on workers [1]" in row["difference"]


def test_a_board_that_somebody_changed_is_not_what_the_pass_saw(recording: Q) -> None:
    q = recording
    q.workers(2)
    q.submit_gang(1)
    q.tick()
    q.sql("update gangq.passes set board = jsonb_set(board, '{worker_names,0}', '\"another\"')")
    (row,) = q.call("replay")
    assert row["same"] is False
    assert "digest" in row["difference"]


def test_only_the_stretch_asked_for_is_run(recording: Q) -> None:
    q = recording
    workers = q.workers(3)
    for _ in range(3):
        q.submit_gang(1)
        q.tick()
        q.live_on(60, *workers, tick=False)
    times = [row["at"] for row in passes(q)]
    assert [row["at"] for row in q.call("replay", since=times[1])] == times[1:]
    assert [row["at"] for row in q.call("replay", since=times[1], until=times[1])] == [times[1]]


def test_a_pass_whose_time_was_up_stops_at_the_same_gang_again(recording: Q) -> None:
    q = recording
    q.worker(slots=50)
    for n in range(6):
        q.submit_gang(1 + n % 2)
    first = q.one("admit", budget_ms=0)
    assert first == {"placed": 1, "again": True}
    assert passes(q)[0]["decisions"]["turns"] == 1
    while q.one("admit", budget_ms=0)["again"]:
        pass
    assert q.value("select count(*) from gangq.gangs where state = 'reserved'") == 6
    assert same(q) == [True] * len(passes(q))
    assert len(passes(q)) == 6


def test_a_pass_looks_past_those_that_do_not_fit_however_long_that_takes(q: Q) -> None:
    q.worker()
    for n in range(5):
        q.submit_gang(1, cpus=n + 1, priority=5, wait_for_hardware=True)
    q.sql("update gangq.incarnations set cpus = 0")
    gang, behind = q.submit_gang(1), q.submit_gang(1)
    assert q.one("admit", budget_ms=0) == {"placed": 1, "again": True}
    assert (gang.state, behind.state) == ("reserved", "blocked")


@pytest.mark.parametrize(
    ("placed", "again", "said"), [(3, "true", -2), (0, "true", -1), (3, "false", 3)], ids=str
)
def test_a_tick_whose_pass_ran_out_of_time_wants_to_run_again_at_once(
    q: Q, placed: int, again: str, said: int
) -> None:
    """-2 is asked again at once, -1 (busy) a little later."""
    with q.db.transaction(force_rollback=True):
        q.sql(
            "create or replace function gangq.admit(max_gangs integer default 200, budget_ms integer default null) "
            f"returns table (placed integer, again boolean) language sql as 'select {placed}, {again}'"
        )
        assert q.value("select gangq.tick_step('admit')") == said


def test_every_gang_of_a_pass_may_be_asked_for_and_no_other_decision_changes(recording: Q) -> None:
    q = recording
    busy_hour(q)
    q.sql("update gangq.settings set reservations = 0")
    q.call("set_queue", name="held")
    q.sql("select gangq.submit_gang('train', 2, queue => 'held') from generate_series(1, 9)")
    q.call("set_queue", name="held", max_running_gangs=0)
    some, every = (
        q.sql(
            "select to_jsonb(d) - 'turn' as d from gangq.decide_on(gangq.look(200), each_gang => %(each)s) d",
            each=each,
        )
        for each in (False, True)
    )
    waiting = q.value("select cardinality(gang_ids) from gangq.look(200)")
    assert len(every) == waiting > len(some)
    assert [row for row in every if row in some] == some
    assert all(row["d"]["action"] == "wait" for row in every if row not in some)


def test_only_an_admin_sees_boards(recording: Q) -> None:
    q = recording
    for role in ("gangq_viewer", "gangq_submitter", "gangq_worker"):
        for statement in ("select * from gangq.passes", "select * from gangq.replay()"):
            with q.db.transaction(force_rollback=True):
                q.sql(f"set local role {role}")
                with refused(NOT_ALLOWED), q.db.transaction():
                    q.sql(statement)
    with q.db.transaction(force_rollback=True):
        q.sql("set local role gangq_admin")
        q.sql("set transaction read only")
        q.sql("select * from gangq.passes")
        q.sql("select * from gangq.replay()")
