"""A function that runs as the owner never takes a caller's types, functions, operators or tables for PostgreSQL's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from sql.drive import INVALID, Q

ROLES = ("gangq_viewer", "gangq_submitter", "gangq_worker", "gangq_host", "gangq_notifier", "gangq_admin")
TYPES = (
    "text",
    "jsonb",
    "timestamptz",
    "uuid",
    "regclass",
    "tid",
    "xid8",
    "bytea",
    "date",
    "int4",
    "int8",
    "float8",
    "name",
)
OPERANDS = (*TYPES, "int2", "numeric", "float4", "bool", "interval", "oid")
OPERATORS = (
    "=",
    "<>",
    "<",
    "<=",
    ">",
    ">=",
    "+",
    "-",
    "*",
    "||",
    "->",
    "->>",
    "<@",
    "@>",
    "@?",
    "?",
    "~",
    "&&",
    "&",
)
SECRET = "hunter2"
# What the functions and views of the schema are made of.
SOURCES = (
    "select string_agg(coalesce(p.prosrc, '') || coalesce(pg_get_function_sqlbody(p.oid), ''), ' ') || ' ' || "
    "(select string_agg(pg_get_viewdef(c.oid), ' ') from pg_class c where c.relnamespace = 'gangq'::regnamespace "
    "and c.relkind = 'v') from pg_proc p where p.pronamespace = 'gangq'::regnamespace"
)


# What arguments with a default may be.
NEEDS = (
    '"memory_mb": 1, "cpus": 0.5, "labels": {"a": "b"}, "selector": [{"key": "gpu", "op": "exists"}], '
    '"tolerates": ["x"], "model": "m", "limit_key": "k", "limit": 2, "rate": "10/1m", "max_attempts": 2, '
    '"wait_for_hardware": true'
)
OPTIONAL = {
    "submit.options": f"""'{{{NEEDS}, "name": "b", "tags": ["t"], "budget_s": 60}}'""",
    "submit_gang.options": f"""'{{{NEEDS}, "require": "host", "strategy": "pack", "failure_policy": "fail"}}'""",
    "submit_unique.options": f"'{{{NEEDS}}}'",
    "submit_unique_gang.options": f"'{{{NEEDS}}}'",
    "register_worker.options": """'{"labels": {"a": "b"}, "task_options": {"t": {"cpus": 1}}, "taints": ["x"]}'""",
    "set_queue.settings": """'{"maximum": {"gpus": 8}, "rate": "9/1m", "ceilings": {"gangq_worker": 5}}'""",
    "set_task.settings": """'{"budget_s": 60, "notify_only": ["stall"]}'""",
    "set_service.work": """'{"cpus": 1}'""",
    "set_schedule.work": """'{"cpus": 1}'""",
    "apply.decisions": """'[{"ask": "g1", "action": "wait", "refused": [{"gate": "capacity", "numbers": {}}]}]'""",
    "cordon.host": None, "uncordon.host": None, "quarantine.worker": None, "unquarantine.worker": None,
    "preview.changes": "'[]'", "plans": "'[]'", "target": "'oncall'", "kinds text[]": "array['trip']",
    "submit_unique_gang.unique_key": "'of a gang'", "settings jsonb": "'{}'",
    "devices jsonb": """'[{"uuid": "G9", "index": 0, "vram_mb": 9}]'""",
    "devices text[]": "array['G9']", "evidence jsonb": """'{"by": "me", "stack": "s"}'""",
    "beats jsonb[]": """array['{"step": 1}']""", "readings": """'[{"uuid": "G9"}]'""", "device_uuid": "'G9'",
    "since interval": "'1 day'", "since timestamp with time zone": "'2020-01-01'", "until": "'2100-01-01'",
    "due_at": "'2100-01-01'", "deadline": "'2100-01-01'", "ends_by": "'2100-01-01'", "cron": "'0 3 * * *'",
    "tz": "'UTC'", "unique_key": "'u'", "keep_s": 9, "key": "'k'", "most": 7, "rate": "'5/1m'", "queue": "'default'",
    "gang_ids": "array[1]", "gpus": 0, "cpus": 1, "memory_mb": 9, "slots": 2, "model": "'m'", "max_jobs": 1,
    "ports": "array[4000]", "request_id": "'00000000-0000-0000-0000-000000000001'", "reason": "'why'",
    "results": """array['{"r": 1}']""", "payloads": """array['{"n": 1}', '{"n": 2}']""", "ready": "true",
    "load": 0.5, "retry_in_s": 5, "replicas": 1, "drain": "true", "by": "array['queue']", "source": "'here'",
    "names": "array['n']", "for_s": 5, "lease_s": 30, "seen": """'{"digest": "d", "asked": 1}'""", "pass": 1,
}  # fmt: skip


class Attacker:
    """A login with one role and a schema of its own, where everything has the name of something of PostgreSQL's."""

    def __init__(self, q: Q, role: str) -> None:
        self.q = q
        self.db = psycopg.connect(q.db.info.dsn, autocommit=True, row_factory=dict_row)
        self.name = f"attacker_{role}_{self.db.info.backend_pid}"
        q.sql(f"create role {self.name} login; grant {role} to {self.name}")
        q.sql(f"create schema evil authorization {self.name}")
        # Sequences count also what is rolled back.
        q.sql(
            "create sequence evil.loot; grant usage on sequence evil.loot to public; "
            "grant usage on schema evil to public"
        )
        self.db.execute(f"set session authorization {self.name}")

    def close(self) -> None:
        # In its own session: another one would meet the server as it clears this one's pg_temp away.
        self.db.execute("reset session authorization")
        self.db.execute(f"drop owned by {self.name} cascade".encode())
        self.db.execute(f"drop role {self.name}".encode())
        self.db.close()

    @property
    def struck(self) -> int:
        """How often its code has run with somebody else's rights."""
        return int(self.q.value("select case when is_called then last_value else 0 end from evil.loot"))

    def attempt(self, statement: str) -> bool:
        try:
            self.db.execute(statement.encode())
        except psycopg.Error:
            return False
        return True

    def cast_shadows(self) -> None:
        """Types, functions, operators and tables, in its own schema and in pg_temp, all of which are found first."""
        functions = self.q.sql(
            "with used as (select distinct m[1] as name "
            f"from regexp_matches(({SOURCES}), '\\m([a-z_0-9]+)\\(', 'g') m) "
            "select p.proname as name, pg_get_function_identity_arguments(p.oid) as args, "
            "pg_get_function_result(p.oid) as result from pg_proc p join used u on u.name = p.proname "
            "where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.provariadic = 0"
        )
        operators = self.q.sql(
            "select o.oprname as name, o.oprleft::regtype as l, o.oprright::regtype as r, "
            "o.oprresult::regtype as result from pg_operator o where o.oprleft <> 0 "
            "and o.oprname = any (%(names)s) and o.oprleft = any (%(types)s::regtype[])",
            names=list(OPERATORS),
            types=list(OPERANDS),
        )
        self.db.execute("set search_path = pg_catalog")
        self.db.execute(
            "create function evil.strike() returns boolean language plpgsql as $$ begin "
            "if current_user operator(pg_catalog.<>) session_user then "
            "perform pg_catalog.nextval('evil.loot'::pg_catalog.regclass); end if; return true; end $$"
        )
        self.db.execute("grant execute on function evil.strike to public")
        made = 0
        for schema in ("evil", "pg_temp"):
            for each in functions:
                made += self.attempt(
                    f"create function {schema}.{each['name']}({each['args']}) returns {each['result']} "
                    f"language plpgsql as $$ begin perform evil.strike(); "
                    f"return{'' if 'SETOF' in each['result'] else ' null'}; end $$"
                )
            for n, each in enumerate(operators):
                made += self.attempt(
                    f"create function {schema}.op{n}({each['l']}, {each['r']}) returns {each['result']} "
                    "language plpgsql as $$ begin perform evil.strike(); return null; end $$"
                )
                made += self.attempt(
                    f"create operator {schema}.{each['name']} (leftarg = {each['l']}, rightarg = {each['r']}, "
                    f"function = {schema}.op{n})"
                )
            for relation in ("pg_class", "pg_roles", "pg_inherits", "pg_locks", "pg_stat_activity"):
                made += self.attempt(
                    f"create {'temp ' if schema == 'pg_temp' else ''}view "
                    f"{'' if schema == 'pg_temp' else 'evil.'}{relation} as select evil.strike() as oid"
                )
            for kind in TYPES:
                made += self.attempt(
                    f"create domain {schema}.{kind} as pg_catalog.{kind} check (evil.strike() or value is null)"
                )
        assert made > 300
        self.db.execute("set search_path = evil, pg_temp, pg_catalog")

    def calls(self, known: dict[str, Any]) -> Iterator[str]:
        """Two calls of every function that it may execute: with all arguments that are known, and with those needed.

        A value is known by verb and name, by name and type, or by name alone.
        """
        for row in self.q.sql(
            "select p.proname, array(select array[n.name, format_type(n.oid, null)] "
            "from unnest(p.proargnames[1:p.pronargs], p.proargtypes::oid[]) as n(name, oid) "
            "where n.name is not null) as args, "
            "p.pronargs - p.pronargdefaults as needed from pg_proc p "
            "where p.pronamespace = 'gangq'::regnamespace and p.prorettype <> 'trigger'::regtype "
            "and has_function_privilege(%(role)s, p.oid, 'execute') order by p.proname",
            role=self.name,
        ):
            given = []
            for nth, (name, kind) in enumerate(row["args"]):
                keys = (f"{row['proname']}.{name}", f"{name} {kind}", name)
                value = next((known[key] for key in keys if key in known), None)
                if value is not None or nth < row["needed"]:
                    cast = "" if kind.startswith("gangq.") else f"::pg_catalog.{_plain(kind)}"
                    given.append(f"{name} => {'null' if value is None else value}{cast}")
            for some in dict.fromkeys((tuple(given), tuple(given[: row["needed"]]))):
                yield f"select * from gangq.{row['proname']}({', '.join(some)})"

    def answers(self, statement: str) -> str:
        """What it is told, as JSON; an error's SQLSTATE."""
        try:
            rows = self.db.execute(statement.encode()).fetchall()
        except psycopg.Error as error:
            return f"{error.sqlstate}"
        return json.dumps(rows, default=str, sort_keys=True)


