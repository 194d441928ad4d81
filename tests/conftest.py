"""A real PostgreSQL for the tests: one server a session; databases.py says which database a test has.

What is about SQL is shared out between the oldest and the newest PostgreSQL found (the system's, the
wheel's), half of the files on each. Tests of plans have the mark `every_server`: they run on all of them. With
`GANGQ_TEST_EVERY_SERVER=1` so does all that is about SQL. The rest runs on the newest. `GANGQ_TEST_PG_BINDIR`
chooses one (a directory with initdb and postgres).
"""

from __future__ import annotations

import fcntl
import functools
import gc
import json
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import gangq
from databases import Clock, Connection, Databases, Kept, OwnServer, connect
from gangq import schema
from gangq.client import Client
from gangq.embedded import DATABASE, Binaries, Server, find_binaries

MEMORY = Path("/dev/shm")
SEVERAL_SERVERS = {"interleaving", "schema", "sql"}
"""Rooms whose tests are about what PostgreSQL itself does, and may differ from one major to the next."""
KEEP_DATABASES = {"acceptance", "cli", "client", "docs", "interleaving", "property", "sql"}
"""Rooms whose tests call the SQL functions. Elsewhere programs do, and some may outlive their test."""


@dataclass(frozen=True)
class Database:
    """What a test has: a kept database, or one of its own."""

    dsn: str
    kept: Kept | None = None


@functools.cache
def _servers() -> list[Binaries]:
    """Every PostgreSQL found here, or the one that GANGQ_TEST_PG_BINDIR names."""
    bindir = os.environ.get("GANGQ_TEST_PG_BINDIR")
    with pytest.MonkeyPatch.context() as patch:
        if bindir:
            patch.setenv("GANGQ_PG_BINDIR", str(Path(bindir).resolve()))
        return find_binaries()


_of_the_session = ExitStack()


def _refuse_another_checkout() -> None:
    """A virtual environment that was copied, or PYTHONPATH, may lead to the code of another checkout."""
    here, imported = Path(__file__).parents[1], Path(gangq.__file__).parents[2]
    if imported != here and (imported / "pyproject.toml").exists():
        raise pytest.UsageError(
            f"these tests are of {here}, and gangq is imported from {imported}: "
            f"run them with {here}/.venv, or install this checkout (pip install -e {here})"
        )


def _share_import_path() -> None:
    """What the tests start imports gangq from where this process does: in any directory, and where another is
    installed.
    """
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(gangq.__file__).parents[1]}{os.pathsep}{given}".rstrip(os.pathsep)


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C and the end of a terminal reach what the tests start: what runs in the background of a shell, or
    under nohup, ignores them, and passes that on. Remove at the end what workers that were killed have left.
    """
    _refuse_another_checkout()
    _share_import_path()
    if not hasattr(config, "workerinput"):
        # For all processes of this session. Short, because sockets are in it; for every user, as /tmp is.
        runtime = _of_the_session.enter_context(
            tempfile.TemporaryDirectory(prefix="gq-", dir=_memory(), ignore_cleanup_errors=True)
        )
        Path(runtime).chmod(0o1777)
        os.environ["XDG_RUNTIME_DIR"] = runtime
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_unconfigure() -> None:
    _of_the_session.close()


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no collection of garbage walk again through 7,000 tests, none of which is garbage."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the files in the order of the command line: `make test` names the longest first, then the rooms.

    pytest drops a file where its room is named too, and moves tests together that use the same server.
    """
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    order: dict[Path, tuple[int, int]] = {}
    for path in (item.path for item in items):
        if path not in order:
            first = (n for n, name in enumerate(named) if name == path or name in path.parents)
            order[path] = (next(first, len(named)), len(order))
    items.sort(key=lambda item: order[item.path])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of the rooms in SEVERAL_SERVERS on one of two servers or on all, all others on the newest."""
    if "server" in metafunc.fixturenames:
        chosen = sorted(_servers(), key=lambda binaries: binaries.version)
        parts = metafunc.definition.path.relative_to(Path(__file__).parent).parts
        everywhere = os.environ.get("GANGQ_TEST_EVERY_SERVER") == "1"
        if parts[0] not in SEVERAL_SERVERS:
            chosen = chosen[-1:]
        elif not everywhere and metafunc.definition.get_closest_marker("every_server") is None:
            # By the file's name: index 0 is the oldest server, index -1 the newest.
            chosen = [chosen[-(zlib.crc32(parts[-1].encode()) % 2)]]
        names = [f"{binaries.source}{binaries.major}" for binaries in chosen]
        metafunc.parametrize("server", chosen, ids=names, indirect=True, scope="session")


def _mutate(dsn: str, function: str, condition: str, without: str) -> None:
    """For test_mutation: one function of the schema without one of its conditions.

    Where that cannot be made, the run ends with a status of its own: a failed test's would say that it was noticed.
    """
    try:
        with psycopg.connect(dsn) as db:
            ((body,),) = db.execute(
                "select pg_get_functiondef(oid) from pg_proc "
                "where pronamespace = 'gangq'::regnamespace and proname = %s",
                [function],
            )
            assert body.count(condition) == 1, f"{function} has {condition!r} not once"
            db.execute(body.replace(condition, without).encode())
    except Exception as error:
        pytest.exit(f"nothing was mutated: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


def _memory() -> str | None:
    """Where data directories are made: in memory if there is enough; None: where all temporary files are.

    Hundreds of databases are made and dropped: on a disk that is most of the time spent.
    """
    may_run = MEMORY.is_dir() and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    return str(MEMORY) if may_run and shutil.disk_usage(MEMORY).free > 4 << 30 else None


def _prepared(binaries: Binaries) -> Path:
    """The data directory of a stopped server whose database `gangq` has the schema. The first process of the session
    that asks makes it, and the others copy it: initdb and the schema cost 2 s of a processor.
    """
    home = Path(os.environ["XDG_RUNTIME_DIR"]) / f"{binaries.source}{binaries.major}"
    home.mkdir(mode=0o755, exist_ok=True)
    ready = home / "ready"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            with Server(home / "pg", binaries=binaries, durable=False) as server:
                schema.migrate(server.dsn(), log=lambda _: None)
                if mutation := os.environ.get("GANGQ_MUTATION"):
                    _mutate(server.dsn(), *json.loads(mutation))
            ready.touch()
    return home / "pg"


@contextmanager
def _throwaway(binaries: Binaries, **options: Any) -> Iterator[Server]:
    """A running copy of the prepared server."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", _memory() or tempfile.gettempdir())
            # Or each of thousands of backends looks up what it calls of the libraries again: a tenth of a first tick.
            patch.setenv("LD_BIND_NOW", "1")
            temporary = Server.temporary(binaries=binaries, copy_of=_prepared(binaries), **options)
            server = stack.enter_context(temporary)
        yield server


