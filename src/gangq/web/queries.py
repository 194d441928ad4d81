"""What the pages read. Each page reads in one read-only transaction, so what it shows belongs together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from psycopg.rows import dict_row

from gangq.client import AsyncClient

Row = dict[str, Any]

PREFIXES = {"gang": "g", "job": "", "batch": "b"}
"""What has a number, and how that begins where it is written."""
ONE = {
    "gang": "select * from gangq.gangs where id = %(id)s",
    "job": "select * from gangq.jobs where id = %(id)s",
    "batch": "select * from gangq.batches where id = %(id)s",
}
_NOW = "select gangq.now() as at"
_WAITING = """
    select * from (
      select w.*, row_number() over (partition by w.queue order by w.priority desc, w.since, w.id) as place
      from gangq.waiting w) x
    where x.place <= 20 order by x.queue, x.place"""
_SEEN = """
    select e.id, e.at, e.kind, e.job_id, e.data ->> 'rank' as rank, e.data ->> 'code' as code,
      e.data ->> 'class' as class,
      coalesce(e.data ->> 'message', (
        select v.data ->> 'message' from gangq.job_evidence v
        where v.job_id = e.job_id and v.at = e.at and v.kind = e.kind limit 1), e.reason) as sentence
    from gangq.events e
    where e.gang_id = %(id)s and e.kind = any ('{suspect,trip,notify,held,poison,straggler}')
    order by e.id desc limit 50"""
"""What the watchdogs did and saw of a gang's members, newest first."""
_BEATS = """
    select m.*, e.at as stopped_at
    from gangq.events e
    cross join lateral jsonb_populate_recordset(null::gangq.member_beats, e.data -> 'last_beats') m
    where e.gang_id = %(id)s and e.kind = any ('{done,ack,dead,force,drain,replace,shrink}')
      and jsonb_typeof(e.data -> 'last_beats') = 'array'
    union all
    select m.*, null from gangq.member_beats m where m.gang_id = %(id)s
    order by stopped_at, rank"""
"""What each member has last told and saved: in each attempt that has ended, and now (stopped_at: null)."""
_OUTPUTS = """
    select j.id as job_id, j.rank, o.output
    from gangq.jobs j
    cross join lateral (
      select right(string_agg(right(y.chunk, 4000), '' order by y.token, y.seq), 4000) as output
      from (
        select x.*, sum(octet_length(x.chunk)) over (order by x.token desc, x.seq desc
          rows between unbounded preceding and 1 preceding) as bytes_after
        from (
          select l.token, l.seq, l.chunk from gangq.job_logs l
          where l.job_id = j.id order by l.token desc, l.seq desc limit 20) x) y
      where y.bytes_after is null or y.bytes_after < 4 * 4000) o
    where j.gang_id = %(id)s and o.output is not null
    order by j.rank limit 128"""
"""The last 4,000 characters of each rank. A character has at most 4 bytes, and octet_length does not unpack a chunk:
only the chunks that are shown are unpacked."""


class Page(NamedTuple):
    """A page that follows what it shows. `NAME.html` finds the rows of each query under the name of that. The page of
    one gang, job or batch finds it under `name`, the first of its queries.
    """

    path: str
    name: str
    queries: dict[str, str]


