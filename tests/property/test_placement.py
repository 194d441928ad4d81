"""Placement over random fleets, trees of queues and gangs: what exists is found, what is decided keeps every rule.

The walks of `make test` are always the same; GANGQ_SOAK=1 walks much further, another way each time.
"""

from __future__ import annotations

import os
import random
from itertools import groupby
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from sql.boards import Fleet, Held, Kind, Node, Role, Waiting, seat

SOAK = os.environ.get("GANGQ_SOAK") == "1"
Connection = psycopg.Connection[dict[str, Any]]


def numbers() -> tuple[int, random.Random]:
    """A seed, to be shown when something fails, and what it makes."""
    seed = random.randrange(1 << 30) if SOAK else 1
    return seed, random.Random(seed)


def contiguous(names: list[Any]) -> bool:
    """Whether nobody comes back after somebody else."""
    return len([name for name, _ in groupby(names)]) == len(set(names))


def decide(db: Connection, board: dict[str, Any], max_gangs: int = 200) -> list[dict[str, Any]]:
    """What a pass would do with this board."""
    return db.execute(
        "select * from gangq.decide_on(jsonb_populate_record(null::gangq.board, %s), %s)",
        (Jsonb(board), max_gangs),
    ).fetchall()


# Seats ------------------------------------------------------------------------------------------------------


def random_case(dice: random.Random) -> tuple[Fleet, Kind, list[tuple[str, str]]]:
    """A small fleet that is about full with one gang of one to three roles, all of it at random."""
    levels = dice.choice([("host",), ("rack", "host"), ("rack", "host", "nvlink"), ("zone", "rack", "host")])
    nodes = []
    for n in range(dice.randint(1, 5)):
        labels = {
            name: f"{name[0]}{dice.randint(1, 2)}"
            for name in levels
            if name != "host" and dice.random() < 0.95
        }
        for _ in range(dice.choice([1, 1, 1, 2])):
            if "nvlink" in levels:
                labels = labels | {"nvlink": f"n{dice.randint(1, 2)}"}
            vrams = tuple(dice.choice([10, 10, 40, 80]) for _ in range(dice.randint(0, 4)))
            nodes.append(
                Node(
                    f"h{n}",
                    slots=dice.randint(1, 4),
                    memory=dice.choice([4, 6, 8]),
                    mcpus=dice.choice([4, 8]),
                    vrams=vrams,
                    labels=labels,
                    label=dice.choice(["", "x"]),
                    open=dice.random() < 0.97,
                    withheld=dice.choice([0, 0, 0, min(1, len(vrams))]),
                )
            )
    fleet = Fleet(nodes, levels)
    devices = len(fleet.devices)
    roles = tuple(
        Role(
            dice.randint(1, 4),
            gpus=dice.choice([0, 1, 1, 2]),
            vram=dice.choice([0, 0, 20, 50]),
            memory=dice.choice([0, 1, 2, 3]),
            mcpus=dice.choice([0, 0, 1, 3]),
            strategy=dice.choice(["pack", "pack", "spread", "strict_pack", "strict_spread"]),
            require=dice.choice([None] * 7 + list(levels)),
            prefer=dice.choice([None] * 2 + list(levels)),
            balanced=dice.random() < 0.2,
            label=dice.choice([None, None, None, "x"]),
            avoid=(1000 + dice.randrange(devices),) if devices and dice.random() < 0.1 else (),
        )
        for _ in range(dice.choice([1, 2, 2, 3]))
    )
    kind = Kind(
        roles,
        require=dice.choice([None] * 8 + list(levels)),
        prefer=dice.choice([None] * 2 + list(levels)),
        apart=dice.choice([None, None, "a"]),
    )
    return fleet, kind, [("a", dice.choice(fleet.hosts))] if dice.random() < 0.3 else []


def test_a_placement_that_exists_is_found_and_obeys_what_was_asked(db: Connection) -> None:
    seed, dice = numbers()
    found = 0
    for n in range(20000 if SOAK else 300):
        fleet, kind, apart = random_case(dice)
        away = [host for key, host in apart if key == kind.apart]
        seats = seat(db, fleet, kind, apart)
        case = (seed, n, fleet, kind, apart)
        if seats is None:
            assert fleet.placement(kind, away) is None, case
        else:
            found += 1
            assert fleet.obeys(kind, seats, away), case
            assert all(contiguous([fleet.nodes[worker].host for worker in role]) for role in seats), case
    assert found > 30


# The short way and the long one -----------------------------------------------------------------------------


def test_gangs_without_wishes_get_the_same_seats_the_short_way_and_the_long_one(db: Connection) -> None:
    """A second level that no worker has makes decide_on go the long way for every gang."""
    seed, dice = numbers()
    placed = 0
    for n in range(2000 if SOAK else 60):
        nodes = []
        for host in range(dice.randint(1, 8)):
            for _ in range(dice.choice([1, 1, 1, 2, 3])):
                vrams = tuple(dice.choice([10, 40, 40]) for _ in range(dice.randint(0, 4)))
                nodes.append(
                    Node(
                        f"h{host}", slots=dice.randint(0, 4), memory=dice.choice([4, 8]), mcpus=dice.choice([4, 8]),
                        vrams=vrams, label=dice.choice(["", "x"]), open=dice.random() < 0.95,
                    )
                )  # fmt: skip
        shapes = [
            Role(1, gpus=dice.choice([0, 1, 2]), vram=dice.choice([0, 20]), memory=dice.choice([0, 1, 3]),
                 mcpus=dice.choice([0, 1]), label=dice.choice([None, None, "x"]))
            for _ in range(dice.randint(1, 2))
        ]  # fmt: skip
        kinds = [
            Kind(
                (
                    Role(
                        dice.randint(1, 6),
                        *(getattr(s, f) for f in ("gpus", "vram", "memory", "mcpus")),
                        label=s.label,
                    ),
                )
            )
            for s in shapes
            for _ in range(2)
        ]
        gangs = [
            Waiting(dice.choice(kinds), estimate=dice.choice([10.0, 1000.0]), priority=dice.randint(0, 2))
            for _ in range(dice.randint(1, 10))
        ]
        short, long = (Fleet(nodes, levels) for levels in (("host",), ("host", "none")))
        held = [
            Held(w + 1, dice.choice([50.0, 500.0]))
            for w, node in enumerate(short.nodes)
            if node.slots > 1 and dice.random() < 0.3
        ]
        promises = dice.choice([0, 2])
        one = decide(db, short.board(gangs=gangs, held=held, reservations=promises))
        other = decide(db, long.board(gangs=gangs, held=held, reservations=promises))
        assert one == other, (seed, n, short, gangs)
        placed += sum(row["action"] == "start" for row in one)
    assert placed > 60
