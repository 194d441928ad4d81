"""A job ends or is handed back: complete, fail, requeue, release, append_log; stale tokens and repeats."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, STALE, TOO_LARGE, WRONG_STATE, Claim, Q, gpus, refused

FINAL = {
    "complete": lambda q, j, t: q.call("complete", job_ids=[j], tokens=[t]),
    "fail": lambda q, j, t: q.one("fail", job_id=j, token=t),
    "requeue": lambda q, j, t: q.one("requeue", job_id=j, token=t),
    "ack_preempted": lambda q, j, t: q.one("ack_preempted", job_id=j, token=t),
    "save_checkpoint": lambda q, j, t: q.call("save_checkpoint", job_id=j, token=t, step=1, data=b"x"),
    "load_checkpoint": lambda q, j, t: q.call("load_checkpoint", job_id=j, token=t),
    "inputs": lambda q, j, t: q.call("inputs", job_id=j, token=t),
}
SNAPSHOT = "select * from gangq.live_jobs order by id"


def running(q: Q, **options: Any) -> Claim:
    q.submit(**options)
    return q.worker("w", devices=gpus(8000)).take()


# Fencing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", FINAL)
@pytest.mark.parametrize("which", ["another job's", "an older", "an invented", "no"])
def test_a_stale_token_is_refused_and_changes_nothing(q: Q, verb: str, which: str) -> None:
    q.submit(count=2)
    worker = q.worker(prefetch=2)
    first, second = worker.claim()
    old = first.token
    first.release()
    first = worker.take()
    token = {"another job's": second.token, "an older": old, "an invented": 5, "no": None}[which]
    before = q.sql(SNAPSHOT)
    if which == "an older" and verb not in ("complete", "save_checkpoint", "load_checkpoint", "inputs"):
        assert FINAL[verb](q, first.job_id, token) == "repeated", "that attempt is over already: harmless"
    else:
        with refused(STALE, f"job {first.job_id}"):
            FINAL[verb](q, first.job_id, token)
    assert q.sql(SNAPSHOT) == before
    assert first.complete() == "done", "the present claim is untouched"


@pytest.mark.parametrize("verb", FINAL)
def test_a_job_that_never_was_is_not_found(q: Q, verb: str) -> None:
    for job in (4711, None):
        with refused(MISSING):
            FINAL[verb](q, job, 1)


@pytest.mark.parametrize("verb", FINAL)
def test_a_job_that_nobody_has_claimed_takes_no_word(q: Q, verb: str) -> None:
    job = q.submit()
    for token in (1, None):
        with refused(STALE, "pending"):
            FINAL[verb](q, job, token)


@pytest.mark.parametrize("ending", ["complete", "fail", "cancel"])
@pytest.mark.parametrize("verb", ["complete", "fail", "requeue", "ack_preempted"])
def test_after_the_end_only_the_same_word_succeeds_silently_and_nothing_moves(
    q: Q, verb: str, ending: str
) -> None:
    claim = running(q)
    if ending == "complete":
        claim.complete({"r": 1})
    elif ending == "fail":
        claim.fail(retryable=False)
    else:
        q.call("cancel", job_ids=[claim.job_id])
        claim.ack()
    before = q.sql("select * from gangq.history")
    if verb == "complete" and ending != "complete":
        with refused(STALE):
            claim.complete()
    else:
        answer = FINAL[verb](q, claim.job_id, claim.token)
        assert (answer[0]["outcome"] if verb == "complete" else answer) == "repeated"
    assert q.sql("select * from gangq.history") == before


@pytest.mark.parametrize("verb", ["save_checkpoint", "load_checkpoint", "inputs"])
def test_checkpoints_of_a_finished_attempt_are_refused(q: Q, verb: str) -> None:
    claim = running(q)
    claim.complete()
    with refused(STALE):
        FINAL[verb](q, claim.job_id, claim.token)


def test_a_zombie_that_was_reaped_cannot_complete_the_job_in_its_own_transaction(q: Q) -> None:
    """The caller's writes hang on the answer: 'repeated' here would commit them for a job that runs again."""
    claim = running(q)
    q.sql("create table public.effects (n int)")
    q.sql(
        "select gangq.end_incarnation(%(i)s, 'dead', gangq.now()), gangq.free_orphans(null)",
        i=claim.live["incarnation"],
    )
    assert q.state(claim.job_id) == "pending"
    with refused(STALE), q.db.transaction():
        q.sql("insert into public.effects values (1)")
        claim.complete()
    assert q.sql("select * from public.effects") == []
    again = q.worker("next").take()
    assert claim.complete(strict=False) == "stale"
    assert again.complete() == "done"
    assert claim.complete(strict=False) == "stale"


