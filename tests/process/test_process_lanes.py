"""A watchdog trips a job of one lane while the other lane is at work on the same worker."""

from __future__ import annotations

import pytest

from process.floor import PATIENCE_S, TASKS, Floor
from process.test_process_watchdogs import HUNG, the_trip
from worker.worker_process import eventually

BURNS = """
@app.task
def burns(ctx):
    JOURNAL_OF = Journal(JOURNAL)
    JOURNAL_OF.note("start", ctx.job.id, ctx.token, ticks=0)
    while not ctx.stopping:
        for _ in range(100000):
            pass
"""


@pytest.fixture
def hung(floor: Floor) -> Floor:
    floor.fleet.define(TASKS + HUNG + BURNS)
    floor.configure(stall_timeout_s=2)
    return floor


def placed(floor: Floor, task: str = "lives", **options: object) -> int:
    return floor.inline(task, memory_mb=1, wait_for_hardware=True, **options)


def test_a_trip_in_a_child_leaves_the_job_in_the_main_thread_alone(hung: Floor) -> None:
    floor = hung
    worker = floor.start("w")
    main = floor.inline()
    (pid,) = floor.until_at_work(main)
    assert pid == worker.process.pid
    incarnation = floor.worker_row("w").incarnation
    tripped = placed(floor, "outruns", budget_s=2)
    (row,) = floor.until_done(tripped)
    assert (row.result, row.trips, row.crashes, row.worker) == ("again", 1, 0, "w")
    assert the_trip(floor, tripped).code == 75
    assert floor.journal.living(main) == [pid]
    assert len(floor.journal.attempts(main)) == 1
    assert (floor.worker_row("w").incarnation, worker.process.poll()) == (incarnation, None)
    floor.go()
    floor.until_done(main)


@pytest.mark.parametrize("gang", [False, True], ids=["a job", "a member"])
def test_a_trip_in_the_main_thread_ends_the_worker_and_what_ran_in_a_child_goes_back_uncharged(
    hung: Floor, gang: bool
) -> None:
    floor = hung
    worker = floor.start("w")
    members = floor.client.submit_gang(task="lives", size=1) if gang else None
    other = members.job_ids[0] if members else placed(floor)
    floor.until_at_work(other)
    tripped = floor.inline("outruns", budget_s=2)
    assert worker.exit_code(30) == 75
    eventually(lambda: floor.journal.living(other) == [], "the child is gone", PATIENCE_S)
    floor.go()
    floor.start("w")
    row, _ = floor.until_done(other, tripped)
    assert (row.attempts, row.crashes, row.trips, row.stops) == (1, 0, 0, 0)
    assert the_trip(floor, tripped).code == 75
    assert floor.client.trips(job_id=other) == []
    if members:
        ended = floor.client.gang(id=members.gang_id)
        assert (ended.state, ended.epoch, ended.attempts) == ("done", 2, 0)
        (drain,) = floor.client.drains(gang_id=members.gang_id)
        assert drain.cause == "other_job", "it is blamed for what another job did"


@pytest.mark.slow
def test_the_work_of_a_child_does_not_make_a_hung_handler_in_the_main_thread_look_alive(
    hung: Floor,
) -> None:
    floor = hung
    # Silent, it has one limit and 10 s; if what burns were its own, ten limits.
    floor.configure(stall_timeout_s=4)
    worker = floor.start("w")
    busy = placed(floor, "burns")
    eventually(lambda: floor.journal.attempts(busy), "the child computes", PATIENCE_S)
    stuck = floor.inline("stalls")
    assert worker.exit_code(30) == 76
    assert the_trip(floor, stuck).code == 76
    floor.client.cancel(job_ids=[busy])
