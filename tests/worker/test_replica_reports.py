"""How often a replica's load is told to the database: never once a request, and again before it is forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.context import ServiceInfo
from gangq.worker.replicas import Replica, ReplicaWatch


class Client:
    def __init__(self) -> None:
        self.loads: list[float] = []

    async def report_load(self, *, load: float, **_: Any) -> None:
        self.loads.append(load)


@pytest.mark.parametrize(
    ("says", "told_at"),
    [
        (lambda at: 0.5, [0, 15, 30, 45]),  # The same again: before 60 s are over.
        (lambda at: at / 100, list(range(60))),  # Another each time: once a second.
        (lambda at: 0.5 if at == 0 else None, [0]),  # Said once: it grows old, for nobody has said it again.
    ],
)
def test_a_load_is_told_once_a_second_at_most_and_again_if_it_was_said_again(
    says: Any, told_at: list[int]
) -> None:
    client = Client()
    watch = ReplicaWatch(SimpleNamespace(control=SimpleNamespace(client=client)))  # type: ignore[arg-type]
    replica = Replica(ServiceInfo(name="chat", revision=1, port=80, health=None), lambda: None)
    job: Any = SimpleNamespace(id=1, token=2)
    told = []
    for now in range(600):
        at = now / 10
        if (load := says(at)) is not None:
            replica.busy(load)
        before = len(client.loads)
        asyncio.run(watch._report(job, replica, 100 + at))
        told += [at] * (len(client.loads) - before)
    assert told == told_at
