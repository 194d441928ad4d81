"""The options of a task, and how patient the watchdogs are with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from gangq.client.encoding import AWAITING, Awaited, awaited_ids
from gangq.client.options import GangOptions, Needs, aware
from gangq.client.selectors import as_selector
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput

_LONGEST_BUDGET_S, _LONGEST_PATIENCE_S = 1e9, 1e7
_SHORTEST_S = 1e-9
"""0 is no length of time that a job may take."""


class TaskOptions(Needs, total=False):
    """How jobs of a task are submitted. What is None or left out is as the workers declare the task, then as usual.

    Workers publish what their tasks are declared with: it also holds for what is submitted from SQL and the command
    line.

    - `queue`: where they wait. `priority`: -1000 to 1000, higher first.
    - `gpus` (whole devices), `vram_mb` (MiB on each), `memory_mb` (MiB), `cpus` (may be fractional), `labels`
      (which the worker must carry): what one job, or one member of a gang, needs.
    - `budget`: wall-clock time an attempt may take: seconds, "90s", "1h30m", or a timedelta.
    - `selector`: conditions on the worker, "gpu=h100,zone!=eu,!spot" (see `gangq.parse_selector`); `tolerates`:
      taints it may run in spite of.
    - `model`: what it needs loaded; of jobs of one priority and about one age a worker takes those first whose
      model it has.
    - `limit_key`: of all jobs that name this key, whatever their queue, at most `limit` are placed at once. The first
      submission that names a key says its limit; another `limit` later is refused (gangq_admin: `gangq limit set`).
      `rate`, in its place or besides: so many of them start in a period, "10/1m" (s, m, h, d): ten at once, then
      one each 6 s.
    - `max_attempts`, `max_crashes` (lost workers), `max_trips` (watchdog trips), `max_snoozes` (`ctx.snooze`) [100]:
      then it is failed.
    - `wait_for_hardware`: take it though no known worker could ever run it, because one is still to come.

    Those below are of one submission, and not published:

    - `run_at`: not before then, a datetime with a time zone; or `delay`: not before so long from now.
    - `after`: what must be done first: handles of jobs or gangs, or ids of jobs (a number is always a job).
      `after_any`: what must have ended, whatever came of it. `after_failed`: what must have failed.
    - `unique`: a key of 1 to 200 characters. Nothing is submitted where it stands for a job or gang already, and the
      handle of that one says `existed`. A key stands for what was submitted with it while that is live, and with
      `unique_for` at least so long. It is this task's in this queue, and each login's own unless the queue is shared.
      `replace`: where no claim has taken that job yet, it gets this payload, priority and `run_at`.
    - `request_id`: a UUID for this one submission, so that it can be repeated safely within an hour [a new one].
    - `connection`: submit inside this connection's transaction; see `Client`.
    """

    queue: str | None
    priority: int | None
    gpus: int | None
    budget: Duration | None
    run_at: datetime | None
    delay: Duration | None
    after: Sequence[int | Awaited]
    after_any: Sequence[int | Awaited]
    after_failed: Sequence[int | Awaited]
    unique: str | None
    unique_for: Duration | None
    replace: bool
    request_id: UUID | str | None
    connection: object | None


class TaskGangOptions(TaskOptions, GangOptions, total=False):
    """Of a gang of a task: `TaskOptions` hold for each member, `gangq.client.options.GangOptions` for the gang."""


ONCE = (
    *AWAITING,
    "connection",
    "run_at",
    "delay",
    "request_id",
    "unique",
    "unique_for",
    "replace",
)
"""The options of one submission."""
_KEY = {"unique": "unique_key", "unique_for": "keep_s", "replace": "replaces"}
_ARGUMENTS = {"budget": "budget_s", "run_at": "due_at", **_KEY}
"""The arguments of `Client.submit` and `Client.submit_unique` that are called otherwise than the option."""


def changed(options: TaskOptions, more: Mapping[str, Any]) -> TaskOptions:
    """Return options with `more` in place. Raises `InvalidInput` for a name that is no option, and for what cannot be
    read: it is said where it is written, not at the first submit.
    """
    unknown = sorted(set(more) - TaskOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(sorted(TaskOptions.__annotations__))
        raise InvalidInput(f"unknown option {unknown[0]!r}; the options are {known}")
    found = {key: value for key, value in {**options, **more}.items() if value is not None}
    as_selector(found.get("selector"))
    for name, least in (("budget", _SHORTEST_S), ("unique_for", _SHORTEST_S), ("delay", 0.0)):
        if name in found:
            found[name] = seconds(found[name], name, least=least, most=_LONGEST_BUDGET_S)
    if "run_at" in found:
        aware(found["run_at"], "run_at")
    if "run_at" in found and "delay" in found:
        raise InvalidInput("both run_at and delay are given: a moment, or how long from now")
    alone = next((name for name in ("unique_for", "replace") if found.get(name)), None)
    if alone is not None and "unique" not in found:
        raise InvalidInput(f"{alone} is given without unique: say what it is to be submitted once for")
    return cast(TaskOptions, found)


def arguments(options: TaskOptions) -> dict[str, Any]:
    """Return all but `delay` as keyword arguments of `Client.submit`, with `unique` of `Client.submit_unique`."""
    given: dict[str, Any] = {
        _ARGUMENTS.get(key, key): value for key, value in options.items() if key != "delay"
    }
    for name in given.keys() & AWAITING:
        given[name] = awaited_ids(given[name], name)
    return given


def declared(options: TaskOptions) -> dict[str, Any]:
    """Return what a worker publishes of them: the options that say what a job needs."""
    given = {**arguments(options), "selector": as_selector(options.get("selector"))}
    left = {"wait_for_hardware", *(_ARGUMENTS.get(key, key) for key in ONCE)}
    return {key: given[key] for key in sorted(given.keys() - left) if given[key] is not None}


@dataclass(frozen=True)
class WatchOptions:
    """How patient the watchdogs are with a task: seconds, "10m", or timedeltas, kept as seconds. None: as
    `gangq task set` says, else learned or the installation's default.

    - `stall_timeout`: once it beats, how long the next beat may take [5 times the longest gap seen, at least
      120].
    - `load_grace`: how long it may load before an idle GPU counts against it [1200].
    - `health_window`: how long the GPU may then do nothing at all, with nothing else moving [300].
    - `long_phase`: how long one phase "long" is exempt from `stall_timeout` [3600].
    """

    stall_timeout: float | None = None
    load_grace: float | None = None
    health_window: float | None = None
    long_phase: float | None = None

    @classmethod
    def of(cls, **given: Duration | None) -> WatchOptions | None:
        """Return what is given; None for nothing. Raises `InvalidInput`."""
        found = {
            name: seconds(value, name, least=_SHORTEST_S, most=_LONGEST_PATIENCE_S)
            for name, value in given.items()
            if value is not None
        }
        return cls(**found) if found else None


def is_for_gangs(option: str) -> bool:
    """Whether this is an option of a gang, and not of its members."""
    return option in GangOptions.__annotations__ or option == "roles"
