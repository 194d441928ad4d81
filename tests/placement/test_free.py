"""What is free: the books balance, whatever is taken, given back, planned and copied."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from test_properties import dice_of, random_board, with_links

from gangq.placement.board import Board, Needs, Role
from gangq.placement.free import Free, PlannedStart, Taken
from gangq.placement.room import lacking, room_by


class Books:
    """What is taken of a board, and until when."""

    def __init__(self, board: Board) -> None:
        self.free = Free(board)
        self.board = board
        self.taken = [(seat, unit.ends_at) for unit in board.units for seat in self.free.held[unit.id]]

    def copy(self) -> Books:
        twin = object.__new__(Books)
        twin.board, twin.free, twin.taken = self.board, self.free.copy(starts=True), list(self.taken)
        return twin

    def step(self, dice: random.Random) -> None:
        """Take something, be it free or not, or give back something."""
        if self.taken and dice.random() < 0.5:
            seat, ends_at = self.taken.pop(dice.randrange(len(self.taken)))
            dice.choice([self.free.give, self.free.end])([seat], ends_at)
            return
        number = dice.randrange(len(self.free.workers))
        devices = self.free.workers[number].devices
        some = tuple(dice.sample(devices, dice.randint(0, min(3, len(devices)))))
        seat, ends_at = Taken(number, some, 1, dice.choice([0, 8]), 1000), dice.choice([20.0, 60.0, 500.0])
        self.free.take([seat], ends_at)
        self.taken.append((seat, ends_at))

    def check(self) -> None:
        """Free is what is offered less all that is taken, and each device is free or owed."""
        free = self.free
        slots = 0
        for number, worker in enumerate(free.workers):
            mine = [seat for seat, _ in self.taken if seat.worker == number]
            left = [
                worker.slots - sum(seat.slots for seat in mine),
                worker.memory_mb - sum(seat.memory_mb for seat in mine),
                worker.millicpus - sum(seat.millicpus for seat in mine),
            ]
            assert free._left[number] == left
            slots += max(0, left[0])
            times = Counter(device.id for seat in mine for device in seat.devices)
            for device in worker.devices:
                balance = (device.id in free._devices[number]) - free._owed[device.id]
                assert balance == (not device.withheld) - times[device.id]
            state = free.worker_state(number, 0)
            assert state[1:4] == tuple(left)
            assert len(state.vrams) == len(free._devices[number])
        assert free.slots == slots
        self.check_layers()

    def check_layers(self) -> None:
        """Each layer says of every host what is free there beside its planned starts."""
        free = self.free
        free._settle()
        for host, workers in enumerate(free.workers_of):
            for layer in range(len(free.starts) + 1):
                states = tuple(free.worker_state(worker, layer) for worker in workers)
                assert free._states[free.layers[layer]._state[host]] == states


@pytest.mark.parametrize(("seed", "dice"), dice_of(1))
def test_the_books_balance(seed: int, dice: random.Random) -> None:
    for n in range(40):
        board = with_links(random_board(dice), dice)
        withheld = {device.id for w in board.workers for device in w.devices if dice.random() < 0.1}
        board = board._replace(
            workers=tuple(
                w._replace(devices=tuple(d._replace(withheld=d.id in withheld) for d in w.devices))
                for w in board.workers
            ),
            kinds=(*board.kinds, board.kinds[0]._replace(id=99, roles=(Role(Needs(2), strategy="linked"),))),
        )
        books = Books(board)
        for _ in range(dice.randint(0, 2)):
            seats = [Taken(dice.randrange(len(board.workers)), (), 1, 0, 0)]
            then = books.free.copy(starts=False)
            then.take(seats, 0)
            books.free.plan(PlannedStart(f"g{n}", dice.choice([30.0, 100.0]), 900.0, seats), then)
        for _ in range(30):
            books.step(dice)
        books.check()
        before = books.copy()
        twin = books.copy()
        for _ in range(20):
            twin.step(dice)
        twin.check()
        books.check()
        assert [start.left for start in books.free.starts] == [start.left for start in before.free.starts], (
            seed,
            n,
            "a copy shares nothing that changes",
        )
        assert books.free.starts == [] or books.free.starts[0] is not twin.free.starts[0]


def test_each_layer_is_what_is_free_beside_its_planned_starts() -> None:
    """As computed anew, whatever the order and the moments in which starts are planned."""
    dice = random.Random(5)
    for _ in range(200):
        books = Books(random_board(dice))
        free = books.free
        for n in range(dice.randint(1, 4)):
            seats = [Taken(dice.randrange(len(free.workers)), (), dice.randint(1, 2), 8, 0)]
            then = free.copy(starts=False)
            then.take(seats, 0)
            starts_at = dice.choice([30.0, 60.0, 90.0])
            free.plan(PlannedStart(f"g{n}", starts_at, starts_at + dice.choice([20.0, 60.0]), seats), then)
            books.check_layers()
            if dice.random() < 0.5:
                books.step(dice)


def test_what_is_given_back_restores_what_is_free_beside_planned_starts() -> None:
    dice = random.Random(2)
    for _ in range(100):
        board = random_board(dice)
        free = Free(board)
        seats = [Taken(dice.randrange(len(board.workers)), (), 2, 8, 0)]
        then = free.copy(starts=False)
        then.take(seats, 0)
        free.plan(PlannedStart("g1", 50.0, 90.0, seats), then)
        before = {worker: list(left) for worker, left in free.starts[0].left.items()}
        ends_at = dice.choice([40.0, 60.0])
        free.take(seats, ends_at)
        assert (free.starts[0].left == before) == (ends_at == 40.0)
        free.give(seats, ends_at)
        assert free.starts[0].left == before


@pytest.mark.parametrize("strategy", ["pack", "linked"])
def test_with_all_that_one_more_member_lacks_there_is_room_for_it(strategy: str) -> None:
    dice, seen = random.Random(3), 0
    for _ in range(200):
        role = Role(
            Needs(dice.randint(0, 3), dice.choice([0, 40]), dice.choice([0, 8, 24]), dice.choice([0, 1500])),
            strategy=strategy,
        )
        board = with_links(random_board(dice), dice)
        board = board._replace(kinds=(board.kinds[0]._replace(roles=(role,)),), asks=())
        free = Free(board)
        for number in range(len(free.workers)):
            state = free.worker_state(number, 0)
            room = max(0, min(room_by(state, role).values(), default=0))
            short = {one.of: one.need - one.have for one in lacking(state, role)}
            assert bool(short) == (state.class_id in role.serves)
            if not short:
                continue
            seen += 1
            given = max(0, state.slots) + short.get("slots", 0)
            gpus = int(short.get("gpus", 0) + short.get("linked GPUs", 0))
            # The GPUs that are short are of the link that lacks least.
            joined = max(
                (*state.links, state.vrams[-1:]),
                key=lambda link: sum(vram >= role.needs.vram_mb for vram in link) % max(1, role.needs.gpus),
            )
            links = [*state.links]
            if joined in links:
                links.remove(joined)
            more = state._replace(
                slots=int(given),
                memory_mb=int(max(0, state.memory_mb) + short.get("memory_mb", 0)),
                millicpus=int(max(0, state.millicpus) + 1000 * short.get("cpus", 0)),
                vrams=tuple(sorted((*state.vrams, *(80,) * gpus))),
                links=(*links, tuple(sorted((*joined, *(80,) * gpus)))),
            )
            assert min(room_by(more, role).values()) == room + 1, (state, role, short)
    assert seen > 100
