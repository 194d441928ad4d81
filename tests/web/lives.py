"""Lives of gangs for the tests of their page, driven by SQL on a clock that the tests move."""

from __future__ import annotations

from dataclasses import dataclass

from sql.drive import Gang, Q, Worker, gpus


@dataclass(frozen=True)
class Displaced:
    """A gang that waited over a limit, ran, was displaced by another, and runs again as epoch 2."""

    low: Gang
    high: Gang
    workers: list[Worker]


def displaced_and_back(q: Q) -> Displaced:
    """The life of `low` has every kind of mark but those of failures."""
    workers = [q.worker(f"w{n}", host=f"node{n}", devices=gpus(80000, prefix=f"D{n}-")) for n in (1, 2)]
    q.call("set_queue", name="default", max_running_gangs=0)
    low = q.submit_gang(2, gpus=1)
    q.live_on(40, *workers)
    q.call("set_queue", name="default", max_running_gangs=None)
    claims = low.start(*workers)
    q.call("learn_gap", task="train", device_class="test", longest_s=20, beats=100)
    for claim, worker in zip(claims, workers, strict=True):
        worker.beat(claim, beats=[{"step": 7, "total": 50}])
        claim.save(7)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, gpus=1, priority=5)
    q.tick()
    q.live_on(5, *workers, tick=False)
    claims[1].ack()
    q.live_on(10, *workers, tick=False)
    claims[0].ack()
    winners = high.start(*workers)
    q.live_on(120, *workers)
    for winner in winners:
        winner.complete()
    claims = low.start(*workers)
    q.live_on(60, *workers)
    for claim, worker in zip(claims, workers, strict=True):
        worker.beat(claim, beats=[{"step": 9, "total": 50, "phase": "run"}])
    q.live_on(40, *workers)
    return Displaced(low, high, workers)
