"""`make bench`: gangq beside its floor (the same work in bare psycopg) and PgQueuer, in one run.

Systems take turns in every round, so a machine that drifts drifts for all; compare ratios before rates. Each
measurement has a fresh database on a private PostgreSQL with fsync on and a worker process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import burst
import flat
import gang
import heartbeats
import held
import idle
import measures
import placement
import report
from machine import describe, fsync_ms
from measures import Measure, Sizes
from report import Sample
from rich.console import Console
from stage import BenchError, Stage
from systems import SYSTEMS, System

from gangq.embedded import Binaries, Server, find_binaries

SETTINGS = {
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": "300",
}
MEASURES = (
    Measure("drain", "drain with batches of 100; WAL", measures.drain),
    Measure("single", "drain one job at a time", measures.drain_single),
    Measure("enqueue", "enqueue one by one and in one call", measures.enqueue),
    Measure("pickup", "pick-up latency of an idle worker", measures.pickup),
    Measure("gang", "placing a gang on an idle fleet", gang.admission, ("gangq",)),
    Measure("claimed", "a gang from submission to its last claim", placement.claimed, ("gangq",)),
    Measure("alone", "a pass for one gang on a large fleet", placement.alone, ("gangq",)),
    Measure("backlog", "a pass over a long backlog and a full fleet", placement.backlog, ("gangq",)),
    Measure("pass", "a pass that places thousands of gangs", placement.passes, ("gangq",)),
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
    parser.add_argument("--quick", action="store_true", help="one round of smaller counts, about a minute")
    parser.add_argument("--rounds", type=int, help="how often everything is repeated [3; 1 with --quick]")
    names = [*(m.name for m in MEASURES), *SYSTEMS]
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
        "--pg", metavar="WHICH", help="PostgreSQL to use: system, wheel, or a major such as 16 [the newest]"
    )
    return parser.parse_args(argv)


def newest(which: str | None) -> Binaries:
    """The newest PostgreSQL there is, the system's and the wheel's alike."""
    return max(find_binaries(which), key=lambda b: b.version)


def chosen(only: list[str]) -> list[tuple[Measure, list[System]]]:
    """The measures and systems to run, of which none named means all."""
    systems = [s for s in SYSTEMS.values() if s.name in only] or list(SYSTEMS.values())
    wanted = [m for m in MEASURES if m.name in only] or list(MEASURES)
    plan = [(m, [s for s in systems if not m.systems or s.name in m.systems]) for m in wanted]
    return [(m, takers) for m, takers in plan if takers]


def samples(
    stage: Stage, plan: list[tuple[Measure, list[System]]], sizes: Sizes, rounds: int, console: Console
) -> Iterator[Sample]:
    """Run everything, saying what is going on."""
    began = time.monotonic()
    for turn in range(1, rounds + 1):
        for measure, systems in plan:
            shift = turn % len(systems)  # Nobody always goes first.
            for system in systems[shift:] + systems[:shift]:
                at = f"{time.monotonic() - began:5.0f} s  round {turn}/{rounds}"
                console.print(f"{at}  {measure.title}: {system.name}", highlight=False)
                sync_ms = fsync_ms(stage.scratch)
                for result in measure.take(stage, system, sizes):
                    foreign = result.notes.get("foreign_cores", 0.0)
                    busy = (
                        f"  [yellow]others kept {foreign:.1f} cores busy"
                        if foreign > report.NOISY_CORES
                        else ""
                    )
                    said = f"{report.number(result.value)} {result.unit}"
                    console.print(f"          {result.measure}: {said}{busy}", highlight=False)
                    yield Sample(turn, system.name, sync_ms, result)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every measurement came to its end."""
    options = parse(sys.argv[1:] if argv is None else argv)
    rounds = options.rounds or (1 if options.quick else 3)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    plan = chosen(options.only)
    taken: list[Sample] = []
    with (
        Server.temporary(binaries=newest(options.pg), settings=SETTINGS, durable=True) as server,
        tempfile.TemporaryDirectory(prefix="gangq-bench-") as scratch,
    ):
        systems = dict.fromkeys(system.name for _, takers in plan for system in takers)
        machine = describe(server, [SYSTEMS[name].version() for name in systems])
        console.print(f"{server.binaries.version[0]}.{server.binaries.version[1]} of PostgreSQL is up")
        sizes = measures.QUICK if options.quick else Sizes()
        if options.beats_s:
            sizes = dataclasses.replace(sizes, flat=dataclasses.replace(sizes.flat, beats_s=options.beats_s))
        try:
            for sample in samples(Stage(server, Path(scratch)), plan, sizes, rounds, console):
                taken.append(sample)
        except BenchError as error:
            # Not as markup: a traceback is full of brackets.
            console.print(f"stopped: {error}", style="red", markup=False, highlight=False)
            return 1
    summaries = report.summarise(taken)
    report.show(console, machine, summaries, rounds)
    report.conditions(console, taken)
    path = options.json or _RESULTS / time.strftime("bench-%Y%m%d-%H%M%S.json")
    report.write(path, machine, taken, summaries)
    console.print(f"everything is in {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
