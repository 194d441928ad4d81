"""Workers: register, heartbeat, retire, proof of death, quarantine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sql.drive import ENDED, INVALID, MISSING, NAME_TAKEN, STALE, WRONG_STATE, Q, gpus, refused

DEAD = {"by": "test", "checked": "all gone"}


# Registering ------------------------------------------------------------------------------------------------


def test_a_worker_registers_and_is_told_the_installations_numbers(q: Q) -> None:
    q.call("configure", lease_s=100, grace_s=7)
    worker = q.worker(
        "a", host="h1", memory_mb=1000, cpus=2, labels={"gpu": "h100"}, pid=42, devices=gpus(8000)
    )
    told = worker.registration
    assert (told["lease_granted_s"], told["grace_s"], told["heartbeat_s"]) == (100, 7, 5)
    assert (told["log_bytes"], told["checkpoint_bytes"]) == (1048576, 1048576)
    assert told["withheld"] == []
    row = q.sql("select * from gangq.workers")[0]
    assert (row["name"], row["host"], row["state"], row["pid"], row["gpus"]) == ("a", "h1", "live", 42, 1)
    assert (row["lease_left_s"], row["silent_s"], row["used_slots"]) == (100, 0, 0)


def test_a_worker_may_choose_its_own_lease(q: Q) -> None:
    assert q.worker("a", lease_s=36).registration["lease_granted_s"] == 36
    q.call("configure", grace_s=20)
    for too_short in (5, 28, 40):
        with refused(INVALID, f"a lease of {too_short} s is too short") as caught:
            q.worker("b", lease_s=too_short)
        assert "longer than 40 s" in str(caught.value)  # type: ignore[attr-defined]
    assert q.worker("b", lease_s=41).registration["lease_granted_s"] == 41


def test_incarnations_are_never_reused(q: Q) -> None:
    first = q.worker("a")
    first.retire()
    assert q.worker("a").incarnation > first.incarnation


def test_registering_a_live_name_again_is_refused_with_what_proves_it_dead(q: Q) -> None:
    first = q.worker("a", host="h1", boot_id="boot", pid=7, identity={"start": 99})
    q.later(3)
    with refused(NAME_TAKEN, "worker 'a'") as caught:
        q.worker("a", host="h2")
    detail = json.loads(caught.value.diag.message_detail or "")  # type: ignore[attr-defined]
    assert detail == {
        "incarnation": first.incarnation,
        "host": "h1",
        "boot_id": "boot",
        "pid": 7,
        "identity": {"start": 99},
        "silent_s": 3,
        "lease_left_s": 117,
    }
    assert q.call("report_dead", worker="a", incarnation=detail["incarnation"], evidence=DEAD)
    assert q.worker("a", host="h2").incarnation > first.incarnation


def test_a_name_is_free_again_only_once_its_ended_lease_was_judged(q: Q) -> None:
    q.worker("a")
    q.tick()
    q.later(80)
    q.tick()
    q.later(80)
    with refused(NAME_TAKEN):
        q.worker("a")
    q.tick()
    q.worker("a")


@pytest.mark.parametrize(
    ("offer", "sqlstate"),
    [
        ({"name": ""}, INVALID),
        ({"name": None}, INVALID),
        ({"host": ""}, INVALID),
        ({"queues": []}, INVALID),
        ({"queues": None}, INVALID),
        ({"queues": ["nowhere"]}, MISSING),
        ({"light": -1}, INVALID),
        ({"slots": -1}, INVALID),
        ({"slots": 0, "light": 0}, INVALID),
        ({"light": 2, "prefetch": 2}, INVALID),
        ({"prefetch": 0}, INVALID),
        ({"memory_mb": -1}, INVALID),
        ({"cpus": -1}, INVALID),
        ({"labels": "h100"}, INVALID),
        ({"labels": []}, INVALID),
        ({"devices": {}}, INVALID),
        ({"devices": [{"index": 0}]}, INVALID),
        ({"devices": [{"uuid": "G"}]}, INVALID),
        ({"devices": [{"uuid": "".join(map(str, range(4000))), "index": 0}]}, INVALID),
        ({"devices": [1]}, INVALID),
        ({"devices": [{"uuid": "G", "index": 0, "vram_mb": "much"}]}, INVALID),
        ({"devices": [{"uuid": "G", "index": 0, "vram_mb": -1}]}, INVALID),
        ({"devices": [{"uuid": "G", "index": 0, "source": "guess"}]}, INVALID),
    ],
)
def test_a_bad_registration_is_refused_and_leaves_nothing(q: Q, offer: dict[str, Any], sqlstate: str) -> None:
    offer = {"name": "a", "host": "h", "queues": ["default"], **offer}
    with refused(sqlstate):
        q.call("register_worker", **offer)
    assert q.sql("select * from gangq.workers") == []
    assert q.sql("select * from gangq.devices") == []


@pytest.mark.parametrize(
    ("offer", "said", "within"),
    [
        ({"cpus": 10**300}, f"register_worker: cpus is 1{'0' * 29} [cut]", "0 or more and 9999999 at most"),
        ({"memory_mb": 10**13}, "register_worker: memory_mb is 10000000000000", "1e12 at most"),
        ({"prefetch": 1001}, "register_worker: prefetch is 1001", "from 1 to 1000"),
        ({"slots": 10001}, "incarnations_slots_check", "slots and light are 0 to 10000"),
        ({"light": 10001}, "incarnations_light_check", "slots and light are 0 to 10000"),
    ],
)
def test_a_worker_that_offers_more_than_there_can_be_is_told_what_and_its_limit(
    q: Q, offer: dict[str, Any], said: str, within: str
) -> None:
    with refused(INVALID, said) as error:
        q.call("register_worker", name="a", host="h", queues=["default"], **offer)
    assert within in str(error.value.diag.message_hint)


def test_a_registration_wakes_the_tick_for_a_gang_that_waits(q: Q, dsn: str) -> None:
    q.submit_gang(1)
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_tick")
        q.worker()
        assert [n.channel for n in ear.notifies(timeout=2, stop_after=1)] == ["gangq_tick"]


# Devices ----------------------------------------------------------------------------------------------------


def devices(q: Q) -> dict[str, tuple[str, str | None]]:
    return {row["uuid"]: (row["state"], row["worker"]) for row in q.sql("select * from gangq.devices")}


def test_a_device_seen_by_two_live_workers_is_offered_by_the_first_and_withheld_from_the_second(q: Q) -> None:
    first = q.worker("a", devices=gpus(8000, 8000))
    second = q.worker("b", devices=gpus(8000, 8000, 8000))
    assert second.registration["withheld"] == ["G0", "G1"]
    assert devices(q) == {"G0": ("free", "a"), "G1": ("free", "a"), "G2": ("free", "b")}
    assert len(second.free["device_ids"]) == 1
    first.retire()
    assert devices(q) == {"G0": ("free", "b"), "G1": ("free", "b"), "G2": ("free", "b")}
    second.retire()
    assert {state for state, _ in devices(q).values()} == {"withdrawn"}


def test_a_device_held_by_a_job_of_a_dead_worker_is_not_given_twice(q: Q) -> None:
    """While the dead worker's job is still locked by an open transaction, its device stays held."""
    q.submit(gpus=1)
    first = q.worker("a", devices=gpus(8000))
    claim = first.take()
    second = q.worker("b", devices=gpus(8000))
    q.submit(gpus=1)
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.live_jobs where id = %(id)s for update", id=claim.job_id)
        assert first.report_dead() == 0
        assert devices(q) == {"G0": ("held", "b")}
        assert second.claim() == []
    q.tick()
    assert q.state(claim.job_id) == "pending"
    assert second.take().job_id == claim.job_id


