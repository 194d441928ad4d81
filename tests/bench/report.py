"""The tables and the JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import per_job
from measures import Result
from rich.console import Console
from rich.table import Table
from systems import NAMES

BASIS = "gangq"
NOISY_CORES = 0.35
"""Above this much foreign work a number says more about the neighbours."""


@dataclass(frozen=True)
class Sample:
    """A result, whose it is, in which round it was taken, and how long an fsync took just before."""

    round: int
    system: str
    fsync_ms: float
    result: Result


@dataclass(frozen=True)
class Summary:
    """All samples of one measure of one system. ``ratio``: the median of those to gangq in the same round."""

    measure: str
    unit: str
    system: str
    median: float
    least: float
    most: float
    ratio: float | None
    higher_is_better: bool


def summarise(samples: Iterable[Sample]) -> list[Summary]:
    """In the order in which measures first came; the systems in theirs."""
    grouped: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((sample.result.measure, sample.system), []).append(sample)
    measures = dict.fromkeys(measure for measure, _ in grouped)
    summaries = []
    for measure, system in ((m, s) for m in measures for s in NAMES if (m, s) in grouped):
        mine = grouped[measure, system]
        basis = {s.round: s.result.value for s in grouped.get((measure, BASIS), [])}
        ratios = [s.result.value / basis[s.round] for s in mine if basis.get(s.round)]
        values = [s.result.value for s in mine]
        summaries.append(
            Summary(
                measure,
                mine[0].result.unit,
                system,
                statistics.median(values),
                min(values),
                max(values),
                statistics.median(ratios) if ratios else None,
                mine[0].result.higher_is_better,
            )
        )
    return summaries


def number(value: float) -> str:
    """As many digits as mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def line(result: Result) -> str:
    """A result as it comes, with a warning when others used the machine."""
    foreign = result.notes.get("foreign_cores", 0.0)
    busy = f"  [yellow]others kept {foreign:.1f} cores busy" if foreign > NOISY_CORES else ""
    return f"          {result.measure}: {number(result.value)} {result.unit}{busy}"


def show(console: Console, machine: dict[str, Any], summaries: list[Summary], rounds: int) -> None:
    """Print the tables and the machine."""
    counted = {per_job.title(quantity, mode) for quantity in per_job.QUANTITIES for mode in per_job.MODES}
    timed = [row for row in summaries if row.measure not in counted]
    if timed:
        console.print(_timed(timed, rounds))
    if len(timed) < len(summaries):
        console.print(_counted([row for row in summaries if row.measure in counted]))
    delay = machine["settings"].get("commit_delay")
    late = f" and {delay} us late" if delay else ""
    console.print(
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB; worker and server share "
        f"them. PostgreSQL {machine['postgresql']}, fsync on{late}, Unix socket. Python {machine['python']}; "
        f"{'; '.join(machine['systems'])}.",
        highlight=False,
    )


def _timed(summaries: list[Summary], rounds: int) -> Table:
    """A line for each measure of each system."""
    table = Table(title=f"{rounds} round{'s' * (rounds != 1)}, interleaved", title_justify="left")
    for heading in ("measure", "", "system"):
        table.add_column(heading)
    for heading in ("median", "min", "max", f"ratio to {BASIS}"):
        table.add_column(heading, justify="right")
    last = ""
    for row in summaries:
        if last and last != row.measure:
            table.add_section()
        arrow = "↑" if row.higher_is_better else "↓"
        table.add_row(
            row.measure if last != row.measure else "",
            f"{row.unit} {arrow}" if last != row.measure else "",
            row.system,
            *map(number, (row.median, row.least, row.most)),
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
        last = row.measure
    return table


def _counted(summaries: list[Summary]) -> Table:
    """What the server does for a job: medians, a line for each system, a column for each quantity."""
    found = {(row.system, row.measure): row for row in summaries}
    table = Table(title="for each job, from its submission to its end; less is better", title_justify="left")
    table.add_column("submitted and worked off")
    table.add_column("system")
    quantities = [q for q in per_job.QUANTITIES if any(row.measure.startswith(f"{q},") for row in summaries)]
    for heading in (*quantities, f"WAL to {BASIS}"):
        table.add_column(heading, justify="right")
    for mode in per_job.MODES:
        systems = dict.fromkeys(row.system for row in summaries if row.measure.endswith(mode))
        for place, system in enumerate(systems):
            rows = [found.get((system, per_job.title(quantity, mode))) for quantity in quantities]
            ratio = rows[0].ratio if rows[0] else None
            table.add_row(
                mode if place == 0 else "",
                system,
                *("" if row is None else number(row.median) for row in rows),
                "" if ratio is None else f"{ratio:.2f}",
            )
        table.add_section()
    return table


def conditions(console: Console, samples: list[Sample]) -> None:
    """Say what else went on: without this nobody can tell a slow queue from a busy machine."""
    foreign = [s.result.notes["foreign_cores"] for s in samples if "foreign_cores" in s.result.notes]
    syncs = [s.fsync_ms for s in samples]
    others = (
        f"; other processes kept {statistics.median(foreign):.1f} cores busy (at most {max(foreign):.1f})"
        if foreign
        else ""
    )
    console.print(
        f"An fsync took {statistics.median(syncs):.2f} ms ({min(syncs):.2f}–{max(syncs):.2f}){others}.",
        highlight=False,
    )
    if max(foreign, default=0.0) > NOISY_CORES or max(syncs) > 2 * min(syncs):
        console.print("[yellow]That is not a quiet machine: trust the ratios at most, and run it again.")


def write(path: Path, machine: dict[str, Any], samples: list[Sample], summaries: list[Summary]) -> None:
    """Write everything, single samples too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine,
        "summary": [asdict(row) for row in summaries],
        "samples": [
            {"round": s.round, "system": s.system, "fsync_ms": round(s.fsync_ms, 3), **asdict(s.result)}
            for s in samples
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
