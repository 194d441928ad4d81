"""Rates: of the jobs that name a limit key, or of a queue, at most N start at once, then one each P/N."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gangq.durations import in_short
from sql.drive import INVALID, WRONG_STATE, Q, refused

API = {"limit_key": "api", "rate": "3/1m"}


def starts(q: Q, worker: Any) -> int:
    """How many jobs the worker gets; all of them are done at once."""
    claims = worker.claim()
    for claim in claims:
        claim.complete()
    return len(claims)


def test_so_many_start_at_once_and_then_one_each_period_over_their_number(q: Q) -> None:
    worker = q.worker(slots=10)
    for _ in range(9):
        q.submit(**API)
    assert starts(q, worker) == 3
    assert starts(q, worker) == 0
    q.later(19.9)
    worker.beat()
    assert starts(q, worker) == 0
    q.later(0.2)
    assert starts(q, worker) == 1
    q.live_on(120, worker)
    # However long it was idle, no more than the whole rate at once.
    assert starts(q, worker) <= 3
    assert starts(q, worker) == 0


def test_a_limit_key_says_when_one_more_may_start(q: Q) -> None:
    def opens_in() -> float | None:
        at = q.value("select opens_at from gangq.limits where name = 'api'")
        return None if at is None else float((at - q.clock.now()).total_seconds())

    worker = q.worker(slots=10, lease_s=1e5)
    for budget in (900, 300, None):
        q.submit(**API, budget_s=budget)
    assert opens_in() is None, "now"
    assert len(worker.claim()) == 3
    assert opens_in() == pytest.approx(20)
    q.later(15)
    assert opens_in() == pytest.approx(5)
    # The budget of one of them ends after 300 s, if the limit has to wait for that, too.
    q.call("set_limit", key="api", most=3)
    assert opens_in() == pytest.approx(285)
    q.call("set_limit", key="api", most=4)
    q.later(10)
    assert opens_in() is None, "now"


def test_a_limit_that_is_used_up_without_budgets_opens_nobody_knows_when(q: Q) -> None:
    worker = q.worker(slots=10)
    q.submit(count=2, limit_key="api", limit=1, rate="1/1h")
    assert len(worker.claim()) == 1
    assert q.value("select opens_at from gangq.limits") is None


def test_a_period_after_idle_time_has_twice_the_rate_at_most_and_each_later_one_the_rate(q: Q) -> None:
    worker = q.worker(slots=20)
    for _ in range(40):
        q.submit(**API)
    seen: list[int] = []
    for second in range(0, 300, 5):
        seen += [second] * starts(q, worker)
        q.later(5)
        worker.beat()
    within = [sum(at <= other < at + 60 for other in seen) for at in seen]
    assert max(within) <= 6
    assert max(sum(at <= other < at + 60 for other in seen) for at in seen if at >= 20) <= 3
    assert len(seen) == 3 + 280 // 20


def test_a_place_is_one_start_and_is_not_refilled(q: Q) -> None:
    worker = q.worker(slots=1)
    for _ in range(5):
        q.submit(limit_key="api", rate="2/1h")
    for n in (1, 1, 0):
        assert starts(q, worker) == n
    # Not even by a claim without a pass.
    assert q.call("claim", incarnation=worker.incarnation, max_jobs=10) == []


@pytest.mark.parametrize("whose", ["queue", "key"])
def test_a_place_that_was_open_before_the_rate_was_set_is_not_refilled(q: Q, whose: str) -> None:
    q.call("set_limit", key="api", most=9)
    q.submit(count=4, limit_key="api")
    workers = q.workers(2, slots=1)
    claims = [worker.take() for worker in workers]
    if whose == "queue":
        q.call("set_queue", name="default", rate="1/1h")
    else:
        q.call("set_limit", key="api", rate="1/1h")
    for claim in claims:
        claim.complete()
    assert sum(starts(q, worker) for worker in workers) == 1


def test_a_start_is_not_lost_when_another_worker_was_faster(q: Q) -> None:
    workers = q.workers(2, slots=2)
    for _ in range(9):
        q.submit(**API)
    q.place()
    first = {
        row["incarnation"]: row["n"]
        for row in q.sql("select incarnation, count(*) as n from gangq.places group by 1")
    }
    fast, slow = sorted(workers, key=lambda worker: -first[worker.incarnation])
    assert (first[fast.incarnation], first[slow.incarnation]) == (2, 1)
    for row in q.call("claim", incarnation=fast.incarnation, max_jobs=2):
        q.call("complete", job_ids=[row["job_id"]], tokens=[row["token"]])
    # Jobs are packed on the first worker, which is idle again: yet the place on the other one stays.
    q.place()
    assert len(q.call("claim", incarnation=slow.incarnation, max_jobs=2)) == 1


def test_a_rate_of_a_queue_counts_its_children_and_what_would_be_light(q: Q) -> None:
    q.call("set_queue", name="api", rate="2/1m")
    q.call("set_queue", name="api.a")
    worker = q.worker(queues=["api", "api.a"], slots=9)
    jobs = [q.submit(queue=name) for name in ("api", "api.a", "api.a")]
    assert starts(q, worker) == 2
    assert "the rate of queue api, 2/1m, leaves 0 starts now" in str(q.call("explain_job", job_id=jobs[2]))
    q.call("set_queue", name="api", rate=None)
    assert starts(q, worker) == 1


def test_a_gang_spends_its_size_and_one_larger_than_the_rate_is_refused(q: Q) -> None:
    worker = q.worker(slots=9)
    gang, second = q.submit_gang(2, **API), q.submit_gang(2, limit_key="api")
    q.place()
    assert (gang.state, second.state) == ("reserved", "blocked")
    assert "leaves 1 start now, and it needs 2 starts" in str(q.call("explain_gang", gang_id=second.id))
    with refused(
        WRONG_STATE, "limits of limit key api: 2 starts are used, 2 more would be, and 3 is the limit"
    ):
        q.call("reserve_gang", gang_id=second.id, incarnations=[worker.incarnation] * 2)
    with refused(INVALID, "it starts 4 jobs at once, and the rate of limit key api is 3/1m"):
        q.submit_gang(4, limit_key="api")
    assert q.submit_gang(9, min_size=2, limit_key="api").state == "blocked"
    q.call("set_queue", name="slow", rate="1/1s")
    with refused(INVALID, "it starts 2 jobs at once, and the rate of queue slow is 1/1s"):
        q.submit_gang(2, queue="slow")


def test_python_says_lengths_of_time_as_sql_does(q: Q) -> None:
    for s in (-1, 0, 0.2, 59, 59.5, 60, 185, 3599.1, 7800, 172799, 172800, 300000):
        assert in_short(s) == q.value("select gangq.in_short(%(s)s::numeric)", s=s)


def test_a_start_that_a_rate_made_smaller_since_never_allows_is_said_so(q: Q) -> None:
    q.worker(slots=9)
    q.submit(**API)
    gang = q.submit_gang(3, limit_key="api")
    q.call("set_limit", key="api", rate="2/1m")
    q.place()
    said = {row["gate"]: row["detail"] for row in q.call("explain_gang", gang_id=gang.id)}
    assert said["start"] == "not planned: its rate never lets so many start at once"
    assert said["unblock"] == "a rate of 3 or more"


def test_an_elastic_gang_starts_as_large_as_the_rate_allows(q: Q) -> None:
    q.worker(slots=9)
    gang = q.submit_gang(9, min_size=2, **API)
    q.place()
    assert q.value("select world_size from gangq.live_gangs where id = %(id)s", id=gang.id) == 3


def test_a_retry_is_a_new_start(q: Q) -> None:
    worker = q.worker(slots=4)
    q.submit(limit_key="api", rate="1/1m")
    (claim,) = worker.claim()
    claim.fail()
    q.live_on(50, worker)
    assert worker.claim() == []
    q.live_on(10, worker)
    assert len(worker.claim()) == 1


def test_a_place_opened_by_hand_and_a_false_decision_do_not_pass_it(q: Q) -> None:
    worker = q.worker(slots=9)
    jobs = [q.submit(limit_key="api", rate="1/1m") for _ in range(3)]
    q.call("open_place", incarnation=worker.incarnation, job_id=jobs[0])
    with refused(WRONG_STATE, "limit key api uses 1 starts of at most 1"):
        q.call("open_place", incarnation=worker.incarnation, job_id=jobs[1])
    shape = q.value("select shape_id from gangq.live_jobs where id = %(id)s", id=jobs[0])
    runs = q.value("select runs from gangq.lock_rows where name = 'pass'")
    ask = f"k{shape}/0"
    seat = {"worker": worker.incarnation, "refills": True}
    decision = {"ask": ask, "action": "start", "seats": [seat, seat]}
    row = q.one("apply", decisions=[decision], **{"pass": runs})
    assert row["outcomes"][ask] == "limit key api uses 1 starts of at most 1"
    assert len(q.call("claim", incarnation=worker.incarnation, max_jobs=10)) == 1


def test_what_a_rate_holds_back_makes_the_tick_due_and_a_tick_decides_then(q: Q) -> None:
    worker = q.worker(slots=4)
    for _ in range(2):
        q.submit(limit_key="api", rate="2/1s")
    job = q.submit(limit_key="api")
    assert starts(q, worker) == 2
    q.tick()
    assert q.value("select gangq.next_due(gangq.now()) - gangq.now()") == timedelta(seconds=0.5)
    said = {row["gate"]: row["detail"] for row in q.call("explain_job", job_id=job)}
    assert "in 1 s it may start" in said["rate"]
    assert said["start"] == "not planned: its rate holds it for 1 s more at least"
    unforced = "select decide, next_in_s from gangq.tick(decides => true)"
    assert q.tick()["next_in_s"] == 0.5
    assert not q.sql(unforced)[0]["decide"]
    # Well before the next safety tick.
    q.later(0.5)
    assert q.sql(unforced)[0]["decide"]
    q.place()
    assert len(q.call("claim", incarnation=worker.incarnation, max_jobs=10)) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit_key": "api", "rate": "4/1m"}, "the rate of limit key 'api' is 3/1m, and not 4/1m"),
        ({"limit_key": "api", "limit": 2}, "the limit of limit key 'api' is none, and not 2"),
        ({"limit_key": "seat", "rate": "1/1s"}, "the rate of limit key 'seat' is none, and not 1/1s"),
        ({"rate": "4/1m"}, "rate is 4/1m, and no limit_key says of what"),
        ({"limit_key": "api", "rate": "0/1m"}, "rate"),
        ({"limit_key": "api", "rate": "often"}, "rate"),
    ],
)
@pytest.mark.parametrize("gang", [False, True])
def test_what_makes_no_sense_is_refused_and_named(
    q: Q, options: dict[str, Any], said: str, gang: bool
) -> None:
    q.submit(**API)
    q.submit(limit_key="seat", limit=2)
    q.submit(limit_key="api", rate="3/60s")  # The same.
    with refused(INVALID, said):
        if gang:
            q.submit_gang(1, **options)
        else:
            q.submit(**options)


def test_an_administrator_changes_the_rate_whatever_submissions_say(q: Q) -> None:
    worker = q.worker(slots=9)
    for _ in range(9):
        q.submit(limit_key="api", rate="1/1h")
    assert starts(q, worker) == 1
    # The hour of the old rate is not waited for.
    q.call("set_limit", key="api", rate="2/1s")
    q.later(1)
    assert starts(q, worker) == 2
    q.submit(limit_key="api", rate="1/1h")
    q.call("set_limit", key="api", rate="none", most=5)
    assert q.sql("select most, rate, pinned from gangq.limits") == [{"most": 5, "rate": None, "pinned": True}]
    assert starts(q, worker) == 5
    for wrong in ({}, {"rate": "x"}, {"most": -1}):
        with refused(INVALID):
            q.call("set_limit", key="api", **wrong)


def test_a_clock_that_is_set_back_does_not_hold_a_rate_up(q: Q) -> None:
    q.later(86400)
    worker = q.worker(slots=4)
    for _ in range(3):
        q.submit(limit_key="api", rate="1/1m")
    assert starts(q, worker) == 1
    q.later(-3600)
    worker.beat()
    assert starts(q, worker) == 1
    assert starts(q, worker) == 0


def test_a_task_that_declares_a_rate_has_it(q: Q) -> None:
    worker = q.worker(slots=4, task_options={"ask": {"limit_key": "api", "rate": "1/1m"}})
    for _ in range(2):
        q.submit("ask")
    gang = q.submit_gang(1, task="ask")
    assert len(worker.claim()) == 1
    assert gang.state == "blocked"
