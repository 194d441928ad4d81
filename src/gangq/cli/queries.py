"""Questions that only the command line asks: output and events beyond a position, and what `doctor` looks at.

They are `Query`s like those of `gangq.client.verbs`, over the same views and the server's own catalogs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gangq.client import rows
from gangq.client.encoding import fits
from gangq.client.rows import EventRow, LogRow, TripRow
from gangq.client.verb import Query
from gangq.client.verbs import Verbs

Position = tuple[int, int]
"""How far a job's output is known: its attempt's token, and the number of the piece."""


def logs_after(positions: Mapping[int, Position]) -> Query[list[LogRow]]:
    """Output of these jobs beyond a position each, of this attempt and later ones, as it was stored."""
    text = (
        f"select {rows.columns(LogRow)} "  # noqa: S608 - column names of this package
        "from unnest(%(ids)s::bigint[], %(tokens)s::bigint[], %(seqs)s::integer[]) "
        "as p(id, after_token, after_seq) "
        "join gangq.job_logs l on l.job_id = p.id and (l.token, l.seq) > (p.after_token, p.after_seq) "
        "order by l.at, l.job_id, l.token, l.seq"
    )
    params = {
        "ids": list(positions),
        "tokens": [token for token, _ in positions.values()],
        "seqs": [seq for _, seq in positions.values()],
    }
    return Query("gangq.job_logs", text, params, lambda found: [LogRow(**r) for r in found])


def newest_events(limit: int, since: datetime | None = None) -> Query[list[EventRow]]:
    """The newest events of the whole installation, oldest first; `since`: not older."""
    text = (
        f"select {rows.columns(EventRow)} from (select * from gangq.events "  # noqa: S608 - column names of this package
        "where at >= coalesce(%(since)s::timestamptz, '-infinity') order by at desc, id desc "
        "limit %(limit)s::bigint) e order by at, id"
    )
    params = {"since": since, "limit": fits(limit, "limit", 64)}
    return Query("gangq.events", text, params, lambda found: [EventRow(**r) for r in found])


def trips(*, evidence: bool = False, **conditions: Any) -> Query[list[TripRow]]:
    """As `gangq.client.verbs.Verbs.trips`. The evidence of one may be megabytes: without `evidence` it is None."""
    query: Query[list[TripRow]] = Verbs.trips(**conditions)
    if not evidence:
        query.text = query.text.replace("evidence", "null::jsonb as evidence", 1)
    return query


def notify_only() -> Query[list[str]]:
    """Classes of trips that report and stop nothing, in the whole installation."""
    return Query(
        "gangq.settings",
        "select notify_only from gangq.settings",
        {},
        lambda found: _first(found)["notify_only"],
    )


def database_time() -> Query[datetime]:
    """The database's clock."""
    return Query("gangq.now", "select gangq.now() as at", {}, lambda found: _first(found)["at"])


def server_facts() -> Query[dict[str, Any]]:
    """Version, login, roles, and how full the notification queue is."""
    text = """
        select current_setting('server_version') as version, current_user::text as login,
          current_setting('server_version_num')::integer / 10000 as major,
          clock_timestamp() as at, pg_notification_queue_usage()::float8 as notify_usage,
          pg_is_in_recovery() as standby,
          array(select r.rolname::text from pg_roles r where r.rolname = any (
            '{gangq_viewer,gangq_submitter,gangq_worker,gangq_host,gangq_notifier,gangq_admin}')
            and pg_has_role(current_user, r.oid, 'member') order by 1) as roles"""
    return Query("the server", text, {}, _first)


def last_tick() -> Query[dict[str, Any]]:
    """Seconds since the last tick (null: never), and how often there should be one."""
    text = """
        select extract(epoch from gangq.now() - t.last_at)::float8 as age_s, s.tick_s::float8 as tick_s,
          s.flag_after_s::float8 as flag_after_s
        from gangq.tick_state t cross join gangq.settings s"""
    return Query("gangq.tick_state", text, {}, _first)


def idle_beside_work() -> Query[list[dict[str, Any]]]:
    """Workers that are heard and take nothing although work fits them, and why that is known."""
    return Query("gangq.idle_beside_work", "select * from gangq.idle_beside_work()", {}, list)


def tick_holder() -> Query[dict[str, Any] | None]:
    """The session or prepared transaction that has a tick running or left open, as far as this login may see it.

    A row lock is no row of pg_locks: the row names the transaction that locked it, and that one holds its own number.
    """
    text = """
        select case when a.pid is not null then format('pid %%s (%%s, %%s, %%s)', a.pid, a.usename,
            coalesce(nullif(a.application_name, ''), '?'), coalesce(a.state, '?'))
          else format('prepared transaction %%L of %%s', p.gid, p.owner) end as who, a.pid,
          extract(epoch from clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8 as held_s
        from gangq.lock_rows r
        join pg_locks l on l.locktype = 'transactionid' and l.transactionid = r.xmax and l.granted
        left join pg_stat_activity a on a.pid = l.pid
        left join pg_prepared_xacts p on p.transaction = r.xmax
        where r.name = 'tick' and (a.pid is not null or p.gid is not null) and l.mode = 'ExclusiveLock' limit 1"""
    return Query("gangq.lock_rows", text, {}, lambda found: found[0] if found else None)


def stray_rows() -> Query[list[dict[str, Any]]]:
    """Default partitions that hold rows, by the server's own count (an estimate that anybody may read)."""
    text = """
        select s.relname::text as name, s.n_live_tup as rows from pg_stat_user_tables s
        where s.schemaname = 'gangq' and s.relname like '%%\\_rest' and s.n_live_tup > 0 order by 1"""
    return Query("pg_stat_user_tables", text, {}, list)


def oldest_snapshot() -> Query[dict[str, Any] | None]:
    """The session or prepared transaction whose snapshot is the oldest: vacuum keeps what it might see."""
    text = """
        select * from (
          select format('pid %%s (%%s, %%s, %%s)', a.pid, a.usename,
              coalesce(nullif(a.application_name, ''), '?'), a.state) as who,
            extract(epoch from clock_timestamp() - coalesce(a.xact_start, a.query_start))::float8 as age_s
          from pg_stat_activity a
          where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
          union all
          select format('prepared transaction %%L of %%s', p.gid, p.owner),
            extract(epoch from clock_timestamp() - p.prepared)::float8
          from pg_prepared_xacts p) x
        where x.age_s is not null order by x.age_s desc limit 1"""
    return Query("pg_stat_activity", text, {}, lambda found: found[0] if found else None)


def _first(found: list[dict[str, Any]]) -> dict[str, Any]:
    return found[0]