def test_a_job_that_crashed_out_is_not_reported_as_completed_to_its_zombie(q: Q) -> None:
    q.submit(max_crashes=1)
    for n in range(2):
        worker = q.worker(f"w{n}")
        claim = worker.take()
        worker.report_dead()
    assert q.state(claim.job_id) == "failed"
    with refused(STALE):
        claim.complete()


# complete ---------------------------------------------------------------------------------------------------


def test_complete_keeps_the_result_and_frees_the_device(q: Q) -> None:
    claim = running(q, gpus=1)
    assert claim.complete({"loss": 0.1}) == "done"
    job = q.job(claim.job_id)
    assert (job["state"], job["result"], job["attempts"]) == ("done", {"loss": 0.1}, 1)
    assert job["finished_at"] is not None
    assert q.sql("select * from gangq.device_holds") == [], "no more of its kind waits for its place"


def test_completing_twice_says_repeated_and_keeps_the_first_result(q: Q) -> None:
    claim = running(q)
    claim.complete({"first": True})
    assert claim.complete({"second": True}) == "repeated"
    assert q.job(claim.job_id)["result"] == {"first": True}


def test_a_batch_is_completed_at_once_with_a_result_each(q: Q) -> None:
    q.submit(count=3)
    claims = q.worker(prefetch=3).claim()
    rows = q.call(
        "complete",
        job_ids=[c.job_id for c in claims],
        tokens=[c.token for c in claims],
        results=[{"n": 0}, None, {"n": 2}],
    )
    assert {row["job_id"]: row["outcome"] for row in rows} == {c.job_id: "done" for c in claims}
    assert [q.job(c.job_id)["result"] for c in claims] == [{"n": 0}, None, {"n": 2}]


def test_a_strict_batch_with_one_stale_pair_changes_nothing(q: Q) -> None:
    q.submit(count=2)
    first, second = q.worker(prefetch=2).claim()
    with refused(STALE, f"job {second.job_id}"):
        q.call("complete", job_ids=[first.job_id, second.job_id], tokens=[first.token, 1])
    assert (q.state(first.job_id), q.state(second.job_id)) == ("running", "running")


def test_a_lenient_batch_says_per_job_what_became_of_it(q: Q) -> None:
    q.submit(count=3)
    first, second, third = q.worker(prefetch=3).claim()
    first.complete()
    rows = q.call(
        "complete",
        job_ids=[first.job_id, second.job_id, third.job_id, 999],
        tokens=[first.token, 1, third.token, 1],
        strict=False,
    )
    assert {row["job_id"]: row["outcome"] for row in rows} == {
        first.job_id: "repeated", second.job_id: "stale", third.job_id: "done", 999: "stale",
    }  # fmt: skip
    assert q.state(second.job_id) == "running"


def test_a_pair_named_twice_in_one_batch_is_done_once(q: Q) -> None:
    claim = running(q)
    rows = q.call("complete", job_ids=[claim.job_id] * 2, tokens=[claim.token] * 2)
    assert {row["outcome"] for row in rows} <= {"done", "repeated"}
    assert q.value("select count(*) from gangq.history") == 1
    workers = [q.worker("a"), q.worker("b")]
    gang = q.submit_gang(2)
    members = gang.start(*workers)
    for member in members:
        q.call("complete", job_ids=[member.job_id] * 2, tokens=[member.token] * 2)
        assert member.complete(strict=False) == "repeated"
    assert gang.state == "done"
    assert len(q.events("done", gang_id=gang.id)) == 2


@pytest.mark.parametrize(
    "arrays",
    [
        {"job_ids": [], "tokens": []}, {"job_ids": None, "tokens": None}, {"job_ids": [1], "tokens": []},
        {"job_ids": [1], "tokens": [1, 2]}, {"job_ids": [1, 2], "tokens": [1, 2], "results": [{}]},
    ],
)  # fmt: skip
def test_complete_refuses_arrays_that_do_not_match(q: Q, arrays: dict[str, Any]) -> None:
    with refused(INVALID):
        q.call("complete", **arrays)


