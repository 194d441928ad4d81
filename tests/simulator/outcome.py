"""What a schedule was worth: how busy the slots were, and how long jobs of each size waited."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from joblog import Job

SHORTEST_S = 10
"""Bounded slowdown counts no job as shorter than this: a second's wait of a job of a second is no drama."""


@dataclass(frozen=True)
class Ran:
    """A job, and when it ran (its last run, if it was displaced before)."""

    job: Job
    start_s: int
    end_s: int
    displaced: int = 0

    @property
    def wait_s(self) -> int:
        return self.start_s - self.job.submit_s

    @property
    def slowdown(self) -> float:
        """Bounded: how many times longer it took than it would have alone."""
        return max(1.0, (self.end_s - self.job.submit_s) / max(self.job.run_s, SHORTEST_S))

    @property
    def outran(self) -> bool:
        """It was stopped at its budget."""
        return self.end_s - self.start_s < self.job.run_s


@dataclass(frozen=True)
class Class:
    """Jobs of up to `most` slots that are more than the class before has."""

    name: str
    most: int


def classes(slots: int) -> list[Class]:
    """One slot, then up to 1/32, 1/8, under 1/2, and at least half of the fleet."""
    bounds = sorted({1, slots // 32, slots // 8, slots // 2 - 1, slots} - {-1, 0})
    names = ["1", *(f"{low + 1}-{high}" for low, high in itertools.pairwise(bounds))]
    return [Class(name, most) for name, most in zip(names, bounds, strict=True)]


@dataclass(frozen=True)
class Figures:
    """Of a set of jobs; seconds."""

    jobs: int
    wait_s: float
    longest_wait_s: int
    slowdown: float


@dataclass(frozen=True)
class Outcome:
    """What one policy did with one log. ``utilisation``: work done per slot until the last job ended."""

    policy: str
    utilisation: float
    all: Figures
    by_class: dict[str, Figures]
    outran: int
    displaced: int
    took_s: float = 0.0

    @property
    def largest(self) -> Figures:
        """Of the jobs that need at least half of the fleet."""
        return list(self.by_class.values())[-1]


def judge(policy: str, ran: Sequence[Ran], slots: int, took_s: float = 0.0) -> Outcome:
    """The figures of a whole schedule."""
    span = max(r.end_s for r in ran) - min(r.job.submit_s for r in ran)
    busy = sum(r.job.size * (r.end_s - r.start_s) for r in ran)
    by_class, below = {}, 0
    for kind in classes(slots):
        mine = [r for r in ran if below < r.job.size <= kind.most]
        below = kind.most
        by_class[kind.name] = _figures(mine)
    return Outcome(
        policy,
        busy / (slots * span),
        _figures(ran),
        by_class,
        sum(r.outran for r in ran),
        sum(r.displaced for r in ran),
        took_s,
    )


def _figures(ran: Sequence[Ran]) -> Figures:
    if not ran:
        return Figures(0, 0.0, 0, 1.0)
    return Figures(
        len(ran),
        statistics.fmean(r.wait_s for r in ran),
        max(r.wait_s for r in ran),
        statistics.fmean(r.slowdown for r in ran),
    )


def most_at_once(ran: Sequence[Ran]) -> int:
    """The most slots that were in use at any moment."""
    changes = sorted([(r.end_s, -r.job.size) for r in ran] + [(r.start_s, r.job.size) for r in ran])
    used = most = 0
    for _, size in changes:
        used += size
        most = max(most, used)
    return most
