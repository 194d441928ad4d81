"""What one invocation knows: which database, and in which form to answer."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gangq import private
from gangq.cli import output
from gangq.cli.tables import Column, choose, pick, table
from gangq.errors import GangqError

if TYPE_CHECKING:
    from gangq.client import Client

_ANSWER_S = 600.0
"""A plan or a replay of a large fleet takes minutes."""


@dataclass
class Session:
    """The state of one invocation. `flag_dsn` is --dsn, `json` --json, given before or after the command; `wide` and
    `columns` are --wide, None where the command has no such option, and -o.
    """

    flag_dsn: str | None = None
    json: bool = False
    wide: bool | None = None
    columns: Sequence[str] = ()
    _dsn: str | None = field(default=None, repr=False)
    _client: Client | None = None

    @property
    def given_dsn(self) -> str | None:
        """The database somebody named: --dsn or --embedded, else the environment."""
        return self.flag_dsn or private.given_dsn()

    @property
    def private(self) -> bool:
        """Whether this is the private server, whose schema is ours to make."""
        return self.given_dsn == private.EMBEDDED

    @property
    def inside_job(self) -> bool:
        """Whether this is a command of a job, which has no database but its worker."""
        return self.given_dsn is None and bool(os.environ.get("GANGQ_SOCKET"))

    def moment(self, when: datetime | timedelta) -> datetime:
        """A time, or so long from now by the database's clock, which will judge it; a job has only its own."""
        if isinstance(when, datetime):
            return when
        from gangq.cli import queries

        now = datetime.now(UTC) if self.inside_job else self.client().execute(queries.database_time())
        return now + when

    def dsn(self) -> str:
        """The database; the private server is started if need be. May hold a password: never print it.

        Raises `InvalidInput` when no database is named.
        """
        from gangq import embedded

        if self._dsn is None:
            self._dsn = self._start_private() if self.private else embedded.resolve_dsn(self.given_dsn)
        return self._dsn

    def _start_private(self) -> str:
        # Not at the top, as in the methods below: --version, --help and completion should not wait for it.
        from gangq import embedded

        server = embedded.Server()
        if not server.status().running:
            output.say(f"starting {server.binaries} in {server.data_dir} (gangq db stop ends it)")
        return server.start().dsn()

    def client(self, *, checked: bool = True) -> Client:
        """The client. `checked`: its schema fits this library, on the private server by migrating it.

        Inside a job that names no database it submits through the worker, and does nothing else.

        Raises `SchemaMismatch` where the schema is not ours to migrate, or is newer than this library.
        """
        from gangq.client import Client

        if self._client is None and self.inside_job:
            from gangq.context import current

            self._client = Client(through=current())
        if self._client is None:
            # What the pool warns of is told by the errors of the calls; without this it is printed as it is logged.
            logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
            # One thread: it never waits for a connection, only for the database.
            self._client = Client(self.dsn(), max_size=2, connect_s=2, timeout_s=_ANSWER_S)
            if checked:
                self.check_schema(self._client)
        return self._client

    @property
    def has_client(self) -> bool:
        """Whether a database is connected, or was meant to be."""
        return self._client is not None and not self.inside_job

    def check_schema(self, client: Client) -> None:
        """Raise `SchemaMismatch` unless the schema fits; the private server's is migrated instead."""
        from gangq import schema
        from gangq.errors import SchemaMismatch

        try:
            schema.check_version(client)
        except SchemaMismatch:
            if not self.private:
                raise
            schema.migrate(self.dsn(), log=lambda step: output.say(f"private server: {step}"))
            schema.check_version(client)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    # Answers

    def rows(self, rows: Sequence[Any], columns: Sequence[Column], nothing: str) -> None:
        """Answer with a list: JSON lines, or a table; `nothing` is said on stderr when it is empty."""
        if self.json:
            for row in rows:
                output.write(output.to_json(pick(row, self.columns) if self.columns else row))
        elif rows:
            self.table(rows, columns)
        else:
            output.say(nothing)

    def table(self, rows: Sequence[Any], columns: Sequence[Column]) -> None:
        """Print rows, of which there is at least one, as a table: --wide and -o say how."""
        table(rows, choose(columns, self.columns, rows[0]) if self.columns else columns, wide=self.wide)

    def answer(self, document: Mapping[str, Any] | object, *text: str) -> None:
        """Answer with one thing: a JSON object, or `text` in parts as `output.write` takes them (none: nothing)."""
        if self.json:
            output.write(output.to_json(document))
        elif text:
            output.write(*text)


def require_extra(extra: str, *modules: str) -> None:
    """Raise `GangqError` where a library of this extra is not installed; none is loaded."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise GangqError(f"there is no {module}: pip install 'gangq[{extra}]'")


def sets(
    name: str, value: Callable[[Any], object] = lambda given: given, *, always: bool = False
) -> dict[str, Any]:
    """What makes an option set a field of the session, before or after the name of the command; `always`: also where
    it is not given.
    """

    def callback(ctx: click.Context, _: click.Parameter, given: Any) -> None:
        if given or always:
            setattr(ctx.ensure_object(Session), name, value(given))

    return {"expose_value": False, "callback": callback}


F = TypeVar("F", bound=Callable[..., Any])


def chained(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Give a command these options, in this order."""

    def attach(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return attach


pass_session = click.make_pass_decorator(Session, ensure=True)


json_option = chained(
    click.option("--json", is_flag=True, **sets("json"), help="Answer in JSON, one object a line."),
    pass_session,
)
"""--json, which is taken before or after a command's name, and the session as its first argument."""
common_options = chained(
    json_option,
    click.option(
        "--embedded",
        is_flag=True,
        **sets("flag_dsn", lambda _: private.EMBEDDED),
        help="Use a private PostgreSQL on this machine, started if need be; GANGQ_DSN=embedded says the same.",
    ),
    click.option(
        "--dsn",
        metavar="DSN",
        **sets("flag_dsn"),
        help='The database: a URI or key=value pairs, or "embedded" [GANGQ_DSN]. Others on this machine can '
        "read command lines: keep passwords in GANGQ_DSN or ~/.pgpass.",
    ),
)
"""What `json_option` gives, and the database."""