def test_a_result_over_the_limit_is_refused_and_the_job_still_runs(q: Q) -> None:
    q.call("set_queue", name="default", max_payload_bytes=2000)
    claim = running(q)
    with refused(TOO_LARGE, f"job {claim.job_id}"):
        claim.complete({"text": "x" * 3000})
    assert claim.complete({"text": "x" * 1000}) == "done"


def test_complete_inside_a_transaction_that_rolls_back_never_happened(q: Q) -> None:
    claim = running(q, gpus=1)
    with q.db.transaction():
        assert claim.complete() == "done"
        raise psycopg.Rollback()
    assert q.state(claim.job_id) == "running"
    assert q.value("select count(*) from gangq.device_holds") == 1
    assert claim.complete() == "done"


def test_complete_and_the_callers_own_write_commit_together(q: Q) -> None:
    claim = running(q)
    q.sql("create table public.effects (n int)")
    with q.db.transaction():
        q.sql("insert into public.effects values (1)")
        claim.complete()
    assert (q.state(claim.job_id), q.value("select count(*) from public.effects")) == ("done", 1)


def test_an_uncommitted_complete_of_a_job_whose_worker_is_judged_wins_if_it_commits(q: Q) -> None:
    claim = running(q)
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.call("complete", job_ids=[claim.job_id], tokens=[claim.token])
        q.call("report_dead", worker="w", incarnation=claim.live["incarnation"], evidence={"by": "test"})
        q.tick()
        assert q.state(claim.job_id) == "running", "locked: left for a later tick"
    q.tick()
    assert q.state(claim.job_id) == "done"


# fail -------------------------------------------------------------------------------------------------------


def test_a_failed_attempt_is_charged_and_tried_again_after_a_backoff(q: Q) -> None:
    claim = running(q, gpus=1)
    assert claim.fail("out of luck") == "scheduled"
    job = q.job(claim.job_id)
    assert (job["attempts"], job["error"]["message"], job["worker"]) == (1, "out of luck", None)
    assert q.sql("select * from gangq.device_holds") == []
    assert claim.fail() == "repeated"


def test_backoff_doubles_with_half_of_it_random_up_to_the_queues_longest(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=4, backoff_max_s=20)
    q.submit(max_attempts=10)
    worker = q.worker()
    for attempt in range(1, 7):
        claim = worker.take()
        claim.fail()
        delay = (q.job(claim.job_id)["due_at"] - q.clock.now()).total_seconds()
        longest = min(20, 4 * 2 ** (attempt - 1))
        assert longest / 2 <= delay <= longest
        q.later(20.001)
        worker.beat()
        q.tick()


@pytest.mark.parametrize("delay", [0, 7, 1e7])
def test_who_reports_a_failure_may_say_when_it_is_tried_again(q: Q, delay: float) -> None:
    claim = running(q)
    assert claim.fail(retry_in_s=delay) == "scheduled"
    assert (q.job(claim.job_id)["due_at"] - q.clock.now()).total_seconds() == delay
    assert q.job(claim.job_id)["attempts"] == 1


@pytest.mark.parametrize("delay", [-1, 1.1e7, "NaN", "Infinity"])
def test_what_is_no_time_until_the_next_attempt_is_refused_and_changes_nothing(q: Q, delay: Any) -> None:
    claim = running(q)
    with refused(INVALID, "retry_in_s"):
        claim.fail(retry_in_s=delay)
    assert q.state(claim.job_id) == "running"


def test_backoffs_differ(q: Q) -> None:
    delays = {q.value("select gangq.backoff(10, 100, 1)") for _ in range(20)}
    assert len(delays) > 10


def test_the_last_attempt_fails_for_good_with_the_last_error_kept(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=0)
    job = q.submit()
    worker = q.worker()
    error = {"type": "ValueError", "message": "bad", "traceback": "...", "host": "h", "log_tail": "end"}
    for attempt, state in enumerate(("scheduled", "scheduled", "failed"), start=1):
        claim = worker.take()
        assert claim["attempt"] == attempt
        assert q.one("fail", job_id=claim.job_id, token=claim.token, error=error) == state
        q.later(0.1)
        q.tick()
    assert (q.state(job), q.job(job)["error"], q.job(job)["attempts"]) == ("failed", error, 3)
    assert worker.claim() == []


def test_a_failure_that_is_not_retryable_fails_at_once(q: Q) -> None:
    claim = running(q)
    assert claim.fail(retryable=False) == "failed"
    assert q.job(claim.job_id)["attempts"] == 1


