"""Every SQL function and view, described once: its arguments with their types, and what it returns.

A function here only builds a `Query`; `Client` and `AsyncClient` execute it. Its name is the SQL function's
name (or the view's), its keyword arguments are the SQL arguments, and an argument left at None is not sent,
so that the database's default holds and an older schema that lacks it still answers.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar, Unpack
from uuid import UUID

from psycopg.rows import dict_row, tuple_row

from gangq.client import rows
from gangq.client.encoding import Awaited, Encoded, awaited_ids, dumps, dumps_each
from gangq.client.options import (
    RegisterOptions,
    SubmitGangOptions,
    SubmitOptions,
    as_json,
    encode_options,
    texts,
)
from gangq.client.settings import InstallationSettings, QueueSettings, TaskSettings
from gangq.errors import Busy, InvalidInput, NotFound

R = TypeVar("R")
T = TypeVar("T")


@dataclass(slots=True)  # Not frozen, which makes it cost twice as much: there is one for every call.
class Query(Generic[R]):
    """One statement to run: `read` makes the result out of the rows, which are dicts unless `factory` (a row
    factory of psycopg) makes something else of them; `connection` is the caller's own, if any.
    """

    name: str
    text: str
    params: Mapping[str, object]
    read: Callable[[list[Any]], R]
    connection: object | None = field(default=None, compare=False)
    factory: Any = field(default=dict_row, compare=False)
    repeatable: bool = field(default=False, compare=False)
    """Carried out once however often it is sent: it has a request_id."""
    steps: Callable[[], Steps[R]] | None = field(default=None, compare=False)
    """Several statements, each a transaction of its own where there is no `connection`: run these instead."""


Steps = Generator["Query[Any] | float", Any, R]
"""Yields a query to be sent its result, or seconds to wait; returns the result of all."""


# SQL types of arguments, written once; a value of None is left out of the call. One function's own meaning of a name
# stands under function.name.
_TYPES: dict[str, str] = {
    **dict.fromkeys(("job_ids", "gang_ids", "tokens", "after", "incarnations", "device_ids",
         "closes"), "bigint[]"),
    **dict.fromkeys(
        ("job_id", "gang_id", "token", "incarnation", "step", "memory_mb", "trigger_job", "turn", "pass"),
        "bigint",
    ),
    **dict.fromkeys(("ports", "seqs"), "integer[]"),
    **dict.fromkeys(
        ("priority", "gpus", "size", "slots", "max_jobs", "max_gangs", "most", "code", "part", "port", "epoch"),
        "integer",
    ),
    **dict.fromkeys(
        ("task", "queue", "name", "reason", "host", "kind", "device_uuid",
         "worker", "cause", "model", "device_class", "class", "digest", "lane"),
        "text",
    ),
    **dict.fromkeys(("queues", "chunks", "taints"), "text[]"),
    **dict.fromkeys(("payloads", "results", "beats"), "jsonb[]"),
    **dict.fromkeys(
        ("payload", "devices", "error", "evidence", "readings", "detail", "changes", "settings", "options",
         "decisions", "seen"),
        "jsonb",
    ),
    **dict.fromkeys(("exit_in_s", "longest_s"), "real"),
    **dict.fromkeys(
        ("retryable", "strict", "front", "sleep", "quiet", "final", "force", "forget", "notify",
         "convicted", "report_only", "ok", "drain", "durable", "last", "decides"),
        "boolean",
    ),
    **dict.fromkeys(("due_at", "deadline", "since", "until"), "timestamptz"),
    "cpus": "numeric",
    "request_id": "uuid",
    "data": "bytea",
    "learn_gap.beats": "bigint",
    "trip.devices": "text[]",
}  # fmt: skip


def _type_of(name: str, argument: str) -> str:
    """The type of an argument of this SQL function."""
    sql = argument.rstrip("_")
    return _TYPES.get(f"{name}.{sql}") or _TYPES[sql]


def _call(name: str, select: str, args: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    given = {key: value for key, value in args.items() if value is not None}
    return _text(name, select, tuple(given)), given


@functools.lru_cache(maxsize=512)
def _text(name: str, select: str, keys: tuple[str, ...]) -> str:
    # What is a keyword in Python has an underscore behind it here: class_.
    named = ", ".join(f"{key.rstrip('_')} => %({key})s::{_type_of(name, key)}" for key in keys)
    return f"select {select} from gangq.{name}({named})"  # noqa: S608 - names from this module only


_factories: dict[Any, Any] = {}


def _factory(row: type[T]) -> Callable[[object], Callable[[Sequence[Any]], T]]:
    """The row factory of psycopg that makes rows of this type."""
    if row not in _factories:
        make = rows.maker(row)
        _factories[row] = lambda _cursor: make
    found: Callable[[object], Callable[[Sequence[Any]], T]] = _factories[row]
    return found


def _rows(name: str, row: type[T], connection: object | None = None, /, **args: object) -> Query[list[T]]:
    text, given = _call(name, rows.columns(row), args)
    # By position, because that is the order of the select list: a dict for each row would cost as much again.
    return Query(f"gangq.{name}", text, given, list, connection, _factory(row))


def _row(name: str, row: type[T], connection: object | None = None, /, **args: object) -> Query[T]:
    text, given = _call(name, rows.columns(row), args)
    return Query(f"gangq.{name}", text, given, lambda found: found[0], connection, _factory(row))


_BATCH = 500
_LIMIT = 1000
"""How many rows a look without a limit reads: more are asked for."""
_PATIENCE_S = 2.0


def _in_batches(
    build: Callable[[list[int], list[int]], Query[list[rows.StateChange]]],
    job_ids: Sequence[int],
    gang_ids: Sequence[int],
) -> Query[list[rows.StateChange]]:
    """The whole list first, so that what is wrong with it is said before anything changes; then what was left."""
    first = build(list(job_ids), list(gang_ids))

    def steps() -> Steps[list[rows.StateChange]]:
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
                total = len(set(job_ids)) + len(set(gang_ids))
                raise Busy(
                    f"{first.name}: {len(waiting)} of {total} are held by other transactions; the others are done: "
                    "call it again with those"
                )
            else:
                yield 0.05
            batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
            asked = build(
                [one.job_id for one in batch if one.job_id is not None],
                [one.gang_id for one in batch if one.job_id is None and one.gang_id is not None],
            )

    return replace(first, steps=steps)


def _scalar(name: str, connection: object | None = None, /, **args: object) -> Query[Any]:
    # A function's column is called as the function; that name is what a table alias cannot take away.
    text, given = _call(name, name, args)
    return Query(f"gangq.{name}", text, given, lambda found: found[0][name] if found else None, connection)


def _void(name: str, /, **args: object) -> Query[None]:
    text, given = _call(name, "1", args)
    return Query(f"gangq.{name}", text, given, lambda _: None)


def _firsts(found: list[Any]) -> list[Any]:
    return [row[0] for row in found]


def _json(value: object | None, what: str) -> str | None:
    return None if value is None else dumps(value, what)


def _results(values: Sequence[object | None] | None, job_ids: Sequence[int]) -> list[str | None] | None:
    # None at all are said by leaving them out: most jobs have none, and an array of them takes its time.
    if values is not None and len(values) == len(job_ids) and all(value is None for value in values):
        return None
    return _each_or_null(values, "results")


def _integers(values: Sequence[int]) -> str:
    """An array as its text: as a list, psycopg looks at every element, which costs ten times as much."""
    return f"{{{','.join(map(str, values))}}}"


def _jsons(values: Sequence[object] | None, what: str) -> list[str] | None:
    return None if values is None else dumps_each(values, what)


def _each_or_null(values: Sequence[object | None] | None, what: str) -> list[str | None] | None:
    if values is None:
        return None
    return [
        value if value is None or isinstance(value, Encoded) else dumps(value, f"{what}[{i}]")
        for i, value in enumerate(values)
    ]


def _aware(at: datetime | None, what: str = "due_at") -> datetime | None:
    if at is not None and at.tzinfo is None:
        raise InvalidInput(
            f"{what} is {at.isoformat()} without a time zone, which each machine would read differently: use "
            "datetime.now(timezone.utc) + timedelta(...)"
        )
    return at


def _settings(given: Mapping[str, object]) -> str:
    plain = {
        key: f"{value.total_seconds()} s" if isinstance(value, timedelta) else value
        for key, value in given.items()
    }
    return dumps(plain, "settings")


def _new_request_id() -> str:
    """A UUID of version 7: it begins with the time, so that those of one time are neighbours in the index.

    Not from `random`: a forked process would draw its parent's numbers again, and its submissions would be taken for
    repetitions.
    """
    drawn = os.urandom(9).hex()
    return f"{time.time_ns() // 1_000_000:012x}7{drawn[:3]}8{drawn[3:]}"


_ONE_EMPTY: tuple[object, ...] = ({},)

# Work enters ------------------------------------------------------------------------------------------------


def submit(
    *,
    task: str,
    queue: str | None = None,
    payloads: Sequence[object] = _ONE_EMPTY,
    priority: int | None = None,
    gpus: int | None = None,
    due_at: datetime | None = None,
    after: Sequence[int | Awaited] | None = None,
    request_id: UUID | str | None = None,
    connection: object | None = None,
    **options: Unpack[SubmitOptions],
) -> Query[list[int]]:
    """Submit one job per payload; return their ids, in order. With `connection`, in its transaction.

    `options`: see `gangq.client.options.SubmitOptions`. What is None is as the workers declare the task, then as
    usual: queue default, priority 0, no needs.

    `request_id`: a UUID, new for each submission; within an hour the same one returns the same ids and submits
    nothing. Without `connection` a call has one by itself, and is sent again, once and before its time is up, where
    its connection breaks before the answer. Pass your own to repeat a call yourself after `DatabaseUnreachable`.
    Raises `InvalidInput`, `NotFound`, `TooLarge`, `WrongState` (the queue is draining), `Busy` (a call with this
    `request_id` is under way), `WrongIsolation` (a `request_id` in a transaction that is not READ COMMITTED).
    """
    said = encode_options(options) if options else {}
    # Our own connection commits at once: notify only if somebody sleeps now. In a caller's transaction that look
    # would be stale by the time it commits.
    if connection is None:
        said["wake"] = '"sleepers"'
        # The caller's own transaction says what came of it: whether it was committed.
        request_id = request_id or _new_request_id()
    text, given = _call(
        "submit",
        "submit",
        {
            "task": task,
            "queue": queue,
            "payloads": None if payloads is _ONE_EMPTY else dumps_each(payloads, "payloads"),
            "priority": priority,
            "gpus": gpus,
            "due_at": _aware(due_at),
            "after": awaited_ids(after),
            "request_id": request_id,
            "options": as_json(said),
        },
    )
    return Query(
        "gangq.submit",
        text,
        given,
        _firsts,
        connection,
        tuple_row,
        repeatable=request_id is not None,
    )


def submit_gang(
    *,
    task: str | None = None,
    size: int | None = None,
    queue: str | None = None,
    payload: object | None = None,
    priority: int | None = None,
    gpus: int | None = None,
    due_at: datetime | None = None,
    after: Sequence[int | Awaited] | None = None,
    connection: object | None = None,
    **options: Unpack[SubmitGangOptions],
) -> Query[rows.GangSubmitted]:
    """Submit a gang: members that start together or not at all; resources are per member.

    - `size` members alike, or the option `roles`: ranks in their order, where what a role does not say is as given
      here. `payload` goes to every member, or the option `payloads` one to each rank.
    - `options`: see `gangq.client.options.SubmitGangOptions`.
    - What is None is as the workers declare the task, then as usual; roles have each one's task's.

    With `connection`, in its transaction. Raises `InvalidInput` (also for what exceeds a limit of its queue, or all
    hardware known), `NotFound`, `TooLarge`, `WrongState` (the queue is draining), `Busy`, `WrongIsolation`.
    """
    roles = options.get("roles")
    if payload is not None and options.get("payloads") is not None:
        raise InvalidInput(
            "both payload and payloads are given: payload for all ranks alike, or payloads for each"
        )
    if (size is None) == (roles is None):
        raise InvalidInput(
            "a gang has either a size or roles: size=4 for members alike, or roles=[Role(...), ...]"
        )
    if roles is not None and options.get("min_size") is not None:
        raise InvalidInput(
            "both roles and min_size are given: give the roles that may have fewer members their own min"
        )
    said = encode_options(options)
    if connection is None:
        said.setdefault("request_id", f'"{_new_request_id()}"')
    query = _row(
        "submit_gang",
        rows.GangSubmitted,
        connection,
        task=task,
        size=size,
        queue=queue,
        payload=_json(payload, "payload"),
        priority=priority,
        gpus=gpus,
        due_at=_aware(due_at),
        after=awaited_ids(after),
        options=as_json(said),
    )
    return replace(query, repeatable="request_id" in said)


def _child(verb: Callable[..., Query[Any]], arguments: Mapping[str, object]) -> dict[str, object]:
    """What a job sent, as arguments: it may send anything."""
    known = inspect.signature(verb).parameters.keys() - {"connection"}
    unknown = sorted(arguments.keys() - known)
    if unknown:
        raise InvalidInput(f"{verb.__name__} has no argument {unknown[0]!r}")
    options = arguments.get("options")
    try:
        options = json.loads(options) if isinstance(options, str) else options
    except ValueError as problem:
        raise InvalidInput(f"the options of {verb.__name__} are not JSON: {problem}") from problem
    if not isinstance(options, dict | None):
        raise InvalidInput(f"the options of {verb.__name__} are no JSON object")
    options = options or {}
    said = arguments if "request_id" in known else options
    asked = {"request_id": said.get("request_id") or _new_request_id()}
    if said is arguments:
        return {**arguments, **asked, "options": dumps(options, "options")}
    return {**arguments, "options": dumps({**options, **asked}, "options")}


def submit_child(*, job_id: int, token: int, arguments: Mapping[str, object]) -> Query[list[int]]:
    """Submit jobs for a job that this worker runs, on behalf of its submitter; return their ids.

    `arguments`: those of the SQL function submit. Raises `StaleToken`, and what `submit` raises.
    """
    text, given = _call(
        "submit_child", "submit_child", {**_child(submit, arguments), "job_id": job_id, "token": token}
    )
    return Query("gangq.submit_child", text, given, _firsts, None, tuple_row, repeatable=True)


def submit_child_gang(
    *, job_id: int, token: int, arguments: Mapping[str, object]
) -> Query[rows.GangSubmitted]:
    """Submit a gang for a job that this worker runs; see `submit_child`, and the SQL function submit_gang."""
    given = {**_child(submit_gang, arguments), "job_id": job_id, "token": token}
    return replace(_row("submit_child_gang", rows.GangSubmitted, **given), repeatable=True)


def cancel(
    *,
    job_ids: Sequence[int] = (),
    gang_ids: Sequence[int] = (),
    reason: str | None = None,
    connection: object | None = None,
) -> Query[list[rows.StateChange]]:
    """Cancel jobs and gangs; running ones are told to stop first. Raises `NotFound`, and `Busy` for what another
    transaction holds for 2 s. Some hundreds at a time, each in a transaction of its own unless `connection` is given.
    """
    return _in_batches(
        lambda jobs, gangs: _rows(
            "cancel", rows.StateChange, connection, job_ids=jobs, gang_ids=gangs, reason=reason
        ),
        job_ids,
        gang_ids,
    )


def retry(*, job_ids: Sequence[int] = (), gang_ids: Sequence[int] = ()) -> Query[list[rows.StateChange]]:
    """Run jobs and gangs that failed or were cancelled again, under their ids. Raises `NotFound`,
    `WrongState`, and `Busy` for what another transaction holds for 2 s. Some hundreds at a time, each in a
    transaction of its own.
    """
    return _in_batches(
        lambda jobs, gangs: _rows("retry", rows.StateChange, job_ids=jobs, gang_ids=gangs), job_ids, gang_ids
    )


def set_priority(
    *, priority: int, job_ids: Sequence[int] = (), gang_ids: Sequence[int] = ()
) -> Query[list[rows.StateChange]]:
    """Change the priority (-1000 to 1000) of live jobs and gangs. Raises `InvalidInput`, `NotFound`, and `Busy` for
    what another transaction holds for 2 s. Some hundreds at a time, each in a transaction of its own.
    """
    return _in_batches(
        lambda jobs, gangs: _rows(
            "set_priority", rows.StateChange, priority=priority, job_ids=jobs, gang_ids=gangs
        ),
        job_ids,
        gang_ids,
    )


def set_queue(*, name: str, **settings: Unpack[QueueSettings]) -> Query[None]:
    """Make a queue, and its parents (those of "a.b.c" are "a.b" and "a"), or change what is given of it.

    A setting that is None is taken away where there may be none: `set_queue(name="gpu", budget_s=None)`. For
    gangq_admin. Raises `InvalidInput`, `NotAllowed`.
    """
    return _void("set_queue", name=name, settings=_settings(settings))


def configure(**settings: Unpack[InstallationSettings]) -> Query[None]:
    """Change what holds for the whole installation. For gangq_admin.

    Raises `InvalidInput`, `NotAllowed`, `WrongState`.
    """
    return _void("configure", settings=_settings(settings))


def set_task(*, task: str, forget: bool = False, **settings: Unpack[TaskSettings]) -> Query[None]:
    """Set what the watchdogs allow the jobs of one task. A setting that is None is taken away.

    `forget`: first drop what was set before and what was learned of its beats. For gangq_admin. Raises
    `InvalidInput`, `NotAllowed`.
    """
    return _void("set_task", task=task, settings=_settings(settings), forget=forget)


# A worker's words -------------------------------------------------------------------------------------------


def register_worker(
    *,
    name: str,
    host: str,
    queues: Sequence[str],
    slots: int | None = None,
    memory_mb: int = 0,
    cpus: float = 0,
    devices: Sequence[Mapping[str, Any]] = (),
    **options: Unpack[RegisterOptions],
) -> Query[rows.Registration]:
    """Register a start of a worker; every later word of it carries the incarnation this returns.

    `slots` [one for each device, at least 1]: how many placed jobs run at once. `options`: see
    `gangq.client.options.RegisterOptions`.
    Raises `WorkerNameTaken` (its `holder` is the live incarnation), `InvalidInput`, `NotFound` (queue).
    """
    return _row(
        "register_worker",
        rows.Registration,
        name=name,
        host=host,
        queues=texts(queues, "queues"),
        slots=slots,
        memory_mb=memory_mb,
        cpus=cpus,
        devices=dumps([dict(d) for d in devices], "devices"),
        options=as_json(encode_options(options)),
    )


def heartbeat(
    *,
    incarnation: int,
    job_ids: Sequence[int] = (),
    tokens: Sequence[int] = (),
    beats: Sequence[object | None] | None = None,
    readings: Sequence[Mapping[str, Any]] | None = None,
    durable: bool | None = None,
) -> Query[list[rows.Instruction]]:
    """Renew the lease (it counts from when this was sent), bring the beats, return what to do per claim.

    `beats` is aligned with `job_ids`; None: no news. `readings`: one mapping per device that this worker offers,
    with its "uuid"; the latest of each is kept. `durable` False: the commit does not wait for the disk, nor does
    anything else in that transaction. Raises `IncarnationEnded`.
    """
    return _rows(
        "heartbeat",
        rows.Instruction,
        incarnation=incarnation,
        job_ids=list(job_ids),
        tokens=list(tokens),
        beats=_each_or_null(beats, "beats"),
        readings=None if readings is None else dumps([dict(r) for r in readings], "readings"),
        durable=durable,
    )


def claim(
    *,
    incarnation: int,
    request_id: UUID | None = None,
    max_jobs: int = 1,
    ports: Sequence[int] = (),
    sleep: bool = False,
    model: str | None = None,
    lane: str | None = None,
) -> Query[list[rows.Claim]]:
    """Take up to `max_jobs`, within the slots of each lane: members reserved here, what has an open place here, then
    light jobs.

    `lane`: only that one, "placed" (members and places) or "light". `model`: what this worker has loaded.

    The same `request_id` returns the same claims after a lost reply. `ports` are those this worker holds
    bound. `sleep`: when there is no light job, put it on the list of those to wake. Raises `IncarnationEnded`.
    """
    return _rows(
        "claim",
        rows.Claim,
        incarnation=incarnation,
        request_id=request_id,
        max_jobs=max_jobs,
        ports=_integers(ports),
        sleep=sleep,
        model=model,
        lane=lane,
    )


def barrier(*, job_id: int, token: int, port: int | None = None) -> Query[list[rows.BarrierMember]]:
    """Look at the barrier: one row per member of the present epoch, by rank. Raises `StaleToken` after a drain.

    `port`: where others find this member, which has become rank 0 while it ran. Raises `WrongState` when that
    port serves another gang of this host.
    """
    return _rows("barrier", rows.BarrierMember, job_id=job_id, token=token, port=port)


def complete(
    *,
    job_ids: Sequence[int],
    tokens: Sequence[int],
    results: Sequence[object | None] | None = None,
    strict: bool = True,
    connection: object | None = None,
) -> Query[list[rows.Outcome]]:
    """Finish jobs as done. With `connection`, in its transaction. `results` is aligned with `job_ids`.

    `strict`: one stale pair raises `StaleToken` and nothing changes; else each job's outcome says it, and says
    `busy` of one that somebody's open transaction holds, in place of waiting for it.
    """
    return _rows(
        "complete",
        rows.Outcome,
        connection,
        job_ids=_integers(job_ids),
        tokens=_integers(tokens),
        results=_results(results, job_ids),
        strict=strict,
    )


def complete_and_claim(
    *,
    incarnation: int,
    job_ids: Sequence[int],
    tokens: Sequence[int],
    results: Sequence[object | None] | None = None,
    strict: bool = True,
    request_id: UUID | None = None,
    max_jobs: int = 1,
    ports: Sequence[int] = (),
    sleep: bool = False,
    model: str | None = None,
    quiet: bool = False,
    lane: str | None = None,
) -> Query[rows.CompletedAndClaimed]:
    """Finish jobs as done and take the next, in one round trip: :func:`complete`, then :func:`claim`.

    The completion waits for nobody but its own gangs; what would keep the claim waiting is not claimed. So when
    nothing was, call :func:`claim` with the same `request_id` before going to sleep. An error changed nothing: say
    the two apart. A placed job that is done here fills its place again, if that is still open. `quiet`: `outcomes`
    leaves out the jobs that are done by this call.
    """
    text, given = _call(
        "complete_and_claim",
        f"outcome, {rows.columns(rows.Claim)}",
        {
            "incarnation": incarnation,
            "job_ids": _integers(job_ids),
            "tokens": _integers(tokens),
            "results": _results(results, job_ids),
            "strict": strict,
            "request_id": request_id,
            "max_jobs": max_jobs,
            "ports": _integers(ports),
            "sleep": sleep,
            "model": model,
            "quiet": quiet or None,
            "lane": lane,
        },
    )
    return Query("gangq.complete_and_claim", text, given, _completed_and_claimed, None, tuple_row)


_outcome, _claim = rows.maker(rows.Outcome), rows.maker(rows.Claim)


def _completed_and_claimed(found: list[Any]) -> rows.CompletedAndClaimed:
    return rows.CompletedAndClaimed(
        [_outcome((row[1], row[0])) for row in found if row[0] != "claimed"],
        [_claim(row[1:]) for row in found if row[0] == "claimed"],
    )


def fail(
    *,
    job_id: int,
    token: int,
    error: Mapping[str, Any] | None = None,
    retryable: bool = True,
    cause: str = "error",
    connection: object | None = None,
) -> Query[str]:
    """Report a failed attempt; return the new state. `cause` is "error" or "port_taken" (uncharged).

    `error`: type, message, traceback, host, log_tail. Raises `StaleToken`.
    """
    return _scalar(
        "fail",
        connection,
        job_id=job_id,
        token=token,
        error=_json(error, "error"),
        retryable=retryable,
        cause=cause,
    )


def requeue(
    *, job_id: int, token: int, error: Mapping[str, Any] | None = None, front: bool = True
) -> Query[str]:
    """Report a watchdog trip, charged as one and not as an attempt; return the new state."""
    return _scalar("requeue", job_id=job_id, token=token, error=_json(error, "error"), front=front)


def release(
    *, job_ids: Sequence[int], tokens: Sequence[int], reason: str | None = None
) -> Query[list[rows.Outcome]]:
    """Hand jobs back uncharged; outcomes are released, repeated or stale."""
    return _rows("release", rows.Outcome, job_ids=list(job_ids), tokens=list(tokens), reason=reason)


def ack_preempted(*, job_id: int, token: int) -> Query[str]:
    """Confirm that the work is gone, after preempt or cancel; return the new state. Raises `StaleToken`."""
    return _scalar("ack_preempted", job_id=job_id, token=token)


def save_checkpoint(
    *, job_id: int, token: int, step: int, data: bytes, epoch: int | None = None
) -> Query[None]:
    """Store the state at `step`. Raises `TooLarge`, `StaleToken`.

    `epoch`: the one a member knows of; where every member saves its part, one of an older epoch is not kept.
    """
    return _void("save_checkpoint", job_id=job_id, token=token, step=step, data=data, epoch=epoch)


def load_checkpoint(*, job_id: int, token: int) -> Query[rows.SavedCheckpoint | None]:
    """Return the checkpoint this attempt resumes from, or None. Raises `StaleToken`."""
    text, given = _call(
        "load_checkpoint", rows.columns(rows.SavedCheckpoint), {"job_id": job_id, "token": token}
    )
    return Query(
        "gangq.load_checkpoint",
        text,
        given,
        lambda found: rows.SavedCheckpoint(**found[0]) if found else None,
    )


def append_log(
    *, job_ids: Sequence[int], tokens: Sequence[int], seqs: Sequence[int], chunks: Sequence[str]
) -> Query[None]:
    """Store output, aligned lists; stale pairs are dropped. NUL characters are replaced: text cannot hold
    them.
    """
    return _void(
        "append_log",
        job_ids=list(job_ids),
        tokens=list(tokens),
        seqs=list(seqs),
        chunks=[chunk.replace("\x00", "\N{REPLACEMENT CHARACTER}") for chunk in chunks],
    )


def retire_worker(*, incarnation: int, final: bool = True) -> Query[None]:
    """Stop as asked: `final` False takes nothing new, True is gone and what it held is free, uncharged."""
    return _void("retire_worker", incarnation=incarnation, final=final)


# Watchdogs --------------------------------------------------------------------------------------------------


def watch_terms(*, task: str, device_class: str = "", queue: str | None = None) -> Query[rows.WatchTerms]:
    """What the watchdogs allow jobs of this task. `device_class`: model of the devices, "" without."""
    return _row("watch_terms", rows.WatchTerms, task=task, device_class=device_class, queue=queue)


def learn_gap(*, task: str, device_class: str = "", longest_s: float, beats: int) -> Query[None]:
    """Say how long the beats of a task stayed away before they came back (the longest gap is kept, seconds), and
    how many beats were seen. Raises `InvalidInput`.
    """
    return _void("learn_gap", task=task, device_class=device_class, longest_s=longest_s, beats=beats)


# Evidence ---------------------------------------------------------------------------------------------------


def trip(
    *,
    incarnation: int,
    job_id: int,
    token: int,
    code: int,
    error: Mapping[str, Any],
    evidence: Mapping[str, Any] | None = None,
    devices: Sequence[str] = (),
    exit_in_s: float | None = None,
    class_: str | None = None,
) -> Query[str]:
    """Stop a job as a watchdog; return what came of it.

    `code` is the exit code, `error` as for `fail`, `evidence` what was seen (for those who may read
    payloads), `devices` the UUIDs to blame of those the job holds. `exit_in_s`: the whole worker process is
    gone within so many seconds whatever happens, so its incarnation ends now; None: the work is proven dead
    and the worker lives on. `class_`: as `notify_only` knows it; None: that of the code.

    Returns pending, scheduled, failed, preempted (its gang drains) or cancelled; notify or held: nothing was
    stopped, go on; repeated. Raises `StaleToken`, `InvalidInput`.
    """
    return _scalar(
        "trip",
        incarnation=incarnation,
        job_id=job_id,
        token=token,
        code=int(code),
        error=dumps(error, "error"),
        evidence=_json(evidence, "evidence"),
        devices=texts(devices, "devices"),
        exit_in_s=exit_in_s,
        class_=class_,
    )


def suspect(
    *,
    incarnation: int,
    job_id: int,
    token: int,
    class_: str,
    evidence: Mapping[str, Any] | None = None,
    notify: bool | None = None,
    convicted: bool | None = None,
) -> Query[str]:
    """Put a doubt about a job on record, with its evidence; nothing is stopped.

    `class_`: budget, stall, health, fault, gang, frozen or memory. `notify`: it would have been stopped, were
    its class not one that only reports. `convicted`: the caller stops it now unless the answer is held.
    Returns noted, or held while so many gangs and workers are suspect that a stall or health trip would not
    be carried out. Raises `StaleToken`.
    """
    return _scalar(
        "suspect",
        incarnation=incarnation,
        job_id=job_id,
        token=token,
        class_=class_,
        evidence=_json(evidence, "evidence"),
        notify=notify,
        convicted=convicted,
    )


def predecessor(*, worker: str) -> Query[list[rows.Predecessor]]:
    """The latest incarnation of this name, ended or not; a list of one, or empty."""
    return _rows("predecessor", rows.Predecessor, worker=worker)


def report_dead(*, worker: str, incarnation: int, evidence: Mapping[str, Any]) -> Query[int]:
    """Say that every process this incarnation started is gone; return how many jobs that freed."""
    return _scalar(
        "report_dead", worker=worker, incarnation=incarnation, evidence=dumps(evidence, "evidence")
    )


def unproven(*, worker: str) -> Query[list[rows.Unproven]]:
    """Incarnations of this worker that ended by a trip and are not yet proven gone: `report_dead` them."""
    return _rows("unproven", rows.Unproven, worker=worker)


def report_stuck(*, worker: str, incarnation: int, evidence: Mapping[str, Any]) -> Query[int]:
    """Say that a process of this incarnation survived SIGKILL; return how many devices that withholds.

    The worker is quarantined by name. Raises `InvalidInput` without evidence, `NotFound`.
    """
    return _scalar(
        "report_stuck", worker=worker, incarnation=incarnation, evidence=dumps(evidence, "evidence")
    )


def bounce(*, incarnation: int, host: str, report_only: bool = False) -> Query[str]:
    """Ask whether this host may restart its flagged worker: "go", or why not.

    heard, replaced, too_often, fleet (too many are flagged at once), taken, unknown. `report_only`: leave no
    trace. After "go", say how it went with `bounced`.
    """
    return _scalar("bounce", incarnation=incarnation, host=host, report_only=report_only)


def bounced(*, incarnation: int, ok: bool, detail: Mapping[str, Any] | None = None) -> Query[None]:
    """Say how a restart went; `ok`: a new incarnation of that worker is heard. Raises `NotFound`."""
    return _void("bounced", incarnation=incarnation, ok=ok, detail=_json(detail, "detail"))


def quarantine(
    *, device_uuid: str | None = None, worker: str | None = None, reason: str = "operator"
) -> Query[None]:
    """Keep a device, or a worker, from taking work. Raises `NotFound`, `WrongState` (device in use)."""
    return _void("quarantine", device_uuid=device_uuid, worker=worker, reason=reason)


def set_taints(*, worker: str, taints: Sequence[str]) -> Query[None]:
    """Set what an operator taints a worker with, beside its own taints; [] takes them off.

    By name, also after a restart. A taint ("key" or "key=value") keeps off every job that does not tolerate it; what
    runs goes on. For gangq_admin. Raises `InvalidInput`, `NotFound`, `NotAllowed`.
    """
    return _void("set_taints", worker=worker, taints=texts(taints, "taints"))


def unquarantine(*, device_uuid: str | None = None, worker: str | None = None) -> Query[None]:
    """Lift the quarantine of a device or worker. Raises `InvalidInput`, `NotFound`."""
    return _void("unquarantine", device_uuid=device_uuid, worker=worker)


def cordon(
    *,
    host: str | None = None,
    worker: str | None = None,
    drain: bool = False,
    deadline: datetime | None = None,
    reason: str | None = None,
) -> Query[None]:
    """Give a host, or a worker by name, nothing new until `uncordon`; members reserved there are still claimed.

    `drain`: move away what runs there, and at the `deadline` (None: never) tell the rest to stop. Repeats are
    harmless; what one leaves out stays as it was. For gangq_admin. Raises `InvalidInput`, `NotFound`.
    """
    return _void(
        "cordon", host=host, worker=worker, drain=drain, deadline=_aware(deadline, "deadline"), reason=reason
    )


def uncordon(*, host: str | None = None, worker: str | None = None) -> Query[None]:
    """Lift the cordon, and with it the drain, of a host or worker. Raises `InvalidInput`, `NotFound`."""
    return _void("uncordon", host=host, worker=worker)


# The scheduler ----------------------------------------------------------------------------------------------


def board() -> Query[str]:
    """What a pass decides from, as JSON: `gangq.placement.board.Board.from_json` reads it."""
    return Query(
        "gangq.board", "select gangq.board()::text as board", {}, lambda found: str(found[0]["board"])
    )


def apply(
    *,
    pass_: int,
    decisions: Sequence[Mapping[str, object]],
    part: int | None = None,
    last: bool | None = None,
    seen: Mapping[str, object] | None = None,
    closes: Sequence[int] = (),
) -> Query[rows.ApplyReport]:
    """Carry out what was decided on the board of this pass, each decision verified by itself, at most 50 that place
    or stop something. `part`: 1 begins the pass, the others continue it; `last` ends it. `closes`: open places that
    nothing of it uses. Raises `InvalidInput`, `WrongIsolation`.
    """
    given = {"decisions": dumps(list(decisions), "decisions"), "seen": _json(seen, "seen")}
    return _row("apply", rows.ApplyReport, pass_=pass_, part=part, last=last, closes=list(closes), **given)


def reserve_gang(*, gang_id: int, incarnations: Sequence[int]) -> Query[bool]:
    """Place a blocked gang on these workers, one for each rank, all or none. False: busy or full."""
    return _scalar("reserve_gang", gang_id=gang_id, incarnations=list(incarnations))


def reserve_members(
    *,
    gang_id: int,
    job_ids: Sequence[int],
    incarnations: Sequence[int],
    device_ids: Sequence[int] | None = None,
    digest: str | None = None,
) -> Query[bool]:
    """Place members, in rank order, each on its worker: those of a new epoch, or those that a running gang
    misses; all or none. `device_ids`: theirs, in the same order [the smallest that do]. `digest`: of the board that
    it was decided on. False: busy, full, or others are missing by now.
    """
    return _scalar(
        "reserve_members",
        gang_id=gang_id,
        job_ids=list(job_ids),
        incarnations=list(incarnations),
        device_ids=None if device_ids is None else list(device_ids),
        digest=digest,
    )


def rollback_gang(*, gang_id: int, reason: str | None = None) -> Query[bool]:
    """Undo a reservation nobody has claimed from. False: somebody has."""
    return _scalar("rollback_gang", gang_id=gang_id, reason=reason)


def preempt_gang(*, gang_id: int, trigger_job: int | None = None, reason: str | None = None) -> Query[bool]:
    """Drain a running or reserved gang; nobody is charged. False: there was nothing to drain."""
    return _scalar("preempt_gang", gang_id=gang_id, trigger_job=trigger_job, reason=reason)


def displace_job(*, job_id: int, reason: str | None = None) -> Query[bool]:
    """Tell a running solo job to stop; nobody is charged, and it comes back pending. False: it does not run.

    Raises `InvalidInput` (a member of a gang), `NotFound`.
    """
    return _scalar("displace_job", job_id=job_id, reason=reason)


def shrink_gang(*, gang_id: int, job_ids: Sequence[int], reason: str | None = None) -> Query[bool]:
    """Tell surplus members of a running elastic gang to stop; the others go on in a new epoch. Nobody is charged.

    False: one of them does not run, or a role would fall below its minimum.
    """
    return _scalar("shrink_gang", gang_id=gang_id, job_ids=list(job_ids), reason=reason)


def complete_drain(*, gang_id: int) -> Query[str]:
    """End the drain when every member is proven stopped; return the gang's state."""
    return _scalar("complete_drain", gang_id=gang_id)


