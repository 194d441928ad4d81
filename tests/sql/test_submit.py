"""Work enters: submit, submit_gang, set_queue, configure, set_priority."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, TOO_LARGE, Q, gpus, refused


def test_submit_returns_distinct_ids_in_the_order_of_the_payloads(q: Q) -> None:
    ids = q.submit(count=3)
    assert len(set(ids)) == 3
    assert [q.job(i)["payload"] for i in ids] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_new_solo_job_is_pending_with_the_defaults_of_its_queue(q: Q) -> None:
    job = q.job(q.submit())
    assert (job["state"], job["attempts"], job["max_attempts"], job["priority"]) == ("pending", 0, 3, 0)
    assert (job["worker"], job["claimed_at"], job["finished_at"], job["error"]) == (None, None, None, None)
    assert job["submitter"] == "postgres"


def test_everything_a_job_asks_for_comes_back_in_the_view(q: Q) -> None:
    q.call("set_queue", name="gpu", budget_s=90)
    asked = {
        "queue": "gpu",
        "priority": -7,
        "gpus": 2,
        "vram_mb": 8000,
        "memory_mb": 512,
        "labels": {"site": "a"},
        "max_attempts": 5,
    }
    job = q.job(q.submit(task="render", cpus=1.5, **asked))
    assert {key: job[key] for key in asked} == asked
    assert float(job["cpus"]) == 1.5
    assert job["budget_s"] == 90, "the queue's budget is inherited"
    assert q.job(q.submit(queue="gpu", budget_s=5))["budget_s"] == 5


def test_jobs_that_need_the_same_share_one_shape(q: Q) -> None:
    q.submit(count=5)
    q.submit(cpus=0)
    q.submit(cpus=0.5)
    assert q.value("select count(*) from gangq.shapes") == 2


@pytest.mark.parametrize(
    ("asked", "sqlstate", "named"),
    [
        ({"task": ""}, INVALID, "task"),
        ({"task": None}, INVALID, "task"),
        ({"task": "x" * 201}, INVALID, "task"),
        ({"queue": "nowhere"}, MISSING, "nowhere"),
        ({"priority": 1001}, INVALID, "1001"),
        ({"priority": -1001}, INVALID, "-1001"),
        ({"gpus": -1}, INVALID, "-1"),
        ({"gpus": 1025}, INVALID, "1025"),
        ({"vram_mb": 8000}, INVALID, "vram_mb is 8000 with gpus 0"),
        ({"gpus": 1, "vram_mb": -1}, INVALID, "vram_mb"),
        ({"memory_mb": -1}, INVALID, "memory_mb"),
        ({"memory_mb": 10**12 + 1}, INVALID, "1e12 at most"),
        ({"cpus": -0.5}, INVALID, "-0.5"),
        ({"cpus": float("nan")}, INVALID, "nan"),
        ({"cpus": float("inf")}, INVALID, "inf"),
        ({"labels": ["h100"]}, INVALID, "h100"),
        ({"budget_s": 0}, INVALID, "budget_s is 0"),
        ({"budget_s": float("nan")}, INVALID, "budget_s"),
        ({"budget_s": 1.001e9}, INVALID, "1e9 at most"),
        ({"max_attempts": 0}, INVALID, "max_attempts"),
        ({"max_crashes": 1001}, INVALID, "max_crashes"),
        ({"max_trips": 0}, INVALID, "max_trips"),
        ({"payloads": []}, INVALID, "payloads"),
        ({"wait_for_hardware": "yes"}, INVALID, "wait_for_hardware"),
        ({"after": [12345]}, MISSING, "12345"),
        ({"after": [None]}, MISSING, "null"),
    ],
)
def test_a_bad_submission_is_refused_naming_the_value(q: Q, asked: dict, sqlstate: str, named: str) -> None:
    known = q.submit()  # What it needs is known then, and only what is bad about it asks for a closer look.
    with refused(sqlstate, named):
        q.submit(**asked)
    if "payloads" not in asked:
        with refused(sqlstate, named):
            q.submit_gang(2, **asked)
    assert [row["id"] for row in q.sql("select id from gangq.jobs")] == [known]


def test_what_a_job_asks_for_beyond_its_shape_it_gets_though_its_like_came_before(q: Q) -> None:
    first = q.submit()
    assert q.job(q.submit(due_at=datetime.now(UTC) + timedelta(hours=1)))["state"] == "scheduled"
    for asked in ({"budget_s": 5}, {"max_attempts": 5}, {"max_crashes": 6}, {"max_trips": 7}):
        (key,) = asked
        given = q.value(f"select {key} from gangq.live_jobs where id = %(id)s", id=q.submit(**asked))
        assert given == asked[key]
    waiting = q.submit(count=2, after=[first])
    assert [q.job(job)["state"] for job in waiting] == ["waiting", "waiting"]
    assert q.value("select array_agg(job_id order by job_id) from gangq.dependencies") == waiting
    q.submit(selector=[{"key": "gpu", "op": "exists"}])
    q.submit(tolerates=["spot"])
    assert q.value("select count(distinct shape_id) from gangq.live_jobs") == 3
    q.submit(task="slow")
    q.call("set_task", task="slow", budget_s=90)
    assert q.job(q.submit(task="slow"))["budget_s"] == 90


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"draining": True}, "is draining"),
        ({"maximum": {"cpus": 1}}, "cpus"),
        ({"max_payload_bytes": 1}, "payload 1"),
    ],
)
def test_what_a_queue_no_longer_takes_it_does_not_take_though_its_like_came_before(
    q: Q, setting: dict, named: str
) -> None:
    q.call("set_queue", name="a.b")
    for queue in ("default", "a.b"):
        q.submit(queue=queue, cpus=2)
    q.call("set_queue", name="default", **setting)
    q.call("set_queue", name="a.b" if "max_payload_bytes" in setting else "a", **setting)
    for queue in ("default", "a.b"):
        with pytest.raises(psycopg.Error, match=named):
            q.submit(queue=queue, cpus=2)


def test_a_job_of_a_fair_queue_is_its_submitters_though_its_like_came_before(q: Q) -> None:
    q.submit()
    q.call("set_queue", name="default", policy="fair")
    q.submit()
    assert q.value("select count(distinct shape_id) from gangq.live_jobs") == 2


@pytest.mark.parametrize(("known", "asked"), [(0, "-0.0004"), (9999999, "9999999.0004")])
def test_what_is_refused_is_refused_though_rounded_it_is_known(q: Q, known: int, asked: str) -> None:
    job = q.submit(cpus=known)
    with refused(INVALID, asked):
        q.submit(cpus=asked)
    assert [row["id"] for row in q.sql("select id from gangq.jobs")] == [job]


def test_a_job_due_at_infinity_is_refused_because_no_tick_could_reckon_with_it(q: Q) -> None:
    q.submit()
    for due_at in ("infinity", "-infinity"):
        with refused(INVALID, "due_at"):
            q.submit(due_at=due_at)
        with refused(INVALID, "due_at"):
            q.submit_gang(1, due_at=due_at)
    q.tick()


def test_an_unknown_wake_is_refused(q: Q) -> None:
    q.submit()
    with refused(INVALID, "loudly"):
        q.submit(wake="loudly")


def test_a_payload_over_the_queues_limit_is_refused_and_says_which(q: Q) -> None:
    q.call("set_queue", name="small", max_payload_bytes=1000)
    with refused(TOO_LARGE, "payload 2"):
        q.submit(queue="small", payloads=[{}, {"text": "x" * 2000}])
    with refused(TOO_LARGE, "small"):
        q.submit_gang(2, queue="small", payload={"text": "x" * 2000})
    assert q.sql("select * from gangq.jobs") == []
    q.submit(queue="small", payloads=[{"text": "x" * 900}])


def test_submit_inside_a_transaction_that_rolls_back_leaves_nothing(q: Q) -> None:
    with q.db.transaction():
        q.submit()
        q.submit_gang(2)
        raise psycopg.Rollback()
    assert q.sql("select * from gangq.jobs") == []
    assert q.sql("select * from gangq.gangs") == []


def test_a_job_due_later_is_scheduled_and_one_due_in_the_past_is_pending(q: Q) -> None:
    now = datetime.now(UTC)
    assert q.state(q.submit(due_at=now + timedelta(hours=1))) == "scheduled"
    assert q.state(q.submit(due_at=now - timedelta(hours=1))) == "pending"


# Gangs ------------------------------------------------------------------------------------------------------


def test_a_gang_is_written_with_all_its_members_blocked(q: Q) -> None:
    gang = q.submit_gang(4, payload={"lr": 0.1}, priority=5, name="digits", cpus=1)
    assert gang.state == "blocked"
    members = gang.members
    assert [m["rank"] for m in members] == [0, 1, 2, 3]
    assert [m["id"] for m in members] == gang.job_ids
    assert {(m["state"], m["priority"], m["task"], float(m["cpus"])) for m in members} == {
        ("blocked", 5, "train", 1.0)
    }
    assert [m["payload"] for m in members] == [{"lr": 0.1}] * 4
    assert (gang.row["epoch"], gang.row["size"], gang.row["name"]) == (0, 4, "digits")
    assert [e["gang_id"] for e in q.events("submit")] == [gang.id]


def test_members_may_have_a_payload_each(q: Q) -> None:
    gang = q.submit_gang(2, payloads=[{"part": "a"}, {"part": "b"}])
    assert [m["payload"] for m in gang.members] == [{"part": "a"}, {"part": "b"}]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": -1}, "size is -1"),
        ({"size": None}, "size is null"),
        ({"size": 100001}, "100001"),
        ({"size": 2, "payloads": [{}]}, "1 payloads for a gang of 2"),
        ({"size": 2, "checkpoint_mode": "some"}, "some"),
        ({"size": 2, "claim_deadline_s": 0}, "claim_deadline_s"),
        ({"size": 2, "claim_deadline_s": float("nan")}, "claim_deadline_s"),
    ],
)
def test_a_bad_gang_is_refused_naming_the_value(q: Q, asked: dict, named: str) -> None:
    with refused(INVALID, named):
        q.submit_gang(**asked)
    assert q.sql("select * from gangq.gangs") == []


def test_a_gang_that_no_registered_workers_could_hold_is_flagged_with_the_numbers(q: Q) -> None:
    assert "no registered worker serves queue default" in q.submit_gang(2).note
    q.workers(3, devices=[], memory_mb=1000)
    q.worker("away", memory_mb=1000, devices=gpus(8000)).retire()
    assert q.submit_gang(3).note is None
    note = q.submit_gang(4, memory_mb=100).note
    assert "3 of 4" in note
    assert "labels" in q.submit_gang(1, labels={"gpu": "h100"}, wait_for_hardware=True).note
    flagged = q.submit_gang(1, gpus=1)
    assert "1 GPU of" in flagged.note
    assert flagged.row["note"] == flagged.note
    why = {row["id"]: row["why"] for row in q.sql("select * from gangq.waiting where kind = 'gang'")}
    assert why[flagged.id] == flagged.note, "waiting says it too, and as of now"
    gates = {row["gate"]: row for row in q.call("explain_gang", gang_id=flagged.id)}
    assert not gates["hardware"]["ok"]


def test_a_flagged_gang_starts_once_workers_come_that_can_hold_it(q: Q) -> None:
    gang = q.submit_gang(2)
    q.tick()
    assert gang.state == "blocked"
    gang.start(*q.workers(2))


# Queues and settings ----------------------------------------------------------------------------------------


def test_set_queue_makes_a_queue_and_changes_only_what_is_given(q: Q) -> None:
    q.call("set_queue", name="gpu", max_attempts=7, policy="fifo")
    q.call("set_queue", name="gpu", backoff_s=1)
    row = q.sql("select * from gangq.queues where name = 'gpu'")[0]
    assert (row["max_attempts"], row["policy"], row["backoff_s"], row["paused"]) == (7, "fifo", 1, False)
    q.call("set_queue", name="gpu", max_attempts=7)  # twice is the same


@pytest.mark.parametrize(
    "setting",
    [
        {"name": ""},
        {"name": None},
        {"name": "x" * 101},
        {"name": "q", "policy": "random"},
        {"name": "q", "max_attempts": 0},
        {"name": "q", "max_attempts": 100000},
        {"name": "q", "backoff_s": -1},
        {"name": "q", "budget_s": 0},
        {"name": "q", "max_payload_bytes": 0},
        {"name": "q", "retention_done": "years"},
    ],
)
def test_a_bad_queue_setting_is_refused(q: Q, setting: dict) -> None:
    with refused(INVALID):
        q.call("set_queue", **setting)
    assert [row["name"] for row in q.sql("select name from gangq.queues")] == ["default"]


def test_configure_changes_what_is_given_and_refuses_nonsense(q: Q) -> None:
    q.call("configure", lease_s=60)
    row = q.sql("select * from gangq.settings")[0]
    assert (row["lease_s"], row["heartbeat_s"]) == (60, 5)
    with refused(INVALID):
        q.call("configure", lease_s=-1)


@pytest.mark.parametrize(
    "change", [{"lease_s": 35}, {"grace_s": 100}, {"lease_margin_s": 95}, {"heartbeat_s": 60}]
)
def test_configure_refuses_a_lease_in_which_nothing_could_run(q: Q, change: dict[str, float]) -> None:
    with refused(INVALID, "is too short"):
        q.call("configure", **change)
    q.call("configure", lease_s=1000, **{k: v for k, v in change.items() if k != "lease_s"})


def test_the_defaults_are_the_ones_the_issue_names(q: Q) -> None:
    row = q.sql("select * from gangq.settings")[0]
    assert (row["heartbeat_s"], row["lease_s"], row["lease_margin_s"], row["grace_s"]) == (5, 120, 10, 15)
    assert (row["claim_deadline_s"], row["ack_timeout_s"], row["flag_after_s"]) == (30, 45, 30)
    assert (row["candidate_silence_s"], row["pass_over_s"], row["tick_s"]) == (15, 60, 1)
    assert row["checkpoint_bytes"] == 1024 * 1024
    queue = q.sql("select * from gangq.queues where name = 'default'")[0]
    assert (queue["max_attempts"], queue["max_crashes"], queue["max_trips"]) == (3, 3, 3)
    assert queue["policy"] == "priority"
    assert (row["topology"], row["reservations"], row["placement_timeout_s"]) == (["host"], 4, 900)


# Priority ---------------------------------------------------------------------------------------------------


def test_set_priority_moves_a_job_and_keeps_its_age(q: Q) -> None:
    first, second, third = q.submit(count=3)
    q.call("set_priority", priority=10, job_ids=[third, second])
    worker = q.worker(prefetch=10)
    assert [c.job_id for c in worker.claim()] == [second, third, first]


def test_set_priority_of_a_gang_moves_its_members(q: Q) -> None:
    gang = q.submit_gang(2)
    rows = q.call("set_priority", priority=-3, gang_ids=[gang.id])
    assert {row["job_id"] for row in rows} == set(gang.job_ids)
    assert gang.row["priority"] == -3
    assert {m["priority"] for m in gang.members} == {-3}


def test_set_priority_stops_nothing_that_runs(q: Q) -> None:
    q.submit()
    claim = q.worker().take()
    q.call("set_priority", priority=-1000, job_ids=[claim.job_id])
    assert claim.complete() == "done"


def test_set_priority_refuses_what_it_cannot_move_and_then_moves_nothing(q: Q) -> None:
    job, gang = q.submit(), q.submit_gang(1)
    for bad in (1001, -1001, None):
        with refused(INVALID):
            q.call("set_priority", priority=bad, job_ids=[job])
    with refused(MISSING, "999"):
        q.call("set_priority", priority=1, job_ids=[job, 999])
    with refused(MISSING, "gang"):
        q.call("set_priority", priority=1, job_ids=[gang.job_ids[0]])
    with refused(MISSING, "gang g999"):
        q.call("set_priority", priority=1, gang_ids=[999])
    assert q.job(job)["priority"] == 0


# Waking -----------------------------------------------------------------------------------------------------


def heard(connection: psycopg.Connection, seconds: float = 0.3) -> list[tuple[str, str]]:
    return [(n.channel, n.payload) for n in connection.notifies(timeout=seconds)]


def test_submit_wakes_only_as_many_sleepers_as_there_are_jobs(q: Q, dsn: str) -> None:
    workers = q.workers(3)
    with psycopg.connect(dsn, autocommit=True) as ear:
        for worker in workers:
            ear.execute(f"listen gangq_{worker.incarnation}")
            assert worker.claim(sleep=True) == []
            q.later(1)
        q.submit(wake="sleepers")
        assert heard(ear) == [(f"gangq_{workers[2].incarnation}", "light")], "the one that dozed off last"
        assert q.value("select count(*) from gangq.sleepers") == 2


def test_nobody_is_notified_when_nobody_sleeps(q: Q, dsn: str) -> None:
    worker = q.worker()
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{worker.incarnation}; listen gangq_wake")
        q.submit(wake="sleepers")
        assert heard(ear) == []
        q.submit(wake="never")
        assert heard(ear) == []
        q.submit(wake="commit")
        assert heard(ear) == [("gangq_wake", "default")]


def test_a_worker_that_gets_a_job_is_no_sleeper_any_more(q: Q) -> None:
    worker = q.worker()
    worker.claim(sleep=True)
    q.submit(wake="never")
    worker.take(sleep=True)
    assert q.sql("select * from gangq.sleepers") == []


def test_only_sleepers_of_that_queue_are_woken(q: Q, dsn: str) -> None:
    q.call("set_queue", name="other")
    elsewhere, here = q.worker("a", queues=["other"]), q.worker("b", queues=["other", "default"])
    here.claim(sleep=True)
    elsewhere.claim(sleep=True)
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{here.incarnation}; listen gangq_{elsewhere.incarnation}")
        q.submit(count=5, wake="sleepers")
        assert heard(ear) == [(f"gangq_{here.incarnation}", "light")]


@pytest.mark.parametrize("change", [{"paused": False}, {"maximum": None}, {"max_running_jobs": 5}])
def test_who_sleeps_is_woken_when_its_queue_may_start_more(q: Q, dsn: str, change: dict[str, Any]) -> None:
    q.call("set_queue", name="default", paused=True, maximum={"jobs": 1}, max_running_jobs=1)
    q.worker().claim(sleep=True)
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_wake")
        q.call("set_queue", name="default", weight=2)
        assert heard(ear) == []
        q.call("set_queue", name="default", **change)
        assert heard(ear) == [("gangq_wake", "default")]


@pytest.mark.parametrize(("due_s", "asked"), [(0.5, ["gangq_tick"]), (10, [])])
def test_a_job_that_is_due_before_anybody_ticks_again_asks_for_a_tick(
    q: Q, dsn: str, due_s: float, asked: list[str]
) -> None:
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute("listen gangq_tick")
        q.submit(due_at=q.clock.now() + timedelta(seconds=due_s))
        ear.execute("listen marker")  # Sessions hear in the order of commits.
        q.sql("select pg_notify('marker', '')")
        heard = [n.channel for n in ear.notifies(timeout=2, stop_after=len(asked) + 1)]
        assert heard == [*asked, "marker"]
