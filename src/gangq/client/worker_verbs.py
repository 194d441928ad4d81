# mypy: disable-error-code="empty-body"
"""Verbs of workers, their watchdogs and their hosts.

What a declaration means is in `gangq.client.verb`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from gangq.client import rows
from gangq.client.verb import (
    BigInt,
    BigInts,
    Chunks,
    Integers,
    Numeric,
    Object,
    Objects,
    Results,
    Seconds,
    Texts,
    verb,
)


class WorkerVerbs:
    """Verbs of workers, their watchdogs and their hosts."""

    @verb
    def register_worker(
        self,
        /,
        *,
        name: str,
        host: str,
        queues: Texts,
        slots: int | None = None,
        memory_mb: BigInt = 0,
        cpus: Numeric = 0,
        devices: Objects = (),
        **options: Any,
    ) -> rows.Registration:
        r"""Register a start of a worker; all its later calls carry the incarnation that this returns. `options`:
        `\dT+ gangq.worker_options` in psql. Raises `WorkerNameTaken` (its `holder` is the live incarnation),
        `InvalidInput`, `NotFound` (queue).
        """

    @verb
    def heartbeat(
        self,
        *,
        incarnation: BigInt,
        job_ids: BigInts = (),
        tokens: BigInts = (),
        beats: Results | None = None,
        readings: Objects | None = None,
        durable: bool | None = None,
    ) -> list[rows.Instruction]:
        """Renew the lease (it counts from when this was sent), bring the beats, return what to do per claim. Raises
        `IncarnationEnded`.
        """

    @verb
    def claim(
        self,
        *,
        incarnation: BigInt,
        request_id: UUID | str | None = None,
        max_jobs: int = 1,
        ports: Integers = (),
        sleep: bool = False,
        model: str | None = None,
        lane: str | None = None,
    ) -> list[rows.Claim]:
        """Take up to `max_jobs`; the same `request_id` returns the same claims after a lost reply. Raises
        `IncarnationEnded`.
        """

    @verb
    def barrier(self, *, job_id: BigInt, token: BigInt, port: int | None = None) -> list[rows.BarrierMember]:
        """Look at the barrier: one row per member of the present epoch, by rank. Raises `StaleToken` after a drain,
        `WrongState` for a job that is not a member of a gang, or when the port serves another gang of this host.
        """

    @verb
    def complete(
        self,
        *,
        job_ids: BigInts,
        tokens: BigInts,
        results: Results | None = None,
        strict: bool = True,
        connection: object | None = None,
    ) -> list[rows.Outcome]:
        """Finish jobs as done. With `connection`, in its transaction. Raises `StaleToken` where `strict`, and then
        nothing changes.
        """

    @verb
    def complete_and_claim(
        self,
        *,
        incarnation: BigInt,
        job_ids: BigInts,
        tokens: BigInts,
        results: Results | None = None,
        strict: bool = True,
        request_id: UUID | str | None = None,
        max_jobs: int = 1,
        ports: Integers = (),
        sleep: bool = False,
        model: str | None = None,
        quiet: bool = False,
        lane: str | None = None,
    ) -> rows.CompletedAndClaimed:
        """Finish jobs as done and take the next, in one round trip: :func:`complete`, then :func:`claim`."""

    @verb
    def fail(
        self,
        *,
        job_id: BigInt,
        token: BigInt,
        error: Object | None = None,
        retryable: bool = True,
        cause: str = "error",
        retry_in_s: Seconds | None = None,
        connection: object | None = None,
    ) -> str:
        """Report a failed attempt; return the new state. Raises `StaleToken`."""

    @verb
    def snooze(self, *, job_id: BigInt, token: BigInt, for_s: Seconds) -> str:
        """Hand a single job back, to be run again in `for_s`; return the new state. Raises `StaleToken`, and
        `WrongState` for a member of a gang.
        """

    @verb
    def release(self, *, job_ids: BigInts, tokens: BigInts, reason: str | None = None) -> list[rows.Outcome]:
        """Hand jobs back; outcomes are released, repeated or stale. Each counts a stop, and no attempt."""

    @verb
    def ack_preempted(self, *, job_id: BigInt, token: BigInt) -> str:
        """Confirm that the work is gone, after preempt or cancel; return the new state. Raises `StaleToken`."""

    @verb
    def save_checkpoint(
        self, *, job_id: BigInt, token: BigInt, step: BigInt, data: bytes, epoch: int | None = None
    ) -> None:
        """Store the state at `step`. Raises `TooLarge`, `StaleToken`."""

    @verb
    def load_checkpoint(self, *, job_id: BigInt, token: BigInt) -> rows.SavedCheckpoint | None:
        """Return the checkpoint this attempt resumes from, or None. Raises `StaleToken`."""

    @verb
    def inputs(self, *, job_id: BigInt, token: BigInt) -> list[rows.Input]:
        """Return how the jobs ended that this one waited for. Raises `StaleToken`, and `TooLarge` over 16 MiB."""

    @verb
    def append_log(self, *, job_ids: BigInts, tokens: BigInts, seqs: Integers, chunks: Chunks) -> None:
        """Store output, aligned lists. NUL characters are replaced: PostgreSQL's text cannot hold them."""

    @verb
    def retire_worker(self, *, incarnation: BigInt, final: bool = True) -> None:
        """Stop as asked: `final` False takes nothing new, True is gone and what it held is released."""

    @verb
    def watch_terms(self, *, task: str, device_class: str = "", queue: str | None = None) -> rows.WatchTerms:
        """What the watchdogs allow jobs of this task."""

    @verb
    def learn_gap(self, *, task: str, device_class: str, longest_s: Seconds, beats: BigInt) -> None:
        """Say how long the beats of a task stayed away before they came back. Raises `InvalidInput`."""

    @verb
    def trip(
        self,
        *,
        incarnation: BigInt,
        job_id: BigInt,
        token: BigInt,
        code: int,
        error: Object,
        evidence: Object | None = None,
        devices: Texts = (),
        exit_in_s: Seconds | None = None,
        class_: str | None = None,
    ) -> str:
        """Stop a job as a watchdog; return what came of it. Raises `StaleToken`, `InvalidInput`."""

    @verb
    def suspect(
        self,
        *,
        incarnation: BigInt,
        job_id: BigInt,
        token: BigInt,
        class_: str,
        evidence: Object | None = None,
        notify: bool | None = None,
        tripping: bool | None = None,
    ) -> str:
        """Put a doubt about a job on record, with its evidence; nothing is stopped. Raises `StaleToken`."""

    @verb
    def report_ready(
        self, *, job_id: BigInt, token: BigInt, ready: bool = True, port: int | None = None
    ) -> None:
        """Say that a replica of a service takes requests from now on, at this `port`, or does not. Raises
        `StaleToken` (also when it was told to stop), `WrongState` (no replica of a service), `InvalidInput`.
        """

    @verb
    def report_load(self, *, job_id: BigInt, token: BigInt, load: Numeric) -> None:
        """Say how busy a replica of a service is. Raises as `report_ready`."""

    @verb
    def predecessor(self, *, worker: str) -> list[rows.Predecessor]:
        """The latest incarnation of this name, ended or not; a list of one, or empty."""

    @verb
    def report_dead(self, *, worker: str, incarnation: BigInt, evidence: Object) -> int:
        """Say that every process this incarnation started is gone; return how many jobs that freed."""

    @verb
    def unproven(self, *, worker: str) -> list[rows.Unproven]:
        """Incarnations of this worker that ended by a trip and are not yet proven gone: `report_dead` them."""

    @verb
    def report_stuck(self, *, worker: str, incarnation: BigInt, evidence: Object) -> int:
        """Say that a process of this incarnation survived SIGKILL; return how many devices that withholds. Raises
        `InvalidInput` without evidence, `NotFound`.
        """

    @verb
    def bounce(self, *, incarnation: BigInt, host: str, report_only: bool = False) -> str:
        """Ask whether this host may restart its flagged worker: "go", or why not."""

    @verb
    def bounced(self, *, incarnation: BigInt, ok: bool, detail: Object | None = None) -> None:
        """Say how a restart went. Raises `NotFound`."""