def test_a_failure_of_which_it_is_not_said_whether_it_is_retryable_is(q: Q) -> None:
    claim = running(q)
    assert claim.fail(retryable=None) == "scheduled"
    assert [len(q.events(kind)) for kind in ("retry", "fail")] == [1, 0]


def test_a_job_whose_process_was_ended_over_another_is_pending_and_charged_for_nothing(q: Q) -> None:
    claim = running(q, max_attempts=1)
    assert claim.fail(cause="other_job") == "pending"
    job = q.job(claim.job_id)
    assert (job["attempts"], job["crashes"], job["trips"], job["stops"]) == (0, 0, 0, 0)


def test_a_solo_job_that_names_a_taken_port_has_failed_like_any_other(q: Q) -> None:
    claim = running(q, max_attempts=2)
    assert claim.fail(cause="port_taken") == "scheduled"
    assert q.job(claim.job_id)["attempts"] == 1
    (event,) = q.events("retry", job_id=claim.job_id)
    assert event["data"]["attempts"] == 1


def test_an_unknown_cause_is_refused(q: Q) -> None:
    claim = running(q)
    for cause, said in (("weather", "cause is 'weather'"), (None, "cause is NULL")):
        with refused(INVALID, said):
            claim.fail(cause=cause)


# snooze -----------------------------------------------------------------------------------------------------


def test_a_snoozed_job_waits_until_then_and_is_charged_for_nothing_else(q: Q) -> None:
    claim = running(q, gpus=1, max_attempts=1)
    assert claim.snooze(90) == "scheduled"
    job = q.job(claim.job_id)
    assert (job["due_at"] - q.clock.now()).total_seconds() == 90
    assert [job[name] for name in ("attempts", "crashes", "trips", "stops", "snoozes")] == [0, 0, 0, 0, 1]
    assert (job["error"], q.sql("select * from gangq.device_holds")) == (None, [])
    assert claim.snooze(90) == "repeated"
    assert q.job(claim.job_id)["snoozes"] == 1
    (attempt,) = q.sql("select cause, ended_at from gangq.attempts where job_id = %(id)s", id=claim.job_id)
    assert (attempt["cause"], attempt["ended_at"]) == ("snoozed", q.clock.now())
    (event,) = q.events("snooze")
    assert (event["job_id"], event["data"]["snoozes"]) == (claim.job_id, 1)


def test_a_snoozed_job_runs_again_when_its_time_has_come_and_not_before(q: Q) -> None:
    claim = running(q)
    worker = claim.q.worker("w2")
    claim.snooze(90)
    q.later(89)
    worker.beat()
    q.tick()
    assert worker.claim() == []
    q.later(1)
    q.tick()
    again = worker.take()
    assert (again.job_id, again["attempt"]) == (claim.job_id, 1)
    assert again.token > claim.token
    again.complete()
    assert (q.job(claim.job_id)["state"], q.job(claim.job_id)["snoozes"]) == ("done", 1)


def test_past_max_snoozes_the_job_fails_and_says_so(q: Q) -> None:
    job, worker = q.submit(max_snoozes=2), q.worker()
    for state in ("scheduled", "scheduled", "failed"):
        assert worker.take().snooze(0) == state
        q.later(0.1)
        q.tick()
    row = q.job(job)
    assert (row["state"], row["attempts"], row["snoozes"], row["max_snoozes"]) == ("failed", 0, 3, 2)
    assert row["error"] == {"type": "SnoozedTooOften", "message": "snoozed 3 times; max_snoozes is 2"}
    q.call("retry", job_ids=[job])
    assert (q.job(job)["snoozes"], q.job(job)["max_snoozes"]) == (0, 2)


def test_a_snooze_is_fenced_by_its_token(q: Q) -> None:
    claim = running(q)
    with refused(STALE):
        q.one("snooze", job_id=claim.job_id, token=claim.token + 1, for_s=1)
    claim.fail()
    q.later(3600)
    q.worker("w2")
    q.tick()
    assert claim.snooze() == "repeated"
    assert q.job(claim.job_id)["snoozes"] == 0


def test_what_was_told_to_stop_stops_and_is_not_snoozed(q: Q) -> None:
    claim = running(q)
    q.call("cancel", job_ids=[claim.job_id])
    assert claim.snooze() == "cancelled"
    assert q.job(claim.job_id)["snoozes"] == 0


