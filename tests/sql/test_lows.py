"""Below gangq.lows nothing is pending that kept its first place, however slow a commit. See sql/072_light.sql."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sql.drive import Q, Worker, gpus

pytestmark = pytest.mark.slow

RAISES_AT = 256
"""So many places above low its shape's first job is when it is raised."""


@contextlib.contextmanager
def writer(q: Q, dsn: str) -> Iterator[Q]:
    """A session in a transaction that has its number already."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as db:
        own = Q(db, q.clock)
        own.sql("select pg_current_xact_id()")
        yield own


def churn(worker: Worker, jobs: int, **options: Any) -> None:
    """Submit, claim, finish."""
    while jobs > 0:
        worker.q.submit(count=min(jobs, 100), **options)
        claims = worker.claim(100)
        worker.q.call("complete", job_ids=[c.job_id for c in claims], tokens=[c.token for c in claims])
        jobs -= 100


def low(q: Q) -> list[int]:
    """How many places each low is above its start."""
    return [row["n"] for row in q.sql("select low - start as n from gangq.lows order by shape_id, start")]


def check(q: Q) -> None:
    hidden = q.sql(
        "select j.id from gangq.live_jobs j join gangq.lows l on l.shape_id = j.shape_id "
        "and j.order_key >= l.start and j.order_key < l.low where j.state = 'pending' and not j.returned"
    )
    assert hidden == []


def test_low_follows_what_is_claimed(q: Q) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, RAISES_AT + 100)
    assert low(q) == [0], "marked"
    churn(worker, 100)
    assert low(q)[0] >= RAISES_AT, "everything older has ended"
    check(q)


def test_a_place_drawn_late_by_an_older_transaction_hides_none_drawn_early_by_a_newer_one(
    q: Q, dsn: str
) -> None:
    worker = q.worker(prefetch=1000)
    with writer(q, dsn) as older, writer(q, dsn) as newer:
        early = newer.submit()
        late = older.submit(count=3 * RAISES_AT)
        older.db.commit()
        # No transaction that began after the newer one has ended when the first of these claims marks.
        first, second = worker.take(), worker.take()
        assert [first.job_id, second.job_id] == late[:2]
        newer.db.commit()
        assert worker.take().job_id == early
    check(q)


@pytest.mark.parametrize("how", ["open", "rolled back"])
def test_low_waits_for_whoever_drew_a_place_below_it(q: Q, dsn: str, how: str) -> None:
    worker = q.worker(prefetch=100)
    with writer(q, dsn) as slow:
        early = slow.submit()
        churn(worker, 4 * RAISES_AT)
        assert low(q) == [0], "marked once, raised never"
        if how == "open":
            slow.db.commit()
            assert worker.take().job_id == early
        else:
            slow.db.rollback()
        churn(worker, 2 * RAISES_AT)
        assert low(q)[0] > RAISES_AT
    check(q)


def test_low_is_raised_no_further_than_to_what_was_marked(q: Q, dsn: str) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, RAISES_AT + 100)
    assert low(q) == [0], "marked"
    with writer(q, dsn) as slow:
        early = slow.submit()
        churn(worker, 4 * RAISES_AT)
        assert low(q)[0] > 0, "to where it was marked before the slow one began"
        slow.db.commit()
    assert worker.take().job_id == early
    check(q)


def test_a_claim_that_is_rolled_back_after_others_went_past_it_hides_nothing(q: Q, dsn: str) -> None:
    worker, thief = q.worker(prefetch=1000), q.worker("thief")
    churn(worker, 1, task="a")
    with writer(q, dsn) as slow:
        early = slow.submit(task="a")
        q.submit(task="a", count=RAISES_AT + 100)
        for _ in range(RAISES_AT + 50):
            worker.take().complete()
        assert low(q) == [0], "marked, and held up by the slow one"
        slow.db.commit()
    with writer(q, dsn) as other:
        (stolen,) = other.call("claim", incarnation=thief.incarnation, max_jobs=1)
        assert stolen["job_id"] == early
        for claim in worker.claim(1000):
            claim.complete()
        for _ in range(2):
            q.submit(task="b")
            q.submit(task="a")
            assert len(worker.claim(2)) == 2
        other.db.rollback()
    check(q)
    assert early in [claim.job_id for claim in worker.claim(10)]


def test_a_line_that_has_run_dry_is_raised_by_the_tick(q: Q) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, 2 * RAISES_AT)
    churn(worker, 2 * RAISES_AT, priority=3)
    before = low(q)
    q.tick()
    q.tick()
    last = q.value("select last_value from gangq.positions")
    assert max(last - n for n in before) >= RAISES_AT > max(last - n for n in low(q))
    q.submit(), q.submit(priority=3)
    check(q)
    assert [c["priority"] for c in worker.claim(2)] == [3, 0]


def test_the_tick_raises_no_low_above_what_is_pending(q: Q) -> None:
    worker = q.worker(prefetch=100)
    churn(worker, 2 * RAISES_AT)
    waiting = q.submit()
    churn(worker, 600, priority=3)  # Whole claims of 100, so that none takes the other as well.
    assert q.state(waiting) == "pending"
    q.tick()
    q.tick()
    check(q)
    assert worker.take().job_id == waiting


def test_a_job_of_priority_100_goes_first_behind_thousands_of_priority_0(q: Q) -> None:
    worker = q.worker(prefetch=1000)
    q.submit(count=2000)
    worker.claim(1000)
    urgent = q.submit(priority=100)
    assert worker.q.call("claim", incarnation=worker.incarnation, max_jobs=1) == []
    other = q.worker("other")
    assert other.take().job_id == urgent


@pytest.mark.parametrize("seed", range(2))
def test_claims_take_the_first_by_priority_and_place_whatever_happened_before(
    q: Q, dsn: str, seed: int
) -> None:
    """40 lines, alternating priorities, jobs that return, all behind a held snapshot and with no tick."""
    chance = random.Random(seed)
    worker = q.worker(prefetch=1000)
    held: list[Any] = []
    with psycopg.connect(dsn) as snapshot:
        snapshot.execute("set transaction isolation level repeatable read")
        snapshot.execute("select count(*) from gangq.live_jobs")
        for _ in range(60):
            q.submit(
                task=f"t{chance.randrange(40 if seed else 2)}", count=chance.randint(1, 60),
                priority=chance.choice([0, 0, 1]),
            )  # fmt: skip
            many = chance.randint(1, 60)
            wanted = [
                row["id"]
                for row in q.sql(
                    "select id from gangq.live_jobs where state = 'pending' order by order_key limit %(n)s",
                    n=many,
                )
            ]
            claims = worker.claim(many)
            assert [claim.job_id for claim in claims] == wanted
            held += claims
            chance.shuffle(held)
            for claim in [held.pop() for _ in range(min(len(held), chance.randint(0, 40)))]:
                match chance.randrange(8):
                    case 0:
                        claim.release()
                    case 1:
                        claim.requeue(front=True)
                    case 2:
                        claim.release()
                        q.call("set_priority", job_ids=[claim.job_id], priority=chance.choice([0, 1]))
                    case _:
                        claim.complete()
            check(q)
        assert max(low(q)) > RAISES_AT


def test_what_needs_a_device_is_no_business_of_lows(q: Q) -> None:
    worker = q.worker(devices=gpus(8000))
    for _ in range(3):
        q.submit(count=RAISES_AT, gpus=1)
        worker.take().complete()
    assert low(q) == []
