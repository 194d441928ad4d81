"""Planned starts: the first that wait are told when, later ones pass only if that delays nobody."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from placement.boards import Fleet, Held, Kind, Node, Role, Waiting, decided


def random_work(dice: random.Random) -> tuple[Fleet, list[Held]]:
    """A small fleet and what runs on it."""
    nodes = [
        Node(
            f"h{n}",
            slots=dice.randint(1, 3),
            memory=dice.choice([3, 6]),
            vrams=tuple(dice.choice([10, 40]) for _ in range(dice.randint(0, 3))),
        )
        for n in range(dice.randint(1, 4))
    ]
    fleet, held = Fleet(nodes), []
    for n, node in enumerate(fleet.nodes):
        devices, memory = len(node.vrams), node.memory
        for _ in range(dice.randint(0, node.slots)):
            job = Held(
                n + 1,
                float(dice.randint(1, 6) * 100),
                gpus=dice.randint(0, min(1, devices)),
                memory=dice.randint(0, min(2, memory)),
            )
            devices, memory = devices - job.gpus, memory - job.memory
            held.append(job)
    return fleet, held


def then(fleet: Fleet, held: list[Held], seconds: float) -> Fleet:
    """The fleet as it is when all has ended that ends by then."""
    nodes = []
    for n, node in enumerate(fleet.nodes):
        mine = [job for job in held if job.worker == n + 1]
        free, taken = sorted(node.vrams), 0
        for job in mine:  # as the board deals them out: from the first device on, in the order of the jobs
            if job.ends > seconds:
                del free[taken : taken + job.gpus]
            else:
                taken += job.gpus
        late = [job for job in mine if job.ends > seconds]
        nodes.append(
            Node(
                node.host,
                node.slots - len(late),
                node.memory - sum(job.memory for job in late),
                vrams=tuple(free),
            )
        )
    return Fleet(nodes)


def test_the_planned_start_is_the_first_end_after_which_the_gang_fits() -> None:
    """Of one role always; of two, which are seated one after another in two orders, nearly always."""
    dice, planned, later = random.Random(1), 0, 0
    for n in range(150):
        fleet, held = random_work(dice)
        strategies = ["pack", "spread", "strict_pack", "strict_spread"]
        kind = Kind(
            tuple(
                Role(
                    dice.randint(1, 3),
                    gpus=dice.choice([0, 1]),
                    vram=dice.choice([0, 20]),
                    memory=dice.choice([0, 1, 3]),
                    strategy=dice.choice(strategies),
                )
                for _ in range(dice.choice([1, 1, 2]))
            )
        )
        (row,) = decided(fleet.board(gangs=[Waiting(kind)], held=held, reservations=4))
        ends = sorted({0.0} | {job.ends for job in held})
        first = next((end for end in ends if then(fleet, held, end).placement(kind)), None)
        case = (n, fleet, held, kind)
        at = 0.0 if row.action == "start" else row.starts_at
        if first is not None and at != first and len(kind.roles) > 1:
            assert at is None or at > first, case
            later += 1
        elif first is None:
            assert (row.action, row.gate) == ("wait", "infeasible"), case
        elif first == 0:
            assert row.action == "start", case
        else:
            assert (row.action, row.starts_at) == ("plan", first), case
            planned += 1
    assert planned > 20
    assert later < 4


def test_only_the_first_so_many_get_a_planned_start() -> None:
    fleet = Fleet([Node("h0", 1)])
    gangs = [Waiting(Kind((Role(1),), apart=str(n)), estimate=50) for n in range(6)]
    for most in (0, 1, 4):
        rows = decided(fleet.board(gangs=gangs, held=[Held(1, 100)], reservations=most))
        assert [row.action for row in rows] == ["plan"] * most + ["wait"] * (6 - most)
        assert [row.starts_at for row in rows[:most]] == [100 + 50 * n for n in range(most)], (
            "one after another"
        )


def test_what_starts_in_this_very_pass_ends_too() -> None:
    fleet = Fleet([Node("h0", 2, vrams=(10, 10))])
    first, second = Waiting(Kind((Role(2, gpus=1),)), estimate=70), Waiting(Kind((Role(1, gpus=2),)))
    rows = decided(fleet.board(gangs=[first, second], reservations=1))
    assert [(row.action, row.starts_at) for row in rows] == [("start", None), ("plan", 70)]


# Who may pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimate", "passes"), [(10, True), (100, True), (101, False), (10000, False)])
def test_a_later_gang_passes_if_it_is_gone_by_then(estimate: float, passes: bool) -> None:
    fleet = Fleet([Node("h0", 1), Node("h1", 1)])
    gangs = [Waiting(Kind((Role(2),))), Waiting(Kind((Role(1),)), estimate=estimate)]
    rows = decided(fleet.board(gangs=gangs, held=[Held(1, 100)], reservations=1))
    assert rows[0].starts_at == 100
    assert rows[1].action == ("start" if passes else "wait")


def test_a_long_gang_passes_on_what_the_planned_one_does_not_need() -> None:
    fleet = Fleet([Node("h0", 1), Node("h1", 1), Node("h2", 2)])
    gangs = [
        Waiting(Kind((Role(2, strategy="strict_spread"),), apart="x")),
        Waiting(Kind((Role(2),)), estimate=1e6),
    ]
    rows = decided(fleet.board(gangs=gangs, held=[Held(1, 100), Held(2, 100), Held(3, 1e5)], reservations=1))
    assert (rows[0].action, rows[1].action) == ("plan", "wait")
    rows = decided(
        fleet.board(
            gangs=[gangs[0], Waiting(Kind((Role(1),)), estimate=1e6)],
            held=[Held(1, 100), Held(2, 100)],
            reservations=1,
        ),
    )
    assert rows[0].action == "plan"
    assert (rows[1].action, rows[1].workers) == ("start", [3]), "a slot beside the planned one's"


def test_a_device_too_small_for_the_planned_gang_is_not_counted_on() -> None:
    """h0 frees its small device; the large one, free now, must stay for whom it is planned."""
    fleet = Fleet([Node("h0", 3, vrams=(10, 40)), Node("h1", 1, vrams=(40,))])
    gangs = [
        Waiting(Kind((Role(2, gpus=1, vram=20),))),
        Waiting(Kind((Role(1, gpus=1, vram=20),)), estimate=1e6),
    ]
    held = [Held(1, 100, gpus=1), Held(2, 100, gpus=1)]
    rows = decided(fleet.board(gangs=gangs, held=held, reservations=1))
    assert [(row.action, row.starts_at) for row in rows] == [("plan", 100), ("wait", None)]


def test_nothing_that_starts_or_is_planned_delays_a_planned_start() -> None:
    """At every planned start its workers have what it needs, whatever else started or was planned before."""
    dice, plans, passed = random.Random(2), 0, 0
    for n in range(150):
        fleet, held = random_work(dice)
        gangs = [
            Waiting(
                Kind(
                    (Role(dice.randint(1, 4), gpus=dice.choice([0, 0, 1]), memory=dice.choice([0, 1, 2])),),
                    apart=None,
                ),
                estimate=float(dice.choice([50, 150, 100, 300, 1000])),
            )
            for _ in range(dice.randint(2, 8))
        ]
        rows = decided(fleet.board(gangs=gangs, held=held, reservations=dice.choice([1, 2, 4])))
        started = [row for row in rows if row.action == "start"]
        planned = [row for row in rows if row.action == "plan"]
        plans, passed = (
            plans + len(planned),
            passed + sum(1 for row in started if planned and row.gang > planned[0].gang),
        )
        for plan in planned:
            when = plan.starts_at
            taken: dict[int, Counter[str]] = {w + 1: Counter() for w in range(len(fleet.nodes))}
            for job in held:
                if job.ends > when:
                    taken[job.worker].update(slots=1, memory=job.memory, gpus=job.gpus)
            for row in started:
                gang = gangs[row.gang - 1]
                if gang.estimate > when:
                    for worker in row.workers:
                        taken[worker].update(
                            slots=1, memory=gang.kind.roles[0].memory, gpus=gang.kind.roles[0].gpus
                        )
            for other in planned:
                gang = gangs[other.gang - 1]
                if other.starts_at <= when < other.starts_at + gang.estimate:
                    for worker in other.workers:
                        taken[worker].update(
                            slots=1, memory=gang.kind.roles[0].memory, gpus=gang.kind.roles[0].gpus
                        )
            for worker, use in taken.items():
                node = fleet.nodes[worker - 1]
                assert use["slots"] <= node.slots, (n, worker, plan)
                assert use["memory"] <= node.memory, (n, worker, plan)
                assert use["gpus"] <= len(node.vrams), (n, worker, plan)
    assert plans > 100
    assert passed > 20
