"""How often a replica's load is told to the database: never once a request, and again before it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.context import ServiceInfo
from gangq.errors import DatabaseUnreachable, GangqError, WrongState
from gangq.worker import replicas
from gangq.worker.replicas import Replica, ReplicaWatch


class Client:
    """Notes what it is told. `meanwhile` happens during each call."""

    def __init__(self) -> None:
        self.loads: list[float] = []
        self.ready: list[bool] = []
        self.meanwhile: Callable[[], Any] = lambda: None

    async def report_ready(self, *, ready: bool, **_: Any) -> None:
        self.meanwhile()
        self.ready.append(ready)

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
    return client, replica, lambda now: asyncio.run(watch._report(a_job(), replica, replica.said, now))


def a_job() -> Any:
    return SimpleNamespace(id=1, token=2, extra={}, must_end=False, reporting=False)


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


def test_a_load_said_while_the_last_one_is_taken_to_be_told_is_told_too() -> None:
    class Racing(Replica):
        """The handler's thread says `more` just before the watch notes that it tells what was said."""

        more: list[float] | None = None

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "load_said" and not value and self.more:
                self.busy(self.more.pop())
            super().__setattr__(name, value)

    client = Client()
    replica = Racing(replica_of().service, lambda: None)
    replica.busy(0.1)
    replica.more = [0.2]
    for now in (100, 110):
        asyncio.run(watching(client)._report(a_job(), replica, None, now))
    assert client.loads[-1] == 0.2


@pytest.mark.parametrize("problem", [DatabaseUnreachable("away"), GangqError("the disk is full")])
def test_a_load_whose_report_was_lost_is_told_again(problem: GangqError) -> None:
    client, replica, look = watched()

    def lost() -> None:
        raise problem

    replica.busy(0.1)
    client.meanwhile = lost
    with pytest.raises(GangqError):
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
    asyncio.run(watching(client)._look(a_job(), replica))
    assert [record.message for record in caplog.records] == ["replica_fault"]


def test_ready_said_while_another_report_is_refused_is_told() -> None:
    client, replica = Client(), replica_of()
    replica.said = (False, 80)

    def refused() -> None:
        replica.ready(True, 80)
        raise WrongState("no replica of a service")

    client.meanwhile = refused
    watch = watching(client)
    asyncio.run(watch._look(a_job(), replica))
    client.meanwhile = lambda: None
    asyncio.run(watch._look(a_job(), replica))
    assert client.ready == [True]


@pytest.mark.parametrize(
    ("problem", "times"),
    [
        (WrongState("no replica of a service"), 1),
        # A migration rebuilds the functions; a disk is full.
        (GangqError("function gangq.report_ready does not exist (SQLSTATE 42883)"), 3),
    ],
)
def test_what_was_refused_is_not_told_again_and_what_failed_is(problem: GangqError, times: int) -> None:
    client, replica = Client(), replica_of()
    replica.said = (True, 80)
    calls = []

    def refused() -> None:
        calls.append(1)
        raise problem

    client.meanwhile = refused
    watch = watching(client)
    for _ in range(3):
        asyncio.run(watch._look(a_job(), replica))
    assert len(calls) == times


def test_a_replica_that_says_it_is_ready_during_its_third_failed_poll_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = replica_of()
    replica.failures = 2

    async def fails(_: ServiceInfo) -> int:
        replica.ready(True, 80)
        raise OSError("refused")

    monkeypatch.setattr(replicas, "healthy_port", fails)
    asyncio.run(watching(Client())._poll_once(a_job(), replica))
    assert replica.said == (False, 80)


@pytest.mark.parametrize(
    ("health", "host"),
    [
        ("/", "127.0.0.1:8000"),
        ("http://[::1]:8000/", "[::1]:8000"),
        ("http://localhost:8000/", "localhost:8000"),
    ],
)
def test_a_poll_names_the_host_as_http_does(monkeypatch: pytest.MonkeyPatch, health: str, host: str) -> None:
    sent = bytearray()

    async def connected(*_: Any) -> tuple[asyncio.StreamReader, Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\n")

        async def drain() -> None: ...

        return reader, SimpleNamespace(write=sent.extend, drain=drain, close=lambda: None)

    monkeypatch.setattr(asyncio, "open_connection", connected)
    service = ServiceInfo(name="chat", revision=1, port=8000, health=health)
    assert asyncio.run(replicas.healthy_port(service)) == 8000
    assert f"\r\nHost: {host}\r\n".encode() in bytes(sent)
