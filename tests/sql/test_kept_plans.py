"""What short jobs and gangs call most keeps its plans: PostgreSQL before 18 plans a SQL function at each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sql.drive import Q, Worker, gpus

pytestmark = pytest.mark.every_server

# No table is read in them, so that planning costs little; the clock of the tests; and candidates, whose plan must not
# be kept (see it).
CHEAP = {
    "now",
    "board_rate",
    "first_pos",
    "timeout_shifted",
    "charge_gang",
    "charge_job",
    "member_charge",
    "candidates",
}
CHEAP |= {"most_evidence", "most_said"}

CHECKED = "check_limits('q', 'k', 0, 1, 0, 0, 0)"


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


@pytest.mark.own_database
@pytest.mark.parametrize("asked", ["count_starts('q', 'k', 1)", "rate_hit('q', 'k', 1)", CHECKED])
def test_a_plan_from_when_there_was_one_limit_key_is_cheap_when_there_are_thousands(q: Q, asked: str) -> None:
    """Each start was counted in a time quadratic in the number of keys, by a session older than the keys."""
    q.call("set_queue", name="q", rate="1000/1s")
    q.call("set_limit", key="k", rate="1000/1s")
    q.sql("vacuum analyze gangq.limit_keys")
    for _ in range(10):  # From the sixth time on the plan may be one for all arguments, which is kept.
        q.sql(f"select gangq.{asked}")
    q.sql(
        "insert into gangq.limit_keys (name, rate, login) "
        "select 'key' || n, '1000/1s', 'me' from generate_series(1, 3000) n"
    )
    assert buffers(q, asked) < 30


@pytest.mark.own_database
def test_a_plan_from_when_there_was_one_worker_reads_each_of_thousands_once(q: Q, worker: Worker) -> None:
    q.sql("vacuum analyze gangq.incarnations, gangq.leases")
    for _ in range(10):
        q.sql("select gangq.candidates(gangq.now())")
    for table, number, more in (
        ("incarnations", "id", ", 'name', 'x' || n, 'host', 'h' || n"),
        ("leases", "incarnation", ""),
    ):
        q.sql(
            f"insert into gangq.{table} select (jsonb_populate_record(x, jsonb_build_object("
            f"'{number}', x.{number} + n{more}))).* from gangq.{table} x, generate_series(1, 2000) n"
        )
    assert buffers(q, "candidates(gangq.now())") < 10 * 2000


@pytest.mark.own_database
def test_gangs_that_are_apart_cost_each_other_nothing_while_they_wait(q: Q, worker: Worker) -> None:
    """Whether one of the same name is on a host was asked of each that waits, by a session older than them."""
    gang = q.submit_gang(1, apart="pair")
    q.sql("vacuum analyze gangq.live_gangs, gangq.live_jobs")
    asked = (
        f"misplaced(g, array[{gang.job_ids[0]}], array[{worker.incarnation}]) from gangq.live_gangs g "
        f"where g.id = {gang.id}"
    )
    for _ in range(10):
        q.sql(f"select gangq.{asked}")
    for table, number, also in (("live_gangs", "id", "id"), ("live_jobs", "id", "gang_id")):
        q.sql(
            f"insert into gangq.{table} select (jsonb_populate_record(x, jsonb_build_object("
            f"'{number}', x.{number} + n, '{also}', x.{also} + n))).* "
            f"from gangq.{table} x, generate_series(1, 2000) n"
        )
    assert q.value(f"select gangq.{asked}") is None
    assert buffers(q, asked) < 50


def buffers(q: Q, asked: str) -> int:
    """How many pages a call reads."""
    (row,) = q.sql(f"explain (analyze, buffers, format json) select gangq.{asked}")
    plan = row["QUERY PLAN"][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
