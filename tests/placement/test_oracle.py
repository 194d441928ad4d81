"""The decision in Python beside the one in SQL, on the same boards: tables that random verbs have filled."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import psycopg

from gangq.placement.board import Board
from gangq.placement.decide import decide
from property.test_placement import SOAK, numbers, some_fleet, some_gang
from sql.drive import place

Connection = psycopg.Connection[dict[str, Any]]


def board_of(db: Connection) -> Board:
    """What a pass sees, without displacing: SQL's decision has no way to tell."""
    row = db.execute("select gangq.board() as board").fetchone()
    assert row is not None
    return Board.from_json({**row["board"], "victims": 0})


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
                mine = {d.ask: d for d in decide(board)}
                for row in rows:
                    name = f"g{row['gang_id']}"
                    same = mine[name].action == row["action"]
                    if row["action"] == "plan":
                        same = same and abs((mine[name].starts_at or 0) - row["at"]) < 0.001
                    agreed[f"{row['action']} {'as in' if same else 'other than'} SQL"] += 1
                    if not same:
                        apart.append((seed, n, name, row["action"], row["gate"], mine[name], board))
                place(db)
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
