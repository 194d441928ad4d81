"""Nobody is the scheduler: whichever worker has the turn to decide may stop at any moment."""

from __future__ import annotations

import random
import signal
import time

import psycopg

from process.floor import Floor
from worker.worker_process import eventually

WITHIN_S = 3.0
ROUNDS = 8


def placed_in(floor: Floor, gang: int) -> float:
    """Wait until it is placed; how long that took, seconds."""
    began = time.monotonic()
    eventually(lambda: floor.client.gang(id=gang).state != "blocked", f"gang {gang} is placed", WITHIN_S)
    return time.monotonic() - began


def test_a_worker_that_stops_while_it_decides_delays_the_next_placement_by_seconds_at_most(
    floor: Floor,
) -> None:
    workers = [floor.start(name, slots=20) for name in ("w1", "w2")]
    dice = random.Random(7)
    for n in range(ROUNDS):
        gang = floor.client.submit_gang(task="command", size=1, payload=floor.work()).gang_id
        time.sleep(dice.uniform(0.0, 0.03))
        stopped = workers[n % 2]
        stopped.signal(signal.SIGSTOP)
        placed_in(floor, gang)
        stopped.signal(signal.SIGCONT)


def test_a_turn_that_is_taken_and_never_used_ends_by_itself(
    floor: Floor, db: psycopg.Connection[dict[str, object]]
) -> None:
    floor.start("w1", slots=4)
    db.execute("update gangq.decider set until = clock_timestamp() + interval '1 s'")
    gang = floor.client.submit_gang(task="command", size=1, payload=floor.work()).gang_id
    assert 0.5 < placed_in(floor, gang) < WITHIN_S
