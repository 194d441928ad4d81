"""A floor to stand on, and a PostgreSQL of one's own to kill."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from databases import OwnServer
from gangq.client import Client
from gangq.embedded import Server
from process.floor import Floor, floor_of
from process.unprivileged import UnprivilegedWorkers, unprivileged_workers

_numbers = itertools.count(1)


@pytest.fixture
def floor(dsn: str, client: Client, tmp_path: Path) -> Iterator[Floor]:
    """Workers over the session's server."""
    with floor_of(dsn, client, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def mortal(own_server: OwnServer) -> Iterator[Server]:
    """A server for tests that kill it. Durable, or it would lose what it had answered."""
    with own_server(durable=True, settings={"max_connections": "100"}) as running:
        yield running


@pytest.fixture
def mortal_floor(mortal: Server, template: str, tmp_path: Path) -> Iterator[Floor]:
    """Workers over the server that may be killed."""
    name = f"mortal_{next(_numbers)}"
    dsn = mortal.create_database(name, template=template)
    with Client(dsn) as client:
        with floor_of(dsn, client, tmp_path) as made:
            yield made
    mortal.drop_database(name)


@pytest.fixture
def unprivileged(dsn: str, client: Client) -> Iterator[UnprivilegedWorkers]:
    """Workers of a user that is not root."""
    with unprivileged_workers(dsn, client) as made:
        yield made


@pytest.fixture
def full_pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe with a name, which takes nothing more and which nobody reads."""
    place = tmp_path / "full"
    os.mkfifo(place)
    fd = os.open(place, os.O_RDWR | os.O_NONBLOCK)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, b"x" * size)
    yield place
    os.close(fd)
