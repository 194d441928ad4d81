# mypy: disable-error-code="empty-body"
"""Verbs of submitters: work enters, and is called off.

What a declaration means is in `gangq.client.verb`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack
from uuid import UUID

from gangq import tracing
from gangq.client import rows
from gangq.client.options import ScheduleOptions, ServiceOptions, SubmitGangOptions, SubmitOptions
from gangq.client.verb import (
    After,
    BigInt,
    BigInts,
    Interval,
    Json,
    Options,
    Payloads,
    Query,
    Seconds,
    Steps,
    Texts,
    Time,
    Verb,
    in_tuples,
    verb,
)
from gangq.durations import Duration, seconds
from gangq.errors import Busy, InvalidInput

_BATCH = 500
_PATIENCE_S = 2.0


def new_request_id() -> str:
    """A UUID of version 7: it begins with the time, so that those of one time are neighbours in the index.

    Not from `random`: a forked process would draw its parent's numbers again, and its submissions would be taken for
    repetitions.
    """
    drawn = os.urandom(9).hex()
    return f"{time.time_ns() // 1_000_000:012x}7{drawn[:3]}8{drawn[3:]}"


def _note_span(options: dict[str, Any]) -> None:
    trace = tracing.active()
    if trace is not None:
        options["trace"] = trace


def _before_submit(given: dict[str, Any], options: dict[str, Any], connection: object) -> None:
    # Our own connection commits at once: notify only if somebody sleeps now. In a caller's transaction that look
    # would be stale by the time it commits, and the transaction itself says what came of it.
    _note_span(options)
    if connection is None:
        options["wake"] = "sleepers"
        given["request_id"] = given.get("request_id") or new_request_id()


def _before_submit_gang(given: dict[str, Any], options: dict[str, Any], connection: object) -> None:
    _note_span(options)
    roles = options.get("roles")
    if given.get("payload") is not None and options.get("payloads") is not None:
        raise InvalidInput(
            "both payload and payloads are given: payload for all ranks alike, or payloads for each"
        )
    if (given.get("size") is None) == (roles is None):
        raise InvalidInput(
            "a gang has either a size or roles: size=4 for members alike, or roles=[Role(...), ...]"
        )
    if roles is not None and options.get("min_size") is not None:
        raise InvalidInput(
            "both roles and min_size are given: give the roles that may have fewer members their own min"
        )
    if connection is None:
        options["request_id"] = options.get("request_id") or new_request_id()


def _in_batches(
    verb: Verb[..., Any], first: Query[Any], given: Mapping[str, Any]
) -> Steps[list[rows.StateChange]]:
    """The whole list first, so that what is wrong with it is said before anything changes; then what was left."""
    done: list[rows.StateChange] = []
    asked, waiting = first, list[rows.StateChange]()
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        found: list[rows.StateChange] = yield asked
        changed = [one for one in found if one.state != "left"]
        done += changed
        waiting += [one for one in found if one.state == "left"]
        if not waiting:
            return done
        if changed:
            give_up = time.monotonic() + _PATIENCE_S
        elif time.monotonic() > give_up:
            total = len(set(given.get("job_ids", ()))) + len(set(given.get("gang_ids", ())))
            raise Busy(
                f"{first.name}: {len(waiting)} of {total} are held by other transactions; the others are done: "
                "call it again with those"
            )
        else:
            yield 0.05
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        jobs = [one.job_id for one in batch if one.job_id is not None]
        gangs = [one.gang_id for one in batch if one.job_id is None and one.gang_id is not None]
        asked = verb.build(**{**given, "job_ids": jobs, "gang_ids": gangs})


def _in_pages(
    verb: Verb[..., Any], first: Query[Any], given: Mapping[str, Any]
) -> Steps[list[rows.StateChange]]:
    """What fails again while this goes on is not retried once more."""
    until = given.get("until") or (yield from _now(first.connection))
    found: list[rows.StateChange] = []
    after_id = given.get("after_id") or 0
    while True:
        page: list[rows.StateChange] = yield verb.build(**{**given, "until": until, "after_id": after_id})
        if not page:
            return found
        found += page
        after_id = max(change.job_id or 0 for change in page)


def _now(connection: object | None = None) -> Steps[datetime]:
    now: datetime = yield Query(
        "gangq.now", "select gangq.now()", {}, lambda found: found[0][0], connection, in_tuples
    )
    return now


def _before_set_schedule(given: dict[str, Any], _options: dict[str, Any], _connection: object) -> None:
    if given.get("cron") is not None:
        from gangq.due import Cron

        Cron(given["cron"], given.get("tz") or "UTC")  # Only Python reads all of it.


def from_now(
    delay: Duration, *, connection: object | None = None, inside_job: bool = False
) -> Steps[datetime]:
    """Return the moment so long from now, by the clock that will judge it: the database's, which a job cannot ask."""
    later = timedelta(seconds=seconds(delay, "delay"))
    if inside_job:
        return datetime.now(UTC) + later
    return (yield from _now(connection)) + later


