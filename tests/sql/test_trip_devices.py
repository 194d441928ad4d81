"""Devices after a trip: withheld, quarantined, avoided, and tried again."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import Q, Worker, gpus
from sql.tripped import health, running, setting

# Devices ----------------------------------------------------------------------------------------------------


def test_devices_are_withheld_until_the_lease_would_have_ended_and_offered_after(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    q.later(20)
    claim.trip(exit_in_s=5)
    (held,) = q.sql("select * from gangq.device_holds")
    assert (held["kind"], held["incarnation"], held["job_id"]) == ("quarantine", claim.incarnation, None)
    assert "exiting after a trip (76)" in held["reason"]
    again = q.worker("w1", devices=gpus(8000))
    assert again.registration["withheld"] == ["G0"]
    q.live_on(99, again)
    assert q.state(claim.job_id) == "pending"
    assert again.claim() == []
    q.live_on(2, again)
    assert again.take().job_id == claim.job_id
    assert q.events("unquarantine")[0]["data"] == {"device": "G0"}


def test_devices_are_withheld_for_as_long_as_the_process_was_announced_when_that_is_longer(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=300)
    q.live_on(299)
    assert health(q) == {"G0": "exiting"}
    q.live_on(2)
    assert health(q) == {"G0": "ok"}


def test_what_is_given_back_wakes_the_worker_that_offers_it(q: Q, dsn: str) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=5)
    again = q.worker("w1", devices=gpus(8000))
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{again.incarnation}")
        Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
        assert "claim" in {n.payload for n in ear.notifies(timeout=2, stop_after=1)}


def test_a_proof_about_one_incarnation_gives_back_nothing_of_another(q: Q) -> None:
    one = running(q, "a", devices=gpus(8000, prefix="A"), gpus=1)
    one.trip(exit_in_s=60)
    two = running(q, "b", devices=gpus(8000, prefix="B"), gpus=1)
    two.trip(exit_in_s=60)
    Worker(q, "a", {"incarnation": one.incarnation}).report_dead()
    assert health(q) == {"A0": "ok", "B0": "exiting"}


def test_an_operators_quarantine_of_a_withheld_device_outlives_the_proof(q: Q) -> None:
    claim = running(q, devices=gpus(8000), gpus=1)
    claim.trip(exit_in_s=5)
    q.call("quarantine", device_uuid="G0", reason="smells")
    Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert q.sql("select health, reason from gangq.devices") == [
        {"health": "quarantined", "reason": "smells"}
    ]


@pytest.mark.parametrize("exit_in_s", [None, 5])
def test_a_device_fault_quarantines_what_is_to_blame_until_an_operator_lifts_it(
    q: Q, exit_in_s: float | None
) -> None:
    claim = running(q, devices=gpus(8000, 8000), gpus=2)
    claim.trip(85, "Xid 79", devices=["G1", "somebody else's"], exit_in_s=exit_in_s)
    assert health(q) == {"G0": "ok" if exit_in_s is None else "exiting", "G1": "quarantined"}
    assert "Xid 79" in q.value("select reason from gangq.devices where uuid = 'G1'")
    assert [e["data"]["device"] for e in q.events("quarantine")] == ["G1"]
    if exit_in_s:
        Worker(q, "w1", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "ok", "G1": "quarantined"}
    q.call("unquarantine", device_uuid="G1")
    assert health(q)["G1"] == "ok"


def test_a_device_of_another_job_cannot_be_blamed(q: Q) -> None:
    q.submit(count=2, gpus=1)
    one, two = q.worker(slots=2, devices=gpus(1, 1)).claim()
    theirs = two["devices"][0]["uuid"]
    one.trip(85, devices=[theirs])
    assert health(q)[theirs] == "ok"
    assert q.events("trip")[0]["data"]["blamed"] == [one["devices"][0]["uuid"]]
    assert two.complete() == "done"


def test_a_fault_of_the_application_quarantines_no_device(q: Q) -> None:
    claim = running(q, devices=gpus(8000, 8000), gpus=1)
    claim.trip(85, "Xid 31", evidence={"application": True, "xid": 31})
    assert health(q) == {"G0": "ok", "G1": "ok"}
    assert q.events("quarantine") == []


@pytest.mark.parametrize("code", [78, 85])
def test_the_job_never_comes_back_to_the_device_it_tripped_on(q: Q, code: int) -> None:
    q.submit(gpus=1)
    worker = q.worker(slots=2, devices=gpus(1, 2, 3))
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G0"]
    claim.trip(code, evidence={"application": True})
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G1"]
    claim.trip(code, evidence={"application": True})
    claim = worker.take()
    assert [d["uuid"] for d in claim["devices"]] == ["G2"]
    q.submit(gpus=1)
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G0"], "others may use it"


def test_another_device_of_the_worker_that_exits_is_one_that_could_take_the_job(q: Q) -> None:
    """Its next start offers it again."""
    claim = running(q, devices=gpus(1, 2), gpus=1)
    claim.trip(78, exit_in_s=5)
    assert avoided(q) == ["G0"]


def test_a_job_that_was_told_to_stop_keeps_away_from_its_device_as_well(q: Q) -> None:
    claim = running(q, devices=gpus(1, 2), gpus=1)
    assert q.one("displace_job", job_id=claim.job_id)
    assert claim.trip(78) == "pending"
    assert avoided(q) == ["G0"]


@pytest.mark.parametrize("code", [75, 76, 80, 86])
def test_other_trips_say_nothing_against_the_device(q: Q, code: int) -> None:
    q.submit(gpus=1)
    worker = q.worker(devices=gpus(1, 2))
    worker.take().trip(code)
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G0"]


def test_where_it_could_run_nowhere_else_an_idle_device_is_tried_again_up_to_the_cap(q: Q) -> None:
    """The one GPU of a small installation: a job that wedges it is to fail, not to wait for ever."""
    job = q.submit(gpus=1, max_trips=1)
    worker = q.worker(devices=gpus(1))
    worker.take().trip(78)
    assert worker.take().trip(78) == "failed"
    assert q.state(job) == "failed"


def test_a_device_that_failed_is_avoided_even_where_there_is_no_other(q: Q) -> None:
    claim = running(q, devices=gpus(1), gpus=1)
    claim.trip(85)
    worker = Worker(q, "w1", {"incarnation": claim.incarnation})
    assert worker.claim() == []
    q.sql("delete from gangq.device_holds")
    assert worker.claim() == [], "not even when somebody lifted the quarantine by hand"
    q.call("unquarantine", device_uuid="G0")
    assert worker.take().job_id == claim.job_id, (
        "unquarantine says that it may be used again, by this job too"
    )


def avoided(q: Q) -> list[str]:
    """The devices that the only live job avoids."""
    return [
        row["uuid"]
        for row in q.sql(
            "select r.uuid from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
            "join gangq.device_registry r on r.id = any (s.avoid) order by r.uuid"
        )
    ]


@pytest.mark.parametrize("how", ["retires", "drains", "is quarantined", "its device is"])
def test_the_device_it_avoids_is_good_again_when_the_other_worker_goes(q: Q, how: str) -> None:
    job = q.submit(gpus=1, vram_mb=1000)
    one = q.worker("a", devices=gpus(1000, prefix="A"))
    claim = one.take()
    other = q.worker("b", devices=gpus(1000, prefix="B"))
    claim.trip(78)
    q.tick()
    assert (avoided(q), one.claim(), q.events("unavoid")) == (["A0"], [], []), "the other could take it"
    if how in ("retires", "drains"):
        other.retire(final=how == "retires")
    elif how == "is quarantined":
        q.call("quarantine", worker="b")
    else:
        q.call("quarantine", device_uuid="B0")
    q.tick()
    (event,) = q.events("unavoid")
    assert (event["job_id"], event["data"]) == (job, {"devices": ["A0"]})
    assert one.take().job_id == job


@pytest.mark.parametrize("small", [{"memory_mb": 10}, {"cpus": 1}, {"labels": {"k": "v"}}, {"vram_mb": 2000}])
def test_a_device_on_a_worker_that_could_not_take_the_job_is_no_other(q: Q, small: dict[str, Any]) -> None:
    job = q.submit(**{"gpus": 1, "vram_mb": 1000, **small})
    one = q.worker(
        "a", devices=gpus(2000, prefix="A"), **{k: v for k, v in small.items() if k not in ("vram_mb",)}
    )
    q.worker("b", devices=gpus(1000, prefix="B"))
    one.take().trip(78)
    q.tick()
    assert one.take().job_id == job


def test_while_no_worker_could_take_it_at_all_it_goes_on_avoiding(q: Q) -> None:
    """All workers restart: whoever is back last must not find that the job went where it had tripped."""
    q.submit(gpus=1)
    one, other = (q.worker(n, devices=gpus(1, prefix=n)) for n in "ab")
    claim = one.take()
    claim.trip(78)
    one.retire()
    other.retire()
    q.tick()
    assert avoided(q) == ["a0"]
    q.worker("a", devices=gpus(1, prefix="a"))
    q.call("quarantine", worker="a")
    q.tick()
    assert avoided(q) == ["a0"]
    q.worker("b", devices=gpus(1, prefix="b"))
    q.call("unquarantine", worker="a")
    q.tick()
    assert avoided(q) == ["a0"]


def test_what_is_quarantined_stays_avoided_and_the_others_come_back(q: Q) -> None:
    job = q.submit(gpus=1, max_trips=9)
    worker = q.worker(slots=3, devices=gpus(1, 2, 3))
    worker.take().trip(85)
    worker.take().trip(78)
    assert avoided(q) == ["G0", "G1"]
    q.call("quarantine", device_uuid="G2")
    q.settle()
    assert (avoided(q), health(q)["G0"]) == (["G0"], "quarantined")
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G1"]
    assert q.state(job) == "running"


def test_a_hardware_fault_never_comes_back_by_itself(q: Q) -> None:
    running(q, devices=gpus(1), gpus=1).trip(85)
    q.live_on(100)
    assert (avoided(q), q.events("unavoid")) == (["G0"], [])


def test_a_gang_gets_back_what_it_avoids_when_it_fits_nowhere_else(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}-")) for n in range(3)]
    claims = gang.start(*workers)
    bad = claims[0]["devices"][0]["uuid"]
    claims[0].trip(78)
    claims[1].ack()
    spare = next(w for w in workers if w.incarnation not in {c.incarnation for c in claims})
    q.tick()
    assert (avoided(q), q.events("unavoid")) == ([bad, bad], [])
    spare.retire()
    used = {d["uuid"] for c in gang.restart(*workers[:2]) for d in c["devices"]}
    assert bad in used
    assert [(e["gang_id"], e["data"]) for e in q.events("unavoid")] == [(gang.id, {"devices": [bad]})]


def test_what_somebody_holds_locked_gets_its_device_back_a_tick_later(q: Q, dsn: str) -> None:
    job = q.submit(gpus=1)
    one, other = (q.worker(n, devices=gpus(1, prefix=n)) for n in "ab")
    one.take().trip(78)
    other.retire()
    with psycopg.connect(dsn) as third:
        third.execute("select 1 from gangq.live_jobs for update")
        assert q.one("tick", force=True)["detail"]["lift_avoided"] == 0, "it waits for nobody"
        assert avoided(q) == ["a0"]
    q.tick()
    assert one.take().job_id == job


def test_a_place_is_opened_on_the_worker_that_may_take_the_job_again(q: Q) -> None:
    job = q.submit(gpus=1)
    one = q.worker("a", devices=gpus(1, prefix="a"))
    claim = one.take()
    other = q.worker("b", devices=gpus(1, prefix="b"))
    claim.trip(78)
    assert one.claim() == []
    other.retire()
    q.tick()
    assert q.sql("select worker from gangq.places_open") == [{"worker": "a"}]
    assert one.take().job_id == job


def test_whoever_asks_is_told_what_to_do_about_an_avoided_device(q: Q) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(slots=2, devices=gpus(1, 2, 3))
    worker.take().trip(85, "Xid 79")
    worker.take().trip(78)
    (said,) = [r["detail"] for r in q.call("explain_job", job_id=job) if r["gate"] == "avoids"]
    fault, idle = said.split("; avoids ")
    assert "G0 (host-w1)" in fault
    assert "Xid 79" in fault
    assert "gangq.unquarantine('G0')" in fault
    assert "G1 (host-w1)" in idle
    assert "a tick lets it back when no other could take it" in idle
    assert "gangq.unquarantine('G1')" in idle


def test_unquarantine_of_one_device_leaves_the_others_avoided(q: Q) -> None:
    q.submit(gpus=1)
    worker = q.worker(devices=gpus(1, 2))
    worker.take().trip(85)
    worker.take().trip(85)
    q.call("unquarantine", device_uuid="G1")
    assert [d["uuid"] for d in worker.take()["devices"]] == ["G1"]
    assert q.value("select avoid from gangq.shapes order by id desc limit 1") is not None


@pytest.mark.parametrize("code", [78, 85])
def test_a_gang_keeps_away_from_its_culprits_device_as_a_whole(q: Q, code: int) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}-")) for n in range(3)]
    one, two = gang.start(*workers)
    bad = one["devices"][0]["uuid"]
    one.trip(code)
    two.ack()
    claims = gang.restart(*workers)
    used = {d["uuid"] for c in claims for d in c["devices"]}
    assert len(used) == 2
    assert bad not in used
    q.call("unquarantine", device_uuid=bad)
    assert q.sql("select s.avoid from gangq.live_gangs g join gangq.shapes s on s.id = g.shape_id") == [
        {"avoid": None}
    ]


def test_a_gang_that_ends_by_its_trip_keeps_away_from_that_device_when_it_is_retried(q: Q) -> None:
    gang, worker = q.submit_gang(1, gpus=1, failure_policy="fail"), q.worker(devices=gpus(1))
    gang.start(worker)[0].trip(85)
    assert gang.state == "failed"
    q.call("retry", gang_ids=[gang.id])
    assert avoided(q) == ["G0"]


def test_a_job_that_fails_by_its_last_trip_keeps_away_from_that_device_when_it_is_retried(q: Q) -> None:
    job = q.submit(gpus=1, max_trips=1)
    worker = q.worker(devices=gpus(1, 2, 3))
    for _ in range(2):
        worker.take().trip(85, evidence={"application": True})
    assert q.state(job) == "failed"
    q.call("retry", job_ids=[job])
    assert avoided(q) == ["G0", "G1"]


def test_a_submission_never_gets_a_shape_that_avoids(q: Q) -> None:
    q.submit(gpus=1)
    assert q.value("select gangq.shape_avoiding(id, array[1]) <> id from gangq.shapes")
    fresh = q.submit(gpus=1)
    avoid = q.value(
        "select s.avoid from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.id = %(i)s",
        i=fresh,
    )
    assert avoid is None


def trips_on(q: Q, count: int, code: int = 76, same: bool = False, **named: Any) -> None:
    """Trips of that many jobs on device G0, one after the other, all of one host."""
    worker = q.worker(devices=gpus(1))
    for _ in range(count):
        if not same or not q.sql("select 1 from gangq.live_jobs"):
            q.submit(gpus=1, max_trips=9)
        claim = worker.take()
        claim.trip(code, **named)
        if not same:
            q.call("cancel", job_ids=[claim.job_id])
    worker.retire()


def test_a_device_is_quarantined_at_the_third_different_job_that_trips_on_it(q: Q) -> None:
    trips_on(q, 2)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 2)
    trips_on(q, 1)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "quarantined"}, 3)
    assert "3 different jobs tripped on it" in q.value("select reason from gangq.devices")
    assert len(q.events("quarantine")) == 1


def test_it_stays_quarantined_though_its_worker_is_proven_gone(q: Q) -> None:
    trips_on(q, 2)
    claim = running(q, "w2", devices=gpus(1), gpus=1)
    claim.trip(exit_in_s=5)
    assert health(q) == {"G0": "quarantined"}
    Worker(q, "w2", {"incarnation": claim.incarnation}).report_dead()
    q.live_on(300)
    assert health(q) == {"G0": "quarantined"}


def test_the_number_is_a_setting(q: Q) -> None:
    setting(q, device_trips=1)
    trips_on(q, 1)
    assert health(q) == {"G0": "quarantined"}


def test_one_job_that_trips_over_and_over_does_not_cost_the_device(q: Q) -> None:
    trips_on(q, 5, same=True)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 1)


@pytest.mark.parametrize("code", [75, 86])
def test_budgets_and_memory_do_not_count_against_a_device(q: Q, code: int) -> None:
    trips_on(q, 4, code)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 0)


def test_faults_of_applications_do_not_count_against_a_device(q: Q) -> None:
    trips_on(q, 4, 85, evidence={"application": True})
    assert health(q) == {"G0": "ok"}


def test_trips_of_more_than_a_day_ago_do_not_count(q: Q) -> None:
    trips_on(q, 2)
    q.later(86400)
    trips_on(q, 2)
    assert (health(q), q.value("select trips_day from gangq.devices")) == ({"G0": "ok"}, 2)


def test_a_job_that_trips_on_two_hosts_is_called_poison_once_and_counts_against_no_device(q: Q) -> None:
    job = q.submit(gpus=1, max_trips=5)
    for n, host in enumerate(("h1", "h1", "h2", "h3")):
        worker = q.worker(f"w{n}", host=host, devices=gpus(1, prefix=host))
        worker.take().trip()
        worker.retire()
        q.later(61)  # or the brake would hold the third
        assert len(q.events("poison")) == (0 if n < 2 else 1)
    (event,) = q.events("poison")
    assert (event["job_id"], event["data"]["hosts"]) == (job, ["h1", "h2"])
    assert {r["poison"] for r in q.sql("select poison from gangq.trips")} == {True}
    assert {r["trips_day"] for r in q.sql("select trips_day from gangq.devices")} == {0}
    assert q.state(job) == "pending", "only called so: the cap decides"


def test_the_trip_that_shows_that_a_job_is_poison_counts_against_no_device(q: Q) -> None:
    setting(q, device_trips=2)
    trips_on(q, 1)
    q.submit(gpus=1)
    elsewhere = q.worker("w2", devices=gpus(1, prefix="D"))
    elsewhere.take().trip()
    elsewhere.retire()
    q.worker(devices=gpus(1)).take().trip()
    assert len(q.events("poison")) == 1
    assert health(q)["G0"] == "ok"
