"""`make simulate`: one job log under several policies, on gangq's real SQL, beside the textbook's algorithm.

Without a log it is 5,000 jobs of the Lublin-Feitelson model that ask for 6 % more than 256 slots can do. A private
PostgreSQL is started; each policy has a fresh database in it. With `--memory` there is none, and `gangq.placement`
decides on boards in memory. Writes a table (Markdown), a picture (SVG) and every job's start and end (CSV) to
bench-results/.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import joblog
import lublin
import picture
import reference
from in_memory import InMemory
from joblog import Job
from outcome import Outcome, Ran, judge
from rich.console import Console

from gangq import schema
from gangq.embedded import Server, find_binaries
from simulator import Fleet, Policy, Replay, timed

LOAD, SEED = 1.06, 1
STRETCH, STRETCH_SEED = 10.0, 1
TEMPLATE = "gangq_template"
MEMORY = ", in memory"
_RESULTS = Path(__file__).parents[2] / "bench-results"
_MEMORY = Path("/dev/shm")
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Case:
    """A policy, and whether people's estimates are exact or up to STRETCH times too long."""

    name: str
    policy: Policy
    stretched: bool = False

    def log(self, jobs: Sequence[Job]) -> Sequence[Job]:
        return joblog.stretched(jobs, STRETCH, STRETCH_SEED) if self.stretched else jobs


CASES = {
    case.name: case
    for case in (
        Case("best effort", Policy(0)),
        Case("K=1", Policy(1)),
        Case("K=4", Policy(4)),
        Case("K=8", Policy(8)),
        Case("K=1, 1-10x", Policy(1), True),
        Case("K=4, 1-10x", Policy(4), True),
        Case("K=8, 1-10x", Policy(8), True),
        Case("K=4, learned", Policy(4, learn=True), True),
        Case("K=4, largest first", Policy(4, order="largest_first")),
    )
}


def play(
    server: Server | None, case: Case, jobs: Sequence[Job], fleet: Fleet, console: Console
) -> tuple[Outcome, list[Ran]]:
    """One case, in a database of its own; without a server in memory."""
    said = time.monotonic()

    def progress(done: int, at_s: float) -> None:
        nonlocal said
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            console.print(
                f"  {case.name}: {done} of {len(jobs)} jobs, day {at_s / 86400:.1f}", highlight=False
            )

    if server is None:
        ran, took_s = timed(InMemory(fleet, case.policy), case.log(jobs), progress)
        return judge(case.name + MEMORY, ran, fleet.slots, took_s), ran
    name = f"simulation_{time.monotonic_ns()}"
    replay = Replay(server.create_database(name, template=TEMPLATE), fleet, case.policy)
    try:
        ran, took_s = timed(replay, case.log(jobs), progress)
        if broken := replay.violations():
            raise RuntimeError(f"{case.name} broke an invariant: {broken[0]}")
    finally:
        replay.close()
        server.drop_database(name)
    return judge(case.name, ran, fleet.slots, took_s), ran


@contextmanager
def database() -> Iterator[Server]:
    """A private server with a template of the schema."""
    if _MEMORY.is_dir():
        tempfile.tempdir = str(_MEMORY)  # Nothing here has to outlive the run.
    with Server.temporary(binaries=max(find_binaries(), key=lambda b: b.version)) as server:
        schema.migrate(server.create_database(TEMPLATE), log=lambda _: None)
        yield server


def textbook(case: Case, jobs: Sequence[Job], fleet: Fleet) -> Outcome:
    """The same case by the textbook; only first come, first served is one."""
    ran = reference.simulate(case.log(jobs), fleet.slots, case.policy.reservations)
    return judge(case.name + picture.BOOK, ran, fleet.slots)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "log", nargs="?", type=Path, help="a job log: .csv (see joblog.py) or SWF [generated]"
    )
    parser.add_argument(
        "--jobs", type=int, default=5000, help="how many to generate, or the first so many of the log"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the generated log")
    parser.add_argument(
        "--load", type=float, default=LOAD, help="what it asks for, 1 is all that the fleet can do"
    )
    parser.add_argument("--hosts", type=int, default=Fleet.hosts)
    parser.add_argument("--slots-per-host", type=int, default=Fleet.slots_per_host)
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=list(CASES), default=list(CASES), help=", ".join(CASES)
    )
    parser.add_argument(
        "--memory", action="store_true", help="decided by gangq.placement, without a database"
    )
    parser.add_argument("--textbook", action="store_true", help="only the textbook's algorithm, in seconds")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when every case came to its end."""
    options = parse(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    fleet = Fleet(options.hosts, options.slots_per_host)
    jobs = (
        joblog.read(options.log)[: options.jobs]
        if options.log
        else lublin.generate(options.jobs, fleet.slots, options.load, options.seed)
    )
    cases = [CASES[name] for name in options.only]
    source = options.log.name if options.log else f"Lublin-Feitelson, seed {options.seed}"
    title = f"{source}: {len(jobs)} jobs on {fleet.slots} slots, offered load {joblog.load(jobs, fleet.slots):.2f}"
    console.print(title, highlight=False)
    outcomes = [
        textbook(case, jobs, fleet) for case in cases if case.policy.order == "fifo" and not case.policy.learn
    ]
    stem = options.out / time.strftime("simulation-%Y%m%d-%H%M%S")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.textbook:
        real = []
        with ExitStack() as stack:
            server = None if options.memory else stack.enter_context(database())
            for case in cases:
                if options.memory and case.policy.learn:
                    continue  # Estimates are learned by the database.
                outcome, ran = play(server, case, jobs, fleet, console)
                console.print(f"{outcome.policy}: {outcome.took_s:.0f} s", highlight=False)
                real.append(outcome)
                _write_runs(Path(f"{stem}-{len(real)}.csv"), case, ran)
        outcomes = real + outcomes
    picture.show(console, outcomes)
    Path(f"{stem}.md").write_text(f"{title}\n\n{picture.markdown(outcomes)}")
    Path(f"{stem}.svg").write_text(picture.svg(outcomes, title))
    console.print(f"written: {stem}.md, .svg", highlight=False)
    return 0


def _write_runs(path: Path, case: Case, ran: Sequence[Ran]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "id", "submit_s", "start_s", "end_s", "size", "estimate_s", "displaced"))
        for r in ran:
            job = r.job
            writer.writerow(
                (case.name, job.id, job.submit_s, r.start_s, r.end_s, job.size, job.estimate_s, r.displaced)
            )


if __name__ == "__main__":
    sys.exit(main())
