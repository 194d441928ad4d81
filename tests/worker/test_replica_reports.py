"""How often a replica's load is told to the database: never once a request, and again before it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.context import ServiceInfo
from gangq.errors import DatabaseUnreachable
from gangq.worker.replicas import Replica, ReplicaWatch


class Client:
    def __init__(self) -> None:
        self.loads: list[float] = []
        self.meanwhile = lambda: None

    async def report_ready(self, **_: Any) -> None:
        self.meanwhile()

    async def report_load(self, *, load: float, **_: Any) -> None:
        self.meanwhile()
        self.loads.append(load)


def watching(client: Client) -> ReplicaWatch:
    return ReplicaWatch(SimpleNamespace(control=SimpleNamespace(client=client)))  # type: ignore[arg-type]


def replica_of() -> Replica:
    return Replica(ServiceInfo(name="chat", revision=1, port=80, health=None), lambda: None)


def watched() -> tuple[Client, Replica, Callable[[float], None]]:
    """A replica, who is told of it, and what looks at a time in seconds."""
    client = Client()
    watch, replica = watching(client), replica_of()
    job: Any = SimpleNamespace(id=1, token=2)
    return client, replica, lambda now: asyncio.run(watch._report(job, replica, now))


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
    client, replica, look = watched()
    told = []
    for now in range(600):
        at = now / 10
        if (load := says(at)) is not None:
            replica.busy(load)
        before = len(client.loads)
        look(100 + at)
        told += [at] * (len(client.loads) - before)
    assert told == told_at


def test_a_load_said_while_another_report_is_on_its_way_is_told() -> None:
    client, replica, look = watched()
    replica.said = (True, 80)
    replica.busy(0.1)
    more = [0.2]
    client.meanwhile = lambda: replica.busy(more.pop()) if more else None
    look(100)
    look(110)
    assert client.loads[-1] == 0.2


def test_a_load_whose_report_was_lost_is_told_again() -> None:
    client, replica, look = watched()

    def lost() -> None:
        raise DatabaseUnreachable("away")

    replica.busy(0.1)
    client.meanwhile = lost
    with pytest.raises(DatabaseUnreachable):
        look(100)
    client.meanwhile = lambda: None
    look(110)
    assert client.loads == [0.1]


def test_what_nobody_foresaw_of_one_replica_is_logged_and_goes_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    client, replica = Client(), replica_of()
    client.meanwhile = broken
    replica.busy(0.1)
    job: Any = SimpleNamespace(id=1, token=2, extra={})
    asyncio.run(watching(client)._look(job, replica))
    assert [record.message for record in caplog.records] == ["replica_fault"]
