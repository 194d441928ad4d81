"""Upgrades: from each release's schema, as it was dumped, to this library's and to one that has a migration more.

`releases/` holds what `gangq migrate --dump-sql` of each release printed. A new release adds a file, with
`gangq migrate --dump-sql | gzip -n9 > tests/schema/releases/VERSION.sql.gz`, and nothing there is ever changed.
"""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from test_schema import catalog, migrate, psql, run

from gangq import schema
from gangq.client import Client
from gangq.embedded import Server
from gangq.errors import Busy, translate

RELEASES = sorted((Path(__file__).parent / "releases").glob("*.sql.gz"))
_RECORDED = re.compile(r"insert into gangq\.migrations \(name, checksum\) values \('(\w+)', '(\w+)'\);")
_LOSES = re.compile(
    r"\b(drop (table|column|domain|default)|set not null|rename|truncate|delete from)\b|\btype\b(?! gangq)",
    re.IGNORECASE,
)
_UNFILLED = re.compile(r"add column (?!if)[^,;]*not null(?![^,;]*(default|generated))", re.IGNORECASE)

# One round of a worker in SQL as the releases know it: what any language writes, and what no later release may break.
_REGISTER = "select incarnation from gangq.register_worker(%s, %s, '{default}', slots => 8)"
_ROUND = (
    "select * from gangq.heartbeat(%(incarnation)s)",
    "with taken as materialized ("
    "  select job_id, token from gangq.claim(%(incarnation)s, gen_random_uuid(), 4)"
    "), all_of_it as (select array_agg(job_id) as ids, array_agg(token) as tokens from taken)"
    "select job_ids from all_of_it, lateral (select ids as job_ids from gangq.complete(ids, tokens) limit 1) x "
    "where ids is not null",
)


def problem(migration: str) -> str | None:
    """What a migration takes away, or demands of rows that are there: workers of the release before still run."""
    code = re.sub(r"--[^\n]*", "", migration)
    found = _LOSES.search(code) or _UNFILLED.search(code)
    return None if found is None else " ".join(found[0].split())


def later_migrations() -> Iterator[schema.SqlFile]:
    """Those that no release has."""
    released = {name for release in RELEASES for name, _ in _RECORDED.findall(text_of(release))}
    return (file for file in schema.migrations() if file.name not in released)


def text_of(release: Path) -> str:
    return gzip.decompress(release.read_bytes()).decode()


def test_what_a_release_has_applied_is_unchanged_and_comes_first() -> None:
    assert RELEASES
    ours = [(file.name, file.checksum) for file in schema.migrations()]
    for release in RELEASES:
        recorded = [pair for pair in _RECORDED.findall(text_of(release)) if pair[0] != "code"]
        assert recorded
        assert ours[: len(recorded)] == recorded, (
            f"{release.name}: an applied migration never changes; add one"
        )


def test_migrations_are_numbered_one_after_another() -> None:
    names = [file.name for file in schema.migrations()]
    assert [name[:5] for name in names] == [f"{n:04}_" for n in range(1, len(names) + 1)]


def test_migrations_since_the_last_release_only_add() -> None:
    assert {file.name: problem(file.text) for file in later_migrations() if problem(file.text)} == {}


@pytest.mark.parametrize(
    ("migration", "said"),
    [
        ("alter table gangq.live_jobs add column note text;", None),
        ("alter table gangq.live_jobs add column n integer not null default 0;", None),
        (
            "create table gangq.more (id bigint primary key, at timestamptz not null); -- drop table is not done",
            None,
        ),
        ("alter table gangq.live_jobs drop column note;", "drop column"),
        ("drop table gangq.more;", "drop table"),
        ("alter table gangq.live_jobs rename column note to notes;", "rename"),
        ("alter table gangq.live_jobs alter priority type bigint;", "type"),
        ("alter table gangq.live_jobs alter column note set not null;", "set not null"),
        ("alter table gangq.live_jobs alter stops drop default;", "drop default"),
        ("alter table gangq.live_jobs add column n integer not null;", "add column n integer not null"),
    ],
)
def test_a_migration_that_takes_away_is_found(migration: str, said: str | None) -> None:
    assert problem(migration) == said


