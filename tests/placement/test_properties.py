"""Placement on boards made at random: what is decided keeps every rule, and what exists is found.

The walks of ``make test`` are always the same; GANGQ_SOAK=1 walks much further, another way each time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from gangq.placement.board import Ask, Board, Device, Hold, Kind, Needs, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision, Seat
from placement import boards
from placement.boards import contiguous, decided, seat
from soaking import SOAK


def dice_of(rounds: int) -> list[tuple[int, random.Random]]:
    """Seeds, to be shown when something fails, and what they make."""
    first = random.randrange(1 << 30) if SOAK else 1
    return [(seed, random.Random(seed)) for seed in range(first, first + rounds * (100 if SOAK else 1))]


def random_board(dice: random.Random) -> Board:
    """A small busy fleet, a tree of queues, gangs and single jobs that wait."""
    racks, workers = dice.randint(1, 3), []
    for n in range(dice.randint(1, 8)):
        gpus = dice.choice([2, 4, 8])
        host, rack = f"h{n // dice.choice([1, 1, 2])}", f"r{dice.randrange(racks)}"
        vram = dice.choice([24, 80])
        workers.append(
            Worker(
                n + 1,
                f"w{n}",
                host,
                slots=dice.choice([gpus, gpus, 2]),
                memory_mb=dice.choice([64, 512]),
                millicpus=16000,
                devices=tuple(Device(100 * (n + 1) + d, vram) for d in range(gpus)),
                class_id=dice.choice([0, 0, 0, 1]),
                domains=(rack, host),
                open=dice.random() < 0.9,
                doubtful=dice.random() < 0.1,
            )
        )
    queues = (
        Queue("a", policy=dice.choice(["priority", "fair"]), maximum={"gpus": dice.choice([4, 8, 99])}),
        Queue(
            "a.b", policy=dice.choice(["priority", "fifo", "largest_first"]), max_jobs=dice.choice([None, 5])
        ),
        Queue("c", guaranteed={"gpus": dice.choice([2, 6])}, weight=dice.choice([1.0, 3.0])),
        Queue("d", paused=dice.random() < 0.2, submitter_maximum={"jobs": 3}),
    )
    names = [queue.name for queue in queues]
    units = []
    for worker in workers:
        free, slots, memory = list(worker.devices), worker.slots, worker.memory_mb
        while free and slots and memory >= 8 and dice.random() < 0.7:
            take = dice.randint(1, min(4, len(free)))
            hold = Hold(worker.id, tuple(d.id for d in free[:take]), 8, 1000)
            free, slots, memory = free[take:], slots - 1, memory - 8
            leaving = dice.random() < 0.1
            units.append(
                Unit(
                    f"j{len(units) + 1}",
                    (hold,),
                    ends_at=dice.choice([50.0, 100.0, 1000.0, 5000.0]),
                    queue=dice.choice(names),
                    limit_key=dice.choice(["", "k"]),
                    submitter=dice.choice(["ann", "bob"]),
                    priority=dice.randint(0, 3),
                    lost_s=dice.random() * 100,
                    movable=not leaving and dice.random() < 0.7,
                    leaving=leaving,
                )
            )
    kinds, asks = [], []
    for n in range(1, dice.randint(2, 9)):
        single = dice.random() < 0.5
        least = 1 if single else dice.randint(1, 6)
        role = Role(
            Needs(
                gpus=dice.choice([0, 1, 1, 2, 8]),
                vram_mb=dice.choice([0, 0, 40]),
                memory_mb=dice.choice([0, 0, 32]),
                millicpus=dice.choice([0, 4000]),
            ),
            least=least,
            most=least if single else least + dice.choice([0, 0, 3]),
            serves=dice.choice([frozenset({0}), frozenset({0, 1})]),
            strategy="pack" if single else dice.choice(["pack", "spread", "strict_pack", "strict_spread"]),
            require="" if single else dice.choice(["", "", "rack"]),
        )
        roles = (role,) if single or dice.random() < 0.8 else (role, Role(Needs(gpus=1), least=1, most=1))
        kinds.append(
            Kind(
                n,
                roles,
                queue=dice.choice(names),
                apart="" if single else dice.choice(["", "x"]),
                limit_key=dice.choice(["", "", "k"]),
            )
        )
        for _ in range(dice.randint(1, 3)):
            priority = dice.randint(0, 5)
            asks.append(
                Ask(
                    f"k{n}/{priority}" if single else f"g{100 + len(asks)}",
                    n,
                    priority=priority,
                    age=len(asks),
                    submitter=dice.choice(["ann", "bob"]),
                    estimate_s=dice.choice([40.0, 400.0, 4000.0]),
                    count=dice.randint(1, 9) if single else 1,
                )
            )
    unique = {ask.id: ask for ask in asks}
    return Board(
        now=0.0,
        workers=tuple(workers),
        units=tuple(units),
        kinds=tuple(kinds),
        asks=tuple(unique.values()),
        queues=queues,
        limits={"k": dice.choice([3, 8])},
        levels=("rack", "host"),
        planned_starts=dice.choice([0, 1, 4]),
        victims=dice.choice([0, 8]),
        grace_s=10.0,
    )


def seated(board: Board, decisions: list[Decision]) -> dict[int, list[tuple[str, Role, tuple[int, ...]]]]:
    """Of each worker who starts there: ask, role, devices."""
    kinds, asks = {k.id: k for k in board.kinds}, {a.id: a for a in board.asks}
    found = defaultdict(list)
    for decision in decisions:
        if decision.ask in asks:
            for seat in decision.seats:
                role = kinds[asks[decision.ask].kind].roles[seat.role]
                found[seat.worker].append((decision.ask, role, seat.devices))
    return found


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_what_is_decided_keeps_every_rule(seed: int, dice: random.Random) -> None:
    started = planned = stopped = 0
    for n in range(400):
        board = random_board(dice)
        decisions = decide(board)
        case = (seed, n)
        assert sorted(d.ask for d in decisions) == sorted(a.id for a in board.asks), case
        kinds, asks = {k.id: k for k in board.kinds}, {a.id: a for a in board.asks}
        held = Counter(d for unit in board.units for hold in unit.holds for d in hold.devices)
        taken = Counter(d for decision in decisions for seat in decision.seats for d in seat.devices)
        assert max((held + taken).values(), default=1) == 1, (case, "a device twice")
        for worker in board.workers:
            mine = seated(board, decisions)[worker.id]
            there = [hold for unit in board.units for hold in unit.holds if hold.worker == worker.id]
            assert not mine or worker.open, case
            assert len(mine) + len(there) <= worker.slots or not mine, case
            memory = sum(role.needs.memory_mb for _, role, _ in mine) + sum(hold.memory_mb for hold in there)
            assert memory <= worker.memory_mb, case
            for _, role, devices in mine:
                assert worker.class_id in role.serves, case
                assert len(devices) == role.needs.gpus, case
                known = {d.id: d.vram_mb for d in worker.devices}
                assert all(known[d] >= role.needs.vram_mb for d in devices), case
        for decision in decisions:
            ask = asks[decision.ask]
            kind = kinds[ask.kind]
            if decision.seats and not ask.single:
                counts = Counter(seat.role for seat in decision.seats)
                assert all(r.least <= counts[i] <= r.most for i, r in enumerate(kind.roles)), case
                assert decision.refused is None, case
            if ask.single:
                assert len(decision.seats) == ask.count or decision.refused, case
                assert len(decision.seats) <= ask.count, case
            if not decision.seats:
                assert decision.refused is not None, case
            started += bool(decision.seats)
            planned += bool(decision.planned and not decision.stop)
            stopped += bool(decision.stop)
        limits_hold(board, decisions, case)
        planned_starts_are_kept(board, decisions, case)
        stops_are_lawful(board, decisions, case)
        assert [replace_seats(d) for d in decide(board)] == [replace_seats(d) for d in decisions], case
    assert min(started, planned, stopped) > 20


def limits_hold(board: Board, decisions: list[Decision], case: object) -> None:
    """No queue uses more than its maximum, its children included, and nothing that starts exceeds its limit key."""
    kinds, asks = {k.id: k for k in board.kinds}, {a.id: a for a in board.asks}
    new = Counter[str]()
    jobs = Counter[str]()
    of_key = Counter[str]()
    by = Counter[tuple[str, str]]()
    for decision in decisions:
        ask = asks[decision.ask]
        name, key = kinds[ask.kind].queue, kinds[ask.kind].limit_key
        of_key[key] += len(decision.seats)
        for queue in board.queues:
            if name == queue.name or name.startswith(queue.name + "."):
                new[queue.name] += sum(len(seat.devices) for seat in decision.seats)
                jobs[queue.name] += len(decision.seats)
                by[queue.name, ask.submitter] += len(decision.seats)
    for key, most in board.limits.items():
        had = sum(hold.slots for unit in board.units if unit.limit_key == key for hold in unit.holds)
        assert not of_key[key] or had + of_key[key] <= most, case
    for queue in board.queues:
        inside = [u for u in board.units if u.queue == queue.name or u.queue.startswith(queue.name + ".")]
        gpus = sum(len(hold.devices) for unit in inside for hold in unit.holds)
        if new[queue.name]:
            assert gpus + new[queue.name] <= queue.maximum.get("gpus", 1e9), case
        if jobs[queue.name] and queue.max_jobs is not None:
            assert len(inside) + jobs[queue.name] <= queue.max_jobs, case
        for submitter in ("ann", "bob"):
            had = sum(1 for unit in inside if unit.submitter == submitter)
            if by[queue.name, submitter]:
                assert had + by[queue.name, submitter] <= queue.submitter_maximum.get("jobs", 1e9), case
        if queue.paused:
            assert not jobs[queue.name], case


def planned_starts_are_kept(board: Board, decisions: list[Decision], case: object) -> None:
    """At each planned start there is room for it beside all that still runs then, started and planned before it."""
    kinds, asks = {k.id: k for k in board.kinds}, {a.id: a for a in board.asks}
    busy = [
        (hold.worker, hold.devices, hold.memory_mb, hold.slots, board.now, unit.ends_at)
        for unit in board.units
        for hold in unit.holds
    ]
    plans = []
    for decision in decisions:
        ask = asks[decision.ask]
        for seats, at in ((decision.seats, board.now), (decision.planned, decision.starts_at)):
            mine = [
                (
                    seat.worker,
                    seat.devices,
                    kinds[ask.kind].roles[seat.role].needs.memory_mb,
                    1,
                    at,
                    at + ask.estimate_s,
                )
                for seat in seats
                if at is not None
            ]
            if not decision.stop:
                busy += mine
                plans += [(at, {seat[0] for seat in mine})] if at and mine else []
    if any(unit.leaving for unit in board.units) or any(decision.stop for decision in decisions):
        return
    for at, there in plans:
        now = [entry for entry in busy if entry[4] <= at < entry[5] and entry[0] in there]
        for worker in board.workers:
            mine = [entry for entry in now if entry[0] == worker.id]
            devices = [d for entry in mine for d in entry[1]]
            assert len(devices) == len(set(devices)), (case, at, worker.id)
            assert worker.id not in there or sum(entry[2] for entry in mine) <= worker.memory_mb, (case, at)
            assert worker.id not in there or sum(entry[3] for entry in mine) <= worker.slots, (case, at)


def stops_are_lawful(board: Board, decisions: list[Decision], case: object) -> None:
    """Who is told to stop may be, is worth less or borrows, once, and few enough are."""
    kinds, asks = {k.id: k for k in board.kinds}, {a.id: a for a in board.asks}
    units = {unit.id: unit for unit in board.units}
    told = [unit for decision in decisions for unit in decision.stop]
    assert len(told) == len(set(told)) <= board.victims, case
    for decision in decisions:
        ask = asks[decision.ask]
        for unit in map(units.__getitem__, decision.stop):
            assert unit.movable, case
            owed = kinds[ask.kind].queue == "c" and unit.queue != "c"
            assert unit.priority < ask.priority or owed, case


def replace_seats(decision: Decision) -> tuple[object, ...]:
    return (
        decision.ask,
        decision.seats,
        decision.planned,
        decision.starts_at,
        decision.stop,
        decision.refused,
    )


def with_links(board: Board, dice: random.Random) -> Board:
    """The same with devices of several sizes on a worker, some of them joined."""
    return board._replace(
        workers=tuple(
            worker._replace(
                devices=tuple(
                    device._replace(vram_mb=dice.choice([24, 80]), link=dice.choice(["", "x", "y", "z"]))
                    for device in worker.devices
                ),
            )
            for worker in board.workers
        ),
    )


def by_size(decision: Decision, sizes: dict[int, int]) -> Decision:
    """The same with the size of each device in its place."""

    def sized(seat: Seat) -> Seat:
        return seat._replace(devices=tuple(sorted(sizes[device] for device in seat.devices)))

    seats = tuple(map(sized, decision.seats))
    # When others need a seat that is only planned is no promise to anybody.
    planned = tuple(sized(seat)._replace(ends_by=None) for seat in decision.planned)
    return replace(decision, seats=seats, planned=planned)


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_links_change_nothing_but_which_of_equal_devices_is_taken(seed: int, dice: random.Random) -> None:
    """The same starts, is planned, stops and waits as without them, on the same workers and devices of one size."""
    chosen = 0
    for n in range(400):
        board = with_links(random_board(dice), dice)
        unknown = board._replace(
            workers=tuple(
                worker._replace(devices=tuple(device._replace(link="") for device in worker.devices))
                for worker in board.workers
            ),
        )
        sizes = {device.id: device.vram_mb for worker in board.workers for device in worker.devices}
        linked, plain = decide(board), decide(unknown)
        assert [by_size(one, sizes) for one in linked] == [by_size(one, sizes) for one in plain], (seed, n)
        chosen += [one.seats for one in linked] != [one.seats for one in plain]
    assert chosen > 20


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_a_board_is_the_same_after_a_file(seed: int, dice: random.Random) -> None:
    for n in range(50):
        board = random_board(dice)
        again = Board.from_json(json.loads(json.dumps(board.to_json())))
        assert again == board, (seed, n)


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_another_host_never_delays_the_first_in_line(seed: int, dice: random.Random) -> None:
    later = 0
    for n in range(300):
        board = random_board(dice)._replace(planned_starts=1, victims=0)
        first = board.asks[:1]
        board = board._replace(asks=first)
        more = Worker(
            99,
            "w99",
            "h99",
            8,
            512,
            16000,
            tuple(Device(9900 + d, 80) for d in range(8)),
            domains=("r9", "h99"),
        )
        (before,), (after,) = decide(board), decide(board._replace(workers=(*board.workers, more)))
        starts = [
            0.0 if d.seats else d.starts_at if d.starts_at is not None else float("inf")
            for d in (before, after)
        ]
        assert starts[1] <= starts[0], (seed, n)
        later += starts[1] < starts[0]
    assert later > 10


def random_case(dice: random.Random) -> tuple[boards.Fleet, boards.Kind, list[tuple[str, str]]]:
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
                boards.Node(
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
    fleet = boards.Fleet(nodes, levels)
    devices = len(fleet.devices)
    roles = tuple(
        boards.Role(
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
    kind = boards.Kind(
        roles,
        require=dice.choice([None] * 8 + list(levels)),
        prefer=dice.choice([None] * 2 + list(levels)),
        apart=dice.choice([None, None, "a"]),
    )
    return fleet, kind, [("a", dice.choice(fleet.hosts))] if dice.random() < 0.3 else []


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_a_placement_that_exists_is_found_and_obeys_what_was_asked(seed: int, dice: random.Random) -> None:
    """Of one role always; of several, which are seated one after another in two orders, nearly always."""
    found = missed = 0
    for n in range(600):
        fleet, kind, apart = random_case(dice)
        away = [host for key, host in apart if key == kind.apart]
        seats = seat(fleet, kind, apart)
        case = (seed, n, fleet, kind, apart)
        if seats is None:
            exists = fleet.placement(kind, away) is not None
            assert not exists or len(kind.roles) > 1, case
            missed += exists
            continue
        found += 1
        assert fleet.obeys(kind, seats, away), case
        assert all(contiguous([fleet.nodes[worker].host for worker in role]) for role in seats), case
    assert found > 60
    assert missed < found / 20


@pytest.mark.parametrize("resource", ["gpus", "memory_mb", "cpus", "jobs", "gangs", "submitter"])
def test_a_pass_counts_what_it_has_placed_against_the_limits_of_every_ancestor(resource: str) -> None:
    fleet = boards.Fleet([boards.Node("h0", slots=9, memory=99, mcpus=99000, vrams=(10,) * 9)])
    role = boards.Role(2, gpus=1, memory=1, mcpus=1000)
    gangs = [boards.Waiting(boards.Kind((role,), queue="a.b.c")) for _ in range(3)]
    above: dict[str, object] = {"maximum": {resource: 5}}
    if resource == "gangs":
        above = {"max_gangs": 2}
    elif resource == "submitter":
        above = {"submitter_maximum": {"gangs": 2}}
    board = fleet.board(gangs=gangs, queues={"a": above, "a.b": {}, "a.b.c": {}, "d": {}})
    assert [one.action for one in decided(board)] == ["start", "start", "wait"]
    gate = {"gangs": "running_limit", "submitter": "submitter_limit"}.get(resource, "quota")
    refused = decide(board)[2].refused
    assert refused is not None
    assert (refused.gate, refused.where) == (gate, "a")


PRINTS = """
import json, sys
from placement.drawn_boards import Picture
from gangq.placement import decide
leaving = "\\n".join(f"{unit} leaving" for unit in "abcde")
board = Picture(f"victims=8\\nh0 abcdeFFFF\\n{leaving}\\nX 1x6 prio=1").board
print(json.dumps([one.to_json() for one in decide(board)]))
"""


def test_the_same_board_gives_the_same_decisions_in_every_process() -> None:
    """Whatever the order of names in a set is there."""
    said = set()
    for seed in range(4):
        path = os.pathsep.join([*sys.path])
        run = subprocess.run(
            [sys.executable, "-c", PRINTS],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(run.stdout)
    assert len(said) == 1
    assert '"stop": ["g70"]' in said.pop()
