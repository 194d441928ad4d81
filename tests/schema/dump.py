"""The whole schema as text, a line for each domain, column, constraint, index, view, type and function."""

from __future__ import annotations

from typing import Any

import psycopg

_TABLES = """
select c.oid, c.relname as name, coalesce(' partition of ' || i.inhparent::regclass, '')
    || coalesce(' by ' || pg_get_partkeydef(c.oid), '')
    || coalesce(' with ' || array_to_string(c.reloptions, ' '), '') as rest
from pg_class c left join pg_inherits i on i.inhrelid = c.oid
where c.relnamespace = 'gangq'::regnamespace and c.relkind in ('r', 'p') and c.relname !~ '_[0-9]{8}$'
order by c.relname
"""
_COLUMNS = """
select a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || case when a.attnotnull then ' not null' else '' end
    || case when a.attidentity <> '' then ' identity'
      when a.attgenerated <> '' then ' generated ' || pg_get_expr(d.adbin, d.adrelid)
      when d.oid is not null then ' default ' || pg_get_expr(d.adbin, d.adrelid) else '' end
from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %s and a.attnum > 0 and not a.attisdropped order by a.attname
"""
_RULES = """
select pg_get_constraintdef(oid) from pg_constraint
where conrelid = %s and contype in ('c', 'p', 'u', 'f') and conparentid = 0
union all
select regexp_replace(pg_get_indexdef(x.indexrelid), ' ON (ONLY )?gangq\\.\\w+ USING', '') from pg_index x
where x.indrelid = %s
  and not exists (select from pg_constraint k where k.conindid = x.indexrelid and k.contype in ('p', 'u'))
  and not exists (select from pg_inherits i where i.inhrelid = x.indexrelid)
order by 1
"""
_TRIGGERS = """
select regexp_replace(pg_get_triggerdef(oid),
  'CREATE (.*) ON gangq.* FOR EACH (ROW|STATEMENT) (WHEN .* )?EXECUTE FUNCTION', '\\1 \\2 \\3')
from pg_trigger where tgrelid = %s and not tgisinternal and tgparentid = 0 order by 1
"""
_VIEWS = """
select c.relname as name,
  string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', ' order by a.attnum) as columns
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'v' group by c.relname order by c.relname
"""
_TYPES = """
select c.relname as name,
  string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', ' order by a.attnum) as columns
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'c' group by c.relname order by c.relname
"""
_DOMAINS = """
select t.typname || ' ' || format_type(t.typbasetype, t.typtypmod) || ' ' || pg_get_constraintdef(c.oid)
from pg_type t join pg_constraint c on c.contypid = t.oid
where t.typnamespace = 'gangq'::regnamespace order by 1
"""
_FUNCTIONS = """
select p.proname || '(' || pg_get_function_arguments(p.oid) || ')' as name,
  coalesce(pg_get_function_result(p.oid), '') as result,
  l.lanname || case p.provolatile when 'i' then ' immutable' when 's' then ' stable' else '' end
    || case when p.prosecdef then ' definer' else '' end
    || coalesce(' set ' || (select string_agg(x, '; ' order by x) from unnest(p.proconfig) x), '')
    || coalesce(' for ' || (select string_agg(g.grantee::regrole::text, ', ' order by g.grantee::regrole::text)
      from aclexplode(p.proacl) g where g.grantee::regrole::text ~ '^gangq_'), '') as how
from pg_proc p join pg_language l on l.oid = p.prolang where p.pronamespace = 'gangq'::regnamespace order by 1
"""


def dump(conn: psycopg.Connection[Any]) -> str:
    """Return schema `gangq` of this database as text, the same for every major of PostgreSQL."""

    def rows(query: str, *args: object) -> list[tuple[Any, ...]]:
        return conn.execute(query, args).fetchall()

    out = [f"domain {line}" for (line,) in rows(_DOMAINS)]
    for oid, name, rest in rows(_TABLES):
        out.append(f"table {name}{rest}")
        if " partition of " in rest:
            continue
        out += [f"  {line}" for (line,) in rows(_COLUMNS, oid)]
        out += [f"  {line}" for (line,) in [*rows(_RULES, oid, oid), *rows(_TRIGGERS, oid)]]
    for name, columns in rows(_VIEWS):
        out.append(f"view {name}: {columns}")
    for name, columns in rows(_TYPES):
        out.append(f"type {name}: {columns}")
    for name, result, how in rows(_FUNCTIONS):
        out += [f"function {name}", f"  {result}", f"  {how}"]
    return "\n".join(out) + "\n"
