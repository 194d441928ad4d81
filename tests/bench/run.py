"""`make bench`: gangq, floors (the same work with the least SQL there is) and other queues, in one run.

Systems take turns in every round, so a machine that drifts drifts for all; compare ratios before rates. Each
measurement has a fresh database on a private PostgreSQL with fsync on and a worker process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import burst
import flat
import floors
import gang
import gpu_jobs
import heartbeats
import held
import idle
import measures
import packing
import pass_times
import per_job
import pictures
import replay
import report
import request_ids
from machine import describe, fsync_ms
from measures import Measure, Sizes
from progress import Progress
from report import Sample
from rich.console import Console
from stage import Stage
from systems import NAMES, Absent, System, load

from gangq.embedded import Binaries, Server, find_binaries

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": "300",
}
MEASURES = (
    Measure("drain", "drain with batches of 100 and at best", measures.drain),
    Measure("drain", "the floor's drain without Python", floors.drain, ("pgbench",)),
    Measure("drain2", "drain with two processes", measures.drain_by_two),
    Measure("single", "drain one job at a time", measures.drain_single),
    Measure("single", "the floor's, one at a time, without Python", floors.single, ("pgbench",)),
    Measure("enqueue", "enqueue one by one and in one call", measures.enqueue),
    Measure("enqueue", "the floor's enqueue without Python", floors.enqueue, ("pgbench",)),
    Measure("requests", "submissions with and without a request_id", request_ids.cost, ("gangq",)),
    Measure("pickup", "pick-up latency of an idle worker", measures.pickup),
    Measure("work", "WAL, statements, transactions, dead rows and buffers of a job", per_job.work),
    Measure("gpu", "one job that needs a GPU, on an idle worker", gpu_jobs.started_soon, ("gangq",)),
    Measure("gpus", "short jobs that need a GPU", gpu_jobs.follow_fast, ("gangq",)),
    Measure("packing", "whole hosts that single jobs leave free", packing.whole_hosts, ("gangq",)),
    Measure("gang", "placing a gang on an idle fleet", gang.admission, ("gangq",)),
    Measure("claimed", "a gang from submission to its last claim", pass_times.claimed, ("gangq",)),
    Measure("alone", "a pass for one gang on a large fleet", pass_times.alone, ("gangq",)),
    Measure("backlog", "a pass over a long backlog and a full fleet", pass_times.backlog, ("gangq",)),
    Measure("deciding", "decisions on large boards", pass_times.deciding, ("gangq",)),
    Measure("replay", "a job log in memory and through SQL", replay.lublin_log, ("gangq",)),
    Measure("pass", "a pass that places thousands of gangs", pass_times.passes, ("gangq",)),
    Measure("depth", "claims behind a long backlog and a long history", flat.depth, ("gangq",)),
    Measure("asleep", "claims beside jobs that are due later or blocked", flat.asleep, ("gangq",)),
    Measure("held", "claims while a transaction elsewhere stays open", held.horizon, ("gangq",)),
    Measure("burst", "many clients that submit, with and without NOTIFY", burst.notify, ("gangq",)),
    Measure("heartbeats", "a fleet that heartbeats", heartbeats.fleet, ("gangq",)),
    Measure("idle", "what an idle worker costs", idle.worker, ("gangq",)),
)
_RESULTS = Path(__file__).parents[2] / "bench-results"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of smaller counts")
    parser.add_argument("--rounds", type=int, help="how often everything is repeated [3; 1 with --quick]")
    names = [*dict.fromkeys(m.name for m in MEASURES), *NAMES]
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, default=[],
        help=f"only these measures and systems: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write everything [bench-results/]"
    )
    parser.add_argument(
        "--beats-s", type=float, metavar="SECONDS", help="how long a fleet heartbeats [60; 20 with --quick]"
    )
    parser.add_argument(
        "--flush-us", type=int, default=0, metavar="MICROSECONDS",
        help="wait so long before each flush of the WAL, for all alike: many disks take 500 to 2000",
    )  # fmt: skip
    parser.add_argument(
        "--pg", metavar="WHICH", help="PostgreSQL to use: system, wheel, or a major such as 16 [the newest]"
    )
    return parser.parse_args(argv)


def settings(flush_us: int, binaries: Binaries) -> dict[str, str]:
    """Those of the server. The delay is meant for group commits; with no sibling asked for, every flush has it."""
    slow = {"commit_delay": str(flush_us), "commit_siblings": "0"} if flush_us else {}
    return {**SETTINGS, **per_job.settings(binaries), **slow}


def newest(which: str | None) -> Binaries:
    """The newest PostgreSQL there is, the system's and the wheel's alike."""
    return max(find_binaries(which), key=lambda b: b.version)


def found(names: list[str], binaries: Binaries, console: Console) -> dict[str, System]:
    """Those of the systems that can be measured here; of each other one it is said why not."""
    systems = {}
    for name in names:
        try:
            system = load(name)
            system.prepare(binaries.bindir)
        except Absent as reason:
            console.print(f"not measured: {name} ({reason})", style="yellow", markup=False, highlight=False)
        else:
            systems[name] = system
    return systems


def chosen(only: list[str], systems: dict[str, System]) -> list[tuple[Measure, list[System]]]:
    """The measures and systems to run, of which none named means all."""
    wanted = [m for m in MEASURES if m.name in only] or list(MEASURES)
    plan = [
        (m, [s for s in systems.values() if (s.name in m.systems if m.systems else m.name in s.measures)])
        for m in wanted
    ]
    return [(m, takers) for m, takers in plan if takers]


def samples(
    stage: Stage, plan: list[tuple[Measure, list[System]]], sizes: Sizes, rounds: int, console: Console
) -> Iterator[Sample | str]:
    """Run everything, saying what is going on. What does not come to its end is said, and yields its name."""
    steps = [(measure.title, system.name) for measure, systems in plan for system in systems]
    progress = Progress(steps, rounds)
    for turn in range(1, rounds + 1):
        for measure, systems in plan:
            shift = turn % len(systems)  # Nobody always goes first.
            for system in systems[shift:] + systems[:shift]:
                step = (measure.title, system.name)
                console.print(f"{progress.begin(step)}  {measure.title}: {system.name}", highlight=False)
                sync_ms = fsync_ms(stage.scratch)
                try:
                    results = measure.take(stage, system, sizes)
                except Exception as error:
                    # Of a queue that is not ours anything may come. Not as markup: it is full of brackets.
                    words = "".join(traceback.format_exception(error, limit=-3))
                    console.print(f"not measured: {words}", style="red", markup=False, highlight=False)
                    yield f"{measure.title}: {system.name}"
                    results = []
                progress.end(step)
                for result in results:
                    console.print(report.line(result), highlight=False)
                    yield Sample(turn, system.name, sync_ms, result)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every measurement came to its end."""
    options = parse(sys.argv[1:] if argv is None else argv)
    rounds = options.rounds or (1 if options.quick else 3)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    binaries = newest(options.pg)
    systems = found([n for n in NAMES if n in options.only] or list(NAMES), binaries, console)
    plan = chosen(options.only, systems)
    taken: list[Sample] = []
    failed: list[str] = []
    with (
        Server.temporary(
            binaries=binaries, settings=settings(options.flush_us, binaries), durable=True
        ) as server,
        tempfile.TemporaryDirectory(prefix="gangq-bench-") as scratch,
    ):
        versions = dict.fromkeys(system.version() for _, takers in plan for system in takers)
        machine = describe(server, [version for version in versions if version])
        console.print(f"{binaries.version[0]}.{binaries.version[1]} of PostgreSQL is up")
        if not per_job.has_extension(binaries) and any(m.name == "work" for m, _ in plan):
            console.print(f"it has no {per_job.EXTENSION}: statements inside functions are not counted")
        sizes = measures.QUICK if options.quick else Sizes()
        if options.beats_s:
            sizes = dataclasses.replace(sizes, flat=dataclasses.replace(sizes.flat, beats_s=options.beats_s))
        for sample in samples(Stage(server, Path(scratch)), plan, sizes, rounds, console):
            if isinstance(sample, Sample):
                taken.append(sample)
            else:
                failed.append(sample)
    if taken:
        summaries = report.summarise(taken)
        report.show(console, machine, summaries, rounds)
        report.conditions(console, taken)
        path = options.json or _RESULTS / time.strftime("bench-%Y%m%d-%H%M%S.json")
        report.write(path, machine, taken, summaries)
        drawn = pictures.write(path, summaries)
        console.print(f"everything is in {path}", highlight=False)
        console.print(
            f"drawn: {', '.join(p.name for p in drawn)}" if drawn else "nothing to draw", highlight=False
        )
    for what in failed:
        console.print(f"not measured: {what}", style="red", markup=False, highlight=False)
    return 1 if failed or not taken else 0


if __name__ == "__main__":
    sys.exit(main())
