"""What a lost or failed member means to the others: restart_member, shrink, fail; restart_gang is test_drain.py's."""

from __future__ import annotations

import pytest

from sql.drive import STALE, WRONG_STATE, Gang, Q, Worker, ack_all, refused
from sql.epochs import epochs_told, replace, reserve, run, submit_roles, who

THREE = ("worker", 3, 3)
ELASTIC = ("worker", 2, 4)


def of_three(q: Q, policy: str = "restart_member", **options: object) -> tuple[Gang, list[Worker]]:
    return submit_roles(q, THREE, policy=policy, **options), q.workers(3)


# restart_member ---------------------------------------------------------------------------------------------


def test_only_the_culprit_stops_and_the_others_run_on(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    assert claims[1].fail() == "preempted"
    assert gang.state == "running"
    assert gang.states == ["running", "blocked", "running"]
    assert gang.row["missing_since"] is not None
    assert workers[0].beat(claims[0]) == {claims[0].job_id: "continue"}
    assert [event["data"]["cause"] for event in q.events("replace")] == ["fail"]


def test_its_successor_starts_in_a_new_epoch_behind_an_open_barrier(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    assert claims[0].barrier()[0]["go"] is False
    (new,) = replace(gang, [claims[1].job_id], [workers[1]])
    assert (new["rank"], new["epoch"], new["world_size"]) == (1, 2, 3)
    assert new.token > claims[1].token
    assert [(row["go"], row["epoch"], row["rank"]) for row in new.barrier()] == [
        (True, 2, r) for r in range(3)
    ]
    assert gang.states == ["running"] * 3
    assert gang.row["missing_since"] is None


def test_the_others_hear_of_the_new_epoch_with_their_heartbeat(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    replace(gang, [claims[1].job_id], [workers[1]])
    assert epochs_told(workers[0], claims[0]) == {claims[0].job_id: 2}
    assert [row["worker"] for row in claims[0].barrier()] == ["w1", "w2", "w3"]


def test_a_replaced_rank_0_is_found_at_its_new_address(q: Q) -> None:
    gang, workers = of_three(q)
    assert reserve(gang, gang.job_ids, workers)
    claims = sorted(
        (c for w, p in zip(workers, (21, 22, 23), strict=True) for c in w.claim(ports=[p])),
        key=lambda c: c["rank"],
    )
    assert claims[2].barrier()[0]["master_port"] == 21
    claims[0].fail()
    assert gang.live["master_port"] is None, "its worker may offer it to another gang"
    fourth = q.worker("w4")
    gang.skip_backoff()
    assert reserve(gang, [claims[0].job_id], [fourth])
    assert claims[2].barrier()[0]["go"] is False
    fourth.claim(ports=[24])
    assert {(row["go"], row["master_addr"], row["master_port"]) for row in claims[2].barrier()} == {
        (True, "host-w4", 24)
    }


def test_only_the_culprit_and_the_gang_are_charged(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    claims = [claims[0], *replace(gang, [claims[1].job_id], [workers[1]]), claims[2]]
    claims[2].trip(exit_in_s=None)
    assert [(row["attempts"], row["trips"]) for row in gang.members] == [(1, 0), (2, 0), (0, 1)]
    assert (gang.row["attempts"], gang.row["trips"]) == (1, 1)
    gang.cancel()
    ack_all(claims[:2])
    assert [(row["attempts"], row["trips"]) for row in gang.members] == [(0, 0), (1, 0), (0, 1)]


def test_a_member_that_spent_its_attempts_takes_the_gang_down(q: Q) -> None:
    gang, workers = of_three(q, max_attempts=2)
    claims = run(gang, workers)
    q.sql("update gangq.live_gangs set max_attempts = 9")
    claims[1].fail()
    (again,) = replace(gang, [claims[1].job_id], [workers[1]])
    again.fail()
    assert gang.state == "draining"
    ack_all([claims[0], claims[2]])
    assert gang.state == "failed"
    assert "spent its 2 attempts" in gang.row["reason"]


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"max_attempts": 2}, "2 launches failed, and max_attempts is 2"),
        ({"max_crashes": 1}, "the gang lost a worker 2 times"),
        ({"max_trips": 1}, "the gang tripped a watchdog 2 times"),
    ],
    ids=["fail", "crash", "trip"],
)
def test_rotating_culprits_spend_the_gangs_own_budget(q: Q, budget: dict[str, int], reason: str) -> None:
    gang, workers = of_three(q, **budget)
    claims = run(gang, workers)

    def lose(n: int) -> None:
        if "max_attempts" in budget:
            claims[n].fail()
        elif "max_crashes" in budget:
            workers[n].report_dead()
        else:
            claims[n].requeue()

    lose(1)
    replaced = replace(gang, [claims[1].job_id], [q.worker("w4")])
    lose(0)
    assert gang.state == "draining"
    ack_all([*replaced, claims[2]])
    assert (gang.state, gang.row["reason"]) == ("failed", reason)