def reap_expired(*, most: int | None = None) -> Query[int]:
    """Free what ended leases hold, at most `most` rows; return how many."""
    return _scalar("reap_expired", most=most)


def flag_dead_workers() -> Query[int]:
    """Flag silent workers, which frees nothing; return how many."""
    return _scalar("flag_dead_workers")


def promote_due(*, most: int | None = None) -> Query[int]:
    """Make scheduled jobs that are due pending, at most `most`; return how many."""
    return _scalar("promote_due", most=most)


def time_out(*, most: int | None = None) -> Query[int]:
    """Requeue, fail or split gangs that have waited for their placement timeout, at most `most`; return how many
    were looked at.
    """
    return _scalar("time_out", most=most)


def tick(
    *, force: bool | None = None, turn: int | None = None, decides: bool = True
) -> Query[rows.TickReport]:
    """Run all maintenance once, if nobody else does; then decide what starts where, if that is this caller's turn.
    Raises `WrongIsolation`.

    `turn`: the `next_turn` of the call before, which found a tick running. `decides`: false for maintenance alone.
    """
    first: Query[rows.TickReport] = _row("tick", rows.TickReport, force=force, turn=turn, decides=decides)

    def steps() -> Steps[rows.TickReport]:
        from gangq.client.passes import run_passes

        report: rows.TickReport = yield first
        if not report.decide:
            return report
        more = yield from run_passes()
        return replace(report, again=report.again or more)

    return replace(first, steps=steps)


