"""What every test of the worker's parts needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from worker import controls
from worker.worker_process import Fleet, fleet_of, short_leases


@pytest.fixture(autouse=True)
def own_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering puts the incarnation's mark into this process; it must not stay there."""
    monkeypatch.setenv("GANGQ_MARK", "none")


@pytest.fixture(autouse=True)
def control_loops() -> Iterator[None]:
    """Those that a test has started end with it."""
    yield
    while controls.running:
        controls.running.pop().stop()


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    """Worker processes on short leases; they are ended with the test."""
    short_leases(client)
    with fleet_of(dsn, tmp_path) as running:
        yield running
