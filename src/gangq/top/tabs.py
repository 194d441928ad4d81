"""What each tab of `gangq top` asks the database and shows of it. A new tab is an entry of `TABS`.

Each answer is bounded, and reads no history: a tab costs the same after a year as on the first day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gangq.cli import output
from gangq.cli.progress import bar, number, remaining_s
from gangq.cli.tables import Cell, Column, columns
from gangq.client.verb import Query

Row = Mapping[str, Any]

MOST = 100
"""So many rows of a tab are drawn; the rest is found by filter and sorting."""


@dataclass(frozen=True)
class Tab:
    """A table of live things.

    `text` is its query, `nothing` is said where it finds no row. `group` makes the rows that are shown of those of
    the query. `named` is what `gangq show`, `explain` and `cancel` call a row; None where there is nothing to open.
    `keys` says by title what a column is sorted by, where that is not its value.
    """

    title: str
    nothing: str
    text: str
    columns: Sequence[Column]
    group: Callable[[list[Row]], list[Row]] = lambda rows: rows
    named: Callable[[Row], str | None] = lambda _: None
    keys: Mapping[str, Cell] = field(default_factory=dict)

    def query(self) -> Query[list[Row]]:
        """Ask for the rows."""
        return Query(self.title, self.text, {}, lambda found: self.group(list(found)))

    def key(self, column: Column) -> Cell:
        """Return what a column is sorted by: not its cell, for 12GiB as a text comes before 8GiB. None comes last."""
        return self.keys.get(column.title, column.value or column.cell)


def summary() -> Query[Row]:
    """What stands above every tab."""
    return Query("the fleet", _SUMMARY, {}, lambda found: found[0])


def _work(rows: list[Row]) -> list[Row]:
    """One row for each gang and each single job. A gang is as far as the slowest of its members."""
    found: list[Row] = []
    for (gang, id), group in groupby(rows, key=lambda row: (row["gang_id"], row["gang_id"] or row["id"])):
        members = list(group)
        beats = [row["progress"] if isinstance(row["progress"], dict) else {} for row in members]
        steps = [number(beat.get("step")) for beat in beats]
        slowest = min(range(len(members)), key=lambda i: -1.0 if steps[i] is None else steps[i] or 0.0)
        step, total = steps[slowest], number(beats[slowest].get("total"))
        rate = min((row["step_rate"] for row in members if row["step_rate"]), default=None)
        states = {row["state"] for row in members}
        found.append(
            {
                **members[0],
                "what": f"g{id}" if gang else str(id),
                "members": len(members),
                "state": states.pop()
                if len(states) == 1
                else "preempting"
                if "preempting" in states
                else "reserved",
                "hosts": sorted({row["host"] for row in members if row["host"]}),
                "gpus": sum(row["gpus"] for row in members),
                "step": step,
                "total": total,
                "step_rate": rate,
                "left_s": remaining_s(step, total, rate),
            }
        )
    return found


def _gang(row: Row) -> str | None:
    return output.gang(row["gang_id"]) or None


def _memory(row: Row) -> str:
    used = (row["reading"] or {}).get("used_mb")
    return "?" if used is None else f"{output.megabytes(used)}/{output.megabytes(row['vram_mb'])}"


TABS = (
    Tab(
        "Work",
        "Nothing runs: gangq submit or gangq run gives it work, tab 2 shows what waits.",
        """
        select j.id, j.gang_id, j.state, j.task, j.queue, j.priority, j.submitter, j.host, j.gpus, j.progress,
          j.step_rate, extract(epoch from gangq.now() - j.claimed_at)::float8 as for_s
        from gangq.jobs j where j.state in ('reserved', 'running', 'preempting')
        order by j.gang_id, j.rank, j.id limit 5000""",
        columns(
            "what state task >members:3 >gpus:1 >progress >steps/s=step_rate:2 >left=left_s >for=for_s submitter:3 "
            "queue:2 hosts:3",
            {
                "progress": lambda row: (
                    bar(row["step"], row["total"]) or ("" if row["step"] is None else f"step {row['step']:g}")
                )
            },
        ),
        group=_work,
        named=lambda row: str(row["what"]),
        keys={
            "what": lambda row: row["gang_id"] or row["id"],
            "progress": lambda row: (
                row["step"] / row["total"] if row["step"] and row["total"] else row["step"]
            ),
        },
    ),
    Tab(
        "Waiting",
        "Nothing waits.",
        """
        select case when w.kind = 'gang' then w.id end as gang_id, w.size, w.state, w.task, w.queue, w.priority,
          extract(epoch from gangq.now() - w.since)::float8 as for_s, w.why
        from gangq.waiting w order by w.priority desc, w.since limit 1000""",
        columns(
            "what=gang_id state task >size:1 >priority:3 queue:2 >for=for_s why",
            {"what": lambda row: _gang(row) or "jobs"},
        ),
        named=_gang,
    ),
    Tab(
        "Queues",
        "There is no queue yet: the first job, or gangq queue set, makes one.",
        """
        select q.name, case when q.paused then 'paused' else 'by ' || q.paused_by end as paused, q.policy,
          q.running_gangs, q.running_jobs, q.used_gpus, q.maximum -> 'gpus' as most, q.waiting_gangs,
          q.waiting_jobs
        from gangq.queues q limit 1000""",
        columns(
            "name paused policy:2 >gangs=running_gangs >jobs=running_jobs >gpus=used_gpus >most "
            ">waiting=waiting_jobs >gangs_waiting=waiting_gangs:1"
        ),
    ),
    Tab(
        "Workers",
        "No worker runs: gangq worker starts one on this host.",
        """
        select w.name, w.host, w.state, w.slots, w.used_slots, w.light, w.used_light, w.gpus, w.silent_s::float8,
          w.lease_left_s::float8, w.step_rate::float8, coalesce(w.quarantined, w.cordoned, '') as withheld
        from gangq.workers w where w.ended_at is null order by w.host, w.name limit 5000""",
        columns(
            "name host:2 state >slots=used_slots >light=used_light:1 >gpus >silent=silent_s >lease=lease_left_s:2 "
            ">steps/s=step_rate:1 withheld",
            {
                "slots": lambda row: f"{row['used_slots']}/{row['slots']}",
                "light": lambda row: f"{row['used_light']}/{row['light']}",
            },
        ),
    ),
    Tab(
        "Devices",
        "No worker has a GPU: gangq worker takes those it finds, or those of --devices.",
        """
        select d.host, d.index, d.model, d.vram_mb, d.state, d.health, d.job_id, d.trips_day, d.reading, d.reason
        from gangq.devices d where d.worker is not null or d.state = 'quarantined'
        order by d.host, d.index limit 5000""",
        columns(
            "host >index model:3 >vram=vram_mb:4 state health:1 >job >busy=reading.gpu_pct >memory=reading.used_mb:2 "
            ">power=reading.power_w:1 >trips_day:2 reason",
            {"memory": _memory},
        ),
        named=lambda row: str(row["job_id"]) if row["job_id"] else None,
    ),
    Tab(
        "Trips",
        "No watchdog has ended anything in the last day.",
        """
        select t.at, t.code, t.class, t.task, t.job_id, t.gang_id, t.rank, t.worker, t.host, t.outcome, t.reason
        from gangq.trips t where t.at > gangq.now() - interval '1 day' order by t.at desc limit 200""",
        columns(
            ">ago at:4 >code:1 class task >job >rank:1 host outcome:2 reason",
            {"at": lambda row: output.when(row["at"])},
        ),
        named=lambda row: str(row["job_id"]) if row["job_id"] else None,
        keys={"ago": lambda row: -row["at"].timestamp(), "at": lambda row: row["at"].timestamp()},
    ),
    Tab(
        "Services",
        "There is no service: gangq service set makes one.",
        """
        select s.name, s.state, s.ready_replicas, s.replicas, x.wants, s.gangs, s.revision, s.task, s.queue, s.load,
          coalesce(s.why, x.why, '') as why
        from gangq.services s left join gangq.scaling x on x.service = s.name order by s.name limit 1000""",
        columns(
            "name state ready=ready_replicas >wants >gangs:2 >revision:2 >load:1 task:1 queue:2 why",
            {"ready": lambda row: f"{row['ready_replicas']} of {row['replicas']}"},
        ),
    ),
)

_SUMMARY = """
  select extract(epoch from gangq.now() - t.last_at)::float8 as tick_age_s, w.*, d.*, q.*, r.trips
  from gangq.tick_state t
  cross join (
    select count(*) filter (where x.state = 'live') as live, count(*) filter (where x.state = 'silent') as silent
    from gangq.workers x where x.ended_at is null) w
  cross join (
    select count(*) filter (where y.state = 'held') as held, count(*) filter (where y.state = 'free') as free,
      count(*) filter (where y.state = 'quarantined') as quarantined
    from gangq.devices y where y.worker is not null or y.state = 'quarantined') d
  cross join (
    select coalesce(sum(z.running_jobs), 0) as running, coalesce(sum(z.waiting_jobs), 0) as waiting,
      coalesce(sum(z.waiting_gangs), 0) as waiting_gangs
    from gangq.queues z where z.name not like '%%.%%') q
  cross join (
    select count(*) as trips from gangq.trips v where v.at > gangq.now() - interval '1 hour') r"""
