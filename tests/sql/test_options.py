"""What submit, submit_gang and register_worker take beside their everyday arguments: one JSON object."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from gangq.placement.order import POLICIES
from gangq.placement.strategies import STRATEGIES
from sql.drive import INVALID, Q, refused

CALLS: dict[str, str] = {
    "submit": "select * from gangq.submit('work', options => %(options)s)",
    "submit_gang": "select * from gangq.submit_gang('work', 2, options => %(options)s)",
    "register_worker": "select * from gangq.register_worker('w1', 'h', '{default}', options => %(options)s)",
}
TYPES = {"submit": "job_options", "submit_gang": "gang_options", "register_worker": "worker_options"}
NUMBERS = (
    "arguments", "other_arguments", "gang_role", "service_options", "resources", "submitter_resources", "settings",
    "queues_table", "task_settings",
)  # fmt: skip
"""What else is read by name and has numbers."""
FITTING: dict[str, Any] = {
    "smallint": 3,
    "integer": 3,
    "bigint": 5_000_000_000,
    "numeric": 0.5,
    "real": 60.5,
    "text": "each",
    "text[]": ["a"],
    "bigint[]": [7],
    "integer[]": [7],
    "boolean": True,
    "uuid": "01910000-0000-7000-8000-000000000001",
}
verbs = pytest.mark.parametrize("verb", sorted(CALLS))


def ask(q: Q, verb: str, options: Any) -> list[dict[str, Any]]:
    return q.sql(CALLS[verb], options=Jsonb(options))


def options_of(q: Q, verb: str) -> dict[str, str]:
    rows = q.sql(
        "select name, type::text from gangq.settable(%(type)s::regtype)", type=f"gangq.{TYPES[verb]}"
    )
    return {row["name"]: row["type"] for row in rows}


@verbs
def test_an_unknown_option_is_refused_by_name_with_the_nearest_that_there_are(
    untouched: Q, verb: str
) -> None:
    for known in options_of(untouched, verb):
        wrong = f"{known[0]}{known}"
        for value in (1, None):
            with refused(INVALID, f"{verb} has no option '{wrong}'") as error:
                ask(untouched, verb, {wrong: value})
            near, _, listed = str(error.value.diag.message_hint).partition("? ")
            assert known in near.removeprefix("Did you mean ").split(", ")
            assert listed.startswith("There are ")


@verbs
def test_an_argument_among_the_options_is_refused_and_the_hint_says_where_it_belongs(
    untouched: Q, verb: str
) -> None:
    arguments = untouched.value(
        "select proargnames[:pronargs] from pg_proc where oid = %(verb)s::regproc", verb=f"gangq.{verb}"
    )
    assert arguments.pop() == "options"
    assert len(arguments) <= 8
    for name in arguments:
        with refused(INVALID, f"{name} is no option of {verb}") as error:
            ask(untouched, verb, {name: 1})
        assert f"gangq.{verb}({name} => ...)" in error.value.diag.message_hint


@verbs
@pytest.mark.parametrize("options", [[], [{"cpus": 1}], "cpus", 3, True, None])
def test_options_that_are_no_object_are_refused(untouched: Q, verb: str, options: Any) -> None:
    with refused(INVALID, f"the options of {verb} are ") as error:
        ask(untouched, verb, options)
    assert "one JSON object" in error.value.diag.message_hint


@verbs
def test_an_option_of_another_type_is_refused_by_name(untouched: Q, verb: str) -> None:
    for name, kind in options_of(untouched, verb).items():
        if kind == "jsonb":
            continue  # What it must hold is checked by what reads it.
        fitting = FITTING[kind]
        for wrong in (7, "7", True, ["a"], [7], [None], {"a": 1}):
            if wrong == fitting or (type(wrong) is type(fitting) and not isinstance(wrong, list)):
                continue
            if isinstance(wrong, int) and not isinstance(wrong, bool) and isinstance(fitting, float):
                continue
            with refused(INVALID, f"{verb}: {name} cannot be ") as error:
                ask(untouched, verb, {name: wrong})
            assert "JSON" in error.value.diag.message_hint


@pytest.mark.parametrize(("name", "value"), [("memory_mb", 1.5), ("parent", -1.5)])
def test_a_number_that_is_not_whole_is_refused_by_name(untouched: Q, name: str, value: float) -> None:
    with refused(INVALID, f"submit: {name} cannot be {value}"):
        ask(untouched, "submit", {name: value})


def test_a_number_out_of_its_range_is_refused_by_name_and_the_hint_says_the_range(untouched: Q) -> None:
    """Of all options, settings, roles and resources: also one with no room in its type, or with 300 digits."""
    found = untouched.sql(
        "select t::text as of, a.name, a.type::text "
        "from unnest(%(types)s::regtype[]) t cross join gangq.settable(t) a where a.type::text = any (%(numbers)s)",
        numbers=["smallint", "integer", "bigint", "real", "numeric", "integer[]", "bigint[]"],
        types=[f"gangq.{name}" for name in (*TYPES.values(), *NUMBERS)],
    )
    assert {"limit", "gpus", "lease_s", "count", "after_any"} <= {row["name"] for row in found}
    for row in found:
        for digits, shown in ((f"1{'0' * 19}", f"1{'0' * 19}"), ("1e300", f"1{'0' * 29} [cut]")):
            array = row["type"].endswith("[]")
            given = f"[{digits}]" if array else digits
            with refused(INVALID) as error:
                untouched.sql(
                    f"select gangq.read_options('it', %(given)s::jsonb, null::{row['of']})",
                    given=f'{{"{row["name"]}": {given}}}',
                )
            said, hint = str(error.value.diag.message_primary), str(error.value.diag.message_hint)
            if array:
                assert said.startswith(f"it: {row['name']} is [1")
                assert hint == f"It is kept as {row['type']}."
            else:
                assert said == f"it: {row['name']} is {shown}"
                assert re.search(r"\d", hint), row


@verbs
def test_null_stands_for_an_option_that_is_not_given(q: Q, verb: str) -> None:
    nulls = dict.fromkeys(options_of(q, verb))
    ask(q, verb, {})
    q.sql("update gangq.incarnations set ended_at = gangq.now(), state = 'retired' where name = 'w1'")
    ask(q, verb, nulls)
    table = {"submit": "live_jobs", "submit_gang": "live_gangs", "register_worker": "incarnations"}[verb]
    passing = "{id,order_key,submitted_at,registered_at,timeout_at,ended_at,state,note}"
    rows = q.sql(f"select to_jsonb(x) - %(passing)s::text[] as row from gangq.{table} x", passing=passing)
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert q.sql(
        CALLS[verb].replace("'w1'", "'w2'"), options=None
    )  # nor are options that are null themselves


def test_a_null_inside_an_option_is_kept(q: Q) -> None:
    q.submit(labels={"a": None}, wait_for_hardware=True)
    assert q.value("select labels from gangq.shapes") == {"a": None}
    gang = q.submit_gang(2, payloads=[None, 1])
    assert [row["payload"] for row in gang.members] == [None, 1]


def test_a_whole_number_may_be_written_as_any_other(q: Q) -> None:
    job = q.value("""select gangq.submit('work', options => '{"memory_mb": 64e3, "vram_mb": 0.0}')""")
    assert (q.job(job)["memory_mb"], q.job(job)["vram_mb"]) == (64000, 0)


def test_every_option_of_a_job_is_kept(q: Q) -> None:
    worker = q.worker(labels={"gpu": "h100"}, memory_mb=100, cpus=8, taints=["spot"])
    job = q.submit(
        memory_mb=50, cpus=0.5, labels={"gpu": "h100"}, tolerates=["spot"], model="m", budget_s=60.5,
        selector=[{"key": "gpu", "op": "exists"}], max_attempts=2, max_crashes=4, max_trips=5, wake="never",
    )  # fmt: skip
    row = q.sql(
        "select s.memory_mb, s.cpus, s.labels, s.tolerates, s.model, s.selector, j.budget_s, j.max_attempts, "
        "j.max_crashes, j.max_trips from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id"
    )
    assert row == [
        {
            "memory_mb": 50, "cpus": 0.5, "labels": {"gpu": "h100"}, "tolerates": ["spot"], "model": "m",
            "selector": [{"key": "gpu", "op": "exists", "values": []}], "budget_s": 60.5, "max_attempts": 2,
            "max_crashes": 4, "max_trips": 5,
        }
    ]  # fmt: skip
    assert worker.take().job_id == job


@pytest.mark.parametrize(("domain", "names"), [("strategy", STRATEGIES), ("policy", POLICIES)])
def test_the_database_takes_the_strategies_and_orders_that_the_library_has(
    q: Q, domain: str, names: dict[str, Any]
) -> None:
    (row,) = q.sql(
        "select pg_get_constraintdef(oid) as check from pg_constraint where contypid = %(domain)s::regtype",
        domain=f"gangq.{domain}",
    )
    assert set(re.findall(r"'(\w+)'::text", row["check"])) == {*names}


def test_where_no_option_is_alike_all_are_named(untouched: Q) -> None:
    with refused(INVALID, "submit has no option 'qqq'") as error:
        ask(untouched, "submit", {"qqq": 1})
    assert (error.value.diag.message_hint or "").startswith("There are after_any, ")


def test_every_need_of_a_job_is_stored_under_its_own_name(q: Q) -> None:
    q.call("set_queue", name="a")
    needs = {
        "gpus": 2, "vram_mb": 3, "memory_mb": 4, "cpus": 5, "labels": {"gpu": "h100"}, "model": "b", "limit_key": "c",
        "selector": [{"key": "zone", "op": "exists", "values": []}], "tolerates": ["spot"],
    }  # fmt: skip
    derived = {"id", "avoid", "selects", "submitter", "plain", "fits", "digest", "login", "added_at"}
    columns = q.sql(
        "select attname from pg_attribute "
        "where attrelid = 'gangq.shapes'::regclass and attnum > 0 and not attisdropped"
    )
    assert {row["attname"] for row in columns} - derived == {"queue", "task", *needs}
    q.submit("work", queue="a", wait_for_hardware=True, limit=1, **needs)
    (stored,) = q.sql("select * from gangq.shapes where queue = 'a'")
    assert {name: stored[name] for name in needs} == needs
    assert (stored["task"], stored["avoid"], stored["submitter"]) == ("work", None, None)