def test_a_member_of_a_gang_cannot_be_snoozed(q: Q) -> None:
    gang, (member, _) = q.running_gang(*q.workers(2))
    with refused(WRONG_STATE, f"member of gang g{gang.id}"):
        member.snooze(1)
    assert gang.states == ["running", "running"]


@pytest.mark.parametrize("for_s", [-1, 1.1e7, "NaN", "Infinity", None])
def test_what_is_no_time_to_wait_is_refused_and_changes_nothing(q: Q, for_s: Any) -> None:
    claim = running(q)
    with refused(INVALID, "for_s"):
        claim.snooze(for_s)
    assert q.state(claim.job_id) == "running"


# requeue ----------------------------------------------------------------------------------------------------


def test_a_trip_counts_as_a_trip_and_not_as_an_attempt(q: Q) -> None:
    claim = running(q, gpus=1)
    assert claim.requeue() == "pending"
    assert [event["data"]["trips"] for event in q.events("trip")] == [1]
    job = q.job(claim.job_id)
    assert (job["attempts"], job["trips"], job["crashes"]) == (0, 1, 0)
    assert claim.requeue() == "repeated"
    assert q.job(claim.job_id)["trips"] == 1
    assert q.sql("select * from gangq.device_holds") == []


def test_trips_are_capped_and_then_the_job_fails_with_the_error_kept(q: Q) -> None:
    q.submit(max_trips=2)
    worker = q.worker()
    assert [worker.take().requeue(f"trip {n}") for n in range(3)] == ["pending", "pending", "failed"]
    job = q.sql("select * from gangq.jobs")[0]
    assert (job["state"], job["error"]["message"]) == ("failed", "trip 2")


def test_requeue_not_to_the_front_keeps_the_old_place(q: Q) -> None:
    first, _ = q.submit(count=2)
    worker = q.worker()
    worker.take().requeue(front=False)
    assert worker.take().job_id == first


# release ----------------------------------------------------------------------------------------------------


def test_release_gives_the_attempt_back_and_frees_everything(q: Q) -> None:
    claim = running(q, gpus=1)
    assert claim.release() == "released"
    job = q.job(claim.job_id)
    assert (job["state"], job["attempts"], job["stops"]) == ("pending", 0, 1)
    assert claim.release() == "repeated"
    assert q.job(claim.job_id)["stops"] == 1
    assert q.sql("select * from gangq.device_holds") == []


def test_release_of_a_batch_says_per_job_what_became_of_it(q: Q) -> None:
    q.submit(count=2)
    first, second = q.worker(prefetch=2).claim()
    rows = q.call("release", job_ids=[second.job_id, first.job_id, 999], tokens=[second.token, 1, 1])
    assert {row["job_id"]: row["outcome"] for row in rows} == {
        second.job_id: "released",
        first.job_id: "stale",
        999: "stale",
    }
    with refused(INVALID):
        q.call("release", job_ids=[1], tokens=[])


def test_release_of_a_job_told_to_cancel_cancels_it(q: Q) -> None:
    claim = running(q)
    q.call("cancel", job_ids=[claim.job_id])
    assert claim.release() == "released"
    assert q.state(claim.job_id) == "cancelled"


def test_release_of_several_members_of_one_gang_drains_it_once(q: Q) -> None:
    gang = q.submit_gang(2)
    claims = gang.start(q.worker(slots=2))
    rows = q.call("release", job_ids=[c.job_id for c in claims], tokens=[c.token for c in claims])
    assert {row["outcome"] for row in rows} == {"released"}
    assert gang.state == "blocked"
    assert [m["attempts"] for m in gang.members] == [0, 0]
    assert gang.row["attempts"] == 0


# Crashes ----------------------------------------------------------------------------------------------------


def test_crashes_are_capped_apart_from_attempts(q: Q) -> None:
    job = q.submit(max_crashes=2)
    for n in range(3):
        worker = q.worker(f"w{n}")
        worker.take()
        worker.report_dead()
    row = q.job(job)
    assert (row["state"], row["error"]["type"]) == ("failed", "WorkerLost")


# Logs -------------------------------------------------------------------------------------------------------


def log(q: Q, claim: Claim, *chunks: tuple[int, str], token: int | None = None) -> None:
    q.call(
        "append_log",
        job_ids=[claim.job_id] * len(chunks),
        tokens=[token or claim.token] * len(chunks),
        seqs=[n for n, _ in chunks],
        chunks=[text for _, text in chunks],
    )


