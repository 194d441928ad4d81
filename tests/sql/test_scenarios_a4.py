"""The acceptance scenarios of research/systems.md, section A4, by name, as far as they still apply.

Where issue 2 decides otherwise the test says so: checkpoints are accepted while running, priority comes
before size, a reservation with claimed siblings drains instead of rolling back in part, and nothing is forced
before a lease ended.
Scenarios about a memory or SQLite store, HTTP and the executor have no counterpart in SQL.
"""

from __future__ import annotations

import threading

import psycopg
import pytest

from sql.drive import MISSING, STALE, WRONG_STATE, Gang, Q, Worker, ack_all, gpus, refused


def race(q: Q, dsn: str, count: int, workers: list[Worker]) -> list[int]:
    """`count` threads claim one job at a time, all at once, until there is nothing; the ids in no order."""
    got: list[int] = []
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(worker: Worker) -> None:
        try:
            with q.connected(dsn) as other:
                start.wait(10)
                while rows := other.call("claim", incarnation=worker.incarnation, max_jobs=1):
                    got.extend(row["job_id"] for row in rows)
        except BaseException as error:  # reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(w,), name=f"claimer {w.name}") for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    return got


class TestStore:
    def test_add_job_returns_unique_ids(self, q: Q) -> None:
        assert len({q.submit() for _ in range(5)}) == 5

    def test_get_job_round_trip_and_not_found(self, q: Q) -> None:
        row = q.job(q.submit())
        assert (row["state"], row["attempts"], row["max_attempts"], row["finished_at"]) == (
            "pending",
            0,
            3,
            None,
        )
        assert q.sql("select * from gangq.jobs where id = 999") == []

    def test_claim_job_returns_job(self, q: Q) -> None:
        q.submit()
        row = q.job(q.worker().take().job_id)
        assert (row["state"], row["attempts"], row["progress"]) == ("running", 1, None)
        assert row["claimed_at"] is not None

    def test_claim_job_empty_store_skips_non_pending_and_blocked(self, q: Q) -> None:
        worker = q.worker()
        assert worker.claim() == []
        q.submit_gang(1)
        q.submit(due_at="2999-01-01")
        assert worker.claim() == []

    def test_claim_job_no_duplicates_ten_claimers_five_jobs(self, q: Q, dsn: str) -> None:
        ids = q.submit(count=5)
        assert sorted(race(q, dsn, 10, q.workers(10))) == ids

    def test_postgres_concurrent_claim_skip_locked_each_job_once(self, q: Q, dsn: str) -> None:
        ids = q.submit(count=60)
        workers = q.workers(6, prefetch=60)
        assert sorted(race(q, dsn, 6, workers)) == ids

    def test_update_job_status_done_failed_requeue(self, q: Q) -> None:
        done, failed, requeued = q.submit(count=3)
        one, two, three = q.worker(prefetch=3).claim()
        one.complete()
        two.fail(retryable=False)
        three.requeue()
        finished = {i: q.job(i)["finished_at"] is not None for i in (done, failed, requeued)}
        assert finished == {done: True, failed: True, requeued: False}

    def test_list_jobs_empty(self, q: Q) -> None:
        assert q.sql("select * from gangq.jobs") == []

    def test_update_heartbeat_and_heartbeat_not_found(self, q: Q) -> None:
        worker = q.worker()
        q.later(9)
        worker.beat()
        assert q.value("select silent_s from gangq.workers") == 0
        with refused(MISSING):
            q.call("heartbeat", incarnation=999)

    def test_register_worker_upsert_becomes_one_live_incarnation_per_name(self, q: Q) -> None:
        first = q.worker("a")
        first.report_dead()
        q.worker("a")
        assert len(q.sql("select * from gangq.workers")) == 1

    def test_remove_stale_workers_counts_each_once(self, q: Q) -> None:
        q.worker()
        q.tick()
        for _ in range(12):
            q.later(10)
            q.one("reap_expired")
        q.later(2)
        assert q.one("reap_expired") in (0, 1)
        assert q.one("reap_expired") == 0
        assert q.value("select state from gangq.workers") == "dead"


