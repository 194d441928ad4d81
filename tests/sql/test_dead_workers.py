"""Silence: who is flagged, and for how long; and what a host may do about its own flagged workers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sql.drive import MISSING, Claim, Q, Worker, refused


def busy(q: Q, name: str = "w1", host: str | None = None, **offer: Any) -> tuple[Worker, Claim]:
    """A worker with a job."""
    q.submit()
    worker = q.worker(name, host=host, **offer)
    return worker, worker.take()


def silent(q: Q, seconds: float, *alive: Worker) -> None:
    """Time passes; only these heartbeat."""
    q.live_on(seconds, *alive)


def flagged(q: Q, **where: Any) -> list[str]:
    return [row["worker"] for row in q.sql("select worker from gangq.flagged order by worker")]


# Flags ------------------------------------------------------------------------------------------------------


def test_a_silent_worker_that_holds_a_job_is_flagged_once_and_keeps_the_job(q: Q) -> None:
    worker, claim = busy(q)
    silent(q, 29)
    assert flagged(q) == []
    silent(q, 1)
    assert flagged(q) == ["w1"]
    stamp = worker.row["flagged_at"]
    silent(q, 40)
    assert (worker.row["flagged_at"], len(q.events("flag"))) == (stamp, 1)
    assert q.state(claim.job_id) == "running"


def test_the_threshold_is_a_setting(q: Q) -> None:
    q.call("configure", flag_after_s=10)
    busy(q)
    silent(q, 9)
    assert flagged(q) == []
    silent(q, 1)
    assert flagged(q) == ["w1"]


def test_a_silent_worker_without_a_job_is_nobodys_trouble(q: Q) -> None:
    _, claim = busy(q)
    claim.complete()
    silent(q, 60)
    assert (flagged(q), q.events("flag")) == ([], [])
    assert q.value("select state from gangq.workers") == "live"


@pytest.mark.parametrize("holding", ["reserved", "preempting"])
def test_a_member_reserved_or_told_to_stop_is_a_job_it_holds(q: Q, holding: str) -> None:
    q.call("configure", flag_after_s=14)
    gang, worker = q.submit_gang(1), q.worker()
    if holding == "preempting":
        gang.start(worker)
        q.call("preempt_gang", gang_id=gang.id)
    else:
        q.tick()
    assert gang.states == [holding]
    silent(q, 15)
    assert flagged(q) == ["w1"]


def test_a_busy_worker_that_is_heard_is_never_flagged(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 200, worker)
    assert q.events("flag") == []


def test_each_incarnation_is_judged_by_itself_and_not_by_host_or_name(q: Q) -> None:
    """Two workers of one host label, one silent; and one silent beside a busy one that holds all the jobs."""
    busy(q, "lane-1", host="box")
    alive, _ = busy(q, "lane-2", host="box")
    idle = q.worker("lane-3", host="box")
    silent(q, 60, alive)
    assert flagged(q) == ["lane-1"]
    assert (alive.row["flagged_at"], idle.row["flagged_at"]) == (None, None)


def test_the_count_is_of_workers_and_the_event_names_every_job(q: Q) -> None:
    jobs = q.submit(count=5)
    two, three = q.worker("a", slots=2), q.worker("b", slots=3)
    two.claim()
    three.claim()
    q.one("tick", force=True)
    q.later(31)
    assert q.one("flag_dead_workers") == 2
    assert q.one("flag_dead_workers") == 0
    events = q.events("flag")
    assert sorted(j for e in events for j in e["data"]["jobs"]) == sorted(jobs)
    assert sorted(len(r["jobs"]) for r in q.sql("select jobs from gangq.flagged")) == [2, 3]


def test_a_flag_stands_until_its_incarnation_is_heard_and_comes_again_after_that(q: Q) -> None:
    worker, claim = busy(q)
    silent(q, 40)
    assert flagged(q) == ["w1"]
    worker.beat(claim)
    assert flagged(q) == [], "the view does not wait for the tick"
    q.tick()
    assert worker.row["flagged_at"] is None
    silent(q, 40)
    assert flagged(q) == ["w1"]
    kinds = [e["kind"] for e in q.events(incarnation=worker.incarnation)]
    assert kinds == ["register", "flag", "unflag", "flag"]


def test_a_flag_stands_though_the_jobs_are_gone_by_now(q: Q) -> None:
    _, claim = busy(q)
    silent(q, 40)
    claim.complete()
    silent(q, 20)
    assert flagged(q) == ["w1"]


@pytest.mark.parametrize(
    "what",
    [
        "server_started_at = server_started_at - interval '1 day'",
        "last_at = gangq.now() - interval '10 minutes'",
        "last_at = gangq.now() + interval '10 minutes'",
    ],
)
def test_an_outage_flags_nobody_for_the_whole_time_and_takes_no_flag_off(q: Q, what: str) -> None:
    busy(q, "early")
    silent(q, 31)
    busy(q, "late")
    silent(q, 25)
    q.sql(f"update gangq.tick_state set {what}")
    q.later(6)
    q.tick()
    assert flagged(q) == ["early"]
    assert q.events("unflag") == []
    silent(q, 29)
    assert flagged(q) == ["early"]
    silent(q, 2)
    assert flagged(q) == ["early", "late"]


def test_a_worker_judged_dead_stays_flagged_until_it_is_replaced(q: Q) -> None:
    worker, claim = busy(q)
    silent(q, 130)
    assert (worker.row["state"], q.state(claim.job_id)) == ("dead", "pending")
    assert flagged(q) == ["w1"], "nobody has restarted it"
    q.later(1500)
    q.call("keep_partitions", at_once=True)
    assert flagged(q) == ["w1"]
    q.worker("w1")
    assert flagged(q) == []


def test_one_left_dead_for_long_was_left_so_on_purpose(q: Q) -> None:
    busy(q)
    silent(q, 130)
    q.later(1700)
    assert flagged(q) == []


@pytest.mark.parametrize("end", ["retire", "report_dead", "trip"])
def test_whoever_is_accounted_for_is_not_flagged_any_more(q: Q, end: str) -> None:
    worker, claim = busy(q)
    silent(q, 40)
    claim.trip(exit_in_s=5) if end == "trip" else getattr(worker, end)()
    assert flagged(q) == []


def test_the_flag_is_one_line_in_the_servers_log_and_one_event_that_say_what_to_do(q: Q) -> None:
    said: list[str] = []
    q.db.add_notice_handler(lambda note: said.append(str(note.message_primary)))
    worker, claim = busy(q, "alice", host="box-7", pid=4711, identity={"start": 9})
    silent(q, 40)
    (line,) = [text for text in said if "DEAD WORKER" in text]
    (event,) = q.events("flag")
    for word in ("alice", "box-7", "4711", f"incarnation {worker.incarnation}", f"jobs {claim.job_id}"):
        assert word in line
    for text in (line, event["reason"]):
        assert "gangq bounce --once" in text
        assert f"gangq.report_dead('alice', {worker.incarnation}" in text
    assert (event["data"]["host"], event["data"]["pid"], event["data"]["jobs"]) == (
        "box-7",
        4711,
        [claim.job_id],
    )
    (row,) = q.sql("select * from gangq.flagged where host = 'box-7'")
    assert (row["incarnation"], row["pid"], row["identity"], row["jobs"]) == (
        worker.incarnation,
        4711,
        {"start": 9},
        [claim.job_id],
    )
    assert float(row["silent_s"]) == 40
    assert row["flagged_at"] == event["at"]


def test_nobody_is_flagged_where_nobody_works(q: Q) -> None:
    assert q.one("flag_dead_workers") == 0


# Bounce -----------------------------------------------------------------------------------------------------


def bounce(q: Q, worker: Worker, host: str = "host-w1", **named: Any) -> str:
    return str(q.one("bounce", incarnation=worker.incarnation, host=host, **named))


def kinds(q: Q) -> list[str]:
    return [e["kind"] for e in q.events() if e["kind"].startswith("bounce")]


def test_a_flagged_worker_may_be_restarted_by_its_host_once(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 40)
    assert bounce(q, worker) == "go"
    assert bounce(q, worker) == "taken"
    silent(q, 119)
    assert bounce(q, worker) == "taken"
    silent(q, 1)
    assert bounce(q, worker) == "go", "the other one did not manage"
    q.call("bounced", incarnation=worker.incarnation, ok=True, detail={"backend": "systemd"})
    assert kinds(q) == ["bounce", "bounce_refused", "bounce", "bounced"]
    (said,) = q.events("bounced")
    assert (said["worker"], said["data"]) == ("w1", {"backend": "systemd", "ok": True})
    q.call("bounced", incarnation=worker.incarnation, ok=False, detail=["no object"])
    assert q.events("bounced")[-1]["data"] == {"ok": False}


def test_a_restart_from_before_the_clock_was_set_back_keeps_no_other_from_being_made(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 40)
    assert bounce(q, worker) == "go"
    q.later(-3600)
    silent(q, 40)
    assert bounce(q, worker) == "go"


def test_a_worker_that_is_heard_or_was_never_flagged_is_left_alone(q: Q) -> None:
    worker, claim = busy(q)
    assert bounce(q, worker) == "heard"
    silent(q, 40)
    worker.beat(claim)
    assert bounce(q, worker) == "heard"


@pytest.mark.parametrize("how", ["restarted", "retired"])
def test_a_worker_already_replaced_or_stopped_as_asked_is_left_alone(q: Q, how: str) -> None:
    worker, _ = busy(q)
    silent(q, 40)
    worker.retire() if how == "retired" else worker.report_dead()
    if how == "restarted":
        q.worker("w1")
    assert bounce(q, worker) == "replaced"


def test_a_host_bounces_only_its_own(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 40)
    assert bounce(q, worker, "elsewhere") == "unknown"
    assert q.one("bounce", incarnation=99, host="host-w1") == "unknown"
    assert q.one("bounce", incarnation=None, host="host-w1") == "unknown"
    assert kinds(q) == []
    with refused(MISSING):
        q.call("bounced", incarnation=99, ok=True)


def test_the_recipe_for_psql_restarts_a_unit_only_for_the_worker_that_is_called_after_it(
    q: Q, dsn: str, tmp_path: Path
) -> None:
    """Any worker's login may register any free name, with any host."""
    if shutil.which("psql") is None:
        pytest.skip("no psql")
    for name in ("n12-7", "x-8", "n12-x-9", "go-10", "n1234-11"):
        busy(q, name, "n12")
    silent(q, 40)
    for program, text in (("hostname", "echo n12"), ("systemctl", f'echo "$@" >> {tmp_path}/did')):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    page = (Path(__file__).parents[2] / "docs/manual/hangs.md").read_text()
    (recipe,) = [block for block in page.split("```")[1::2] if "gangq.bounce(" in block]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GANGQ_DSN": dsn}
    subprocess.run(["sh", "-ec", recipe], env=environ, check=True)
    assert (tmp_path / "did").read_text() == "restart gangq-worker@7\n"


