"""What the pages read. Each page reads in one read-only transaction, so what it shows belongs together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

from gangq.client import AsyncClient

Row = dict[str, Any]


@dataclass(frozen=True)
class GangParts:
    """What belongs to a gang, each as its view has it."""

    members: list[Row]
    steps: list[Row]
    attempts: list[Row]
    beats: list[Row]
    displaced: list[Row]
    evidence: list[Row]
    outputs: list[Row]
    now: datetime


@dataclass(frozen=True)
class JobParts:
    """What belongs to a job, each as its view has it."""

    attempts: list[Row]
    events: list[Row]
    evidence: list[Row]
    displaced: list[Row]
    output: str


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


_EXISTS = {
    "queue": "select from gangq.queues where name = %(name)s",
    "task": "(select from gangq.tasks where task = %(name)s limit 1) union all "
    "(select from gangq.jobs where task = %(name)s limit 1)",
    "host": "select from gangq.fleet where host = %(name)s limit 1",
}


class Reader:
    """Queries on one connection, in one transaction."""

    def __init__(self, conn: psycopg.AsyncConnection[Any]) -> None:
        self._conn = conn

    async def rows(self, text: str, **values: Any) -> list[Row]:
        """The rows of a statement, as dicts."""
        async with self._conn.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(text.encode(), values or None)
            return await cursor.fetchall()

    async def now(self) -> datetime:
        """The database's time."""
        (row,) = await self.rows("select gangq.now() as at")
        at: datetime = row["at"]
        return at

    async def fleet(self) -> list[Row]:
        """A row for each device, and one for each worker without devices. Of thousands of rows each column costs."""
        return await self.rows(
            "select host, worker, uuid, index, vram_mb, model, state, job_id, gang_id, since, reason, cordoned, "
            "free_slots from gangq.fleet order by host, worker, index, uuid"
        )

    async def queues(self) -> list[Row]:
        """Queues with what they hold and have waiting."""
        return await self.rows(
            "select name, depth, paused, paused_by, paused_until, running_gangs, running_jobs, used_gpus, maximum, "
            "waiting_gangs, waiting_jobs from gangq.queues"
        )

    async def running(self) -> list[Row]:
        """Gangs, and single jobs by shape, that are placed."""
        return await self.rows("select * from gangq.running order by queue, gpus desc, since limit 200")

    async def waiting(self) -> list[Row]:
        """The first 20 of each queue that wait, and why."""
        return await self.rows(_WAITING)

    async def planned(self) -> list[Row]:
        """The planned starts."""
        return await self.rows("select * from gangq.planned order by kept desc, place")

    async def usage(self) -> list[Row]:
        """GPU hours of the last 30 days."""
        return await self.rows("select * from gangq.usage('30 days', '{submitter,queue}') limit 100")

    async def trips(self) -> list[Row]:
        """The newest trips of a week."""
        return await self.rows(
            "select at, code, class, reason, outcome, job_id, gang_id, task, worker, host from gangq.trips "
            "where at > gangq.now() - interval '7 days' order by at desc limit 100"
        )

    async def one(self, view: str, id: int) -> Row | None:
        """The row of the view `jobs`, `gangs` or `batches` with this id."""
        found = await self.rows(f"select * from gangq.{view} where id = %(id)s", id=id)  # noqa: S608 - of this module
        return found[0] if found else None

    async def explained(self, verb: str, id: int) -> list[Row]:
        """The rows of `explain_job` or `explain_gang`."""
        return await self.rows(f"select * from gangq.{verb}(%(id)s)", id=id)  # noqa: S608 - of this module

    async def gang_parts(self, id: int) -> GangParts:
        """What belongs to a gang, and the database's time."""
        members = await self.rows(
            "select j.id, j.rank, j.state, j.host, j.worker, j.attempts, j.crashes, j.trips, j.step_rate, "
            "b.beat_at, b.step, b.phase, b.saved_step "
            "from gangq.jobs j left join gangq.member_beats b on b.gang_id = j.gang_id and b.job_id = j.id "
            "where j.gang_id = %(id)s order by j.rank",
            id=id,
        )
        steps = await self.rows("select * from gangq.timeline where gang_id = %(id)s", id=id)
        tried = await self.rows(
            "select job_id, epoch, rank, worker, host, started_at, ended_at, cause from gangq.attempts "
            "where gang_id = %(id)s order by started_at",
            id=id,
        )
        displaced = await self.rows(
            "select * from gangq.preemptions where gang_id = %(id)s order by at", id=id
        )
        beats, seen, outputs = [await self.rows(what, id=id) for what in (_BEATS, _SEEN, _OUTPUTS)]
        return GangParts(members, steps, tried, beats, displaced, seen, outputs, await self.now())

    async def job_parts(self, id: int) -> JobParts:
        """What belongs to a job, and the end of its output."""
        tried = await self.rows(
            "select * from gangq.attempts where job_id = %(id)s order by started_at", id=id
        )
        events = await self.rows("select * from gangq.events where job_id = %(id)s order by id", id=id)
        seen = await self.rows("select * from gangq.job_evidence where job_id = %(id)s order by at", id=id)
        displaced = await self.rows(
            "select * from gangq.preemptions where job_id = %(id)s order by at", id=id
        )
        pieces = await self.rows(
            "select chunk from gangq.job_logs where job_id = %(id)s order by token desc, seq desc limit 200",
            id=id,
        )
        output = "".join(row["chunk"] for row in reversed(pieces))[-100_000:]
        return JobParts(tried, events, seen, displaced, output)

    async def paused_tasks(self) -> list[Row]:
        """Tasks of which nothing new starts."""
        return await self.rows(
            "select distinct task, paused_until, paused_by, pause_reason from gangq.tasks where paused order by task"
        )

    async def named(self, view: str, name: str) -> Row | None:
        """The row of the view `schedules` or `services` with this name."""
        found = await self.rows(f"select * from gangq.{view} where name = %(name)s", name=name)  # noqa: S608 - of this module
        return found[0] if found else None

    async def exists(self, kind: str, name: str) -> bool:
        """Whether there is a queue, task or host of this name."""
        return bool(await self.rows(_EXISTS[kind], name=name))

    async def schedules(self) -> list[Row]:
        """What is submitted again and again."""
        return await self.rows("select * from gangq.schedules order by name limit 500")

    async def limits(self) -> tuple[list[Row], list[Row]]:
        """Limit keys, those that are used up first; and queues that have a limit or a rate."""
        return (
            await self.rows(
                "select * from gangq.limits order by used < most, opens_at is null, name limit 500"
            ),
            await self.rows(
                "select name, maximum, submitter_maximum, max_running_gangs, max_running_jobs, rate, running_gangs, "
                "running_jobs, used_gpus, used_memory_mb, used_cpus, waiting_gangs, waiting_jobs from gangq.queues "
                "where maximum <> '{}' or submitter_maximum <> '{}' or rate is not null "
                "or max_running_gangs is not null or max_running_jobs is not null limit 500"
            ),
        )

    async def live_jobs_of_batch(self, id: int) -> list[int]:
        """The jobs of a batch that have not ended."""
        found = await self.rows(
            "select id from gangq.jobs where batch_id = %(id)s and finished_at is null", id=id
        )
        return [row["id"] for row in found]

    async def services(self) -> tuple[list[Row], list[Row]]:
        """Services, and their gangs."""
        return (
            await self.rows("select * from gangq.services order by name"),
            await self.rows("select * from gangq.service_gangs order by service, gang_id"),
        )

    async def batches(self) -> list[Row]:
        """The newest batches."""
        return await self.rows("select * from gangq.batches order by id desc limit 100")

    async def batch_jobs(self, id: int) -> list[Row]:
        """The first jobs of a batch, those that failed before the others."""
        return await self.rows(
            "select id, array_index, state, host, attempts, claimed_at, finished_at from gangq.jobs "
            "where batch_id = %(id)s order by state <> 'failed', array_index limit 200",
            id=id,
        )


@asynccontextmanager
async def reading(client: AsyncClient) -> AsyncIterator[Reader]:
    """A transaction that cannot write."""
    async with client.connection("web") as conn, conn.transaction():
        await conn.execute("set transaction isolation level repeatable read read only")
        await conn.execute("set local jit = off")
        await conn.execute("set local statement_timeout = '10s'")
        yield Reader(conn)