def test_an_error_that_is_not_retryable_takes_the_gang_down(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail(retryable=False)
    ack_all([claims[0], claims[2]])
    assert gang.state == "failed"


def test_a_lost_worker_with_two_members_is_one_crash_of_the_gang(q: Q) -> None:
    gang = submit_roles(q, THREE, policy="restart_member")
    two, one = q.worker("two", slots=2), q.worker("one")
    claims = run(gang, [two, two, one])
    two.report_dead()
    assert gang.states == ["blocked", "blocked", "running"]
    assert (gang.row["crashes"], [row["crashes"] for row in gang.members]) == (1, [1, 1, 0])
    more = q.workers(2)
    assert not reserve(gang, [claims[0].job_id], more[:1]), "both are placed together or none"
    assert [c["rank"] for c in replace(gang, [c.job_id for c in claims[:2]], more)] == [0, 1]
    assert claims[2].barrier()[0]["go"]


def test_a_member_lost_for_another_cause_pays_nothing_and_its_cap_takes_nobody_down(q: Q) -> None:
    gang, workers = of_three(q, max_crashes=1)
    claims = run(gang, workers)
    q.sql("update gangq.live_gangs set max_crashes = 9")
    q.sql("update gangq.live_jobs set crashes = 1 where id = %(id)s", id=claims[1].job_id)
    q.sql(
        "select gangq.end_incarnation(i.id, 'dead', gangq.now()) from gangq.incarnations i where name <> 'w1'"
    )
    q.sql("update gangq.incarnations set exit_code = 76 where name = 'w2'")  # it stopped over another job
    assert q.one("free_orphans", of_incarnations=None) == 2
    assert (gang.state, gang.states) == ("running", ["running", "blocked", "blocked"])
    assert [row["crashes"] for row in gang.members] == [0, 1, 1]


def test_when_the_last_one_that_runs_is_lost_the_gang_starts_as_a_whole(q: Q) -> None:
    gang = submit_roles(q, ("worker", 2, 2), policy="restart_member")
    worker = q.worker(slots=2)
    run(gang, [worker, worker])
    worker.report_dead()
    assert gang.states == ["blocked"] * 2
    assert (gang.state, gang.row["world_size"], gang.row["crashes"]) == ("blocked", None, 1)


def test_before_the_barrier_opened_the_whole_gang_drains_uncharged(q: Q) -> None:
    gang, workers = of_three(q)
    assert reserve(gang, gang.job_ids, workers)
    first = workers[0].take()
    first.fail()
    assert gang.state == "blocked"
    assert [row["attempts"] for row in gang.members] == [0, 0, 0]


@pytest.mark.parametrize("how", ["release", "preempt", "retire"])
def test_what_is_not_the_members_fault_drains_the_whole_gang(q: Q, how: str) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    if how == "release":
        claims[1].release()
    elif how == "preempt":
        assert q.one("preempt_gang", gang_id=gang.id)
    else:
        workers[1].retire()
    assert gang.state == "draining"
    for claim in claims:
        if claim.live["state"] == "preempting":
            claim.ack()
    assert gang.state == "blocked"


def test_a_done_member_stays_done_while_another_is_replaced(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[0].complete()
    claims[1].complete()
    claims[2].fail()
    assert gang.states == ["done", "done", "blocked"]
    (last,) = replace(gang, [claims[2].job_id], [workers[2]])
    assert len(last.barrier()) == 3
    last.complete()
    assert gang.state == "done"


def test_a_replacement_not_claimed_in_time_goes_back_and_nobody_drains(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    gang.skip_backoff()
    fourth = q.worker("w4")
    assert reserve(gang, [claims[1].job_id], [fourth])
    q.live_on(70, workers[0], workers[2], fourth)
    assert gang.states == ["running", "blocked", "running"]
    assert gang.state == "running"
    assert gang.row["placement_misses"] == 1
    assert fourth.row["passed_over_until"] is not None
    with refused(STALE):
        claims[1].barrier()


def test_a_reserved_replacement_on_a_worker_that_ends_goes_back(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    gang.skip_backoff()
    fourth = q.worker("w4")
    assert reserve(gang, [claims[1].job_id], [fourth])
    fourth.report_dead()
    assert gang.states == ["running", "blocked", "running"]
    assert gang.row["crashes"] == 0


def test_what_was_taken_from_a_member_stays_stale_when_its_next_place_ends_unclaimed(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    workers[1].report_dead()
    gang.skip_backoff()
    fourth = q.worker("w4")
    assert reserve(gang, [claims[1].job_id], [fourth])
    fourth.report_dead()
    with refused(STALE):
        claims[1].fail()


@pytest.mark.parametrize("how", ["crash", "fail", "fail for good", "trip"])
def test_a_successor_lost_while_it_waits_for_another_is_nobodys_fault(q: Q, how: str) -> None:
    """Its code had not begun: as before the first barrier, nobody is charged."""
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    claims[2].fail()
    gang.skip_backoff()
    fourth = q.worker("w4")
    assert reserve(gang, [claims[1].job_id, claims[2].job_id], [fourth, workers[2]])
    q.later(1)
    (second,) = fourth.claim()
    if how == "crash":
        fourth.report_dead()
    elif how == "trip":
        second.trip(exit_in_s=None)
    else:
        second.fail(retryable=how == "fail")
    assert gang.states == ["running", "blocked", "reserved"]
    assert (gang.row["attempts"], gang.row["crashes"], gang.row["trips"], gang.row["never_started"]) == (
        2,
        0,
        0,
        1,
    )
    assert [(row["attempts"], row["crashes"], row["trips"]) for row in gang.members] == [(1, 0, 0)] * 3


def test_another_member_fails_while_a_replacement_is_reserved(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    gang.skip_backoff()
    assert reserve(gang, [claims[1].job_id], [workers[1]])
    claims[2].fail()
    assert gang.states == ["running", "reserved", "blocked"]
    (second,) = workers[1].claim()
    assert not second.barrier()[0]["go"], "a member is still missing"
    replace(gang, [claims[2].job_id], [workers[2]])
    assert second.barrier()[0]["go"]
    assert gang.row["epoch"] == 3


def test_cancel_while_a_replacement_is_reserved(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].fail()
    gang.skip_backoff()
    assert reserve(gang, [claims[1].job_id], [workers[1]])
    assert gang.cancel() == "draining"
    assert gang.states == ["preempting", "blocked", "preempting"]
    ack_all([claims[0], claims[2]])
    assert gang.state == "cancelled"


def test_without_a_place_within_its_timeout_the_gang_is_placed_as_a_whole(q: Q) -> None:
    gang, workers = of_three(q, timeout_s=30)
    claims = run(gang, workers)
    claims[1].fail()
    q.live_on(20, *workers, tick=False)
    q.call("tick", force=True)
    assert gang.state == "running"
    q.live_on(20, *workers)
    assert gang.state == "draining"
    ack_all([claims[0], claims[2]])
    assert gang.row["drain_cause"] == "no_replacement"
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 3)
    assert [row["attempts"] for row in gang.members] == [0, 1, 0]


def test_a_second_loss_gives_the_first_no_further_time(q: Q) -> None:
    gang, workers = of_three(q, timeout_s=30)
    claims = run(gang, workers)
    claims[1].fail()
    first = (gang.live["missing_since"], gang.live["timeout_at"])
    q.live_on(20, *workers, tick=False)
    claims[2].fail()
    assert (gang.live["missing_since"], gang.live["timeout_at"]) == first


def test_a_running_gang_that_misses_nobody_cannot_be_reserved(q: Q) -> None:
    gang, workers = of_three(q)
    run(gang, workers)
    with refused(WRONG_STATE, "running"):
        reserve(gang, gang.job_ids[:1], workers[:1])


def test_the_successor_restores_the_last_complete_step(q: Q) -> None:
    gang, workers = of_three(q)
    q.sql("update gangq.live_gangs set checkpoint_mode = 'each'")
    claims = run(gang, workers)
    for claim in claims:
        claim.save(5, b"five")
    claims[0].save(8, b"eight")
    claims[1].fail()
    (new,) = replace(gang, [claims[1].job_id], [workers[1]])
    assert (new["checkpoint_step"], new.load()) == (5, (5, b"five"))
    assert claims[0].load() == (5, b"five")
    new.save(8, b"new")
    claims[2].save(8, b"other")
    assert gang.live["restore_step"] == 5
    assert q.value("select gangq.restore_step(g) from gangq.live_gangs g") == 5, "8 of the old epoch is gone"


def test_no_step_is_made_of_what_two_epochs_saved(q: Q) -> None:
    """Who has not heard of the new epoch saves on from the old one; the successor from what it restored."""
    first, second = q.workers(2)
    gang = q.submit_gang(2, checkpoint_mode="each", failure_policy="restart_member")
    old, lost = gang.start(first, second)
    for claim in (old, lost):
        claim.save(40, b"epoch 1", epoch=1)
    lost.fail()
    (new,) = replace(gang, [lost.job_id], [second])
    old.save(50, b"epoch 1", epoch=1)
    new.save(50, b"epoch 2", epoch=2)
    old.fail()
    (again,) = replace(gang, [old.job_id], [first])
    assert again.load() == (40, b"epoch 1")
    for claim in (again, new):
        claim.save(50, b"epoch 3", epoch=3)
    assert q.value("select gangq.restore_step(g) from gangq.live_gangs g") == 50


def test_no_step_is_kept_that_a_member_which_is_done_cannot_complete(q: Q) -> None:
    first, second = q.workers(2)
    gang = q.submit_gang(2, checkpoint_mode="each")
    ahead, behind = gang.start(first, second)
    for step in (1, 2, 3):
        ahead.save(step, b"ahead")
    behind.save(1, b"behind")
    ahead.complete()
    for step in range(2, 80):
        behind.save(step, b"behind")
    kept = q.sql("select step from gangq.checkpoints where job_id = %(job)s order by step", job=behind.job_id)
    assert [row["step"] for row in kept] == [3]
    assert q.value("select gangq.restore_step(g) from gangq.live_gangs g") == 3


def test_a_gang_that_waits_for_a_successor_does_not_stand_still(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    for worker, claim in zip(workers, claims, strict=True):
        worker.beat(claim, beats=[{"step": 1}])
    q.sql("update gangq.live_gangs set timeout_s = 99999")
    stall = q.value("select gang_stall_s from gangq.settings")
    claims[1].fail()
    q.sql(
        "update gangq.live_gangs set not_before = gangq.now() + interval '1 day'"
    )  # no place for a successor
    q.live_on(stall + 60, *workers, step=30)
    assert gang.state == "running"
    replace(gang, [claims[1].job_id], [workers[1]])
    q.live_on(60, *workers, step=30)
    assert gang.state == "running"


def test_a_tripped_worker_is_gone_before_its_members_successor_comes(q: Q) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    claims[1].trip(exit_in_s=30)
    assert gang.states == ["running", "blocked", "running"]
    left = q.value("select extract(epoch from not_before - gangq.now()) from gangq.live_gangs")
    assert left >= 30


@pytest.mark.parametrize("how", ["another is lost", "a successor is not claimed"])
def test_what_happens_meanwhile_brings_no_successor_before_a_tripped_worker_is_gone(q: Q, how: str) -> None:
    gang, workers = of_three(q)
    claims = run(gang, workers)
    if how == "a successor is not claimed":
        claims[2].fail()
        gang.skip_backoff()
        assert reserve(gang, [claims[2].job_id], [workers[2]])
    claims[1].trip(exit_in_s=100)
    gone_at = workers[1].row["exits_at"]
    assert gang.live["not_before"] >= gone_at
    if how == "another is lost":
        workers[2].report_dead()
    else:
        assert q.one("rollback_gang", gang_id=gang.id)
    assert gang.states == ["running", "blocked", "blocked"]
    assert gang.live["not_before"] >= gone_at


# fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fail", "trip", "crash"])
def test_with_policy_fail_one_lost_member_is_the_end(q: Q, how: str) -> None:
    gang, workers = of_three(q, policy="fail")
    claims = run(gang, workers)
    if how == "fail":
        claims[1].fail("no such file")
    elif how == "trip":
        claims[1].trip()
    else:
        workers[1].report_dead()
    ack_all([claims[0], claims[2]])
    assert gang.state == "failed"
    assert "rank 1" in gang.row["reason"]
    assert "failure policy is fail" in gang.row["reason"]


def test_with_policy_fail_a_preempted_gang_comes_back(q: Q) -> None:
    gang, workers = of_three(q, policy="fail")
    claims = run(gang, workers)
    assert q.one("preempt_gang", gang_id=gang.id)
    ack_all(claims)
    assert gang.state == "blocked"


# shrink -----------------------------------------------------------------------------------------------------


def test_above_its_minimum_the_gang_goes_on_without_the_culprit(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[1].fail()
    assert gang.state == "running"
    assert who(gang) == {0: 0, 2: 1, 3: 2}
    assert (gang.row["world_size"], gang.row["epoch"]) == (3, 2)
    assert epochs_told(workers[3], claims[3]) == {claims[3].job_id: 2}
    assert [(row["go"], row["rank"], row["job_id_of_rank"]) for row in claims[3].barrier()] == [
        (True, 0, claims[0].job_id),
        (True, 1, claims[2].job_id),
        (True, 2, claims[3].job_id),
    ]
    assert workers[1].free["slots"] == 1


def test_below_its_minimum_the_gang_starts_anew(q: Q) -> None:
    gang, workers = submit_roles(q, ("worker", 2, 3), policy="shrink"), q.workers(3)
    claims = run(gang, workers)
    claims[0].fail()
    assert gang.state == "running"
    claims[2].fail()
    assert gang.states == ["blocked", "preempting", "preempted"]
    claims[1].ack()
    assert (gang.state, gang.row["world_size"]) == ("blocked", None)
    assert [row["attempts"] for row in gang.members] == [1, 0, 1]
    assert gang.live["attempts"] == 2


def test_a_role_without_surplus_is_not_shrunk(q: Q) -> None:
    gang, workers = submit_roles(q, ("driver", 1, 1), ("executor", 1, 3), policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].fail()
    assert gang.state == "draining"
    ack_all(claims[1:])
    assert gang.state == "blocked"


def test_a_rendezvous_port_that_was_taken_costs_a_shrinking_gang_no_member(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].fail(cause="port_taken")
    assert gang.state == "draining"
    assert (gang.row["never_started"], gang.row["attempts"]) == (1, 0)


def test_a_new_rank_0_says_where_it_is_to_be_found(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].fail()
    assert {(row["go"], row["master_addr"]) for row in claims[2].barrier()} == {(False, None)}
    assert not q.call("barrier", job_id=claims[2].job_id, token=claims[2].token, port=30)[0]["go"], (
        "it is rank 1"
    )
    rows = q.call("barrier", job_id=claims[1].job_id, token=claims[1].token, port=31)
    assert {(row["go"], row["master_addr"], row["master_port"]) for row in rows} == {(True, "host-w2", 31)}
    assert claims[2].barrier()[0]["go"]
    q.call("barrier", job_id=claims[1].job_id, token=claims[1].token, port=32)
    assert claims[2].barrier()[0]["master_port"] == 31, "once said it stands"


def test_the_new_rank_0s_checkpoints_are_the_gangs(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].save(4, b"first")
    claims[1].save(9, b"nobody asked")
    claims[0].fail()
    assert claims[1].load() == (4, b"first")
    claims[1].save(6, b"second")
    assert q.one("preempt_gang", gang_id=gang.id)
    ack_all(claims[1:])
    again = run(gang, workers[:2], gang.job_ids[:2])
    assert [(c["checkpoint_step"], c.load()) for c in again] == [(6, (6, b"second"))] * 2


def test_who_has_left_the_epoch_saves_nothing_over_those_who_go_on(q: Q) -> None:
    """It was rank 0, and its step is the later one: the others' would be lost with it."""
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].save(40, b"all")
    assert q.one("shrink_gang", gang_id=gang.id, job_ids=[claims[0].job_id])
    claims[0].save(100, b"on its way out")
    claims[1].save(50, b"those who go on")
    kept = q.sql("select step, data from gangq.checkpoints where step > 40")
    assert kept == [{"step": 50, "data": b"those who go on"}]


def test_a_failure_when_all_others_are_done_ends_a_shrinking_gang_done(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    for claim in claims[:3]:
        claim.complete()
    claims[3].fail()
    assert (gang.state, gang.states) == ("done", ["done"] * 3 + ["cancelled"])


def test_a_member_done_before_the_others_shrink_has_no_part_in_what_follows(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="shrink"), q.workers(4)
    claims = run(gang, workers)
    claims[0].complete()
    claims[1].fail()
    assert who(gang) == {2: 0, 3: 1}
    assert gang.row["world_size"] == 2
    claims[2].complete()
    claims[3].complete()
    assert gang.state == "done"


# Displaced surplus ------------------------------------------------------------------------------------------


def shrink(gang: Gang, *jobs: int) -> bool:
    return bool(gang.q.one("shrink_gang", gang_id=gang.id, job_ids=list(jobs)))


def test_surplus_members_are_told_and_the_rest_goes_on_at_once(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert shrink(gang, claims[2].job_id, claims[3].job_id)
    assert who(gang) == {0: 0, 1: 1}
    assert workers[3].beat(claims[3]) == {claims[3].job_id: "preempt"}
    assert claims[0].barrier()[0]["go"]
    assert workers[3].free["slots"] == 0, "told to stop is not stopped"
    ack_all(claims[2:])
    assert workers[3].free["slots"] == 1
    assert (gang.state, gang.states) == ("running", ["running", "running", "blocked", "blocked"])
    assert [row["attempts"] for row in gang.members] == [1, 1, 0, 0]


def test_nobody_is_displaced_before_the_barrier_has_opened(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    assert reserve(gang, gang.job_ids, workers)
    claims = [worker.take() for worker in workers[:3]]
    assert not shrink(gang, claims[2].job_id)
    assert gang.states == ["running"] * 3 + ["reserved"]


def test_who_was_displaced_does_not_go_on_for_the_last_of_its_gang(q: Q) -> None:
    gang, workers = submit_roles(q, ("worker", 1, 2), policy="shrink"), q.workers(2)
    claims = run(gang, workers)
    assert shrink(gang, claims[1].job_id)
    claims[1].complete()
    claims[0].fail()
    assert gang.state == "failed"
    assert "rank 1 was already done" in gang.row["reason"]


def test_while_a_member_is_replaced_no_other_is_displaced(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC, policy="restart_member"), q.workers(4)
    claims = run(gang, workers)
    claims[1].fail()
    assert not shrink(gang, claims[3].job_id)
    assert gang.states == ["running", "blocked", "running", "running"]


def test_no_role_is_displaced_below_its_minimum(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert not shrink(gang, *(claim.job_id for claim in claims[1:]))
    assert not shrink(gang, claims[3].job_id, 999)
    assert gang.states == ["running"] * 4


def test_when_the_rest_is_done_the_gang_waits_for_its_displaced_members_to_stop(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert shrink(gang, claims[3].job_id)
    for claim in claims[:3]:
        claim.complete()
    assert gang.state == "draining"
    claims[3].ack()
    assert (gang.state, gang.states) == ("done", ["done"] * 3 + ["cancelled"])


def test_a_displaced_member_whose_worker_dies_has_left_all_the_same(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert shrink(gang, claims[3].job_id)
    workers[3].report_dead()
    assert (gang.state, gang.states[3]) == ("running", "blocked")
    assert gang.row["crashes"] == 0


def test_cancelling_reaches_members_that_were_already_told_to_stop(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert shrink(gang, claims[3].job_id)
    gang.cancel()
    assert workers[3].beat(claims[3]) == {claims[3].job_id: "cancel"}
    ack_all(claims)
    assert gang.state == "cancelled"


def test_a_displaced_member_that_finishes_after_all_is_done(q: Q) -> None:
    gang, workers = submit_roles(q, ELASTIC), q.workers(4)
    claims = run(gang, workers)
    assert shrink(gang, claims[3].job_id)
    assert claims[3].complete() == "done"
    assert gang.states == ["running"] * 3 + ["done"]


def lost_while_paused(q: Q, count: int) -> tuple[Gang, list[Worker]]:
    """A gang that has waited three minutes of a paused queue for one of its two members, and the workers left."""
    workers = q.workers(count)
    gang = q.submit_gang(2, failure_policy="restart_member", timeout_s=60)
    claims = gang.start(*workers)
    q.call("set_queue", name="default", paused=True)
    lost = next(w for w in workers if w.incarnation == claims[0].incarnation)
    lost.report_dead()
    rest = [w for w in workers if w is not lost]
    q.live_on(180, *rest)
    assert gang.state == "running"
    q.call("set_queue", name="default", paused=False)
    return gang, rest


def test_while_nobody_could_be_found_the_wait_for_a_replacement_does_not_count(q: Q) -> None:
    gang, _ = lost_while_paused(q, 3)
    q.tick()
    assert sorted(gang.states) == ["reserved", "running"]


def test_a_wait_for_a_replacement_that_counts_ends(q: Q) -> None:
    gang, rest = lost_while_paused(q, 2)
    q.live_on(40, *rest)
    assert gang.state == "running"
    q.live_on(40, *rest)
    assert (gang.state, q.events("drain")[-1]["data"]["cause"]) == ("draining", "no_replacement")


def test_of_two_members_on_a_worker_that_one_of_them_trips_both_are_replaced_and_one_is_charged(q: Q) -> None:
    a, b, c = (q.worker(name, slots=2) for name in "abc")
    gang = q.submit_gang(4, failure_policy="restart_member")
    claims = gang.start(a, b, c)
    culprit, other = (claim for claim in claims if claim.incarnation == claims[0].incarnation)
    culprit.trip(code=86, exit_in_s=5)
    q.later(6)
    for worker in (a, b, c):
        if worker.incarnation != culprit.incarnation:
            worker.beat()
    q.tick()
    assert gang.state == "running"
    members = {m["id"]: m for m in gang.members}
    rows = [members[x.job_id] for x in (culprit, other)]
    assert [(row["state"], row["trips"]) for row in rows] == [("reserved", 1), ("reserved", 0)]
