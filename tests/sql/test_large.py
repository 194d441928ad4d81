"""Whatever a role can write has a bound: refused with the limit, or cut with a mark where it must not fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.drive import TOO_LARGE, Claim, Q, Worker, refused

pytestmark = pytest.mark.slow

MANY = 8 << 20
TEXT = "x" * MANY

REFUSED: dict[str, Callable[[Q, Worker, Any], object]] = {
    "labels of a job": lambda q, w, c: q.submit(labels={"a": TEXT}),
    "labels of a gang": lambda q, w, c: q.submit_gang(1, labels={"a": TEXT}),
    "labels of a role": lambda q, w, c: q.submit_gang(
        roles=[{"name": "a", "count": 1, "labels": {"a": TEXT}}]
    ),
    "name of a gang": lambda q, w, c: q.submit_gang(1, name=TEXT),
    "reason of a cancel": lambda q, w, c: q.call("cancel", job_ids=[c.job_id], reason=TEXT),
    "reason of a release": lambda q, w, c: q.call(
        "release", job_ids=[c.job_id], tokens=[c.token], reason=TEXT
    ),
    "reason of a quarantine": lambda q, w, c: q.call("quarantine", worker="w1", reason=TEXT),
    "reason of a cordon": lambda q, w, c: q.call("cordon", worker="w1", reason=TEXT),
    "reason of a displacement": lambda q, w, c: q.call("displace_job", job_id=c.job_id, reason=TEXT),
    "chunk of a log": lambda q, w, c: q.call(
        "append_log", job_ids=[c.job_id], tokens=[c.token], seqs=[0], chunks=[TEXT]
    ),
    "labels of a worker": lambda q, w, c: q.worker("w2", labels={"a": TEXT}),
    "identity of a worker": lambda q, w, c: q.worker("w2", identity={"a": TEXT}),
    "devices of a worker": lambda q, w, c: q.worker(
        "w2", devices=[{"uuid": TEXT, "index": 0, "vram_mb": 1, "source": "declared"}]
    ),
    "tasks of a worker": lambda q, w, c: q.worker("w2", tasks=[TEXT]),
    "model of a claim": lambda q, w, c: w.claim(model=TEXT),
    "result": lambda q, w, c: c.complete({"a": TEXT}),
    "payload": lambda q, w, c: q.submit(payloads=[{"a": TEXT}]),
}
CUT: dict[str, Callable[[Q, Worker, Any], object]] = {
    "error of a failure": lambda q, w, c: q.one(
        "fail", job_id=c.job_id, token=c.token, error={"type": "E", "message": TEXT, "traceback": TEXT}
    ),
    "error of a requeue": lambda q, w, c: q.one(
        "requeue", job_id=c.job_id, token=c.token, error={"type": TEXT, "message": TEXT}
    ),
    "error and evidence of a trip": lambda q, w, c: q.one(
        "trip",
        incarnation=w.incarnation,
        job_id=c.job_id,
        token=c.token,
        code=75,
        error={"type": "E", "message": TEXT},
        evidence={"a": TEXT},
    ),
    "evidence of a suspicion": lambda q, w, c: c.suspect(reason=TEXT),
    "evidence of a death": lambda q, w, c: q.one(
        "report_dead", worker="w1", incarnation=w.incarnation, evidence={"by": "me", "a": TEXT}
    ),
    "detail of a bounce": lambda q, w, c: q.call(
        "bounced", incarnation=w.incarnation, ok=False, detail={"a": TEXT}
    ),
    "beat": lambda q, w, c: w.beat(c, beats=[{"step": 7, "a": TEXT}]),
}


def sizes(q: Q) -> dict[str, int]:
    """The largest row of every table, in bytes."""
    tables = q.sql(
        "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind in ('r', 'p') "
        "and not c.relispartition"
    )
    return {
        row["relname"]: q.value(
            f"select coalesce(max(octet_length(t::text)), 0) from gangq.{row['relname']} t"
        )
        for row in tables
    }


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_asked_for_and_too_large_is_refused_with_the_limit(q: Q, what: str) -> None:
    worker = q.worker()
    q.submit()
    with refused(TOO_LARGE, "bytes"):
        REFUSED[what](q, worker, worker.take())


@pytest.mark.parametrize("what", CUT)
def test_what_must_not_fail_is_cut_and_says_so(q: Q, what: str) -> None:
    worker = q.worker()
    q.submit()
    CUT[what](q, worker, worker.take())
    assert max(sizes(q).values()) < 5 << 20
    kept = str(q.sql("select data, reason from gangq.events union all select data, null from gangq.evidence"))
    kept += str(q.sql("select error, null from gangq.jobs union all select data, null from gangq.progress"))
    assert "cut" in kept or "dropped" in kept


def test_a_beat_that_is_cut_still_says_how_far_its_job_is(q: Q) -> None:
    worker = q.worker()
    q.submit()
    claim = worker.take()
    assert worker.beat(claim, beats=[{"step": 7, "phase": "run", "a": TEXT}]) == {claim.job_id: "continue"}
    (row,) = q.sql("select step, data from gangq.progress")
    assert (row["step"], row["data"]["phase"], row["data"]["a"]) == (7, "run", "x" * 655 + " [cut]")
    assert "65536 are the most" in row["data"]["cut"]


# The output of one attempt ------------------------------------------------------------------------------------

BOUND = 65_000


@pytest.fixture
def claim(q: Q) -> Claim:
    """A job that runs, of which 65,000 bytes are kept, each chunk counted as 64 more than it has."""
    q.call("configure", log_bytes=BOUND // 65)
    q.submit()
    return q.worker().take()


def log(claim: Claim, *chunks: tuple[int, str]) -> None:
    claim.q.call(
        "append_log",
        job_ids=[claim.job_id] * len(chunks),
        tokens=[claim.token] * len(chunks),
        seqs=[n for n, _ in chunks],
        chunks=[text for _, text in chunks],
    )


def kept(claim: Claim) -> list[int]:
    rows = claim.q.sql("select seq from gangq.logs where token = %(token)s order by seq", token=claim.token)
    return [row["seq"] for row in rows]


def test_the_output_of_an_attempt_is_bounded_in_one_call_and_over_many(claim: Claim) -> None:
    half = "x" * (BOUND // 2 - 64)
    with refused(TOO_LARGE, f"{BOUND + 1} bytes, and {BOUND} are the most"):
        log(claim, (0, half), (1, half + "x"))
    log(claim, (0, half))
    log(claim, (1, half))
    log(claim, (1, half))  # repeated: its reply was lost
    with refused(TOO_LARGE, f"{BOUND + 64} bytes, and {BOUND} are the most"):
        log(claim, (2, ""))
    assert kept(claim) == [0, 1]


def test_a_worker_that_keeps_to_log_bytes_is_never_refused(claim: Claim) -> None:
    log(claim, *((n, "x") for n in range(BOUND // 65)))
    assert len(kept(claim)) == BOUND // 65


def test_chunks_numbered_in_any_order_are_bounded(claim: Claim) -> None:
    log(claim, (1_000_000, "x" * (BOUND - 64 - 65)))
    log(claim, (3, "before it"))
    with refused(TOO_LARGE, f"{BOUND} are the most"):
        log(claim, (2_000_000, "xx"))
    log(claim, (2_000_000, "x"))
    assert kept(claim) == [1_000_000, 2_000_000]


def test_each_attempt_has_its_own_bound_and_one_that_is_over_keeps_to_its(q: Q, claim: Claim) -> None:
    log(claim, (0, "x" * (BOUND - 64)))
    claim.release()
    again = Worker(q, "w1", {"incarnation": claim.incarnation}).take()
    log(again, (0, "x" * (BOUND - 64)))
    with refused(TOO_LARGE, f"{BOUND} are the most"):
        log(claim, (1, ""))
    assert (kept(claim), kept(again)) == ([0], [0])