class TestDependencies:
    def test_depends_on_starts_waiting_and_round_trips(self, q: Q) -> None:
        first = q.submit()
        second = q.submit(after=[first])
        assert q.state(second) == "waiting"
        assert q.sql("select job_id, on_job_id from gangq.dependencies") == [
            {"job_id": second, "on_job_id": first}
        ]

    def test_unblock_ready_partial_deps(self, q: Q) -> None:
        first, other = q.submit(count=2)
        last = q.submit(after=[first, other])
        q.worker().take().complete()
        q.settle()
        assert q.state(last) == "waiting"

    def test_unblock_ready_ignores_gang_tasks(self, q: Q) -> None:
        gang = q.submit_gang(2)
        q.one("promote_due")
        assert gang.states == ["blocked", "blocked"]

    def test_submit_with_a_dependency_that_does_not_exist(self, q: Q) -> None:
        with refused(MISSING, "42"):
            q.submit(after=[42])

    def test_a_cycle_cannot_be_written_because_after_names_only_what_exists(self, q: Q) -> None:
        next_id = q.submit() + 1
        with refused(MISSING, str(next_id)):
            q.submit(after=[next_id])


class TestGangStore:
    def test_add_gang_writes_rows_blocked_indexed_and_alike(self, q: Q) -> None:
        gang = q.submit_gang(3, priority=4, memory_mb=7)
        assert [(m["rank"], m["state"], m["priority"], m["memory_mb"]) for m in gang.members] == [
            (n, "blocked", 4, 7) for n in range(3)
        ]

    def test_list_gang_tasks_empty(self, q: Q) -> None:
        assert q.sql("select * from gangq.jobs where gang_id = 5") == []

    def test_reserve_gang(self, q: Q) -> None:
        gang, workers = q.submit_gang(2), q.workers(2)
        assert q.one("reserve_gang", gang_id=gang.id, incarnations=[w.incarnation for w in reversed(workers)])
        assert (gang.placed_on, gang.states, gang.row["epoch"]) == (["w2", "w1"], ["reserved"] * 2, 1)
        assert gang.row["reserved_at"] == q.clock.now()

    def test_reserve_gang_not_blocked(self, q: Q) -> None:
        gang, worker = q.submit_gang(1), q.worker()
        q.tick()
        with refused(WRONG_STATE):
            q.call("reserve_gang", gang_id=gang.id, incarnations=[worker.incarnation])

    def test_reserve_gang_unknown(self, q: Q) -> None:
        with refused(MISSING):
            q.call("reserve_gang", gang_id=1, incarnations=[1])

    def test_claim_reserved_job_wrong_worker_and_second_claim(self, q: Q) -> None:
        gang = q.submit_gang(1)
        right, wrong = q.worker("right"), q.worker("wrong", queues=["default"], labels={})
        q.call("reserve_gang", gang_id=gang.id, incarnations=[right.incarnation])
        assert wrong.claim() == []
        assert right.take()["attempt"] == 1
        assert right.claim() == []

    def test_rollback_gang_clears_worker_and_deadline(self, q: Q) -> None:
        gang, _ = q.submit_gang(2), q.workers(2)
        q.tick()
        q.call("rollback_gang", gang_id=gang.id)
        assert (gang.placed_on, gang.states) == ([None, None], ["blocked", "blocked"])
        assert (gang.row["reserved_at"], gang.row["deadline_at"]) == (None, None)

    def test_rollback_gang_with_one_running_changes_nothing(self, q: Q) -> None:
        """A4 keeps the running one and blocks the rest; issue 2: all or nothing, so this is a drain."""
        gang, workers = q.submit_gang(2), q.workers(2)
        q.tick()
        gang.claimed_by(workers[0])
        before = gang.members
        assert q.one("rollback_gang", gang_id=gang.id) is False
        assert gang.members == before

    def test_preempt_gang_no_running(self, q: Q) -> None:
        gang = q.submit_gang(2)
        assert q.one("preempt_gang", gang_id=gang.id) is False

    def test_preempt_gang_mixed_states(self, q: Q) -> None:
        gang, workers = q.submit_gang(3), q.workers(3)
        q.tick()
        gang.claimed_by(*workers[:2])
        assert q.one("preempt_gang", gang_id=gang.id) is True
        assert sorted(gang.states) == ["blocked", "preempting", "preempting"]
        blocked = next(m for m in gang.members if m["state"] == "blocked")
        assert (blocked["worker"], blocked["token"]) == (None, None)

    def test_mark_preempted_epoch_mismatch_is_a_stale_token(self, q: Q) -> None:
        gang, workers = q.submit_gang(2), q.workers(2)
        old = gang.start(*workers)
        old[0].fail()
        old[1].ack()
        new = gang.restart(*workers)
        q.call("preempt_gang", gang_id=gang.id)
        assert old[1].ack() == "repeated", "the first epoch's ack stops nothing of the second"
        assert gang.states == ["preempting", "preempting"]
        with refused(STALE):
            q.call("ack_preempted", job_id=new[0].job_id, token=new[0].token + 1)
        assert ack_all(new) == ["preempted", "preempted"]

    def test_preemption_retry_convergence(self, q: Q) -> None:
        gang, workers = q.submit_gang(3, max_attempts=3), q.workers(3)
        claims = gang.start(*workers)
        for launch in (1, 2, 3):
            claims[2].fail()
            assert [m["attempts"] for m in gang.members] == [0, 0, launch]
            ack_all(claims[:2])
            if launch < 3:
                claims = gang.restart(*workers)
        assert gang.states == ["failed"] * 3

    def test_complete_preemption_partial_completion(self, q: Q) -> None:
        gang, workers = q.submit_gang(3), q.workers(3)
        claims = gang.start(*workers)
        claims[0].complete()
        claims[1].fail()
        claims[2].ack()
        assert gang.states == ["done", "failed", "failed"]

    def test_save_checkpoint_is_accepted_while_running_and_fenced_by_the_token(self, q: Q) -> None:
        """A4 refuses it while running; issue 2 accepts it."""
        gang, worker = q.submit_gang(1), q.worker()
        (claim,) = gang.start(worker)
        claim.save(3, b"\x00\xff not JSON")
        assert q.value("select data from gangq.checkpoints") == b"\x00\xff not JSON"
        with refused(STALE):
            q.call("save_checkpoint", job_id=claim.job_id, token=claim.token + 1, step=4, data=b"")


