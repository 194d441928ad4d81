"""The schema in the database: apply it, print it, and tell whether it fits this library.

Two kinds of file (`sql/`): migrations, applied once in order and recorded with their checksums, and the code
(functions, views, triggers, grants), dropped and rebuilt as a whole whenever one file of it changed. Both in
one transaction: a database is at the old schema or at the new one, never between.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

import gangq
from gangq import private
from gangq.client import Client, core
from gangq.errors import Busy, DatabaseUnreachable, GangqError, NotAllowed, SchemaMismatch, translate

logger = logging.getLogger("gangq.schema")

# "gangq" as a number: whoever migrates this database holds it until commit.
_LOCK = 0x67616E6771
# Another migration is waited for; a table that somebody works on is not: those waiting behind us would wait
# too.
_WAIT_FOR_MIGRATION = "60s"
_WAIT_FOR_TABLE = "10s"
_GIVE_UP_AFTER_S = 10
# Less than deadlock_timeout [1 s]: who we wait for may wait for us, and then it is we who give way.
_GIVE_WAY_AFTER = "500ms"
_OLDEST_SERVER = 140000

_DEPENDENTS = "2BP01"
_DUPLICATE_SCHEMA = "42P06"


@dataclass(frozen=True)
class SqlFile:
    """One file of `sql/`: its name without `.sql`, its text, and whether it is a migration."""

    name: str
    text: str
    migration: bool

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def statements(self) -> str:
        """The text, with a `comment on` for each comment right above what it makes, or above or beside a column."""
        return "\n".join(_commented(self.text.splitlines())) + "\n"


@dataclass(frozen=True)
class MigrationReport:
    """What `migrate` did: the migrations it applied, in order, and whether it rebuilt the code."""

    applied: tuple[str, ...]
    code_rebuilt: bool
    already_current: bool


@dataclass(frozen=True)
class Pending:
    """What `migrate` would do: the migrations it would apply, in order, and whether it would rebuild the code."""

    migrations: tuple[str, ...]
    code: bool


def sql_files() -> tuple[SqlFile, ...]:
    """Return every file of `sql/` in the order of execution: migrations, then the code."""
    root = _sql_root()
    return (*_read(root / "migrations", migration=True), *_read(root, migration=False))


def migrations() -> tuple[SqlFile, ...]:
    """Return the migrations this library brings, in order."""
    return tuple(f for f in sql_files() if f.migration)


def code_checksum() -> str:
    """Return the checksum that stands for all files of the code, as `gangq.migrations` records it."""
    whole = hashlib.sha256()
    for file in sql_files():
        if not file.migration:
            whole.update(f"{file.name} {file.checksum}\n".encode())
    return whole.hexdigest()


def migrate(
    database: str | psycopg.Connection[Any] | None = None,
    *,
    restored: bool = False,
    log: Callable[[str], object] | None = None,
) -> MigrationReport:
    """Bring the schema in `database` (a DSN, or a connection that is not in a transaction) up to this
    library.

    One transaction under an advisory lock, so processes that start together may all call it: the others wait up
    to 60 s for the first. Repeating it does nothing. `restored`: the database comes from a dump, so ids and tokens
    go on above all that may have been given after it was taken. `log` receives each step as a line; default: this
    module's logger.

    Raises `SchemaMismatch` when the database is newer than the library, an applied migration's file has
    changed, or something outside of schema gangq depends on a view or function of it; `NotAllowed` when this
    login may not; `Busy` when another session held the lock for 60 s (it says which) or a table for 10 s;
    `DatabaseUnreachable`.
    """
    say = log or logger.info
    with _connected(database) as (conn, where):
        try:
            done: list[str] = []
            with conn.transaction():
                report = _migrate(conn, where, say, done.append)
                if restored:
                    conn.execute("select gangq.step_over()")
                    done.append("ids and tokens go on above all that were given before")
        except psycopg.Error as e:
            raise _explained(e, where) from e
        # Not before: until the commit all of it may still be rolled back.
        for step in done:
            say(step)
        return report


def pending(database: str | psycopg.Connection[Any] | None = None) -> Pending:
    """Say what `migrate` would do to `database` (as there). It changes nothing and waits for nobody.

    A login that may see the schema is enough. Raises `SchemaMismatch` where `migrate` would refuse, `NotAllowed`,
    `DatabaseUnreachable`.
    """
    with _connected(database) as (conn, where):
        try:
            with conn.transaction():
                missing, code_is_old = _outstanding(_recorded(conn), where)
        except psycopg.Error as e:
            raise _explained(e, where) from e
    return Pending(tuple(file.name for file in missing), code_is_old)


def _migrate(
    conn: psycopg.Connection[Any],
    where: str,
    say: Callable[[str], object],
    has_done: Callable[[str], object],
) -> MigrationReport:
    encoding = conn.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SchemaMismatch(
            f"{where} has encoding {encoding}; payloads, logs and errors are Unicode, so gangq needs UTF8: "
            "make the database with  create database ... encoding 'UTF8' template template0"
        )
    if conn.info.server_version < _OLDEST_SERVER:
        raise SchemaMismatch(
            f"{where} is PostgreSQL {conn.info.server_version // 10000}; gangq needs 14 or newer: upgrade "
            "the server"
        )
    # What others commit while we wait for the lock must be seen afterwards.
    conn.execute("set transaction isolation level read committed")
    for setting in _settings():
        conn.execute(setting)
    _take_turn(conn, where, say)
    conn.execute(sql.SQL("set local lock_timeout = {}").format(_WAIT_FOR_TABLE))
    _become_owner(conn, where)

    recorded = _recorded(conn)
    missing, code_is_old = _outstanding(recorded, where)
    if not missing and not code_is_old:
        _make_owner_admin(conn, has_done)
        say(f"{where} is up to date ({migrations()[-1].name})")
        return MigrationReport((), code_rebuilt=False, already_current=True)

    if recorded:
        _lock_hot_tables(conn)
    # First: a migration may change a table that a view reads.
    _drop_code(conn)
    for file in missing:
        _run(conn, file, where)
        conn.execute(
            "insert into gangq.migrations (name, checksum) values (%s, %s)", (file.name, file.checksum)
        )
        has_done(f"applied migration {file.name}")
    for file in sql_files():
        if not file.migration:
            _run(conn, file, where)
    conn.execute(
        "insert into gangq.migrations (name, checksum) values ('code', %s) on conflict (name) do update "
        "set checksum = excluded.checksum, applied_at = pg_catalog.clock_timestamp()",
        (code_checksum(),),
    )
    has_done("rebuilt functions, views, triggers and grants")
    _make_owner_admin(conn, has_done)
    return MigrationReport(tuple(file.name for file in missing), code_rebuilt=True, already_current=False)


def dump_sql() -> str:
    """Return a script that installs this schema into a database without one, for psql or a migration tool.

    One transaction. It records what it applied as `migrate` would, so a later `gangq migrate` agrees with it.
    On a database that has a schema gangq it fails at its first statement and changes nothing.
    """
    parts = [
        f"-- gangq {gangq.__version__}: a fresh installation, in one transaction. Run it as the role "
        "that is to own the schema,\n-- for example: psql -v ON_ERROR_STOP=1 -f gangq.sql. To upgrade an "
        "installation use: gangq migrate.",
        "begin;",
        *(f"{setting};" for setting in _settings()),
        f"set local lock_timeout = '{_WAIT_FOR_MIGRATION}';",
        f"select pg_catalog.pg_advisory_xact_lock({_LOCK});",
        f"set local lock_timeout = '{_WAIT_FOR_TABLE}';",
    ]
    for file in sql_files():
        folder = "migrations/" if file.migration else ""
        parts.append(f"-- sql/{folder}{file.name}.sql\n\n{file.statements.strip()}")
        if file.migration:
            parts.append(_record(file.name, file.checksum))
    parts += [_record("code", code_checksum()), "commit;"]
    return "\n\n".join(parts) + "\n"


def resolve_dsn(given: str | None) -> str:
    """The database to use, as `gangq.embedded.resolve_dsn` says. The private server gets the schema where it has
    none: it is this user's own.

    Raises `SchemaMismatch` where the private server's schema is older or newer than this library, and as there.
    """
    # Not at the top: most processes have no private server.
    from gangq import embedded

    dsn = embedded.resolve_dsn(given)
    if (given or private.given_dsn()) == private.EMBEDDED:
        with _connected(dsn) as (conn, where):
            recorded = _recorded(conn)
            if recorded and _outstanding(recorded, where)[0]:
                raise SchemaMismatch(
                    f"the private server's schema is older than this library ({_version()}, "
                    f"{migrations()[-1].name}): run `gangq migrate --embedded`, then start again"
                )
        if not recorded:
            migrate(dsn)
    return dsn


def check_version(client: Client) -> None:
    """Raise `SchemaMismatch`, saying which side to upgrade and how, unless the schema fits this library.

    The newest migration has to be the same on both sides; for the code see `code_is_current`.
    """
    wanted = migrations()[-1].name
    try:
        found = client.schema_version()
    except SchemaMismatch as e:
        raise SchemaMismatch(
            f"{client.target} has no gangq schema, or one that is broken: run `gangq migrate` as the role "
            f"that is to own it, then start again ({e})"
        ) from e
    except NotAllowed as e:
        raise NotAllowed(
            f"this login may not use the schema gangq in {client.target}: have its owner run `grant "
            "gangq_worker to ...` (or gangq_submitter, gangq_viewer), then start again"
        ) from e
    if found is None or found < wanted:
        raise SchemaMismatch(
            f"the schema in {client.target} is at {found or 'nothing'}, older than this library "
            f"({_version()}, {wanted}): run `gangq migrate` as the schema's owner, then start again"
        )
    if found > wanted:
        raise SchemaMismatch(
            f"the schema in {client.target} is at {found}, newer than this library ({_version()}, {wanted}): "
            "upgrade gangq here (pip install --upgrade gangq), then start again"
        )


def code_is_current(client: Client) -> bool:
    """Say whether the functions and views in the database are exactly this library's.

    They may differ during a rolling upgrade, which is no error: clients name their arguments and columns.
    """
    with client.connection("gangq.migrations") as conn:
        row = conn.execute("select checksum from gangq.migrations where name = 'code'").fetchone()
    return row is not None and row[0] == code_checksum()


# Files ------------------------------------------------------------------------------------------------------


def _sql_root() -> Path:
    packaged = Path(__file__).parent / "sql"
    # An editable install and a checkout have it at the top level only.
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "sql"


def _read(folder: Path, *, migration: bool) -> list[SqlFile]:
    # A checkout with CRLF line ends must not have checksums of its own.
    texts = (
        (path.stem, path.read_bytes().decode().replace("\r\n", "\n")) for path in sorted(folder.glob("*.sql"))
    )
    return [SqlFile(name, text, migration) for name, text in texts]


_TABLE = re.compile(r"create table (gangq\.\w+) \($")
_OTHER = re.compile(r"(?:create|alter(?= domain)) ((?:domain|function|type|view) gangq\.\w+)")
_COMMENT = re.compile(r"((?:'[^']*'|[^'])*?)-- (.*)")
_COLUMN = re.compile(r'  (?!check |constraint |primary |unique |like )(\w+|"\w+") ')


def _commented(lines: list[str]) -> Iterator[str]:
    """The lines, and after each statement that makes something a `comment on` with what is said of that: in the
    comment directly above its first line, or of a column, above or beside its own.

    In:   -- What it's for.
          create domain gangq.span as interval;
    Out:  the same, and  comment on domain gangq.span is 'What it''s for.';

    Lines are looked at one by one. So what is made begins on a line of its own, as in `sql/`; a string, or a comment
    between /* and */, that goes over several lines must not have `-- ` in it; and only in a body between $$ does a
    line that ends in `;` not end the statement. `alter domain` counts as making it, so that a migration can say what
    a domain is now. `create or replace` is not known, and not used: the code is made anew as a whole. Of indexes,
    triggers and columns that are added nothing is said.
    """
    table = None
    """The one whose columns these lines are."""
    in_body = False
    said: list[str] = []
    comments: list[str] = []
    for line in lines:
        yield line
        code, beside = split.groups() if (split := _COMMENT.match(line)) else (line, "")
        said += [beside] if beside else []
        if not code.strip() and beside:
            continue
        if found := _TABLE.match(line):
            table = found[1]
        what = _made(line, table)
        if what and said:
            text = " ".join(said).replace("'", "''")
            comments.append(f"comment on {what} is '{text}';")
        in_body ^= line.count("$$") == 1
        if code.rstrip().endswith(";") and not in_body:
            yield from comments
            table, comments = None, []
        said = []


def _made(line: str, table: str | None) -> str | None:
    """What a line begins to make, as `comment on` names it: of `table` a column."""
    if _TABLE.match(line):
        return f"table {table}"
    if found := _OTHER.match(line):
        return found[1]
    found = _COLUMN.match(line) if table else None
    return f"column {table}.{found[1]}" if found else None


def _version() -> str:
    return f"gangq {gangq.__version__}"


def _settings() -> list[str]:
    """What a file may rely on while it runs, whatever the login's own settings are."""
    return [
        "set local search_path = pg_catalog",
        "set local statement_timeout = 0",
        "set local client_min_messages = warning",
        "set local default_tablespace = ''",
        "set local default_table_access_method = heap",
    ]


