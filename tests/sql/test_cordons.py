"""Cordons and drains: what is taken out of service by name is given nothing new, and is left in the end."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sql.drive import INVALID, MISSING, PLACED, Q, Row, gpus, refused


def soon(q: Q, seconds: float = 1800) -> object:
    """A moment of the database's clock."""
    return q.clock.now() + timedelta(seconds=seconds)


def cordoned(q: Q, name: str) -> Row:
    rows = q.sql("select * from gangq.cordoned where name = %(name)s", name=name)
    assert len(rows) == 1, rows
    return rows[0]


# What is given nothing new ----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{"host": "h1"}, {"worker": "w1"}])
def test_a_cordoned_worker_is_given_no_job_and_no_member_until_it_is_uncordoned(
    q: Q, named: dict[str, str]
) -> None:
    w1 = q.worker("w1", host="h1")
    q.call("cordon", **named, reason="kernel update")
    job, gang = q.submit(), q.submit_gang(1)
    assert w1.claim() == []
    q.tick()
    assert gang.state == "blocked"
    assert q.value("select cordoned from gangq.workers") == "kernel update"
    assert q.value("select cordoned from gangq.capacity where queue = 'default'") == 1
    q.call("uncordon", **named)
    assert q.value("select cordoned from gangq.workers") is None
    assert q.value("select cordoned from gangq.capacity where queue = 'default'") == 0
    q.call("set_priority", priority=5, job_ids=[job])
    assert w1.take().job_id == job


def test_other_workers_of_the_host_and_other_hosts_are_not_meant(q: Q) -> None:
    w1, w2, w3 = q.worker("w1", host="h1"), q.worker("w2", host="h1"), q.worker("h1", host="h2")
    q.submit(count=5)
    q.call("cordon", worker="w1")
    assert [len(w.claim(1)) for w in (w1, w2, w3)] == [0, 1, 1]
    q.call("cordon", host="h1")
    for name in ("w2", "h1"):
        q.sql("update gangq.incarnations set slots = 2, light = 2 where name = %(name)s", name=name)
    assert [len(w.claim(1)) for w in (w1, w2, w3)] == [0, 0, 1]


def test_a_cordon_outlives_the_restart_of_a_worker_and_covers_new_ones_of_the_host(q: Q) -> None:
    q.worker("w1", host="h1").retire()
    q.call("cordon", host="h1")
    q.submit()
    assert q.worker("w1", host="h1").claim() == []
    assert q.worker("new", host="h1").claim() == []
    assert len(q.worker("w2", host="h2").claim()) == 1