class Flow:
    """Somebody who submits and two who work, each over a connection of its own, all the time."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stop = threading.Event()
        self.submitted: list[int] = []
        self.completed: list[int] = []
        self.problems: list[BaseException] = []

    def _submit(self, conn: psycopg.Connection[Any]) -> None:
        row = conn.execute("select gangq.submit('t')").fetchone()
        assert row is not None
        self.submitted.append(row[0])

    def _worker(self, name: str) -> Callable[[psycopg.Connection[Any]], None]:
        registered: list[int] = []

        def work(conn: psycopg.Connection[Any]) -> None:
            if not registered:
                registered.extend(*conn.execute(_REGISTER, [name, f"host-{name}"]).fetchall())
            for statement in _ROUND:
                for row in conn.execute(statement.encode(), {"incarnation": registered[0]}).fetchall():
                    if statement is _ROUND[-1]:
                        self.completed += row[0]

        return work

    def _go_on(self, step: Callable[[psycopg.Connection[Any]], None]) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as conn:
                while not self._stop.wait(0.005):
                    try:
                        step(conn)
                    except psycopg.Error as e:
                        # What had looked a function up, and waited for the migration. Whoever calls calls again.
                        if not isinstance(translate(e), Busy):
                            raise
        except BaseException as e:
            self.problems.append(e)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        steps = [self._submit, self._worker("w1"), self._worker("w2")]
        threads = [threading.Thread(target=self._go_on, args=[step]) for step in steps]
        for thread in threads:
            thread.start()
        try:
            yield
            self.until_more()
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(30)

    def until_more(self, jobs: int = 50) -> None:
        """Wait until so many more have been completed."""
        wanted, waited = len(self.completed) + jobs, threading.Event()
        for _ in range(600):
            if len(self.completed) >= wanted or self.problems:
                break
            waited.wait(0.05)
        assert self.problems == []
        assert len(self.completed) >= wanted


@pytest.fixture
def next_release(lib: Path) -> Path:
    """This library's sql/, with a migration more and a function more."""
    newest = len(schema.migrations()) + 1
    (lib / "migrations" / f"{newest:04}_more.sql").write_text(
        "alter table gangq.live_jobs add column note text;\n"
        "create table gangq.more (id bigint primary key, at timestamptz not null);\n"
    )
    (lib / "151_more.sql").write_text(
        "create function gangq.count_notes() returns bigint language sql stable\n"
        "return (select count(j.note) from gangq.live_jobs j);\n"
    )
    return lib


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name.removesuffix(".sql.gz"))
def test_an_upgrade_while_jobs_flow_loses_none_and_runs_none_twice(
    release: Path, server: Server, empty_dsn: str, next_release: Path
) -> None:
    done = psql(server, empty_dsn, text_of(release))
    assert (done.returncode, done.stderr) == (0, "")
    flow = Flow(empty_dsn)
    with flow.flowing():
        flow.until_more()
        report = migrate(empty_dsn)
        assert report.applied[-1].endswith("_more")
        assert report.code_rebuilt
    assert flow.problems == []
    assert len(set(flow.completed)) == len(flow.completed)
    assert set(flow.completed) <= set(flow.submitted)
    left = run(empty_dsn, "select id from gangq.jobs where state in ('pending', 'running')")
    assert {id for (id,) in left} == set(flow.submitted) - set(flow.completed)
    with Client(empty_dsn) as client:
        assert client.violations() == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name.removesuffix(".sql.gz"))
def test_an_upgraded_schema_equals_a_fresh_one(
    release: Path, server: Server, empty_dsn: str, next_release: Path
) -> None:
    assert psql(server, empty_dsn, text_of(release)).returncode == 0
    migrate(empty_dsn)
    fresh = server.create_database("fresh")
    try:
        migrate(fresh)
        upgraded, made = catalog(empty_dsn), catalog(fresh)
    finally:
        server.drop_database("fresh")
    for what, rows in made.items():
        assert upgraded[what] == rows, what


def test_a_call_that_a_migration_overtakes_may_be_made_again(empty_dsn: str) -> None:
    said = "cache lookup failed for function 1"
    with pytest.raises(psycopg.Error) as told:
        run(empty_dsn, f"do $$ begin raise exception '{said}' using errcode = 'XX000'; end $$")
    assert isinstance(translate(told.value), Busy)
