"""A job that could never run is refused at once, and what nobody can judge yet is taken and says so."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from sql.drive import INVALID, Q, gpus, refused


@pytest.fixture
def notices(q: Q) -> Iterator[list[tuple[str | None, str | None]]]:
    """SQLSTATE and text of what the database has noted."""
    found: list[tuple[str | None, str | None]] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        found.append((diagnostic.sqlstate, diagnostic.message_primary))

    q.db.add_notice_handler(keep)
    yield found
    q.db.remove_notice_handler(keep)


def test_while_no_worker_of_its_queue_is_known_a_job_is_taken_and_noted(q: Q, notices: list) -> None:
    q.submit("anything", gpus=99)
    q.submit("anything", gpus=99)
    assert [code for code, _ in notices] == ["GQ100", "GQ100"]
    assert notices[0] == notices[1]
    assert notices[0][1] == (
        "no worker of queue default is known yet: jobs wait until one starts, with the needs they were submitted "
        "with; what it declares is for later ones"
    )
    q.worker(tasks=["known"])
    q.call("set_queue", name="new")
    q.submit("anything", queue="new")
    assert "queue new" in notices[-1][1]
    q.submit("known")
    assert len(notices) == 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"task": "nosuch"},
            "no worker known of queue default, ended ones included, runs task nosuch; they run work",
        ),
        ({"gpus": 99}, "each needs 99 GPUs"),
        ({"gpus": 1, "vram_mb": 80000}, "of 1 member even when idle (each needs 1 GPU of 80000 MiB"),
        ({"memory_mb": 5000}, "5000 MiB memory"),
        (
            {"labels": {"site": "b", "gpu": "h100"}},
            "none of 1 worker of queue default carries labels gpu=h100, site=b",
        ),
        (
            {"labels": {"site": "a"}, "selector": [{"key": "rack", "op": "=", "values": ["b"]}]},
            "with labels site=a meets the selector",
        ),
        ({"selector": [{"key": "site", "op": "=", "values": ["b"]}]}, "meets the selector"),
    ],
)
def test_what_no_known_worker_could_ever_run_is_refused(q: Q, asked: dict, said: str) -> None:
    q.submit(**asked)  # Taken before a worker is known: that says nothing for later.
    worker = q.worker(tasks=["work"], memory_mb=1000, devices=gpus(8000, 8000), labels={"site": "a"})
    for _ in range(2):
        with refused(INVALID, said):
            q.submit(**asked)
    assert q.state(q.submit(**asked, wait_for_hardware=True)) == "pending"
    with refused(INVALID, said):
        q.submit(**asked)
    worker.retire()
    with refused(INVALID, said):
        q.submit(**asked)


def test_what_a_worker_has_been_able_to_run_is_taken_when_it_has_ended(q: Q) -> None:
    q.worker("away", devices=gpus(8000), tasks=["work"]).retire()
    q.worker("here", tasks=["work"])
    assert q.state(q.submit(gpus=1)) == "pending"
    q.sql("delete from gangq.device_claimants")
    assert q.state(q.submit(gpus=1)) == "pending", "it is looked at once"


def test_an_operators_taint_refuses_nobody(q: Q) -> None:
    q.worker("w1")
    q.call("set_taints", worker="w1", taints=["repair"])
    assert q.state(q.submit()) == "pending"


def test_a_submission_waits_for_no_other_that_looks_at_the_same_shape(q: Q, dsn: str) -> None:
    q.submit()
    q.worker()
    with q.connected(dsn) as other, other.db.transaction():
        other.submit()
        q.sql("set lock_timeout = '100ms'")
        q.submit()