def test_a_worker_stays_cordoned_while_its_host_is(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    q.submit()
    q.call("cordon", host="h1")
    q.call("cordon", worker="w1")
    q.call("uncordon", worker="w1")
    assert w1.claim() == []
    q.call("uncordon", host="h1")
    assert len(w1.claim()) == 1


def test_what_runs_on_a_cordoned_host_goes_on_and_a_reserved_member_is_claimed(q: Q) -> None:
    w1, w2 = q.worker("w1", host="h1"), q.worker("w2", host="h2")
    q.submit()
    solo = w1.take()
    gang = q.submit_gang(2)
    q.tick()
    assert gang.state == "reserved"
    q.call("cordon", host="h1")
    q.later(5)
    assert [len(w1.claim()), len(w2.claim())] == [1, 1]
    assert gang.state == "running"
    assert set(w1.beat(solo).values()) == {"continue"}
    assert cordoned(q, "h1") == cordoned(q, "h1") | {
        "state": "cordoned",
        "gangs": [gang.id],
        "jobs": [solo.job_id],
        "workers": 1,
        "drain": False,
    }


def test_a_cordoned_worker_is_not_put_on_the_list_of_those_to_wake(q: Q) -> None:
    """It would be woken for work that it may not take, in the place of one that may."""
    w1, w2 = q.worker("w1", host="h1"), q.worker("w2", host="h2")
    assert w1.claim(sleep=True) == []
    q.call("cordon", host="h1")
    assert q.sql("select * from gangq.sleepers") == []
    assert w2.claim(sleep=True) == w1.claim(sleep=True) == []
    assert [row["incarnation"] for row in q.sql("select * from gangq.sleepers")] == [w2.incarnation]


def test_explain_counts_the_cordoned_and_says_when_they_are_what_is_missing(q: Q) -> None:
    q.workers(2)
    q.call("quarantine", worker="w2", reason="odd")
    for host in ("host-w1", "host-w2"):
        q.call("cordon", host=host)
    job = q.submit()
    (gate,) = [g for g in q.call("explain_job", job_id=job) if g["gate"] == "workers"]
    assert not gate["ok"]
    assert gate["numbers"]["others"] == {"cordoned": 1, "quarantined": 1}
    assert "1 cordoned, 1 quarantined" in gate["detail"]
    q.call("uncordon", host="host-w1")
    (gate,) = [g for g in q.call("explain_job", job_id=job) if g["gate"] == "workers"]
    assert gate["ok"]


# The verbs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["cordon", "uncordon"])
def test_a_host_or_a_worker_nobody_has_heard_of_is_refused_with_the_names_like_it(q: Q, verb: str) -> None:
    for number in (1, 2, 17):
        q.worker(f"render-{number}", host=f"gpu-host-{number:02d}")
    with refused(MISSING, "gpu-host-17"):
        q.call(verb, host="gpuhost17")
    with refused(MISSING, "render-2"):
        q.call(verb, worker="rendr-2")
    with refused(MISSING, "'zzz' does not exist") as error:
        q.call(verb, host="zzz")
    assert error.value.diag.message_primary == "host 'zzz' does not exist"
    with refused(MISSING):
        q.call(verb, host="render-1")


@pytest.mark.parametrize("verb", ["cordon", "uncordon"])
def test_one_of_host_and_worker_is_named(q: Q, verb: str) -> None:
    q.worker("w1", host="w1")
    for named in ({}, {"host": "w1", "worker": "w1"}):
        with refused(INVALID):
            q.call(verb, **named)


def test_a_deadline_is_in_the_future_and_that_of_a_drain(q: Q) -> None:
    q.worker("w1", host="h1")
    for deadline in (soon(q, 0), soon(q, -1), "-infinity"):
        with refused(INVALID, "has passed"):
            q.call("cordon", host="h1", drain=True, deadline=deadline)
    with refused(INVALID, "drain"):
        q.call("cordon", host="h1", deadline=soon(q))
    assert q.sql("select * from gangq.cordons") == []


def test_repeats_are_harmless_and_leave_one_event_each(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    for _ in range(3):
        q.call("cordon", host="h1", reason="fan")
        q.call("cordon", worker="w1")
    for _ in range(3):
        q.call("uncordon", host="h1")
        q.call("uncordon", worker="w1")
    told = [(e["kind"], e["worker"], e["reason"]) for e in q.events() if "cordon" in e["kind"]]
    assert told == [
        ("cordon", None, "fan"),
        ("cordon", "w1", "operator"),
        ("uncordon", None, "fan"),
        ("uncordon", "w1", "operator"),
    ]
    assert q.events("cordon")[0]["data"]["host"] == "h1"
    assert q.events("cordon")[1]["incarnation"] == w1.incarnation


def test_what_a_repeat_leaves_out_stays_as_it_was(q: Q) -> None:
    q.worker("w1", host="h1")
    deadline = soon(q)
    q.call("cordon", host="h1", reason="fan")
    since = cordoned(q, "h1")["since"]
    q.later(5)
    q.call("cordon", host="h1", drain=True, deadline=deadline)
    for again in ({}, {"drain": True}, {"drain": False}):
        q.call("cordon", host="h1", **again)
        row = cordoned(q, "h1")
        assert (row["drain"], row["deadline"], row["reason"], row["since"]) == (True, deadline, "fan", since)
    q.call("cordon", host="h1", reason="disk")
    row = cordoned(q, "h1")
    assert (row["drain"], row["deadline"], row["reason"], row["since"]) == (True, deadline, "disk", since)
    q.call("cordon", host="h1", drain=True, deadline="infinity")
    row = cordoned(q, "h1")
    assert (row["drain"], row["deadline"], row["reason"]) == (True, None, "disk")
    assert len(q.events("cordon")) == 4


def test_a_cordon_of_a_worker_long_forgotten_can_be_lifted(q: Q) -> None:
    q.worker("w1", host="h1").retire()
    q.call("cordon", host="h1")
    q.sql("delete from gangq.device_claimants")
    q.sql("delete from gangq.leases")
    q.sql("delete from gangq.incarnations")
    assert cordoned(q, "h1")["workers"] == 0
    q.call("cordon", host="h1", reason="still broken")
    q.call("uncordon", host="h1")
    assert q.sql("select * from gangq.cordons") == []


# Drains -----------------------------------------------------------------------------------------------------


def test_at_its_deadline_a_drain_tells_gangs_to_stop_as_a_whole_and_solo_jobs_each(q: Q) -> None:
    w1, w2 = q.worker("w1", host="h1"), q.worker("w2", host="h2", slots=2)
    gang = q.submit_gang(2)
    q.submit()
    solo = w1.take()
    assert q.one("reserve_gang", gang_id=gang.id, incarnations=[w1.incarnation, w2.incarnation])
    claims = gang.claimed_by(w1, w2)
    assert gang.state == "running"
    q.submit(**PLACED)
    elsewhere = w2.take()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 60), reason="new fans")
    q.live_on(55, w1, w2)
    assert gang.state == "running"
    assert cordoned(q, "h1")["state"] == "draining"
    q.live_on(10, w1, w2)
    assert gang.state == "draining"
    assert w1.beat(solo) == {solo.job_id: "preempt", claims[0].job_id: "preempt"}
    assert w2.beat(claims[1], elsewhere) == {claims[1].job_id: "preempt", elsewhere.job_id: "continue"}
    assert q.events("drain")[0]["reason"] == "host h1 is drained: new fans"
    assert {row["reason"] for row in q.events("move")} == {"host h1 is drained: new fans"}
    assert [claims[0].ack(), claims[1].ack(), solo.ack()] == ["preempted", "preempted", "pending"]
    assert cordoned(q, "h1") == cordoned(q, "h1") | {"state": "drained", "gangs": [], "jobs": []}
    assert [(row["attempts"], row["stops"]) for row in gang.members] == [(0, 0), (0, 0)]
    assert (q.job(solo.job_id)["attempts"], q.job(solo.job_id)["stops"]) == (0, 0)
    # Nothing comes back to it, and what fits elsewhere runs there.
    assert w1.claim() == []
    assert [c.job_id for c in w2.claim(1)] == [solo.job_id]