PAGES = (
    Page(
        "/",
        "fleet",
        {
            # One row for each device, and one for each worker without. Of thousands of rows each column costs.
            "devices": "select host, worker, uuid, index, vram_mb, model, state, job_id, gang_id, reason, cordoned, "
            "free_slots from gangq.fleet order by host, worker, index, uuid",
            "queues": "select name, depth, paused, paused_by, paused_until, running_gangs, running_jobs, used_gpus, "
            "maximum, waiting_gangs, waiting_jobs from gangq.queues",
            "running": "select * from gangq.running order by queue, gpus desc, since limit 200",
            "waiting": _WAITING,
            "planned": "select * from gangq.planned order by kept desc, place",
            "paused": "select distinct task, paused_until, paused_by, pause_reason from gangq.tasks where paused "
            "order by task",
        },
    ),
    Page(
        "/services",
        "services",
        {
            "services": "select * from gangq.services order by name",
            "gangs": "select * from gangq.service_gangs order by service, gang_id",
        },
    ),
    Page("/schedules", "schedules", {"schedules": "select * from gangq.schedules order by name limit 500"}),
    Page(
        "/limits",
        "limits",
        {
            # Those that are used up first.
            "keys": "select * from gangq.limits order by used < most, opens_at is null, name limit 500",
            "queues": "select name, maximum, submitter_maximum, max_running_gangs, max_running_jobs, rate, "
            "running_gangs, running_jobs, used_gpus, used_memory_mb, used_cpus, waiting_gangs, waiting_jobs "
            "from gangq.queues where maximum <> '{}' or submitter_maximum <> '{}' or rate is not null "
            "or max_running_gangs is not null or max_running_jobs is not null limit 500",
            "now": _NOW,
        },
    ),
    Page("/batches", "batches", {"batches": "select * from gangq.batches order by id desc limit 100"}),
    Page(
        "/batches/{id}",
        "batch",
        {
            "batch": ONE["batch"],
            "jobs": "select id, array_index, state, host, attempts, claimed_at, finished_at from gangq.jobs "
            "where batch_id = %(id)s order by state <> 'failed', array_index limit 200",
        },
    ),
    Page(
        "/usage",
        "usage",
        {
            "used": "select * from gangq.usage('30 days', '{submitter,queue}') limit 100",
            "trips": "select at, code, class, reason, outcome, job_id, host from gangq.trips "
            "where at > gangq.now() - interval '7 days' order by at desc limit 100",
            "quarantined": "select host, uuid, since, reason from gangq.fleet where state = 'quarantined' "
            "order by host, worker, index, uuid",
        },
    ),
    Page(
        "/gangs/{id}",
        "gang",
        {
            "gang": ONE["gang"],
            "why": "select * from gangq.explain_gang(%(id)s)",
            "members": "select j.id, j.rank, j.state, j.host, j.attempts, j.crashes, j.trips, j.step_rate, "
            "b.beat_at, b.step, b.phase, b.saved_step "
            "from gangq.jobs j left join gangq.member_beats b on b.gang_id = j.gang_id and b.job_id = j.id "
            "where j.gang_id = %(id)s order by j.rank",
            "steps": "select * from gangq.timeline where gang_id = %(id)s",
            "attempts": "select job_id, epoch, rank, worker, host, started_at, ended_at, cause from gangq.attempts "
            "where gang_id = %(id)s order by started_at",
            "displaced": "select * from gangq.preemptions where gang_id = %(id)s order by at",
            "beats": _BEATS,
            "evidence": _SEEN,
            "outputs": _OUTPUTS,
            "now": _NOW,
        },
    ),
    Page(
        "/jobs/{id}",
        "job",
        {
            "job": ONE["job"],
            "why": "select * from gangq.explain_job(%(id)s)",
            "attempts": "select * from gangq.attempts where job_id = %(id)s order by started_at",
            "events": "select * from gangq.events where job_id = %(id)s order by id",
            "evidence": "select * from gangq.job_evidence where job_id = %(id)s order by at",
            "displaced": "select * from gangq.preemptions where job_id = %(id)s order by at",
            "outputs": "select right(string_agg(chunk, '' order by token, seq), 100000) as output from ("
            "select * from gangq.job_logs where job_id = %(id)s order by token desc, seq desc limit 200) l",
        },
    ),
)


Read = Callable[..., Awaitable[list[Row]]]
"""Reads the rows of a statement, given its values by name."""


@asynccontextmanager
async def reading(client: AsyncClient) -> AsyncIterator[Read]:
    """A transaction that cannot write."""
    async with (
        client.connection("web") as conn,
        conn.transaction(),
        conn.cursor(row_factory=dict_row) as cursor,
    ):
        await conn.execute("set transaction isolation level repeatable read read only")
        await conn.execute("set local jit = off")
        await conn.execute("set local statement_timeout = '10s'")

        async def read(text: str, **values: Any) -> list[Row]:
            await cursor.execute(text.encode(), values or None)
            return await cursor.fetchall()

        yield read
