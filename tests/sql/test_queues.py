"""Queues are a tree: parents are made, settings checked, what is placed counts upwards, a pause holds downwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, WRONG_ISOLATION, WRONG_STATE, Q, a_role, gpus, refused


def path(q: Q, name: str) -> Any:
    return q.value("select gangq.queue_path(%(name)s)", name=name)


def usage(q: Q, *names: str) -> dict[str, dict[str, Any]]:
    """What is placed in each of these queues, whoever submitted it."""
    rows = q.sql("select * from gangq.queue_usage(%(names)s::text[])", names=list(names))
    assert len({(row["queue"], row["submitter"]) for row in rows}) == len(rows)
    return {row.pop("queue"): row for row in rows}


def shown(q: Q, name: str) -> dict[str, Any]:
    return q.sql("select * from gangq.queues where name = %(name)s", name=name)[0]


# The tree ---------------------------------------------------------------------------------------------------


def test_a_queue_is_made_with_its_parents_and_they_have_the_defaults(q: Q) -> None:
    q.call("set_queue", name="research.vision.train", max_attempts=7)
    assert path(q, "research.vision.train") == ["research.vision.train", "research.vision", "research"]
    rows = q.sql("select name, depth, max_attempts, policy from gangq.queues")
    assert [(r["name"], r["depth"], r["max_attempts"]) for r in rows] == [
        ("default", 0, 3),
        ("research", 0, 3),
        ("research.vision", 1, 3),
        ("research.vision.train", 2, 7),
    ]
    assert {r["policy"] for r in rows} == {"priority"}


def test_the_path_of_a_queue_skips_parents_that_were_never_made(q: Q) -> None:
    q.sql("insert into gangq.queues_table (name) values ('a'), ('a.b.c')")
    assert path(q, "a.b.c") == ["a.b.c", "a"]
    assert path(q, "nowhere") == []


def test_queues_are_listed_with_each_parent_before_its_children(q: Q) -> None:
    for name in ("a-b", "a.b", "a.b.c", "a0"):
        q.call("set_queue", name=name)
    assert [r["name"] for r in q.sql("select name from gangq.queues")] == [
        "a", "a.b", "a.b.c", "a-b", "a0", "default"
    ]  # fmt: skip


@pytest.mark.parametrize("name", [".a", "a.", "a..b", "."])
def test_a_name_with_an_empty_part_is_refused(q: Q, name: str) -> None:
    with refused(INVALID, "empty part"):
        q.call("set_queue", name=name)


# Settings ---------------------------------------------------------------------------------------------------

SETTINGS = {
    "draining": True,
    "guaranteed": {"gpus": 2},
    "maximum": {"gpus": 4, "memory_mb": 1000, "cpus": 2.5, "jobs": 9},
    "weight": 2.0,
    "max_running_gangs": 0,
    "max_running_jobs": 5,
    "submitter_maximum": {"gpus": 1, "jobs": 2, "gangs": 3},
    "placement_timeout_s": 60.0,
    "timeout_style": "soft",
    "preempts": False,
    "preemptible": False,
    "min_run_s": 0.0,
}
TAKEN_AWAY = {
    "budget_s": None,
    "guaranteed": {},
    "maximum": {},
    "max_running_gangs": None,
    "max_running_jobs": None,
    "submitter_maximum": {},
    "placement_timeout_s": None,
    "timeout_style": None,
}


def test_what_is_not_given_stays_and_null_takes_away(q: Q) -> None:
    q.call("set_queue", name="gpu", budget_s=9, **SETTINGS)
    q.call("set_queue", name="gpu")
    row = shown(q, "gpu")
    assert {key: row[key] for key in SETTINGS} == SETTINGS
    for setting, empty in TAKEN_AWAY.items():
        assert row[setting] != empty
        q.call("set_queue", name="gpu", **{setting: None})
        assert shown(q, "gpu")[setting] == empty
    assert shown(q, "gpu")["min_run_s"] == 0
    assert not q.value("select limited from gangq.queues_table where name = 'gpu'")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"maximum": {"tpus": 1}}, "'tpus'"),
        ({"maximum": {"gangs": 1}}, "'gangs'"),
        ({"submitter_maximum": {"cpus": 1}}, "'cpus'"),
        ({"guaranteed": {"gpus": -1}}, "guaranteed: gpus is -1"),
        ({"maximum": {"gpus": 1.5}}, "maximum: gpus is 1.5"),
        ({"maximum": {"gpus": "8"}}, 'maximum: gpus cannot be "8"'),
        ({"maximum": [1]}, "maximum is [1]"),
        ({"guaranteed": {"gpus": 5}, "maximum": {"gpus": 4}}, "is guaranteed 5 gpus, and its maximum is 4"),
        ({"policy": None}, "policy needs a value"),
        ({"polcy": "fair"}, "has no option 'polcy'"),
        ({"paused": "perhaps"}, "paused cannot be"),
        ({"limited": True}, "has no option 'limited'"),
        ({"weight": 0}, "weight"),
        ({"timeout_style": "never"}, "timeout_style"),
        ({"max_running_jobs": -1}, "max_running_jobs"),
        ({"policy": "random"}, "policy"),
        ({"placement_timeout_s": 0}, "placement_timeout_s"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_what_is_wrong(
    q: Q, settings: dict[str, Any], said: str
) -> None:
    q.call("set_queue", name="gpu")
    before = shown(q, "gpu")
    with refused(INVALID, said):
        q.call("set_queue", name="gpu", **settings)
    assert shown(q, "gpu") == before


def test_children_are_guaranteed_no_more_together_than_their_parent_may_hold(q: Q) -> None:
    q.call("set_queue", name="a", maximum={"gpus": 8})
    q.call("set_queue", name="a.x", guaranteed={"gpus": 5, "cpus": 100})
    with refused(INVALID, "children of queue 'a' are guaranteed 9 gpus, and its maximum is 8"):
        q.call("set_queue", name="a.y", guaranteed={"gpus": 4})
    q.call("set_queue", name="a.y", guaranteed={"gpus": 3})
    with refused(INVALID, "children of queue 'a' are guaranteed 8 gpus, and its maximum is 7"):
        q.call("set_queue", name="a", maximum={"gpus": 7})
    with refused(INVALID, "is guaranteed 5 gpus, and its maximum is 4"):
        q.call("set_queue", name="a.x", maximum={"gpus": 4})


@pytest.mark.parametrize("setting", ["guaranteed", "maximum"])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_what_is_compared_with_other_queues_is_not_set_from_an_older_snapshot(
    q: Q, level: str, setting: str
) -> None:
    with refused(WRONG_ISOLATION, level.upper()), q.db.transaction():
        q.sql(f"set transaction isolation level {level}")
        q.call("set_queue", name="a", **{setting: {"gpus": 5}})
    with q.db.transaction():
        q.sql(f"set transaction isolation level {level}")
        q.call("set_queue", name="a", paused=True)


# Usage ------------------------------------------------------------------------------------------------------


def test_what_is_placed_counts_in_its_queue_and_every_ancestor(q: Q) -> None:
    for name in ("a.b", "a.bc", "z"):
        q.call("set_queue", name=name)
    worker = q.worker(
        slots=9, memory_mb=9000, cpus=9, devices=gpus(*[1] * 8), queues=["a.b", "a.bc", "a", "z"]
    )
    q.submit(queue="a.b", gpus=2, memory_mb=100, cpus=0.5)
    q.submit(queue="a.bc", gpus=1)
    q.submit(queue="a")
    q.submit(queue="z")
    claims = worker.claim()
    gang = q.submit_gang(2, queue="a.b", gpus=1)
    q.submit(queue="a.b", gpus=8)  # waits, and counts nowhere
    q.tick()
    assert gang.state == "reserved"
    found = usage(q, "a", "a.b", "a.bc", "nowhere")
    numbers = {k: [v[c] for c in ("gangs", "jobs", "gpus", "memory_mb", "cpus")] for k, v in found.items()}
    assert numbers == {"a": [1, 5, 5, 100, 0.5], "a.b": [1, 3, 4, 100, 0.5], "a.bc": [0, 1, 1, 0, 0]}
    row = shown(q, "a")
    assert [row[c] for c in ("running_gangs", "running_jobs", "used_gpus", "waiting_jobs", "waiting_gangs")] == [
        1, 5, 5, 1, 0
    ]  # fmt: skip
    q.call("cancel", job_ids=[claims[0].job_id])
    assert usage(q, "a")["a"]["jobs"] == 5, "told to stop is not stopped"
    claims[0].ack()
    assert usage(q, "a")["a"]["jobs"] == 4


def test_usage_is_told_apart_by_submitter(q: Q) -> None:
    worker = q.worker(slots=4)
    for role, count in (("one_test", 1), ("other_test", 2)):
        q.sql(f"set role {a_role(q.db, role, 'gangq_submitter')}")
        q.submit(count=count)
        q.sql("reset role")
    worker.claim()
    rows = q.sql("select submitter, jobs from gangq.queue_usage('{default}') order by submitter")
    assert rows == [{"submitter": "one_test", "jobs": 1}, {"submitter": "other_test", "jobs": 2}]


def test_a_viewer_reads_the_tree(q: Q) -> None:
    q.call("set_queue", name="a.b", paused=True)
    q.sql("set role gangq_viewer")
    assert [r["depth"] for r in q.sql("select * from gangq.queues")] == [0, 1, 0]


# A pause holds the whole subtree ----------------------------------------------------------------------------


def test_a_paused_ancestor_pauses_what_is_below_it_and_nothing_beside_it(q: Q) -> None:
    for name in ("a.b.c", "ab"):
        q.call("set_queue", name=name)
    worker = q.worker(slots=9, queues=["a", "a.b.c", "ab"])
    q.call("set_queue", name="a.b", paused=True)
    below, beside, above = q.submit(queue="a.b.c"), q.submit(queue="ab"), q.submit(queue="a")
    assert sorted(c.job_id for c in worker.claim()) == sorted([beside, above])
    assert shown(q, "a.b.c")["paused_by"] == shown(q, "a.b")["paused_by"] == "a.b"
    assert shown(q, "a")["paused_by"] is None
    q.call("set_queue", name="a.b", paused=False)
    assert worker.take().job_id == below


def test_a_draining_queue_works_off_what_it_has(q: Q) -> None:
    job = q.submit()
    q.call("set_queue", name="default", draining=True)
    assert q.worker().take().job_id == job


def test_a_draining_queue_takes_back_nothing_that_has_ended(q: Q) -> None:
    q.call("set_queue", name="a")
    q.call("set_queue", name="a.b")
    job, gang = q.submit(queue="a.b"), q.submit_gang(1, queue="a.b", wait_for_hardware=True)
    q.call("cancel", job_ids=[job], gang_ids=[gang.id])
    q.call("set_queue", name="a", draining=True)
    for what in ({"job_ids": [job]}, {"gang_ids": [gang.id]}):
        with refused(WRONG_STATE, "queue a is draining, and a.b is below it"):
            q.call("retry", **what)
    q.call("set_queue", name="a", draining=False)
    assert len(q.call("retry", job_ids=[job], gang_ids=[gang.id])) == 2


# What many of them cost -------------------------------------------------------------------------------------


@pytest.mark.own_database
def test_a_pass_reads_each_of_a_thousand_queues_a_few_times(q: Q) -> None:
    q.sql(
        "insert into gangq.queues_table (name) "
        "select distinct x.name from generate_series(1, 900) n "
        "cross join lateral (values ('q' || n / 10), ('q' || n / 10 || '.s' || n)) as x(name)"
    )
    q.sql("vacuum analyze gangq.queues_table")
    reads = (
        "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables "
        "where relid = 'gangq.queues_table'::regclass"
    )
    with q.db.transaction():
        before = q.value(reads)
        board = q.value("select gangq.board()")
        read = q.value(reads) - before
    names = {queue["name"] for queue in board["queues"]}
    assert len(names) > 990
    assert read < 5 * len(names)


# A pause with an end ----------------------------------------------------------------------------------------


def test_a_pause_ends_at_its_time_and_who_may_start_what_waited_is_woken(q: Q) -> None:
    q.call("set_queue", name="a.b")
    job, placed = q.submit(queue="a.b"), q.submit(queue="a.b", cpus=1)
    worker = q.worker(queues=["a.b"], slots=2, light=1, cpus=1)
    until = q.clock.now() + timedelta(seconds=20)
    q.call("set_queue", name="a", paused_until=until.isoformat())
    assert (shown(q, "a")["paused"], shown(q, "a")["paused_until"]) == (True, until)
    q.tick()
    assert worker.claim(sleep=True) == []
    q.live_on(19.7, worker)
    assert q.one("tick", force=True)["next_in_s"] == pytest.approx(0.3, abs=0.01)
    q.clock.advance(0.3)
    with psycopg.connect(q.db.info.dsn, autocommit=True) as listening:
        listening.execute("listen gangq_wake")
        assert q.one("tick")["detail"] == {"end_pauses": 1}
        assert {n.payload for n in listening.notifies(timeout=2, stop_after=2)} == {"a", "a.b"}
    assert (shown(q, "a")["paused"], shown(q, "a")["paused_until"]) == (False, None)
    q.place()
    assert {claim.job_id for claim in worker.claim()} == {job, placed}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"paused_until": "2000-01-01"}, "which is over"),
        ({"paused_until": "infinity"}, "year 2 to the year 9998"),
        ({"paused_until": "2999-01-01", "paused": False}, "for a queue that is paused"),
    ],
)
def test_a_pause_whose_end_makes_no_sense_is_refused(q: Q, settings: dict[str, Any], said: str) -> None:
    with refused(INVALID, said):
        q.call("set_queue", name="default", **settings)
    assert shown(q, "default")["paused"] is False


def test_a_pause_without_an_end_and_one_that_was_ended_forget_the_end(q: Q) -> None:
    for settings in ({"paused": True}, {"paused": False}, {"paused_until": None}):
        q.call("set_queue", name="default", paused_until="2999-01-01")
        q.call("set_queue", name="default", weight=2)
        assert shown(q, "default")["paused_until"] is not None, "only what is given changes"
        q.call("set_queue", name="default", **settings)
        assert shown(q, "default")["paused_until"] is None
    assert shown(q, "default")["paused"] is True, "paused_until alone was taken away"


def test_every_setting_of_a_queue_is_stored_under_its_own_name(q: Q) -> None:
    settings: dict[str, Any] = {
        "paused": True, "paused_until": q.value("select gangq.now() + interval '1 hour'"), "draining": True,
        "policy": "fair", "guaranteed": {"gpus": 2}, "maximum": {"gpus": 9}, "submitter_maximum": {"gpus": 4},
        "max_running_gangs": 11, "max_running_jobs": 12, "rate": "13/1m", "weight": 14, "preempts": False,
        "preemptible": False, "min_run_s": 15, "placement_timeout_s": 16, "timeout_style": "hard", "others": "shared",
        "ceilings": {"gangq_submitter": 17}, "max_attempts": 18, "max_crashes": 19, "max_trips": 20, "backoff_s": 21,
        "backoff_max_s": 22, "budget_s": 23, "max_payload_bytes": 24, "retention_done": "long",
        "retention_failed": "short",
    }  # fmt: skip
    names = {row["name"] for row in q.sql("select name from gangq.settable('gangq.queues_table'::regtype)")}
    assert set(settings) == names, "give a new setting a value here that no other has"
    q.call("set_queue", name="all", **settings | {"paused_until": settings["paused_until"].isoformat()})
    stored = q.sql("select * from gangq.queues_table where name = 'all'")[0]
    assert {name: stored[name] for name in settings} == settings