def test_a_log_is_kept_in_order_without_repeats_and_without_strangers(q: Q) -> None:
    claim = running(q)
    log(q, claim, (0, "one"), (1, "two"))
    log(q, claim, (1, "two again"), (2, "three"))
    log(q, claim, (3, "from a zombie"), token=5)
    claim.release()
    log(q, claim, (3, "the tail, after its end"))
    rows = q.sql("select chunk from gangq.logs order by seq")
    assert [row["chunk"] for row in rows] == ["one", "two", "three", "the tail, after its end"]


def test_output_that_comes_only_after_the_end_of_its_attempt_is_kept(q: Q) -> None:
    claim = running(q)
    claim.release()
    log(q, claim, (0, "all of it"))
    assert [row["chunk"] for row in q.sql("select chunk from gangq.logs")] == ["all of it"]


def test_a_number_that_comes_twice_in_one_call_is_refused_and_one_of_each_attempt_is_not(q: Q) -> None:
    q.submit()
    q.submit()
    claim, other = q.worker("w1").take(), q.worker("w2").take()
    with refused(INVALID, "each number once for an attempt"):
        log(q, claim, (0, "one"), (0, "one"))
    q.call(
        "append_log",
        job_ids=[claim.job_id, other.job_id],
        tokens=[claim.token, other.token],
        seqs=[0, 0],
        chunks=["one", "one"],
    )
    assert len(q.sql("select seq from gangq.logs")) == 2


def test_each_attempt_numbers_its_output_anew(q: Q) -> None:
    q.submit()
    worker = q.worker()
    first = worker.take()
    log(q, first, (0, "one"), (1, "two"))
    first.release()
    log(q, worker.take(), (0, "three"))
    rows = q.sql("select chunk from gangq.logs order by token, seq")
    assert [row["chunk"] for row in rows] == ["one", "two", "three"]


def test_output_of_an_attempt_before_the_last_is_dropped(q: Q) -> None:
    q.submit()
    worker = q.worker()
    first = worker.take()
    log(q, first, (0, "one"))
    first.release()
    worker.take().release()
    log(q, first, (1, "of the first attempt, after the second"))
    assert [row["chunk"] for row in q.sql("select chunk from gangq.logs")] == ["one"]


# The last word about an attempt that was taken away ---------------------------------------------------------------


@pytest.mark.parametrize("verb", ["fail", "requeue", "ack_preempted", "complete"])
@pytest.mark.parametrize("gang", [False, True])
@pytest.mark.parametrize("attempts", [1, 100])
def test_a_first_word_about_an_attempt_that_was_taken_away_is_stale(
    q: Q, verb: str, gang: bool, attempts: int
) -> None:
    worker = q.worker()
    if gang:
        claim = q.submit_gang(1, max_crashes=attempts).start(worker)[0]
    else:
        q.submit(max_crashes=attempts)
        claim = worker.take()
    q.call("report_dead", worker=worker.name, incarnation=worker.incarnation, evidence={"by": "test"})
    before = q.job(claim.job_id)
    pair = {"job_id": claim.job_id, "token": claim.token}
    many = {"job_ids": [claim.job_id], "tokens": [claim.token]}
    with refused(STALE):
        q.call(verb, **(many if verb == "complete" else pair))
    assert q.call("release", **many) == [{"job_id": claim.job_id, "outcome": "stale"}]
    assert q.job(claim.job_id) == before


@pytest.mark.parametrize("verb", ["fail", "requeue"])
def test_the_same_last_word_again_succeeds_silently_also_once_its_worker_is_dead(q: Q, verb: str) -> None:
    worker = q.worker()
    q.submit()
    claim = worker.take()
    pair = {"job_id": claim.job_id, "token": claim.token}
    assert q.one(verb, **pair) in ("scheduled", "pending")
    q.call("report_dead", worker=worker.name, incarnation=worker.incarnation, evidence={"by": "test"})
    assert q.one(verb, **pair) == "repeated"


def test_a_member_is_not_done_before_its_gangs_barrier_has_opened(q: Q) -> None:
    gang = q.submit_gang(2)
    first, second = q.workers(2)
    q.tick()
    early = first.take()
    with refused(WRONG_STATE, f"before the barrier of gang g{gang.id}"):
        early.complete()
    second.take()
    assert early.complete() == "done"
