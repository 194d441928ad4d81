"""A job is done and the next is claimed in one call: what complete promises, and what claim promises."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from sql.drive import (
    PLACED,
    STALE,
    TOO_LARGE,
    WRONG_ISOLATION,
    WRONG_STATE,
    Claim,
    Q,
    Row,
    Worker,
    gpus,
    refused,
)


def both(worker: Worker, *finished: Claim, **named: Any) -> tuple[dict[int, str], list[Claim]]:
    """The outcome of each finished job, and what was claimed."""
    named.setdefault("request_id", uuid.uuid4())
    rows = worker.q.call(
        "complete_and_claim",
        incarnation=worker.incarnation,
        job_ids=[claim.job_id for claim in finished],
        tokens=[claim.token for claim in finished],
        **named,
    )
    outcomes = {row["job_id"]: row["outcome"] for row in rows if row["outcome"] != "claimed"}
    return outcomes, [Claim(worker.q, row, worker.incarnation) for row in rows if row["outcome"] == "claimed"]


@contextlib.contextmanager
def held(dsn: str, lock: str, **values: Any) -> Iterator[None]:
    """Another session keeps a lock meanwhile."""
    with psycopg.connect(dsn) as other:
        other.execute(lock, values or None)
        yield


def nothing_changed(q: Q, before: list[Row]) -> bool:
    return q.sql("select * from gangq.live_jobs order by id") == before


def test_the_finished_job_is_done_and_the_next_one_is_as_claim_would_give_it(q: Q) -> None:
    first, second, third = q.submit(count=3)
    worker = q.worker()
    outcomes, claims = both(worker, worker.take(), results=[{"n": 1}])
    assert outcomes == {first: "done"}
    assert q.job(first)["result"] == {"n": 1}
    assert [claim.job_id for claim in claims] == [second]
    request = uuid.uuid4()
    _, claims = both(worker, claims[0], request_id=request)
    plain = worker.claim(request_id=request)
    assert [claim.job_id for claim in plain] == [third]
    assert plain[0].row == {key: value for key, value in claims[0].row.items() if key != "outcome"}


def test_a_call_whose_reply_was_lost_gives_the_same_answer_and_claims_nothing_more(q: Q) -> None:
    first, second, _ = q.submit(count=3)
    worker = q.worker(prefetch=2)
    claim, request = worker.take(), uuid.uuid4()
    assert both(worker, claim, request_id=request)[0] == {first: "done"}
    before = q.sql("select * from gangq.live_jobs order by id")
    for _ in range(2):
        outcomes, claims = both(worker, claim, request_id=request)
        assert outcomes == {first: "repeated"}
        assert [again.job_id for again in claims] == [second]
    assert claim.complete() == "repeated"
    assert [again.job_id for again in worker.claim(request_id=request)] == [second], "and so do the two apart"
    assert nothing_changed(q, before)


def test_a_call_that_got_nothing_may_be_followed_by_a_claim_of_the_same_request(q: Q) -> None:
    q.submit()
    worker, request = q.worker(), uuid.uuid4()
    outcomes, claims = both(worker, worker.take(), request_id=request, sleep=True)
    assert (list(outcomes.values()), claims) == (["done"], [])
    assert q.value("select incarnation from gangq.sleepers") == worker.incarnation
    later = q.submit()
    assert worker.take(request_id=request).job_id == later


@pytest.mark.parametrize("strict", [True, False])
def test_a_stale_token_is_refused_with_strict_and_else_keeps_nobody_from_the_next_job(
    q: Q, strict: bool
) -> None:
    stale_id, next_id = q.submit(count=2)
    worker, other = q.worker(), q.worker("other")
    stale = worker.take()
    stale.release()
    now = other.take()
    before = q.sql("select * from gangq.live_jobs order by id")
    if strict:
        with refused(STALE, f"job {stale_id}"):
            both(worker, stale)
        assert nothing_changed(q, before)
    else:
        outcomes, claims = both(worker, stale, strict=False)
        assert outcomes == {stale_id: "stale"}
        assert [claim.job_id for claim in claims] == [next_id]
    assert now.complete() == "done", "the present claim of that job is untouched"


def test_a_refused_result_claims_nothing_and_the_claim_is_there_to_be_made_alone(q: Q) -> None:
    q.call("set_queue", name="default", max_payload_bytes=2000)
    _, second = q.submit(count=2)
    worker, request = q.worker(prefetch=2), uuid.uuid4()
    claim = worker.take()
    before = q.sql("select * from gangq.live_jobs order by id")
    with refused(TOO_LARGE):
        both(worker, claim, results=[list(range(3000))], request_id=request)
    assert nothing_changed(q, before)
    assert worker.take(request_id=request).job_id == second
    assert claim.complete({"n": 1}) == "done"


def test_a_member_whose_barrier_is_shut_is_refused_and_nothing_is_claimed(q: Q) -> None:
    one, two = q.worker("w1", prefetch=2), q.worker("w2")
    gang = q.submit_gang(2)
    q.tick()
    member = one.take()
    q.submit()
    before = q.sql("select * from gangq.live_jobs order by id")
    with refused(WRONG_STATE, "barrier"):
        both(one, member)
    assert nothing_changed(q, before)
    assert len(gang.claimed_by(two)) == 1
    assert gang.state == "running"


def test_the_next_job_gets_the_devices_of_the_finished_one(q: Q) -> None:
    q.submit(count=2, gpus=2)
    worker = q.worker(devices=gpus(8000, 8000))
    _, (claim,) = both(worker, worker.take())
    assert [device["uuid"] for device in claim["devices"]] == ["G0", "G1"]


def test_a_reserved_member_is_claimed_first_and_the_last_one_opens_the_barrier(q: Q) -> None:
    workers = q.workers(2, slots=1, light=2)
    q.submit(count=2)
    solo = [worker.take() for worker in workers]
    gang = q.submit_gang(2)
    q.tick()
    q.submit(count=2, priority=100)
    claims = [both(worker, claim)[1] for worker, claim in zip(workers, solo, strict=True)]
    assert [[claim["gang_id"] for claim in mine] for mine in claims] == [[gang.id], [gang.id]]
    assert gang.state == "running"
    assert claims[1][0].barrier()[0]["go"]


def test_a_limit_counts_the_finished_job_no_more_and_the_claimed_one_at_once(q: Q) -> None:
    q.call("set_queue", name="default", max_running_jobs=1)
    _, second, _ = q.submit(count=3)
    one, two = q.worker("w1"), q.worker("w2")
    claim = one.take()
    assert two.claim() == []
    _, claims = both(one, claim)
    assert [claim.job_id for claim in claims] == [second]
    assert two.claim() == []


def test_what_a_gang_with_a_planned_start_waits_for_is_not_claimed(q: Q) -> None:
    worker = q.worker("w1", devices=gpus(8000, 8000))
    busy = q.worker("w2", devices=gpus(8000, 8000, prefix="H"))
    q.submit(gpus=2)
    q.submit(gpus=2)
    claims = [worker.take(), busy.take()]
    gang = q.submit_gang(2, gpus=2, priority=10)
    later = q.submit(gpus=2, budget_s=1e6)
    q.settle()
    assert worker.incarnation in [seat["incarnation"] for seat in q.planned_seats()]
    outcomes, taken = both(worker, claims[0])
    assert (list(outcomes.values()), taken, q.state(later)) == (["done"], [], "pending")
    assert both(busy, claims[1])[1] == []
    q.settle()
    assert gang.state == "reserved"
    assert len(gang.claimed_by(worker, busy)) == 2


@pytest.mark.parametrize("what", ["worker", "gang", "member", "queue", "sleeper"])
def test_the_report_waits_for_nobody_who_only_the_claim_would_wait_for(q: Q, dsn: str, what: str) -> None:
    worker = q.worker(slots=2)
    q.submit()
    claim = worker.take()
    if what in ("gang", "member"):
        q.submit_gang(1)
        q.tick()
    elif what != "sleeper":
        q.submit()
    if what == "queue":
        q.call("set_queue", name="default", max_running_jobs=5)
    if what == "sleeper":
        assert worker.claim(sleep=True) == []
    lock = {
        "worker": "select 1 from gangq.incarnations for no key update",
        "gang": "select 1 from gangq.live_gangs for update",
        "member": "select 1 from gangq.live_jobs where state = 'reserved' for update",
        "queue": "select 1 from gangq.queues_table for no key update",
        "sleeper": "select * from gangq.submit('work', options => '{\"wake\": \"sleepers\"}')",
    }[what]
    request = uuid.uuid4()
    with held(dsn, lock):
        # Whoever waits at all waits longer than this.
        q.sql("set statement_timeout = '150ms'")
        outcomes, claims = both(worker, claim, request_id=request, sleep=True)
        q.sql("reset statement_timeout")
    assert outcomes == {claim.job_id: "done"}
    assert claims == []
    assert len(worker.claim(request_id=request)) == 1


def test_a_port_that_is_taken_undoes_no_report(q: Q) -> None:
    q.submit_gang(1)
    other = q.worker("other", host="h")
    q.tick()
    assert other.take(ports=[6000])["master_port"] == 6000
    q.submit()
    q.submit_gang(1)
    worker = q.worker("worker", host="h")
    q.tick()
    claim = worker.take(lane="light")
    outcomes, claims = both(worker, claim, ports=[6000])
    assert (outcomes, claims) == ({claim.job_id: "done"}, [])
    with refused(WRONG_STATE, "6000"):
        worker.claim(ports=[6000])
    assert worker.take(ports=[6001])["master_port"] == 6001


def test_a_port_that_another_session_is_taking_undoes_no_report(q: Q, dsn: str) -> None:
    q.submit_gang(1)
    other = q.worker("other", host="h")
    q.tick()
    q.submit()
    q.submit_gang(1)
    worker = q.worker("worker", host="h")
    q.tick()
    claim = worker.take(lane="light")
    taking = "select * from gangq.claim(%(incarnation)s, ports => array[6000])"
    with held(dsn, taking, incarnation=other.incarnation):
        q.sql("set statement_timeout = '150ms'")
        assert both(worker, claim, ports=[6000]) == ({claim.job_id: "done"}, [])
        assert worker.claim(ports=[6000]) == []
        q.sql("reset statement_timeout")
    with refused(WRONG_STATE, "6000"):
        worker.claim(ports=[6000])
    assert worker.take(ports=[6001])["master_port"] == 6001


def test_a_report_is_taken_after_the_lease_has_ended_and_nothing_is_claimed(q: Q) -> None:
    first, second = q.submit(count=2)
    worker = q.worker()
    claim = worker.take()
    q.later(3600)
    assert both(worker, claim) == ({first: "done"}, [])
    assert q.state(second) == "pending"


@pytest.mark.parametrize("count", [5, 900])
def test_jobs_come_in_the_order_in_which_they_are_to_run_wherever_their_rows_lie(q: Q, count: int) -> None:
    worker = q.worker(prefetch=1000)
    q.submit()
    claim = worker.take()
    low, middle, high = (q.submit(count=count // 3 or 1, priority=priority) for priority in (-1, 0, 1))
    _, claims = both(worker, claim, max_jobs=1000)
    order = [job for ids in (high, middle, low) for job in (ids if isinstance(ids, list) else [ids])]
    assert [one.job_id for one in claims] == order


def test_quiet_says_only_what_is_not_plainly_done(q: Q) -> None:
    q.submit(count=3)
    worker = q.worker(prefetch=3)
    first, second = worker.claim(2)
    assert first.complete() == "done"
    outcomes, (third,) = both(worker, first, second, quiet=True)
    assert outcomes == {first.job_id: "repeated"}
    assert [q.state(job.job_id) for job in (second, third)] == ["done", "running"]
    assert both(worker, second, third, quiet=None)[0] == {second.job_id: "repeated", third.job_id: "done"}


def test_it_needs_read_committed_like_claim(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker()
    claim = worker.take()
    with refused(WRONG_ISOLATION), q.db.transaction():
        q.sql("set transaction isolation level repeatable read")
        both(worker, claim)
    assert q.state(claim.job_id) == "running"


# Who asks for a tick ---------------------------------------------------------------------------------------


@pytest.fixture
def asked(q: Q, dsn: str) -> Iterator[Callable[[], int]]:
    """How often a tick has been asked for since it was last called."""
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_tick")
        ear.execute("listen marker")

        def count() -> int:
            q.sql("select pg_notify('marker', '')")
            for heard, notification in enumerate(
                ear.notifies(timeout=5)
            ):  # Sessions hear in the order of commits.
                if notification.channel == "marker":
                    return heard
            raise AssertionError("the marker was not heard")

        yield count


def test_of_those_who_finish_while_a_gang_waits_one_asks_for_a_tick_and_a_callers_own_transaction_keeps_nobody_quiet(
    q: Q, dsn: str, asked: Callable[[], int]
) -> None:
    q.submit(count=4, cpus=1)
    workers = q.workers(4, cpus=1)
    claims = [worker.take() for worker in workers]
    q.submit_gang(2, gpus=1, wait_for_hardware=True)
    with q.connected(dsn) as one, q.connected(dsn) as two:
        asked()
        said = [
            {"incarnation": worker.incarnation, "job_ids": [claim.job_id], "tokens": [claim.token]}
            for worker, claim in zip(workers, claims, strict=True)
        ]
        with one.db.transaction():
            one.call("complete_and_claim", **said[0])
            two.call("complete_and_claim", **said[1])
            assert asked() == 0, "the other is about to ask"
        assert asked() == 1
        with one.db.transaction():
            one.sql("create temporary table of_the_caller (id integer)")
            one.call("complete_and_claim", **said[2])
            two.call("complete_and_claim", **said[3])
            assert asked() == 1
        assert asked() == 1


@pytest.mark.parametrize("waits", ["a gang", "a single job", "nothing", "light jobs"])
@pytest.mark.parametrize("placed", [True, False])
def test_a_tick_is_asked_for_where_a_placed_job_is_done_and_something_waits_to_be_placed(
    q: Q, asked: Callable[[], int], placed: bool, waits: str
) -> None:
    worker = q.worker("w1", slots=1)
    q.submit(**PLACED if placed else {})
    claim = worker.take()
    if waits == "a gang":
        q.submit_gang(2, gpus=1, wait_for_hardware=True)
    elif waits != "nothing":
        q.submit("other", count=2, **PLACED if waits == "a single job" else {})
    asked()
    both(worker, claim)
    assert (asked() > 0) is (placed and waits in ("a gang", "a single job"))


def test_a_tick_is_asked_for_where_another_workers_job_is_done(q: Q, asked: Callable[[], int]) -> None:
    q.submit(**PLACED)
    claim = q.worker("w1").take()
    other = q.worker("w2")
    q.submit()
    q.submit_gang(2, gpus=1, wait_for_hardware=True)
    asked()
    assert len(both(other, claim)[1]) == 1
    assert asked() > 0


def test_a_member_is_claimed_and_a_tick_asked_for_beside_it(q: Q, asked: Callable[[], int]) -> None:
    worker = q.worker("w1", slots=2)
    q.submit(**PLACED)
    claim = worker.take()
    gang = q.submit_gang(1)
    q.tick()
    assert gang.state == "reserved"
    q.submit_gang(2, gpus=1, wait_for_hardware=True)
    asked()
    assert [claimed["gang_id"] for claimed in both(worker, claim)[1]] == [gang.id]
    assert asked() > 0


def test_a_tick_is_asked_for_where_a_gang_comes_while_the_report_waits_for_its_own(
    q: Q, dsn: str, asked: Callable[[], int]
) -> None:
    one, two = q.workers(2)
    gang, (member, _) = q.running_gang(one, two)
    with q.connected(dsn) as reporting, ThreadPoolExecutor() as pool:
        with held(dsn, "select from gangq.live_gangs where id = %(id)s for update", id=gang.id):
            said = {"incarnation": member.incarnation, "job_ids": [member.job_id], "tokens": [member.token]}
            reported = pool.submit(reporting.call, "complete_and_claim", **said)
            while not q.sql(
                "select pid from pg_locks where pid = %(pid)s and not granted",
                pid=reporting.db.info.backend_pid,
            ):
                assert not reported.done()
            q.submit_gang(2, gpus=1, wait_for_hardware=True)
            asked()
        assert [row["outcome"] for row in reported.result()] == ["done"]
    assert asked() > 0


@pytest.mark.parametrize(("due_in_s", "ticks"), [(1, 1), (1e6, 0)])
def test_a_tick_is_asked_for_where_an_attempt_is_due_again_before_the_next_safety_tick(
    q: Q, asked: Callable[[], int], due_in_s: float, ticks: int
) -> None:
    q.submit(count=2)
    failed, snoozed = q.worker(prefetch=2).claim()
    asked()
    assert failed.fail(retry_in_s=due_in_s) == "scheduled"
    assert asked() == ticks
    assert snoozed.snooze(due_in_s) == "scheduled"
    assert asked() == ticks
