"""What the SQL tests share: `q` drives the verbs, and after every test no invariant may be broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from drive import Q


@pytest.fixture
def q(db: psycopg.Connection[dict[str, Any]], clock: Any) -> Q:
    return Q(db, clock)


@pytest.fixture(autouse=True)
def no_invariant_is_broken(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that had a database, `gangq.violations` is empty and no step of a tick has failed."""
    db = request.getfixturevalue("db") if "db" in request.fixturenames else None
    yield
    if db is not None:
        assert db.execute("select * from gangq.violations").fetchall() == []
        assert db.execute("select * from gangq.events where kind = 'tick_error'").fetchall() == []
