"""What the acceptance tests share: `q` drives the verbs, and after every test no invariant may be broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sql.drive import Q


@pytest.fixture
def q(db: Any, clock: Any) -> Iterator[Q]:
    yield Q(db, clock)
    assert db.execute("select * from gangq.violations").fetchall() == []
    assert db.execute("select * from gangq.events where kind = 'tick_error'").fetchall() == []