def _record(name: str, checksum: str) -> str:
    return f"insert into gangq.migrations (name, checksum) values ('{name}', '{checksum}');"  # noqa: S608 - ours


# Steps ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(
    database: str | psycopg.Connection[Any] | None,
) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    if isinstance(database, psycopg.Connection):
        info = database.info
        yield database, f"database {info.dbname} at {info.host}:{info.port}"
        return
    target = core.target(database, {})
    try:
        conn = psycopg.connect(target.conninfo, **target.kwargs)
    except psycopg.Error as e:
        raise target.unreachable(e) from e
    with conn:
        yield conn, str(target)


def _take_turn(conn: psycopg.Connection[Any], where: str, say: Callable[[str], object]) -> None:
    """One migration at a time. Any login of the database can take this lock, so whoever holds it is named."""
    row = conn.execute("select pg_catalog.pg_try_advisory_xact_lock(%s)", (_LOCK,)).fetchone()
    if row and row[0]:
        return
    say(
        f"{_turn_holder(conn)} holds the lock of migrations in {where}: waiting {_WAIT_FOR_MIGRATION} at most"
    )
    try:
        with conn.transaction():
            conn.execute(sql.SQL("set local lock_timeout = {}").format(_WAIT_FOR_MIGRATION))
            conn.execute("select pg_catalog.pg_advisory_xact_lock(%s)", (_LOCK,))
    except psycopg.errors.LockNotAvailable as e:
        raise Busy(
            f"migrating {where}: {_turn_holder(conn)} has held the lock of migrations for {_WAIT_FOR_MIGRATION}. "
            "If it is no migration, end that session: select pg_terminate_backend(PID)"
        ) from e


