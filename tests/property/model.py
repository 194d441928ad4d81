"""The small model: who owns each job, what it may still spend, and what can never happen.

It knows nothing of SQL. A test tells it what every verb answered, and it says whether that could be so.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Worker:
    """A worker process. A zombie goes on with what it had, long after the database gave it up."""

    name: str
    incarnation: int
    heard_at: float
    lease_s: float
    alive: bool = True  # it renews; silent, its work goes on until the lease ends
    holds: dict[int, int] = field(default_factory=dict)  # job -> token: what its processes are working on

    def lease_live(self, now: float) -> bool:
        """Whether its work may still be running: a correct worker kills it before this turns false."""
        return now < self.heard_at + self.lease_s


@dataclass
class Gang:
    """A gang as it was asked for."""

    ids: list[int]
    least: list[int]  # per role, in rank order: members without which it does not run
    most: list[int]
    policy: str = "restart_gang"
    may_split: bool = False  # its timeout makes single jobs of it


@dataclass
class Job:
    """A job, solo or a member."""

    id: int
    gang: int | None = None
    rank: int | None = None
    owner: int | None = None  # the token that may speak for it
    tokens: list[int] = field(default_factory=list)
    final: tuple[str, int | None] | None = None


class Broken(AssertionError):
    """Something happened that the model says cannot."""


class Model:
    """What must be true, step by step."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.gangs: dict[int, Gang] = {}
        self.workers: dict[int, Worker] = {}
        self.endings: dict[tuple[int, str], str] = {}
        self.newest_token = 0

    # What was asked for -------------------------------------------------------------------------------------

    def submitted(self, ids: list[int], gang_id: int | None = None, gang: Gang | None = None) -> None:
        """New jobs, in rank order when they are a gang."""
        for rank, job_id in enumerate(ids):
            if job_id in self.jobs:
                raise Broken(f"job id {job_id} was given twice")
            self.jobs[job_id] = Job(job_id, gang_id, rank if gang_id is not None else None)
        if gang_id is not None:
            self.gangs[gang_id] = gang or Gang(ids, [len(ids)], [len(ids)])

    def claimed(self, incarnation: int, job_id: int, token: int, now: float) -> None:
        """A worker was given a job it did not have: nobody else may be at it under a live lease."""
        job = self.jobs[job_id]
        if token <= self.newest_token:
            raise Broken(f"token {token} of job {job_id} is not newer than {self.newest_token}")
        if job.owner is not None:
            raise Broken(f"job {job_id} was claimed while token {job.owner} owns it")
        for worker in self.workers.values():
            if job_id in worker.holds and worker.lease_live(now):
                raise Broken(f"job {job_id} runs twice: {worker.name} is at it under a live lease")
        self.newest_token = token
        job.owner = token
        job.tokens.append(token)
        self.workers[incarnation].holds[job_id] = token

    def stopped(self, job_id: int, token: int) -> None:
        """The work under this token has ended, and its worker said so or is proven dead."""
        for worker in self.workers.values():
            if worker.holds.get(job_id) == token:
                del worker.holds[job_id]

    # What is seen -------------------------------------------------------------------------------------------

    def owners(self, tokens: dict[int, int | None]) -> None:
        """The tokens the database holds now. One can vanish (reaped), but never come from nowhere."""
        for job_id, job in self.jobs.items():
            seen = tokens.get(job_id)
            if seen is not None and seen != job.owner:
                raise Broken(f"job {job_id} is owned by token {seen}, given to nobody; expected {job.owner}")
            job.owner = seen

    def conserved(self, live: list[int], ended: set[int]) -> None:
        """Every job is live, or has ended, exactly once; none is lost."""
        if len(live) != len(set(live)):
            raise Broken("a job is live twice")
        missing = set(self.jobs) - set(live) - ended
        if missing:
            raise Broken(f"jobs {sorted(missing)} are neither live nor in history")
        stray = set(live) - set(self.jobs)
        if stray:
            raise Broken(f"jobs {sorted(stray)} were never submitted")

    def immutable(self, endings: dict[tuple[int, str], str]) -> None:
        """Rows of history never change and never go."""
        for key, text in self.endings.items():
            if endings.get(key) != text:
                raise Broken(f"the ending of job {key[0]} changed from {text} to {endings.get(key)}")
        self.endings = endings

    def members(self, live: dict[int, int | None]) -> None:
        """Once in a gang a job stays in it, unless its timeout has made single jobs of all its members."""
        for job_id, seen in live.items():
            job = self.jobs[job_id]
            if seen is None and job.gang is not None and self.gangs[job.gang].may_split:
                for other in self.gangs[job.gang].ids:
                    if live.get(other) is not None:
                        raise Broken(f"gang {job.gang} was split, and job {other} is still in one")
                    self.jobs[other].gang = None
            if seen != job.gang:
                raise Broken(f"job {job_id} is a member of gang {seen}, expected {job.gang}")

    def gone(self, gang_id: int, world_size: int, members: list[tuple[int, str, bool]]) -> None:
        """Past the barrier no role has fewer members than it needs, and who is missing is to be replaced.

        members: the place at its largest, the state, and whether it is part of the epoch.
        """
        gang = self.gangs[gang_id]
        if [rank for rank, _, _ in members] != list(range(len(gang.ids))):
            raise Broken(f"gang {gang_id} went with {members} of {len(gang.ids)}")
        inside = [(rank, state) for rank, state, part in members if part]
        if len(inside) != world_size:
            raise Broken(f"gang {gang_id} has a world size of {world_size}, and {inside}")
        missing = [rank for rank, state in inside if state in ("blocked", "reserved", "pending", "waiting")]
        if missing and gang.policy != "restart_member":
            raise Broken(f"gang {gang_id} is past its barrier without ranks {missing}")
        first = 0
        for least, most in zip(gang.least, gang.most, strict=True):
            ranks = range(first, first + most)
            there = [r for r, state, part in members if r in ranks and (part or state == "done")]
            if len(there) < least:
                raise Broken(f"gang {gang_id} runs with {there} of a role that needs {least}: {members}")
            first += most
