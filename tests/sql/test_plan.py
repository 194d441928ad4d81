"""What if: the decision on a changed board is what is decided once the change is real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gangq.decider.previews import plan_steps
from gangq.placement.board import Board
from gangq.placement.whatif import edit
from sql.drive import INVALID, MISSING, Q, gpus, in_steps, refused

Row = dict[str, Any]


def plan(q: Q, *changes: Any) -> list[Row]:
    return [row._asdict() for row in in_steps(q.db, plan_steps(list(changes)))]


def edited(q: Q, *changes: Row) -> Board:
    """The board with these changes."""
    board = Board.from_json(q.value("select gangq.board() as board"))
    kinds = [kind.id for kind in board.kinds]
    return edit(board, list(changes), q.one("preview", changes=list(changes), kinds=kinds))


def foreseen(q: Q, *changes: Row) -> dict[int, tuple[str, Any]]:
    """Of every gang that exists what the plan says, and of a start the hosts."""
    return {
        row["gang_id"]: (row["after"], row["hosts"] if row["after"] == "start" else None)
        for row in plan(q, *changes)
        if row["after"] in ("start", "plan", "wait")
    }


def decided(q: Q) -> dict[int, tuple[str, Any]]:
    """The same of the real decision."""
    hosts = {row["id"]: row["host"] for row in q.sql("select id, host from gangq.incarnations")}
    return {
        int(ask[1:]): (
            one.action,
            dict(Counter(hosts[seat.worker] for seat in one.seats)) if one.seats else None,
        )
        for ask, one in q.decisions().items()
    }


@pytest.fixture
def fleet(q: Q) -> Q:
    """A fleet that the test may change."""
    return populated(q)


@pytest.fixture(scope="module")
def only_read(untouched: Q) -> Q:
    """The same fleet, for tests that change nothing."""
    return populated(untouched)


def populated(q: Q) -> Q:
    """Three hosts of four devices, of which gang 1 and job 1 hold some; five gangs that wait, in two queues."""
    q.call("set_queue", name="research.vision")
    for n in range(3):
        q.worker(
            f"w{n}",
            slots=4,
            memory_mb=4000,
            cpus=8,
            queues=["default", "research.vision"],
            labels={"gpu": "h100"},
            devices=gpus(*[100] * 4, prefix=f"W{n}-"),
        )
    workers = q.sql("select id from gangq.incarnations order by id")
    q.submit_gang(5, gpus=1, budget_s=1000)
    q.submit("solo", gpus=2, budget_s=500)
    q.place()
    for row in workers:
        q.call("claim", incarnation=row["id"], max_jobs=10)
    assert q.value("select state from gangq.gangs where id = 1") == "running"
    for queue, size, priority in (
        ("default", 6, 5),
        ("default", 3, 0),
        ("research.vision", 4, 0),
        ("research.vision", 2, 0),
        ("default", 2, -3),
    ):
        q.submit_gang(size, gpus=1, queue=queue, priority=priority, budget_s=300)
    return q


def really_add_workers(q: Q) -> None:
    for n in (1, 2):
        q.worker(
            f"extra-{n}",
            host=f"extra-{n}",
            slots=4,
            memory_mb=4000,
            cpus=8,
            queues=["default", "research.vision"],
            labels={"gpu": "h100"},
            devices=gpus(*[100] * 4, prefix=f"X{n}-"),
        )


def really_cancel_the_running_gang(q: Q) -> None:
    q.call("cancel", gang_ids=[1])
    for row in q.sql("select id, token from gangq.live_jobs where gang_id = 1"):
        q.call("ack_preempted", job_id=row["id"], token=row["token"])
    assert q.value("select state from gangq.gangs where id = 1") == "cancelled"


def really_cancel_the_running_job(q: Q) -> None:
    (row,) = q.sql("select id, token from gangq.live_jobs where gang_id is null")
    q.call("cancel", job_ids=[row["id"]])
    q.call("ack_preempted", job_id=row["id"], token=row["token"])


def really_remove_the_host(q: Q) -> None:
    (row,) = q.sql("select id, name from gangq.incarnations where host = 'host-spare'")
    q.call("retire_worker", incarnation=row["id"], final=True)


SUBMITTED = {"task": "new", "size": 3, "gpus": 1, "priority": 7, "budget_s": 100, "strategy": "spread"}
CHANGES: dict[str, tuple[Row, Callable[[Q], Any]]] = {
    "nothing": ({}, lambda q: None),
    "workers like one": ({"add_workers": 2, "like": "w0", "name": "extra"}, really_add_workers),
    "workers described": (
        {
            "add_workers": 2,
            "name": "extra",
            "gpus": 4,
            "vram_mb": 100,
            "memory_mb": 4000,
            "cpus": 8,
            "labels": {"gpu": "h100"},
            "queues": ["default", "research.vision"],
        },
        really_add_workers,
    ),
    "a priority": (
        {"priority": {"gang": 6, "value": 50}},
        lambda q: q.call("set_priority", gang_ids=[6], priority=50),
    ),
    "a gang that waits is cancelled": ({"cancel": {"gang": 2}}, lambda q: q.call("cancel", gang_ids=[2])),
    "a gang that runs is cancelled": ({"cancel": {"gang": 1}}, really_cancel_the_running_gang),
    "a job that runs is cancelled": ({"cancel": {"job": 6}}, really_cancel_the_running_job),
    "a quota": (
        {"quota": {"queue": "research", "maximum": {"gpus": 3}}},
        lambda q: q.call("set_queue", name="research", maximum={"gpus": 3}),
    ),
    "a limit on gangs": (
        {"quota": {"queue": "research.vision", "max_running_gangs": 0}},
        lambda q: q.call("set_queue", name="research.vision", max_running_gangs=0),
    ),
    "a pause": (
        {"quota": {"queue": "research", "paused": True}},
        lambda q: q.call("set_queue", name="research", paused=True),
    ),
    "a host less": ({"remove_host": "host-spare"}, really_remove_the_host),
    "a submission": ({"submit": SUBMITTED}, lambda q: q.call("submit_gang", **SUBMITTED)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_plan_is_what_the_decision_then_is(fleet: Q, change: str) -> None:
    q = fleet
    if change == "a host less":
        q.worker("spare", slots=4, queues=["default"], devices=gpus(*[100] * 4, prefix="S-"))
    asked, really = CHANGES[change]
    changes = [asked] if asked else []
    said = foreseen(q, *changes)
    before = q.value("select md5(array_agg(g::text order by g.id)::text) from gangq.live_gangs g")
    assert before == q.value("select md5(array_agg(g::text order by g.id)::text) from gangq.live_gangs g")
    really(q)
    is_so = decided(q)
    if "submit" in asked:
        said[7] = said.pop(None)  # type: ignore[call-overload]
    assert said == is_so
    starts = {gang for gang, (action, _) in is_so.items() if action == "start"}
    q.place()
    placed = {row["id"] for row in q.sql("select id from gangq.gangs where state = 'reserved'")}
    assert placed == starts, "and a pass does that"


def test_every_change_alters_something_here(fleet: Q) -> None:
    unmoved = []
    fleet.worker("spare", slots=4, queues=["default"], devices=gpus(*[100] * 4, prefix="S-"))
    for name, (asked, _) in CHANGES.items():
        if asked and not any(row["changed"] for row in plan(fleet, asked)):
            unmoved.append(name)
    assert unmoved == []


def test_before_and_after_of_each_gang(fleet: Q) -> None:
    rows = {row["gang_id"]: row for row in plan(fleet, {"cancel": {"gang": 1}}, {"cancel": {"gang": 3}})}
    assert (rows[2]["before"], rows[2]["after"], rows[2]["changed"]) == ("plan", "start", True)
    assert rows[2]["members"] == 6
    assert sum(rows[2]["hosts"].values()) == 6
    assert (rows[3]["after"], rows[3]["why"]) == ("gone", "is no longer there")


def test_a_host_goes_with_every_gang_that_has_a_member_on_it(fleet: Q) -> None:
    """Gang 1 holds all of host-w0 and one device of another host, which comes free too."""
    (host,) = [
        row["host"]
        for row in fleet.sql("select host, count(*) as n from gangq.jobs where gang_id = 1 group by host")
        if row["n"] == 4
    ]
    rows = {row["gang_id"]: row for row in plan(fleet, {"remove_host": host})}
    assert rows[2]["after"] == "start"
    assert host not in rows[2]["hosts"]


def test_several_changes_at_once_are_all_made(fleet: Q) -> None:
    rows = plan(
        fleet,
        {"submit": {**SUBMITTED, "size": 8}},
        {
            "submit": {
                "task": "roles",
                "priority": 6,
                "roles": [{"name": "a", "count": 1}, {"name": "b", "count": 9, "min": 2, "gpus": 1}],
            }
        },
        {"add_workers": 3, "like": "w1"},
    )
    new = [row for row in rows if row["gang_id"] is None]
    assert [(row["task"], row["before"], row["after"], row["size"]) for row in new] == [
        ("new", "absent", "start", 8),
        ("roles", "absent", "start", 10),
    ]
    assert 3 <= new[1]["members"] <= 10


def test_a_submission_with_a_selector_goes_where_it_may(q: Q) -> None:
    q.worker("a", labels={"zone": "eu"})
    q.worker("b", labels={"zone": "us"})
    q.worker("c", labels={"zone": "us"}, taints=["spot"])
    spec = {"task": "x", "size": 1, "selector": [{"key": "zone", "op": "!=", "values": ["eu"]}]}
    (row,) = plan(q, {"submit": spec})
    assert row["hosts"] == {"host-b": 1}
    (row,) = plan(q, {"submit": {**spec, "size": 2, "tolerates": ["spot"]}})
    assert row["hosts"] == {"host-b": 1, "host-c": 1}
    (row,) = plan(q, {"submit": {**spec, "size": 2}})
    assert row["after"] == "wait"


def test_new_workers_where_there_are_none(q: Q) -> None:
    gang = q.submit_gang(2, gpus=4, vram_mb=50)
    assert [row["after"] for row in plan(q)] == ["wait"]
    (row,) = plan(q, {"add_workers": 2, "gpus": 4, "vram_mb": 80})
    assert (row["gang_id"], row["after"], row["hosts"]) == (gang.id, "start", {"new1-1": 1, "new1-2": 1})
    (row,) = plan(q, {"add_workers": 2, "gpus": 4, "vram_mb": 20})
    assert row["after"] == "wait"


def test_nothing_waits_and_nothing_is_planned(q: Q) -> None:
    assert plan(q) == []
    q.worker()
    assert plan(q, {"cancel": {"job": q.submit()}}) == []


def test_a_light_job_that_runs_may_be_cancelled_in_a_plan(q: Q) -> None:
    q.submit()
    light = q.worker().take()
    assert q.value("select light from gangq.live_jobs")
    gang = q.submit_gang(1, gpus=1, wait_for_hardware=True)
    (row,) = plan(q, {"cancel": {"job": light.job_id}})
    assert (row["gang_id"], row["after"]) == (gang.id, "wait")


def test_no_two_devices_of_new_workers_have_one_id(q: Q) -> None:
    (added,) = q.one("preview", changes=[{"add_workers": 3, "gpus": 2}], kinds=[])
    ids = [device["id"] for new in added["workers"] for device in new["worker"]["devices"]]
    assert len(ids) == len(set(ids)) == 6


def test_a_submission_is_planned_as_its_task_is_declared(q: Q) -> None:
    q.call("set_queue", name="lab", budget_s=900)
    q.call("set_queue", name="lab.deep")
    declared = {"train": {"queue": "lab.deep", "priority": 7, "gpus": 1, "budget_s": 50}}
    q.worker(queues=["lab.deep"], slots=2, devices=gpus(10, 10), task_options=declared)
    long = {"task": "other", "size": 2, "queue": "lab.deep"}
    told, slow = q.one(
        "preview", changes=[{"submit": {"task": "train", "size": 2}}, {"submit": long}], kinds=[]
    )
    assert (told["kind"]["queue"], told["ask"]["priority"], told["ask"]["estimate_s"]) == ("lab.deep", 7, 50)
    assert slow["ask"]["estimate_s"] == 900


@pytest.mark.parametrize(
    ("change", "sqlstate", "named"),
    [
        ({}, INVALID, "change 1"),
        ({"explode": 1}, INVALID, "explode"),
        ({"cancel": {"gang": 1}, "remove_host": "x"}, INVALID, "change 1"),
        ({"add_workers": 0, "like": "w0"}, INVALID, "1 to 1000"),
        ({"add_workers": "two"}, INVALID, "two"),
        ({"add_workers": 1, "gpus": "many"}, INVALID, "many"),
        ({"add_workers": 1, "wheels": 4}, INVALID, "wheels"),
        ({"add_workers": 1, "like": "nobody"}, MISSING, "nobody"),
        ({"add_workers": 1, "queues": ["nowhere"]}, MISSING, "nowhere"),
        ({"remove_host": "nowhere"}, MISSING, "nowhere"),
        ({"priority": {"gang": 2, "value": 5000}}, INVALID, "5000"),
        ({"priority": {"gang": 99, "value": 5}}, MISSING, "99"),
        ({"priority": 7}, INVALID, "value"),
        ({"cancel": {"job": 99}}, MISSING, "99"),
        ({"cancel": "all"}, INVALID, "all"),
        ({"cancel": {}}, INVALID, "one gang or one single job"),
        ({"cancel": {"gang": 1, "job": 6}}, INVALID, "one gang or one single job"),
        ({"cancel": {"gang": 1, "value": 5}}, INVALID, "one gang or one single job"),
        ({"priority": {"gang": 2, "job": 6, "value": 5}}, INVALID, "job"),
        ({"quota": {"queue": "nowhere", "maximum": {}}}, MISSING, "nowhere"),
        ({"quota": {"queue": "default", "maximum": {"wheels": 4}}}, INVALID, "wheels"),
        ({"quota": {"queue": "default", "colour": "red"}}, INVALID, "colour"),
        ({"submit": {"task": "x"}}, INVALID, "size"),
        ({"submit": {"size": 2}}, INVALID, "task"),
        ({"submit": {"task": "x", "size": 2, "wheels": 4}}, INVALID, "wheels"),
        ({"submit": {"task": "x", "size": 2, "queue": "nowhere"}}, MISSING, "nowhere"),
        ({"submit": {"task": "x", "size": 2, "require": "galaxy"}}, INVALID, "galaxy"),
        ({"submit": {"task": "x", "size": "big"}}, INVALID, "big"),
        ({"submit": 3}, INVALID, "submit"),
        ({"submit": {"task": "x", "size": 2, "memory_mb": 2**63 - 1}}, INVALID, "memory_mb"),
        ({"submit": {"task": "x", "size": 2, "cpus": "NaN"}}, INVALID, "NaN"),
        ({"submit": {"task": "x", "size": 2, "budget_s": "NaN"}}, INVALID, "budget_s"),
        ({"submit": {"task": "x", "roles": [{"name": "a", "count": 1}] * 2}}, INVALID, "two roles"),
        (
            {
                "submit": {
                    "task": "x",
                    "roles": [{"name": "a", "count": 60000}, {"name": "b", "count": 60000}],
                }
            },
            INVALID,
            "120000",
        ),
        ({"add_workers": 1, "gpus": -1}, INVALID, "-1"),
        ({"add_workers": 1, "gpus": 300_000_000}, INVALID, "300000000"),
        ({"add_workers": 1, "cpus": "NaN"}, INVALID, "NaN"),
        ({"add_workers": 1, "slots": -5}, INVALID, "-5"),
        ({"add_workers": 1, "labels": 5}, INVALID, "labels"),
        ({"quota": {"queue": "default", "paused": None}}, INVALID, "paused"),
        ({"quota": {"queue": "default", "max_running_jobs": -3}}, INVALID, "-3"),
    ],
    ids=str,
)
def test_a_bad_change_is_refused_naming_it(only_read: Q, change: Row, sqlstate: str, named: str) -> None:
    with refused(sqlstate, named):
        plan(only_read, change)


@pytest.mark.parametrize("role", ["gangq_viewer", "gangq_worker", "gangq_submitter", "gangq_admin"])
def test_every_role_may_plan_and_nothing_is_written(fleet: Q, role: str) -> None:
    """In a read-only transaction, as on a standby."""
    every = [
        asked
        for asked, _ in CHANGES.values()
        if asked and "remove_host" not in asked and asked != {"cancel": {"gang": 2}}
    ]
    with fleet.db.transaction(force_rollback=True):
        fleet.sql("set transaction read only")
        fleet.sql(f"set local role {role}")
        assert plan(fleet, *every)


def test_a_read_only_transaction_would_refuse_a_write(fleet: Q) -> None:
    with fleet.db.transaction(force_rollback=True):
        fleet.sql("set transaction read only")
        with refused("25006"):
            fleet.place()


def test_what_a_new_worker_leaves_null_is_as_if_it_had_been_left_out(q: Q) -> None:
    q.call("set_queue", name="elsewhere")
    q.worker(slots=1)
    waits = q.submit_gang(2, labels={"gpu": "h100"}, wait_for_hardware=True)
    nothing = {"labels": None, "queues": None, "gpus": None, "slots": None}
    assert foreseen(q, {"add_workers": 2, **nothing})[waits.id][0] == "wait", "they carry no labels"
    assert foreseen(q, {"add_workers": 2, **nothing, "labels": {"gpu": "h100"}})[waits.id][0] == "start"


def test_a_queue_is_open_when_neither_it_nor_one_above_it_is_paused(q: Q) -> None:
    q.call("set_queue", name="a", paused=True)
    q.call("set_queue", name="a.b", paused=True)
    q.call("set_queue", name="a.c")
    q.worker(queues=["a.b", "a.c"], slots=2)
    below = {queue: q.submit_gang(1, queue=queue).id for queue in ("a.b", "a.c")}

    def opens(**paused: bool) -> list[str]:
        changes = [
            {"quota": {"queue": name.replace("_", "."), "paused": is_so}} for name, is_so in paused.items()
        ]
        made = foreseen(q, *changes)
        return [queue for queue, gang in below.items() if made[gang][0] == "start"]

    assert opens(a=False) == ["a.c"], "a.b is paused itself"
    assert opens(a_c=False) == [], "a is still paused"
    assert opens(a=False, a_b=False) == ["a.b", "a.c"]
    assert opens(a=False, a_b=False, a_c=True) == ["a.b"]
    assert opens(a_b=False, a=False) == ["a.b", "a.c"]


def displacing(q: Q) -> list[int]:
    """One of three workers' gangs has to go for the first that waits; another two gangs wait behind it."""
    q.sql("update gangq.queues_table set min_run_s = 0")
    workers = [q.worker(f"w{n}", slots=1) for n in range(3)]
    for priority, budget_s in ((0, 1000), (7, 2000), (7, 5000)):
        q.submit_gang(1, priority=priority, budget_s=budget_s).start(*workers)
    q.live_on(10, *workers)
    return [q.submit_gang(size, priority=p, budget_s=50).id for size, p in ((1, 5), (1, 1), (2, 1))]