def _turn_holder(conn: psycopg.Connection[Any]) -> str:
    row = conn.execute(
        "select a.pid, a.usename, coalesce(nullif(a.application_name, ''), '?') "
        "from pg_locks l left join pg_stat_activity a on a.pid = l.pid "
        "where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.database = ("
        "select d.oid from pg_database d where d.datname = current_database()) "
        "and l.classid::bigint << 32 | l.objid::bigint = %s",
        (_LOCK,),
    ).fetchone()
    return "another session" if row is None else f"pid {row[0]} (login {row[1]}, application {row[2]})"


def _become_owner(conn: psycopg.Connection[Any], where: str) -> None:
    """Everything in the schema has one owner: security definer functions run with its rights, and a superuser
    who migrates for it must not lend them his own."""
    row = conn.execute(
        "select r.rolname, r.rolname = current_user, pg_has_role(current_user, r.oid, 'member'), "
        "current_user from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = 'gangq'"
    ).fetchone()
    if row is None or row[1]:
        return
    owner, _, member, me = row
    if not member:
        raise NotAllowed(
            f"schema gangq in {where} belongs to {owner} and this login is {me}: migrate as {owner}"
        )
    conn.execute("select set_config('role', %s, true)", (owner,))


def _make_owner_admin(conn: psycopg.Connection[Any], say: Callable[[str], object]) -> None:
    """Grant gangq_admin to the owner, as which this runs: it works with what it has made. Say how, if it may not."""
    row = conn.execute("select current_user::text, pg_has_role('gangq_admin', 'usage')").fetchone()
    if row is None or row[1]:
        return
    grant = sql.SQL("grant gangq_admin to {}").format(sql.Identifier(row[0]))
    try:
        with conn.transaction():
            # Where a superuser migrates for the owner, it may grant what the owner may not.
            conn.execute("set local role none")
            conn.execute(grant)
    except psycopg.Error as e:
        # Nothing that the schema needs: the owner may call and read everything in it anyway.
        why = str(e).strip().splitlines()[0]
        say(f"{row[0]} is not in gangq_admin ({why}): have an administrator run: {grant.as_string(conn)}")
    else:
        say(f"granted gangq_admin to {row[0]}, which owns the schema")