# Looking ----------------------------------------------------------------------------------------------------


def explain_gang(*, gang_id: int) -> Query[list[rows.Reason]]:
    """Why a gang does or does not run: what the last pass found, and how old that is. Raises `NotFound`."""
    return _rows("explain_gang", rows.Reason, gang_id=gang_id)


def explain_job(*, job_id: int) -> Query[list[rows.Reason]]:
    """Why a job does or does not run: what the last pass found, or what a claim needs. Raises `NotFound`."""
    return _rows("explain_job", rows.Reason, job_id=job_id)


def explain_now(*, gang_id: int | None = None, job_id: int | None = None) -> Query[list[rows.Reason]]:
    """The same as `explain_gang` or `explain_job`, with a decision made now, without effects, in place of the last
    pass's. Raises `NotFound`.
    """
    if gang_id is not None:
        stored = explain_gang(gang_id=gang_id)
    elif job_id is not None:
        stored = explain_job(job_id=job_id)
    else:
        raise InvalidInput("explain_now: gang_id or job_id says which")

    def steps() -> Steps[list[rows.Reason]]:
        from gangq.client.plans import explain_now_steps

        return (yield from explain_now_steps(stored))

    return replace(stored, steps=steps)


def plan(*, changes: Sequence[Mapping[str, object]] | None = None) -> Query[list[rows.PlanRow]]:
    """What the next pass would do after these changes, and without them: the same decision on another board, without
    effects. A change is an object: `{"add_workers": 2, "like": "w1"}` (or with `gpus`, `vram_mb`, `slots`,
    `memory_mb`, `cpus`, `labels`, `queues`, `tasks`, `taints`, `host`), `{"remove_host": h}`,
    `{"priority": {"gang": 7, "value": 50}}`, `{"cancel": {"gang": 7}}` or `{"job": 12}`,
    `{"quota": {"queue": q, "maximum": {"gpus": 8}}}` (or `guaranteed`, `max_running_gangs`, `max_running_jobs`,
    `paused`), `{"submit": {...}}` with the arguments of `submit_gang`. Raises `InvalidInput`, `NotFound`.
    """

    def steps() -> Steps[list[rows.PlanRow]]:
        from gangq.client.plans import plan_steps

        return (yield from plan_steps(list(changes or ())))

    return Query("gangq.board", "", {}, lambda _: [], steps=steps)