@pytest.mark.parametrize(("exit_in_s", "state"), [(None, "pending"), (2.0, "scheduled")])
def test_a_watchdog_that_ends_a_job_which_is_moved_away_charges_it_no_stop(
    q: Q, exit_in_s: float | None, state: str
) -> None:
    worker = q.worker("w1", host="h1")
    q.submit()
    claim = worker.take()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 20))
    q.live_on(30, worker)
    assert q.state(claim.job_id) == "preempting"
    assert claim.trip(79, "it does not stop", exit_in_s=exit_in_s) == state
    job = q.job(claim.job_id)
    assert (job["attempts"], job["trips"], job["stops"]) == (0, 0, 0)


def test_a_reservation_on_a_host_that_is_left_by_now_is_taken_back(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    gang = q.submit_gang(1, claim_deadline_s=600)
    q.tick()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 20))
    q.live_on(30, w1)
    assert gang.state == "blocked"
    assert gang.live["preemptions"] == 0
    assert cordoned(q, "h1")["state"] == "drained"


def test_without_a_deadline_nothing_is_told_to_stop(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    q.submit()
    claim = w1.take()
    q.call("cordon", host="h1", drain=True)
    q.live_on(3600, w1, step=60)
    assert q.state(claim.job_id) == "running"
    claim.complete()
    assert cordoned(q, "h1")["state"] == "drained"


def test_a_drain_waits_for_nobody_who_holds_a_job(q: Q, dsn: str) -> None:
    w1 = q.worker("w1", host="h1", slots=2)
    ids = q.submit(count=2)
    w1.claim()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 1))
    q.later(2)
    with q.connected(dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.live_jobs where id = %(id)s for update", id=ids[0])
        assert q.value("select gangq.move_away()") == 1
    assert [q.state(i) for i in ids] == ["running", "preempting"]
    assert q.value("select gangq.move_away()") == 1
    assert q.value("select gangq.move_away()") == 0


def test_uncordon_ends_a_drain(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    q.submit()
    claim = w1.take()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 20))
    q.call("uncordon", host="h1")
    q.live_on(60, w1)
    assert q.state(claim.job_id) == "running"


