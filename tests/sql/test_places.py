"""A place: opened on a worker, filled by its claim, refilled, closed. Nothing here runs a pass unless it says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sql.drive import ENDED, MISSING, WRONG_ISOLATION, WRONG_STATE, Claim, Q, Worker, gpus, refused


def opened(q: Q, worker: Worker, job_id: int, **more: Any) -> int:
    place: int = q.one("open_place", incarnation=worker.incarnation, job_id=job_id, **more)
    return place


def filled(worker: Worker, **more: Any) -> list[Claim]:
    """What the worker claims, with no pass before it."""
    rows = worker.q.call("claim", incarnation=worker.incarnation, max_jobs=10, **more)
    return [Claim(worker.q, row, worker.incarnation) for row in rows]


def next_after(worker: Worker, claim: Claim) -> list[Claim]:
    rows = worker.q.call(
        "complete_and_claim",
        incarnation=worker.incarnation,
        job_ids=[claim.job_id],
        tokens=[claim.token],
        max_jobs=10,
    )
    return [Claim(worker.q, row, worker.incarnation) for row in rows if row["outcome"] == "claimed"]


def held(q: Q) -> list[str]:
    """What holds each device: a place or a job."""
    holds = "select kind from gangq.device_holds where kind <> 'quarantine' order by device_id"
    return [row["kind"] for row in q.sql(holds)]


def count(q: Q) -> int:
    return int(q.value("select count(*) from gangq.places"))


@contextlib.contextmanager
def ticker(dsn: str) -> Iterator[Callable[[], int]]:
    """How often a tick was asked for since the last look."""
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen gangq_tick")
        yield lambda: len(list(listener.notifies(timeout=0.2)))


def past_until(q: Q) -> None:
    q.later(q.value("select 2 * tick_s + 1 from gangq.settings"))


def test_the_life_of_a_place(q: Q) -> None:
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000, 8000))
    assert filled(worker) == [], "what needs a device is claimed only into a place"
    opened(q, worker, first)
    assert (held(q), worker.free["slots"]) == (["place"], 1)
    (claim,) = filled(worker)
    assert (claim.job_id, claim["light"], held(q)) == (first, False, ["job"])
    (refill,) = next_after(worker, claim)
    assert (refill.job_id, refill["devices"], held(q)) == (second, claim["devices"], ["job"])
    assert refill.complete() == "done"
    assert (held(q), worker.free["slots"], q.violations()) == ([], 2, []), "no more of its kind waits"


def test_a_vacant_place_is_kept_for_the_next_of_its_kind_until_its_time_is_over(q: Q) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000, 8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    assert claim.complete() == "done"
    assert (held(q), worker.free["slots"]) == (["place"], 1)
    past_until(q)
    assert q.one("close_overdue") == 1
    assert (held(q), worker.free["slots"], q.violations()) == ([], 2, [])


def test_a_place_that_does_not_refill_is_for_one_job(q: Q) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first, refills=False)
    (claim,) = filled(worker)
    assert count(q) == 0
    assert next_after(worker, claim) == []
    assert held(q) == []


def test_a_repeated_request_finds_what_it_filled(q: Q) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, job)
    request = "00000000-0000-4000-8000-000000000001"
    assert [c.row for c in filled(worker, request_id=request)] == [
        c.row for c in filled(worker, request_id=request)
    ]


CHANGES: dict[str, Any] = {
    "quarantined": lambda q: q.call("quarantine", worker="w1"),
    "a device quarantined": lambda q: q.call("quarantine", device_uuid="G0"),
    "cordoned": lambda q: q.call("cordon", worker="w1"),
    "draining": lambda q: q.call("cordon", worker="w1", drain=True),
    "paused": lambda q: q.call("set_queue", name="default", paused=True),
    "task paused": lambda q: q.call("pause_task", task="work"),
    "full": lambda q: q.call("set_queue", name="default", max_running_jobs=0),
    "tainted": lambda q: q.call("set_taints", worker="w1", taints=["kept"]),
    "its device offered by nobody": lambda q: q.sql("update gangq.device_registry set offered_by = null"),
}


@pytest.mark.parametrize("why", [*CHANGES, "lease"])
def test_no_place_is_opened_where_the_worker_or_queue_takes_nothing(q: Q, why: str) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    if why == "lease":
        q.later(3600)
    else:
        CHANGES[why](q)
    with refused(WRONG_STATE, f"no place for job {job}"):
        opened(q, worker, job)
    assert (count(q), held(q)) == (0, [])


def test_a_place_is_filled_although_others_use_too_much_of_what_its_job_does_not_need(q: Q) -> None:
    worker = q.worker(slots=2, devices=gpus(8000), memory_mb=100)
    gpu, plain = q.submit(gpus=1), q.submit(memory_mb=10)
    opened(q, worker, gpu)
    assert [claim.job_id for claim in filled(worker)] == [gpu]
    q.call("set_queue", name="default", maximum={"gpus": 0})
    opened(q, worker, plain)
    assert [claim.job_id for claim in filled(worker)] == [plain]


def test_what_displaces_gets_its_place_only_for_jobs_above_the_next_rival(q: Q) -> None:
    q.call("set_queue", name="default", preempts=True)
    low = q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    claim = worker.take()
    assert claim.job_id == low
    q.beyond_min_run(worker)
    high, rival = q.submit("urgent", gpus=1, priority=5), q.submit_gang(1, gpus=1, priority=3)
    q.place()
    assert (q.state(low), count(q)) == ("preempting", 0)
    claim.ack()
    assert held(q) == [], "it is kept for the plan, and nothing else has it yet"
    q.place()
    assert q.value("select min_priority from gangq.places") == 3
    q.call("set_priority", job_ids=[high], priority=0)
    assert filled(worker) == []
    assert count(q) == 0
    q.place()
    assert rival.state == "reserved"


OFFERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int] | None, str]] = {
    "another queue": ({"queue": "other"}, {}, None, "the worker does not serve it"),
    "too much memory": ({"memory_mb": 200}, {"memory_mb": 100}, None, "no room"),
    "too many CPUs": ({"cpus": 2}, {"cpus": 1}, None, "no room"),
    "too few devices": ({"gpus": 2}, {}, [0], "its devices are not free"),
    "too many devices": ({"gpus": 1}, {}, [0, 1], "its devices are not free"),
    "one device twice": ({"gpus": 2}, {}, [0, 0], "its devices are not free"),
    "its device twice": ({"gpus": 1}, {}, [0, 0], "its devices are not free"),
    "a device of nobody": ({"gpus": 1}, {}, [99], "its devices are not free"),
    "a small device": ({"gpus": 1, "vram_mb": 6000}, {}, [0], "its devices are not free"),
    "an avoided device": ({"gpus": 1}, {}, [1], "its devices are not free"),
}


@pytest.mark.parametrize("wrong", OFFERS)
def test_a_place_that_does_not_fit_its_job_is_refused(q: Q, wrong: str) -> None:
    asked, offered, chosen, lacks = OFFERS[wrong]
    q.call("set_queue", name="other")
    worker = q.worker(devices=gpus(4000, 8000), slots=3, **offered)
    ids = [row["id"] for row in q.sql("select id from gangq.device_registry order by index")]
    job = q.submit(wait_for_hardware=True, **asked)
    if wrong == "an avoided device":
        q.sql(
            "update gangq.shapes set avoid = array[%(id)s]::bigint[] where id = "
            "(select shape_id from gangq.live_jobs where id = %(job)s)",
            id=ids[1],
            job=job,
        )
    devices = None if chosen is None else [ids[n] if n < len(ids) else n for n in chosen]
    with refused(WRONG_STATE, f"no place for job {job} on worker w1: {lacks}"):
        opened(q, worker, job, device_ids=devices)
    assert (count(q), held(q)) == (0, [])


def test_a_claim_keeps_to_its_lane(q: Q) -> None:
    light, placed = q.submit(), q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, placed)
    assert [c.job_id for c in filled(worker, lane="light")] == [light]
    assert [c.job_id for c in filled(worker, lane="placed")] == [placed]
    q.submit()
    q.worker("idle")
    other = q.worker("other")
    assert filled(other, lane="placed") == []


def test_what_did_not_end_by_this_call_leaves_no_place_vacant(q: Q) -> None:
    first, second, _, _ = q.submit(count=4, memory_mb=10)
    worker = q.worker(slots=2, memory_mb=20)
    opened(q, worker, first)
    opened(q, worker, second)
    gone, done = filled(worker)
    q.call("displace_job", job_id=gone.job_id)
    q.call("ack_preempted", job_id=gone.job_id, token=gone.token)
    sits = "select count(*) from gangq.places where job_id is not null"
    assert q.value(sits) == 2
    q.call("complete", job_ids=[gone.job_id, done.job_id], tokens=[gone.token, done.token], strict=False)
    assert q.value("select count(*) from gangq.places where job_id is null") == 1


def test_a_job_that_was_told_to_stop_and_is_done_leaves_its_room_to_others(q: Q) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    q.call("displace_job", job_id=claim.job_id)
    assert claim.complete() == "done"
    assert held(q) == []


def test_beside_a_job_that_was_told_to_stop_another_that_is_done_leaves_its_place_vacant(q: Q) -> None:
    first, second, _ = q.submit(count=3, gpus=1)
    worker = q.worker(slots=2, devices=gpus(8000, 8000))
    opened(q, worker, first)
    opened(q, worker, second)
    stopping, done = filled(worker)
    q.call("displace_job", job_id=stopping.job_id)
    q.call("complete", job_ids=[stopping.job_id, done.job_id], tokens=[stopping.token, done.token])
    assert held(q) == ["place"]


def test_a_submitter_limit_holds_at_once_also_for_what_waited_before_it(q: Q) -> None:
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000, 8000))
    opened(q, worker, first)
    q.call("set_queue", name="default", submitter_maximum={"jobs": 1})
    with refused(WRONG_STATE, "tells submitters apart"):
        opened(q, worker, second)
    assert filled(worker) == []
    q.tick()
    assert len(filled(worker)) == 1


def test_a_place_is_for_a_job_that_waits(q: Q) -> None:
    light = q.submit()
    worker = q.worker(devices=gpus(8000))
    filled(worker)
    with refused(MISSING):
        opened(q, worker, light)


def test_a_draining_worker_claims_nothing(q: Q) -> None:
    light, placed = q.submit(), q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, placed)
    worker.retire(final=False)
    assert filled(worker) == []
    assert [q.state(job) for job in (light, placed)] == ["pending", "pending"]


def test_a_job_that_is_done_after_its_places_time_leaves_none(q: Q) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    past_until(q)
    worker.beat()
    assert claim.complete() == "done"
    assert held(q) == []


def test_a_place_holds_its_slot_and_its_devices_against_the_next(q: Q) -> None:
    job, other = q.submit(gpus=1), q.submit(cpus=1)
    worker = q.worker(slots=1, cpus=4, devices=gpus(8000, 8000))
    opened(q, worker, job)
    with refused(WRONG_STATE, "no room"):
        opened(q, worker, other)
    roomy = q.worker("w2", slots=2, devices=gpus(8000, prefix="H"))
    opened(q, roomy, job)
    with refused(WRONG_STATE, "its devices are not free"):
        opened(q, roomy, job)


def test_open_places_count_in_their_queues_limit(q: Q) -> None:
    q.call("set_queue", name="default", max_running_jobs=1)
    job, _ = q.submit(count=2)
    worker = q.worker(slots=2)
    opened(q, worker, job)
    with refused(WRONG_STATE, "at most 1"):
        opened(q, worker, job)


def test_open_place_refuses_what_is_no_waiting_single_job_or_no_live_worker(q: Q) -> None:
    worker = q.worker(devices=gpus(8000))
    with refused(MISSING):
        opened(q, worker, 999)
    with refused(MISSING):
        opened(q, worker, q.submit_gang(1, gpus=1).job_ids[0])
    job = q.submit(gpus=1)
    with refused(WRONG_ISOLATION), q.db.transaction():
        q.sql("set transaction isolation level repeatable read")
        opened(q, worker, job)
    worker.retire()
    with refused(ENDED):
        opened(q, worker, job)


CLOSED = {
    "a device quarantined": "",  # The quarantine closes it, and has an event of its own.
    "its device offered by nobody": "a device is gone",
    "tainted": "the worker does not serve it any more",
    "paused": "its queue is paused",
    "task paused": "its task is paused",
    "full": "a limit was lowered",
    "until": "its time is over",
    "priority": "others of priority 1 wait",
    "ends_by": "could end after",
    "no head": "",
}


@pytest.mark.parametrize("why", CLOSED)
def test_a_place_that_must_not_be_filled_any_more_is_closed_by_the_claim_which_says_why(
    q: Q, why: str
) -> None:
    job = q.submit(gpus=1, budget_s=3600)
    worker = q.worker(devices=gpus(8000))
    soon = q.value("select gangq.now() + interval '60 s'")
    more = {"priority": {"min_priority": 1}, "ends_by": {"ends_by": soon}}.get(why, {})
    opened(q, worker, job, **more)
    if why in CHANGES:
        CHANGES[why](q)
    elif why == "until":
        past_until(q)
    elif why == "no head":
        q.call("cancel", job_ids=[job])
    assert filled(worker) == []
    assert (count(q), held(q)) == (0, [])
    assert q.state(job) == ("cancelled" if why == "no head" else "pending")
    said = q.events("place_closed")
    assert len(said) == bool(CLOSED[why])
    assert all(CLOSED[why] in event["reason"] and event["worker"] == "w1" for event in said)


@pytest.mark.parametrize("lane", [None, "light"])
@pytest.mark.parametrize("why", ["quarantined", "cordoned", "draining", "retiring"])
def test_a_worker_that_takes_nothing_closes_its_places_and_asks_for_a_pass(
    q: Q, dsn: str, why: str, lane: str | None
) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, job)
    if why == "retiring":
        worker.retire(final=False)
    else:
        CHANGES[why](q)
    with ticker(dsn) as asked:
        assert filled(worker, lane=lane) == []
        assert asked() == 1
    assert (q.state(job), count(q), held(q)) == ("pending", 0, [])


def test_a_vacant_place_of_a_worker_that_takes_nothing_is_closed_in_the_commit_that_vacates_it(
    q: Q, dsn: str
) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    CHANGES["cordoned"](q)
    with ticker(dsn) as asked:
        assert next_after(worker, claim) == []
        assert asked() == 1
    assert (count(q), held(q)) == (0, [])


@pytest.mark.parametrize(
    ("how", "more"), [("fail", {}), ("fail", {"retryable": False}), ("requeue", {}), ("release", {})]
)
def test_only_a_job_that_is_done_leaves_its_place_open(q: Q, how: str, more: dict[str, Any]) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    getattr(claim, how)(**more)
    assert filled(worker) == []
    assert held(q) == []


@pytest.mark.parametrize("how", ["retire", "a new incarnation"])
def test_a_place_ends_with_its_incarnation(q: Q, how: str) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, job)
    worker.retire()
    if how != "retire":
        q.worker(devices=gpus(8000))
    assert (count(q), held(q), q.violations()) == (0, [], [])


def test_two_workers_fill_places_of_one_kind_with_different_jobs(q: Q, dsn: str) -> None:
    first, second = q.submit(count=2, gpus=1)
    one, two = q.worker("w1", devices=gpus(8000)), q.worker("w2", devices=gpus(8000, prefix="H"))
    for worker in (one, two):
        opened(q, worker, first)
    with q.connected(dsn) as other, other.db.transaction():
        (row,) = other.call("claim", incarnation=one.incarnation)
        (claim,) = filled(two)
        assert (row["job_id"], claim.job_id) == (first, second)


def test_a_callers_open_transaction_completes_a_placed_job_and_holds_up_no_claim(q: Q, dsn: str) -> None:
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    said = {"job_ids": [claim.job_id], "tokens": [claim.token]}
    with q.connected(dsn) as caller:
        with caller.db.transaction():
            caller.call("complete", **said)
            q.sql("set statement_timeout = '2s'")
            assert filled(worker) == []
            q.sql("reset statement_timeout")
        (refill,) = filled(worker)
    assert (refill.job_id, q.violations()) == (second, [])


def test_a_placed_job_may_be_completed_in_repeatable_read(q: Q) -> None:
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    with q.db.transaction():
        q.sql("set transaction isolation level repeatable read")
        assert claim.complete() == "done"
    assert (filled(worker), held(q)) == ([], []), (
        "there its place is closed: a row changed since would fail it"
    )
    q.place()
    assert [refill.job_id for refill in filled(worker)] == [second]


def test_a_refill_asks_for_no_pass_and_a_place_that_closes_does(q: Q, dsn: str) -> None:
    q.submit(count=3, gpus=1)
    worker = q.worker(devices=gpus(8000))
    (claim,) = worker.claim()
    with ticker(dsn) as asked:
        (claim,) = next_after(worker, claim)
        assert asked() == 0, "the next of its kind is there"
        q.submit_gang(size=1, gpus=1)
        asked()
        (claim,) = next_after(worker, claim)
        assert asked() == 0
        assert next_after(worker, claim) == []
        assert asked() == 1, "the gang has room now"


@pytest.mark.parametrize("along", [False, True])
def test_an_end_asks_for_a_pass_whatever_other_place_of_its_worker_is_vacant(
    q: Q, dsn: str, along: bool
) -> None:
    first, second = q.submit(memory_mb=10), q.submit(cpus=1)
    worker = q.worker(slots=2, memory_mb=20, cpus=2)
    opened(q, worker, first, refills=False)
    (claim,) = filled(worker)
    opened(q, worker, second)
    q.submit_gang(size=1, memory_mb=20)
    with ticker(dsn) as asked:
        if along:
            next_after(worker, claim)
        else:
            claim.complete()
        assert asked() == 1


@pytest.mark.parametrize("then", ["claim", "tick", "complete"])
def test_a_clock_that_was_set_back_keeps_no_place_open_past_its_time(q: Q, then: str) -> None:
    first, _ = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    claims = filled(worker) if then == "complete" else []
    q.later(-3600)
    if then == "claim":
        assert filled(worker) == []
    elif then == "tick":
        assert q.one("close_overdue") == 1
    else:
        assert claims[0].complete() == "done"
    assert held(q) == []
    q.tick()
    assert len(filled(worker)) == 1, "a pass opens it again"


def test_opening_a_place_tells_its_worker_in_the_same_commit(q: Q, dsn: str) -> None:
    job = q.submit(gpus=1)
    worker, _ = q.worker("w1", devices=gpus(8000)), q.worker("w2", devices=gpus(8000, prefix="H"))
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute(f"listen gangq_{worker.incarnation}".encode())
        with q.db.transaction():
            opened(q, worker, job)
        assert [told.payload for told in listener.notifies(timeout=5, stop_after=1)] == ["claim"]


def test_a_completion_while_the_workers_row_is_held_leaves_the_place_for_the_next_claim(
    q: Q, dsn: str
) -> None:
    first, second = q.submit(count=2, gpus=1)
    worker = q.worker(devices=gpus(8000))
    opened(q, worker, first)
    (claim,) = filled(worker)
    with q.connected(dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.incarnations for no key update")
        q.sql("set statement_timeout = '2s'")
        assert next_after(worker, claim) == []
        q.sql("reset statement_timeout")
        assert (q.sql("select 1 from gangq.live_jobs where id = %(id)s", id=first), held(q)) == (
            [],
            ["place"],
        )
    assert [c.job_id for c in filled(worker)] == [second]
