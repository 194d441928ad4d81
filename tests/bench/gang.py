"""How soon a gang is placed on a fleet that has nothing to do.

Four workers are registered and heartbeat, and are nothing more than that; one ticker process listens. So what
is timed is the event, the decision and the reservation, and no start of any process.
"""

from __future__ import annotations

import threading
import time

from measures import Result, Sizes, latency
from stage import BenchError, Stage
from systems import System

from gangq.client import Client

_MEMBERS = 4
_WARM_UP = 5
_HEARTBEAT_S = 4.0
_PATIENCE_S = 5.0


class _Fleet:
    """Simulated workers. One connection hears what all of them would hear."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.incarnations = [
            client.register_worker(name=f"w{n}", host=f"host{n // 2}", queues=["default"]).incarnation
            for n in range(_MEMBERS)
        ]
        self._ear = client.connect_listener()
        for incarnation in self.incarnations:
            self._ear.execute(f'listen "gangq_{incarnation}"'.encode())
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="bench-heartbeats", daemon=True)
        self._heart.start()

    def _beat(self) -> None:
        while not self._closing.wait(_HEARTBEAT_S):
            for incarnation in self.incarnations:
                self._client.heartbeat(incarnation=incarnation, durable=False)

    def wait_all_called(self) -> int:
        """When the last of them heard that members wait for it (nanoseconds)."""
        called: set[str] = set()
        until = time.monotonic() + _PATIENCE_S
        while len(called) < _MEMBERS:
            left = until - time.monotonic()
            if left <= 0:
                raise BenchError(f"a gang was not placed within {_PATIENCE_S:g} s")
            called |= {
                n.channel for n in self._ear.notifies(timeout=left, stop_after=1) if n.payload == "claim"
            }
        return time.monotonic_ns()

    def run(self) -> None:
        """Claim the members and finish them."""
        claims = [c for i in self.incarnations for c in self._client.claim(incarnation=i)]
        if len(claims) != _MEMBERS:
            raise BenchError(f"{len(claims)} of {_MEMBERS} members were claimed")
        self._client.complete(job_ids=[c.job_id for c in claims], tokens=[c.token for c in claims])

    def close(self) -> None:
        """No more heartbeats."""
        self._closing.set()
        self._heart.join()
        self._ear.close()


def admission(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """From submit_gang's return until all its workers have been told."""
    waits, from_call = [], []
    with stage.database(system) as dsn, Client(dsn) as client, stage.process("ticker.py", dsn):
        fleet = _Fleet(client)
        try:
            for number in range(_WARM_UP + sizes.gangs):
                time.sleep(0.5 if number < _WARM_UP else 0.02)
                called = time.monotonic_ns()
                client.submit_gang(task="noop", size=_MEMBERS)
                returned = time.monotonic_ns()
                placed = fleet.wait_all_called()
                fleet.run()
                if number >= _WARM_UP:
                    waits.append(max(0, placed - returned) / 1e6)
                    from_call.append((placed - called) / 1e6)
        finally:
            fleet.close()
    return latency(f"placing a gang of {_MEMBERS}", waits, from_call)
