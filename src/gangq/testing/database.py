"""A database for each test, copied from a template on a private PostgreSQL, and its clock."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import psycopg

from gangq import schema
from gangq.client import Client
from gangq.client.options import aware
from gangq.durations import parse_seconds
from gangq.embedded import Server
from gangq.errors import InvalidInput
from gangq.watchdogs.codes import NOTIFY_CLASSES

_TEMPLATE = "gangq_template"

# Workers of tests come and go. What one of them had is no reason to refuse what another is to run, and that there is
# none yet is no reason to say so in the log of every test.
_FUNCTIONS = """
create table public.gangq_test_clock (ahead interval not null);
insert into public.gangq_test_clock values ('0');
grant select on public.gangq_test_clock to public;

create or replace function gangq.now() returns timestamptz language sql volatile
return pg_catalog.clock_timestamp() + (select c.ahead from public.gangq_test_clock c);

create or replace function gangq.known_workers(queue text) returns boolean language sql stable as $$
  select exists (
    select from gangq.incarnations i
    where known_workers.queue = any (i.queues) and i.ended_at is null)
$$;

create or replace function gangq.fleet(known boolean) returns setof gangq.incarnations
language sql stable as $$
  select i.* from gangq.incarnations i where i.ended_at is null
$$;

create or replace function gangq.check_fit(shape_id integer, queue text) returns void
language plpgsql as $$
begin
  update gangq.shapes s set fits = true where s.id = check_fit.shape_id and not s.fits;
end $$;
"""

_MOVE = "update public.gangq_test_clock set ahead ="
_MOVED = "returning pg_catalog.clock_timestamp() + ahead"


class Databases:
    """Makes databases on one server. What differs from a real one: see docs/manual/testing.md."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        template = server.create_database(_TEMPLATE)
        schema.migrate(template, log=lambda _: None)
        with psycopg.connect(template) as connection:
            connection.execute(_FUNCTIONS)
        with Client(template) as client:
            # A watchdog that trips ends the process that runs the handler: that would be pytest.
            client.configure(notify_only=NOTIFY_CLASSES)

    @contextlib.contextmanager
    def new(self) -> Iterator[str]:
        """The DSN of a new database with the schema; it is dropped afterwards, whoever is connected."""
        name = f"test_{next(self._numbers)}"
        dsn = self._server.create_database(name, template=_TEMPLATE)
        try:
            yield dsn
        finally:
            self._server.drop_database(name)


class Clock:
    """The clock of a database that `Databases` made: it goes on by itself, and a test moves it.

    Every time that gangq stores or compares there is read from it: due times, backoff, leases, timeouts. The clocks
    of Python and other functions of PostgreSQL do not move. Move it between two drains, not while workers run: their
    leases would end.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def now(self) -> datetime:
        """The time there."""
        return self._ask("select gangq.now()", ())

    def advance(self, by: float | str | timedelta) -> datetime:
        """Move it ahead by seconds, a `timedelta`, or a text such as "90s", "1h30m", "2d"; return the new time.

        Raises `InvalidInput` for what is no length of time, or a negative one.
        """
        found = parse_seconds(by) if isinstance(by, str) else by
        try:
            length = found if isinstance(found, timedelta | None) else timedelta(seconds=found)
        except (ValueError, OverflowError):
            length = None
        if length is None or length < timedelta(0):
            raise InvalidInput(
                f"{by!r} is no length of time: seconds, a timedelta, or a text such as 90s, 2h, 1d"
            )
        return self._ask(f"{_MOVE} ahead + %s {_MOVED}", [length])

    def set(self, at: datetime) -> datetime:
        """Move it to `at`, with a time zone; return the new time. Back only before anything is submitted."""
        return self._ask(f"{_MOVE} %s - pg_catalog.clock_timestamp() {_MOVED}", [aware(at, "at")])

    def _ask(self, query: str, values: Sequence[object]) -> datetime:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            row = connection.execute(query.encode(), values).fetchone()
        assert row is not None
        at: datetime = row[0]
        return at
