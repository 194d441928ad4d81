# mypy: disable-error-code="empty-body"
"""Verbs of operators, of the decision, and of explanations.

What a declaration means is in `gangq.client.verb`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from gangq.client import rows
from gangq.client.encoding import dumps, dumps_each
from gangq.client.settings import QueueSettings, TaskSettings
from gangq.client.verb import (
    BigInt,
    BigInts,
    Integers,
    Json,
    Object,
    Objects,
    Query,
    Seconds,
    Span,
    Steps,
    Texts,
    Time,
    Verb,
    function_call,
    in_dicts,
    in_tuples,
    verb,
)
from gangq.client.views import Views
from gangq.errors import InvalidInput

_OF_FUNCTION = """
  select proargnames[1:pronargs], array(select format_type(type, null) from unnest(proargtypes) as type),
    proretset or prorettype = 'record'::regtype
  from pg_proc where pronamespace = 'gangq'::regnamespace and prokind = 'f' and proname = %(name)s"""
"""The names and types of its arguments, and whether it returns rows."""


def _decides(given: dict[str, Any], _options: dict[str, Any], _connection: object) -> None:
    given.setdefault("decides", True)  # Who calls the SQL function itself does not.


def _then_decide(
    _verb: Verb[..., Any], first: Query[rows.TickReport], given: Mapping[str, Any]
) -> Steps[rows.TickReport]:
    report = yield from first
    if report.unplanned and given.get("decides", True):
        from gangq.decider.schedules import plan_schedules

        if (yield from plan_schedules()):
            report = report._replace(again=True, next_in_s=0.0)
    if not report.decide:
        return report
    from gangq.decider.passes import run_passes

    passed = yield from run_passes()
    moments = [s for s in (report.next_in_s, passed.next_in_s) if s is not None]
    return report._replace(again=report.again or passed.again, next_in_s=min(moments, default=None))


class OperatorVerbs:
    """Verbs of operators, of the decision, and of explanations."""

    @verb
    def set_queue(self, *, name: str, **settings: Unpack[QueueSettings]) -> None:
        """Make a queue, and its parents (those of "a.b.c" are "a.b" and "a"), or change what is given of it; None
        takes a setting away where there may be none. Raises `InvalidInput`, `NotAllowed`.
        """

    @verb
    def set_limit(self, *, key: str, most: int | None = None, rate: str | None = None) -> None:
        """Make a limit key, or change it. Raises `InvalidInput`."""

    @verb
    def configure(self, /, **settings: Any) -> None:
        r"""Change what holds for the whole installation: `\d+ gangq.settings` in psql. Lengths of time, whose names
        end in _s, are seconds, texts such as "90s", or timedeltas. Raises `InvalidInput`, `NotAllowed`, `WrongState`.
        """

    @verb
    def set_task(self, *, task: str, forget: bool = False, **settings: Unpack[TaskSettings]) -> None:
        """Set what the watchdogs allow the jobs of one task; None takes a setting away. Raises `InvalidInput`,
        `NotAllowed`.
        """

    @verb
    def pause_task(self, *, task: str, until: Time | None = None, reason: str | None = None) -> None:
        """Start nothing new of a task, until then [until `resume_task`]; what runs goes on. Raises `InvalidInput`."""

    @verb
    def resume_task(self, *, task: str) -> None:
        """End the pause of a task."""

    @verb
    def quarantine(
        self, *, device_uuid: str | None = None, worker: str | None = None, reason: str = "operator"
    ) -> None:
        """Keep a device, or a worker, from taking work. Raises `NotFound`, `WrongState` (device in use)."""

    @verb
    def set_taints(self, *, worker: str, taints: Texts) -> None:
        """Set what an operator taints a worker with, beside its own taints; [] takes them off. Raises `InvalidInput`,
        `NotFound`, `NotAllowed`.
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
        """Give a host, or a worker by name, nothing new until `uncordon`. `drain`: move away what runs there, and at
        the `deadline` [never] tell the rest to stop. Raises `InvalidInput`, `NotFound`.
        """

    @verb
    def uncordon(self, *, host: str | None = None, worker: str | None = None) -> None:
        """Lift the cordon, and with it the drain, of a host or worker. Raises `InvalidInput`, `NotFound`."""

    @verb
    def usage(self, *, since: Span | None = None, by: Texts | None = None) -> list[rows.UsageRow]:
        """GPU hours used, and of them wasted and displaced, in the time `since` [30 days], `by` some of submitter,
        queue, task and service [submitter], most first. Raises `InvalidInput`.
        """

    @verb
    def metrics(self) -> list[rows.MetricRow]:
        """The numbers that `gangq metrics` serves (docs/manual/metrics.md), which outlive history."""

    @verb
    def add_notification(
        self,
        *,
        target: str,
        kinds: Texts | None = None,
        queue: str | None = None,
        submitter: str | None = None,
        task: str | None = None,
        max_attempts: int | None = None,
    ) -> None:
        """Add a notification target, or change what it is told of. Raises `InvalidInput`, `NotFound`, `WrongState`
        (there are 100 targets).
        """

    @verb
    def remove_notification(self, *, target: str) -> None:
        """Remove a target with what it was not told yet. Raises `NotFound`."""

    @verb
    def test_notification(self, *, target: str) -> int:
        """Have a target told that this is a test; its id. Raises `NotFound`."""

    @verb
    def retry_notifications(self, *, target: str) -> int:
        """Have what was given up for a target delivered after all, and what backs off at once; how many were given
        up. Raises `NotFound`.
        """

    @verb
    def fetch_notification(self, *, target: str, lease_s: Seconds | None = None) -> rows.Fetched:
        """Take the next notification of a target: deliver it, then `acknowledge_notification`. Raises `InvalidInput`,
        `NotFound`.
        """

    @verb
    def acknowledge_notification(
        self, *, target: str, id: BigInt, delivery: int, error: str | None = None
    ) -> str:
        """Say how a delivery ended: `error` None, and it is delivered. Raises `NotFound`."""

    @verb
    def board(self) -> Steps[str]:
        """What a pass decides from, as JSON: `gangq.placement.board.Board.from_json` reads it."""
        found = yield Query("gangq.board", "select gangq.board()::text", {}, list, factory=in_tuples)
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
        """Carry out what was decided on the board of this pass. Raises `InvalidInput`, `WrongIsolation`."""

    @verb
    def preview(self, *, changes: Json, kinds: Integers) -> Any:
        """What `plan` needs to edit a board as `changes` say, and does not find there. Raises `InvalidInput`,
        `NotFound`.
        """

    @verb(before=_decides, then=_then_decide)
    def tick(
        self, *, force: bool | None = None, turn: BigInt | None = None, decides: bool = True
    ) -> rows.TickReport:
        """Run all maintenance once, if nobody else does; then compute when schedules are due next, and decide what
        starts where, if that is this caller's turn; `decides` false: maintenance alone. Raises `WrongIsolation`.
        """

    @verb
    def unplanned_schedules(self) -> list[rows.UnplannedSchedule]:
        """Schedules whose next due time is to be computed, at most 100: what `tick` does."""

    @verb
    def plan_schedules(self, *, plans: Objects) -> bool:
        """Store computed due times. Returns whether one of them is due by now. Raises `InvalidInput`."""

    @verb
    def explain_gang(self, *, gang_id: BigInt) -> list[rows.Reason]:
        """Why a gang does or does not run: what the last pass found, and how old that is. Raises `NotFound`."""

    @verb
    def explain_job(self, *, job_id: BigInt) -> list[rows.Reason]:
        """Why a job does or does not run: what the last pass found, or what a claim needs. Raises `NotFound`."""

    @verb
    def explain_now(
        self, *, gang_id: int | None = None, job_id: int | None = None
    ) -> Steps[list[rows.Reason]]:
        """The same as `explain_gang` or `explain_job`, with a decision made now, without effects, in place of the
        last pass's. Raises `NotFound`.
        """
        from gangq.decider.previews import explain_now_steps

        if gang_id is not None:
            return (yield from explain_now_steps(OperatorVerbs.explain_gang(gang_id=gang_id)))
        if job_id is not None:
            return (yield from explain_now_steps(OperatorVerbs.explain_job(job_id=job_id)))
        raise InvalidInput("explain_now: gang_id or job_id says which")

    @verb
    def plan(self, *, changes: Sequence[Mapping[str, object]] | None = None) -> Steps[list[rows.PlanRow]]:
        """What the next pass would do after these changes, and without them: the same decision on another board,
        without effects. A change is an object: `{"add_workers": 2, "like": "w1"}` (or with `gpus`, `vram_mb`,
        `slots`, `memory_mb`, `cpus`, `labels`, `queues`, `tasks`, `taints`, `host`), `{"remove_host": h}`,
        `{"priority": {"gang": 7, "value": 50}}`, `{"cancel": {"gang": 7}}` or `{"job": 12}`, `{"quota": {"queue": q,
        "maximum": {"gpus": 8}}}` (or `guaranteed`, `max_running_gangs`, `max_running_jobs`, `paused`), `{"submit":
        {...}}` with the arguments of `submit_gang`. Raises `InvalidInput`, `NotFound`.
        """
        from gangq.decider.previews import plan_steps

        return (yield from plan_steps(list(changes or ())))

    @verb
    def replay(
        self, *, since: datetime | None = None, until: datetime | None = None
    ) -> Steps[list[rows.ReplayRow]]:
        """Decide on the recorded boards of a stretch of time once more, here, and compare. For gangq_admin."""
        from gangq.decider.passes import replayed

        return replayed((yield from Views.passes(since=since, until=until)))

    @verb
    def schema_version(self) -> str:
        """Name of the newest applied migration."""

    @verb
    def call(self, name: str, /, **arguments: object) -> Steps[Any]:
        """Call the SQL function `gangq.<name>` with arguments by its names for them, as psql does: for those that
        have no method here. Returns its value, or for one that returns rows a list of dicts.

        What goes into jsonb is any value that JSON can hold. Raises `InvalidInput` where there is no such function or
        argument, `NotSerializable`, and what the function raises.
        """
        found = yield Query("gangq.call", _OF_FUNCTION, {"name": name}, list, factory=in_tuples)
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
        factory = in_dicts if rows_too else in_tuples
        answer = yield Query(f"gangq.{name}", text, given, list, factory=factory)
        return answer if rows_too else answer[0][0]
