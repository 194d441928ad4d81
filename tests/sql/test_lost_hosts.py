"""A host of which a worker died is the last choice for a while, and the gang that it killed goes elsewhere."""

from __future__ import annotations

import pytest

from gangq.placement.board import Board
from sql.drive import Gang, Q, Worker


def lose(q: Q, worker: Worker) -> Worker:
    """A worker dies, what it held is drained, and it comes back under its name."""
    worker.report_dead()
    q.settle()
    return q.worker(worker.name, slots=4)


def home(gang: Gang) -> str:
    """The worker that has all of its members."""
    (name,) = set(gang.placed_on)
    return name


def board(q: Q) -> Board:
    return Board.from_json(q.one("board"))


def doubtful(q: Q) -> list[str]:
    return [worker.name for worker in board(q).workers if worker.doubtful]


def test_a_gang_whose_host_dies_is_placed_on_another_one(q: Q) -> None:
    workers = {w.name: w for w in q.workers(3, slots=4)}
    gang = q.submit_gang(4, failure_policy="restart_gang")
    gang.start(*workers.values())
    lost = home(gang)
    workers[lost].report_dead()
    workers[lost] = q.worker(lost, slots=4)
    for _ in range(3):
        q.live_on(10, *workers.values(), tick=False)
        q.call("tick", force=True)
    (ask,) = board(q).asks
    assert ask.avoid_hosts == {f"host-{lost}"}
    assert doubtful(q) == [lost]
    q.live_on(120, *workers.values(), tick=True)
    assert home(gang) != lost


def test_a_flapping_host_does_not_fail_a_gang_while_others_are_idle(q: Q) -> None:
    workers = {w.name: w for w in q.workers(8, slots=4)}
    gang = q.submit_gang(4, failure_policy="restart_gang")
    gang.start(*workers.values())
    flapping = home(gang)
    for _ in range(4):
        workers[flapping] = lose(q, workers[flapping])
        q.live_on(60, *workers.values(), tick=True)
        gang.claimed_by(*workers.values())
        assert home(gang) != flapping
    assert gang.state == "running"


def test_others_come_to_the_host_last_and_only_for_ten_minutes(q: Q) -> None:
    workers = {w.name: w for w in q.workers(2, slots=4)}
    gang = q.submit_gang(4, failure_policy="fail")
    gang.start(*workers.values())
    lost = home(gang)
    workers[lost] = lose(q, workers[lost])
    first, second = q.submit_gang(4), q.submit_gang(4)
    q.place()
    assert home(first) != lost
    assert home(second) == lost, "it is the last choice, and a choice"
    q.clock.advance(601)
    assert doubtful(q) == []


@pytest.mark.parametrize("how", ["retired", "idle"])
def test_who_stops_as_asked_or_dies_without_a_job_leaves_no_doubt(q: Q, how: str) -> None:
    worker, _ = q.workers(2, slots=4)
    if how == "idle":
        worker.report_dead()
    else:
        q.submit_gang(1).start(worker)
        worker.retire()
    q.settle()
    assert doubtful(q) == []


@pytest.mark.own_database
def test_what_was_lost_is_found_by_its_index_however_much_has_happened(q: Q) -> None:
    worker = q.worker(slots=4)
    q.running_gang(worker)
    lose(q, worker)
    q.sql(
        "insert into gangq.events (id, at, kind) select -n, gangq.now() - make_interval(secs => n % 3600), 'reserve' "
        "from generate_series(1, 30000) n"
    )
    q.sql("analyze gangq.events")
    assert len(q.call("lost_hosts", t=q.value("select gangq.now()"))) == 1
    seen = q.value("explain (analyze, buffers, format json) select * from gangq.lost_hosts(gangq.now())")
    plan = seen[0]["Plan"]
    assert plan["Actual Rows"] == 1
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 100