def _recorded(conn: psycopg.Connection[Any]) -> dict[str, str]:
    row = conn.execute("select to_regclass('gangq.migrations') is not null").fetchone()
    if not row or not row[0]:
        return {}
    return dict(conn.execute("select name, checksum from gangq.migrations").fetchall())


def _outstanding(recorded: dict[str, str], where: str) -> tuple[list[SqlFile], bool]:
    """The migrations that are to be applied, and whether the code is another one's."""
    ours = migrations()
    names = {"code", *(file.name for file in ours)}
    foreign = sorted(name for name in recorded if name not in names)
    if foreign:
        raise SchemaMismatch(
            f"{where} has migration {foreign[-1]}, which this library ({_version()}, newest {ours[-1].name}) "
            "does not know: upgrade gangq here (pip install --upgrade gangq) and migrate with that"
        )
    for file in ours:
        if file.name in recorded and recorded[file.name] != file.checksum:
            raise SchemaMismatch(
                f"migration {file.name} was applied to {where} with checksum {recorded[file.name][:12]}, and "
                f"this library's file has {file.checksum[:12]}: an applied migration never changes. Install "
                "the gangq that was used, or, if this is a development database, drop schema gangq and "
                "migrate anew"
            )
    return [file for file in ours if file.name not in recorded], recorded.get("code") != code_checksum()