def test_a_worker_is_restarted_at_most_so_often_within_an_hour_whatever_its_incarnation(q: Q) -> None:
    q.call("configure", bounces_per_hour=2)
    for expected in ("go", "go", "too_often"):
        worker, _ = busy(q)
        silent(q, 40)
        assert bounce(q, worker) == expected
        worker.report_dead()
        q.later(130)
    other, _ = busy(q, "w2")
    silent(q, 40)
    assert bounce(q, other, "host-w2") == "go", "each worker has its own count"
    other.report_dead()
    q.later(3200)
    worker, _ = busy(q)
    silent(q, 40)
    assert bounce(q, worker) == "go"


def worked(q: Q, name: str, host: str | None = None) -> Worker:
    """A worker that has done a job and waits for the next."""
    worker, claim = busy(q, name, host)
    claim.complete()
    return worker


@pytest.mark.parametrize(("workers", "answer"), [(10, "go"), (9, "fleet")])
def test_when_more_than_a_fifth_is_flagged_at_once_the_fault_is_elsewhere(
    q: Q, workers: int, answer: str
) -> None:
    first, _ = busy(q)
    busy(q, "w2")
    others = [worked(q, f"ok{n}") for n in range(workers - 2)]
    silent(q, 40, *others)
    assert flagged(q) == ["w1", "w2"]
    assert bounce(q, first) == answer
    if answer == "fleet":
        assert "workers of 2 of 9 hosts" in q.events("bounce_refused")[0]["reason"]


