"""Which worker a job may run on: selectors over labels, host and worker; taints and tolerations."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from gangq.client.selectors import parse_selector
from sql.drive import INVALID, MISSING, Q, Row, Worker, refused

LABELS = {
    "gpu": "h100",
    "driver": "550",
    "slots": 8,
    "rack": "r1",
    "nvme": True,
    "tags": ["a", "b"],
    "odd key": 'q"uote',
}


def when(key: str, op: str, *values: Any) -> Row:
    return {"key": key, "op": op, "values": list(values)}


# (condition, whether a worker with LABELS, called w1 on host h1, meets it)
CASES = [
    (when("gpu", "=", "h100"), True),
    (when("gpu", "=", "a100"), False),
    (when("absent", "=", "h100"), False),
    (when("gpu", "!=", "a100"), True),
    (when("gpu", "!=", "h100"), False),
    (when("absent", "!=", "h100"), True),
    (when("gpu", "in", "a100", "h100"), True),
    (when("gpu", "in", "a100", "h200"), False),
    (when("absent", "in", "a100", "h200"), False),
    (when("gpu", "notin", "a100", "h200"), True),
    (when("gpu", "notin", "a100", "h100"), False),
    (when("absent", "notin", "h100"), True),
    (when("gpu", "exists"), True),
    (when("absent", "exists"), False),
    (when("absent", "absent"), True),
    (when("gpu", "absent"), False),
    (when("slots", "<", 9), True),
    (when("slots", "<", 8), False),
    (when("slots", "<=", 8), True),
    (when("slots", "<=", 7.5), False),
    (when("slots", ">", 7), True),
    (when("slots", ">", 8), False),
    (when("slots", ">=", 8), True),
    (when("slots", ">=", 9), False),
    (when("slots", ">", -1), True),
    (when("absent", ">=", 0), False),
    (when("absent", "<", 1e9), False),
    # A label out of a command line is text, whatever it says.
    (when("driver", ">=", 550), True),
    (when("driver", ">", "550"), False),
    (when("driver", "=", 550), True),
    (when("driver", "!=", 550), False),
    (when("driver", "=", "0550"), False),
    (when("slots", "=", "8"), True),
    (when("slots", "in", "7", "8"), True),
    (when("slots", "notin", "8"), False),
    (when("slots", "=", "8.0"), True),
    (when("slots", "!=", "eight"), True),
    # What is no number is neither more nor less than one.
    (when("gpu", ">", 0), False),
    (when("gpu", "<=", 0), False),
    (when("nvme", ">", 0), False),
    (when("tags", ">", 0), False),
    (when("nvme", "=", True), True),
    (when("nvme", "=", "true"), True),
    (when("nvme", "=", False), False),
    (when("nvme", "!=", "yes"), True),
    (when("tags", "=", "b"), True),
    (when("tags", "notin", "c", "b"), False),
    (when("odd key", "=", 'q"uote'), True),
    (when("odd key", "=", "other"), False),
    (when("host", "=", "h1"), True),
    (when("host", "notin", "h1", "h2"), False),
    (when("host", "notin", "h2"), True),
    (when("worker", "=", "w1"), True),
    (when("worker", "!=", "w1"), False),
    (when("host", "exists"), True),
]  # fmt: skip


def serves(q: Q, selector: Any = None, tolerates: Any = None, taints: Any = (), labels: Row = LABELS) -> Any:
    worker = {
        "queues": ["default"],
        "labels": labels,
        "host": "h1",
        "name": "w1",
        "taints": list(taints),
    }
    needs = {
        "queue": "default",
        "task": "work",
        "gpus": 0,
        "labels": {},
        "selector": selector,
        "tolerates": tolerates,
    }
    return q.value(
        "select gangq.serves(jsonb_populate_record(null::gangq.incarnations, %(worker)s), "
        "gangq.check_shape(jsonb_populate_record(null::gangq.shapes, %(needs)s)))",
        worker=Jsonb(worker),
        needs=Jsonb(needs),
    )


def test_every_operator_is_true_and_false_where_it_should_be(q: Q) -> None:
    wrong = [condition for condition, holds in CASES if serves(q, [condition]) is not holds]
    assert wrong == []


def test_all_conditions_must_hold(q: Q) -> None:
    fits, fits_not = when("gpu", "=", "h100"), when("rack", "=", "r2")
    assert serves(q, [fits, when("rack", "=", "r1")])
    assert not serves(q, [fits, fits_not])
    assert not serves(q, [fits_not, fits])


def test_a_label_called_host_does_not_hide_the_host(q: Q) -> None:
    assert serves(q, [when("host", "=", "h1")], labels={"host": "elsewhere"})


def test_selectors_that_say_the_same_share_a_shape(q: Q) -> None:
    one = [when("gpu", "in", "a", "b"), when("rack", "=", "r1")]
    same = [when("rack", "=", "r1"), when("gpu", "in", "b", "a", "b"), when("gpu", "in", "a", "b")]
    q.submit(selector=one, tolerates=["spot", "old"])
    q.submit(selector=same, tolerates=["old", "spot", "old"])
    q.submit(selector=[], tolerates=[])
    q.submit()
    shapes = q.sql("select selector, tolerates, selects is null as plain from gangq.shapes order by id")
    assert [(s["tolerates"], s["plain"]) for s in shapes] == [(["old", "spot"], False), (None, True)]
    assert shapes[1]["selector"] is None


@pytest.mark.parametrize(
    ("selector", "named"),
    [
        ({"gpu": "h100"}, "JSON array"),
        ("gpu=h100", "JSON array"),
        ([1], "condition 1"),
        ([when("a", "exists"), {"op": "exists"}], "condition 2"),
        ([{"key": "", "op": "exists"}], "condition 1"),
        ([{"key": 7, "op": "exists"}], "condition 1"),
        ([{"key": "gpu", "operator": "="}], "condition 1"),
        ([{"key": "gpu"}], "condition 1 of the selector is"),
        ([when("gpu", "like", "h%")], "like"),
        ([when("gpu", "=")], "0 values for ="),
        ([when("gpu", "=", "a", "b")], "2 values for ="),
        ([when("gpu", "in")], "0 values for in"),
        ([when("gpu", "exists", "a")], "1 values for exists"),
        ([{"key": "gpu", "op": "=", "values": "h100"}], "values"),
        ([when("gpu", "=", None)], "values"),
        ([when("gpu", "=", ["a"])], "values"),
        ([when("driver", ">=", "new")], "driver"),
        ([when("driver", ">=", "NaN")], "driver"),
        ([when("driver", ">=", 1e300)], "driver"),
        ([when("driver", ">=", True)], "driver"),
        ([when("gpu", "=", "x" * 20000)], "20000"),
    ],
)
def test_a_bad_selector_is_refused_naming_what_is_wrong(untouched: Q, selector: Any, named: str) -> None:
    with refused(INVALID, named):
        untouched.submit(selector=selector)


def test_a_worker_claims_only_what_selects_it(q: Q) -> None:
    other = q.submit(selector=[when("gpu", "!=", "h100")])
    here = q.submit(selector=[when("gpu", "=", "h100"), when("driver", ">=", 550)])
    away = q.submit(selector=[when("host", "notin", "host-w1")])
    worker = q.worker(labels={"gpu": "h100", "driver": "550"}, slots=3)
    assert [claim.job_id for claim in worker.claim()] == [here]
    assert [claim.job_id for claim in q.worker("w2", slots=3).claim()] == [other, away]


def test_a_gang_is_placed_on_the_workers_that_its_selector_takes(q: Q) -> None:
    q.workers(3)
    gang = q.submit_gang(2, selector=[when("worker", "in", "w2", "w3")])
    q.tick()
    assert {member["worker"] for member in gang.members} == {"w2", "w3"}


# Taints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taints", "tolerates", "may"),
    [
        ([], None, True),
        ([], ["spot"], True),
        (["spot"], None, False),
        (["spot"], ["spot"], True),
        (["spot"], ["spo"], False),
        (["spot"], ["spot=yes"], False),
        (["spot=yes"], ["spot"], True),
        (["spot=yes"], ["spot=yes"], True),
        (["spot=yes"], ["spot=no"], False),
        (["spotty=yes"], ["spot"], False),
        (["spot=yes", "old"], ["spot"], False),
        (["spot=yes", "old"], ["spot", "old"], True),
        (["spot=yes", "old"], ["*"], True),
        (["spot=yes", "old"], ["*", "old"], True),
    ],
)
def test_a_job_runs_where_it_tolerates_every_taint(q: Q, taints: Any, tolerates: Any, may: bool) -> None:
    assert serves(q, None, tolerates, taints) is may
    selector = [when("gpu", "=", "h100")]
    assert serves(q, selector, tolerates, taints) is may, "with a selector that holds, the same"
    assert serves(q, [when("gpu", "absent")], tolerates, taints) is False


def test_a_tainted_worker_takes_only_what_tolerates_it(q: Q) -> None:
    q.submit()
    may = q.submit(tolerates=["spot"])
    assert [c.job_id for c in q.worker(taints=["spot=cheap"], slots=2).claim()] == [may]


@pytest.mark.parametrize("taint", ["", "=a", "a b", "a,b", "*", "x" * 201, None])
def test_a_bad_taint_is_refused(q: Q, taint: Any) -> None:
    with refused(INVALID, "taints"):
        q.worker(taints=[taint])
    assert q.sql("select * from gangq.incarnations") == []


@pytest.mark.parametrize("toleration", ["", "=a", "a b", "a,b", None])
def test_a_bad_toleration_is_refused(q: Q, toleration: Any) -> None:
    with refused(INVALID, "tolerates"):
        q.submit(tolerates=[toleration])


def taint(q: Q, *taints: str, worker: str = "w1") -> None:
    q.call("set_taints", worker=worker, taints=list(taints))


def test_an_operators_taint_holds_at_once_and_outlives_a_restart(q: Q) -> None:
    worker = q.worker(taints=["spot"])
    taint(q, "repair", "spot")
    assert worker.row["taints"] == ["spot", "repair", "spot"]
    q.submit(tolerates=["spot"])
    assert worker.claim() == []
    worker.retire()
    again = q.worker()
    assert again.row["taints"] == ["repair", "spot"], "its own have gone with it"
    assert again.claim() == []
    taint(q)
    assert again.row["taints"] == []
    assert again.take()


def test_taking_an_operators_taints_off_leaves_the_workers_own(q: Q) -> None:
    worker = q.worker(taints=["spot", "old"])
    taint(q, "spot")
    taint(q)
    assert worker.row["taints"] == ["old", "spot"]


def test_an_operators_taint_can_be_set_while_the_worker_is_away(q: Q) -> None:
    q.worker().retire()
    taint(q, "repair")
    assert q.worker().row["taints"] == ["repair"]


def test_an_operators_taint_outlives_the_retention_of_incarnations(q: Q) -> None:
    q.worker().retire()
    taint(q, "repair")
    q.later(30 * 86400)
    q.call("keep_partitions")
    assert q.worker().row["taints"] == ["repair"]


def test_what_runs_or_is_reserved_on_a_worker_when_it_is_tainted_goes_on(q: Q) -> None:
    workers: list[Worker] = q.workers(2)
    q.submit()
    running = workers[0].take()
    gang = q.submit_gang(1)
    q.tick()
    assert gang.state == "reserved"
    for worker in workers:
        taint(q, "repair", worker=worker.name)
    assert q.violations() == []
    (member,) = gang.claimed_by(*workers)
    assert (running.complete(), member.complete()) == ("done", "done")


def test_tainting_is_an_event_and_needs_a_worker(q: Q) -> None:
    with refused(MISSING, "nobody"):
        taint(q, "repair", worker="nobody")
    q.worker()
    with refused(INVALID, "taints"):
        taint(q, "*")
    taint(q, "repair")
    assert [event["data"] for event in q.events("taint")] == [{"taints": ["repair"]}]


def test_what_no_worker_meets_is_explained(q: Q) -> None:
    q.worker(taints=["spot"])
    assert "tolerates none" in q.submit_gang(1, wait_for_hardware=True).note
    picky = q.submit_gang(1, selector=[when("gpu", "=", "h100")], tolerates=["*"], wait_for_hardware=True)
    assert "meets the selector gpu=h100 with taints it tolerates" in picky.note


@pytest.mark.parametrize(
    "text",
    [
        "vram>=40",
        "gpu=h100,rack in (a,b),zone!=eu",
        "driver<550.5,nvme,!spot",
        'site="a, b",worker notin ("a b",c)',
        r'"a key"="a \" and a \\"',
    ],
)
def test_a_selector_is_written_as_people_write_it(q: Q, text: str) -> None:
    said = "select gangq.selector_text(gangq.check_selector(%(said)s)) as text, gangq.check_selector(%(said)s) as of"
    (row,) = q.sql(said, said=Jsonb(parse_selector(text)))
    (again,) = q.sql(said, said=Jsonb(parse_selector(row["text"])))
    assert row["text"] == text
    assert row == again


@pytest.mark.own_database
def test_serves_is_one_expression_that_the_planner_sees_through(q: Q) -> None:
    """A call for each pair of a worker and a shape would cost a pass more than all the rest of it."""
    plan = "\n".join(
        row["QUERY PLAN"]
        for row in q.sql(
            "explain (verbose) select gangq.serves(i, s) from gangq.incarnations i, gangq.shapes s"
        )
    )
    assert "serves(" not in plan
    assert "jsonb_path_match" in plan


@pytest.mark.own_database
def test_a_claim_calls_no_function_for_each_shape_that_selects(q: Q) -> None:
    for n in range(60):
        q.submit(selector=[when("rack", "=", f"r{n}"), when("driver", ">=", n)], tolerates=["spot"])
    worker = q.worker(labels={"rack": "r7", "driver": "550"}, taints=["spot=yes"])
    with q.db.transaction():
        q.sql("set local track_functions = 'all'")
        worker.take()
        called = q.sql(
            "select funcname from pg_stat_xact_user_functions where schemaname = 'gangq' and calls >= 50"
        )
    assert called == []


def test_a_selector_stays_when_a_device_is_avoided(q: Q) -> None:
    q.submit(selector=[when("gpu", "=", "h100")], tolerates=["spot"])
    shape = q.value("select id from gangq.shapes")
    q.sql("select gangq.shape_avoiding(%(id)s, array[7::bigint])", id=shape)
    rows = q.sql("select selector, tolerates, selects::text from gangq.shapes order by id")
    assert len(rows) == 2
    assert rows[0] == rows[1]
