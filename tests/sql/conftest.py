"""What the SQL tests share: `q` drives the verbs, and after every test no invariant may be broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from gangq.embedded import Server
from sql.drive import Q, a_role


@pytest.fixture
def q(db: psycopg.Connection[dict[str, Any]], clock: Any) -> Q:
    return Q(db, clock)


@pytest.fixture(scope="module")
def untouched(server: Server, template: str) -> Iterator[Q]:
    """One database for all tests of a file in which every call is refused, or only reads."""
    dsn = server.create_database("untouched", template=template)
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        yield Q(conn)
        assert conn.execute("select * from gangq.violations").fetchall() == []
    server.drop_database("untouched")


@pytest.fixture
def logins(q: Q, dsn: str) -> Iterator[dict[str, Q]]:
    """Connections of two submitters, a worker and an admin, by login."""
    with ExitStack() as stack:
        found: dict[str, Q] = {}
        for name, group in (("s1", "submitter"), ("s2", "submitter"), ("w1", "worker"), ("a1", "admin")):
            login = a_role(q.db, f"{name}_test", f"gangq_{group}", login=True)
            conn = psycopg.connect(dsn, user=login, autocommit=True, row_factory=dict_row)
            found[name] = Q(stack.enter_context(conn), q.clock)
        yield found


@pytest.fixture(autouse=True)
def no_invariant_is_broken(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that had a database, `gangq.violations` is empty and no step of a tick has failed."""
    names = request.fixturenames
    db = request.getfixturevalue("db") if "db" in names else None
    kept = request.getfixturevalue("database").kept if db is not None else None
    yield
    if db is not None:
        for query in (
            "select * from gangq.violations",
            "select * from gangq.events where kind = 'tick_error'",
        ):
            assert (kept.ask(query) if kept else db.execute(query).fetchall()) == []