def _run(conn: psycopg.Connection[Any], file: SqlFile, where: str) -> None:
    try:
        conn.execute(file.statements.encode(), prepare=False)
    except psycopg.Error as e:
        raise _explained(e, f"{where}, {file.name}.sql") from e


def _lock_hot_tables(conn: psycopg.Connection[Any]) -> None:
    """Lock the two tables that every worker is at all the time, both or neither.

    A heartbeat goes from its lease to its jobs, a claim from jobs to its lease: whichever we took first, some
    worker could hold what we want next and wait for what we have.
    """
    give_up = time.monotonic() + _GIVE_UP_AFTER_S
    while True:
        try:
            with conn.transaction():
                conn.execute(sql.SQL("set local lock_timeout = {}").format(_GIVE_WAY_AFTER))
                conn.execute("lock table gangq.live_jobs, gangq.leases in access exclusive mode")
                break
        except psycopg.errors.LockNotAvailable:
            if time.monotonic() > give_up:
                raise
            time.sleep(random.uniform(0.02, 0.1))
    conn.execute(sql.SQL("set local lock_timeout = {}").format(_WAIT_FOR_TABLE))


def _drop_code(conn: psycopg.Connection[Any]) -> None:
    """Drop the triggers, views, functions and types of the schema; refused (2BP01) when anything else depends on
    one. A function that a table's check calls is part of that table, and stays.

    Each kind in one statement: the order among its members does not matter then.
    """
    triggers = conn.execute(
        "select t.tgname, c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid "
        "where c.relnamespace = to_regnamespace('gangq') and not t.tgisinternal and t.tgparentid = 0"
    ).fetchall()
    for name, table in triggers:
        conn.execute(
            sql.SQL("drop trigger {} on gangq.{}").format(sql.Identifier(name), sql.Identifier(table))
        )
    _drop_relations(conn, "view", "v")
    routines = conn.execute(
        "select p.proname, pg_get_function_identity_arguments(p.oid) from pg_proc p "
        "where p.pronamespace = to_regnamespace('gangq') and not exists ("
        "select from pg_depend d join pg_constraint c on c.oid = d.objid and c.connamespace = p.pronamespace "
        "where d.classid = 'pg_constraint'::regclass and d.refclassid = 'pg_proc'::regclass and d.refobjid = p.oid)"
    ).fetchall()
    if routines:
        # The arguments are the catalog's own, already quoted.
        each = (
            sql.SQL("gangq.{}({})").format(sql.Identifier(name), sql.SQL(args)) for name, args in routines
        )
        conn.execute(sql.SQL("drop routine {}").format(sql.SQL(", ").join(each)))
    _drop_relations(conn, "type", "c")


def _drop_relations(conn: psycopg.Connection[Any], what: LiteralString, relkind: str) -> None:
    found = conn.execute(
        "select relname from pg_class where relnamespace = to_regnamespace('gangq') and relkind = %s",
        [relkind],
    ).fetchall()
    if found:
        listed = sql.SQL(", ").join(sql.SQL("gangq.{}").format(sql.Identifier(name)) for (name,) in found)
        conn.execute(sql.SQL("drop " + what + " {}").format(listed))


def _explained(error: psycopg.Error, where: str) -> GangqError:
    if error.sqlstate == _DEPENDENTS:
        return SchemaMismatch(
            f"the code of gangq in {where} cannot be rebuilt, because objects of yours depend on it: "
            f"{error.diag.message_detail}. Drop them, migrate, and create them again"
        )
    if error.sqlstate == _DUPLICATE_SCHEMA:
        return SchemaMismatch(
            f"{where} has a schema gangq without a table gangq.migrations, so gangq did not make it: drop or "
            "rename it if it is not needed, or use another database"
        )
    translated = translate(error, target=where)
    if isinstance(translated, DatabaseUnreachable):
        return translated
    if isinstance(translated, (Busy, NotAllowed)):
        return type(translated)(f"migrating {where}: {translated}")
    # What translate advises about the rest ("run gangq migrate") does not help somebody who just did.
    return GangqError(f"migrating {where} failed, and nothing was changed: {str(error).strip()}")
