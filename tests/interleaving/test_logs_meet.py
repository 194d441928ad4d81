"""Two sessions append to the output of one attempt: together they keep to its bound, and nobody else waits."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import Arena, Connection, Later, both_ends, call

BOUND = 65_000


def append(job: int, token: int, seq: int, size: int) -> Any:
    return lambda conn: call(
        conn, "append_log", job_ids=[job], tokens=[token], seqs=[seq], chunks=["x" * (size - 64)]
    )


def kept(arena: Arena) -> int:
    (row,) = arena.db.execute(
        "select coalesce(sum(octet_length(chunk) + 64), 0) as n from gangq.logs"
    ).fetchall()
    return int(row["n"])


@pytest.fixture
def attempt(meeting: Arena) -> tuple[int, int]:
    """Job and token of an attempt that runs."""
    call(meeting.db, "configure", log_bytes=BOUND // 65)
    return meeting.running(meeting.worker("w1"))


@pytest.mark.parametrize("begun", [False, True], ids=["its first chunks", "later chunks"])
@both_ends
def test_two_sessions_do_not_outrun_the_bound(meeting, attempt, begun, end):
    job, token = attempt
    if begun:
        append(job, token, 0, 100)(meeting.db)
    met = meeting.meet(append(job, token, 9, BOUND - 200), append(job, token, 1_000, 200), end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ007" if end == "commit" and begun else None)
    assert kept(meeting) <= BOUND


def test_of_many_first_chunks_at_once_each_counts_those_before_it(meeting, attempt):
    job, token = attempt
    first: list[Connection] = [meeting.connect(autocommit=False) for _ in range(3)]
    append(job, token, 0, 40_000)(first[0])
    second = Later(first[1], append(job, token, 1, 20_000)).start(meeting.db)
    first[0].commit()
    second.join().result()
    third = Later(first[2], append(job, token, 2, 20_000)).start(meeting.db)
    assert third.waited
    first[1].commit()
    assert third.join().sqlstate == "GQ007"
    assert kept(meeting) == 60_000


def test_output_of_an_attempt_that_is_over_keeps_nobody_from_the_job(meeting, attempt):
    job, token = attempt
    append(job, token, 0, 100)(meeting.db)
    call(meeting.db, "release", job_ids=[job], tokens=[token])
    other = meeting.worker("w2")
    (row,) = meeting.claim(other)
    holder = meeting.connect(autocommit=False)
    append(job, token, 1, 100)(holder)
    done = meeting.connect(statement_timeout="1000")
    call(done, "complete", job_ids=[job], tokens=[row["token"]])
    assert meeting.state(job) == "done"
    holder.rollback()


def test_what_was_never_begun_is_not_begun_beside_the_next_attempt(meeting, attempt):
    job, token = attempt
    call(meeting.db, "release", job_ids=[job], tokens=[token])
    meeting.claim(meeting.worker("w2"))
    append(job, token, 0, 100)(meeting.db)
    assert kept(meeting) == 0
