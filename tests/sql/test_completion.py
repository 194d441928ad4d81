"""When a gang is done: all of its epoch's members, or those of the role that its completion names."""

from __future__ import annotations

from sql.drive import Gang, Q, Worker, ack_all
from sql.epochs import reserve, run, submit_roles

ROLES = (("driver", 1, 1), ("server", 2, 2))


def led(q: Q, **options: object) -> tuple[Gang, list[Worker]]:
    return submit_roles(q, *ROLES, completion="driver", **options), q.workers(3)


def test_the_named_roles_end_is_the_gangs_end(q: Q) -> None:
    gang, workers = led(q)
    claims = run(gang, workers)
    claims[1].save(1, b"ignored")
    claims[0].complete({"answer": 42})
    assert gang.state == "draining"
    assert workers[1].beat(claims[1]) == {claims[1].job_id: "preempt"}
    ack_all(claims[1:])
    assert (gang.state, gang.states) == ("done", ["done", "cancelled", "cancelled"])
    assert [row["attempts"] for row in gang.members] == [1, 0, 0], "whoever was spared is not charged"
    assert [drain["cause"] for drain in q.sql("select cause from gangq.drains")] == ["completed"]


def test_a_member_of_another_role_may_end_first(q: Q) -> None:
    gang, workers = led(q)
    claims = run(gang, workers)
    claims[2].complete()
    assert gang.state == "running"
    claims[0].complete()
    claims[1].ack()
    assert gang.states == ["done", "cancelled", "done"]


def test_a_server_that_fails_while_it_is_told_to_stop_changes_nothing(q: Q) -> None:
    gang, workers = led(q)
    claims = run(gang, workers)
    claims[0].complete()
    claims[1].fail()
    workers[2].report_dead()
    assert (gang.state, gang.row["crashes"]) == ("done", 0)


def test_cancelling_comes_too_late_for_a_gang_that_is_fulfilled(q: Q) -> None:
    gang, workers = led(q)
    claims = run(gang, workers)
    claims[0].complete()
    gang.cancel()
    ack_all(claims[1:])
    assert gang.state == "done"


def test_a_driver_done_during_a_drain_ends_the_gang_done(q: Q) -> None:
    gang, workers = led(q)
    claims = run(gang, workers)
    assert q.one("preempt_gang", gang_id=gang.id)
    claims[0].complete()
    ack_all(claims[1:])
    assert gang.state == "done"


def test_dependents_of_every_member_of_a_done_gang_go_on(q: Q) -> None:
    gang, workers = led(q)
    after = q.submit("after", queue="default", after=gang.job_ids)
    claims = run(gang, workers)
    claims[0].complete()
    ack_all(claims[1:])
    q.tick()
    assert q.state(after) == "pending"
    later = q.submit("later", after=gang.job_ids)
    assert q.state(later) == "pending"


def test_dependents_of_a_cancelled_gang_are_cancelled(q: Q) -> None:
    gang, _ = led(q)
    after = q.submit(after=gang.job_ids[2:])
    gang.cancel()
    q.tick()
    assert q.state(after) == "cancelled"


def test_without_a_completion_rule_all_have_to_be_done(q: Q) -> None:
    gang, workers = submit_roles(q, *ROLES), q.workers(3)
    claims = run(gang, workers)
    claims[0].complete()
    assert gang.state == "running"
    claims[1].complete()
    claims[2].complete()
    assert gang.state == "done"


def test_a_missing_server_does_not_keep_a_fulfilled_gang(q: Q) -> None:
    gang, workers = led(q, policy="restart_member")
    claims = run(gang, workers)
    claims[1].fail()
    claims[0].complete()
    claims[2].ack()
    assert (gang.state, gang.states) == ("done", ["done", "cancelled", "cancelled"])


def test_a_fulfilled_gang_gives_back_what_is_reserved_for_a_missing_server(q: Q) -> None:
    gang = submit_roles(q, ("driver", 1, 1), ("server", 1, 1), completion="driver", policy="restart_member")
    workers = q.workers(2)
    claims = run(gang, workers)
    claims[1].fail()
    gang.skip_backoff()
    assert reserve(gang, [claims[1].job_id], [workers[1]])
    claims[0].complete()
    assert (gang.state, gang.states) == ("done", ["done", "cancelled"])
    assert workers[1].free["slots"] == 1


def test_a_gang_of_which_nothing_is_placed_is_not_fulfilled(q: Q) -> None:
    gang = q.submit_gang(2)
    assert q.value("select gangq.fulfilled(%(id)s)", id=gang.id) is False