def test_one_hung_host_of_four_with_a_worker_a_gpu_is_restarted_as_a_whole(q: Q) -> None:
    q.call("configure", bounces_per_hour=1)
    others = [worked(q, f"{host}-{n}", host) for host in ("a", "b", "c") for n in range(8)]
    hung = [busy(q, f"d-{n}", "d")[0] for n in range(8)]
    silent(q, 40, *others)
    assert len(flagged(q)) == 8
    assert [bounce(q, worker, "d") for worker in hung] == ["go"] * 8


@pytest.mark.parametrize("idle", ["many that are live", "many on hosts of their own that fell silent"])
def test_registrations_that_never_worked_neither_lift_the_brake_nor_engage_it(q: Q, idle: str) -> None:
    if "live" in idle:
        # Two of five hosts are flagged: the brake holds, whoever else registers.
        first, _ = busy(q)
        busy(q, "w2")
        others = [worked(q, f"ok{n}") for n in range(3)] + [q.worker(f"fake{n}") for n in range(20)]
        silent(q, 40, *others)
        assert bounce(q, first) == "fleet"
        return
    q.call("configure", claim_deadline_s=600)
    first, _ = busy(q)
    others = [worked(q, f"ok{n}") for n in range(4)]
    for n in range(6):
        q.worker(f"fake{n}", labels={"fake": "yes"})
    # Reserved for a gang that never started there, they hold members and are flagged.
    q.submit_gang(6, labels={"fake": "yes"})
    q.settle()
    silent(q, 40, *others)
    assert flagged(q) == [*(f"fake{n}" for n in range(6)), "w1"]
    assert bounce(q, first) == "go"


