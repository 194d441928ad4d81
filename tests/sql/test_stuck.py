"""Processes that nothing can kill; and the clients, which speak the same verbs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, Claim, Q, Worker, gpus, refused
from sql.tripped import health, running, tripping

# A process that nothing can kill ----------------------------------------------------------------------------


def stuck(q: Q, claim: Claim, name: str = "w1", **evidence: Any) -> int:
    evidence = evidence or {"pid": 4711, "state": "D"}
    return int(q.one("report_stuck", worker=name, incarnation=claim.incarnation, evidence=evidence))


def test_a_stuck_process_keeps_everything_until_its_lease_ends_and_the_devices_for_good(q: Q) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    assert stuck(q, claim) == 1
    (row,) = q.sql("select * from gangq.workers")
    assert (row["reboot_needed"], row["state"]) == (True, "live")
    assert row["quarantined"] == "process 4711 cannot be killed: reboot host host-w1"
    assert (q.state(claim.job_id), q.value("select count(*) from gangq.device_holds")) == ("running", 1)
    q.live_on(119)
    assert q.state(claim.job_id) == "running", "nothing is freed early"
    q.live_on(2)
    assert q.state(claim.job_id) == "pending"
    assert health(q) == {"G0": "quarantined", "G1": "ok"}
    assert "4711" in q.value("select reason from gangq.devices where uuid = 'G0'")
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "quarantined", "G1": "ok"}, "until an operator lifts it"
    (event,) = q.events("stuck")
    assert (event["incarnation"], event["data"]["devices"]) == (claim.incarnation, ["G0"])


def test_a_worker_with_a_stuck_process_takes_nothing_under_its_name_until_it_is_unquarantined(q: Q) -> None:
    claim = running(q)
    stuck(q, claim)
    q.submit()
    q.live_on(130)
    again = q.worker("w1")
    assert again.claim() == []
    assert q.worker("w2").take()
    q.call("unquarantine", worker="w1")
    assert again.take()


def test_a_stuck_process_found_after_its_trip_keeps_its_devices_and_its_job_until_the_lease_is_over(
    q: Q,
) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    claim.trip(exit_in_s=5)
    assert stuck(q, claim) == 1
    q.live_on(10)
    assert q.state(claim.job_id) == "scheduled", "it was to be gone by now, and is not"
    assert q.call("unproven", worker="w1")[0]["incarnation"] == claim.incarnation
    q.live_on(111)
    assert (q.state(claim.job_id), health(q)) == ("pending", {"G0": "quarantined"})
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    assert health(q) == {"G0": "quarantined"}


@pytest.mark.parametrize("how", ["its lease ended", "it tripped", "it retired"])
def test_a_stuck_process_found_after_its_devices_were_given_back_takes_them_all(q: Q, how: str) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    if how == "it tripped":
        claim.trip(exit_in_s=5)
    elif how == "it retired":
        Worker(q, "w1", {"incarnation": claim.incarnation}).retire()
    q.live_on(130)
    assert (q.state(claim.job_id), health(q)) == ("pending", {"G0": "ok", "G1": "ok"})
    assert stuck(q, claim) == 2, "which of them it holds nobody knows any more"
    assert health(q) == {"G0": "quarantined", "G1": "quarantined"}
    assert {r["reason"] for r in q.sql("select reason from gangq.devices")} == {
        "process 4711 cannot be killed: reboot host host-w1"
    }
    assert q.worker("w2", devices=gpus(1, 2)).claim() == []
    assert q.events("stuck")[0]["data"]["devices"] == ["G0", "G1"]
    assert stuck(q, claim) == 2
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert set(health(q).values()) == {"quarantined"}, "until an operator lifts it"
    q.call("unquarantine", device_uuid="G0")
    assert health(q)["G0"] == "ok"


def test_a_trip_whose_devices_are_withheld_still_takes_no_more_than_those(q: Q) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    claim.trip(exit_in_s=5)
    q.live_on(20)
    q.call("keep_partitions", at_once=True)  # Which forgets leases that are over.
    assert stuck(q, claim) == 1
    assert health(q) == {"G0": "quarantined", "G1": "ok"}


def test_devices_that_another_job_holds_by_now_are_named_and_left_to_it(q: Q) -> None:
    said: list[str] = []
    q.db.add_notice_handler(lambda note: said.append(str(note.message_primary)))
    claim = running(q, devices=gpus(1, 2), gpus=1)
    q.live_on(130)
    theirs = tripping(q, claim.job_id, "w2", devices=gpus(1, 2))
    assert stuck(q, claim) == 1
    assert health(q) == {"G0": "ok", "G1": "quarantined"}
    assert theirs.complete() == "done"
    (event,) = q.events("stuck")
    assert event["data"]["held_by_others"] == [{"device": "G0", "job_id": claim.job_id, "worker": "w2"}]
    (line,) = [text for text in said if "UNKILLABLE" in text]
    assert f"device G0 by now (job {claim.job_id} of worker w2)" in line
    assert "gangq.quarantine('G0')" in line


def test_what_another_trip_withholds_for_a_while_is_then_kept_for_good(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    q.live_on(130)
    tripping(q, claim.job_id, "w2", devices=gpus(1)).trip(exit_in_s=5)
    assert health(q) == {"G0": "exiting"}
    assert stuck(q, claim) == 1
    q.live_on(300)
    assert health(q) == {"G0": "quarantined"}


def test_what_an_operator_has_quarantined_stays_quarantined_for_his_reason(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    q.live_on(130)
    q.call("quarantine", device_uuid="G0", reason="a fan is loud")
    assert stuck(q, claim) == 0
    assert q.value("select reason from gangq.devices") == "a fan is loud"


def test_a_claim_of_one_of_the_devices_waits_for_the_report(q: Q, dsn: str) -> None:
    """It had seen the device free: without the lock on its worker it would collide on the key."""
    claim = running(q, devices=gpus(1), gpus=1)
    q.live_on(130)
    taker = q.worker("w2", devices=gpus(1))
    with psycopg.connect(dsn) as third, ThreadPoolExecutor(1) as pool:
        third.execute("select gangq.report_stuck('w1', %s, %s)", [claim.incarnation, '{"pid": 1}'])
        got = pool.submit(taker.claim)
        while not third.execute("select 1 from pg_locks where not granted").fetchone():
            assert not got.done(), got.result()
        third.commit()
        assert got.result() == []


def test_a_gang_that_somebody_holds_open_delays_the_report_by_half_a_second(q: Q, dsn: str) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    one, _ = gang.start(a, b)
    one.trip(exit_in_s=3)
    assert gang.state == "draining"
    with psycopg.connect(dsn) as frozen:
        frozen.execute("select from gangq.live_gangs where id = %s for update", [gang.id])
        started = time.monotonic()
        stuck(q, one)
        assert 0.4 < time.monotonic() - started < 1.9, "then it gives up on it"
    assert q.sql("select reboot_needed from gangq.workers where name = 'w1'") == [{"reboot_needed": True}]


@pytest.mark.parametrize("drained", ["before", "after"])
def test_a_gang_does_not_start_before_the_lease_of_a_member_that_cannot_be_killed_is_over(
    q: Q, drained: str
) -> None:
    q.call("set_queue", name="default", backoff_s=0.01)
    gang, (a, b, c) = q.submit_gang(2), q.workers(3)
    one, two = gang.start(a, b, c)
    ends = q.value("select expires_at from gangq.leases where incarnation = %(i)s", i=one.incarnation)
    one.trip(exit_in_s=3)
    if drained == "before":
        two.ack()
    stuck(q, one, q.value("select name from gangq.incarnations where id = %(i)s", i=one.incarnation))
    if drained == "after":
        two.ack()
    assert gang.state == "blocked"
    assert gang.live["not_before"] == ends


def test_gangs_that_back_off_for_longer_or_ran_elsewhere_keep_their_time(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=900, backoff_max_s=900)
    first, (a, b) = q.submit_gang(1), q.workers(2)
    (claim,) = first.start(a, b)
    other = q.submit_gang(1, due_at=q.value("select gangq.now() + interval '20 s'"))
    claim.trip(exit_in_s=3)
    before = first.live["not_before"], other.live["not_before"]
    stuck(q, claim, q.value("select name from gangq.incarnations where id = %(i)s", i=claim.incarnation))
    assert (first.live["not_before"], other.live["not_before"]) == before


def test_a_gang_that_had_left_the_worker_before_it_tripped_keeps_its_time(q: Q) -> None:
    q.call("set_queue", name="default", backoff_s=1, backoff_max_s=1)
    worker = q.worker(slots=2)
    gang, (member,) = q.running_gang(worker)
    q.submit()
    claim = worker.take()
    member.fail()
    before = gang.live["not_before"]
    claim.trip(exit_in_s=30)
    stuck(q, claim)
    assert gang.live["not_before"] == before


def test_members_of_a_stuck_worker_leave_their_devices_in_quarantine(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    a, b = q.worker("a", devices=gpus(1, prefix="A")), q.worker("b", devices=gpus(1, prefix="B"))
    claims = {c.incarnation: c for c in gang.start(a, b)}
    stuck(q, claims[a.incarnation], "a")
    q.live_on(125, b)
    assert gang.state == "draining"
    claims[b.incarnation].ack()
    assert health(q) == {"A0": "quarantined", "B0": "ok"}


def test_a_stuck_report_repeated_is_harmless_and_one_that_makes_no_sense_is_refused(q: Q) -> None:
    claim = running(q)
    for evidence in (None, {}, [], "sure"):
        with refused(INVALID, "evidence"):
            q.call("report_stuck", worker="w1", incarnation=claim.incarnation, evidence=evidence)
    for name, incarnation in (("w2", claim.incarnation), ("w1", 99), ("w1", None)):
        with refused(MISSING):
            q.call("report_stuck", worker=name, incarnation=incarnation, evidence={"pid": 1})
    assert (stuck(q, claim), stuck(q, claim)) == (0, 0)
    assert len(q.events("stuck")) == 1


# The client library says the same ---------------------------------------------------------------------------


def test_the_clients_of_both_kinds_speak_these_verbs(q: Q, client: Any) -> None:
    job, worker = q.submit(gpus=1), q.worker(devices=gpus(1))
    claim = worker.take()
    assert (
        client.suspect(
            incarnation=worker.incarnation, job_id=job, token=claim.token, class_="stall", evidence={"n": 1}
        )
        == "noted"
    )
    assert (
        client.trip(
            incarnation=worker.incarnation,
            job_id=job,
            token=claim.token,
            code=78,
            error={"type": "Idle"},
            evidence={"n": 2},
            devices=["G0"],
            exit_in_s=5,
        )
        == "scheduled"
    )
    (left,) = client.unproven(worker="w1")
    assert (left.incarnation, left.exit_code) == (worker.incarnation, 78)
    (row,) = client.trips(job_id=job)
    assert (row.code, row.class_, row.devices, row.evidence) == (78, "health", ["G0"], {"n": 2})
    assert [e.kind for e in client.evidence(job_id=job)] == ["suspect", "trip"]
    assert client.devices()[0].health == "exiting"
    assert client.workers()[0].exit_code == 78
    assert client.report_stuck(worker="w1", incarnation=worker.incarnation, evidence={"pid": 1}) == 1
    assert client.workers()[0].reboot_needed is True
    assert client.report_dead(worker="w1", incarnation=worker.incarnation, evidence={"by": "t"}) == 1
    assert client.flagged() == []
    assert client.bounce(incarnation=worker.incarnation, host="elsewhere") == "unknown"
    client.bounced(incarnation=worker.incarnation, ok=False, detail={"why": "test"})
    assert client.jobs()[0].model is None
