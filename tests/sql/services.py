"""Services for tests: what their workers do, so that a test only says what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sql.drive import Claim, Q, Row, Worker

LINGER_S = 5.0


def put(q: Q, name: str = "chat", task: str | None = "serve", **more: Any) -> str:
    """set_service; `linger_s` 0 and no other needs unless the test says otherwise."""
    if task is not None:
        more = {"linger_s": 0, "work": {"cpus": 1}, **more, "task": task}
    return str(q.one("set_service", name=name, **more))


def service(q: Q, name: str = "chat") -> Row:
    return q.sql("select * from gangq.services where name = %(name)s", name=name)[0]


def gangs(q: Q, name: str = "chat") -> list[Row]:
    return q.sql("select * from gangq.service_gangs where service = %(name)s order by gang_id", name=name)


def endpoints(q: Q, name: str = "chat") -> list[Row]:
    return q.sql("select * from gangq.endpoints where service = %(name)s", name=name)


def whole(q: Q) -> dict[int, int]:
    """How many endpoints each gang has; each that is there at all has all of them."""
    found: dict[int, int] = {}
    for row in q.sql("select gang_id from gangq.endpoints"):
        found[row["gang_id"]] = found.get(row["gang_id"], 0) + 1
    for gang, count in found.items():
        size = q.value("select size from gangq.live_gangs where id = %(id)s", id=gang)
        assert count == size, f"gang {gang} has {count} of {size} endpoints"
    return found


class Replicas:
    """The workers of a fleet: they claim, say that they are ready, and stop when they are told to."""

    def __init__(self, q: Q, *workers: Worker) -> None:
        self.q = q
        self.workers = list(workers)
        self.claims: dict[int, Claim] = {}
        self.becomes_ready: Callable[[Claim], bool] = lambda _: True
        self.stops = True

    @classmethod
    def of_hosts(
        cls, q: Q, count: int, slots: int = 2, cpus: float | None = None, first: int = 1
    ) -> Replicas:
        """A worker each on hosts node1, node2, ..."""
        return cls(
            q,
            *(
                q.worker(f"w{n}", host=f"node{n}", slots=slots, cpus=cpus or slots)
                for n in range(first, first + count)
            ),
        )

    def turn(self) -> None:
        """A tick, and what the workers then do."""
        self.q.tick()
        for worker in self.workers:
            mine = [c for c in self.claims.values() if c.incarnation == worker.incarnation]
            told = worker.beat(*mine)
            for claim in mine:
                if told.get(claim.job_id) == "continue":
                    continue
                if told.get(claim.job_id) in ("preempt", "cancel") and self.stops:
                    claim.ack()
                if self.stops:
                    del self.claims[claim.job_id]
            for claim in worker.claim():
                self.claims[claim.job_id] = claim
        for claim in list(self.claims.values()):
            if self.becomes_ready(claim) and self.goes(claim):
                self.ready(claim)
        whole(self.q)

    def goes(self, claim: Claim) -> bool:
        live = self.q.sql("select state, token from gangq.live_jobs where id = %(id)s", id=claim.job_id)
        if not live or live[0]["state"] != "running" or live[0]["token"] != claim.token:
            return False
        return bool(claim.barrier()[0]["go"])

    def ready(self, claim: Claim, ready: bool = True) -> None:
        self.q.call(
            "report_ready",
            job_id=claim.job_id,
            token=claim.token,
            ready=ready,
            port=10000 + (claim["rank"] or 0),
        )

    def settle(self, turns: int = 12, step_s: float = 1.0) -> None:
        """Turns with some time between them, until nothing changes any more."""
        for _ in range(turns):
            self.turn()
            self.q.later(step_s)
        self.turn()

    def of_gang(self, gang_id: int) -> list[Claim]:
        """The claims of a gang by rank."""
        found = [c for c in self.claims.values() if c["gang_id"] == gang_id]
        return sorted(found, key=lambda c: int(c["rank"]))

    def lose(self, worker: Worker) -> None:
        """The worker is gone for good."""
        worker.report_dead()
        self.workers.remove(worker)
        for claim in list(self.claims.values()):
            if claim.incarnation == worker.incarnation:
                del self.claims[claim.job_id]
