# mypy: disable-error-code="empty-body"
"""Verbs that read the views.

What a declaration means is in `gangq.client.verb`.
"""

from __future__ import annotations

from typing import TypeVar

from gangq.client import rows
from gangq.client.verb import (
    AfterId,
    AfterSeq,
    BatchName,
    BatchTag,
    BigInt,
    Device,
    Ids,
    OfBatch,
    Since,
    State,
    Steps,
    Tag,
    Until,
    verb,
)
from gangq.errors import NotFound

T = TypeVar("T")

_LIMIT = 1000
"""How many rows a look without a limit reads: more are asked for."""


def _only(found: list[T], what: str) -> T:
    if not found:
        raise NotFound(
            f"{what} does not exist: it was never committed, it is older than its retention, or this is "
            "another database"
        )
    return found[0]


class Views:
    """Verbs that read the views: see `Client`."""

    @verb(view="jobs", order="id desc")
    def jobs(
        self,
        *,
        ids: Ids | None = None,
        state: State | None = None,
        queue: str | None = None,
        task: str | None = None,
        gang_id: BigInt | None = None,
        worker: str | None = None,
        batch_id: BigInt | None = None,
        name: BatchName | None = None,
        tag: BatchTag | None = None,
        submitter: str | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.JobRow]:
        """Jobs, newest first, live and ended; `name` and `tag` are those of a batch."""

    @verb(view="batches", order="id desc")
    def batches(
        self,
        *,
        ids: Ids | None = None,
        name: str | None = None,
        tag: Tag | None = None,
        queue: str | None = None,
        task: str | None = None,
        submitter: str | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.BatchRow]:
        """Batches, newest first, and how far each is."""

    @verb(view="gangs", order="id desc")
    def gangs(
        self,
        *,
        ids: Ids | None = None,
        state: State | None = None,
        queue: str | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.GangRow]:
        """Gangs, newest first, live and ended."""

    @verb
    def job(self, *, id: int) -> Steps[rows.JobRow]:
        """The job with this id. Raises `NotFound`."""
        return _only((yield from Views.jobs(ids=[id])), f"job {id}")

    @verb
    def gang(self, *, id: int) -> Steps[rows.GangRow]:
        """The gang with this id. Raises `NotFound`."""
        return _only((yield from Views.gangs(ids=[id])), f"gang g{id}")

    @verb
    def batch(self, *, id: int) -> Steps[rows.BatchRow]:
        """The batch with this id. Raises `NotFound`."""
        return _only((yield from Views.batches(ids=[id])), f"batch b{id}")

    @verb(view="jobs")
    def job_states(self, *, ids: Ids | None = None, batch_id: BigInt | None = None) -> dict[int, str]:
        """The state of each of these jobs that exists, or of each job of this batch: what `wait` polls."""

    @verb(view="gangs")
    def gang_states(self, *, ids: Ids) -> dict[int, str]:
        """The state of each of these gangs that exists."""

    @verb(view="batches")
    def batch_states(self, *, ids: Ids) -> dict[int, str]:
        """The state of each of these batches that exists; its jobs are not counted."""

    @verb(view="workers", order="name, incarnation")
    def workers(self, *, name: str | None = None, host: str | None = None) -> list[rows.WorkerRow]:
        """Workers by name, then incarnation."""

    @verb(view="devices", order="host, index, uuid")
    def devices(self, *, host: str | None = None, state: str | None = None) -> list[rows.DeviceRow]:
        """Devices by host and index."""

    @verb(view="waiting", order="priority desc, since, id")
    def waiting(self, *, queue: str | None = None, limit: int | None = None) -> list[rows.WaitingRow]:
        """What waits and why, in the order it would run."""

    @verb(view="timeline")
    def timeline(self, *, gang_id: BigInt) -> list[rows.TimelineRow]:
        """A gang's life in order."""

    @verb(view="drains", order="started_at desc, gang_id")
    def drains(self, *, gang_id: BigInt | None = None, limit: int | None = None) -> list[rows.DrainRow]:
        """Drains, newest first."""

    @verb(view="violations", order="rule, subject")
    def violations(self) -> list[rows.ViolationRow]:
        """Broken invariants: there should be none."""

    @verb(view="events", order="id")
    def events(
        self,
        *,
        job_id: BigInt | None = None,
        gang_id: BigInt | None = None,
        batch_id: OfBatch | None = None,
        kind: str | None = None,
        after_id: AfterId | None = None,
        limit: int | None = _LIMIT,
    ) -> list[rows.EventRow]:
        """Events in order of writing; `after_id` for following them, `batch_id`: of its jobs."""

    @verb(view="passes", order="at")
    def passes(self, *, since: Since | None = None, until: Until | None = None) -> list[rows.PassRow]:
        """Parts of passes that decided something, oldest first. For gangq_admin."""

    @verb(view="trips", order="at desc, job_id")
    def trips(
        self,
        *,
        job_id: BigInt | None = None,
        gang_id: BigInt | None = None,
        worker: str | None = None,
        host: str | None = None,
        code: int | None = None,
        class_: str | None = None,
        task: str | None = None,
        device: Device | None = None,
        since: Since | None = None,
        limit: int | None = None,
    ) -> list[rows.TripRow]:
        """Trips of watchdogs, newest first, also those that only notified or were held. `device`: its job held it.
        `since`: not older.
        """

    @verb(view="flagged", order="host, worker")
    def flagged(self, *, host: str | None = None) -> list[rows.FlaggedRow]:
        """Workers that fell silent while they held jobs, neither heard nor replaced since."""

    @verb(view="cordoned", order="kind, name")
    def cordoned(self, *, kind: str | None = None, name: str | None = None) -> list[rows.CordonRow]:
        """Hosts and workers (`kind`) that are given nothing new, and what still runs there."""

    @verb(view="attempts", order="started_at, token")
    def attempts(
        self, *, job_id: BigInt | None = None, gang_id: BigInt | None = None, limit: int | None = _LIMIT
    ) -> list[rows.AttemptRow]:
        """Attempts in order, those that have ended and those that run."""

    @verb(view="notifications", order="target")
    def notifications(self, *, target: str | None = None) -> list[rows.NotificationRow]:
        """Notification targets: what each is told of, and how far."""

    @verb(view="undelivered", order="target, id")
    def undelivered(
        self, *, target: str | None = None, state: State | None = None, limit: int | None = _LIMIT
    ) -> list[rows.UndeliveredRow]:
        """Notifications that wait to be delivered, and those that were given up (`state` dead)."""

    @verb(view="job_evidence", order="at")
    def evidence(
        self, *, job_id: BigInt, kind: str | None = None, limit: int | None = None
    ) -> list[rows.EvidenceRow]:
        """What watchdogs saw of a job, in order; `kind` as of its event. For those who may read the job."""

    @verb(view="job_logs", order="token, seq")
    def logs(
        self, *, job_id: BigInt, token: BigInt | None = None, after_seq: AfterSeq | None = None
    ) -> list[rows.LogRow]:
        """A job's output in order, of every attempt or of the one with `token`; `after_seq` for following it."""

    @verb(view="queues")
    def queues(self, *, name: str | None = None) -> list[rows.QueueRow]:
        """Queues as a tree: each parent before its children."""

    @verb(view="limits", order="name")
    def limits(self, *, name: str | None = None) -> list[rows.LimitRow]:
        """Limit keys: how many jobs that name each may be placed at once, and how many are."""

    @verb(view="tasks", order="task, device_class")
    def tasks(self, *, task: str | None = None) -> list[rows.TaskRow]:
        """What was set for each task and learned of its beats, by task and class of devices."""

    @verb(view="schedules", order="name")
    def schedules(self, *, name: str | None = None) -> list[rows.ScheduleRow]:
        """Schedules by name: when each is due, what it submitted last, and why it did not."""

    @verb(view="services", order="name")
    def services(self, *, name: str | None = None) -> list[rows.ServiceRow]:
        """Services by name: how many replicas are wanted and ready, and what is in the way."""

    @verb(view="service_gangs", order="service, gang_id")
    def service_gangs(self, *, service: str | None = None) -> list[rows.ServiceGangRow]:
        """The gangs of services, those that leave included."""

    @verb(view="scaling", order="service")
    def scaling(self, *, service: str | None = None) -> list[rows.ScalingRow]:
        """How the services are scaled that are: how many replicas are asked for, why and since when."""

    @verb(view="endpoints", order="service, gang_id, rank")
    def endpoints(self, *, service: str | None = None) -> list[rows.EndpointRow]:
        """Where the replicas of services take requests, whole gangs only. LISTEN gangq_endpoints tells of changes."""

    @verb(view="retention")
    def retention(self, *, class_: str | None = None) -> list[rows.RetentionRow]:
        """What is kept of what has ended, by class and table; no table is read for it."""
