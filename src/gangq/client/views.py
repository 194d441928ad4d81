# mypy: disable-error-code="empty-body"
"""Verbs that read the views.

What a declaration means is in `gangq.client.verb`.
"""

from __future__ import annotations

from typing import TypeVar

from gangq.client import rows
from gangq.client.verb import (
    BigInt,
    BigInts,
    State,
    Steps,
    Time,
    in_steps,
    view,
)
from gangq.errors import NotFound

T = TypeVar("T")

_LIMIT = 1000
"""How many rows a look without a limit reads: more are asked for."""


def _only(found: list[T], what: str, id: int) -> T:
    if not found:
        raise NotFound(
            f"{what} {id} does not exist: it was never committed, it is older than its retention, or this is "
            "another database"
        )
    return found[0]


class Views:
    """Verbs that read the views."""

    @view("id desc")
    def jobs(
        self,
        *,
        ids: BigInts | None = None,
        state: State | None = None,
        queue: str | None = None,
        task: str | None = None,
        gang_id: BigInt | None = None,
        worker: str | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.JobRow]:
        """Jobs, newest first, live and ended. All filters given must hold. `limit`: at most so many, None for all."""

    @view("id desc")
    def gangs(
        self,
        *,
        ids: BigInts | None = None,
        state: State | None = None,
        queue: str | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.GangRow]:
        """Gangs, newest first, live and ended. All filters given must hold. `limit`: at most so many, None for
        all.
        """

    @in_steps
    def job(self, *, id: int) -> Steps[rows.JobRow]:
        """The job with this id. Raises `NotFound`."""
        return _only((yield from Views.jobs(ids=[id])), "job", id)

    @in_steps
    def gang(self, *, id: int) -> Steps[rows.GangRow]:
        """The gang with this id. Raises `NotFound`."""
        return _only((yield from Views.gangs(ids=[id])), "gang", id)

    @view(view="jobs")
    def job_states(self, *, ids: BigInts) -> dict[int, str]:
        """The state of each of these jobs that exists: what `wait` polls."""

    @view(view="gangs")
    def gang_states(self, *, ids: BigInts) -> dict[int, str]:
        """The state of each of these gangs that exists."""

    @view("name, incarnation")
    def workers(self, *, name: str | None = None, host: str | None = None) -> list[rows.WorkerRow]:
        """Workers by name, then incarnation."""

    @view("host, index, uuid")
    def devices(self, *, host: str | None = None, state: str | None = None) -> list[rows.DeviceRow]:
        """Devices by host and index."""

    @view("priority desc, since, id")
    def waiting(self, *, queue: str | None = None, limit: int | None = None) -> list[rows.WaitingRow]:
        """What waits and why, in the order it would run."""

    @view()
    def timeline(self, *, gang_id: BigInt) -> list[rows.TimelineRow]:
        """A gang's life in order."""

    @view("started_at, gang_id")
    def drains(self, *, gang_id: BigInt | None = None, limit: int | None = None) -> list[rows.DrainRow]:
        """Drains, oldest first."""

    @view("rule, subject")
    def violations(
        self,
    ) -> list[rows.ViolationRow]:
        """Broken invariants: there should be none."""

    @view("id")
    def events(
        self,
        *,
        job_id: BigInt | None = None,
        gang_id: BigInt | None = None,
        kind: str | None = None,
        after_id: BigInt | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.EventRow]:
        """Events in order of writing; `after_id` for following them. `limit`: at most so many, None for all."""

    @view("at desc, job_id")
    def trips(
        self,
        *,
        job_id: BigInt | None = None,
        gang_id: BigInt | None = None,
        worker: str | None = None,
        host: str | None = None,
        code: int | None = None,
        since: Time | None = None,
        limit: int | None = None,
    ) -> list[rows.TripRow]:
        """Trips of watchdogs, newest first, also those that only notified or were held. `since`: not older."""

    @view("host, worker")
    def flagged(self, *, host: str | None = None) -> list[rows.FlaggedRow]:
        """Workers that fell silent while they held jobs, neither heard nor replaced since."""

    @view("kind, name")
    def cordoned(self, *, kind: str | None = None, name: str | None = None) -> list[rows.CordonRow]:
        """Hosts and workers (`kind`) that are given nothing new, and what still runs there."""

    @view("started_at, token")
    def attempts(
        self, *, job_id: BigInt | None = None, gang_id: BigInt | None = None, limit: int | None = _LIMIT
    ) -> list[rows.AttemptRow]:
        """Attempts in order, those that have ended and those that run."""

    @view("target")
    def notifications(self, *, target: str | None = None) -> list[rows.NotificationRow]:
        """Notification targets: what each is told of, and how far."""

    @view("target, id")
    def undelivered(
        self, *, target: str | None = None, state: State | None = None, limit: int | None = _LIMIT
    ) -> list[rows.UndeliveredRow]:
        """Notifications that wait to be delivered, and those that were given up (`state` dead)."""

    @view("at", view="job_evidence")
    def evidence(
        self, *, job_id: BigInt, kind: str | None = None, limit: int | None = None
    ) -> list[rows.EvidenceRow]:
        """What watchdogs saw of a job, in order; `kind` as of its event. For those who may read the job."""

    @view("token, seq", view="job_logs")
    def logs(
        self, *, job_id: BigInt, token: BigInt | None = None, after_seq: int | None = None
    ) -> list[rows.LogRow]:
        """A job's output in order, of every attempt or of the one with `token`; `after_seq` for following it."""

    @view()
    def queues(self, *, name: str | None = None) -> list[rows.QueueRow]:
        """Queues as a tree: each parent before its children."""

    @view("task, device_class")
    def tasks(self, *, task: str | None = None) -> list[rows.TaskRow]:
        """What was set for each task and learned of its beats, by task and class of devices."""

    @view()
    def retention(self, *, class_: str | None = None) -> list[rows.RetentionRow]:
        """What is kept of what has ended, by class and table; no table is read for it."""
