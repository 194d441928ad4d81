"""Checkpoints: never a mix of steps, never of epochs, never over the limit, never from a stale claim."""

from __future__ import annotations

import pytest

from sql.drive import INVALID, STALE, TOO_LARGE, Claim, Gang, Q, Worker, ack_all, refused


def gang_of_two(q: Q, mode: str = "each") -> tuple[Gang, list[Worker], list[Claim]]:
    gang, workers = q.submit_gang(2, checkpoint_mode=mode), q.workers(2)
    return gang, workers, gang.start(*workers)


def drain(gang: Gang, claims: list[Claim]) -> None:
    claims[0].q.call("preempt_gang", gang_id=gang.id)
    ack_all(claims)


def steps(q: Q) -> list[tuple[int, int]]:
    return [
        (r["job_id"], r["step"])
        for r in q.sql("select job_id, step from gangq.checkpoints order by job_id, step")
    ]


def test_a_solo_job_resumes_from_its_highest_step(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    assert claim["checkpoint_step"] is None
    assert claim.load() is None
    claim.save(10, b"ten")
    claim.save(20, b"\x00twenty\xff")
    assert steps(q) == [(claim.job_id, 20)], "older ones are pruned"
    claim.release()
    again = worker.take()
    assert (again["checkpoint_step"], again.load()) == (20, (20, b"\x00twenty\xff"))


def test_the_same_step_again_replaces_it(q: Q) -> None:
    q.submit()
    claim = q.worker().take()
    claim.save(1, b"a")
    claim.save(1, b"b")
    assert claim.load() == (1, b"b")


def test_a_checkpoint_is_accepted_while_told_to_stop(q: Q) -> None:
    gang, workers, claims = gang_of_two(q)
    q.call("preempt_gang", gang_id=gang.id)
    for claim in claims:
        claim.save(7, b"last words")
    ack_all(claims)
    again = gang.restart(*workers)
    assert [c.load() for c in again] == [(7, b"last words")] * 2


def test_a_restore_takes_the_highest_step_that_every_member_saved(q: Q) -> None:
    gang, workers, claims = gang_of_two(q)
    for n, claim in enumerate(claims):
        claim.save(1, f"rank {n} step 1".encode())
        claim.save(2, f"rank {n} step 2".encode())
    claims[0].save(3, b"only rank 0 came this far")
    drain(gang, claims)
    again = gang.restart(*workers)
    assert [c["checkpoint_step"] for c in again] == [2, 2]
    assert [c.load() for c in again] == [(2, b"rank 0 step 2"), (2, b"rank 1 step 2")]


def test_no_step_in_common_means_from_the_start(q: Q) -> None:
    gang, workers, claims = gang_of_two(q)
    claims[0].save(1)
    claims[1].save(2)
    drain(gang, claims)
    again = gang.restart(*workers)
    assert [(c["checkpoint_step"], c.load()) for c in again] == [(None, None)] * 2


def test_steps_of_two_epochs_never_complete_each_other(q: Q) -> None:
    """Rank 0 saved step 5 in epoch 1, rank 1 saves step 5 in epoch 2: that is no common state."""
    gang, workers, claims = gang_of_two(q)
    for claim in claims:
        claim.save(1, b"common")
    claims[0].save(5, b"epoch 1")
    drain(gang, claims)
    claims = gang.restart(*workers)
    claims[1].save(5, b"epoch 2")
    drain(gang, claims)
    again = gang.restart(*workers)
    assert [c.load() for c in again] == [(1, b"common")] * 2


def test_in_mode_rank0_the_bytes_of_rank_0_serve_all(q: Q) -> None:
    gang, workers, claims = gang_of_two(q, "rank0")
    claims[0].save(4, b"shared")
    claims[1].save(9, b"not rank 0")
    drain(gang, claims)
    again = gang.restart(*workers)
    assert [(c["checkpoint_step"], c.load()) for c in again] == [(4, (4, b"shared"))] * 2


def test_every_member_loads_the_step_of_its_epoch_even_when_a_faster_one_has_saved_on(q: Q) -> None:
    gang, workers, claims = gang_of_two(q)
    for claim in claims:
        claim.save(1, b"one")
    drain(gang, claims)
    fast, slow = gang.restart(*workers)
    for step in (2, 3):
        fast.save(step)
    assert slow.load() == (1, b"one")
    for step in (2, 3):
        slow.save(step)
    assert slow.load() == (1, b"one"), "kept, though 3 is complete now"
    assert {s for _, s in steps(q)} == {1, 3}, "and 2 is pruned"


def test_a_checkpoint_over_the_limit_is_refused_naming_both_sizes(q: Q) -> None:
    q.call("configure", checkpoint_bytes=100)
    q.submit()
    claim = q.worker().take()
    with refused(TOO_LARGE, "101 bytes"):
        claim.save(1, b"x" * 101)
    claim.save(1, b"x" * 100)


@pytest.mark.parametrize(("step", "data"), [(None, b"x"), (-1, b"x"), (1, None)])
def test_a_checkpoint_without_a_step_or_bytes_is_refused(q: Q, step: int | None, data: bytes | None) -> None:
    q.submit()
    claim = q.worker().take()
    with refused(INVALID):
        claim.save(step, data)  # type: ignore[arg-type]


def test_a_stopped_members_late_checkpoint_is_refused(q: Q) -> None:
    _, _, claims = gang_of_two(q)
    claims[0].fail()
    with refused(STALE):
        claims[0].save(1)
    claims[1].save(1)


def test_checkpoints_go_when_their_gang_is_done_or_cancelled_and_stay_when_it_failed(q: Q) -> None:
    for ending, left in (("done", 0), ("cancelled", 0), ("failed", 2)):
        gang = q.submit_gang(2)
        worker = q.worker(ending, slots=2)
        claims = gang.start(worker)
        for claim in claims:
            claim.save(1)
        if ending == "done":
            for claim in claims:
                claim.complete()
        elif ending == "cancelled":
            gang.cancel()
            ack_all(claims)
        else:
            claims[0].fail(retryable=False)
            claims[1].ack()
        assert gang.state == ending
        assert q.value("select count(*) from gangq.checkpoints where gang_id = %(id)s", id=gang.id) == left
        worker.retire()


def test_a_failed_gang_that_is_retried_resumes_from_its_checkpoint(q: Q) -> None:
    gang, workers, claims = gang_of_two(q)
    for claim in claims:
        claim.save(8, b"eight")
    claims[0].fail(retryable=False)
    claims[1].ack()
    q.later(1)
    q.call("retry", gang_ids=[gang.id])
    again = gang.start(*workers)
    assert [c.load() for c in again] == [(8, b"eight")] * 2
    assert [c["epoch"] for c in again] == [2, 2]


def test_a_solo_job_that_is_done_and_retried_starts_from_the_beginning(q: Q) -> None:
    job = q.submit()
    worker = q.worker()
    claim = worker.take()
    claim.save(8)
    claim.complete()
    q.later(1)
    q.call("retry", job_ids=[job])
    assert worker.take()["checkpoint_step"] is None


def test_a_solo_job_that_failed_and_is_retried_resumes(q: Q) -> None:
    job = q.submit()
    worker = q.worker()
    claim = worker.take()
    claim.save(8)
    claim.fail(retryable=False)
    q.later(1)
    q.call("retry", job_ids=[job])
    assert worker.take()["checkpoint_step"] == 8
