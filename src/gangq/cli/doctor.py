"""gangq doctor: is this installation well, and if not, what to do."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gangq.cli import checks, output, queries
from gangq.cli.checks import Finding, fail, ok, some, warn
from gangq.cli.options import look_options
from gangq.cli.output import seconds
from gangq.cli.session import Session
from gangq.client.verbs import Verbs
from gangq.errors import EmbeddedError, GangqError, NotAllowed, SchemaMismatch

if TYPE_CHECKING:
    from gangq.client import Client

_LISTEN_S = 3.0
_SKEW_S = 1.0
_SNAPSHOT_S = 300.0
_SNAPSHOT_BAD_S = 3600.0
_RULES_S = 30.0
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@look_options
def doctor(session: Session) -> None:
    """Check this installation.

    The database, the schema, the workers and the devices; exit code 1 when anything has failed. With --json
    one object per check: {"check", "status", "detail", "advice", "numbers"}; status is ok, warn or fail, numbers
    are the rows of gangq.retention, else null.
    """
    if session.given_dsn is None:
        session.dsn()  # What says how to name one.
    failed = False
    for check, found in examine(session):
        failed = failed or found.status == "fail"
        mark = output.coloured(found.status.ljust(4), _COLOURS[found.status])
        told = output.wrapped(found.detail, 18, 18)
        advice = f"\n{' ' * 18}-> {output.wrapped(found.advice, 21, 21)}" if found.advice else ""
        session.answer({"check": check, **found._asdict()}, mark, f"  {check.ljust(10)}  {told}{advice}")
    if failed:
        click.get_current_context().exit(1)


def examine(session: Session) -> Iterator[tuple[str, Finding]]:
    """All checks, in order; those that need what has failed are left out."""
    try:
        client = session.client(checked=session.private)
        client.execute(queries.server_facts())
    except GangqError as e:
        advice = "see the private server's log, or name a database: --dsn or GANGQ_DSN"
        yield "database", fail(str(e), advice if isinstance(e, EmbeddedError) else "")
        return
    yield "database", ok(f"reached {client.target}")
    yield from _made(client, _OF_THE_SERVER, "")
    from gangq import schema

    try:
        schema.check_version(client)
    except (SchemaMismatch, NotAllowed) as e:
        yield "schema", fail(str(e))
        return
    yield "schema", ok(f"{client.schema_version()}, as this library wants it")
    yield from _made(client, _OF_THE_INSTALLATION, "run gangq doctor as gangq_admin to see all")


def _made(
    client: Client, named: Mapping[str, Callable[[Client], Finding]], advice: str
) -> Iterator[tuple[str, Finding]]:
    for name, check in named.items():
        try:
            yield name, check(client)
        except GangqError as e:
            yield name, warn(str(e), advice)


def _server(client: Client) -> Finding:
    from gangq.embedded import MAJORS

    facts = client.execute(queries.server_facts())
    version, major = facts["version"], facts["major"]
    supported = f"{MAJORS[0]} to {MAJORS[-1]}"
    if major < MAJORS[0]:
        return fail(f"PostgreSQL {version}", f"gangq needs PostgreSQL {supported}: upgrade the server")
    if major > MAJORS[-1] and not facts["standby"]:
        return warn(f"PostgreSQL {version}", f"gangq is tested with {supported}; look for a newer gangq")
    if facts["standby"]:
        advice = "name the primary in the DSN, or all hosts of the cluster"
        return fail(f"PostgreSQL {version} is a standby", advice)
    return ok(f"PostgreSQL {version}")


def _clock(client: Client) -> Finding:
    before = time.time()
    at = client.execute(queries.server_facts())["at"].timestamp()
    after = time.time()
    skew = at - (before + after) / 2
    # Half the round trip is what this measurement cannot know.
    if abs(skew) - (after - before) / 2 <= _SKEW_S:
        return ok(f"this host and the database agree within {_SKEW_S:g} s")
    way = "ahead of" if skew > 0 else "behind"
    return warn(
        f"the database's clock is {seconds(abs(skew))} {way} this host's",
        "no decision compares the two, but times shown here mislead: run NTP on both",
    )


def _notify_queue(client: Client) -> Finding:
    usage = client.execute(queries.server_facts())["notify_usage"]
    detail = f"notification queue {usage:.1%} full"
    if usage < 0.1:
        return ok(detail)
    advice = (
        "a session that listens has been in a transaction for long; end it (select * from pg_stat_activity "
        "order by xact_start). When the queue is full, every commit that notifies fails"
    )
    return Finding("fail" if usage > 0.5 else "warn", detail, advice)


def _listens(client: Client) -> Finding:
    """Listen on one connection, notify on another: a pooler in transaction mode loses it in between."""
    channel = f"gangq_doctor_{uuid.uuid4().hex[:12]}"
    with client.connect_listener() as listener:
        listener.execute(f"listen {channel}".encode())
        with client.connection("notify") as other:
            other.execute("select pg_notify(%s, '')", (channel,))
        if any(True for _ in listener.notifies(timeout=_LISTEN_S, stop_after=1)):
            return ok("notifications arrive")
        listener.execute("unlisten *")
    return warn(
        f"a notification did not arrive within {_LISTEN_S:g} s",
        "PgBouncer in transaction mode swallows LISTEN: give workers and gangq tick a direct or session-mode DSN. "
        "Without it they poll. Statement mode does not work: migrations and other transactions fail in it",
    )


def _horizon(client: Client) -> Finding:
    oldest = client.execute(queries.oldest_snapshot())
    if oldest is None or oldest["age_s"] < _SNAPSHOT_S:
        return ok(f"no transaction holds back vacuum for more than {seconds(_SNAPSHOT_S)}")
    return Finding(
        "fail" if oldest["age_s"] > _SNAPSHOT_BAD_S else "warn",
        f"{oldest['who']} has held back vacuum for {seconds(oldest['age_s'])}",
        "end it (select pg_terminate_backend(PID), or rollback prepared): until then dead rows pile up in "
        "the hot tables",
    )


def _code(client: Client) -> Finding:
    from gangq import schema

    if schema.code_is_current(client):
        return ok("functions and views are this library's")
    return warn(
        "functions and views are of another release",
        "fine during a rolling upgrade; otherwise run gangq migrate as the schema's owner",
    )


def _roles(client: Client) -> Finding:
    facts = client.execute(queries.server_facts())
    roles = facts["roles"]
    if roles:
        return ok(f"{facts['login']} may act as {', '.join(roles)}")
    return fail(
        f"{facts['login']} holds no role of gangq",
        f"have the owner run: grant gangq_worker to {facts['login']} (or gangq_submitter, gangq_viewer, "
        "gangq_admin)",
    )


def _tick(client: Client) -> Finding:
    last = client.execute(queries.last_tick())
    age, limit = last["age_s"], max(10.0, 10 * last["tick_s"])
    if age is not None and age <= limit:
        return ok(f"the last tick was {seconds(max(0.0, age))} ago")
    live = [w for w in client.workers() if w.state in ("live", "draining")]
    detail = "no tick has ever run" if age is None else f"the last tick was {seconds(age)} ago"
    holder = client.execute(queries.tick_holder())
    if holder is not None:
        since = "" if holder["held_s"] is None else f" for {seconds(holder['held_s'])}"
        end = (
            "rollback prepared" if holder["pid"] is None else f"select pg_terminate_backend({holder['pid']})"
        )
        return fail(
            f"{detail}, and {holder['who']} has held a tick open{since}",
            f"nothing is placed, freed or promoted until that transaction ends: {end}",
        )
    if live:
        return fail(
            f"{detail}, and there are live workers: {len(live)}",
            "look at the workers' logs; until one ticks, nothing is placed or freed: run gangq tick --loop "
            "meanwhile",
        )
    return warn(f"{detail}, and no worker is live", "start a worker, or run gangq tick --loop")


def _invariants(client: Client) -> Finding:
    from psycopg.errors import QueryCanceled

    # Every live job is held against every rule.
    try:
        with client.connection("gangq.violations") as conn, conn.transaction():
            conn.execute("select set_config('statement_timeout', %s, true)", (f"{_RULES_S:g}s",))
            found = client.execute(replace(Verbs.violations(), connection=conn))
    except GangqError as e:
        if not isinstance(e.__cause__, QueryCanceled):
            raise
        return warn(
            f"too many live jobs to look at all of them in {seconds(_RULES_S)}",
            "where it may take longer: select * from gangq.violations (always empty)",
        )
    if not found:
        return ok("no violation")
    listed = some([f"{v.rule}: {v.subject} ({v.detail})" for v in found])
    return fail(
        f"{len(found)} violations: {listed}",
        "this is a bug: report it with the rows of gangq.violations and gangq.events",
    )


def _partitions(client: Client) -> Finding:
    found = client.execute(queries.stray_rows())
    if not found:
        return ok("no row is outside the partitions of its day")
    listed = some([f"about {row['rows']} in gangq.{row['name']}" for row in found])
    return warn(
        f"rows are in default partitions: {listed}",
        "no tick made partitions in time. They go when the last of them is past its retention; see that "
        "a tick runs",
    )


_OF_THE_SERVER = {
    "server": _server,
    "clock": _clock,
    "notify": _notify_queue,
    "listen": _listens,
    "horizon": _horizon,
}
_OF_THE_INSTALLATION = {
    "code": _code,
    "roles": _roles,
    "tick": _tick,
    "workers": checks.workers,
    "slots": checks.slots,
    "cgroups": checks.cgroups,
    "tasks": checks.tasks,
    "schedules": checks.schedules,
    "claims": checks.claims,
    "reboot": checks.reboot,
    "devices": checks.devices,
    "watchdogs": checks.watchdogs,
    "sensors": checks.sensors,
    "trips": checks.trips,
    "outbox": checks.outbox,
    "invariants": _invariants,
    "retention": checks.retention,
    "partitions": _partitions,
}