def _plain(kind: str) -> str:
    return {
        "timestamp with time zone": "timestamptz",
        "integer": "int4",
        "bigint": "int8",
        "real": "float4",
        "boolean": "bool",
        "double precision": "float8",
        "integer[]": "int4[]",
        "bigint[]": "int8[]",
        "smallint": "int2",
        "interval": "interval",
    }.get(kind, kind)


@pytest.fixture
def scene(q: Q) -> dict[str, Any]:
    """Work of all kinds, with a secret in it; what the arguments of the verbs may be."""
    worker = q.worker(slots=8)
    q.submit(count=6, payloads=[{"password": SECRET}] * 6)
    q.submit_gang(2, payload={"password": SECRET})
    done, failed, running, other = worker.claim(max_jobs=4)
    done.complete({"token": SECRET})
    error = {"type": "E", "message": "m", "traceback": SECRET}
    q.one("fail", job_id=failed.job_id, token=failed.token, error=error, retryable=False)
    q.tick()
    return {
        "job_id": running.job_id, "token": running.token, "incarnation": worker.incarnation, "gang_id": 1,
        "job_ids": f"array[{other.job_id}]", "tokens": f"array[{other.token}]", "task": "'work'", "name": "'w9'",
        "host": "'h9'", "queues": "array['default']", "worker": "'w1'", "priority": 3, "step": 1, "data": "'x'",
        "evidence": """'{"by": "me"}'""", "code": 76, "class": "'stall'", "error": """'{"type": "E"}'""",
        "payload": "'{}'",
        "shape_id": 1, "rank": 0, "size": 2, "gate": "'capacity'", "numbers": "'{}'",
        "incarnations": f"array[{worker.incarnation}]",
        **OPTIONAL,
        "chunks": "array['x']", "seqs": "array[1]", "device_class": "'gpu'", "longest_s": 1, "beats": 1, "port": 4000,
    }  # fmt: skip


