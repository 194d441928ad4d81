"""What one invocation knows: which database, and in which form to answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gangq.cli import output
from gangq.cli.output import Column

if TYPE_CHECKING:
    from gangq.client import Client

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Session:
    """The state of one invocation. `flag_dsn` is --dsn, `json` --json, given before or after the command."""

    flag_dsn: str | None = None
    json: bool = False
    _dsn: str | None = field(default=None, repr=False)
    _client: Client | None = None

    @property
    def given_dsn(self) -> str | None:
        """The database somebody named: --dsn, else GANGQ_DSN. None: the private server."""
        return self.flag_dsn or os.environ.get("GANGQ_DSN") or None

    @property
    def private(self) -> bool:
        """Whether this is the private server, whose schema is ours to make."""
        return self.given_dsn is None

    def dsn(self) -> str:
        """The database; the private server is started if need be. May hold a password: never print it."""
        if self._dsn is None:
            self._dsn = self.given_dsn or self._start_private()
        return self._dsn

    def _start_private(self) -> str:
        # Not at the top, as in the methods below: --version, --help and completion should not wait for it.
        from gangq import embedded

        server = embedded.Server()
        if not server.status().running:
            say(
                f"no --dsn or GANGQ_DSN: starting {server.binaries} in {server.data_dir} "
                "(gangq db stop ends it)"
            )
        return server.start().dsn()

    def client(self, *, checked: bool = True) -> Client:
        """The client. `checked`: its schema fits this library, on the private server by migrating it.

        Raises `SchemaMismatch` where the schema is not ours to migrate, or is newer than this library.
        """
        from gangq.client import Client

        if self._client is None:
            # One thread: it never waits for a connection, only for the database.
            self._client = Client(self.dsn(), max_size=2, timeout_s=2)
            if checked:
                self.check_schema(self._client)
        return self._client

    def check_schema(self, client: Client) -> None:
        """Raise `SchemaMismatch` unless the schema fits; the private server's is migrated instead."""
        from gangq import schema
        from gangq.errors import SchemaMismatch

        try:
            schema.check_version(client)
        except SchemaMismatch:
            if not self.private:
                raise
            schema.migrate(self.dsn(), log=lambda step: say(f"private server: {step}"))
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
                click.echo(output.to_json(row))
        elif rows:
            output.table(rows, columns)
        else:
            say(nothing)

    def answer(self, document: Mapping[str, Any] | object, text: str | None = None) -> None:
        """Answer with one thing: a JSON object, or `text` (None: nothing)."""
        if self.json:
            click.echo(output.to_json(document))
        elif text is not None:
            click.echo(text)


def say(text: str) -> None:
    """Comment on standard error."""
    click.echo(f"gangq: {text}", err=True)


def _set_dsn(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Session).flag_dsn = value


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).json = True


def json_option(command: F) -> F:
    """Give a command --json, which every command takes before or after its name."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_set_json,
        help="Answer in JSON, one object a line.",
    )(command)


def common_options(command: F) -> F:
    """Give a command --dsn and --json, which are taken before or after its name."""
    dsn_option = click.option(
        "--dsn",
        metavar="DSN",
        expose_value=False,
        callback=_set_dsn,
        help="The database: a URI or key=value pairs [GANGQ_DSN, else a private server]. Others on this "
        "machine can read command lines: keep passwords in GANGQ_DSN or ~/.pgpass.",
    )
    return json_option(dsn_option(command))


pass_session = click.make_pass_decorator(Session, ensure=True)