# A solo job is told to stop ---------------------------------------------------------------------------------


def test_a_displaced_job_keeps_attempt_and_checkpoint_and_comes_back_in_its_old_place(q: Q) -> None:
    w1 = q.worker("w1", devices=gpus(1000))
    first = q.submit(gpus=1)
    claim = w1.take()
    q.submit(gpus=1)
    assert q.one("displace_job", job_id=first, reason="room for g7") is True
    assert q.one("displace_job", job_id=first) is False
    assert q.events("preempt", job_id=first)[0]["reason"] == "room for g7"
    assert w1.beat(claim) == {first: "preempt"}
    claim.save(7)
    assert w1.free["device_ids"] == []
    assert claim.ack() == "pending"
    row = q.job(first)
    assert (row["attempts"], row["stops"], row["stop_reason"]) == (0, 1, None)
    again = w1.take()
    assert (again.job_id, again["checkpoint_step"]) == (first, 7)


def test_what_a_displaced_job_does_meanwhile_counts_as_it_ends(q: Q) -> None:
    w1 = q.worker("w1", slots=4)
    ids = q.submit(count=4)
    claims = {c.job_id: c for c in w1.claim()}
    for job in ids:
        q.call("displace_job", job_id=job)
    assert claims[ids[0]].complete() == "done"
    assert claims[ids[1]].fail() == "pending"
    assert claims[ids[2]].trip() == "pending"
    assert q.one("cancel", job_ids=[ids[3]])["state"] == "preempting"
    assert claims[ids[3]].ack() == "cancelled"
    assert [q.job(i)["attempts"] for i in ids[1:3]] == [0, 0]
    assert q.events("trip")[0]["data"]["outcome"] == "pending"


def test_a_displaced_job_whose_worker_does_not_stop_waits_until_that_process_is_gone(q: Q) -> None:
    """The worker trips with 79 and exits within seconds: not beside its successor."""
    w1, w2 = q.worker("w1"), q.worker("w2")
    job = q.submit()
    claim = w1.take()
    q.call("displace_job", job_id=job)
    assert claim.trip(code=79, exit_in_s=8) == "scheduled"
    assert q.events("trip")[0]["data"]["outcome"] == "scheduled"
    assert w2.claim() == []
    q.later(4)
    q.tick()
    assert w2.claim() == []
    q.later(5)
    q.tick()
    assert w2.take().job_id == job
    assert q.job(job)["attempts"] == 1


def test_a_moved_job_whose_worker_trips_instead_of_stopping_is_not_charged_a_stop(q: Q) -> None:
    w1 = q.worker("w1", host="h1")
    job = q.submit()
    claim = w1.take()
    q.call("cordon", host="h1", drain=True, deadline=soon(q, 1))
    q.later(2)
    assert q.value("select gangq.move_away()") == 1
    assert claim.trip(code=79, exit_in_s=8) == "scheduled"
    assert (q.job(job)["stops"], q.job(job)["attempts"]) == (0, 0)


def test_proof_of_death_frees_a_displaced_job_before_that(q: Q) -> None:
    w1, w2 = q.worker("w1"), q.worker("w2")
    job = q.submit()
    claim = w1.take()
    q.call("displace_job", job_id=job)
    claim.trip(code=79, exit_in_s=8)
    assert w1.report_dead() == 1
    assert w2.take().job_id == job


def test_a_displaced_job_whose_worker_is_lost_is_pending_again_and_charged_no_crash(q: Q) -> None:
    w1 = q.worker("w1")
    job = q.submit()
    w1.take()
    q.call("displace_job", job_id=job)
    assert w1.report_dead() == 1
    assert (q.state(job), q.job(job)["crashes"]) == ("pending", 0)


def test_only_a_running_solo_job_is_displaced(q: Q) -> None:
    job, gang = q.submit(), q.submit_gang(1)
    assert q.one("displace_job", job_id=job) is False
    assert q.state(job) == "pending"
    with refused(INVALID, f"gang g{gang.id}"):
        q.call("displace_job", job_id=gang.job_ids[0])
    with refused(MISSING, "999"):
        q.call("displace_job", job_id=999)