def test_new_names_on_a_host_buy_no_more_restarts(q: Q) -> None:
    q.call("configure", bounces_per_hour=2)
    answers = []
    for n in range(4):
        worker, _ = busy(q, f"name-{n}", "box")
        silent(q, 40)
        answers.append(bounce(q, worker, "box"))
        worker.report_dead()
        q.later(600)
    assert answers == ["go", "go", "too_often", "too_often"]


def test_the_only_worker_there_is_may_be_restarted(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 40)
    assert bounce(q, worker) == "go"


def test_a_refusal_is_on_record_once_and_not_with_every_poll(q: Q) -> None:
    worker, claim = busy(q)
    for _ in range(3):
        assert bounce(q, worker) == "heard"
    assert kinds(q) == ["bounce_refused"]
    silent(q, 40)
    for _ in range(3):
        bounce(q, worker)
    assert kinds(q) == ["bounce_refused", "bounce", "bounce_refused"]
    worker.beat(claim)
    q.tick()
    silent(q, 150)
    worker.report_dead()
    q.worker("w1")
    for _ in range(3):
        assert bounce(q, worker) == "replaced"
    assert [e["data"]["answer"] for e in q.events("bounce_refused")] == ["heard", "taken", "replaced"]


def test_report_only_answers_and_leaves_no_trace(q: Q) -> None:
    worker, _ = busy(q)
    assert bounce(q, worker, report_only=True) == "heard"
    silent(q, 40)
    for _ in range(2):
        assert bounce(q, worker, report_only=True) == "go"
    assert kinds(q) == []
    assert bounce(q, worker) == "go"


def test_a_worker_judged_dead_and_not_replaced_may_still_be_restarted(q: Q) -> None:
    worker, _ = busy(q)
    silent(q, 130)
    assert worker.row["state"] == "dead"
    assert bounce(q, worker) == "go"