def replay(*, since: datetime | None = None, until: datetime | None = None) -> Query[list[rows.ReplayRow]]:
    """Decide on the recorded boards of a stretch of time once more, here, and compare. For gangq_admin."""
    from gangq.client.passes import ReplayedPass, again

    text = (
        "select min(at) as at, min(digest) as digest, jsonb_agg(decisions order by at) as parts, "
        "(array_agg(board) filter (where board is not null))[1] as board from gangq.passes "
        "where at >= coalesce(%(since)s::timestamptz, '-infinity') "
        "and at <= coalesce(%(until)s::timestamptz, 'infinity') "
        "group by pass order by min(at)"
    )
    given = {"since": _aware(since), "until": _aware(until)}
    return Query("gangq.passes", text, given, lambda found: [again(ReplayedPass(**row)) for row in found])


def schema_version() -> Query[str]:
    """Name of the newest applied migration."""
    return _scalar("schema_version")


def _view(
    view: str, row: type[T], order: str, limit: int | None = None, /, **filters: tuple[str, object]
) -> Query[list[T]]:
    """Rows of a view. `filters`: column condition and value; a value of None is no condition."""
    given = {key: value for key, (_, value) in filters.items() if value is not None}
    where = " and ".join(filters[key][0].format(f"%({key})s") for key in given)
    text = f"select {rows.columns(row)} from gangq.{view}"  # noqa: S608 - names from this module only
    text += f" where {where}" if where else ""
    text += f" order by {order}" if order else ""
    text += f" limit {int(limit)}" if limit is not None else ""
    return Query(f"gangq.{view}", text, given, list, factory=_factory(row))