def test_a_quarantined_device_is_withheld_and_given_to_nobody(q: Q) -> None:
    worker = q.worker("a", devices=gpus(8000, 8000))
    q.call("quarantine", device_uuid="G0", reason="ECC errors")
    assert devices(q)["G0"] == ("quarantined", "a")
    q.submit(gpus=2)
    one = q.submit(gpus=1)
    assert [c.job_id for c in worker.claim()] == [one]
    assert worker.beat(), "a job that runs is not disturbed"
    q.call("quarantine", device_uuid="G0", reason="still bad")  # twice is harmless, the newer reason counts
    assert q.sql("select reason from gangq.devices where uuid = 'G0'")[0]["reason"] == "still bad"


def test_a_quarantine_outlives_the_worker_and_is_reported_at_the_next_start(q: Q) -> None:
    q.worker("a", devices=gpus(8000, 8000)).retire()
    q.call("quarantine", device_uuid="G1")
    assert q.worker("a", devices=gpus(8000, 8000)).registration["withheld"] == ["G1"]
    q.call("unquarantine", device_uuid="G1")
    assert q.events("unquarantine")[-1]["data"] == {"device": "G1"}
    q.call("unquarantine", device_uuid="G1")  # twice is harmless
    assert devices(q)["G1"] == ("free", "a")


