"""What every test of the worker's parts needs."""

from __future__ import annotations

from collections.abc import Iterator

import controls
import pytest


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
