"""Claims behind dead rows that nothing can clean away: as cheap as at first, and in the order they always had."""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from soaking import SOAK
from sql.drive import Claim, Q, Worker, gpus

pytestmark = pytest.mark.own_database


@contextlib.contextmanager
def horizon_held(dsn: str) -> Iterator[None]:
    """An idle transaction elsewhere sees everything as it is now: nothing that dies meanwhile is cleaned away."""
    with psycopg.connect(dsn) as other:
        other.execute("set transaction isolation level repeatable read")
        other.execute("select count(*) from gangq.live_jobs")
        yield


@contextlib.contextmanager
def another(q: Q, dsn: str) -> Iterator[Q]:
    """Another session, in a transaction that stays open until `db.commit()` or `db.rollback()`."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as db:
        yield Q(db, q.clock)


def churn(worker: Worker, times: int, batch: int = 100, **options: Any) -> None:
    """Submit, claim, finish."""
    for _ in range(times):
        ids = worker.q.submit(count=batch, **options)
        claims = worker.claim(batch)
        assert [claim.job_id for claim in claims] == ids
        worker.q.call("complete", job_ids=ids, tokens=[claim.token for claim in claims])


def buffers(worker: Worker) -> int:
    """What one claim reads and writes. It is rolled back."""
    with worker.q.db.transaction(force_rollback=True):
        rows = worker.q.sql(
            "explain (analyze, buffers, format json) select * from gangq.claim(%(i)s, max_jobs => 1)",
            i=worker.incarnation,
        )
        plan = rows[0]["QUERY PLAN"][0]["Plan"]
        assert plan["Actual Rows"] == 1
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_a_claim_reads_as_much_behind_thousands_of_dead_rows_as_at_first(q: Q, dsn: str) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, 5)
    q.submit()
    fresh = buffers(worker)
    worker.take().complete()
    with horizon_held(dsn):
        churn(worker, 40)
        churn(worker, 5, queue="default", priority=5)
        q.submit()
        # What was claimed last, up to twice 256 places, is stepped over; the thousands before it are not.
        assert buffers(worker) < fresh + 150
        with q.connected(dsn) as its_own:
            stranger = Worker(its_own, "w1", worker.registration)
            buffers(stranger)  # Makes its plans.
            assert buffers(stranger) < fresh + 150
        q.sql("delete from gangq.lows")
        assert buffers(worker) > fresh + 200, "the dead rows are there"


@pytest.mark.parametrize("serves", ["the same jobs", "other jobs"])
def test_a_worker_with_nothing_to_do_does_not_walk_over_what_others_finished(
    q: Q, dsn: str, serves: str
) -> None:
    q.call("set_queue", name="other")
    worker = q.worker(prefetch=100)
    mine = "default" if serves == "the same jobs" else "other"
    registration = q.worker("idle", queues=[mine]).registration
    with horizon_held(dsn), q.connected(dsn) as its_own:
        idle = Worker(its_own, "idle", registration)
        q.submit(queue=mine)
        idle.take().complete()
        for _ in range(8):
            churn(worker, 5)
            assert idle.claim() == []
        q.submit(queue=mine)
        assert buffers(idle) < 400


def test_a_session_made_its_plans_while_the_queue_was_empty_and_keeps_to_indexes(q: Q) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, 10, batch=10)
    before = q.value("select pg_stat_get_xact_numscans('gangq.live_jobs'::regclass)")
    q.submit(count=2000)
    with q.db.transaction():
        claims = worker.claim(10)
        q.call("complete", job_ids=[c.job_id for c in claims], tokens=[c.token for c in claims])
        assert q.value("select pg_stat_get_xact_numscans('gangq.live_jobs'::regclass)") == 0, before


# What becomes pending behind what was claimed -----------------------------------------------------------------


def passed(q: Q, worker: Worker, count: int = 5) -> None:
    """This session has claimed past all there was, and knows it."""
    churn(worker, 4, batch=count)


@pytest.mark.parametrize("how", ["release", "requeue", "fail", "scheduled", "dependent", "raised", "lowered"])
def test_a_job_that_comes_back_has_the_place_it_always_had(q: Q, how: str) -> None:
    q.call("set_queue", name="aside")
    worker, helper = q.worker(prefetch=5), q.worker("helper", queues=["default", "aside"], prefetch=9)
    first = q.submit(queue="aside")
    options: dict[str, Any] = {
        "scheduled": {"due_at": q.value("select gangq.now() + interval '1 minute'")}
    }.get(how, {})
    if how == "dependent":
        options = {"after": [first]}
    if how in ("raised", "lowered"):
        options = {"priority": -5 if how == "raised" else 5}
    back = q.submit(**options)
    if how in ("release", "requeue", "fail"):
        (held,) = (c for c in helper.claim(2) if c.job_id == back)
    if how == "raised":
        passed(q, worker, 5)
        q.call("set_priority", priority=0, job_ids=[back])
    elif how == "lowered":
        churn_ids = q.submit(count=5, priority=9)
        assert [c.complete() for c in worker.claim(5)] == ["done"] * len(churn_ids)
        q.call("set_priority", priority=0, job_ids=[back])
        rest = q.submit(count=5)
        assert [c.job_id for c in worker.claim(5)] == [back, *rest[:4]]
        return
    else:
        passed(q, worker)
    if how in ("release", "requeue"):
        getattr(held, how)()
    elif how == "fail":
        held.fail()
        q.later(3600)
        worker.beat()
        q.call("promote_due")
    elif how == "scheduled":
        q.later(61)
        worker.beat()
        q.call("promote_due")
    elif how == "dependent":
        next(c for c in helper.claim() if c.job_id == first).complete()
        q.tick()
    late = q.submit(count=3)
    assert [c.job_id for c in worker.claim(3)] == [back, *late[:2]]


def test_a_job_of_a_higher_priority_goes_first_whatever_was_claimed_before(q: Q) -> None:
    worker = q.worker(prefetch=5)
    for priority in (0, 10, 5, -5):
        churn(worker, 3, batch=5, priority=priority)
    order = [q.submit(priority=priority) for priority in (-5, 5, 0, 10, 1000, 7)]
    assert [worker.take().complete() for _ in order] == ["done"] * 6
    ended = q.sql("select job_id from gangq.history where job_id = any(%(ids)s) order by token", ids=order)
    assert [row["job_id"] for row in ended] == [order[n] for n in (4, 3, 5, 1, 2, 0)]


def test_a_submission_that_is_committed_late_keeps_its_place(q: Q, dsn: str) -> None:
    worker = q.worker(prefetch=5)
    passed(q, worker)
    with another(q, dsn) as writer:
        early = writer.submit()
        passed(q, worker)
        waiting = q.submit(count=2)
        writer.db.commit()
        assert [worker.take().job_id for _ in range(3)] == [early, *waiting]


def test_a_claim_that_is_rolled_back_leaves_its_jobs_where_they_were(q: Q, dsn: str) -> None:
    worker, other = q.worker(prefetch=5), q.worker("other")
    first = q.submit()
    with another(q, dsn) as taker:
        rows = taker.call("claim", incarnation=other.incarnation)
        assert [row["job_id"] for row in rows] == [first]
        passed(q, worker)
        waiting = q.submit()
        taker.db.rollback()
        assert [worker.take().job_id for _ in range(2)] == [first, waiting]


def test_a_rolled_back_claim_of_ones_own_teaches_nothing(q: Q) -> None:
    worker = q.worker(prefetch=50)
    ids = q.submit(count=20)
    with q.db.transaction(force_rollback=True):
        assert len(worker.claim(20)) == 20
    assert [c.job_id for c in worker.claim(20)] == ids


def test_nothing_that_is_late_waits_longer_than_100_ms_while_a_writer_is_open(q: Q, dsn: str) -> None:
    worker = q.worker(prefetch=1000)
    with claiming_ahead(q, dsn, worker) as early:
        began = time.monotonic()
        while worker.take().job_id != early:
            assert time.monotonic() - began < 1, "found at the next look"
        # The work between two looks is not the queue's.
        assert time.monotonic() - began < 0.4


@pytest.mark.parametrize("seed", range(20 if SOAK else 1))
def test_any_order_of_events_is_claimed_as_a_stranger_would_claim_it(q: Q, dsn: str, seed: int) -> None:
    """Submissions of three shapes and priorities, late commits, rolled back claims and returns, at random: each claim
    of a session that knows takes what the order says.
    """
    rng = random.Random(seed)
    for queue in ("a", "b"):
        q.call("set_queue", name=queue)
    worker = q.worker(prefetch=40, queues=["default", "a", "b"])
    other = q.worker("other", prefetch=40, queues=["default", "a", "b"])
    held: list[Claim] = []
    for queue in ("default", "a", "b"):
        churn(worker, 1, batch=2, queue=queue)
    with horizon_held(dsn), another(q, dsn) as writer:
        for step in range(250):
            act = rng.choice(
                [
                    "submit",
                    "submit",
                    "claim",
                    "claim",
                    "claim",
                    "back",
                    "late",
                    "commit",
                    "steal",
                    "undo",
                    "raise",
                ]
            )
            options = {"queue": rng.choice(["default", "a", "b"]), "priority": rng.choice([0, 0, 0, 5, -5])}
            if act == "submit":
                q.submit(count=rng.choice([1, 5, 20]), **options)
            elif act == "late" and "steal" not in writer.__dict__:
                writer.submit(count=2, **options)
            elif act == "steal":
                writer.call("claim", incarnation=other.incarnation, max_jobs=3, request_id=uuid.uuid4())
            elif act in ("commit", "undo"):
                writer.db.commit() if act == "commit" else writer.db.rollback()
            elif act == "raise":
                pending = q.sql(
                    "select id from gangq.live_jobs where state = 'pending' for update skip locked limit 1"
                )
                if pending:
                    q.call("set_priority", priority=rng.choice([-5, 0, 5]), job_ids=[pending[0]["id"]])
            elif act == "back" and held:
                claim = held.pop(rng.randrange(len(held)))
                rng.choice([claim.release, claim.requeue, claim.complete])()
            elif act == "claim":
                most = rng.choice([1, 3, 10])
                expected = [
                    row["id"]
                    for row in q.sql(
                        "select id from gangq.live_jobs where state = 'pending' order by order_key limit %(most)s "
                        "for update skip locked",
                        most=min(most, 40 - len(held)),
                    )
                ]
                claims = worker.claim(most)
                assert [claim.job_id for claim in claims] == expected, f"step {step}"
                held += claims
                while len(held) > 20:
                    held.pop(0).complete()
        writer.db.rollback()


@pytest.mark.parametrize("how", ["a tick", "unquarantine"])
def test_a_job_that_may_use_a_device_again_has_the_place_it_always_had(q: Q, how: str) -> None:
    """It moves to another shape as it waits, below where that was claimed up to."""
    job = q.submit(gpus=1)
    one, other = (q.worker(name, devices=gpus(1, prefix=name)) for name in "ab")
    one.take().trip(78)
    other.take().fail(retryable=False)
    q.call("retry", job_ids=[job])
    for _ in range(5):
        q.submit(gpus=1)
        one.take().complete()
    if how == "a tick":
        other.retire()
        q.tick()
    else:
        q.call("quarantine", device_uuid="a0")
        q.call("unquarantine", device_uuid="a0")
    late = q.submit(gpus=1)
    for expected in (job, late):
        claim = one.take()
        assert claim.job_id == expected
        claim.complete()


@contextlib.contextmanager
def claiming_ahead(q: Q, dsn: str, worker: Worker) -> Iterator[int]:
    """A job committed late, while a writer that stays open makes this session claim from where it came to."""
    with another(q, dsn) as writer, another(q, dsn) as late:
        passed(q, worker)
        writer.sql("create table stays_open (n integer)")
        early = late.submit()
        churn(worker, 8, batch=1000)
        q.submit(count=1000)
        late.db.commit()
        yield early


def test_a_neighbour_in_the_same_session_does_not_look_for_jobs_it_does_not_serve(q: Q, dsn: str) -> None:
    q.call("set_queue", name="other")
    worker, neighbour = q.worker(prefetch=1000), q.worker("neighbour", queues=["other"])
    with claiming_ahead(q, dsn, worker) as early:
        taken = []
        for _ in range(3):
            time.sleep(0.11)
            assert neighbour.claim(1) == []
            taken.append(worker.take().job_id)
        assert early in taken


@contextlib.contextmanager
def prepared_and_rolled_back(q: Q) -> Iterator[None]:
    """A prepared transaction leaves the session's settings behind."""
    name = uuid.uuid4().hex
    q.sql("begin")
    yield
    q.sql(f"prepare transaction '{name}'")
    q.sql(f"rollback prepared '{name}'")


def test_what_a_prepared_transaction_freed_is_not_given_again_when_it_is_rolled_back(q: Q) -> None:
    worker = q.worker()
    q.submit(count=3)
    held = worker.take()
    with prepared_and_rolled_back(q):
        held.complete()
        worker.take()
    assert worker.claim(1) == []


def test_what_a_prepared_transaction_claimed_is_found_again_when_it_is_rolled_back(q: Q, dsn: str) -> None:
    worker = q.worker(prefetch=50)
    passed(q, worker)
    with another(q, dsn) as writer:
        early = writer.submit()
        passed(q, worker)
        writer.db.commit()
    rest = q.submit(count=2)
    with prepared_and_rolled_back(q):
        assert [worker.take().job_id for _ in range(3)] == [early, *rest]
    assert worker.take().job_id == early
