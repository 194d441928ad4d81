"""Random verbs around a service: never more gangs than wanted and its surge, never a partial gang in endpoints.

The walks of `make test` are always the same; GANGQ_SOAK=1 walks more ways.
"""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from soaking import SOAK
from sql.drive import Q
from sql.services import Replicas, gangs, put, service, whole

pytestmark = pytest.mark.slow

SEEDS = 100 if SOAK else 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_wanted_is_kept_whatever_happens(
    db: psycopg.Connection[dict[str, Any]], clock: Any, seed: int
) -> None:
    q = Q(db, clock)
    rng = random.Random(seed)
    fleet = Replicas.of_hosts(q, 5, slots=3)
    surge = rng.choice([0, 1, 2])
    size = rng.choice([1, 2, 3])
    put(q, replicas=size, gang=size, surge=surge, ready_within_s=20)
    most = 0
    for step in range(60):
        one = rng.choice(list(fleet.claims.values())) if fleet.claims else None
        action = rng.choice(
            ["turn"] * 4
            + [
                "scale",
                "limits",
                "load",
                "update",
                "size",
                "fail",
                "complete",
                "unready",
                "cancel",
                "preempt",
                "drain",
                "stop",
            ]
        )
        if action == "scale":
            put(q, task=None, replicas=rng.randint(1, 9))
        elif action == "limits":
            low, high = sorted(rng.randint(1, 9) for _ in range(2))
            put(
                q,
                task=None,
                min_replicas=low,
                max_replicas=high,
                target_load=0.5,
                up_after_s=rng.choice([0, 3, 20]),
                down_after_s=rng.choice([0, 3, 20]),
            )
        elif action == "load":
            for claim in fleet.claims.values():
                if fleet.goes(claim):
                    q.call(
                        "report_load", job_id=claim.job_id, token=claim.token, load=rng.choice([0, 0.5, 2])
                    )
        elif action == "update":
            put(q, task=None, version=str(step))
        elif action == "size":
            size = rng.choice([1, 2, 3])
            put(q, task=None, gang=size)
        elif action in ("fail", "complete") and one is not None and fleet.goes(one):
            del fleet.claims[one.job_id]
            getattr(one, action)()
        elif action == "unready" and one is not None and fleet.goes(one):
            fleet.ready(one, ready=False)
        elif action in ("cancel", "preempt") and (found := [g for g in gangs(q) if g["state"]]):
            gang = rng.choice(found)["gang_id"]
            q.call("cancel", gang_ids=[gang]) if action == "cancel" else q.call("preempt_gang", gang_id=gang)
        elif action == "drain":
            q.call(rng.choice(["cordon", "uncordon"]), host=f"node{rng.randint(1, 5)}")
        elif action == "stop":
            q.call("stop_service", name="chat")
        before = sum(gang["members"] for gang in gangs(q))
        fleet.turn()
        shown = service(q)
        wanted = 0 if shown["state"] in ("stopping", "stopped") else shown["replicas"]
        sizes = [gang["members"] for gang in gangs(q)]
        most = max(most, len(sizes))
        largest = max(sizes, default=0)
        # Gangs of two sizes, or of the good revision after an update that has halted, need not add up to the number.
        uneven = len(set(sizes)) > 1 or shown["state"] == "halted"
        most_at_once = wanted + surge * largest + (largest - 1 if uneven else 0)
        assert sum(sizes) <= max(before, most_at_once), (step, action)
        whole(q)
        assert q.violations() == []
        q.later(rng.choice([0, 1, 5]))
    assert most > 0
    for n in range(1, 6):
        q.call("uncordon", host=f"node{n}")
    put(q, task=None, replicas=3 * size, max_replicas=0)
    q.live_on(400, *fleet.workers, step=5)
    q.call("roll_back_service", name="chat", to_revision=service(q)["revision"])
    for _ in range(60):
        fleet.turn()
        q.later(5)
        if service(q)["state"] == "ready" and len(gangs(q)) == 3:
            break
    assert service(q)["state"] == "ready", (service(q), gangs(q))
    assert len(whole(q)) == 3
