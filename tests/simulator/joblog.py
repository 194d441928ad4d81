"""A job log: what was submitted when, how long it ran, how long it was said to run, on how many slots.

Two forms are read. The Standard Workload Format (one job a line, 18 numbers, comments after `;`) of the
Parallel Workloads Archive; and a CSV with a heading, the project's own:

    id,submit_s,run_s,estimate_s,size,user,queue,priority

Seconds count from the log's beginning. `size` is the number of slots, `estimate_s` what the submitter promised
(it becomes the job's budget), `user` and `queue` are names, `priority` is gangq's, higher first. `user`, `queue`
and `priority` may be left out.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One job of a log; `size` slots at once."""

    id: int
    submit_s: int
    run_s: int
    estimate_s: int
    size: int
    user: str = ""
    queue: str = "default"
    priority: int = 0

    @property
    def work(self) -> int:
        """Slot-seconds."""
        return self.size * self.run_s


def read(path: Path) -> list[Job]:
    """The jobs of a log, in the order in which they were submitted. `.csv` is our form, anything else is SWF."""
    lines = path.read_text().splitlines()
    jobs = _read_csv(lines) if path.suffix == ".csv" else _read_swf(lines)
    return sorted(jobs, key=lambda job: (job.submit_s, job.id))


def write_csv(path: Path, jobs: Iterable[Job]) -> None:
    """Write our form."""
    names = [field.name for field in fields(Job)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(job, name) for name in names] for job in jobs)


def _read_csv(lines: list[str]) -> list[Job]:
    types = {"user": str, "queue": str}
    return [
        Job(**{name: types.get(name, int)(value) for name, value in row.items() if value != ""})  # type: ignore[arg-type]
        for row in csv.DictReader(lines)
    ]


def _read_swf(lines: list[str]) -> list[Job]:
    """Fields by their place in the format's definition; -1 is unknown. Jobs that never ran are left out."""
    jobs = []
    for line in lines:
        words = line.partition(";")[0].split()
        if not words:
            continue
        number, submit, _, run, allocated, _, _, asked, estimate = (int(float(word)) for word in words[:9])
        user, queue = (int(float(word)) for word in (words[11], words[14]))
        size = asked if asked > 0 else allocated
        if size <= 0 or run < 0:
            continue
        run = max(run, 1)
        jobs.append(
            Job(
                number, submit, run, estimate if estimate > 0 else run, size,
                f"u{user}" if user > 0 else "", f"q{queue}" if queue > 0 else "default",
            )
        )  # fmt: skip
    return jobs


def stretched(jobs: Sequence[Job], most: float, seed: int) -> list[Job]:
    """The same jobs whose estimates are 1 to `most` times what they run, as people's estimates are."""
    dice = random.Random(seed)
    return [replace(job, estimate_s=round(job.run_s * dice.uniform(1, most))) for job in jobs]


def load(jobs: Sequence[Job], slots: int) -> float:
    """Work offered per slot and second of the time in which jobs were submitted."""
    return sum(job.work for job in jobs) / (slots * (jobs[-1].submit_s - jobs[0].submit_s))
