"""What a gang can ask for: what of it is stored, and what is refused at submit."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, TOO_LARGE, WRONG_STATE, Gang, Q, Row, gpus, refused

DRIVER: Row = {"name": "driver", "count": 1, "gpus": 0, "task": "drive"}
EXECUTOR: Row = {"name": "executor", "count": 3}


def kind(q: Q, gang: Gang) -> Row:
    return q.sql(
        "select k.* from gangq.gang_kinds k join gangq.live_gangs g on g.kind_id = k.id where g.id = %(id)s",
        id=gang.id,
    )[0]


def roles(q: Q, gang: Gang, *columns: str) -> list[tuple[Any, ...]]:
    rows = q.sql(
        "select r.*, s.task, s.gpus, s.vram_mb, s.memory_mb, s.cpus::float, s.labels, s.selector, s.tolerates, "
        "s.model "
        "from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id "
        "join gangq.live_gangs g on g.kind_id = r.kind_id where g.id = %(id)s order by r.ordinal",
        id=gang.id,
    )
    return [tuple(row[column] for column in columns) for row in rows]


def stored(q: Q, gang: Gang) -> Row:
    return q.sql("select * from gangq.live_gangs where id = %(id)s", id=gang.id)[0]


def members(q: Q, gang: Gang, *columns: str) -> list[tuple[Any, ...]]:
    rows = q.sql("select * from gangq.live_jobs where gang_id = %(id)s order by rank", id=gang.id)
    return [tuple(row[column] for column in columns) for row in rows]


# Roles ------------------------------------------------------------------------------------------------------


def test_members_alike_are_one_role(q: Q) -> None:
    gang = q.submit_gang(3, gpus=2)
    assert roles(
        q, gang, "name", "min_members", "max_members", "first_rank", "strategy", "balanced", "gpus"
    ) == [("member", 3, 3, 0, "pack", False, 2)]
    assert members(q, gang, "rank", "role", "state") == [(n, 1, "blocked") for n in range(3)]


def test_ranks_follow_the_order_of_the_roles_and_ids_the_ranks(q: Q) -> None:
    gang = q.submit_gang(roles=[EXECUTOR, DRIVER, {"name": "sink", "count": 2}], payload={"p": 1})
    assert members(q, gang, "rank", "role") == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3), (5, 3)]
    assert roles(q, gang, "name", "first_rank", "task") == [
        ("executor", 0, "train"),
        ("driver", 3, "drive"),
        ("sink", 4, "train"),
    ]
    assert gang.job_ids == [member["id"] for member in gang.members] == sorted(gang.job_ids)
    assert gang.row["size"] == 6
    assert stored(q, gang)["shape_id"] == members(q, gang, "shape_id")[0][0]


def test_a_role_has_the_gangs_values_where_it_says_nothing(q: Q) -> None:
    alike = {
        "gpus": 2,
        "vram_mb": 100,
        "memory_mb": 200,
        "cpus": 1.5,
        "labels": {"site": "a"},
        "selector": [{"key": "gpu", "op": "exists", "values": []}],
        "tolerates": ["spot"],
        "model": "m",
    }
    placement = {"strategy": "spread", "balanced": True}
    other: Row = {
        "task": "other",
        "gpus": 1,
        "vram_mb": 50,
        "memory_mb": 1,
        "cpus": 0.5,
        "labels": {"site": "b"},
        "selector": [{"key": "gpu", "op": "absent", "values": []}],
        "tolerates": ["*"],
        "model": "n",
        "strategy": "strict_spread",
        "balanced": False,
    }
    gang = q.submit_gang(
        roles=[
            {"name": "a", "count": 1},
            {"name": "b", "count": 1, **other},
            {"name": "c", "count": 1, "gpus": None},
        ],
        **alike,
        **placement,
    )
    as_the_gang = tuple({"task": "train", **alike, **placement}.values())
    assert roles(q, gang, "task", *alike, *placement) == [as_the_gang, tuple(other.values()), as_the_gang]


def test_a_role_without_devices_needs_no_memory_on_them(q: Q) -> None:
    gang = q.submit_gang(roles=[DRIVER, EXECUTOR], gpus=1, vram_mb=100)
    assert roles(q, gang, "gpus", "vram_mb") == [(0, 0), (1, 100)]


def test_each_role_has_its_payload_or_payloads(q: Q) -> None:
    gang = q.submit_gang(
        roles=[
            {"name": "a", "count": 1, "payload": {"is": "a"}},
            {"name": "b", "count": 2, "payloads": [{"n": 0}, {"n": 1}]},
            {"name": "c", "count": 1},
        ],
        payload={"is": "gang"},
    )
    assert [m["payload"] for m in gang.members] == [{"is": "a"}, {"n": 0}, {"n": 1}, {"is": "gang"}]
    gang = q.submit_gang(roles=[DRIVER, EXECUTOR], payloads=[{"rank": n} for n in range(4)])
    assert [m["payload"] for m in gang.members] == [{"rank": n} for n in range(4)]


def test_gangs_that_ask_for_the_same_are_one_kind(q: Q) -> None:
    asked: Row = {"roles": [DRIVER, EXECUTOR], "prefer": "host", "apart": "x"}
    first = kind(q, q.submit_gang(**asked))
    assert (first["queue"], first["require"], first["prefer"], first["apart"]) == (
        "default",
        None,
        "host",
        "x",
    )
    assert (
        kind(q, q.submit_gang(**asked, payload={"n": 2}, name="other", failure_policy="fail"))["id"]
        == first["id"]
    )
    for change in (
        {"apart": "y"},
        {"prefer": None},
        {"require": "host"},
        {"gpus": 1},
        {"strategy": "spread"},
    ):
        assert kind(q, q.submit_gang(**{**asked, **change}))["id"] != first["id"]


# Elastic ----------------------------------------------------------------------------------------------------


def test_an_elastic_gang_has_a_row_for_every_member_it_may_have(q: Q) -> None:
    gang = q.submit_gang(roles=[DRIVER, {"name": "executor", "count": 10, "min": 6}])
    assert roles(q, gang, "min_members", "max_members") == [(1, 1), (6, 10)]
    assert len(gang.members) == gang.row["size"] == 11
    assert stored(q, gang)["world_size"] is None
    assert members(q, gang, "epoch_rank") == [(None,)] * 11
    gang = q.submit_gang(8, min_size=3)
    assert roles(q, gang, "min_members", "max_members") == [(3, 8)]
    assert len(gang.members) == 8


def test_an_elastic_gang_saves_by_rank_0_and_nothing_else(q: Q) -> None:
    assert stored(q, q.submit_gang(2))["checkpoint_mode"] == "each"
    assert stored(q, q.submit_gang(2, min_size=2))["checkpoint_mode"] == "each"
    assert stored(q, q.submit_gang(2, min_size=1))["checkpoint_mode"] == "rank0"
    with refused(INVALID, "checkpoint_mode"):
        q.submit_gang(2, min_size=1, checkpoint_mode="each")


# What the gang as a whole is to do --------------------------------------------------------------------------


def test_policies_are_stored_with_their_defaults(q: Q) -> None:
    columns = ("failure_policy", "completion", "preemptible", "timeout_s", "timeout_style", "budget_s")
    row = stored(q, q.submit_gang(2))
    assert tuple(row[c] for c in columns) == ("restart_gang", None, True, 900, "requeue", None)
    asked: Row = {
        "failure_policy": "shrink",
        "completion": "driver",
        "preemptible": False,
        "timeout_s": 60,
        "timeout_style": "soft",
        "budget_s": 30,
    }
    row = stored(q, q.submit_gang(roles=[DRIVER, {**EXECUTOR, "min": 1}], **asked))
    assert {key: row[key] for key in asked} == asked


def test_the_placement_timeout_is_the_gangs_else_its_nearest_queues_else_the_installations(q: Q) -> None:
    for name in ("a", "a.b", "a.b.c"):
        q.call("set_queue", name=name)
    q.sql("update gangq.queues_table set placement_timeout_s = 100, timeout_style = 'hard' where name = 'a'")
    q.sql("update gangq.queues_table set placement_timeout_s = 50 where name = 'a.b'")
    q.call("configure", placement_timeout_s=777)

    def waits(**asked: Any) -> tuple[float, str]:
        row = stored(q, q.submit_gang(1, **asked))
        assert (row["timeout_at"] - row["submitted_at"]).total_seconds() == row["timeout_s"]
        return row["timeout_s"], row["timeout_style"]

    assert waits() == (777, "requeue")
    assert waits(queue="a") == (100, "hard")
    assert waits(queue="a.b.c") == (50, "hard")
    assert waits(queue="a.b.c", timeout_s=7, timeout_style="soft") == (7, "soft")


def test_the_placement_timeout_starts_when_the_gang_is_due(q: Q) -> None:
    at = q.value("select gangq.now() + interval '1 hour'")
    row = stored(q, q.submit_gang(1, due_at=at, timeout_s=10))
    assert (row["timeout_at"] - at).total_seconds() == 10


def test_each_role_has_its_budget_and_the_gang_the_longest(q: Q) -> None:
    q.call("set_task", task="drive", budget_s=40)
    q.call("configure", budget_s=1000, budget_gpu_s=2000)
    gang = q.submit_gang(roles=[DRIVER, {**EXECUTOR, "budget_s": 50}])
    assert members(q, gang, "budget_s") == [(40,), (50,), (50,), (50,)]
    assert stored(q, gang)["budget_s"] == 50
    gang = q.submit_gang(roles=[DRIVER, EXECUTOR], budget_s=60)
    assert members(q, gang, "budget_s") == [(60,)] * 4, "what the gang says comes before its tasks' settings"
    gang = q.submit_gang(roles=[DRIVER, EXECUTOR])
    assert members(q, gang, "budget_s") == [(40,), (None,), (None,), (None,)]
    assert stored(q, gang)["budget_s"] == 1000, "the executors run under the installation's, which is longer"
    gang = q.submit_gang(roles=[DRIVER, {**EXECUTOR, "gpus": 1}])
    assert stored(q, gang)["budget_s"] == 2000
    assert stored(q, q.submit_gang(2))["budget_s"] is None


def test_a_budget_comes_from_the_nearest_queue_above(q: Q) -> None:
    q.call("set_queue", name="a", budget_s=9)
    q.call("set_queue", name="a.b")
    gang = q.submit_gang(1, queue="a.b")
    assert (members(q, gang, "budget_s"), stored(q, gang)["budget_s"]) == ([(9,)], 9)
    assert q.job(q.submit(queue="a.b"))["budget_s"] == 9


# Refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sqlstate", "named"),
    [
        ({"roles": {}}, INVALID, "roles is {}"),
        ({"roles": []}, INVALID, "roles is []"),
        ({"roles": [EXECUTOR] * 101}, INVALID, "roles is"),
        ({"roles": ["driver"]}, INVALID, "role 1"),
        ({"roles": [{"count": 1}]}, INVALID, "role 1"),
        ({"roles": [{"name": "", "count": 1}]}, INVALID, "role 1"),
        ({"roles": [{"name": "x" * 101, "count": 1}]}, INVALID, "role 1"),
        ({"roles": [{"name": "a"}]}, INVALID, "count null"),
        ({"roles": [{"name": "a", "count": 0}]}, INVALID, "count is 0"),
        ({"roles": [{"name": "a", "count": 1.5}]}, INVALID, "1.5"),
        ({"roles": [{"name": "a", "count": "many"}]}, INVALID, "many"),
        ({"roles": [{"name": "a", "count": 10**10}]}, INVALID, "10000000000"),
        ({"roles": [{"name": "a", "count": 2, "min": 0}]}, INVALID, "min is 0"),
        ({"roles": [{"name": "a", "count": 2, "min": 3}]}, INVALID, "count 2 and min 3"),
        ({"roles": [DRIVER, DRIVER]}, INVALID, "two roles are called driver"),
        ({"roles": [{**DRIVER, "queue": "gpu"}]}, INVALID, "role driver has no option 'queue'"),
        ({"roles": [{**DRIVER, "gpu": 1}]}, INVALID, "role driver has no option 'gpu'"),
        ({"roles": [{**DRIVER, "gpus": -1}]}, INVALID, "role driver: gpus is -1"),
        ({"roles": [{**DRIVER, "vram_mb": 5}]}, INVALID, "role driver: vram_mb"),
        ({"roles": [{**DRIVER, "tolerates": "spot"}]}, INVALID, "role driver: tolerates cannot be"),
        ({"roles": [{**DRIVER, "tolerates": ["a b"]}]}, INVALID, "role driver: tolerates"),
        ({"roles": [{**DRIVER, "selector": [1]}]}, INVALID, "role driver: the options of condition 1"),
        ({"roles": [{**DRIVER, "labels": []}]}, INVALID, "role driver: labels"),
        ({"roles": [{**DRIVER, "strategy": "stack"}]}, INVALID, "stack"),
        ({"roles": [{**DRIVER, "require": "rack"}]}, INVALID, "role driver names the topology level 'rack'"),
        ({"roles": [{**DRIVER, "prefer": "rack"}]}, INVALID, "role driver names the topology level 'rack'"),
        ({"roles": [{**DRIVER, "balanced": "so-so"}]}, INVALID, "so-so"),
        ({"roles": [{**DRIVER, "budget_s": 0}]}, INVALID, "role driver: budget_s is 0"),
        ({"roles": [{**DRIVER, "payload": {}, "payloads": [{}]}]}, INVALID, "both payload and payloads"),
        ({"roles": [{**DRIVER, "payloads": [{}, {}]}]}, INVALID, "1 member and its payloads are 2"),
        ({"roles": [{**DRIVER, "payloads": {}}]}, INVALID, "its payloads are {}"),
        ({"roles": [{**DRIVER, "payload": {}}], "payloads": [{}]}, INVALID, "both the gang and its role driver"),
        ({"roles": [DRIVER], "payloads": [{}, {}]}, INVALID, "2 payloads for a gang of 1"),
        ({"roles": [{**DRIVER, "payload": {"x": "y" * 2_000_000}}]}, TOO_LARGE, "payload"),
        ({"roles": [DRIVER, EXECUTOR], "size": 3}, INVALID, "4 members in all, and size is 3"),
        ({"roles": [{**EXECUTOR, "count": 100000}, DRIVER]}, INVALID, "100001 members"),
        ({"roles": [EXECUTOR], "min_size": 1}, INVALID, "both roles and min_size"),
        ({"roles": [EXECUTOR], "task": None}, INVALID, "role executor: a job needs a task"),
        ({"roles": [DRIVER], "queue": "nowhere"}, MISSING, "nowhere"),
        ({"size": 2, "min_size": 0}, INVALID, "min_size is 0"),
        ({"size": 2, "min_size": 3}, INVALID, "min_size is 3 of a gang of 2"),
        ({"size": 2, "strategy": "stack"}, INVALID, 'strategy is "stack"'),
        ({"size": 2, "require": "rack"}, INVALID, "the gang names the topology level 'rack'"),
        ({"size": 2, "prefer": "rack"}, INVALID, "the gang names the topology level 'rack'"),
        ({"size": 2, "require": "host", "strategy": "strict_spread"}, INVALID, "one host for all"),
        ({"size": 2, "apart": ""}, INVALID, "apart"),
        ({"size": 2, "selector": {}}, INVALID, "selector"),
        ({"size": 2, "tolerates": ["="]}, INVALID, "tolerates"),
        ({"size": 2, "failure_policy": "ignore"}, INVALID, "ignore"),
        ({"size": 2, "failure_policy": "shrink"}, INVALID, "no role may have fewer"),
        ({"size": 2, "completion": "driver"}, INVALID, "driver"),
        ({"size": 2, "timeout_s": 0}, INVALID, "timeout_s is 0"),
        ({"size": 2, "timeout_s": float("nan")}, INVALID, "timeout_s"),
        ({"size": 2, "timeout_s": 1.1e7}, INVALID, "timeout_s"),
        ({"size": 2, "timeout_style": "later"}, INVALID, "later"),
        ({"size": 2, "preemptible": "no"}, INVALID, "preemptible"),
        ({"size": 2, "balanced": 1}, INVALID, "balanced"),
        ({"size": 2, "payloads": {"a": 1}}, INVALID, "payloads"),
    ],
)  # fmt: skip
def test_a_gang_that_makes_no_sense_is_refused_naming_why(
    untouched: Q, asked: Row, sqlstate: str, named: str
) -> None:
    with refused(sqlstate, named):
        untouched.submit_gang(**asked)
    assert untouched.sql("select 1 from gangq.gangs") == []


def test_levels_must_be_of_the_installation_and_not_contradict_each_other(q: Q) -> None:
    q.call("configure", topology=["zone", "rack", "host", "nvlink"])
    for asked in (
        {"require": "zone", "prefer": "rack"},
        {"require": "rack", "prefer": "rack"},
        {"require": "rack", "strategy": "strict_spread"},
        {"require": "nvlink"},
    ):
        row = kind(q, q.submit_gang(2, **asked))
        assert (row["require"], row["prefer"]) == (asked.get("require"), asked.get("prefer"))
    with refused(INVALID, "requires one rack and prefers one zone"):
        q.submit_gang(2, require="rack", prefer="zone")
    with refused(INVALID, "one nvlink for all"):
        q.submit_gang(2, require="nvlink", strategy="strict_spread")
    with refused(INVALID, "role executor asks for a host for each member and for one host for all"):
        q.submit_gang(roles=[{**EXECUTOR, "require": "host", "strategy": "strict_spread"}])
    assert q.submit_gang(1, require="host", strategy="strict_spread").id, "one member has a host for itself"


# Limits of queues -------------------------------------------------------------------------------------------


def limit(q: Q, queue: str, **settings: Any) -> None:
    """Set by hand: what is tested is who heeds them."""
    q.call("set_queue", name=queue)
    for column, value in settings.items():
        q.sql(
            f"update gangq.queues_table set {column} = %(value)s where name = %(queue)s",
            value=value,
            queue=queue,
        )


@pytest.mark.parametrize(
    ("settings", "asked", "named"),
    [
        (
            {"maximum": '{"gpus": 7}'},
            {"size": 4, "gpus": 2},
            "8 gpus at once, and the maximum of queue a is 7",
        ),
        ({"maximum": '{"memory_mb": 99}'}, {"size": 2, "memory_mb": 50}, "100 memory_mb at once"),
        (
            {"maximum": '{"cpus": 2.5}'},
            {"size": 2, "cpus": 1.5},
            "3 cpus at once, and the maximum of queue a is 2.5",
        ),
        ({"maximum": '{"jobs": 1}'}, {"size": 2}, "2 jobs at once"),
        ({"max_running_jobs": 1}, {"size": 2}, "max_running_jobs of queue a is 1"),
        ({"submitter_maximum": '{"gpus": 1}'}, {"size": 2, "gpus": 1}, "submitter_maximum of queue a is 1"),
        ({"submitter_maximum": '{"jobs": 1}'}, {"size": 2}, "submitter_maximum of queue a is 1"),
        ({"submitter_maximum": '{"gangs": 0}'}, {"size": 2}, "1 gangs at once"),
    ],
)
def test_a_gang_that_alone_exceeds_a_limit_is_refused_with_the_numbers(
    q: Q, settings: Row, asked: Row, named: str
) -> None:
    limit(q, "a", **settings)
    limit(q, "a.b")
    for queue in ("a", "a.b"):
        with refused(INVALID, named):
            q.submit_gang(queue=queue, **asked)
    fits: Row = {**asked, "size": 1} if "gangs" not in str(settings) else {"size": 1, "queue": "default"}
    assert q.submit_gang(**{"queue": "a.b", **fits}).id


def test_an_elastic_gang_and_roles_count_with_their_minimum(q: Q) -> None:
    limit(q, "a", maximum='{"gpus": 7, "jobs": 4}')
    fits: Row = {"roles": [DRIVER, {"name": "executor", "count": 10, "min": 3}], "gpus": 2, "queue": "a"}
    assert q.submit_gang(**fits).row["size"] == 11
    with refused(INVALID, "8 gpus"):
        q.submit_gang(**{**fits, "roles": [DRIVER, {"name": "executor", "count": 10, "min": 4}]})


def test_a_queue_shut_by_its_running_limit_still_takes_work(q: Q) -> None:
    limit(q, "a", max_running_jobs=0, max_running_gangs=0)
    assert q.submit_gang(2, queue="a").id
    assert q.submit(queue="a")


def test_a_solo_job_that_exceeds_a_maximum_is_refused_and_many_small_ones_are_not(q: Q) -> None:
    limit(q, "a", maximum='{"gpus": 2}')
    limit(q, "a.b")
    for queue in ("a", "a.b"):
        assert len(q.submit(queue=queue, gpus=2, count=3)) == 3
        with refused(INVALID, "3 gpus at once, and the maximum of queue a is 2"):
            q.submit(queue=queue, gpus=3)


def test_a_draining_queue_or_one_below_it_takes_nothing_new_and_a_paused_one_does(q: Q) -> None:
    limit(q, "a", draining=True)
    limit(q, "a.b", paused=True)
    limit(q, "ab", paused=True)
    for queue in ("a", "a.b"):
        for submit in (q.submit, lambda **asked: q.submit_gang(1, **asked)):
            with refused(WRONG_STATE, "queue a is draining"):
                submit(queue=queue)
    assert q.submit(queue="ab")
    assert q.submit_gang(1, queue="ab").id


# Hardware ---------------------------------------------------------------------------------------------------


def test_a_gang_larger_than_all_hardware_known_is_refused_with_the_numbers(q: Q) -> None:
    q.worker("w1", devices=gpus(8000, 8000), slots=4)
    q.worker("w2", devices=gpus(8000, prefix="H"), slots=4).retire()
    assert q.submit_gang(2, gpus=1).note is None
    assert "could hold 2 of 3" in q.submit_gang(3, gpus=1).note, "w2 may come back"
    with refused(INVALID, "the 2 known workers of queue default, ended ones included, could hold 3 of 4"):
        q.submit_gang(4, gpus=1)
    assert q.submit_gang(8, min_size=3, gpus=1).id, "an elastic gang counts with its minimum"
    with refused(INVALID, "could hold 0 of 1"):
        q.submit_gang(1, gpus=3)


def test_a_device_that_has_moved_to_another_worker_is_counted_once(q: Q) -> None:
    q.worker("w1", devices=gpus(8000), slots=4).retire()
    q.worker("w2", devices=gpus(8000), slots=4)
    with refused(INVALID, "could hold 1 of 2"):
        q.submit_gang(2, gpus=1)


def test_hardware_is_known_by_the_latest_start_of_its_worker_and_for_its_retention(q: Q) -> None:
    q.worker("w1", slots=9).retire()
    q.worker("w1", slots=2).retire()
    q.worker("w2", slots=2)
    with refused(INVALID, "4 of 5"):
        q.submit_gang(5)
    q.call("configure", incarnation_retention="1 hour")
    q.later(3700)
    with refused(INVALID, "2 of 3"):
        q.submit_gang(3)


def test_what_no_worker_known_of_its_queue_could_run_is_taken_only_when_it_waits_for_hardware(q: Q) -> None:
    q.workers(2)
    roles = [EXECUTOR | {"count": 2}, {"name": "x", "count": 9, "labels": {"a": "b"}}]
    asked = [
        ("carries labels", {"size": 9, "labels": {"gpu": "h100"}}),
        ("meets the selector", {"size": 9, "selector": [{"key": "gpu", "op": "exists"}]}),
        ("role x: none of 2 workers", {"roles": roles}),
    ]
    for why, more in asked:
        with refused(INVALID, why):
            q.submit_gang(**more)
        gang = q.submit_gang(**more, wait_for_hardware=True)
        assert why in gang.note
        assert stored(q, gang)["note"] == gang.note


def test_a_queue_that_no_worker_has_ever_served_takes_gangs_with_a_note(q: Q) -> None:
    q.workers(2)
    q.call("set_queue", name="new")
    assert "no registered worker serves queue new" in q.submit_gang(9, queue="new").note


def test_roles_that_fit_each_for_itself_and_not_together_are_refused(q: Q) -> None:
    q.worker(slots=9, devices=gpus(8000, 8000))
    both = [{"name": "a", "count": 1}, {"name": "b", "count": 2}]
    with refused(INVALID, "together 2 of 3 GPUs"):
        q.submit_gang(roles=both, gpus=1)
    assert q.submit_gang(roles=[{**both[0], "gpus": 0}, both[1]], gpus=1).note is None
    with refused(INVALID, "together 9 of 10 slots"):
        q.submit_gang(roles=[{"name": "a", "count": 5}, {"name": "b", "count": 5}])


def test_a_strict_strategy_is_judged_by_hosts(q: Q) -> None:
    for n in range(4):
        q.worker(f"w{n}", host=f"h{n // 2}", slots=2)
    assert q.submit_gang(4, strategy="strict_pack").note is None
    with refused(INVALID, "4 of 5 member on one host"):
        q.submit_gang(5, strategy="strict_pack")
    assert q.submit_gang(2, strategy="strict_spread").note is None
    with refused(INVALID, "2 of 3 member on a host each"):
        q.submit_gang(3, strategy="strict_spread")
    assert q.submit_gang(8, strategy="spread").note is None


def test_a_required_level_is_judged_by_its_best_domain(q: Q) -> None:
    q.call("configure", topology=["rack", "host"])
    for n, rack in enumerate(["r1", "r2", "r2"]):
        q.worker(f"w{n}", labels={"rack": rack}, slots=2)
    assert q.submit_gang(4, require="rack").note is None
    with refused(INVALID, "the best rack, r2, has room for 4 of 5 member"):
        q.submit_gang(5, require="rack")
    assert q.submit_gang(5, prefer="rack").note is None
    together = [{"name": "a", "count": 2}, {"name": "b", "count": 3}]
    with refused(INVALID, "the best rack, r2, has room for 2 of 2 a, 3 of 3 b; together 4 of 5 slots"):
        q.submit_gang(roles=together, require="rack")
    assert q.submit_gang(roles=[{**role, "require": "rack"} for role in together]).note is None
    with refused(INVALID, "4 of 5 b in one rack"):
        q.submit_gang(roles=[together[0] | {"count": 1}, {"name": "b", "count": 5, "require": "rack"}])


def test_a_level_that_no_worker_known_has_a_label_for_is_a_note(q: Q) -> None:
    q.call("configure", topology=["rack", "host"])
    q.worker(slots=4)
    assert "none has a label rack" in q.submit_gang(2, require="rack").note
    one = {"name": "one", "count": 2, "require": "rack"}
    assert "0 of 2 one in one rack" in q.submit_gang(roles=[one]).note


# Settings ---------------------------------------------------------------------------------------------------


def test_the_settings_of_placement_are_configured(q: Q) -> None:
    wanted: Row = {
        "topology": ["zone", "host"],
        "reservations": 0,
        "placement_timeout_s": 60,
        "preemptions_per_pass": 0,
        "record_decisions": True,
    }
    q.call("configure", **wanted)
    q.call("configure")
    row = q.sql("select * from gangq.settings")[0]
    assert {key: row[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"topology": ["rack"]}, "topology"),
        ({"topology": []}, "topology"),
        ({"topology": ["host", "host"]}, "topology"),
        ({"topology": ["", "host"]}, "topology"),
        ({"topology": [None, "host"]}, "topology"),
        ({"topology": [*"abcdefgh", "host"]}, "topology"),
        ({"reservations": -1}, "reservations"),
        ({"reservations": 99999}, "reservations is 99999"),
        ({"placement_timeout_s": 0}, "placement_timeout_s"),
        ({"preemptions_per_pass": 1001}, "preemptions_per_pass"),
    ],
)
def test_a_setting_of_placement_that_makes_no_sense_is_refused(q: Q, setting: Row, named: str) -> None:
    with refused(INVALID, named):
        q.call("configure", **setting)


def test_a_level_that_a_live_gang_asks_for_stays(q: Q) -> None:
    q.call("configure", topology=["zone", "rack", "host"])
    gang = q.submit_gang(roles=[{"name": "a", "count": 1, "prefer": "rack"}])
    with refused(WRONG_STATE, f"gang g{gang.id} asks for the topology level rack"):
        q.call("configure", topology=["zone", "host"])
    q.call("configure", topology=["rack", "host"])
    q.call("cancel", gang_ids=[gang.id])
    q.call("configure", topology=["host"])


def test_a_retry_of_a_gang_whose_level_is_gone_is_refused(q: Q) -> None:
    q.call("configure", topology=["rack", "host"])
    q.worker("w1", slots=2, labels={"rack": "r1"})
    gang = q.submit_gang(2, require="rack")
    q.call("cancel", gang_ids=[gang.id])
    q.call("configure", topology=["host"])
    with refused(INVALID, f"gang g{gang.id} names the topology level 'rack'"):
        q.call("retry", gang_ids=[gang.id])


def test_a_gang_whose_level_does_not_exist_is_not_placed_as_if_it_had_asked_for_none(q: Q) -> None:
    q.call("configure", topology=["rack", "host"])
    q.worker("w1", labels={"rack": "r1"})
    q.worker("w2", labels={"rack": "r2"})
    gang = q.submit_gang(2, require="rack", wait_for_hardware=True)
    q.sql("update gangq.settings set topology = '{host}'")
    q.tick()
    assert gang.state == "blocked"
    gang.cancel()


def test_a_level_that_a_gang_not_yet_committed_asks_for_stays(q: Q, dsn: str) -> None:
    q.call("configure", topology=["rack", "host"])
    with q.connected(dsn) as one, q.connected(dsn) as other, one.db.transaction(), other.db.transaction():
        one.submit_gang(2, require="rack", wait_for_hardware=True)
        other.submit_gang(2, require="rack", wait_for_hardware=True)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            q.call("configure", topology=["host"])
    with refused(WRONG_STATE, "asks for the topology level rack"):
        q.call("configure", topology=["host"])


# Afterwards -------------------------------------------------------------------------------------------------


def test_a_retried_gang_asks_for_what_it_asked_for(q: Q) -> None:
    q.call("set_task", task="drive", budget_s=40)
    gang = q.submit_gang(
        roles=[DRIVER, {"name": "executor", "count": 5, "min": 2, "payloads": [{"n": n} for n in range(5)]}],
        strategy="spread",
        prefer="host",
        apart="x",
        failure_policy="shrink",
        completion="driver",
        timeout_s=5,
        timeout_style="hard",
        preemptible=False,
        selector=[{"key": "gpu", "op": "exists"}],
    )
    changing = {"submitted_at", "timeout_at", "order_key", "note", "final_token"}

    def everything() -> tuple[Row, list[Row]]:
        jobs = q.sql("select * from gangq.live_jobs where gang_id = %(id)s order by rank", id=gang.id)
        return (
            {k: v for k, v in stored(q, gang).items() if k not in changing},
            [{k: v for k, v in job.items() if k not in changing} for job in jobs],
        )

    before = everything()
    q.call("cancel", gang_ids=[gang.id])
    q.later(100)
    q.call("retry", gang_ids=[gang.id])
    assert everything() == before
    row = stored(q, gang)
    assert (row["timeout_at"] - row["submitted_at"]).total_seconds() == 5


def test_a_gang_of_members_alike_is_still_placed_and_runs(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1, preemptible=False, failure_policy="fail", timeout_s=60)
    workers = [q.worker(name, devices=gpus(8000, prefix=name)) for name in ("a", "b")]
    for claim in gang.start(*workers):
        claim.complete()
    assert gang.state == "done"
    row = q.sql("select * from gangq.gang_history where gang_id = %(id)s", id=gang.id)[0]
    assert (row["failure_policy"], row["preemptible"], row["timeout_s"]) == ("fail", False, 60)
