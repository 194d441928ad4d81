"""What every test of the worker's parts needs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering puts the incarnation's mark into this process; it must not stay there."""
    monkeypatch.setenv("GANGQ_MARK", "none")