class Running:
    """Throwaway servers, without fsync, each started when first asked for and kept to the end of the session.

    A fixture with parameters is torn down whenever the parameter changes, and it changes with every file.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._servers: dict[Path, Server] = {}
        self._databases: dict[Path, Databases] = {}

    def get(self, binaries: Binaries) -> Server:
        if binaries.bindir not in self._servers:
            # Autovacuum would find hundreds of databases that are about to be dropped, or a kept one in use.
            settings = {
                "max_connections": "200",
                "max_prepared_transactions": "5",
                "autovacuum_naptime": "1h",
                "shared_preload_libraries": "plpgsql",
            }
            throwaway = _throwaway(binaries, settings=settings)
            self._servers[binaries.bindir] = self._open.enter_context(throwaway)
        return self._servers[binaries.bindir]

    def databases(self, server: Server) -> Databases:
        """Who makes the databases of this server."""
        found = self._databases.get(server.binaries.bindir)
        if found is None:
            found = self._databases[server.binaries.bindir] = Databases(server)
            self._open.callback(found.close)
        return found

    def close(self) -> None:
        self._open.close()


@pytest.fixture(autouse=True)
def _environment_as_found() -> Iterator[None]:
    """Fail what leaves a variable behind: whatever runs next in this process would find it."""
    before = dict(os.environ)
    yield
    left = {name for name, _ in before.items() ^ os.environ.items()} - {"PYTEST_CURRENT_TEST"}
    assert not left, f"the environment is not as it was: {sorted(left)}"


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """The servers of this session."""
    servers = Running()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, running: Running) -> Server:
    """A running throwaway server."""
    return running.get(request.param)


@pytest.fixture(scope="session")
def own_server(server: Server) -> OwnServer:
    """Starts a server of a test's own, which may be stopped and killed; its database `gangq` has the schema.

    It takes the options of `Server.temporary`.
    """

    def start(binaries: Binaries = server.binaries, **options: Any) -> AbstractContextManager[Server]:
        return _throwaway(binaries, **options)

    return start


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """Name of a database with the schema, to be copied and never connected to."""
    return DATABASE


@pytest.fixture
def empty_dsn(server: Server, running: Running) -> Iterator[str]:
    """A fresh database without the schema."""
    with running.databases(server).own("template1") as made:
        yield made


@pytest.fixture
def database(
    request: pytest.FixtureRequest, server: Server, template: str, running: Running
) -> Iterator[Database]:
    """A database with the schema and the rows of a new one: a kept one, or a copy of the test's own."""
    databases = running.databases(server)
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    own = request.node.get_closest_marker("own_database") is not None
    if room in KEEP_DATABASES and not own:
        with databases.kept(template, "clock" in request.fixturenames) as kept:
            yield Database(kept.dsn, kept)
    else:
        with databases.own(template) as dsn:
            yield Database(dsn)


@pytest.fixture
def dsn(database: Database) -> str:
    """DSN of the test's database."""
    return database.dsn


@pytest.fixture
def db(database: Database) -> Iterator[Connection]:
    """An autocommit connection of the schema's owner; rows are dicts."""
    with connect(database.dsn) as conn:
        yield conn


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    """A client of that database."""
    with Client(dsn) as made:
        yield made


@pytest.fixture
def clock(database: Database, db: Connection) -> Clock:
    """Replaces gangq.now(), as the schema's owner, by a clock that the test moves."""
    if database.kept is None:
        return Clock.install(db)
    clock = Clock(db)
    clock.set_to_now()
    return clock
