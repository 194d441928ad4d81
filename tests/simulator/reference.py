"""The textbook scheduler over interchangeable slots, to hold gangq's against.

First come, first served, with backfilling past planned starts: the first `reservations` jobs that must wait get
the earliest start that the estimates of what runs allow, and others start now only if that delays none of those.
1 is EASY (D. A. Lifka 1995; A. W. Mu'alem and D. G. Feitelson, IEEE TPDS 12(6), 2001); 0 starts whatever fits, in
order. All planned starts are worked out anew whenever something was submitted or has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from joblog import Job
from outcome import Ran


class Profile:
    """Free slots from now on, as steps: from `times[n]` on `free[n]`."""

    def __init__(self, now: int, free: int, endings: Sequence[tuple[int, int]]) -> None:
        self.times, self.free = [now], [free]
        for at, size in sorted(endings):
            if at == self.times[-1]:
                self.free[-1] += size
            else:
                self.times.append(at)
                self.free.append(self.free[-1] + size)

    def start(self, size: int, length: int) -> int:
        """The earliest moment from which `size` slots stay free for `length` seconds."""
        first = 0
        for n, at in enumerate(self.times):
            if first < n and at >= self.times[first] + length:
                break
            if self.free[n] < size:
                first = n + 1
        return self.times[first]

    def take(self, at: int, size: int, length: int) -> None:
        """They are taken from then on, for that long."""
        until = at + length
        for moment in (at, until):
            if moment not in self.times:
                n = sum(time < moment for time in self.times)
                self.times.insert(n, moment)
                self.free.insert(n, self.free[n - 1])
        for n, time in enumerate(self.times):
            if at <= time < until:
                self.free[n] -= size


def simulate(jobs: Sequence[Job], slots: int, reservations: int) -> list[Ran]:
    """When each job started and ended. One that outruns its estimate is stopped there."""
    waiting: list[Job] = []
    endings: list[tuple[int, int, Job]] = []  # real end, id, job
    planned: dict[int, tuple[int, int]] = {}  # what runs: its end as estimated, and its size
    free, done, coming = slots, [], list(reversed(jobs))
    while coming or endings:
        now = min(
            coming[-1].submit_s if coming else endings[0][0],
            endings[0][0] if endings else coming[-1].submit_s,
        )
        while endings and endings[0][0] == now:
            _, _, job = heapq.heappop(endings)
            del planned[job.id]
            free += job.size
        while coming and coming[-1].submit_s == now:
            waiting.append(coming.pop())
        profile = Profile(now, free, list(planned.values()))
        held, started = 0, set()
        for job in waiting:
            if job.size > free and held >= reservations:
                continue
            at = profile.start(job.size, job.estimate_s)
            if at == now and job.size <= free:
                length = min(job.run_s, job.estimate_s)
                heapq.heappush(endings, (now + length, job.id, job))
                planned[job.id] = (now + job.estimate_s, job.size)
                free -= job.size
                started.add(job.id)
                done.append(Ran(job, now, now + length))
            elif held < reservations:
                held += 1
            else:
                continue
            profile.take(at, job.size, job.estimate_s)
        waiting = [job for job in waiting if job.id not in started]
    return done
