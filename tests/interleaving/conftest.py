"""The database two sessions meet in; its clock stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from interleaving.sessions import Arena, Connection, arena


@pytest.fixture
def meeting(dsn: str, db: Connection, clock: Any) -> Iterator[Arena]:
    """Workers, work and sessions."""
    with arena(dsn, db, clock) as made:
        yield made


@pytest.fixture(autouse=True)
def no_invariant_is_broken(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with an arena nothing is broken, and no step of a tick has failed."""
    arena = request.getfixturevalue("meeting") if "meeting" in request.fixturenames else None
    yield
    if arena is not None:
        assert arena.violations() == []
