"""What short jobs and gangs call most keeps its plans: PostgreSQL before 18 plans a SQL function at each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sql.drive import Q, Worker, gpus

# No table is read in them, so that planning costs little; and the clock of the tests.
CHEAP = {"now", "board_rate", "first_pos", "timeout_shifted", "charge_gang", "charge_job", "member_charge"}
CHEAP |= {"most_evidence", "most_said"}


def planned_at_each_call(q: Q, call: Callable[[], object]) -> set[str]:
    """The SQL functions that this called and no query inlined."""
    with q.db.transaction():
        q.sql("set local track_functions = 'all'")
        before = calls(q)
        call()
        return {name for name, count in calls(q).items() if count > before.get(name, 0)} - CHEAP


def calls(q: Q) -> dict[str, int]:
    """How often SQL functions were called by themselves; what was not written to the statistics yet counts, too."""
    rows = q.sql(
        "select f.funcname, f.calls from pg_stat_xact_user_functions f join pg_proc p on p.oid = f.funcid "
        "join pg_language l on l.oid = p.prolang where l.lanname = 'sql'"
    )
    return {row["funcname"]: row["calls"] for row in rows}


@pytest.fixture
def worker(q: Q) -> Worker:
    return q.worker(slots=3, devices=gpus(1, 1, 1))


def test_a_job_that_follows_another_in_its_place_plans_nothing(q: Q, worker: Worker) -> None:
    q.submit(count=9, gpus=1)
    claim = worker.take()

    def follow() -> None:
        rows = q.call(
            "complete_and_claim",
            incarnation=worker.incarnation,
            job_ids=[claim.job_id],
            tokens=[claim.token],
        )
        assert [row["outcome"] for row in rows] == ["done", "claimed"]

    assert planned_at_each_call(q, follow) == set()


def test_a_gang_is_submitted_placed_claimed_and_done_without(q: Q, worker: Worker) -> None:
    def live() -> None:
        gang = q.submit_gang(3, gpus=1)
        assert q.place()["placed"] == 1
        for claim in worker.claim(ports=[4000]):
            claim.barrier()
            claim.complete()
        assert gang.state == "done"

    assert planned_at_each_call(q, live) == set()


def test_a_light_job_is_submitted_claimed_and_done_without(q: Q, worker: Worker) -> None:
    def live() -> None:
        q.submit()
        worker.take(lane="light").complete()

    assert planned_at_each_call(q, live) == set()