def test_a_device_in_use_is_not_quarantined_under_its_job(q: Q) -> None:
    q.submit(gpus=1)
    claim = q.worker(devices=gpus(8000)).take()
    with refused(WRONG_STATE, f"job {claim.job_id}"):
        q.call("quarantine", device_uuid="G0")
    claim.complete()
    q.call("quarantine", device_uuid="G0")


def test_a_quarantined_worker_takes_nothing_and_finishes_what_it_has(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker("a", prefetch=2)
    claim = worker.take()
    q.call("quarantine", worker="a", reason="fan")
    assert worker.claim() == []
    gang = q.submit_gang(1)
    q.tick()
    assert gang.state == "blocked"
    assert worker.beat(claim) == {claim.job_id: "continue"}
    assert claim.complete() == "done"
    worker.retire()
    restarted = q.worker("a")
    assert restarted.claim() == [], "the quarantine is of the worker by name: a restart does not lift it"
    q.call("unquarantine", worker="a")
    assert len(restarted.claim()) == 1
    lifted = q.events("unquarantine")[-1]
    assert (lifted["worker"], lifted["data"]) == ("a", {"worker": "a"})


def test_quarantine_refuses_what_it_does_not_know(q: Q) -> None:
    q.worker("a", devices=gpus(8000))
    for verb in ("quarantine", "unquarantine"):
        with refused(MISSING, "GPU-none"):
            q.call(verb, device_uuid="GPU-none")
        with refused(MISSING, "nobody"):
            q.call(verb, worker="nobody")
        with refused(INVALID):
            q.call(verb)
        with refused(INVALID):
            q.call(verb, device_uuid="G0", worker="a")
    with refused(INVALID, "reason"):
        q.call("quarantine", device_uuid="G0", reason="")


# Heartbeat --------------------------------------------------------------------------------------------------


def test_no_verb_changes_a_setting_of_its_caller_unless_asked_to(q: Q) -> None:
    """A person's own writes in the same transaction stay as durable as that person wanted them."""
    settings = "select name, setting from pg_settings order by name"
    worker = q.worker(slots=4)
    q.submit(count=6)
    claims = worker.claim(max_jobs=3)
    gang, _ = q.submit_gang(1), q.tick()
    before = q.sql(settings)
    with q.db.transaction():
        worker.beat(*claims, beats=[{"step": 1}, None, None], readings=[{"uuid": "x"}])
        q.call(
            "suspect",
            incarnation=worker.incarnation,
            job_id=claims[0].job_id,
            token=claims[0].token,
            **{"class": "stall"},
        )
        claims[0].complete()
        claims[1].fail()
        claims[2].release()
        q.submit(after=[claims[2].job_id])
        q.call("cancel", gang_ids=[gang.id])
        q.call("retry", gang_ids=[gang.id])
        q.call("set_priority", job_ids=[claims[2].job_id], priority=3)
        q.call("quarantine", worker="w1")
        q.call("unquarantine", worker="w1")
        q.call("explain_job", job_id=claims[2].job_id)
        worker.claim()
        assert q.sql(settings) == before
        worker.beat(durable=False)
        assert q.value("select current_setting('synchronous_commit')") == "off", "as gangq's worker asks"


def test_only_what_the_manual_names_bounds_how_long_its_caller_may_idle(q: Q) -> None:
    functions = q.sql(
        "select p.proname as name, pg_get_functiondef(p.oid) as body, "
        "has_function_privilege('gangq_admin', p.oid, 'execute') as is_verb "
        "from pg_proc p where p.pronamespace = 'gangq'::regnamespace and p.prokind = 'f'"
    )
    sets = {row["name"]: set(re.findall(r"set_config\('([^']+)'", row["body"])) for row in functions}
    assert {name: settings for name, settings in sets.items() if settings} == {
        "hang_up_soon": {"idle_in_transaction_session_timeout"},
        "heartbeat": {"synchronous_commit"},  # when asked to
        "move_to_history": {"gangq.leaving"},  # for a trigger, and nobody's setting
    }
    calls = {row["name"]: set(re.findall(r"gangq\.(\w+)\(", row["body"])) for row in functions}
    reached: set[str] = set()
    more = {"hang_up_soon"}
    while more:
        reached |= more
        more = {name for name, called in calls.items() if called & reached} - reached
    bounded = {row["name"] for row in functions if row["is_verb"]} & reached
    assert bounded == {"tick", "apply", "reap_expired", "flag_dead_workers"}
    manual = Path(__file__).parents[2] / "docs" / "manual" / "guarantees.md"
    (names,) = re.findall(r"then idles\.\*\* (.+) lock a row", manual.read_text())
    assert set(re.findall(r"`(\w+)`", names)) == bounded


def test_a_heartbeat_renews_the_lease_from_now(q: Q) -> None:
    worker = q.worker()
    q.later(100)
    worker.beat()
    row = q.sql("select * from gangq.workers")[0]
    assert (row["silent_s"], row["lease_left_s"]) == (0, 120)


def test_a_heartbeat_of_a_lease_that_ended_but_was_not_judged_is_accepted(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    q.later(500)
    assert worker.beat(claim) == {claim.job_id: "continue"}
    q.tick()
    assert q.state(claim.job_id) == "running"


def test_a_heartbeat_stores_beats_and_null_is_no_news(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker(prefetch=2)
    first, second = worker.claim()
    worker.beat(first, second, beats=[{"step": 1}, {"step": 10}])
    worker.beat(first, second, beats=[{"step": 2}, None])
    assert (q.job(first.job_id)["progress"], q.job(second.job_id)["progress"]) == ({"step": 2}, {"step": 10})


def test_progress_of_an_older_claim_is_not_shown_and_a_stale_beat_not_stored(q: Q) -> None:
    q.submit()
    worker = q.worker()
    old = worker.take()
    worker.beat(old, beats=[{"step": 9}])
    old.release()
    new = worker.take()
    assert q.job(new.job_id)["progress"] is None
    told = q.call(
        "heartbeat",
        incarnation=worker.incarnation,
        job_ids=[old.job_id],
        tokens=[old.token],
        beats=[{"step": 10}],
    )
    # The claim it holds is listed too. Both are of one job, and come in any order.
    assert {(row["token"], row["action"]) for row in told} == {(old.token, "lost"), (new.token, "continue")}
    assert q.job(new.job_id)["progress"] is None


def test_a_heartbeat_says_continue_preempt_cancel_or_lost(q: Q) -> None:
    gang = q.submit_gang(2)
    a, b = q.workers(2)
    first, second = gang.start(a, b)
    first_worker = next(w for w in (a, b) if w.name == gang.placed_on[0])
    second_worker = b if first_worker is a else a
    assert first_worker.beat(first) == {first.job_id: "continue"}
    first.fail()
    assert first_worker.beat(first) == {first.job_id: "lost"}
    assert second_worker.beat(second) == {second.job_id: "preempt"}
    gang.cancel()
    assert second_worker.beat(second) == {second.job_id: "cancel"}
    second.ack()
    assert second_worker.beat(second) == {second.job_id: "lost"}


def test_a_solo_job_that_was_cancelled_is_told_cancel(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    q.call("cancel", job_ids=[claim.job_id])
    assert worker.beat(claim) == {claim.job_id: "cancel"}


def test_a_job_told_and_not_acknowledged_in_time_is_lost_for_its_worker(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    q.call("cancel", job_ids=[claim.job_id])
    q.later(45)
    assert worker.beat(claim) == {claim.job_id: "cancel"}
    q.later(1)
    assert worker.beat(claim) == {claim.job_id: "lost"}
    assert claim.ack() == "cancelled", "a late confirmation still counts: the work is stopped"


def test_a_heartbeat_lists_claims_the_worker_did_not_name(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker(prefetch=2)
    first, second = worker.claim()
    assert worker.beat(first) == {first.job_id: "continue", second.job_id: "continue"}


def test_a_heartbeat_does_not_speak_for_another_workers_claim(q: Q) -> None:
    q.submit()
    a, b = q.workers(2)
    claim = a.take()
    assert b.beat(claim, beats=[{"step": 1}]) == {claim.job_id: "lost"}
    assert q.sql("select * from gangq.progress") == [], (
        "a token is shown to all who may look: it gives no rights"
    )


def test_a_heartbeat_of_an_ended_or_unknown_incarnation_is_refused(q: Q) -> None:
    worker = q.worker()
    worker.retire()
    with refused(ENDED, "w1"):
        worker.beat()
    with refused(MISSING, "12345"):
        q.call("heartbeat", incarnation=12345)
    with refused(MISSING, "null"):
        q.call("heartbeat", incarnation=None)


# Retiring and proof of death --------------------------------------------------------------------------------


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(q: Q) -> None:
    q.submit(count=2)
    worker = q.worker(prefetch=2)
    claim = worker.take()
    worker.retire(final=False)
    assert worker.claim() == []
    assert worker.beat(claim) == {claim.job_id: "continue"}
    assert claim.complete() == "done"
    worker.retire()
    worker.retire()  # twice is harmless
    assert q.sql("select state from gangq.workers")[0]["state"] == "retired"


def test_retiring_frees_what_the_worker_held_and_gives_attempts_back(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    worker.retire()
    job = q.job(claim.job_id)
    assert (job["state"], job["attempts"], job["crashes"], job["stops"]) == ("pending", 0, 0, 1)
    with refused(STALE):
        claim.complete()


def test_retiring_cancels_a_job_that_was_told_to_cancel(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    q.call("cancel", job_ids=[claim.job_id])
    worker.retire()
    assert q.state(claim.job_id) == "cancelled"


def test_who_does_not_say_whether_the_worker_is_gone_only_stops_it_from_taking_more(q: Q) -> None:
    q.submit()
    worker = q.worker()
    claim = worker.take()
    q.call("retire_worker", incarnation=worker.incarnation, final=None)
    assert worker.row["state"] == "draining"
    assert claim.complete() == "done"


def test_retiring_an_unknown_incarnation_is_refused(q: Q) -> None:
    with refused(MISSING, "777"):
        q.call("retire_worker", incarnation=777)


def test_proof_of_death_frees_its_jobs_at_once_and_counts_a_crash(q: Q) -> None:
    q.submit(gpus=1)
    worker = q.worker(devices=gpus(8000))
    claim = worker.take()
    assert worker.report_dead() == 1
    job = q.job(claim.job_id)
    assert (job["state"], job["attempts"], job["crashes"]) == ("pending", 0, 1)
    assert job["error"]["type"] == "WorkerLost"
    assert q.sql("select * from gangq.device_holds") == []
    assert worker.report_dead() == 0, "repeats are harmless"
    assert [e["data"]["by"] for e in q.events("dead")] == ["test"], "the evidence is kept, once"
    with refused(STALE):
        claim.complete()
    with refused(ENDED):
        worker.claim()


def test_proof_of_death_drains_the_gang_with_the_dead_member_as_culprit(q: Q) -> None:
    gang = q.submit_gang(2)
    a, b = q.workers(2)
    claims = gang.start(a, b)
    assert a.report_dead() == 1
    assert gang.state == "draining"
    survivor = next(c for c, w in zip(claims, gang.placed_on, strict=True) if w is not None)
    assert survivor.ack() == "preempted"
    crashes = {m["id"]: (m["attempts"], m["crashes"]) for m in gang.members}
    assert crashes[survivor.job_id] == (0, 0)
    assert sorted(crashes.values()) == [(0, 0), (0, 1)]
    assert (gang.state, gang.live["attempts"], gang.live["crashes"]) == ("blocked", 0, 1)


def test_a_dead_worker_whose_member_was_only_reserved_rolls_the_gang_back(q: Q) -> None:
    gang = q.submit_gang(2)
    a, _ = q.workers(2)
    q.tick()
    assert gang.state == "reserved"
    a.report_dead()
    assert gang.state == "blocked"
    assert [m["attempts"] for m in gang.members] == [0, 0]


@pytest.mark.parametrize("evidence", [None, {}, [], "sure", 1])
def test_a_report_without_evidence_is_refused(q: Q, evidence: Any) -> None:
    worker = q.worker()
    with refused(INVALID, "evidence"):
        q.call("report_dead", worker="w1", incarnation=worker.incarnation, evidence=evidence)
    assert worker.row["state"] == "live"


def test_a_report_about_the_wrong_worker_or_incarnation_is_refused(q: Q) -> None:
    a, b = q.workers(2)
    for name, incarnation in (("w1", b.incarnation), ("nobody", a.incarnation), ("w1", 999), ("w1", None)):
        with refused(MISSING):
            q.call("report_dead", worker=name, incarnation=incarnation, evidence=DEAD)
    assert a.row["state"] == b.row["state"] == "live"


def test_of_prefetched_jobs_only_those_that_can_have_run_are_charged_with_the_crash(q: Q) -> None:
    ids = q.submit(count=3)
    worker = q.worker(prefetch=3)
    assert len(worker.claim()) == 3
    worker.report_dead()
    assert [q.job(i)["crashes"] for i in ids] == [1, 0, 0]


def test_a_worker_with_several_slots_charges_as_many_jobs_as_it_ran(q: Q) -> None:
    ids = [*q.submit(count=2, cpus=1), *q.submit(count=3)]
    worker = q.worker(slots=2, light=1, prefetch=3, cpus=2)
    assert len(worker.claim()) == 5
    worker.report_dead()
    assert [q.job(i)["crashes"] for i in ids] == [1, 1, 1, 0, 0]


# Names ------------------------------------------------------------------------------------------------------

_TRAPS = [
    *("", "-f", "--force", "a b", "a|go", "a\nb", "a\n", "a/b", "../x", "$(id)", "a;b", "{worker}"),
    *("\x1b]0;x", "é", "\u202e", "x" * 201),
]


@pytest.mark.parametrize("what", ["name", "host", "address"])
@pytest.mark.parametrize("trap", _TRAPS)
def test_a_name_that_a_command_could_misread_registers_nobody(untouched: Q, what: str, trap: str) -> None:
    given = {"name": "w1", "host": "h1", "queues": ["default"], what: trap}
    with refused(INVALID, f"the {what} of a worker cannot be"):
        untouched.call("register_worker", **given)
    assert untouched.sql("select * from gangq.incarnations") == []


@pytest.mark.parametrize(
    "name", ["w1", "Box_7.example.org-0", "10.0.0.7", "fe80::1", "a@b:c", "-".join("x" * 100)]
)
def test_names_as_hosts_and_people_have_them_are_taken(q: Q, name: str) -> None:
    assert q.worker(name, host=name, address=name).row["name"] == name


@pytest.mark.parametrize(
    "statement",
    [
        *(f"update gangq.incarnations set {column} = '--force'" for column in ("name", "host", "address")),
        "update gangq.device_registry set host = '--force'",
    ],
)
def test_the_tables_themselves_refuse_such_names(q: Q, statement: str) -> None:
    q.worker("w1", devices=gpus(8000))
    with refused("23514"):
        q.sql(statement)
