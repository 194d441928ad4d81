"""A worker that is nothing but its calls: what is timed is claim and complete, no process and no handler."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import psycopg

from gangq.client import Client
from gangq.client.rows import Claim

_BATCH = 100


class Claimer:
    """One registered worker on one connection. It always holds what it claimed last: each call finishes that and
    claims the next, as a busy worker's do.
    """

    def __init__(self, dsn: str, name: str = "w") -> None:
        self.client = Client(dsn, min_size=1, max_size=1)
        self.incarnation = self.client.register_worker(
            name=name, host="host", queues=["default"], prefetch=_BATCH, lease_s=3600.0
        ).incarnation
        self._held: Sequence[Claim] = ()

    def turn(self, batch: int) -> int:
        """One call; how many jobs it claimed."""
        if self._held:
            self._held = self.client.complete_and_claim(
                incarnation=self.incarnation,
                job_ids=[job.job_id for job in self._held],
                tokens=[job.token for job in self._held],
                request_id=uuid.uuid4(),
                max_jobs=batch,
            ).claims
        else:
            self._held = self.client.claim(
                incarnation=self.incarnation, request_id=uuid.uuid4(), max_jobs=batch
            )
        return len(self._held)

    def rate(self, jobs: int, batch: int) -> float:
        """Jobs per second while claiming and finishing so many."""
        self.turn(batch)
        began, done = time.monotonic_ns(), 0
        while done < jobs:
            claimed = self.turn(batch)
            if not claimed:
                raise RuntimeError("there is nothing left to claim")
            done += claimed
        return done / ((time.monotonic_ns() - began) / 1e9)

    def buffers(self) -> int:
        """Buffers that a claim of one job touches, once the session is warm; it is rolled back."""
        touched = 0
        with self.client.connection() as connection:
            for _ in range(3):
                with connection.transaction(force_rollback=True):
                    row = connection.execute(
                        "explain (analyze, buffers, format json) select * from gangq.claim(%s)",
                        (self.incarnation,),
                    ).fetchone()
                assert row is not None
                plan = row["QUERY PLAN"][0]["Plan"] if isinstance(row, dict) else row[0][0]["Plan"]
                touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return touched

    def beat(self) -> None:
        """One heartbeat, so that nobody takes it for dead."""
        self.client.heartbeat(incarnation=self.incarnation, durable=False)

    def idle(self) -> None:
        """Finish what it holds."""
        if self._held:
            self.client.complete(
                job_ids=[job.job_id for job in self._held], tokens=[job.token for job in self._held]
            )
            self._held = ()

    def close(self) -> None:
        """Disconnect."""
        self.client.close()


def submit(owner: psycopg.Connection, jobs: int) -> None:
    """So many empty jobs that wait, made by the server itself."""
    for first in range(0, jobs, 100_000):
        owner.execute(
            "select count(*) from gangq.submit("
            "'noop', payloads => array_fill('{}'::jsonb, array[%s]), "
            'options => \'{"wake": "never"}\')',
            (min(100_000, jobs - first),),
        )