def _ids(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else list(ids)


def _states(state: str | Sequence[str] | None) -> tuple[str, object]:
    states = [state] if isinstance(state, str) else list(state or ())
    # Of one state an index knows the newest; of several it only knows which there are.
    return ("state = {}", states[0]) if len(states) == 1 else ("state = any ({}::text[])", states or None)


def jobs(
    *,
    ids: Sequence[int] | None = None,
    state: str | Sequence[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    gang_id: int | None = None,
    worker: str | None = None,
    limit: int | None = _LIMIT,
) -> Query[list[rows.JobRow]]:
    """Jobs, newest first, live and ended. All filters given must hold. `limit`: at most so many, None for all."""
    return _view(
        "jobs",
        rows.JobRow,
        "id desc",
        limit,
        ids=("id = any ({}::bigint[])", _ids(ids)),
        state=_states(state),
        queue=("queue = {}", queue),
        task=("task = {}", task),
        gang_id=("gang_id = {}::bigint", gang_id),
        worker=("worker = {}", worker),
    )


def gangs(
    *,
    ids: Sequence[int] | None = None,
    state: str | Sequence[str] | None = None,
    queue: str | None = None,
    limit: int | None = _LIMIT,
) -> Query[list[rows.GangRow]]:
    """Gangs, newest first, live and ended. All filters given must hold. `limit`: at most so many, None for all."""
    return _view(
        "gangs",
        rows.GangRow,
        "id desc",
        limit,
        ids=("id = any ({}::bigint[])", _ids(ids)),
        state=_states(state),
        queue=("queue = {}", queue),
    )


def job(*, id: int) -> Query[rows.JobRow]:
    """The job with this id. Raises `NotFound`."""
    q = jobs(ids=[id])
    return Query(q.name, q.text, q.params, lambda found: _only(found, "job", id), factory=q.factory)


def gang(*, id: int) -> Query[rows.GangRow]:
    """The gang with this id. Raises `NotFound`."""
    q = gangs(ids=[id])
    return Query(q.name, q.text, q.params, lambda found: _only(found, "gang", id), factory=q.factory)


def _only(found: list[T], what: str, id: int) -> T:
    if not found:
        raise NotFound(
            f"{what} {id} does not exist: it was never committed, it is older than its retention, or this is "
            "another database"
        )
    return found[0]


def job_states(*, ids: Sequence[int]) -> Query[dict[int, str]]:
    """The state of each of these jobs that exists: what `wait` polls."""
    text = "select id, state from gangq.jobs where id = any (%(ids)s::bigint[])"
    return Query("gangq.jobs", text, {"ids": list(ids)}, lambda found: {r["id"]: r["state"] for r in found})


def gang_states(*, ids: Sequence[int]) -> Query[dict[int, str]]:
    """The state of each of these gangs that exists."""
    text = "select id, state from gangq.gangs where id = any (%(ids)s::bigint[])"
    return Query("gangq.gangs", text, {"ids": list(ids)}, lambda found: {r["id"]: r["state"] for r in found})


def workers(*, name: str | None = None, host: str | None = None) -> Query[list[rows.WorkerRow]]:
    """Workers by name, then incarnation."""
    return _view(
        "workers", rows.WorkerRow, "name, incarnation", name=("name = {}", name), host=("host = {}", host)
    )


def devices(*, host: str | None = None, state: str | None = None) -> Query[list[rows.DeviceRow]]:
    """Devices by host and index."""
    return _view(
        "devices",
        rows.DeviceRow,
        "host, index, uuid",
        host=("host = {}", host),
        state=("state = {}", state),
    )


def waiting(*, queue: str | None = None, limit: int | None = None) -> Query[list[rows.WaitingRow]]:
    """What waits and why, in the order it would run."""
    return _view("waiting", rows.WaitingRow, "priority desc, since, id", limit, queue=("queue = {}", queue))


def timeline(*, gang_id: int) -> Query[list[rows.TimelineRow]]:
    """A gang's life in order."""
    return _view("timeline", rows.TimelineRow, "", gang_id=("gang_id = {}::bigint", gang_id))


def drains(*, gang_id: int | None = None, limit: int | None = None) -> Query[list[rows.DrainRow]]:
    """Drains, oldest first."""
    return _view(
        "drains", rows.DrainRow, "started_at, gang_id", limit, gang_id=("gang_id = {}::bigint", gang_id)
    )


def capacity(*, queue: str | None = None) -> Query[list[rows.CapacityRow]]:
    """What is offered and free, by queue and host."""
    return _view("capacity", rows.CapacityRow, "queue, host", queue=("queue = {}", queue))


def violations() -> Query[list[rows.ViolationRow]]:
    """Broken invariants: there should be none."""
    return _view("violations", rows.ViolationRow, "rule, subject")


def events(
    *,
    job_id: int | None = None,
    gang_id: int | None = None,
    kind: str | None = None,
    after_id: int | None = None,
    limit: int | None = _LIMIT,
) -> Query[list[rows.EventRow]]:
    """Events in order of writing; `after_id` for following them. `limit`: at most so many, None for all."""
    return _view(
        "events",
        rows.EventRow,
        "id",
        limit,
        job_id=("job_id = {}::bigint", job_id),
        gang_id=("gang_id = {}::bigint", gang_id),
        kind=("kind = {}", kind),
        after_id=("id > {}::bigint", after_id),
    )


def trips(
    *,
    job_id: int | None = None,
    gang_id: int | None = None,
    worker: str | None = None,
    host: str | None = None,
    code: int | None = None,
    since: datetime | None = None,
    limit: int | None = None,
) -> Query[list[rows.TripRow]]:
    """Trips of watchdogs, newest first, also those that only notified or were held. `since`: not older."""
    return _view(
        "trips",
        rows.TripRow,
        "at desc, job_id",
        limit,
        job_id=("job_id = {}::bigint", job_id),
        gang_id=("gang_id = {}::bigint", gang_id),
        worker=("worker = {}", worker),
        host=("host = {}", host),
        code=("code = {}::integer", code),
        since=("at >= {}::timestamptz", since),
    )


def flagged(*, host: str | None = None) -> Query[list[rows.FlaggedRow]]:
    """Workers that fell silent while they held jobs, neither heard nor replaced since."""
    return _view("flagged", rows.FlaggedRow, "host, worker", host=("host = {}", host))


def cordoned(*, kind: str | None = None, name: str | None = None) -> Query[list[rows.CordonRow]]:
    """Hosts and workers (`kind`) that are given nothing new, and what still runs there."""
    return _view("cordoned", rows.CordonRow, "kind, name", kind=("kind = {}", kind), name=("name = {}", name))


def evidence(
    *, job_id: int, kind: str | None = None, limit: int | None = None
) -> Query[list[rows.EvidenceRow]]:
    """What watchdogs saw of a job, in order; `kind` as of its event. For those who may read the job."""
    return _view(
        "job_evidence",
        rows.EvidenceRow,
        "at",
        limit,
        job_id=("job_id = {}::bigint", job_id),
        kind=("kind = {}", kind),
    )


def logs(*, job_id: int, token: int | None = None, after_seq: int | None = None) -> Query[list[rows.LogRow]]:
    """A job's output in order, of every attempt or of the one with `token`; `after_seq` for following it."""
    return _view(
        "job_logs",
        rows.LogRow,
        "token, seq",
        job_id=("job_id = {}::bigint", job_id),
        token=("token = {}::bigint", token),
        after_seq=("seq > {}::integer", after_seq),
    )


def queues(*, name: str | None = None) -> Query[list[rows.QueueRow]]:
    """Queues as a tree: each parent before its children."""
    return _view("queues", rows.QueueRow, "", name=("name = {}", name))


def tasks(*, task: str | None = None) -> Query[list[rows.TaskRow]]:
    """What was set for each task and learned of its beats, by task and class of devices."""
    return _view("tasks", rows.TaskRow, "task, device_class", task=("task = {}", task))


def retention(*, class_: str | None = None) -> Query[list[rows.RetentionRow]]:
    """What is kept of what has ended, by class and table; no table is read for it."""
    return _view("retention", rows.RetentionRow, "", class_=("class = {}", class_))
