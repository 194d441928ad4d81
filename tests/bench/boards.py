"""Large boards, the same each time: what one pass of a big or busy fleet decides from."""

from __future__ import annotations

import random

from gangq.placement import Board
from gangq.placement.board import Ask, Device, Hold, Kind, Needs, Role, Unit, Worker

GPUS = 8
A_KIND, IN_ALL = 200, 1000
"""How much of what waits a board shows: `gangq.board()` does so too."""
HOUR_S = 3600.0


def fleet(hosts: int) -> tuple[Worker, ...]:
    """A worker with eight GPUs on each host, sixteen hosts a rack."""
    return tuple(
        Worker(
            n,
            f"w{n}",
            f"host{n:05}",
            slots=GPUS,
            memory_mb=512_000,
            millicpus=64_000,
            devices=tuple(Device(GPUS * n + d, 80_000) for d in range(GPUS)),
            domains=(f"rack{n // 16}", f"host{n:05}"),
        )
        for n in range(1, hosts + 1)
    )


def waiting(gangs: int, kinds: int, priorities: int = 1) -> tuple[tuple[Kind, ...], tuple[Ask, ...]]:
    """Of so many gangs what a board shows; three members with a GPU each, kinds differ in their memory."""
    shown = min(kinds, IN_ALL)
    each = min(A_KIND, gangs // kinds, max(1, IN_ALL // kinds))
    of = tuple(Kind(k, (Role(Needs(1, 0, 1000 + k), 3, 3),)) for k in range(1, shown + 1))
    asks = (
        Ask(f"g{k + n * shown}", k, (k + n) % priorities, k + n * shown, "me")
        for n in range(each)
        for k in range(1, shown + 1)
    )
    return of, tuple(asks)


def idle(hosts: int, gangs: int) -> Board:
    """Everything is free."""
    kinds, asks = waiting(gangs, 1)
    asks = tuple(asks[0]._replace(id=f"g{n}", age=n) for n in range(gangs))
    return Board(0.0, fleet(hosts), (), kinds, asks, levels=("rack", "host"))


def full(hosts: int, kinds: int, *, priorities: int = 1, sizes: tuple[int, ...] = (1,)) -> Board:
    """Every GPU is taken, by jobs alone and by gangs that end one after another, and 20,000 gangs wait."""
    dice = random.Random(1)
    workers = fleet(hosts)
    units = []
    for worker in workers:
        devices = [device.id for device in worker.devices]
        while devices:
            take = min(len(devices), dice.choice(sizes))
            hold = Hold(worker.id, tuple(devices[:take]), 1000 * take, 1000 * take)
            units.append(
                Unit(
                    f"j{len(units) + 1}",
                    (hold,),
                    ends_at=dice.uniform(60.0, HOUR_S),
                    since=-dice.uniform(60.0, HOUR_S),
                    lost_s=dice.uniform(1.0, HOUR_S),
                    movable=True,
                )
            )
            devices = devices[take:]
    of, asks = waiting(20_000, kinds, priorities)
    return Board(0.0, workers, tuple(units), of, asks, levels=("rack", "host"))


def silent(hosts: int, kinds: int) -> Board:
    """No worker has been heard of lately."""
    board = full(hosts, kinds)
    return board._replace(workers=tuple(worker._replace(open=False) for worker in board.workers))
