"""Roles and selectors as Python says them: read early, refused early, and sent as SQL takes them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from gangq import App, Client, Context, Gang, InvalidInput, Role, WrongState, parse_selector
from gangq.client import AsyncClient

Db = psycopg.Connection[dict[str, Any]]


def said(*conditions: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [{"key": key, "op": op, "values": list(values)} for key, op, *values in conditions]


# Selectors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        (
            "gpu=h100,zone!=eu,rack in (a,b),nvme,!spot,driver>=550",
            said(
                ("gpu", "=", "h100"),
                ("zone", "!=", "eu"),
                ("rack", "in", "a", "b"),
                ("nvme", "exists"),
                ("spot", "absent"),
                ("driver", ">=", 550),
            ),
        ),
        ("gpu==h100", said(("gpu", "=", "h100"))),
        ("  gpu = h100 , ! spot ", said(("gpu", "=", "h100"), ("spot", "absent"))),
        ("rack notin (a)", said(("rack", "notin", "a"))),
        ("rack not in (a, b)", said(("rack", "notin", "a", "b"))),
        ("a<1,b<=-2,c>+3,d>=.5", said(("a", "<", 1), ("b", "<=", -2), ("c", ">", 3), ("d", ">=", 0.5))),
        ('"odd key"="a, (b) \\" c"', said(("odd key", "=", 'a, (b) " c'))),
        ("site.example/gpu=a_b-c:d", said(("site.example/gpu", "=", "a_b-c:d"))),
        ("in,not=in", said(("in", "exists"), ("not", "=", "in"))),
        ("count=8", said(("count", "=", "8"))),
        ('x=""', said(("x", "=", ""))),
    ],
)
def test_a_selector_is_read_from_text(text: str, conditions: list[dict[str, Any]]) -> None:
    assert parse_selector(text) == conditions


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "a key missing at its end"),
        ("gpu=h100,", "a key missing at its end"),
        (",gpu", "a key missing at ',gpu'"),
        ("gpu=", "a value missing at its end"),
        ("gpu=a b", "a comma missing, or quotation marks around a value with blanks at 'b'"),
        ("gpu in a", "'(' missing"),
        ("gpu in ()", "a value missing at ')'"),
        ("gpu in (a", "')' missing"),
        ("gpu not (a)", "'in' missing after 'not'"),
        ("driver>=new", "'new' where a number belongs"),
        ("driver>=1e5x", "'1e5x' where a number belongs"),
        ("driver=>5", "a value missing at '>5'"),
        ('gpu="h100', "a quotation mark that is never closed"),
        ("!(gpu)", "a key missing at '(gpu)'"),
    ],
)
def test_a_selector_that_cannot_be_read_is_refused_at_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_selector(text)
    assert problem in str(caught.value)
    assert "gpu=h100" in str(caught.value), "and says how one is written"


def test_a_selector_may_be_a_list_of_both_forms(client: Client, db: Db) -> None:
    client.submit(task="a", selector=["gpu=h100,!spot", {"key": "rack", "op": "in", "values": ["a"]}])
    (row,) = db.execute("select selector from gangq.shapes").fetchall()
    assert row["selector"] == said(("gpu", "=", "h100"), ("rack", "in", "a"), ("spot", "absent"))


@pytest.mark.parametrize(
    "selector", [{"gpu": "h100"}, 7, [7], [{"key": "gpu"}], [{"key": "a", "op": "like"}]]
)
def test_what_is_no_selector_is_refused_before_it_is_sent(client: Client, selector: Any) -> None:
    for refuse in (
        lambda: client.submit(task="a", selector=selector),
        lambda: Role("a", 1, selector=selector),
        lambda: App(client=client).declare_task("a", selector=selector),
    ):
        with pytest.raises(InvalidInput, match="selector"):
            refuse()


# Roles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "a role is called ''"),
        ({"count": 0}, "count 0"),
        ({"count": 1.5}, "count 1.5"),
        ({"count": 2, "min": 3}, "min 3 of 2"),
        ({"min": 0}, "min 0 of 1"),
        ({"payload": {}, "payloads": [{}]}, "both payload and payloads"),
        ({"payloads": [{}, {}]}, "1 member and 2 payloads"),
        ({"task": 7}, "task 7"),
        ({"tolerates": "spot"}, "tolerates"),
        ({"selector": "gpu>"}, "selector of role 'a'"),
    ],
)
def test_a_role_that_makes_no_sense_is_refused_where_it_is_made(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Role(**{"name": "a", "count": 1, **fields})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "either a size or roles"),
        ({"size": 1, "roles": [Role("a", 1)]}, "either a size or roles"),
        ({"roles": [Role("a", 1)], "min_size": 1}, "both roles and min_size"),
        ({"roles": []}, "roles is []"),
        ({"roles": Role("a", 1)}, "pass a list"),
        ({"roles": "driver"}, "pass a list"),
        ({"roles": ["driver"]}, "roles[0] is 'driver'"),
        ({"roles": [{"name": "a"}]}, "roles[0] has no count"),
        ({"roles": [{"name": "a", "count": 1, "gpu": 1}]}, "unknown field 'gpu'"),
        ({"roles": [Role("a", 1), {"name": "a", "count": 2}]}, "two roles are called 'a'"),
        ({"size": 1, "tolerates": "spot"}, "tolerates"),
    ],
)
def test_a_gang_that_makes_no_sense_is_refused_before_it_is_sent(
    client: Client, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.submit_gang(task="a", **asked)
    assert named in str(caught.value)


def test_a_strategy_that_there_is_not_is_refused_with_those_there_are(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r'role a: strategy is "stack"\. pack: .* strict_spread: '):
        client.submit_gang(task="a", roles=[Role("a", 1, strategy="stack")])


def kind(db: Db, gang_id: int) -> list[dict[str, Any]]:
    return db.execute(
        "select r.name, r.min_members, r.max_members, r.strategy, r.require, r.prefer, r.balanced, s.task, s.gpus, "
        "s.vram_mb, s.memory_mb::integer, s.cpus::float, s.labels, s.selector, s.tolerates, s.model "
        "from gangq.live_gangs g "
        "join gangq.kind_roles r on r.kind_id = g.kind_id join gangq.shapes s on s.id = r.shape_id "
        "where g.id = %s order by r.ordinal",
        [gang_id],
    ).fetchall()


def test_every_field_of_a_role_arrives(client: Client, db: Db) -> None:
    client.configure(topology=["zone", "rack", "host"])
    role = Role(
        "executor",
        3,
        min=2,
        task="execute",
        payloads=[{"n": n} for n in range(3)],
        gpus=1,
        vram_mb=10,
        memory_mb=20,
        cpus=0.5,
        labels={"a": "b"},
        selector="gpu=h100",
        tolerates=["spot"],
        model="m",
        strategy="spread",
        require="zone",
        prefer="rack",
        balanced=True,
        budget_s=30,
    )
    made = client.submit_gang(task="drive", roles=[{"name": "driver", "count": 1, "payload": {"d": 1}}, role])
    driver, executor = kind(db, made.gang_id)
    assert (driver["name"], driver["task"]) == ("driver", "drive")
    assert executor == {
        "name": "executor",
        "min_members": 2,
        "max_members": 3,
        "strategy": "spread",
        "require": "zone",
        "prefer": "rack",
        "balanced": True,
        "task": "execute",
        "gpus": 1,
        "vram_mb": 10,
        "memory_mb": 20,
        "cpus": 0.5,
        "labels": {"a": "b"},
        "selector": said(("gpu", "=", "h100")),
        "tolerates": ["spot"],
        "model": "m",
    }
    members = sorted(client.jobs(gang_id=made.gang_id), key=lambda m: m.rank or 0)
    assert [(m.payload, m.budget_s) for m in members] == [
        ({"d": 1}, None),
        *(({"n": n}, 30) for n in range(3)),
    ]


def test_every_argument_of_a_gang_arrives(client: Client, db: Db) -> None:
    client.configure(topology=["zone", "rack", "host"])
    asked: dict[str, Any] = {
        "failure_policy": "shrink",
        "completion": "member",
        "timeout_s": 60,
        "timeout_style": "soft",
        "preemptible": False,
    }
    placed = {"require": "zone", "prefer": "rack", "apart": "x"}
    made = client.submit_gang(
        task="a",
        size=4,
        min_size=2,
        strategy="spread",
        balanced=True,
        selector="!spot",
        tolerates=["*"],
        **asked,
        **placed,
    )
    (row,) = db.execute("select * from gangq.live_gangs").fetchall()
    assert {key: row[key] for key in asked} == asked
    (row,) = db.execute("select require, prefer, apart from gangq.gang_kinds").fetchall()
    assert row == placed
    (role,) = kind(db, made.gang_id)
    assert (role["min_members"], role["max_members"], role["strategy"], role["balanced"]) == (
        2,
        4,
        "spread",
        True,
    )
    assert (role["selector"], role["tolerates"]) == (said(("spot", "absent")), ["*"])


def test_settings_of_placement_are_configured(client: Client, db: Db) -> None:
    asked: dict[str, Any] = {
        "topology": ["zone", "host"],
        "reservations": 2,
        "placement_timeout_s": 60,
        "preemptions_per_pass": 1,
        "record_decisions": True,
    }
    client.configure(**asked)
    (row,) = db.execute("select * from gangq.settings").fetchall()
    assert {key: row[key] for key in asked} == asked
    client.submit_gang(task="a", size=1, prefer="zone")
    with pytest.raises(WrongState, match="zone"):
        client.configure(topology=["host"])


def test_taints_are_registered_and_set(client: Client) -> None:
    client.register_worker(name="w", host="h", queues=["default"], taints=["spot"])
    client.set_taints(worker="w", taints=["repair"])
    assert client.workers()[0].taints == ["spot", "repair"]
    client.set_taints(worker="w", taints=[])
    assert client.workers()[0].taints == ["spot"]
    with pytest.raises(InvalidInput, match="taints"):
        client.set_taints(worker="w", taints="repair")


async def _submitted(dsn: str) -> tuple[int, list[int]]:
    async with AsyncClient(dsn) as client:
        await client.register_worker(
            name="w", host="h", queues=["default"], slots=9, light=9, taints=["spot"]
        )
        await client.set_taints(worker="w", taints=["repair"])
        made = await client.submit_gang(
            task="a", roles=[Role("driver", 1), Role("executor", 3)], tolerates=["*"]
        )
        (solo,) = await client.submit(task="a", selector="gpu", tolerates=["spot"])
        return solo, made.job_ids


def test_the_async_client_says_the_same(dsn: str, db: Db) -> None:
    import asyncio

    solo, members = asyncio.run(_submitted(dsn))
    assert len(members) == 4
    rows = db.execute(
        "select s.selector, s.tolerates from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
        "where j.id = %s",
        [solo],
    ).fetchall()
    assert rows == [{"selector": said(("gpu", "exists")), "tolerates": ["spot"]}]


# App --------------------------------------------------------------------------------------------------------


def test_a_role_needs_what_its_task_was_declared_with_unless_somebody_says(client: Client, db: Db) -> None:
    app = App(client=client)
    drive = app.declare_task("drive", cpus=1)
    execute = app.declare_task("execute", gpus=2, vram_mb=100, selector="gpu", tolerates=["spot"], budget=60)
    gang = drive.gang(
        roles=[
            Role("driver", 1),
            Role("object", 2, task=execute),
            Role("named", 1, task="execute", gpus=1),
            Role("foreign", 1, task="elsewhere"),
        ],
        name="night",
        completion="driver",
    ).submit(n=1)
    needs = [(r["task"], r["gpus"], r["vram_mb"], r["cpus"], r["tolerates"]) for r in kind(db, gang.id)]
    assert needs == [
        ("drive", 0, 0, 1, None),
        ("execute", 2, 100, 0, ["spot"]),
        ("execute", 1, 100, 0, ["spot"]),
        ("elsewhere", 0, 0, 1, None),
    ]
    assert (gang.row().name, len(gang.members)) == ("night", 5)
    members = sorted(client.jobs(gang_id=gang.id), key=lambda m: m.rank or 0)
    assert [m.budget_s for m in members] == [None, 60, 60, 60, None]
    assert {m.payload["n"] for m in members} == {1}
    gang = drive.gang(roles=[Role("a", 1, task=execute)], gpus=4).submit()
    assert [(r["gpus"], r["vram_mb"]) for r in kind(db, gang.id)] == [(4, 100)], (
        "what the call says holds for all"
    )


def test_members_of_roles_are_checked_with_what_they_are_called_with(client: Client) -> None:
    app = App(client=client)

    @app.task
    def drive(ctx: Context, n: int) -> None: ...

    @app.task
    def execute(ctx: Context, lr: float = 1.0) -> None: ...

    def payloads(gang: Gang[Any]) -> list[Any]:
        return [member.row().payload for member in gang.members]

    roles = [Role("driver", 1), Role("foreign", 1, task="elsewhere"), Role("other", 1, task=execute)]
    each = [{"n": 1}, {"any": 2}, {"lr": 0.5}]
    assert payloads(drive.gang(roles=roles).submit_each(each)) == each
    with pytest.raises(InvalidInput, match=r"do not fit task 'execute': .*'n'"):
        drive.gang(roles=roles).submit_each([{"n": 1}, {"any": 2}, {"n": 3}])
    nothing = [Role("driver", 1), Role("other", 1, task=execute, payload={})]
    assert payloads(drive.gang(roles=nothing).submit(n=1)) == [{"n": 1}, {}]
    with pytest.raises(InvalidInput, match="do not fit task 'drive': missing"):
        drive.gang(roles=[Role("driver", 1, payload={})]).submit(n=1)


def test_options_of_the_gang_and_of_its_members_are_told_apart(client: Client, db: Db) -> None:
    app = App(client=client)
    task = app.declare_task("t", selector="gpu=h100", tolerates=["spot"])
    task.submit(n=1)
    gang = task.gang(3, gpus=1, min_size=2, failure_policy="shrink", timeout_s=9, preemptible=False).submit()
    (row,) = db.execute("select * from gangq.live_gangs where id = %s", [gang.id]).fetchall()
    assert (row["failure_policy"], row["timeout_s"], row["preemptible"]) == ("shrink", 9, False)
    (role,) = kind(db, gang.id)
    assert (role["gpus"], role["min_members"], role["tolerates"]) == (1, 2, ["spot"])
    with pytest.raises(InvalidInput, match="unknown option 'min_sise'"):
        task.gang(3, min_sise=2).submit()  # type: ignore[call-overload]
    gang = app.submit_command(["true"], gang=2, strategy="spread", min_size=1, tolerates=["spot"])
    assert kind(db, gang.id)[0]["strategy"] == "spread"
