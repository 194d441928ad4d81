"""Situations at random, and how many of their explanations a recomputation confirms.

A situation is a fleet, gangs that run on it, perhaps a limit, a pause, a taint or a cordon, and one gang that is
asked about. `confirm` recomputes what is said of it from the tables by other means: room by room, holder by holder.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psycopg

from databases import Clock, Kept, connect
from sql.drive import INVALID, Gang, Q, gpus
from sql.explained import Seen, confirm

RECOMPUTED = frozenset(
    ("room", "fragmented", "hosts", "one_host", "quota", "running_limit", "submitter_limit", "paused", "apart",
     "infeasible", "planned_start")
)  # fmt: skip
"""What may hold a gang here, and `confirm` recomputes."""
_LEASE_S = 1e5


@dataclass
class Confirmed:
    """Explanations asked for, by what holds the gang, and the seeds of those that were not confirmed."""

    asked: Counter[str] = field(default_factory=Counter)
    refuted: dict[int, str] = field(default_factory=dict)
    started: int = 0
    """Situations in which the gang was placed at once: there is nothing to explain."""
    refused: int = 0
    """Situations in which its submission was refused, because it needs more than a limit will ever let it have."""


def draw(q: Q, dice: random.Random) -> Gang | None:
    """A situation; the gang that is asked about, or None where its submission is refused because of a limit."""
    with_gpus = dice.random() < 0.4
    workers = []
    for n in range(dice.randint(2, 6)):
        offer: dict[str, Any] = {"slots": dice.randint(2, 8), "memory_mb": dice.choice((4000, 8000))}
        if with_gpus:
            offer["devices"] = gpus(*dice.choices((40, 80), k=dice.randint(1, 4)), prefix=f"w{n}-")
        if dice.random() < 0.1:
            offer["taints"] = ["debug"]
        if dice.random() < 0.5:
            offer["labels"] = {"gpu": "a100"}
        workers.append(q.worker(f"w{n}", f"h{n // 2}", lease_s=_LEASE_S, **offer))
    running = [
        q.submit_gang(
            dice.randint(1, 4),
            budget_s=dice.randint(300, 5000),
            wait_for_hardware=True,
            **_ask(dice, with_gpus),
        )
        for _ in range(dice.randint(2, 12))
    ]
    q.place()
    for worker in workers:
        worker.claim()
    waiting = [gang for gang in running if gang.state == "blocked"]
    for gang in waiting[dice.randint(0, 1) :]:
        gang.cancel()
    _restrict(q, dice, len(workers))
    options = _ask(dice, with_gpus)
    if dice.random() < 0.3:
        options["strategy"] = dice.choice(("strict_pack", "strict_spread"))
    options |= {"budget_s": dice.randint(300, 5000), "wait_for_hardware": True}
    try:
        return q.submit_gang(dice.randint(1, 6), **options)
    except psycopg.Error as error:
        if error.sqlstate != INVALID:
            raise
        return None


def _ask(dice: random.Random, with_gpus: bool) -> dict[str, Any]:
    """What each member of a gang asks for."""
    ask: dict[str, Any] = {}
    if with_gpus and dice.random() < 0.7:
        ask = {"gpus": dice.randint(1, 2), "vram_mb": dice.choice((0, 40, 80))}
    if dice.random() < 0.4:
        ask["memory_mb"] = dice.choice((500, 1000, 2000))
    if dice.random() < 0.1:
        ask["labels"] = {"gpu": "a100"}
    if dice.random() < 0.2:
        ask["apart"] = "x"
    return ask


def _restrict(q: Q, dice: random.Random, workers: int) -> None:
    """Close one door or none."""
    few = dice.randint(1, 4)
    limits: tuple[dict[str, Any], ...] = (
        {"paused": True},
        {"max_running_gangs": few},
        {"max_running_jobs": few},
        {"maximum": {"jobs": few}},
        {"submitter_maximum": {"jobs": few}},
    )
    chance = dice.random()
    if chance < 0.25:
        q.call("set_queue", name="default", **dice.choice(limits))
    elif chance < 0.35:
        q.call("cordon", worker=f"w{dice.randrange(workers)}")


def confirmed(kept: Kept, wanted: int, seed: int) -> Confirmed:
    """Ask for so many explanations, each in a situation of its own that its seed makes again."""
    found = Confirmed()
    db = connect(kept.dsn)
    clock = Clock(db)
    while found.asked.total() < wanted:
        clock.set_to_now()
        q = Q(db, clock)
        gang = draw(q, random.Random(seed))
        q.place()
        if gang is None:
            found.refused += 1
        elif gang.state == "blocked":
            seen = Seen(q, gang)
            gate = seen.verdict["gate"]
            found.asked[gate] += 1
            try:
                assert gate in RECOMPUTED, f"{gate} is not recomputed"
                confirm(seen)
            except AssertionError as error:
                found.refuted[seed] = f"{gate}: {error or seen.verdict['detail']}"
        else:
            found.started += 1
        kept.restore()
        seed += 1
    db.close()
    return found
