"""Fixtures for projects that use gangq; pytest finds them where gangq is installed. See docs/manual/testing.md.

This module is imported in every run of pytest, so it imports the rest only where a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gangq import App, DeviceInfo
    from gangq.testing import Clock
    from gangq.testing.database import Databases

_INI = "gangq_app"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that names the App."""
    parser.addini(
        _INI, "The gangq App that the tests submit to, as module:variable. Default: a new one for each test."
    )


@pytest.fixture(scope="session")
def _gangq_databases() -> Iterator[Databases]:
    from gangq.embedded import Server
    from gangq.errors import EmbeddedError
    from gangq.testing.database import Databases

    with ExitStack() as opened:
        try:
            server = opened.enter_context(Server.temporary(settings={"max_connections": "200"}))
            found = Databases(server)
        except EmbeddedError as problem:
            pytest.fail(
                "the fixtures of gangq start a PostgreSQL of their own, and there is none to start: "
                f"pip install 'gangq[embedded]'. {problem}",
                pytrace=False,
            )
        yield found


@pytest.fixture
def gangq_database(_gangq_databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The DSN of a new database with the schema of gangq, dropped after the test. GANGQ_DSN is set to it."""
    with _gangq_databases.new() as dsn:
        monkeypatch.setenv("GANGQ_DSN", dsn)
        yield dsn


@pytest.fixture
def gangq_app(request: pytest.FixtureRequest) -> Iterator[App]:
    """The App that the ini setting `gangq_app` names, or a new one, on the test's own database."""
    from gangq import App

    named = str(request.config.getini(_INI))
    app = _find(named) if named else App()
    # Only now: where the setting cannot be used, no server is started to say so.
    request.getfixturevalue("gangq_database")
    with _fresh(app):
        yield app


@pytest.fixture
def gangq_clock(gangq_database: str) -> Clock:
    """The clock of the test's own database: `gangq_clock.advance("2h")`."""
    from gangq.testing import Clock

    return Clock(gangq_database)


@pytest.fixture
def gangq_device() -> DeviceInfo:
    """A declared GPU of 24 GiB, for `FakeContext(devices=[gangq_device])`."""
    from gangq.testing import FakeContext

    return FakeContext(devices="1x24GiB").devices[0]


def _find(named: str) -> App:
    from gangq import App
    from gangq.errors import GangqError
    from gangq.worker.child_main import find_app

    try:
        found = find_app(named)
    except GangqError as problem:
        pytest.fail(f"the setting {_INI} is {named!r}: {problem}", pytrace=False)
    if not isinstance(found, App):
        pytest.fail(f"the setting {_INI} is {named!r}, which is no gangq.App", pytrace=False)
    if found.given_dsn is not None:
        # Its child processes import it anew. There it would be the App of that database, and no test.
        pytest.fail(
            f"the App {named} has a dsn of its own, so its jobs would use that and not the test's: make it "
            "gangq.App() and name the database in GANGQ_DSN",
            pytrace=False,
        )
    return found


@contextmanager
def _fresh(app: App) -> Iterator[None]:
    """With the App as if it had not been used; afterwards it is as it was.

    An async client that the test has made is left to the garbage collector. To close it takes the event loop of the
    test, which is over. Its connections are freed with it, without a warning because they belong to a pool, and the
    database is dropped with those that are left.
    """
    sync, aio = app._clients, app.aio._clients
    before = app._dsn, sync.made, aio.made
    app._dsn = sync.made = aio.made = None
    try:
        yield
    finally:
        app.close()
        app._dsn, sync.made, aio.made = before
