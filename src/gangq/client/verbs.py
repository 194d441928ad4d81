# mypy: disable-error-code="empty-body"
"""Every verb, declared once: the methods that `Client` and `AsyncClient` have.

Named as the SQL function or view, with its arguments; what the annotations mean is in `gangq.client.verb`. Called on
`Verbs` itself, a verb builds its `Query` for `execute`. What nobody calls from Python has no method: `call` calls it.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar, Unpack
from uuid import UUID

from psycopg.rows import dict_row, tuple_row

from gangq.client import rows
from gangq.client.encoding import dumps, dumps_each
from gangq.client.options import RegisterOptions, SubmitGangOptions, SubmitOptions
from gangq.client.settings import InstallationSettings, QueueSettings, TaskSettings
from gangq.client.verb import (
    After,
    BigInt,
    BigInts,
    Chunks,
    Integers,
    Json,
    Numeric,
    Object,
    Objects,
    Payloads,
    Query,
    Real,
    Results,
    State,
    Steps,
    Texts,
    Time,
    Verb,
    aware,
    function_call,
    in_steps,
    verb,
    verb_with,
    view,
)
from gangq.errors import Busy, InvalidInput, NotFound

_BATCH = 500
_LIMIT = 1000
"""How many rows a look without a limit reads: more are asked for."""
_PATIENCE_S = 2.0
_OF_FUNCTION = """
  select proargnames[1:pronargs], array(select format_type(type, null) from unnest(proargtypes) as type),
    proretset or prorettype = 'record'::regtype
  from pg_proc where pronamespace = 'gangq'::regnamespace and prokind = 'f' and proname = %(name)s"""
"""The names and types of its arguments, and whether it returns rows."""

T = TypeVar("T")

# What surrounds single calls ---------------------------------------------------------------------------------


def new_request_id() -> str:
    """A UUID of version 7: it begins with the time, so that those of one time are neighbours in the index.

    Not from `random`: a forked process would draw its parent's numbers again, and its submissions would be taken for
    repetitions.
    """
    drawn = os.urandom(9).hex()
    return f"{time.time_ns() // 1_000_000:012x}7{drawn[:3]}8{drawn[3:]}"


def _always(**values: object) -> Callable[[dict[str, Any], dict[str, Any], object], None]:
    """Have these sent where nothing else is given: the SQL function has another default, or none."""

    def before(given: dict[str, Any], _options: dict[str, Any], _connection: object) -> None:
        for name, value in values.items():
            given.setdefault(name, value)

    return before


def _before_submit(given: dict[str, Any], options: dict[str, Any], connection: object) -> None:
    # Our own connection commits at once: notify only if somebody sleeps now. In a caller's transaction that look
    # would be stale by the time it commits, and the transaction itself says what came of it.
    if connection is None:
        options["wake"] = "sleepers"
        given["request_id"] = given.get("request_id") or new_request_id()


def _before_submit_gang(given: dict[str, Any], options: dict[str, Any], connection: object) -> None:
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
        found: list[rows.StateChange] = yield replace(asked, steps=None)
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


def _then_decide(
    _verb: Verb[..., Any], first: Query[rows.TickReport], _given: Mapping[str, Any]
) -> Steps[rows.TickReport]:
    report = yield from replace(first, steps=None)
    if not report.decide:
        return report
    from gangq.client.passes import run_passes

    more = yield from run_passes()
    return report._replace(again=report.again or more)


def _of_a_child(verb: Verb[..., Any], arguments: Mapping[str, object]) -> dict[str, object]:
    """What a job sent, as arguments of the SQL function: it may send anything."""
    known = verb.parameters.keys() - {"connection"}
    unknown = sorted(arguments.keys() - known)
    if unknown:
        raise InvalidInput(f"{verb.name} has no argument {unknown[0]!r}")
    options = arguments.get("options")
    try:
        options = json.loads(options) if isinstance(options, str) else options
    except ValueError as problem:
        raise InvalidInput(f"the options of {verb.name} are not JSON: {problem}") from problem
    if not isinstance(options, dict | None):
        raise InvalidInput(f"the options of {verb.name} are no JSON object")
    options = options or {}
    said = arguments if "request_id" in known else options
    asked = {"request_id": said.get("request_id") or new_request_id()}
    sent = {name: value for name, value in arguments.items() if value is not None}
    if said is arguments:
        return {**sent, **asked, "options": dumps(options, "options")}
    return {**sent, "options": dumps({**options, **asked}, "options")}


def _submit_child(
    verb: Verb[..., Any], arguments: Mapping[str, object], job_id: int, token: int
) -> Query[Any]:
    given = {**_of_a_child(verb, arguments), "job_id": job_id, "token": token}
    types = {name: verb.types[name].type if name in verb.types else "bigint" for name in given}
    name = verb.name.replace("submit", "submit_child")
    if name == "submit_child":
        text = function_call(name, name, types)
        return Query(
            f"gangq.{name}", text, given, lambda found: [row[0] for row in found], None, tuple_row, True
        )
    text = function_call(name, rows.columns(rows.GangSubmitted), types)
    return Query(
        f"gangq.{name}", text, given, lambda found: rows.GangSubmitted(*found[0]), None, tuple_row, True
    )


def _only(found: list[T], what: str, id: int) -> T:
    if not found:
        raise NotFound(
            f"{what} {id} does not exist: it was never committed, it is older than its retention, or this is "
            "another database"
        )
    return found[0]


class Verbs:
    """The methods of both clients."""

    def __init_subclass__(cls) -> None:
        """Give a client its methods: real functions, so that help() and inspect know them."""
        super().__init_subclass__()
        execute = vars(cls).get("execute")
        if execute is None or not isinstance(cls.submit, Verb):
            return
        for name, declared in vars(Verbs).items():
            if isinstance(declared, Verb):
                awaited = inspect.iscoroutinefunction(execute)
                setattr(cls, name, declared.method(awaited))

    # Work enters -----------------------------------------------------------------------------------------------

    # Work enters -----------------------------------------------------------------------------------------------

    @verb_with(before=_before_submit, repeatable=True)
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

    @verb_with(before=_before_submit_gang, repeatable=True)
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

    @in_steps
    def submit_child(self, *, job_id: int, token: int, arguments: Mapping[str, object]) -> Steps[list[int]]:
        """Submit jobs for a job that this worker runs, on behalf of its submitter; return their ids.

        `arguments`: those of the SQL function submit. Raises `StaleToken`, and what `submit` raises.
        """
        ids: list[int] = yield from _submit_child(Verbs.submit, arguments, job_id, token)
        return ids

    @in_steps
    def submit_child_gang(
        self, *, job_id: int, token: int, arguments: Mapping[str, object]
    ) -> Steps[rows.GangSubmitted]:
        """Submit a gang for a job that this worker runs; see `submit_child`, and the SQL function submit_gang."""
        gang: rows.GangSubmitted = yield from _submit_child(Verbs.submit_gang, arguments, job_id, token)
        return gang

    @verb_with(then=_in_batches)
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

    @verb_with(then=_in_batches)
    def retry(self, *, job_ids: BigInts = (), gang_ids: BigInts = ()) -> list[rows.StateChange]:
        """Run jobs and gangs that failed or were cancelled again, under their ids. Raises `NotFound`,
        `WrongState`, and `Busy` for what another transaction holds for 2 s. Some hundreds at a time, each in a
        transaction of its own.
        """

    @verb_with(then=_in_batches)
    def set_priority(
        self, *, priority: int, job_ids: BigInts = (), gang_ids: BigInts = ()
    ) -> list[rows.StateChange]:
        """Change the priority (-1000 to 1000) of live jobs and gangs. Raises `InvalidInput`, `NotFound`, and `Busy`
        for what another transaction holds for 2 s. Some hundreds at a time, each in a transaction of its own.
        """

    @verb
    def set_queue(self, *, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Make a queue, and its parents (those of "a.b.c" are "a.b" and "a"), or change what is given of it.

        A setting that is None is taken away where there may be none: `set_queue(name="gpu", budget_s=None)`. For
        gangq_admin. Raises `InvalidInput`, `NotAllowed`.
        """

    @verb
    def configure(self, **settings: Unpack[InstallationSettings]) -> None:
        """Change what holds for the whole installation. For gangq_admin.

        Raises `InvalidInput`, `NotAllowed`, `WrongState`.
        """

    @verb
    def set_task(self, *, task: str, forget: bool = False, **settings: Unpack[TaskSettings]) -> None:
        """Set what the watchdogs allow the jobs of one task. A setting that is None is taken away.

        `forget`: first drop what was set before and what was learned of its beats. For gangq_admin. Raises
        `InvalidInput`, `NotAllowed`.
        """

    # A worker's words ------------------------------------------------------------------------------------------

    @verb
    def register_worker(
        self,
        *,
        name: str,
        host: str,
        queues: Texts,
        slots: int | None = None,
        memory_mb: BigInt = 0,
        cpus: Numeric = 0,
        devices: Objects = (),
        **options: Unpack[RegisterOptions],
    ) -> rows.Registration:
        """Register a start of a worker; every later word of it carries the incarnation this returns.

        `slots` [one for each device, at least 1]: how many placed jobs run at once. `options`: see
        `gangq.client.options.RegisterOptions`.
        Raises `WorkerNameTaken` (its `holder` is the live incarnation), `InvalidInput`, `NotFound` (queue).
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
        """Renew the lease (it counts from when this was sent), bring the beats, return what to do per claim.

        `beats` is aligned with `job_ids`; None: no news. `readings`: one mapping per device that this worker offers,
        with its "uuid"; the latest of each is kept. `durable` False: the commit does not wait for the disk, nor does
        anything else in that transaction. Raises `IncarnationEnded`.
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
        """Take up to `max_jobs`, within the slots of each lane: members reserved here, what has an open place here,
        then light jobs.

        `lane`: only that one, "placed" (members and places) or "light". `model`: what this worker has loaded.

        The same `request_id` returns the same claims after a lost reply. `ports` are those this worker holds
        bound. `sleep`: when there is no light job, put it on the list of those to wake. Raises `IncarnationEnded`.
        """

    @verb
    def barrier(self, *, job_id: BigInt, token: BigInt, port: int | None = None) -> list[rows.BarrierMember]:
        """Look at the barrier: one row per member of the present epoch, by rank. Raises `StaleToken` after a drain.

        `port`: where others find this member, which has become rank 0 while it ran. Raises `WrongState` when that
        port serves another gang of this host.
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
        """Finish jobs as done. With `connection`, in its transaction. `results` is aligned with `job_ids`.

        `strict`: one stale pair raises `StaleToken` and nothing changes; else each job's outcome says it, and says
        `busy` of one that somebody's open transaction holds, in place of waiting for it.
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
        """Finish jobs as done and take the next, in one round trip: :func:`complete`, then :func:`claim`.

        The completion waits for nobody but its own gangs; what would keep the claim waiting is not claimed. So when
        nothing was, call :func:`claim` with the same `request_id` before going to sleep. An error changed nothing:
        say the two apart. A placed job that is done here fills its place again, if that is still open. `quiet`:
        `outcomes` leaves out the jobs that are done by this call.
        """

    @verb
    def fail(
        self,
        *,
        job_id: BigInt,
        token: BigInt,
        error: Object | None = None,
        retryable: bool = True,
        cause: str = "error",
        connection: object | None = None,
    ) -> str:
        """Report a failed attempt; return the new state. `cause` is "error" or "port_taken" (uncharged).

        `error`: type, message, traceback, host, log_tail. Raises `StaleToken`.
        """

    @verb
    def release(self, *, job_ids: BigInts, tokens: BigInts, reason: str | None = None) -> list[rows.Outcome]:
        """Hand jobs back uncharged; outcomes are released, repeated or stale."""

    @verb
    def ack_preempted(self, *, job_id: BigInt, token: BigInt) -> str:
        """Confirm that the work is gone, after preempt or cancel; return the new state. Raises `StaleToken`."""

    @verb
    def save_checkpoint(
        self, *, job_id: BigInt, token: BigInt, step: BigInt, data: bytes, epoch: int | None = None
    ) -> None:
        """Store the state at `step`. Raises `TooLarge`, `StaleToken`.

        `epoch`: the one a member knows of; where every member saves its part, one of an older epoch is not kept.
        """

    @verb
    def load_checkpoint(self, *, job_id: BigInt, token: BigInt) -> rows.SavedCheckpoint | None:
        """Return the checkpoint this attempt resumes from, or None. Raises `StaleToken`."""

    @verb
    def append_log(self, *, job_ids: BigInts, tokens: BigInts, seqs: Integers, chunks: Chunks) -> None:
        """Store output, aligned lists; stale pairs are dropped. NUL characters are replaced: text cannot hold
        them.
        """

    @verb
    def retire_worker(self, *, incarnation: BigInt, final: bool = True) -> None:
        """Stop as asked: `final` False takes nothing new, True is gone and what it held is free, uncharged."""

    # Watchdogs -------------------------------------------------------------------------------------------------

    @verb_with(before=_always(device_class=""))
    def watch_terms(self, *, task: str, device_class: str = "", queue: str | None = None) -> rows.WatchTerms:
        """What the watchdogs allow jobs of this task. `device_class`: model of the devices, "" without."""

    @verb_with(before=_always(device_class=""))
    def learn_gap(self, *, task: str, device_class: str = "", longest_s: Real, beats: BigInt) -> None:
        """Say how long the beats of a task stayed away before they came back (the longest gap is kept, seconds), and
        how many beats were seen. Raises `InvalidInput`.
        """

    # Evidence --------------------------------------------------------------------------------------------------

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
        exit_in_s: Real | None = None,
        class_: str | None = None,
    ) -> str:
        """Stop a job as a watchdog; return what came of it.

        `code` is the exit code, `error` as for `fail`, `evidence` what was seen (for those who may read
        payloads), `devices` the UUIDs to blame of those the job holds. `exit_in_s`: the whole worker process is
        gone within so many seconds whatever happens, so its incarnation ends now; None: the work is proven dead
        and the worker lives on. `class_`: as `notify_only` knows it; None: that of the code.

        Returns pending, scheduled, failed, preempted (its gang drains) or cancelled; notify or held: nothing was
        stopped, go on; repeated. Raises `StaleToken`, `InvalidInput`.
        """

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
        convicted: bool | None = None,
    ) -> str:
        """Put a doubt about a job on record, with its evidence; nothing is stopped.

        `class_`: budget, stall, health, fault, gang, frozen or memory. `notify`: it would have been stopped, were
        its class not one that only reports. `convicted`: the caller stops it now unless the answer is held.
        Returns noted, or held while so many gangs and workers are suspect that a stall or health trip would not
        be carried out. Raises `StaleToken`.
        """

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
        """Say that a process of this incarnation survived SIGKILL; return how many devices that withholds.

        The worker is quarantined by name. Raises `InvalidInput` without evidence, `NotFound`.
        """

    @verb
    def bounce(self, *, incarnation: BigInt, host: str, report_only: bool = False) -> str:
        """Ask whether this host may restart its flagged worker: "go", or why not.

        heard, replaced, too_often, fleet (too many are flagged at once), taken, unknown. `report_only`: leave no
        trace. After "go", say how it went with `bounced`.
        """

    @verb
    def bounced(self, *, incarnation: BigInt, ok: bool, detail: Object | None = None) -> None:
        """Say how a restart went; `ok`: a new incarnation of that worker is heard. Raises `NotFound`."""

    @verb
    def quarantine(
        self, *, device_uuid: str | None = None, worker: str | None = None, reason: str = "operator"
    ) -> None:
        """Keep a device, or a worker, from taking work. Raises `NotFound`, `WrongState` (device in use)."""

    @verb
    def set_taints(self, *, worker: str, taints: Texts) -> None:
        """Set what an operator taints a worker with, beside its own taints; [] takes them off.

        By name, also after a restart. A taint ("key" or "key=value") keeps off every job that does not tolerate it;
        what runs goes on. For gangq_admin. Raises `InvalidInput`, `NotFound`, `NotAllowed`.
        """

    @verb
    def unquarantine(self, *, device_uuid: str | None = None, worker: str | None = None) -> None:
        """Lift the quarantine of a device or worker. Raises `InvalidInput`, `NotFound`."""

    @verb
    def cordon(
        self,
        *,
        host: str | None = None,
        worker: str | None = None,
        drain: bool = False,
        deadline: Time | None = None,
        reason: str | None = None,
    ) -> None:
        """Give a host, or a worker by name, nothing new until `uncordon`; members reserved there are still claimed.

        `drain`: move away what runs there, and at the `deadline` (None: never) tell the rest to stop. Repeats are
        harmless; what one leaves out stays as it was. For gangq_admin. Raises `InvalidInput`, `NotFound`.
        """

    @verb
    def uncordon(self, *, host: str | None = None, worker: str | None = None) -> None:
        """Lift the cordon, and with it the drain, of a host or worker. Raises `InvalidInput`, `NotFound`."""

    # The scheduler ---------------------------------------------------------------------------------------------

    @in_steps
    def board(self) -> Steps[str]:
        """What a pass decides from, as JSON: `gangq.placement.board.Board.from_json` reads it."""
        found = yield Query("gangq.board", "select gangq.board()::text", {}, list, factory=tuple_row)
        return str(found[0][0])

    @verb
    def apply(
        self,
        *,
        pass_: BigInt,
        decisions: Objects,
        part: int | None = None,
        last: bool | None = None,
        seen: Object | None = None,
        closes: BigInts = (),
    ) -> rows.ApplyReport:
        """Carry out what was decided on the board of this pass, each decision verified by itself, at most 50 that
        place or stop something. `part`: 1 begins the pass, the others continue it; `last` ends it. `closes`: open
        places that nothing of it uses. Raises `InvalidInput`, `WrongIsolation`.
        """

    @verb_with(before=_always(decides=True), then=_then_decide)
    def tick(
        self, *, force: bool | None = None, turn: BigInt | None = None, decides: bool = True
    ) -> rows.TickReport:
        """Run all maintenance once, if nobody else does; then decide what starts where, if that is this caller's
        turn. Raises `WrongIsolation`.

        `turn`: the `next_turn` of the call before, which found a tick running. `decides`: false for maintenance
        alone.
        """

    # Looking ---------------------------------------------------------------------------------------------------

    @verb
    def explain_gang(self, *, gang_id: BigInt) -> list[rows.Reason]:
        """Why a gang does or does not run: what the last pass found, and how old that is. Raises `NotFound`."""

    @verb
    def explain_job(self, *, job_id: BigInt) -> list[rows.Reason]:
        """Why a job does or does not run: what the last pass found, or what a claim needs. Raises `NotFound`."""

    @in_steps
    def explain_now(
        self, *, gang_id: int | None = None, job_id: int | None = None
    ) -> Steps[list[rows.Reason]]:
        """The same as `explain_gang` or `explain_job`, with a decision made now, without effects, in place of the
        last pass's. Raises `NotFound`.
        """
        from gangq.client.plans import explain_now_steps

        if gang_id is not None:
            return (yield from explain_now_steps(Verbs.explain_gang(gang_id=gang_id)))
        if job_id is not None:
            return (yield from explain_now_steps(Verbs.explain_job(job_id=job_id)))
        raise InvalidInput("explain_now: gang_id or job_id says which")

    @in_steps
    def plan(self, *, changes: Sequence[Mapping[str, object]] | None = None) -> Steps[list[rows.PlanRow]]:
        """What the next pass would do after these changes, and without them: the same decision on another board,
        without effects. A change is an object: `{"add_workers": 2, "like": "w1"}` (or with `gpus`, `vram_mb`,
        `slots`, `memory_mb`, `cpus`, `labels`, `queues`, `tasks`, `taints`, `host`), `{"remove_host": h}`,
        `{"priority": {"gang": 7, "value": 50}}`, `{"cancel": {"gang": 7}}` or `{"job": 12}`, `{"quota": {"queue": q,
        "maximum": {"gpus": 8}}}` (or `guaranteed`, `max_running_gangs`, `max_running_jobs`, `paused`), `{"submit":
        {...}}` with the arguments of `submit_gang`. Raises `InvalidInput`, `NotFound`.
        """
        from gangq.client.plans import plan_steps

        return (yield from plan_steps(list(changes or ())))

    @in_steps
    def replay(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Steps[list[rows.ReplayRow]]:
        """Decide on the recorded boards of a stretch of time once more, here, and compare. For gangq_admin."""
        from gangq.client.passes import ReplayedPass, again

        text = (
            "select min(at) as at, min(digest) as digest, jsonb_agg(decisions order by at) as parts, "
            "(array_agg(board) filter (where board is not null))[1] as board from gangq.passes "
            "where at >= coalesce(%(since)s::timestamptz, '-infinity') "
            "and at <= coalesce(%(until)s::timestamptz, 'infinity') "
            "group by pass order by min(at)"
        )
        given = {"since": since and aware(since, "since"), "until": until and aware(until, "until")}
        found = yield Query("gangq.passes", text, given, list)
        return [again(ReplayedPass(**row)) for row in found]

    @verb
    def schema_version(
        self,
    ) -> str:
        """Name of the newest applied migration."""

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
        return _only((yield from Verbs.jobs(ids=[id])), "job", id)

    @in_steps
    def gang(self, *, id: int) -> Steps[rows.GangRow]:
        """The gang with this id. Raises `NotFound`."""
        return _only((yield from Verbs.gangs(ids=[id])), "gang", id)

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

    # What has no method --------------------------------------------------------------------------------------

    @in_steps
    def call(self, name: str, /, **arguments: object) -> Steps[Any]:
        """Call the SQL function `gangq.<name>` with arguments by its names for them, as psql does: for those that
        have no method here. Returns its value, or for one that returns rows a list of dicts.

        What goes into jsonb is any value that JSON can hold. Raises `InvalidInput` where there is no such function or
        argument, `NotSerializable`, and what the function raises.
        """
        found = yield Query("gangq.call", _OF_FUNCTION, {"name": name}, list, factory=tuple_row)
        if not found:
            raise InvalidInput(f"there is no SQL function gangq.{name}: in psql, \\df gangq.* lists them")
        types, rows_too = dict(zip(found[0][0] or (), found[0][1], strict=True)), found[0][2]
        unknown = sorted(arguments.keys() - types.keys())
        if unknown:
            raise InvalidInput(
                f"gangq.{name} has no argument {unknown[0]!r}; its arguments are {', '.join(types)}"
            )
        encoders: dict[str, Callable[[Any, str], object]] = {"jsonb": dumps, "jsonb[]": dumps_each}
        given = {
            key: encoders[types[key]](value, key) if types[key] in encoders and value is not None else value
            for key, value in arguments.items()
        }
        text = function_call(name, "*" if rows_too else name, {key: types[key] for key in given})
        factory = dict_row if rows_too else tuple_row
        answer = yield Query(f"gangq.{name}", text, given, list, factory=factory)
        return answer if rows_too else answer[0][0]