class TestPlacement:
    def test_can_place_gang_on_distinct_workers_of_one_slot(self, q: Q) -> None:
        gang, _ = q.submit_gang(3), q.workers(4)
        q.tick()
        assert len(set(gang.placed_on)) == 3

    def test_can_place_gang_insufficient(self, q: Q) -> None:
        gang = q.submit_gang(2, gpus=1, vram_mb=24000)
        q.worker("a", devices=gpus(24000))
        q.worker("b", devices=gpus(8000, prefix="H"))
        q.tick()
        assert gang.state == "blocked"

    def test_gangs_that_ask_for_nothing_still_need_a_slot_each(self, q: Q) -> None:
        gangs = [q.submit_gang(2) for _ in range(3)]
        q.workers(2)
        q.tick()
        assert sorted(g.state for g in gangs) == ["blocked", "blocked", "reserved"]

    def test_capacity_counts_ordinary_jobs(self, q: Q) -> None:
        q.submit(gpus=1)
        worker = q.worker(slots=2, devices=gpus(1))
        worker.take()
        gang = q.submit_gang(1, gpus=1)
        q.tick()
        assert gang.state == "blocked"

    def test_capacity_counts_members_that_are_still_stopping(self, q: Q) -> None:
        gang, worker = q.submit_gang(1), q.worker()
        (claim,) = gang.start(worker)
        gang.cancel()
        other = q.submit_gang(1)
        q.tick()
        assert other.state == "blocked"
        claim.ack()
        q.tick()
        assert other.state == "reserved"