@pytest.fixture
def attacker(q: Q, request: pytest.FixtureRequest) -> Iterator[Attacker]:
    made = Attacker(q, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("attacker", ROLES, indirect=True)
def test_no_name_of_the_callers_own_is_used_by_anything_that_runs_as_the_owner(
    q: Q, attacker: Attacker, scene: dict[str, Any]
) -> None:
    looks = [
        f"select * from gangq.{row['relname']}"
        for row in q.sql(
            "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace "
            "and c.relkind in ('v', 'r', 'p') and not c.relispartition "
            "and has_table_privilege(%(role)s, c.oid, 'select') order by 1",
            role=attacker.name,
        )
    ]
    calls = list(attacker.calls(scene))
    if attacker.name.startswith("attacker_gangq_notifier"):
        assert (len(looks), len(calls)) == (0, 5)
    else:
        assert len(looks) > 15
        assert len(calls) > 5
    before = [attacker.answers(look) for look in looks]
    attacker.cast_shadows()
    told = [attacker.answers(look) for look in looks]
    assert attacker.struck == 0
    for look, plain, shadowed in zip(looks, before, told, strict=True):
        assert shadowed == plain, look
    sense: dict[str, bool] = {}
    for call in calls:
        answer = attacker.answers(call)
        sense[call.split("(")[0]] = sense.get(call.split("(")[0], False) or answer != INVALID
        assert attacker.struck == 0, call
        if attacker.name.startswith("attacker_gangq_viewer"):
            assert SECRET not in answer, call
    assert [verb for verb, made in sense.items() if not made] == [], (
        "whose arguments made sense in neither call"
    )
    if attacker.name.startswith("attacker_gangq_viewer"):
        assert SECRET not in str(told)


@pytest.mark.parametrize("attacker", ["gangq_viewer"], indirect=True)
@pytest.mark.parametrize("path", ["''", "pg_temp, pg_catalog", "evil, pg_catalog, pg_temp"])
def test_the_attack_succeeds_where_one_function_is_not_pinned(
    q: Q, attacker: Attacker, scene: dict[str, Any], path: str
) -> None:
    q.sql(f"alter function gangq.explain_job set search_path = {path}")
    attacker.cast_shadows()
    attacker.answers(f"select * from gangq.explain_job(job_id => {scene['job_id']})")
    assert attacker.struck > 0
