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
    `keys` says by title what a column is sorted by, where that is not its cell: 12GiB as a text comes before 8GiB.
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
        """Return what makes the number or the text that a column is sorted by; None comes last."""
        return self.keys.get(column.title, column.cell)


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
        rates = [row["step_rate"] for row in members if row["step_rate"]]
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
                "step": steps[slowest],
                "total": number(beats[slowest].get("total")),
                "rate": min(rates, default=None),
            }
        )
    return found


def _gang(row: Row) -> str | None:
    return output.gang(row["gang_id"]) or None


def _left_s(row: Row) -> float | None:
    return remaining_s(row["step"], row["total"], row["rate"])


def _get(name: str) -> Cell:
    return lambda row: row[name]


def _columns(names: str, cells: Mapping[str, Cell] | None = None) -> list[Column]:
    """As `gangq.cli.tables.columns`, of rows that are mappings."""
    titles = [name.lstrip(">").partition(":")[0] for name in names.split()]
    return columns(names, {**{title: _get(title) for title in titles}, **(cells or {})})


def _reading(name: str) -> Cell:
    return lambda row: (row["reading"] or {}).get(name)


def _read(name: str, unit: str) -> Cell:
    return lambda row: output.known(_reading(name)(row), unit)


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
        _columns(
            "what state task >members:3 >gpus:1 >progress >steps/s:2 >left >for submitter:3 queue:2 hosts:3",
            {
                "progress": lambda row: (
                    bar(row["step"], row["total"]) or ("" if row["step"] is None else f"step {row['step']:g}")
                ),
                "steps/s": lambda row: "" if row["rate"] is None else f"{row['rate']:.3g}",
                "left": lambda row: output.seconds(_left_s(row)),
                "for": lambda row: output.seconds(row["for_s"]),
                "hosts": lambda row: output.words(row["hosts"]),
            },
        ),
        group=_work,
        named=_get("what"),  # type: ignore[arg-type]
        keys={
            "what": lambda row: row["gang_id"] or row["id"],
            "progress": lambda row: (
                row["step"] / row["total"] if row["step"] and row["total"] else row["step"]
            ),
            "steps/s": _get("rate"),
            "left": _left_s,
            "for": _get("for_s"),
        },
    ),
    Tab(
        "Waiting",
        "Nothing waits.",
        """
        select case when w.kind = 'gang' then w.id end as gang_id, w.size, w.state, w.task, w.queue, w.priority,
          extract(epoch from gangq.now() - w.since)::float8 as for_s, w.why
        from gangq.waiting w order by w.priority desc, w.since limit 1000""",
        _columns(
            "what state task >size:1 >priority:3 queue:2 >for why",
            {"for": lambda row: output.seconds(row["for_s"]), "what": lambda row: _gang(row) or "jobs"},
        ),
        named=_gang,
        keys={"what": _get("gang_id"), "for": _get("for_s")},
    ),
    Tab(
        "Queues",
        "There is no queue yet: the first job, or gangq queue set, makes one.",
        """
        select q.name, case when q.paused then 'paused' else 'by ' || q.paused_by end as paused, q.policy,
          q.running_gangs, q.running_jobs, q.used_gpus, q.maximum -> 'gpus' as most, q.waiting_gangs,
          q.waiting_jobs
        from gangq.queues q limit 1000""",
        _columns(
            "name paused policy:2 >gangs >jobs >gpus >most >waiting >gangs_waiting:1",
            {
                "gangs": _get("running_gangs"),
                "jobs": _get("running_jobs"),
                "gpus": _get("used_gpus"),
                "waiting": _get("waiting_jobs"),
                "gangs_waiting": _get("waiting_gangs"),
            },
        ),
    ),
    Tab(
        "Workers",
        "No worker runs: gangq worker starts one on this host.",
        """
        select w.name, w.host, w.state, w.slots, w.used_slots, w.light, w.used_light, w.gpus, w.silent_s::float8,
          w.lease_left_s::float8, w.step_rate::float8, coalesce(w.quarantined, w.cordoned, '') as withheld
        from gangq.workers w where w.ended_at is null order by w.host, w.name limit 5000""",
        _columns(
            "name host:2 state >slots >light:1 >gpus >silent >lease:2 >steps/s:1 withheld",
            {
                "slots": lambda row: f"{row['used_slots']}/{row['slots']}",
                "light": lambda row: f"{row['used_light']}/{row['light']}",
                "silent": lambda row: output.seconds(row["silent_s"]),
                "lease": lambda row: output.seconds(row["lease_left_s"]),
                "steps/s": lambda row: "" if row["step_rate"] is None else f"{row['step_rate']:.3g}",
            },
        ),
        keys={
            "slots": _get("used_slots"),
            "light": _get("used_light"),
            "silent": _get("silent_s"),
            "lease": _get("lease_left_s"),
            "steps/s": _get("step_rate"),
        },
    ),
    Tab(
        "Devices",
        "No worker has a GPU: gangq worker takes those it finds, or those of --devices.",
        """
        select d.host, d.index, d.model, d.vram_mb, d.state, d.health, d.job_id, d.trips_day, d.reading, d.reason
        from gangq.devices d where d.worker is not null or d.state = 'quarantined'
        order by d.host, d.index limit 5000""",
        _columns(
            "host >index model:3 >vram:4 state health:1 >job >busy >memory:2 >power:1 >trips_day:2 reason",
            {
                "job": lambda row: row["job_id"],
                "vram": lambda row: output.megabytes(row["vram_mb"]),
                "busy": _read("gpu_pct", "%"),
                "memory": _memory,
                "power": _read("power_w", "W"),
            },
        ),
        keys={
            "vram": _get("vram_mb"),
            "busy": _reading("gpu_pct"),
            "memory": _reading("used_mb"),
            "power": _reading("power_w"),
        },
        named=lambda row: str(row["job_id"]) if row["job_id"] else None,
    ),
    Tab(
        "Trips",
        "No watchdog has ended anything in the last day.",
        """
        select t.at, t.code, t.class, t.task, t.job_id, t.gang_id, t.rank, t.worker, t.host, t.outcome, t.reason
        from gangq.trips t where t.at > gangq.now() - interval '1 day' order by t.at desc limit 200""",
        _columns(
            ">ago at:4 >code:1 class task >job >rank:1 host outcome:2 reason",
            {
                "ago": lambda row: output.ago(row["at"]),
                "at": lambda row: output.when(row["at"]),
                "job": lambda row: row["job_id"],
            },
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
        _columns(
            "name state ready >wants >gangs:2 >revision:2 >load:1 task:1 queue:2 why",
            {"ready": lambda row: f"{row['ready_replicas']} of {row['replicas']}"},
        ),
        keys={"ready": _get("ready_replicas")},
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
