"""What may not go on for ever: hand-backs, stops, checkpoints never complete; and settings that could not work."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, TOO_LARGE, WRONG_STATE, Q, ack_all, refused

STOPS = 3
STEPS = 64


# Stops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["released by its worker", "left by a worker that retires"])
def test_a_job_is_handed_back_as_often_as_the_installation_allows_and_then_fails(q: Q, how: str) -> None:
    q.call("configure", max_stops=STOPS)
    job = q.submit()
    for nth in range(1, STOPS + 2):
        worker = q.worker(f"w{nth}")
        claim = worker.take()
        if how == "released by its worker":
            assert claim.release() == "released"
        worker.retire()
        row = q.job(job)
        if nth <= STOPS:
            assert (row["state"], row["stops"], row["attempts"]) == ("pending", nth, 0)
    assert row["state"] == "failed"
    assert row["error"] == {
        "type": "StoppedTooOften",
        "message": f"handed back or told to stop {STOPS + 1} times",
    }


def test_a_job_stopped_as_often_as_allowed_may_still_lose_its_worker(q: Q) -> None:
    q.call("configure", max_stops=1)
    job = q.submit()
    worker = q.worker("w1")
    worker.take().release()
    worker.take()
    worker.report_dead()
    row = q.job(job)
    assert (row["state"], row["stops"], row["crashes"]) == ("pending", 1, 1)
    q.worker("w2").take().release()
    assert q.job(job)["error"]["type"] == "StoppedTooOften"


@pytest.mark.parametrize("how", ["released", "preempted"])
def test_a_gang_is_stopped_as_often_as_the_installation_allows_and_then_fails(q: Q, how: str) -> None:
    q.call("configure", max_stops=STOPS)
    gang, workers = q.submit_gang(2), q.workers(2)
    for nth in range(1, STOPS + 2):
        claims = gang.start(*workers)
        if how == "released":
            claims[0].release()
            claims[1].ack()
        else:
            assert q.one("preempt_gang", gang_id=gang.id)
            ack_all(claims)
        if nth <= STOPS:
            assert (gang.state, [m["stops"] for m in gang.members]) == ("blocked", [nth, nth])
    assert gang.state == "failed"
    assert gang.row["reason"] == f"the gang was handed back or told to stop more than {STOPS} times"
    assert [(m["state"], m["error"]["type"]) for m in gang.members] == [("failed", "GangFailed")] * 2


# Checkpoints ------------------------------------------------------------------------------------------------


def steps_of(q: Q, job_id: int) -> list[int]:
    rows = q.sql("select step from gangq.checkpoints where job_id = %(id)s order by step", id=job_id)
    return [row["step"] for row in rows]


def test_a_rank_may_be_64_steps_ahead_of_the_others_and_no_further(q: Q) -> None:
    claims = q.submit_gang(2).start(*q.workers(2))
    for step in range(1, STEPS + 1):
        claims[0].save(step)
    with refused(WRONG_STATE, "rank 0 of gang"):
        claims[0].save(STEPS + 1)
    claims[0].save(STEPS, b"again")  # the same step once more is no further step
    assert steps_of(q, claims[0].job_id) == list(range(1, STEPS + 1))
    claims[1].save(1)
    claims[0].save(STEPS + 1)
    with refused(WRONG_STATE, "rank 0 of gang"):
        claims[0].save(STEPS + 2)
    claims[1].save(STEPS)
    assert steps_of(q, claims[0].job_id) == [STEPS, STEPS + 1], "the others have caught up"


@pytest.mark.parametrize(("size", "mode"), [(2, "rank0"), (1, "each")])
def test_a_rank_that_nobody_has_to_follow_saves_as_many_steps_as_it_likes(q: Q, size: int, mode: str) -> None:
    claims = q.submit_gang(size, checkpoint_mode=mode).start(*q.workers(size))
    for step in range(1, STEPS + 4):
        claims[0].save(step)
    assert steps_of(q, claims[0].job_id) == [STEPS + 3]


# Settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_s": 25},
        {"lease_s": 35},
        {"grace_s": 100},
        {"heartbeat_s": 47.5},
        {"lease_margin_s": 95},
        {"lease_s": 40, "heartbeat_s": 5, "lease_margin_s": 10, "grace_s": 20},
    ],
)
def test_a_lease_that_leaves_no_time_to_work_in_is_refused_with_the_numbers(
    q: Q, settings: dict[str, Any]
) -> None:
    before = q.sql("select * from gangq.settings")
    with refused(INVALID, "lease_margin_s") as caught:
        q.call("configure", **settings)
    for name in ("lease_s", "grace_s", "heartbeat_s"):
        assert name in str(caught.value)  # type: ignore[attr-defined]
    assert q.sql("select * from gangq.settings") == before


@pytest.mark.parametrize(
    "settings",
    [
        {"lease_s": 35.5},
        {"grace_s": 99.5},
        {"heartbeat_s": 47},
        {"lease_margin_s": 94.5},
        {"lease_s": 10, "heartbeat_s": 1, "lease_margin_s": 2, "grace_s": 5.5},
    ],
)
def test_a_lease_just_long_enough_for_its_margin_the_grace_and_two_heartbeats_is_accepted(
    q: Q, settings: dict[str, Any]
) -> None:
    q.call("configure", **settings)
    (now,) = q.sql("select * from gangq.settings")
    assert {name: now[name] for name in settings} == settings


@pytest.mark.parametrize("name", ["retention_short", "retention_long", "incarnation_retention"])
def test_history_is_not_lost_to_a_retention_that_ends_in_the_future(q: Q, name: str) -> None:
    before = q.sql("select * from gangq.settings")
    with refused(INVALID, "-7 days"):
        q.call("configure", **{name: "-7 days"})
    assert q.sql("select * from gangq.settings") == before


def test_a_report_of_what_cannot_be_killed_names_no_pid_of_any_length(q: Q) -> None:
    worker = q.worker("a")
    evidence = {"pid": "9" * 100_000}
    q.one("report_stuck", worker="a", incarnation=worker.incarnation, evidence=evidence)
    assert len(q.value("select quarantined from gangq.workers")) < 300


def test_a_board_that_a_pass_brings_has_a_bound(q: Q) -> None:
    with refused(TOO_LARGE, "the board"):
        q.sql(
            "select gangq.apply((select runs from gangq.lock_rows where name = 'pass'), '[]', "
            "seen => jsonb_build_object('board', repeat('b', 67108865)))"
        )
