"""A submission that is repeated with its request_id gets the answer of the first call and submits nothing."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

from sql.drive import (
    INVALID,
    MISSING,
    NOT_ALLOWED,
    STALE,
    WRONG_ISOLATION,
    WRONG_STATE,
    Claim,
    Q,
    a_role,
    refused,
)

HOUR = 3600


@pytest.fixture
def request_id() -> uuid.UUID:
    return uuid.uuid4()


@pytest.fixture
def parent(q: Q) -> Claim:
    """A running job."""
    q.submit("fan")
    return q.worker(slots=4).take()


def jobs(q: Q) -> int:
    return int(q.value("select count(*) from gangq.live_jobs"))


def gang(q: Q, **options: Any) -> tuple[int, list[int], str | None]:
    row = q.one("submit_gang", **{"task": "ddp", "size": 2, **options})
    return row["gang_id"], row["job_ids"], row["note"]


def child(claim: Claim, **options: Any) -> list[int]:
    rows = claim.q.call("submit", task="leaf", parent=claim.job_id, parent_token=claim.token, **options)
    return [row["submit"] for row in rows]


def child_gang(claim: Claim, **options: Any) -> Any:
    return claim.q.one(
        "submit_gang", task="leaf", size=2, parent=claim.job_id, parent_token=claim.token, **options
    )


# The same answer


@pytest.mark.parametrize("count", [1, 3, 2000])
def test_the_same_id_gives_the_same_jobs_in_their_order(q: Q, request_id: uuid.UUID, count: int) -> None:
    ids = q.submit(count=count, request_id=request_id)
    assert q.submit(count=count, request_id=request_id) == ids
    assert jobs(q) == count
    assert [row["payload"]["n"] for row in q.sql("select payload from gangq.live_jobs order by id")] == list(
        range(count)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "lab.deep"},
        {"due_at": "2100-01-01 00:00:00+00"},
        {"budget_s": 60, "max_attempts": 2},
        {"selector": [{"key": "gpu", "op": "=", "values": ["h100"]}]},
        {"wait_for_hardware": True, "gpus": 8},
    ],
    ids=["queue", "due", "budget", "selector", "hardware"],
)
def test_so_it_does_whatever_is_asked_for(q: Q, request_id: uuid.UUID, options: dict[str, Any]) -> None:
    q.call("set_queue", name="lab", maximum={"jobs": 100})
    q.call("set_queue", name="lab.deep")
    first = q.submit(request_id=request_id, **options)
    assert q.submit(request_id=request_id, **options) == first
    assert jobs(q) == 1


def test_jobs_that_wait_for_others_are_submitted_once(q: Q, request_id: uuid.UUID) -> None:
    before = q.submit()
    ids = q.submit(count=2, after=[before], request_id=request_id)
    assert q.submit(count=2, after=[before], request_id=request_id) == ids
    assert q.value("select count(*) from gangq.dependencies") == 2


def test_the_same_id_gives_the_same_gang_with_its_note(q: Q, request_id: uuid.UUID) -> None:
    q.worker()
    first = gang(q, gpus=4, wait_for_hardware=True, request_id=request_id)
    assert first[2]
    assert gang(q, gpus=4, wait_for_hardware=True, request_id=request_id) == first
    assert (jobs(q), len(q.events("submit"))) == (2, 1)


def test_the_members_of_a_gang_have_their_ids_by_rank(q: Q, request_id: uuid.UUID) -> None:
    _, ids, _ = gang(q, size=50, request_id=request_id)
    assert [row["id"] for row in q.sql("select id from gangq.live_jobs order by rank")] == ids


def test_children_of_a_job_are_submitted_once(q: Q, parent: Claim, request_id: uuid.UUID) -> None:
    ids = child(parent, payloads=[{}, {}], request_id=request_id)
    assert child(parent, payloads=[{}, {}], request_id=request_id) == ids
    made = child_gang(parent, request_id=uuid.UUID(int=7))
    assert child_gang(parent, request_id=uuid.UUID(int=7)) == made
    assert q.value("select count(*) from gangq.live_jobs where parent is not null") == 4


def test_a_claim_that_is_over_gets_no_answer(q: Q, parent: Claim, request_id: uuid.UUID) -> None:
    child(parent, request_id=request_id)
    parent.complete()
    with refused(STALE):
        child(parent, request_id=request_id)


def test_without_an_id_every_call_submits(q: Q) -> None:
    assert q.submit() != q.submit()
    assert gang(q) != gang(q)
    assert q.sql("select * from gangq.requests") == []


def test_an_answer_stays_the_same_when_its_jobs_have_ended(q: Q, request_id: uuid.UUID) -> None:
    job = q.submit(request_id=request_id)
    q.worker().take().complete()
    assert q.submit(request_id=request_id) == job
    assert jobs(q) == 0


# What has changed since does not refuse a repeated call


def test_a_queue_that_is_drained_since_answers_still(q: Q, request_id: uuid.UUID) -> None:
    job, other = q.submit(request_id=request_id), uuid.uuid4()
    made = gang(q, request_id=other)
    q.call("set_queue", name="default", draining=True)
    assert q.submit(request_id=request_id) == job
    assert gang(q, request_id=other) == made
    with refused(WRONG_STATE):
        q.submit(request_id=uuid.uuid4())


def test_a_job_waited_for_that_has_failed_since_does_not_matter(q: Q, request_id: uuid.UUID) -> None:
    before = q.submit(max_attempts=1)
    job = q.submit(after=[before], request_id=request_id)
    q.call("cancel", job_ids=[before])
    assert q.submit(after=[before], request_id=request_id) == job


def test_new_requirements_are_charged_once(q: Q, request_id: uuid.UUID) -> None:
    a_role(q.db, "dora", "gangq_submitter", login=True)
    q.call("configure", new_shapes_per_day=1)
    q.sql("set session authorization dora")
    job = q.submit("a", request_id=request_id)
    assert q.submit("a", request_id=request_id) == job
    with refused("GQ007"):
        q.submit("b", request_id=uuid.uuid4())


# Whose ids they are


def test_each_login_has_ids_of_its_own(q: Q, request_id: uuid.UUID) -> None:
    for name in ("dora", "emil"):
        a_role(q.db, name, "gangq_submitter", login=True)
    answers = {}
    for _ in range(2):
        for name in ("dora", "emil"):
            q.sql(f"set session authorization {name}")
            answers.setdefault(name, q.submit(request_id=request_id))
            assert q.submit(request_id=request_id) == answers[name]
        q.sql("reset session authorization")
    assert len(set(answers.values())) == jobs(q) == 2


def test_a_jobs_children_have_the_ids_of_its_submitter(q: Q, request_id: uuid.UUID) -> None:
    a_role(q.db, "dora", "gangq_submitter", login=True)
    q.sql("set session authorization dora")
    q.submit("fan")
    q.sql("reset session authorization")
    own = q.submit("other", queue="default", request_id=request_id, priority=-5)
    claim = q.worker().take()
    assert child(claim, request_id=request_id) != [own]
    assert q.sql("select login from gangq.requests order by login") == [
        {"login": "dora"},
        {"login": q.value("select session_user")},
    ]


@pytest.mark.parametrize(
    "role", ["gangq_viewer", "gangq_submitter", "gangq_worker", "gangq_host", "gangq_notifier", "gangq_admin"]
)
@pytest.mark.parametrize("table", ["requests", "requests_before"])
def test_nobody_reads_or_writes_the_tables(q: Q, role: str, table: str) -> None:
    for statement in (
        f"select from gangq.{table}",
        f"delete from gangq.{table}",
        f"lock table gangq.{table} in access share mode",
    ):
        with refused(NOT_ALLOWED), q.db.transaction():
            q.sql(f"set local role {role}")
            q.sql(statement)


# What is no repetition


def test_an_id_is_for_one_kind_and_number_of_jobs(q: Q, request_id: uuid.UUID) -> None:
    q.submit(count=2, request_id=request_id)
    for call in (
        lambda: q.submit(count=3, request_id=request_id),
        lambda: gang(q, size=2, request_id=request_id),
        lambda: gang(q, size=3, request_id=request_id),
    ):
        with refused(INVALID, str(request_id)):
            call()
    other = uuid.uuid4()
    gang(q, request_id=other)
    for call in (
        lambda: q.submit(count=2, request_id=other),
        lambda: q.submit(count=2, queue="nowhere", request_id=other),
        lambda: gang(q, size=3, request_id=other),
    ):
        with refused(INVALID, str(other)):
            call()
    assert jobs(q) == 4


def test_what_was_refused_leaves_the_id_free(q: Q, request_id: uuid.UUID) -> None:
    with refused(MISSING):
        q.submit(queue="nowhere", request_id=request_id)
    with refused(MISSING):
        gang(q, queue="nowhere", request_id=request_id)
    assert q.submit(request_id=request_id)
    assert jobs(q) == 1


def test_what_was_rolled_back_leaves_the_id_free(q: Q, request_id: uuid.UUID) -> None:
    with q.db.transaction(force_rollback=True):
        undone = q.submit(request_id=request_id)
    job = q.submit(request_id=request_id)
    assert job != undone
    other = uuid.uuid4()
    with q.db.transaction(force_rollback=True):
        gang(q, request_id=other)
    gang(q, request_id=other)
    assert jobs(q) == 3


def test_a_transaction_repeats_its_own_call(q: Q, request_id: uuid.UUID) -> None:
    with q.db.transaction():
        ids = q.submit(count=2, request_id=request_id)
        assert q.submit(count=2, request_id=request_id) == ids
    assert jobs(q) == 2


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_transaction_that_cannot_see_the_first_answer_is_told_so(
    q: Q, request_id: uuid.UUID, level: str
) -> None:
    for call in (q.submit, lambda **named: gang(q, **named)):
        call()  # From now on its requirement is known, and less is asked.
        with refused(WRONG_ISOLATION), q.db.transaction():
            q.sql(f"set transaction isolation level {level}")
            call(request_id=request_id)
        with q.db.transaction():
            q.sql(f"set transaction isolation level {level}")
            call()


# How long


def test_an_answer_is_kept_for_an_hour_and_then_forgotten_as_a_whole(q: Q, request_id: uuid.UUID) -> None:
    q.tick()
    q.later(0.9 * HOUR)
    job, other = q.submit(request_id=request_id), uuid.uuid4()
    made = gang(q, request_id=other)
    for _ in range(2):
        q.later(0.5 * HOUR)
        q.tick()
        assert q.submit(request_id=request_id) == job
        assert gang(q, request_id=other) == made
    q.later(HOUR)
    q.tick()
    assert q.sql("select from gangq.requests union all select from gangq.requests_before") == []
    assert q.submit(request_id=request_id) != job
    assert gang(q, request_id=other) != made


def test_a_submission_left_open_only_puts_off_the_turn(q: Q, request_id: uuid.UUID) -> None:
    q.tick()
    q.later(1.1 * HOUR)
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.submit(request_id=request_id)
        before = q.value("select requests_turned_at from gangq.tick_state")
        q.tick()
        assert q.value("select requests_turned_at from gangq.tick_state") == before
        with pytest.raises(psycopg.errors.LockNotAvailable), q.db.transaction():
            q.sql("lock table gangq.requests in access exclusive mode nowait")
    q.later(600)
    q.tick()
    assert q.value("select requests_turned_at from gangq.tick_state") > before


def test_a_prepared_submission_goes_on_across_the_turn(q: Q) -> None:
    q.sql("prepare again (uuid) as select gangq.submit('work', request_id => $1)")
    ids = [uuid.uuid4() for _ in range(4)]
    answers = []
    for each in ids:
        answers.append(q.value(f"execute again ('{each}')"))
        q.later(1.1 * HOUR)
        q.tick()
        assert q.value(f"execute again ('{each}')") == answers[-1]
    assert jobs(q) == 4
