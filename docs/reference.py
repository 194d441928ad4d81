"""A hook of mkdocs: the reference, made from the code and from a fresh schema whenever the manual is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from psycopg.rows import namedtuple_row

import gangq
from gangq import schema
from gangq.embedded import Server
from gangq.watchdogs.codes import ExitCode

_ROLES = """
  select r.rolname from pg_roles r
  where r.rolname like 'gangq\\_%' and has_function_privilege(r.oid, p.oid, 'execute') order by 1"""
_FUNCTIONS = f"""
  select p.proname as name, obj_description(p.oid, 'pg_proc') as said, array({_ROLES}) as roles,
    pg_get_function_arguments(p.oid) as arguments, pg_get_function_result(p.oid) as result
  from pg_proc p
  where p.pronamespace = 'gangq'::regnamespace and p.prorettype <> 'trigger'::regtype
    and exists ({_ROLES})
  order by 1"""  # noqa: S608
_COLUMNS = """
  select c.relname as of, obj_description(c.oid, 'pg_class') as of_said, a.attname as name,
    format_type(a.atttypid, a.atttypmod) as type, col_description(c.oid, a.attnum) as said,
    pg_get_expr(d.adbin, d.adrelid) as standard
  from pg_class c
  join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
  left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
  where c.relnamespace = 'gangq'::regnamespace and (c.relkind = 'v' or c.relname = any (%s))
  order by 1, a.attnum"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference to those of the manual."""
    with Server.temporary() as server:
        server.create_database("reference")
        dsn = server.dsn("reference")
        schema.migrate(dsn, log=lambda _: None)
        with psycopg.connect(dsn, row_factory=namedtuple_row) as db:
            pages = {
                "cli": "# Command line\n\n::: mkdocs-click\n    :module: gangq.cli\n    :command: main\n"
                "    :prog_name: gangq\n    :depth: 1\n    :style: table\n",
                "python": _page("Python", _python()),
                "sql": _page("SQL", _sql(db)),
                "settings": _page("Settings", _settings(db)),
                "exit-codes": _page("Exit codes of a worker", _exit_codes()),
            }
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _page(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", *lines, ""])


def _table(head: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|" + " --- |" * (head.count("|") + 1)
    for row in rows:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"
    yield ""


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _python() -> Iterator[str]:
    options = (
        "    options:\n      heading_level: 2\n      inherited_members: true\n      show_source: false\n"
    )
    for name in gangq.__all__:
        yield f"::: {getattr(gangq, name).__module__}.{name}\n{options}"


def _sql(db: psycopg.Connection[Any]) -> Iterator[str]:
    yield "In psql: `\\df+ gangq.*` and `\\dv+ gangq.*`. Every function is listed with the roles that may call it.\n"
    yield "## Functions\n"
    for function in db.execute(_FUNCTIONS):
        yield f"### {function.name}\n\n```sql\n{function.name}({function.arguments}) returns {function.result}\n```\n"
        yield f"{function.said or ''}\n\nMay call it: {', '.join(function.roles)}.\n"
    yield "## Views\n"
    yield from _relations(db, [])


def _relations(db: psycopg.Connection[Any], tables: list[str]) -> Iterator[str]:
    of = None
    for column in db.execute(_COLUMNS, [tables]):
        if tables and column.of not in tables:
            continue
        if column.of != of:
            of = column.of
            yield f"\n### {of}\n\n{column.of_said or ''}\n\n| column | type | default | |\n| --- | --- | --- | --- |"
        yield f"| {' | '.join(_cell(cell) for cell in (column.name, column.type, column.standard, column.said))} |"


def _settings(db: psycopg.Connection[Any]) -> Iterator[str]:
    yield "Of all: `select gangq.configure('{\"lease_s\": 300}')`."
    yield "Of a queue: `gangq queue set`. Of a task: `gangq task set`."
    yield from _relations(db, ["settings", "queues", "task_settings"])


def _exit_codes() -> Iterator[str]:
    yield from _table(
        "code | word | meaning | started again",
        ((int(code), code.word, code.meaning, "yes" if code.restart else "never") for code in ExitCode),
    )
