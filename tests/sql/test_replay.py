"""The log of decisions: what a pass saw and decided is written down, and decides the same when it is run again."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gangq.client.rows import ReplayRow
from gangq.client.sync import in_steps, run
from gangq.client.verbs import Verbs
from sql.drive import NOT_ALLOWED, Q, gpus, refused

Row = dict[str, Any]


def passes(q: Q) -> list[Row]:
    return q.sql("select * from gangq.passes order by at")


def replay(q: Q, since: datetime | None = None, until: datetime | None = None) -> list[ReplayRow]:
    return in_steps(lambda query: run(q.db, query), iter(Verbs.replay(since=since, until=until)))


@pytest.fixture
def recording(q: Q) -> Q:
    q.sql("update gangq.settings set record_decisions = true, topology = '{rack,host}'")
    return q


def busy_hour(q: Q) -> None:
    """Queues with limits and fair shares, roles, domains, selectors, planned starts."""
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
        q.place()


def test_a_pass_that_decides_a_start_is_written_down_and_its_events_carry_the_digest(q: Q) -> None:
    q.worker()
    gang = q.submit_gang(1)
    q.tick()
    (row,) = passes(q)
    (start,) = row["decisions"]
    assert (start["action"], start["ask"], row["board"]) == ("start", f"g{gang.id}", None)
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
    (row,) = replay(q)
    assert (row.same, row.difference) == (None, "its board was not recorded")


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_a_recorded_stretch_decides_the_same_again_in_any_session(recording: Q, zone: str) -> None:
    q = recording
    q.sql("set timezone = 'America/St_Johns'")
    busy_hour(q)
    q.sql(f"set timezone = '{zone}'")
    q.sql("set extra_float_digits = 0")
    rows = replay(q)
    assert len(rows) >= 3
    assert {(row.same, row.difference) for row in rows} == {(True, None)}
    recorded = passes(q)
    assert any(one["action"] == "plan" for row in recorded for one in row["decisions"])
    assert [row.digest for row in rows] == [row["digest"] for row in recorded]


def test_a_board_is_recorded_exactly_as_it_was_seen(recording: Q) -> None:
    q = recording
    busy_hour(q)
    assert q.value("select bool_and(md5(p.board::text) = p.digest) from gangq.passes p")


def test_the_first_difference_is_named(recording: Q) -> None:
    q = recording
    one, two = q.workers(2)
    gang = q.submit_gang(1)
    q.tick()
    q.sql(
        "update gangq.passes set decisions = jsonb_set(decisions, '{0,seats,0,worker}', to_jsonb(%(w)s::bigint))",
        w=two.incarnation,
    )
    (row,) = replay(q)
    assert row.same is False
    difference = row.difference or ""
    assert difference.startswith("decision 1 of 1 was {")
    assert f'"worker": {two.incarnation}' in difference
    assert f'"worker": {one.incarnation}' in difference.partition(" and is ")[2]
    assert f'"ask": "g{gang.id}"' in difference


def test_a_board_of_another_release_is_said_to_be_one(recording: Q) -> None:
    q = recording
    q.worker()
    q.submit_gang(1)
    q.tick()
    q.sql("""update gangq.passes set board = (board::jsonb || '{"moons": 3}')::json""")
    (row,) = replay(q)
    assert row.same is None
    assert "cannot be read: board has unknown fields (moons)" in (row.difference or "")


def test_only_the_stretch_asked_for_is_run(recording: Q) -> None:
    q = recording
    workers = q.workers(3)
    for _ in range(3):
        q.submit_gang(1)
        q.tick()
        q.live_on(60, *workers, tick=False)
    times = [row["at"] for row in passes(q)]
    assert [row.at for row in replay(q, since=times[1])] == times[1:]
    assert [row.at for row in replay(q, since=times[1], until=times[1])] == [times[1]]


@pytest.mark.parametrize(
    "role", ["gangq_viewer", "gangq_submitter", "gangq_worker", "gangq_host", "gangq_notifier"]
)
def test_only_an_admin_sees_boards(recording: Q, role: str) -> None:
    q = recording
    q.sql(f"set role {role}")
    with refused(NOT_ALLOWED):
        replay(q)
    q.sql("reset role")