class TestGangIntegration:
    def test_full_lifecycle(self, q: Q) -> None:
        gang, workers = q.submit_gang(4), q.workers(4)
        for claim in gang.start(*workers):
            claim.complete()
        assert (gang.state, gang.states) == ("done", ["done"] * 4)

    def test_insufficient_workers_until_the_fourth_registers(self, q: Q) -> None:
        gang = q.submit_gang(4)
        q.workers(3)
        q.tick()
        assert gang.state == "blocked"
        q.worker("w4")
        q.tick()
        assert gang.state == "reserved"

    def test_reservation_timeout_rolls_back_and_goes_to_others(self, q: Q) -> None:
        gang, silent = q.submit_gang(1), q.worker("silent")
        q.tick()
        assert gang.placed_on == ["silent"]
        q.live_on(31, silent)
        assert gang.state == "blocked"
        fresh = q.worker("fresh")
        q.live_on(5, silent, fresh)
        assert (gang.state, gang.placed_on) == ("reserved", ["fresh"])

    def test_the_original_stuck_gang_is_not_stuck(self, q: Q) -> None:
        """Reserve 3, two claim, the third never does: it drains by itself and runs again."""
        gang, workers = q.submit_gang(3), q.workers(3)
        q.tick()
        claims = gang.claimed_by(*workers[:2])
        q.live_on(31, *workers)
        assert {w.beat(c)[c.job_id] for w, c in ((workers[0], claims[0]), (workers[1], claims[1]))} <= {
            "preempt",
            "lost",
        }
        ack_all(claims)
        q.live_on(70, *workers)
        assert gang.state == "reserved"
        gang.claimed_by(*workers)
        assert gang.state == "running"

    def test_two_gangs_the_larger_first_at_equal_priority_and_not_before_priority(self, q: Q) -> None:
        q.call("set_queue", name="default", policy="largest_first")
        three, four = q.submit_gang(3), q.submit_gang(4)
        q.workers(4)
        q.tick()
        assert (three.state, four.state) == ("blocked", "reserved")

    def test_non_gang_jobs_unaffected(self, q: Q) -> None:
        q.submit_gang(2)
        solo = q.submit()
        assert [c.job_id for c in q.worker(prefetch=5).claim()] == [solo]

    def test_stuck_gang_recovery_drain_to_blocked_to_reserved(self, q: Q) -> None:
        gang, workers = q.submit_gang(2), q.workers(2)
        claims = gang.start(*workers)
        claims[0].fail()
        claims[1].ack()
        assert gang.state == "blocked"
        gang.skip_backoff()
        q.tick()
        assert (gang.state, gang.row["epoch"]) == ("reserved", 2)

    def test_the_trigger_needs_no_ack_and_a_gang_of_one_survivor_waits_only_for_it(self, q: Q) -> None:
        gang, workers = q.submit_gang(2), q.workers(2)
        claims = gang.start(*workers)
        claims[0].fail()
        assert gang.states == ["preempted", "preempting"]
        claims[1].ack()
        assert gang.state == "blocked"

    def test_drain_force_timeout_waits_for_the_lease_not_for_the_clock_alone(self, q: Q) -> None:
        """A4 forces after 45 s; issue 2: only once the lease is over as well."""
        gang, workers = q.submit_gang(2), q.workers(2)
        gang.start(*workers)[0].fail()
        q.live_on(60, *workers)
        assert gang.state == "draining"
        q.live_on(110, *workers)
        assert gang.state == "blocked"


class TestReaper:
    def test_requeues_stale_and_ignores_healthy_pending_and_done(self, q: Q) -> None:
        stale, healthy, done, pending = q.submit(count=4)
        a, b = q.worker("a"), q.worker("b", prefetch=2)
        a.take()
        kept, finished = b.claim()
        finished.complete()
        assert (kept.job_id, finished.job_id) == (healthy, done)
        q.live_on(130, b)
        assert [q.state(i) for i in (stale, healthy, done, pending)] == [
            "pending",
            "running",
            "done",
            "pending",
        ]

    def test_a_fresh_start_without_a_beat_is_left_alone(self, q: Q) -> None:
        job, worker = q.submit(), q.worker()
        worker.take()
        q.one("reap_expired")
        assert q.state(job) == "running"

    def test_fails_a_job_whose_crashes_are_spent(self, q: Q) -> None:
        job = q.submit(max_crashes=1)
        for n in range(2):
            q.worker(f"w{n}").take()
            q.live_on(130)
        assert q.state(job) == "failed"

    def test_a_completion_that_came_first_is_not_overwritten(self, q: Q) -> None:
        q.submit()
        claim = q.worker().take()
        claim.complete({"r": 1})
        q.live_on(200)
        assert (q.state(claim.job_id), q.job(claim.job_id)["result"]) == ("done", {"r": 1})

    def test_the_zombie_of_attempt_one_neither_beats_nor_completes_attempt_two(self, q: Q) -> None:
        job, old = q.submit(), q.worker("old")
        zombie = old.take()
        q.live_on(130)
        fresh = q.worker("new")
        claim = fresh.take()
        with pytest.raises(psycopg.Error):
            old.beat(zombie, beats=[{"step": 1}])
        with refused(STALE):
            zombie.complete()
        assert (q.state(job), q.job(job)["progress"]) == ("running", None)
        assert claim.complete() == "done"


def members_by_state(gang: Gang) -> dict[str, int]:
    return {state: gang.states.count(state) for state in set(gang.states)}


def test_no_gang_is_ever_seen_partly_reserved_by_another_connection(q: Q, dsn: str) -> None:
    gang, _ = q.submit_gang(5), q.workers(5)
    with q.connected(dsn) as other:
        watched = Gang(other, gang.id, gang.job_ids, None)
        with q.db.transaction():
            q.place()
            assert members_by_state(watched) == {"blocked": 5}
        assert members_by_state(watched) == {"reserved": 5}