class SubmitterVerbs:
    """Verbs of submitters: work enters, and is called off."""

    @verb(before=_before_submit, repeatable=True)
    def submit(
        self,
        *,
        task: str,
        queue: str | None = None,
        payloads: Payloads = ({},),
        priority: int | None = None,
        gpus: int | None = None,
        due_at: Time | None = None,
        after: After | None = None,
        request_id: UUID | str | None = None,
        connection: object | None = None,
        **options: Unpack[SubmitOptions],
    ) -> list[int]:
        """Submit one job per payload; return their ids, in order. With `connection`, in its transaction.

        `options`: see `gangq.client.options.SubmitOptions`. What is None is as the workers declare the task, then as
        usual: queue default, priority 0, no needs.

        `request_id`: a UUID, new for each submission; within an hour the same one returns the same ids and submits
        nothing. Without `connection` a call has one by itself, and is sent again, once and before its time is up,
        where its connection breaks before the answer. Pass your own to repeat a call yourself after
        `DatabaseUnreachable`. Raises `InvalidInput`, `NotFound`, `TooLarge`, `WrongState` (the queue is draining),
        `Busy` (a call with this `request_id` is under way), `WrongIsolation` (a `request_id` in a transaction that is
        not READ COMMITTED).
        """

    @verb(before=_before_submit_gang, repeatable=True)
    def submit_gang(
        self,
        *,
        task: str | None = None,
        size: int | None = None,
        queue: str | None = None,
        payload: Json | None = None,
        priority: int | None = None,
        gpus: int | None = None,
        due_at: Time | None = None,
        after: After | None = None,
        connection: object | None = None,
        **options: Unpack[SubmitGangOptions],
    ) -> rows.GangSubmitted:
        """Submit a gang: members that start together or not at all; resources are per member.

        - `size` members alike, or the option `roles`: ranks in their order, where what a role does not say is as
          given here. `payload` goes to every member, or the option `payloads` one to each rank.
        - `options`: see `gangq.client.options.SubmitGangOptions`.
        - What is None is as the workers declare the task, then as usual; roles have each one's task's.

        With `connection`, in its transaction. Raises `InvalidInput` (also for what exceeds a limit of its queue, or
        all hardware known), `NotFound`, `TooLarge`, `WrongState` (the queue is draining), `Busy`, `WrongIsolation`.
        """

    @verb(before=_before_submit, repeatable=True)
    def submit_unique(
        self,
        *,
        unique_key: str,
        task: str,
        queue: str | None = None,
        payload: Json | None = None,
        priority: int | None = None,
        gpus: int | None = None,
        due_at: Time | None = None,
        after: After | None = None,
        keep_s: Seconds | None = None,
        replaces: bool = False,
        request_id: UUID | str | None = None,
        connection: object | None = None,
        **options: Unpack[SubmitOptions],
    ) -> rows.UniqueSubmitted:
        """Submit one job, unless `unique_key` stands for one already: then that one's id. The rest, and what is
        raised, is as in `submit`.
        """

    @verb(before=_before_submit_gang, repeatable=True)
    def submit_unique_gang(
        self,
        *,
        unique_key: str,
        task: str | None = None,
        size: int | None = None,
        queue: str | None = None,
        payload: Json | None = None,
        priority: int | None = None,
        gpus: int | None = None,
        due_at: Time | None = None,
        after: After | None = None,
        keep_s: Seconds | None = None,
        connection: object | None = None,
        **options: Unpack[SubmitGangOptions],
    ) -> rows.UniqueGangSubmitted:
        """Submit a gang, unless `unique_key` stands for one already; see `submit_unique` and `submit_gang`."""

    @verb(then=_in_batches)
    def cancel(
        self,
        *,
        job_ids: BigInts = (),
        gang_ids: BigInts = (),
        reason: str | None = None,
        connection: object | None = None,
    ) -> list[rows.StateChange]:
        """Cancel jobs and gangs; running ones are told to stop first. Raises `NotFound`, and `Busy` for what another
        transaction holds for 2 s. Some hundreds at a time, each in a transaction of its own unless `connection` is
        given.
        """

    @verb(then=_in_batches)
    def retry(self, *, job_ids: BigInts = (), gang_ids: BigInts = ()) -> list[rows.StateChange]:
        """Run jobs and gangs that failed or were cancelled again, under their ids. What was cancelled for one of them
        waits for it again. One whose process tripped and may still run is scheduled until that is gone. Raises
        `NotFound`, `WrongState`, and `Busy` for what another transaction holds for 2 s. Some hundreds at a time, each
        in a transaction of its own.
        """

    @verb(then=_in_pages)
    def retry_failed(
        self,
        *,
        batch_id: BigInt | None = None,
        name: str | None = None,
        tag: str | None = None,
        queue: str | None = None,
        task: str | None = None,
        submitter: str | None = None,
        since: Time | None = None,
        until: Time | None = None,
        after_id: BigInt | None = None,
        dry_run: bool = False,
    ) -> list[rows.StateChange]:
        """Retry the single jobs that have failed and that this login may retry; all that is given must hold. Some
        hundreds at a time, each in a transaction of its own. Returns the jobs with their states. Raises what `retry`
        raises.
        """

    @verb(then=_in_batches)
    def set_priority(
        self, *, priority: int, job_ids: BigInts = (), gang_ids: BigInts = ()
    ) -> list[rows.StateChange]:
        """Change the priority (-1000 to 1000) of live jobs and gangs. Raises `InvalidInput`, `NotFound`, and `Busy`
        for what another transaction holds for 2 s. Some hundreds at a time, each in a transaction of its own.
        """

    @verb(before=_before_set_schedule)
    def set_schedule(
        self,
        *,
        name: str,
        task: str,
        cron: str | None = None,
        every: Interval | None = None,
        tz: str | None = None,
        payload: Json | None = None,
        work: Options | None = None,
        connection: object | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Make a schedule, or change it as a whole; return made, changed or same. Raises `InvalidInput`, `NotFound`
        (no such queue), `TooLarge`, `NotAllowed` (another login stored it), `Busy`.
        """

    @verb
    def pause_schedule(
        self, *, name: str, until: Time | None = None, connection: object | None = None
    ) -> None:
        """Submit nothing of a schedule `until` then [until `resume_schedule`]. Raises `InvalidInput`, `NotFound`,
        `NotAllowed`, `Busy`.
        """

    @verb
    def resume_schedule(self, *, name: str, connection: object | None = None) -> None:
        """End the pause of a schedule. Raises `NotFound`, `NotAllowed`, `Busy`."""

    @verb
    def run_schedule_now(self, *, name: str, connection: object | None = None) -> rows.ScheduledRun:
        """Submit the work of a schedule now; its due times stay as they are. Raises `NotFound`, `WrongState` (with
        `skip_if_running`: the last one has not ended), `NotAllowed`, `Busy`, and what `submit` raises.
        """

    @verb
    def forget_schedule(self, *, name: str, connection: object | None = None) -> None:
        """Forget a schedule; what it has submitted goes on. Raises `NotFound`, `NotAllowed`, `Busy`."""

    @verb
    def declare_schedules(self, *, source: str, names: Texts) -> list[str]:
        """Say that the program `source` declares these schedules and no others; return those that it does not declare
        any more. Raises `InvalidInput`, `Busy`.
        """

    @verb
    def set_service(
        self,
        *,
        name: str,
        task: str | None = None,
        payload: Json | None = None,
        replicas: int | None = None,
        gang: int | None = None,
        work: Options | None = None,
        connection: object | None = None,
        **options: Unpack[ServiceOptions],
    ) -> str:
        """Make a service, or change what is given of it; return made, changed or same. Raises `InvalidInput`,
        `NotFound` (no such queue), `TooLarge`, `NotAllowed` (another login stored it), `Busy`.
        """

    @verb
    def stop_service(self, *, name: str, connection: object | None = None) -> None:
        """Want no replica of a service, until `set_service`. Raises `NotFound`, `NotAllowed`, `Busy`."""

    @verb
    def delete_service(self, *, name: str, connection: object | None = None) -> None:
        """Stop a service, and forget it once its last gang has ended. Raises `NotFound`, `NotAllowed`, `Busy`."""

    @verb
    def roll_back_service(
        self, *, name: str, to_revision: int | None = None, connection: object | None = None
    ) -> int:
        """Let a service be of another revision again [the last other one that was ready]; return its number. Raises
        `NotFound`, `NotAllowed`, `Busy`.
        """

    @verb
    def declare_services(self, *, source: str, names: Texts) -> list[str]:
        """Say that the program `source` declares these services and no others; see `declare_schedules`."""
