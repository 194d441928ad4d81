"""The decision in Python beside the one in SQL, on the same boards: tables that random verbs have filled."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import psycopg

from gangq.placement.board import Ask, Board, Device, Hold, Kind, Needs, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from property.test_placement import SOAK, numbers, some_fleet, some_gang

Connection = psycopg.Connection[dict[str, Any]]
OWNERS = """
select coalesce(j.gang_id, -j.id) as unit, min(s.queue) as queue, min(j.submitter) as submitter
from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.incarnation is not null group by 1
"""


def board_of(db: Connection) -> Board | None:
    """What ``gangq.look()`` sees, as a board for Python."""
    row = db.execute(
        "select to_jsonb(b) as b, extract(epoch from b.t)::float8 as now, "
        "array(select extract(epoch from e)::float8 from unnest(b.held_ends) with ordinality as x(e, n) order by n) "
        "as ends from gangq.look() b"
    ).fetchone()
    assert row is not None
    b = {key: value if value is not None else [] for key, value in row["b"].items()}
    if not b["gang_ids"]:
        return None
    owners = {row["unit"]: row for row in db.execute(OWNERS).fetchall()}
    levels, classes = b["levels"], b["classes"]
    holds: dict[int, list[Hold]] = {}
    ends: dict[int, float] = {}
    columns = [b[f"held_{name}"] for name in ("unit", "job", "worker", "slots", "memory", "mcpus")]
    for unit, job, worker, slots, memory, mcpus, end in zip(*columns, row["ends"], strict=True):
        devices = tuple(d for d, held in zip(b["device_ids"], b["device_held"], strict=True) if held == job)
        holds.setdefault(unit, []).append(Hold(b["worker_ids"][worker - 1], devices, memory, mcpus, slots))
        ends[unit] = max(end, ends.get(unit, 0))
    jobs = {*b["held_job"]}
    workers = []
    for n, worker_id in enumerate(b["worker_ids"]):
        mine = range(b["device_first"][n] - 1, b["device_first"][n + 1] - 1)
        workers.append(
            Worker(
                worker_id,
                b["worker_names"][n],
                b["hosts"][b["worker_host"][n] - 1],
                b["all_slots"][n],
                b["all_memory"][n],
                b["all_mcpus"][n],
                tuple(
                    Device(
                        b["device_ids"][d],
                        b["device_vram"][d],
                        withheld=bool(b["device_held"][d]) and b["device_held"][d] not in jobs,
                    )
                    for d in mine
                ),
                b["worker_class"][n],
                tuple(b["worker_domains"][n * len(levels) : (n + 1) * len(levels)])
                if b["worker_domains"]
                else (),
                b["worker_open"][n],
            )
        )
    level = ["", *levels, "no such level"]
    kinds = []
    for n, kind in enumerate(b["kind_ids"]):
        first = b["kind_first_role"][n] - 1
        roles = []
        for r in range(first, first + b["kind_roles"][n]):
            s = b["role_shape"][r] - 1
            roles.append(
                Role(
                    Needs(b["shape_gpus"][s], b["shape_vram"][s], b["shape_memory"][s], b["shape_mcpus"][s]),
                    b["role_min"][r],
                    b["role_max"][r],
                    frozenset(c + 1 for c in range(classes) if b["shape_serves"][s * classes + c]),
                    b["role_names"][r] or "",
                    b["role_strategy"][r],
                    b["role_balanced"][r],
                    level[b["role_require"][r]],
                    level[b["role_prefer"][r]],
                )
            )
        kinds.append(
            Kind(
                kind,
                tuple(roles),
                b["queue_names"][b["kind_queue"][n] - 1],
                level[b["kind_require"][n]],
                level[b["kind_prefer"][n]],
                b["kind_apart"][n] or "",
            )
        )
    asks = [
        Ask(
            f"g{gang}",
            b["kind_ids"][b["gang_kind"][n] - 1],
            b["gang_priority"][n],
            b["gang_order_key"][n] & ((1 << 50) - 1),
            b["gang_submitter"][n],
            b["gang_estimate"][n],
        )
        for n, gang in enumerate(b["gang_ids"])
    ]
    aparts = dict(zip(b["apart_gangs"], b["apart_keys"], strict=True))
    queues = [
        Queue(
            name,
            not b["queue_open"][n],
            b["queue_policy"][n],
            b["queue_weight"][n],
            b["queue_maximum"][n] or {},
            b["queue_guaranteed"][n] or {},
            b["queue_submitter_maximum"][n] or {},
            b["queue_max_gangs"][n],
            b["queue_max_jobs"][n],
        )
        for n, name in enumerate(b["queue_names"])
    ]
    units = [
        Unit(
            f"g{unit}" if unit > 0 else f"j{-unit}",
            tuple(mine),
            ends[unit],
            owners[unit]["queue"],
            owners[unit]["submitter"],
            apart=aparts.get(unit, ""),
        )
        for unit, mine in holds.items()
    ]
    return Board(
        row["now"], tuple(workers), tuple(units), tuple(kinds), tuple(asks), tuple(queues), (), tuple(levels),
        b["reservations"], 0,
    )  # fmt: skip


def test_python_starts_and_plans_what_sql_does(db: Connection, clock: Any) -> None:
    seed, dice = numbers()
    agreed = Counter[str]()
    apart: list[Any] = []
    for n in range(300 if SOAK else 24):
        with db.transaction(force_rollback=True):
            some_fleet(db, dice)
            for _ in range(dice.randint(3, 8)):
                some_gang(db, dice)
            for _ in range(3):
                clock.advance(3)
                board = board_of(db)
                rows = db.execute(
                    "select *, extract(epoch from starts_at)::float8 as at from gangq.decide()"
                ).fetchall()
                mine = {d.ask: d for d in decide(board)} if board else {}
                for row in rows:
                    name = f"g{row['gang_id']}"
                    same = mine[name].action == row["action"]
                    if row["action"] == "plan":
                        same = same and abs((mine[name].starts_at or 0) - row["at"]) < 0.001
                    agreed[f"{row['action']} {'as in' if same else 'other than'} SQL"] += 1
                    if not same:
                        apart.append((seed, n, name, row["action"], row["gate"], mine[name], board))
                db.execute("select gangq.admit()")
                gone = db.execute(
                    "select id from gangq.live_gangs where state = 'reserved' order by id"
                ).fetchall()
                if gone and dice.random() < 0.7:
                    db.execute(
                        "select gangq.cancel(gang_ids => array[%s::bigint])", (dice.choice(gone)["id"],)
                    )
                some_gang(db, dice)
    print(agreed)
    for case in itertools.islice(apart, 5):
        print(*case[:-1], sep="\n  ")
    other = sum(count for what, count in agreed.items() if "other" in what)
    assert other <= sum(agreed.values()) / 50, agreed
