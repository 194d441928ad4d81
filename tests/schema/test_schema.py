"""Migrations: once, in order, in one transaction, by whoever comes first; and what does not fit is said."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dump import dump
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row

import gangq
from gangq import schema
from gangq.client import Client
from gangq.embedded import Server
from gangq.errors import Busy, DatabaseUnreachable, GangqError, InvalidInput, NotAllowed, SchemaMismatch

NEWEST = schema.migrations()[-1].name


def quietly(_: str) -> None:
    pass


def migrate(database: str) -> schema.MigrationReport:
    return schema.migrate(database, log=quietly)


def run(dsn: str, statement: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


# Doing it


def test_a_fresh_database_is_migrated_once_and_then_left_alone(empty_dsn: str) -> None:
    said: list[str] = []
    report = schema.migrate(empty_dsn, log=said.append)
    assert report == schema.MigrationReport(tuple(f.name for f in schema.migrations()), True, False)
    assert said[0] == "applied migration 0001_foundation"
    assert dict(run(empty_dsn, "select name, checksum from gangq.migrations")) == {
        **{file.name: file.checksum for file in schema.migrations()},
        "code": schema.code_checksum(),
    }
    said.clear()
    assert schema.migrate(empty_dsn, log=said.append) == schema.MigrationReport((), False, True)
    assert len(said) == 1
    assert f"is up to date ({NEWEST})" in said[0]


def test_after_a_dump_was_restored_nothing_is_numbered_as_something_was_that_the_dump_lacks(dsn: str) -> None:
    with Client(dsn) as client:
        worker = client.register_worker(name="w1", host="h1", queues=["default"], light=4)

        def numbers() -> tuple[int, int]:
            (job,) = client.submit(task="work")
            (claim,) = client.claim(incarnation=worker.incarnation)
            assert claim.job_id == job
            client.complete(job_ids=[job], tokens=[claim.token])
            return job, claim.token

        dumped = numbers()
        said: list[str] = []
        schema.migrate(dsn, restored=True, log=said.append)
        assert said[-1] == "ids and tokens go on above all that were given before"
        job, token = numbers()
    assert job - dumped[0] > 1 << 25, "so many ids may have been given after the dump"
    assert token - dumped[1] > 1 << 25 << 15


def test_it_takes_a_connection_too_and_leaves_its_settings_alone(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        before = conn.execute("show search_path").fetchone()
        assert schema.migrate(conn, log=quietly).applied
        assert conn.execute("show search_path").fetchone() == before
        assert schema.migrate(conn, log=quietly).already_current


def test_the_schema_is_the_one_that_is_checked_in(db: psycopg.Connection[Any]) -> None:
    """GANGQ_WRITE_SCHEMA=1 writes the file anew: a change of the schema is read there, line by line."""
    db.row_factory = tuple_row
    text = Path(__file__).with_name("schema.txt")
    if os.environ.get("GANGQ_WRITE_SCHEMA") == "1":
        text.write_text(dump(db))
    assert dump(db) == text.read_text()


def test_no_line_of_sql_is_wider_than_a_hundred_columns() -> None:
    wide = [
        f"{f.name}: {line}" for f in schema.sql_files() for line in f.text.splitlines() if len(line) > 100
    ]
    assert wide == []


def test_a_comment_right_above_or_beside_what_is_made_is_its_comment(empty_dsn: str, lib: Path) -> None:
    (lib / "200_more.sql").write_text(
        "-- Why it is so.\n--\n-- Internal. What it's\n-- for.\ncreate function gangq.made_so() returns int\n"
        "language sql as $$\n  -- Not this.\n  select 1;\n$$;\n-- Of 'em.\ncreate view gangq.seen as select 1;\n"
        "-- A pair.\ncreate type gangq.pair as (a int, b int);\n\n-- Of nothing.\n\n"
        "create function gangq.bare() returns int language sql as 'select 1';\n"
    )
    (lib / "migrations" / "0002_more.sql").write_text(
        "-- About nothing.\n\n-- Somebody's\n-- table.\ncreate table gangq.more (\n  -- Key.\n  id bigint,\n"
        "  -- About the rule below.\n  check (id > 0),\n  bare text,\n  said text -- It's said;\n"
        "    check (said <> ''),\n  last text default 'a -- b' -- Not 'it -- \n);\n"
        "-- About the index.\ncreate index on gangq.more (id);\n"
        "create domain gangq.beside as text; -- Beside.\n-- Above.\ncreate domain gangq.above as text\n"
        "  check (value <> '');\n-- Then.\ncreate domain gangq.later as text default 'a -- b' check (value <> '');\n"
        "-- Now.\nalter domain gangq.later drop constraint later_check;\n"
        "alter domain gangq.later add constraint later_check check (value <> '-');\n"
    )
    migrate(empty_dsn)
    about = (
        "select obj_description(c.oid), array(select col_description(c.oid, n) from generate_series(1, 4) n) "
    )
    more = run(empty_dsn, about + "from pg_class c where c.oid = 'gangq.more'::regclass")
    assert more == [("Somebody's table.", ["Key.", None, "It's said;", "Not 'it -- "])]
    domains = (
        "select obj_description('gangq.beside'::regtype), obj_description('gangq.above'::regtype), "
        "obj_description('gangq.later'::regtype)"
    )
    assert run(empty_dsn, domains) == [("Beside.", "Above.", "Now.")]
    code = (
        "select obj_description('gangq.made_so'::regproc), obj_description('gangq.seen'::regclass), "
        "obj_description('gangq.pair'::regtype), obj_description('gangq.bare'::regproc)"
    )
    assert run(empty_dsn, code) == [("Internal. What it's for.", "Of 'em.", "A pair.", None)]


def test_changed_code_is_rebuilt_and_data_stays(dsn: str, lib: Path) -> None:
    with Client(dsn) as client:
        (job,) = client.submit(task="t")
        assert schema.code_is_current(client)
        core = lib / "010_core.sql"
        core.write_text(
            core.read_text() + "\ncreate function gangq.extra() returns int language sql as 'select 7';\n"
        )
        assert not schema.code_is_current(client)
        assert migrate(dsn) == schema.MigrationReport((), True, False)
        assert schema.code_is_current(client)
        assert run(dsn, "select gangq.extra()") == [(7,)]
        core.write_text(core.read_text().replace("gangq.extra", "gangq.other"))
        assert migrate(dsn).code_rebuilt
        assert run(dsn, "select to_regproc('gangq.extra') is null, gangq.other()") == [(True, 7)]
        assert client.job(id=job).state == "pending"


def test_a_running_client_goes_on_across_a_rebuild_that_adds_columns(dsn: str, lib: Path) -> None:
    with Client(dsn, max_size=1) as client:
        (job,) = client.submit(task="t")
        for _ in range(8):  # prepared by now
            client.job(id=job)
            client.schema_version()
        views = lib / "137_queues.sql"
        views.write_text(
            views.read_text().replace(
                "create view gangq.queues as\nselect ", "create view gangq.queues as\nselect 1 as added, "
            )
        )
        assert migrate(dsn).code_rebuilt
        assert client.job(id=job).id == job
        assert client.queues()[0].name == "default"
        client.submit(task="t")


def test_a_migration_that_changes_a_column_a_view_reads_applies(dsn: str, lib: Path) -> None:
    (lib / "migrations" / "0099_wider.sql").write_text(
        "alter table gangq.queues_table alter max_attempts type integer;"
    )
    assert migrate(dsn) == schema.MigrationReport(("0099_wider",), True, False)
    assert run(dsn, "select gangq.schema_version()") == [("0099_wider",)]


def test_a_failing_file_changes_nothing_and_is_named(dsn: str, lib: Path) -> None:
    (lib / "migrations" / "0099_bad.sql").write_text("create table gangq.half (a int); select 1/0;")
    with pytest.raises(GangqError, match=r"0099_bad\.sql"):
        migrate(dsn)
    assert run(dsn, "select to_regclass('gangq.half') is null, gangq.schema_version()") == [(True, NEWEST)]


def _migrate_in_child(dsn: str, ready: Any, results: Any) -> None:
    ready.wait()
    results.put(migrate(dsn).applied)


@pytest.mark.slow
def test_processes_that_start_together_apply_each_migration_once(empty_dsn: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, results = spawn.Barrier(3), spawn.Queue()
    children = [spawn.Process(target=_migrate_in_child, args=(empty_dsn, ready, results)) for _ in range(3)]
    for child in children:
        child.start()
    applied = sorted(results.get(timeout=60) for _ in children)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert applied == [(), (), tuple(file.name for file in schema.migrations())]


def test_an_owner_that_is_no_superuser_migrates_as_the_readme_says(empty_dsn: str, server: Server) -> None:
    name = conninfo_to_dict(empty_dsn)["dbname"]
    owner, alice = f"owner_{name}", f"alice_{name}"
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        for statement in (
            f"create role {owner} login",
            f"create role {alice} login",
            f"alter database {name} owner to {owner}",
            f"revoke temporary on database {name} from public",
        ):
            admin.execute(statement.encode())
        for role in ("viewer", "submitter", "worker", "host", "admin"):
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                admin.execute(f"create role gangq_{role}".encode())
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            conn.execute(f"set session authorization {owner}".encode())
            assert schema.migrate(conn, log=lambda _: None).code_rebuilt
            assert schema.migrate(conn, log=lambda _: None).already_current
        admin.execute(f"grant gangq_submitter, gangq_worker to {alice}".encode())
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            conn.execute(f"set session authorization {alice}".encode())
            conn.execute("select gangq.submit('t')")
            conn.execute("select gangq.register_worker('w', 'h', '{default}')")
            assert conn.execute("select ran from gangq.tick(true)").fetchone() == (True,)
            assert conn.execute("select job_id from gangq.claim(1)").fetchone() == (1,)
            assert conn.execute("select count(*) from gangq.violations").fetchone() == (0,)
        owners = admin.execute(
            "select distinct pg_get_userbyid(p.proowner) from pg_proc p where p.pronamespace = 'gangq'::regnamespace"
        )
        assert owners.fetchall() == [(owner,)]
        admin.execute(f"alter database {name} owner to current_user".encode())
        admin.execute(f"reassign owned by {owner} to current_user".encode())
        admin.execute(f"drop owned by {owner}, {alice}".encode())
        admin.execute(f"drop role {owner}, {alice}".encode())


def test_a_table_in_use_makes_it_busy_and_not_wait_for_ever(
    dsn: str, lib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_WAIT_FOR_TABLE", "50ms")
    (lib / "migrations" / "0099_more.sql").write_text("alter table gangq.live_jobs add more integer;")
    with psycopg.connect(dsn) as other:
        other.execute("select count(*) from gangq.live_jobs")
        with pytest.raises(Busy):
            migrate(dsn)
    assert migrate(dsn).applied == ("0099_more",)


def test_it_gives_way_to_a_heartbeat_that_is_half_done(dsn: str, lib: Path) -> None:
    (lib / "migrations" / "0002_more.sql").write_text("alter table gangq.live_jobs add column more integer;")
    waits = "select exists (select 1 from pg_locks where relation is not null and not granted)"
    with (
        psycopg.connect(dsn) as worker,
        psycopg.connect(dsn, autocommit=True) as watcher,
        ThreadPoolExecutor() as threads,
    ):
        worker.execute("update gangq.leases set renewed_at = renewed_at")
        migration = threads.submit(migrate, dsn)
        while watcher.execute(waits).fetchone() != (True,):
            assert not migration.done()
        assert worker.execute("select id from gangq.live_jobs").fetchall() == []
        worker.commit()
        assert migration.result().applied == ("0002_more",)


def test_who_holds_the_lock_of_migrations_is_waited_for_and_named(
    dsn: str, lib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_WAIT_FOR_MIGRATION", "100ms")
    (lib / "migrations" / "0099_more.sql").write_text("alter table gangq.live_jobs add more integer;")
    said: list[str] = []
    with psycopg.connect(dsn, application_name="a stranger") as other:
        other.execute("select pg_advisory_lock(%s)", (0x67616E6771,))
        who = rf"pid {other.info.backend_pid} \(login {other.info.user}, application a stranger\)"
        with pytest.raises(Busy, match=f"{who} has held the lock of migrations for 100ms"):
            schema.migrate(dsn, log=said.append)
    assert re.match(who, said[0])
    assert migrate(dsn).applied == ("0099_more",)


# Refusing it


def test_an_applied_migration_that_changed_is_refused_by_name(dsn: str, lib: Path) -> None:
    file = lib / "migrations" / "0001_foundation.sql"
    file.write_text(file.read_text() + "-- a word more\n")
    with pytest.raises(
        SchemaMismatch, match=r"0001_foundation was applied .* an applied migration never changes"
    ):
        migrate(dsn)


def test_a_checkout_with_other_line_ends_has_the_same_checksums(lib: Path) -> None:
    before = schema.sql_files()
    for path in lib.rglob("*.sql"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert schema.sql_files() == before


def test_a_database_newer_than_the_library_is_refused_both_ways(dsn: str) -> None:
    run(dsn, "insert into gangq.migrations (name, checksum) values ('9999_future', 'x')")
    with pytest.raises(SchemaMismatch, match=r"9999_future.*upgrade gangq here"):
        migrate(dsn)
    with (
        Client(dsn) as client,
        pytest.raises(SchemaMismatch, match=r"9999_future, newer than this library.*upgrade"),
    ):
        schema.check_version(client)


def test_a_database_older_than_the_library_is_told_to_migrate(dsn: str, lib: Path) -> None:
    (lib / "migrations" / "0099_more.sql").write_text("select 1;")
    with Client(dsn) as client:
        with pytest.raises(SchemaMismatch, match=r"older than this library.*0099_more.*run `gangq migrate`"):
            schema.check_version(client)
        migrate(dsn)
        schema.check_version(client)


def test_a_database_without_the_schema_is_told_to_migrate(empty_dsn: str) -> None:
    with (
        Client(empty_dsn) as client,
        pytest.raises(SchemaMismatch, match=r"has no gangq schema.*run `gangq migrate`"),
    ):
        schema.check_version(client)


def test_a_login_without_a_role_is_told_what_to_have_granted(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("create role stranger login")
    try:
        with Client(dsn, user="stranger") as client, pytest.raises(NotAllowed, match="grant gangq_worker"):
            schema.check_version(client)
        with pytest.raises(
            NotAllowed, match="belongs to postgres and this login is stranger: migrate as postgres"
        ):
            migrate(dsn.replace("postgres@", "stranger@"))
    finally:
        db.execute("drop role stranger")


def test_what_a_superuser_migrates_belongs_to_the_schemas_owner(empty_dsn: str, lib: Path) -> None:
    run(empty_dsn, "create role keeper login createrole")
    try:
        run(
            empty_dsn,
            "grant create on database "
            + psycopg.conninfo.conninfo_to_dict(empty_dsn)["dbname"]
            + " to keeper",
        )
        migrate(empty_dsn.replace("postgres@", "keeper@"))
        (lib / "migrations" / "0099_more.sql").write_text("create table gangq.more (a int);")
        core = lib / "010_core.sql"
        core.write_text(core.read_text() + "\n-- changed\n")
        assert migrate(empty_dsn).code_rebuilt
        owners = run(
            empty_dsn,
            "select distinct proowner::regrole::text from pg_proc where pronamespace = "
            "'gangq'::regnamespace union select distinct relowner::regrole::text from pg_class where "
            "relnamespace = 'gangq'::regnamespace",
        )
        assert owners == [("keeper",)]
    finally:
        run(empty_dsn, "drop owned by keeper cascade; drop role keeper")


@pytest.mark.parametrize(("may", "who"), [("createrole", "keeper"), ("", "keeper"), ("", "postgres")])
def test_the_owner_reads_and_works_and_is_made_an_admin_where_it_may_be(
    empty_dsn: str, template: str, may: str, who: str
) -> None:
    """By itself, where it may grant; by a superuser who migrates for it; else the command is said."""
    del template  # with it the server has the roles, as another database's installation left them
    run(empty_dsn, f"create role keeper login {may}")
    try:
        name = psycopg.conninfo.conninfo_to_dict(empty_dsn)["dbname"]
        run(empty_dsn, f"grant create on database {name} to keeper")
        if may and run(empty_dsn, "select current_setting('server_version_num')::integer >= 160000") == [
            (True,)
        ]:
            # As whoever created the role has it there.
            run(empty_dsn, "grant gangq_admin to keeper with admin true, inherit false, set false")
        keeper = empty_dsn.replace("postgres@", "keeper@")
        said: list[str] = []
        if who == "postgres":
            migrate(keeper)
            said.clear()
        schema.migrate(empty_dsn.replace("postgres@", f"{who}@"), log=said.append)
        told = "\n".join(said)
        admin = run(empty_dsn, "select pg_has_role('keeper', 'gangq_admin', 'usage')") == [(True,)]
        if may or who == "postgres":
            assert (admin, "granted gangq_admin to" in told) == (True, True)
        else:
            assert (admin, 'have an administrator run: grant gangq_admin to "keeper"' in told) == (
                False,
                True,
            )
        with Client(keeper) as client:
            (job,) = client.submit(task="work", payloads=[{"n": 1}])
            assert client.job(id=job).payload == {"n": 1}
        with psycopg.connect(empty_dsn, autocommit=True) as other:
            other.execute("select gangq.submit('work', payloads => array['{\"n\": 2}']::jsonb[])")
        with Client(keeper) as client:
            assert [found.payload for found in client.jobs()] == [{"n": 2}, {"n": 1}], (
                "also what others submitted"
            )
            client.cancel(job_ids=[found.id for found in client.jobs()])
    finally:
        run(empty_dsn, "drop owned by keeper cascade; drop role keeper")


@pytest.mark.parametrize(
    "mine",
    ["create view public.mine as select id from gangq.jobs", "create view public.mine as select gangq.now()"],
)
def test_objects_of_others_that_depend_on_the_code_are_named(dsn: str, lib: Path, mine: str) -> None:
    run(dsn, mine)
    core = lib / "010_core.sql"
    core.write_text(core.read_text() + "\n-- changed\n")
    with pytest.raises(SchemaMismatch, match=r"view (public\.)?mine depends on"):
        migrate(dsn)
    assert run(dsn, "select count(*) from public.mine")[0][0] in (0, 1)


def test_a_schema_gangq_of_somebody_else_is_left_alone(empty_dsn: str) -> None:
    run(empty_dsn, "create schema gangq; create table gangq.treasure (a int)")
    with pytest.raises(SchemaMismatch, match=r"without a table gangq\.migrations"):
        migrate(empty_dsn)
    assert run(empty_dsn, "select * from gangq.treasure") == []


def test_a_database_that_is_not_there_or_not_an_address_is_a_typed_error() -> None:
    with pytest.raises(DatabaseUnreachable, match=r"database x at 127\.0\.0\.1:9 as u"):
        migrate("postgresql://u:hush@127.0.0.1:9/x")
    with pytest.raises(InvalidInput):
        migrate("no address")


# Printing it

_CATALOG = {
    "functions": "select pg_get_functiondef(p.oid), p.proacl::text, obj_description(p.oid, 'pg_proc'), "
    "p.proowner::regrole::text from pg_proc p where pronamespace = 'gangq'::regnamespace order by "
    "p.proname, 1",
    # The default privileges may be stored as null or spelled out.
    "relations": "select c.relname, c.relkind, coalesce(c.relacl, acldefault("
    "(case relkind when 'S' then 's' else 'r' end)::\"char\", relowner))::text, c.reloptions::text, "
    "obj_description(c.oid, 'pg_class'), case when relkind = 'v' then pg_get_viewdef(c.oid) end, "
    "pg_get_expr(c.relpartbound, c.oid) from pg_class c "
    "where relnamespace = 'gangq'::regnamespace order by 1",
    "columns": "select c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, "
    "a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum) "
    "from pg_attribute a join pg_class c on c.oid = a.attrelid left join pg_attrdef d on d.adrelid = c.oid "
    "and d.adnum = a.attnum where c.relnamespace = 'gangq'::regnamespace and a.attnum > 0 order by 1, 2",
    "constraints": "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint "
    "where connamespace = 'gangq'::regnamespace order by 1, 2",
    "indexes": "select indexname, indexdef from pg_indexes where schemaname = 'gangq' order by 1",
    "triggers": "select pg_get_triggerdef(oid) from pg_trigger where not tgisinternal and tgrelid in "
    "(select oid from pg_class where relnamespace = 'gangq'::regnamespace) order by 1",
    "schema": "select nspacl::text, obj_description(oid, 'pg_namespace') from pg_namespace "
    "where nspname = 'gangq'",
    "migrations": "select name, checksum from gangq.migrations order by 1",
}


def catalog(dsn: str) -> dict[str, list[Any]]:
    return {what: run(dsn, statement) for what, statement in _CATALOG.items()}


@pytest.fixture
def second_dsn(server: Server) -> Iterator[str]:
    yield server.create_database("second")
    server.drop_database("second")


def psql(server: Server, dsn: str, script: str) -> subprocess.CompletedProcess[str]:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    argv = [*server.psql_argv(str(name)), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-"]
    return subprocess.run(argv, input=script, capture_output=True, text=True, timeout=60)


def test_the_printed_script_makes_the_same_schema_and_migrate_agrees(
    server: Server, empty_dsn: str, second_dsn: str
) -> None:
    done = psql(server, empty_dsn, schema.dump_sql())
    assert (done.returncode, done.stderr) == (0, "")
    migrate(second_dsn)
    printed, migrated = catalog(empty_dsn), catalog(second_dsn)
    for what in _CATALOG:
        assert printed[what] == migrated[what], what
        assert printed[what]
    assert migrate(empty_dsn).already_current


def test_the_printed_script_changes_nothing_where_the_schema_exists(server: Server, dsn: str) -> None:
    before = catalog(dsn)
    done = psql(server, dsn, schema.dump_sql())
    assert done.returncode != 0
    assert 'schema "gangq" already exists' in done.stderr
    assert catalog(dsn) == before


def test_a_schema_that_was_rebuilt_equals_a_fresh_one(dsn: str, second_dsn: str, lib: Path) -> None:
    run(dsn, "update gangq.migrations set checksum = 'another' where name = 'code'")
    assert migrate(dsn).code_rebuilt
    migrate(second_dsn)
    assert catalog(dsn) == catalog(second_dsn)


# The package


def test_every_public_name_is_there_and_the_version_is_the_distributions() -> None:
    assert all(hasattr(gangq, name) for name in gangq.__all__)
    assert sorted(gangq.__all__) == list(gangq.__all__)
    assert re.fullmatch(r"\d+\.\d+.*", gangq.__version__)


def test_importing_gangq_loads_neither_the_worker_nor_the_command_line() -> None:
    heavy = ("gangq.worker", "gangq.cli.", "gangq.gpu", "click", "rich")
    code = f"import sys, gangq; print([m for m in sys.modules if (m + '.').startswith({heavy!r})])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_database_that_is_not_utf8_is_refused_before_anything_is_made(server: Server) -> None:
    server.create_database("plain")
    with psycopg.connect(server.dsn("plain"), autocommit=True) as conn:
        conn.execute(
            "create database ascii encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'"
        )
    try:
        with pytest.raises(SchemaMismatch, match=r"encoding SQL_ASCII.*UTF8"):
            schema.migrate(server.dsn("ascii"), log=lambda _: None)
    finally:
        server.drop_database("ascii")
        server.drop_database("plain")


@pytest.mark.slow
def test_what_is_rolled_back_is_not_said_to_be_applied() -> None:
    with Server.temporary() as server:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            conn.execute("create role jobs login")
            conn.execute("create database jobs owner jobs")
        said: list[str] = []
        with pytest.raises(NotAllowed, match="create role gangq_viewer"):
            schema.migrate(make_conninfo(server.dsn("jobs"), user="jobs"), log=said.append)
        assert said == []


@pytest.mark.slow
def test_the_manuals_recipe_for_an_owner_works_and_only_missing_roles_are_asked_for() -> None:
    page = (Path(__file__).parents[2] / "docs/manual/operating.md").read_text()
    (recipe,) = re.findall(r"```sql\n(create role gangq_owner .*?)```", page, re.DOTALL)
    with Server.temporary() as server, psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        for login in ("alice", "worker1", "hurried"):
            admin.execute(f"create role {login} login")
        admin.execute("create role gangq_viewer")
        admin.execute("create database early owner hurried")
        with pytest.raises(
            NotAllowed, match=r"run: create role gangq_submitter; .*create role gangq_admin;$"
        ):
            schema.migrate(make_conninfo(server.dsn("early"), user="hurried"), log=lambda _: None)
        admin.execute("drop role gangq_viewer")
        for statement in recipe.split(";"):
            admin.execute(statement)
        schema.migrate(make_conninfo(server.dsn("jobs"), user="gangq_owner"), log=lambda _: None)


def test_every_column_max_trips_says_that_the_next_one_ends_it(
    db: psycopg.Connection[dict[str, Any]],
) -> None:
    said = db.execute("""
        select a.attrelid::regclass::text as of, coalesce(col_description(a.attrelid, a.attnum), '') as said
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where a.attname = 'max_trips' and c.relnamespace = 'gangq'::regnamespace
          and c.relkind in ('r', 'p', 'v') and not c.relispartition
    """).fetchall()
    found = {row["of"]: row["said"] for row in said}
    assert {"gangq.task_options", "gangq.live_gangs", "gangq.live_jobs", "gangq.queues"} <= set(found)
    wrong = {of: text for of, text in found.items() if "are sent back; the next one end" not in text}
    assert wrong == {}