def test_a_displaced_gang_has_gone_after_its_grace_in_the_plan_too(q: Q) -> None:
    displacing(q)
    real = [(ask, one.action, one.starts_at) for ask, one in q.decisions().items()]
    assert [action for _, action, _ in real] == ["stop", "plan", "plan"]
    foretold = [
        (f"g{row['gang_id']}", row["after"], row["starts_after"].timestamp())
        for row in plan(q)
        if row["after"] in ("stop", "plan")
    ]
    assert [one[:2] for one in foretold] == [one[:2] for one in real]
    assert [one[2] for one in foretold] == pytest.approx([one[2] for one in real])
    assert plan(q)[-1]["after"] == "displaced"


def test_what_is_kept_for_a_gang_goes_with_it(q: Q) -> None:
    first, second, _ = displacing(q)
    q.tick()
    assert len(q.planned_seats(kept=True)) == 1
    victim = q.value("select gang_id from gangq.preemptions")
    made = foreseen(q, {"cancel": {"gang": first}}, {"cancel": {"gang": victim}})
    assert made[second][0] == "start", "nobody holds that worker, and nothing is kept there"


@pytest.mark.parametrize(("change", "left"), [("cancel", 4), ("remove_host", 2)])
def test_with_a_gang_go_its_surplus_members(q: Q, change: str, left: int) -> None:
    workers = [q.worker(f"w{n}", slots=2, memory_mb=100) for n in range(2)]
    elastic = q.submit_gang(3, min_size=1, failure_policy="shrink", memory_mb=50)
    elastic.start(*workers)
    behind = q.submit_gang(left, memory_mb=50)
    changes = {"cancel": {"cancel": {"gang": elastic.id}}, "remove_host": {"remove_host": "host-w0"}}
    assert elastic.placed_on[0] == "w0"
    assert foreseen(q, changes[change])[behind.id][0] == "start"
    assert edited(q, changes[change]).units == ()


def test_what_is_moved_is_planned_though_nothing_waits(q: Q) -> None:
    workers = [q.worker(f"w{n}", slots=1) for n in range(2)]
    gang = q.submit_gang(1)
    gang.start(*workers)
    q.call("cordon", worker=gang.placed_on[0], drain=True)
    assert [(row["gang_id"], row["after"]) for row in plan(q)] == [(gang.id, "move")]
    assert [(ask, one.action) for ask, one in q.decisions().items()] == [(f"g{gang.id}", "move")]
    assert plan(q, {"cancel": {"gang": gang.id}})[0]["after"] == "gone", "what is cancelled does not move"


@pytest.mark.parametrize("what", ["a paused task", "a limit key"])
def test_a_submission_waits_for_what_it_would_wait_for(fleet: Q, what: str) -> None:
    q = fleet
    if what == "a paused task":
        q.call("pause_task", task="new")
        changed: Row = {}
    else:
        q.call("set_limit", key="licence", most=0)
        changed = {"limit_key": "licence"}
    (row,) = [row for row in plan(q, {"submit": SUBMITTED | changed}) if row["gang_id"] is None]
    assert (row["after"], row["gate"]) == ("wait", "paused" if what == "a paused task" else "limit_key")
