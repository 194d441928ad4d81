"""gangq migrate, and gangq db for the private server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from gangq.cli import output
from gangq.cli.group import Subgroup
from gangq.cli.options import watch_option
from gangq.cli.session import Session, common_options, json_option, pass_session
from gangq.errors import EmbeddedError

if TYPE_CHECKING:
    from gangq import embedded


@click.command()
@click.option("--check", is_flag=True, help="Only say what would be done; exit code 1 if there is anything.")
@click.option(
    "--restored", is_flag=True, help="The database was restored from a dump: give no id or token twice."
)
@click.option("--dump-sql", is_flag=True, help="Print a fresh installation as SQL, and touch nothing.")
@common_options
def migrate(session: Session, check: bool, restored: bool, dump_sql: bool) -> None:
    """Bring the schema up to this library's.

    In one transaction, as the schema's owner. Repeating it does nothing. --check needs no more than a login that
    may see the schema. --dump-sql is for people with their own migration tool; with --json it is {"sql": ...}.
    """
    if check and dump_sql:
        raise click.UsageError("--check looks at a database, and --dump-sql at none: give one of them")
    if restored and (check or dump_sql):
        raise click.UsageError("--restored changes a database, --check and --dump-sql none: give one of them")
    # Not at the top, as below: completion asks this module for options, without a database.
    from gangq import schema

    if check:
        found = schema.pending(session.dsn())
        todo = [f"apply migration {name}" for name in found.migrations]
        todo += ["rebuild functions, views, triggers and grants"] if found.code else []
        session.answer(found, "\n".join(todo) or "up to date")
        if todo:
            click.get_current_context().exit(1)
        return
    if dump_sql:
        text = schema.dump_sql()
        session.answer({"sql": text}, text.removesuffix("\n"))
        return
    report = schema.migrate(
        session.dsn(), restored=restored, log=lambda step: None if session.json else output.write(step)
    )
    session.answer(report)


@click.group(cls=Subgroup)
def db() -> None:
    """Look after the private PostgreSQL.

    It is used with --embedded or GANGQ_DSN=embedded. Its data lives in GANGQ_DATA_DIR
    [~/.local/share/gangq/pg-<major>] and stays there.
    """


@db.command()
@json_option
def start(session: Session) -> None:
    """Start it, or find it running."""
    server = _server().start()
    found = server.status()
    session.answer(
        _described(found), f"PostgreSQL {_version(found)} runs as pid {found.pid} in {found.data_dir}"
    )


@db.command()
@click.option(
    "--mode",
    type=click.Choice(["smart", "fast", "immediate"]),
    default="fast",
    show_default=True,
    help="smart waits for clients to leave; immediate does not even checkpoint.",
)
@json_option
def stop(session: Session, mode: Any) -> None:
    """Stop it. Jobs and their history stay; running work survives an outage shorter than its lease."""
    server = _server()
    was = server.status()
    server.stop(mode)
    text = f"stopped (was pid {was.pid})" if was.running else f"no server runs in {was.data_dir}"
    session.answer({**_described(server.status()), "was_running": was.running}, text)


@db.command()
@watch_option
@json_option
def status(session: Session) -> None:
    """Say whether it runs. Exit code 3 when it does not."""
    found = _server().status()
    state = f"runs as pid {found.pid}" if found.running else "does not run (gangq db start)"
    session.answer(
        _described(found), f"PostgreSQL {_version(found)} in {found.data_dir} {state}\n{found.dsn}"
    )
    if not found.running:
        click.get_current_context().exit(3)


@db.command()
@common_options
def dsn(session: Session) -> None:
    """Print the address of the database in use; starts the private server if it is that.

    A password in --dsn or GANGQ_DSN is left out.
    """
    address = session.dsn()
    shown = address if session.private else _without_password(address)
    session.answer({"dsn": shown, "private": session.private}, shown)


@db.command(context_settings={"ignore_unknown_options": True})
@click.option("--dsn", "flag_dsn", metavar="DSN", help="The database [GANGQ_DSN].")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@pass_session
def psql(session: Session, flag_dsn: str | None, args: tuple[str, ...]) -> None:
    """Open psql on the database in use: gangq db psql -- -c 'table gangq.jobs'.

    The first argument, unless it is an option of psql, names another database of the same server.

    The password of a DSN travels in PGPASSWORD, not on the command line. With --json nothing changes: psql
    has formats of its own.
    """
    from gangq import embedded
    from gangq.client import core

    session.flag_dsn = flag_dsn or session.flag_dsn
    words = list(args)
    other = words.pop(0) if words and not words[0].startswith("-") else None
    if session.private:
        session.client()  # started, and migrated
        program, address = _server().psql_argv(other or embedded.DATABASE)
    else:
        program, address = _any_psql(), session.dsn()
        password = core.target(address, {}).password
        if password:
            os.environ["PGPASSWORD"] = password
        address = _without_password(address, other)
    session.close()
    os.execvp(program, [program, address, *words])


def _server() -> embedded.Server:
    from gangq import embedded

    return embedded.Server()


def _any_psql() -> str:
    try:
        return _server().psql_argv()[0]
    except EmbeddedError:
        # No server to be found here: then whatever PATH has, or its own message that it has none.
        return "psql"


def _without_password(address: str, database: str | None = None) -> str:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    parts = {key: value for key, value in conninfo_to_dict(address).items() if key != "password"}
    return make_conninfo("", **({**parts, "dbname": database} if database else parts))


def _version(found: embedded.Status) -> str:
    return ".".join(map(str, found.version))


def _described(found: embedded.Status) -> dict[str, Any]:
    return {
        "running": found.running,
        "pid": found.pid,
        "version": _version(found),
        "data_dir": str(found.data_dir),
        "dsn": found.dsn,
        "bindir": str(found.binaries.bindir),
    }
