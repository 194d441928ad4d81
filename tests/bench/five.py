"""`make five`: five numbers about gangq that queues seldom publish, each measured here.

recovery: seconds from a death to the whole gang at work again. kills: healthy jobs killed in a worker-month of
flapping. starts: by how much planned starts miss. explanations: the share that a recomputation confirms. newcomer:
what README's first five minutes cost the machine. Writes a table (Markdown), a picture (SVG) and JSON to
bench-results/. docs/manual/five-numbers.md says what each number means.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

# A script finds only what lies beside it.
sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("", "simulator"))

import lublin
import newcomer
import pictures
import recovery
import situations
from in_memory import InMemory
from machine import describe
from report import Summary
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from simulate import CASES, LOAD, SEED, TEMPLATE

from databases import Databases
from gangq import schema
from gangq.embedded import Server, find_binaries
from simulator import Fleet, Replay

WORKER_MONTH_H = 730.5
_TOP = Path(__file__).parents[2]
_RESULTS = _TOP / "bench-results"
_SOAK = "tests/process/test_soak_flaps.py"
_WORKERS_OF_THE_SOAK = 8
_ESTIMATES = {"exact": "K=4", "1-10 times": "K=4, 1-10x", "1-10, learned": "K=4, learned"}
"""Cases of `make simulate`: how good the durations are that jobs were submitted with."""
FAMILY = pictures.Family(
    "five", "Five numbers", ("seconds", "planned", "explanations", "newcomer"), logarithmic=False
)


@dataclass(frozen=True)
class Line:
    """A line of the table: which of the five, of what, and what was seen."""

    number: str
    of: str
    seen: str


@dataclass(frozen=True)
class Part:
    """What one part found: for the table, and for the picture."""

    lines: list[Line]
    bars: list[Summary]


@dataclass(frozen=True)
class Sizes:
    """How much of each part."""

    rounds: int
    soak_min: float
    jobs: int
    learned: int
    explanations: int
    seed: int


FULL = Sizes(rounds=8, soak_min=3.0, jobs=1_500, learned=150, explanations=150, seed=1)
QUICK = Sizes(rounds=1, soak_min=0.2, jobs=300, learned=10, explanations=10, seed=1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[max(0, -(-int(len(values) * share * 1000) // 1000) - 1)]


def at_most(hours: float, seen: int = 0) -> float:
    """Of a worker-month: the 95 % upper bound when nothing was seen in so many worker-hours (the rule of three)."""
    if seen:
        raise ValueError("the rule of three is for nothing seen")
    return 3 / hours * WORKER_MONTH_H


def _bar(measure: str, unit: str, of: str, values: Sequence[float]) -> Summary:
    return Summary(measure, unit, of, statistics.median(values), min(values), max(values), None, False)


def recover(server: Server, sizes: Sizes) -> Part:
    """Real workers under their supervisors, default settings."""
    dsn = server.create_database("recovery", template=TEMPLATE)
    with tempfile.TemporaryDirectory(prefix="gangq-five-") as directory:
        took = recovery.seconds_to_whole(dsn, Path(directory), sizes.rounds, sizes.seed)
    name = "seconds from a death to the whole gang running"
    return Part(
        [
            Line(name, kind, f"p50 {statistics.median(s):.1f}, max {max(s):.1f} ({len(s)} rounds)")
            for kind, s in took.items()
        ],
        [_bar(name, "s", kind, s) for kind, s in took.items()],
    )


def kills(server: Server, sizes: Sizes) -> Part:
    """The soak of flaps, for this long; with a server of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-m", "soak", "-p", "no:cacheprovider", _SOAK],
        cwd=_TOP, env={**os.environ, "SOAK_MINUTES": str(sizes.soak_min)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    counted = dict(re.findall(r"^\| (\S.*?)\s+\|\s+(\d+) \|$", done.stdout, re.MULTILINE))
    killed = counted.get("jobs killed (trips, crashes, stops)")
    if killed is None:
        raise RuntimeError(f"the soak came to no end:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    hours = _WORKERS_OF_THE_SOAK * sizes.soak_min / 60
    bound = f"; 95 % bound {at_most(hours):,.0f} a worker-month" if killed == "0" else ""
    of = f"{counted['healthy jobs']} jobs, {counted['flaps']} flaps, {hours:.2f} worker-hours"
    return Part(
        [Line("healthy jobs killed while database and network flap", of, f"{killed} killed{bound}")], []
    )


def starts(server: Server, sizes: Sizes) -> Part:
    """The first planned start that each waiting gang is told, and when it starts.

    In memory, where `make bench` holds the schedule to the one through SQL; learned durations need the database.
    """
    fleet = Fleet()
    jobs = lublin.generate(sizes.jobs, fleet.slots, LOAD, SEED)
    lines, bars = [], []
    for estimates, name in _ESTIMATES.items():
        case = CASES[name]
        if case.policy.learn:
            log = case.log(jobs[: sizes.learned])
            replay = Replay(server.create_database("learned", template=TEMPLATE), fleet, case.policy)
            try:
                ran, promises = replay.run(log), replay.promises()
            finally:
                replay.close()
        else:
            log = case.log(jobs)
            memory = InMemory(fleet, case.policy)
            ran, promises = memory.run(log), memory.promises()
        started = {one.job.id: one.start_s for one in ran}
        late = [(started[job] - planned) / 60 for job, planned in promises.items()]
        of = f"durations {estimates}, {len(log):,} jobs"
        if not late:
            lines.append(Line("error of planned starts, minutes", of, "no gang had to wait"))
            continue
        errors = [abs(minutes) for minutes in late]
        middle, ninth = statistics.median(errors), percentile(errors, 0.9)
        seen = (
            f"median {middle:.1f}, p90 {ninth:.1f}; bias {statistics.mean(late):+.1f} (+ is late); "
            f"later than said: {sum(m > 1 / 60 for m in late):,} of {len(late):,}"
        )
        lines.append(Line("error of planned starts, minutes", of, seen))
        bar = "planned start against the start, median to p90"
        bars.append(Summary(bar, "min", estimates, middle, middle, ninth, None, False))
    return Part(lines, bars)


def explanations(server: Server, sizes: Sizes) -> Part:
    """Of situations drawn at random."""
    databases = Databases(server)
    try:
        with databases.kept(TEMPLATE) as kept:
            found = situations.confirmed(kept, sizes.explanations, sizes.seed)
    finally:
        databases.close()
    total = found.asked.total()
    gates = ", ".join(f"{gate} {count}" for gate, count in found.asked.most_common())
    name = "explanations that a recomputation confirms"
    lines = [Line(name, gates, f"{total - len(found.refuted)} of {total}")]
    lines += [Line("not confirmed", f"seed {seed}", why) for seed, why in found.refuted.items()]
    return Part(lines, [])


def first_gang(server: Server, sizes: Sizes) -> Part:
    """A newcomer's machine time; with a server of its own."""
    with tempfile.TemporaryDirectory(prefix="gangq-five-") as directory:
        os.chmod(directory, 0o755)
        steps = newcomer.steps(Path(directory))
    took = sum(step.took_s for step in steps)
    name = "newcomer: machine time to the first gang"
    lines = [Line(name, step.command, f"{step.took_s:.1f} s") for step in steps]
    lines.append(Line(name, "all", f"{took / 60:.1f} minutes"))
    return Part(lines, [_bar(name, "s", step.command.partition(" ")[0], [step.took_s]) for step in steps])


PARTS: dict[str, Callable[[Server, Sizes], Part]] = {
    "recovery": recover,
    "kills": kills,
    "starts": starts,
    "explanations": explanations,
    "newcomer": first_gang,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=list(PARTS), default=list(PARTS),
                        help=", ".join(PARTS))  # fmt: skip
    parser.add_argument("--rounds", type=int, help=f"deaths of each kind [{FULL.rounds}]")
    parser.add_argument("--soak-min", type=float, help=f"minutes of flapping [{FULL.soak_min:g}]")
    parser.add_argument("--jobs", type=int, help=f"jobs replayed [{FULL.jobs}]")
    parser.add_argument("--learned", type=int, help=f"jobs replayed with learned durations [{FULL.learned}]")
    parser.add_argument("--explanations", type=int, help=f"how many are asked for [{FULL.explanations}]")
    parser.add_argument("--seed", type=int, help=f"of deaths and situations [{FULL.seed}]")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 0 when each came to its end."""
    options = parse(sys.argv[1:] if argv is None else argv)
    usual = QUICK if options.quick else FULL
    given = {name: getattr(options, name) for name in asdict(usual) if getattr(options, name) is not None}
    sizes = Sizes(**{**asdict(usual), **given})
    console = Console()
    if not console.is_terminal:
        console.width = 160
    lines: list[Line] = []
    bars: list[Summary] = []
    with ExitStack() as stack:
        binaries = max(find_binaries(), key=lambda found: found.version)
        server = stack.enter_context(Server.temporary(binaries=binaries, durable=True))
        schema.migrate(server.create_database(TEMPLATE), log=lambda _: None)
        machine = describe(server, [])
        for name in options.only:
            began = time.monotonic()
            part = PARTS[name](server, sizes)
            console.print(f"{name}: {time.monotonic() - began:.0f} s", highlight=False)
            lines += part.lines
            bars += part.bars
    table = Table()
    for heading in ("number", "of", "seen"):
        table.add_column(heading)
    for line in lines:
        table.add_row(*map(escape, (line.number, line.of, line.seen)))
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / time.strftime("five-%Y%m%d-%H%M%S.json")
    rows = [f"| {line.number} | {line.of} | {line.seen} |\n" for line in lines]
    path.with_suffix(".md").write_text("| number | of | seen |\n|---|---|---|\n" + "".join(rows))
    content = {"machine": machine, "sizes": asdict(sizes), "lines": [asdict(line) for line in lines]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    if bars:
        path.with_suffix(".svg").write_text(pictures.svg(FAMILY, bars, beside_others=False))
    console.print(f"written: {path.with_suffix('')}.json, .md{', .svg' if bars else ''}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
