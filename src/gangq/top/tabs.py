"""What each tab of `gangq top` asks the database and shows of it. A new tab is an entry of `TABS`.

Each answer is bounded, and reads no history: a tab costs the same after a year as on the first day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gangq.cli import output
from gangq.cli.progress import bar, number, remaining_s
from gangq.cli.tables import Column, columns
from gangq.client.verb import Query

Row = Mapping[str, Any]

MOST = 100
"""So many rows of a tab are drawn; the rest is found by filter and sorting."""


@dataclass(frozen=True)
class Tab:
    """A table of live things.

    `text` is its query. `group` makes the rows that are shown of those of the query. `named` is what `gangq show`,
    `explain` and `cancel` call a row; None where there is nothing to open.
    """

    title: str
    text: str
    columns: Sequence[Column]
    group: Callable[[list[Row]], list[Row]] = lambda rows: rows
    named: Callable[[Row], str | None] = lambda _: None

    def query(self) -> Query[list[Row]]:
        """Ask for the rows."""
        return Query(self.title, self.text, {}, lambda found: self.group(list(found)))


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


def _eta(row: Row) -> str:
    return output.seconds(remaining_s(row["step"], row["total"], row["rate"]))


def _get(name: str) -> Callable[[Any], object]:
    return lambda row: row[name]


def _columns(names: str, cells: Mapping[str, Callable[[Any], object]] | None = None) -> list[Column]:
    """As `gangq.cli.tables.columns`, of rows that are mappings."""
    titles = [name.lstrip(">").partition(":")[0] for name in names.split()]
    return columns(names, {**{title: _get(title) for title in titles}, **(cells or {})})


def _reading(name: str, unit: str) -> Callable[[Any], object]:
    return lambda row: output.known((row["reading"] or {}).get(name), unit)


def _memory(row: Row) -> str:
    used = (row["reading"] or {}).get("used_mb")
    return f"{'?' if used is None else output.megabytes(used)}/{output.megabytes(row['vram_mb'])}"


TABS = (
    Tab(
        "Work",
        """
        select j.id, j.gang_id, j.state, j.task, j.queue, j.priority, j.submitter, j.host, j.gpus, j.progress,
          j.step_rate, extract(epoch from gangq.now() - j.claimed_at)::float8 as for_s
        from gangq.jobs j where j.state in ('reserved', 'running', 'preempting')
        order by j.gang_id, j.rank, j.id limit 5000""",
        _columns(
            "what state task >members >gpus progress >steps/s >left >for submitter:2 queue:1 hosts:3",
            {
                "progress": lambda row: (
                    bar(row["step"], row["total"]) or ("" if row["step"] is None else f"step {row['step']:g}")
                ),
                "steps/s": lambda row: "" if row["rate"] is None else f"{row['rate']:.3g}",
                "left": _eta,
                "for": lambda row: output.seconds(row["for_s"]),
                "hosts": lambda row: output.words(row["hosts"]),
            },
        ),
        group=_work,
        named=_get("what"),  # type: ignore[arg-type]
    ),
    Tab(
        "Waiting",
        """
        select case when w.kind = 'gang' then 'g' || w.id end as what, w.size, w.state, w.task, w.queue, w.priority,
          extract(epoch from gangq.now() - w.since)::float8 as for_s, w.why
        from gangq.waiting w order by w.priority desc, w.since limit 1000""",
        _columns(
            "what state task >size:1 >priority:2 queue:2 >for why",
            {"for": lambda row: output.seconds(row["for_s"]), "what": lambda row: row["what"] or "jobs"},
        ),
        named=_get("what"),  # type: ignore[arg-type]
    ),
    Tab(
        "Queues",
        """
        select q.name, coalesce(q.paused_by, '') as paused, q.policy, q.running_gangs, q.running_jobs, q.used_gpus,
          (q.maximum ->> 'gpus') as most_gpus, q.waiting_gangs, q.waiting_jobs
        from gangq.queues q limit 1000""",
        _columns(
            "name paused policy:1 >running_gangs >running_jobs >used_gpus >most_gpus:1 >waiting_gangs >waiting_jobs"
        ),
    ),
    Tab(
        "Workers",
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
    ),
    Tab(
        "Devices",
        """
        select d.host, d.index, d.model, d.vram_mb, d.state, d.health, d.job_id, d.trips_day, d.reading, d.reason
        from gangq.devices d where d.worker is not null or d.state = 'quarantined'
        order by d.host, d.index limit 5000""",
        _columns(
            "host >index model:3 state health >job >busy >memory >power:1 >trips_day:2 reason",
            {
                "job": lambda row: row["job_id"],
                "busy": _reading("gpu_pct", "%"),
                "memory": _memory,
                "power": _reading("power_w", "W"),
            },
        ),
        named=lambda row: str(row["job_id"]) if row["job_id"] else None,
    ),
    Tab(
        "Trips",
        """
        select t.at, t.code, t.class, t.task, t.job_id, t.gang_id, t.rank, t.worker, t.host, t.outcome, t.reason
        from gangq.trips t where t.at > gangq.now() - interval '1 day' order by t.at desc limit 200""",
        _columns(
            "at >code:1 class task >job >rank:1 host outcome:2 reason",
            {"at": lambda row: output.when(row["at"]), "job": lambda row: row["job_id"]},
        ),
        named=lambda row: str(row["job_id"]) if row["job_id"] else None,
    ),
    Tab(
        "Services",
        """
        select s.name, s.state, s.ready_replicas, s.replicas, x.wants, s.gangs, s.revision, s.task, s.queue, s.load,
          coalesce(s.why, x.why, '') as why
        from gangq.services s left join gangq.scaling x on x.service = s.name order by s.name limit 1000""",
        _columns(
            "name state ready >wants >gangs:2 >revision:2 >load:1 task:1 queue:2 why",
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
