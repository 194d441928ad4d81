"""The App: which database, and which tasks.

app = App()

@app.task(queue="gpu", gpus=1, budget=3600)
def train(ctx, epochs):
    ...

train.submit(epochs=10).result()
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from gangq.client import Client
from gangq.client.encoding import AWAITING, as_object, awaited_ids
from gangq.client.options import GANG_ONLY
from gangq.client.roles import Role, as_role
from gangq.client.rows import GangSubmitted
from gangq.client.selectors import Selector, as_selector
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.context import Context, find_current
from gangq.errors import InvalidInput, UnknownTask
from gangq.handles import AsyncGangHandle, AsyncHandle, GangHandle, Handle, later, member_ids, now
from gangq.retry import Retry
from gangq.signatures import misfit, require_plain

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient
    from gangq.schedules import Schedule, ScheduleDeclaration

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")
G = TypeVar("G")
C = TypeVar("C", bound="Client | AsyncClient")

COMMAND = "command"


@dataclass(frozen=True)
class TaskOptions:
    """How jobs of a task are submitted. None means: as the workers declare the task, then as usual.

    Workers publish what their tasks are declared with: it also holds for what is submitted from SQL and the command
    line.

    - `queue`: where they wait. `priority`: -1000 to 1000, higher first.
    - `gpus` (whole devices), `vram_mb` (MiB on each), `memory_mb` (MiB), `cpus` (may be fractional), `labels`
      (which the worker must carry): what one job, or one member of a gang, needs.
    - `budget`: wall-clock seconds an attempt may take.
    - `selector`: conditions on the worker, "gpu=h100,zone!=eu,!spot" (see `gangq.parse_selector`); `tolerates`:
      taints it may run in spite of.
    - `model`: what it needs loaded; of jobs of one priority and about one age a worker takes those first whose
      model it has.
    - `max_attempts`, `max_crashes` (lost workers), `max_trips` (watchdog trips): then it is failed.
    - `due_at`: not before then; a datetime with a time zone.
    - `after`: what must be done first: handles of jobs or gangs, or ids of jobs (a number is always a job).
      `after_any`: what must have ended, whatever came of it. `after_failed`: what must have failed.
    - `wait_for_hardware`: take it though no known worker could ever run it, because one is still to come.
    - `request_id`: a UUID for this one submission, so that it can be repeated safely within an hour [a new one].
    - `connection`: submit inside this connection's transaction; see `Client`.
    """

    queue: str | None = None
    priority: int | None = None
    gpus: int | None = None
    vram_mb: int | None = None
    memory_mb: int | None = None
    cpus: float | None = None
    labels: Mapping[str, Any] | None = None
    selector: Selector | None = None
    tolerates: Sequence[str] | None = None
    budget: float | None = None
    model: str | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    max_trips: int | None = None
    due_at: datetime | None = None
    after: Sequence[Handle | AsyncHandle | GangHandle | AsyncGangHandle | int] = ()
    after_any: Sequence[Handle | AsyncHandle | GangHandle | AsyncGangHandle | int] = ()
    after_failed: Sequence[Handle | AsyncHandle | GangHandle | AsyncGangHandle | int] = ()
    wait_for_hardware: bool = False
    request_id: UUID | str | None = None
    connection: object | None = None

    def __post_init__(self) -> None:
        # What cannot be read is said where it is written, not at the first submit.
        as_selector(self.selector)
        _require_seconds("budget", self.budget, 1e9)

    def changed(self, options: Mapping[str, Any]) -> TaskOptions:
        """Return a copy with `options` in place. Raises `InvalidInput` for a name that is no option."""
        known = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidInput(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **options)

    def arguments(self) -> dict[str, Any]:
        """Return them as keyword arguments of `Client.submit`."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["budget_s"] = given.pop("budget")
        for name in AWAITING:
            given[name] = awaited_ids(given[name], name)
        return given

    def declared(self) -> dict[str, Any]:
        """Return what a worker publishes of them: the options that say what a job needs, and are given."""
        given = {**self.arguments(), "selector": as_selector(self.selector)}
        kept = given.keys() - {*AWAITING, "connection", "due_at", "request_id", "wait_for_hardware"}
        return {key: given[key] for key in sorted(kept) if given[key] is not None}


@dataclass(frozen=True)
class WatchOptions:
    """How patient the watchdogs are with a task, in seconds. None: as `gangq task set` says, else learned or
    the installation's default.

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

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            _require_seconds(name, value, 1e7)


def _require_seconds(name: str, value: object, most: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most
    if value is not None and not number:
        raise InvalidInput(f"{name} is {value!r}: a number of seconds greater than 0, {most:g} at most")


_GANG_OPTIONS = GANG_ONLY - {"payloads", "request_id"}
_RESOURCES = ("gpus", "vram_mb", "memory_mb", "cpus", "labels", "selector", "tolerates", "model", "budget_s")
"""What a role has of its task."""
_NO_NEEDS: dict[str, Any] = {"gpus": 0, "vram_mb": 0, "memory_mb": 0, "cpus": 0}
"""What a task needs that is declared without."""


@dataclass(frozen=True, eq=False)
class _Declaration(ABC, Generic[P, R, H, G]):
    """What a task is, whoever submits it; submitting makes handles `H` of jobs and `G` of gangs."""

    app: App
    name: str
    function: Callable[Concatenate[Context, P], R] | None
    defaults: TaskOptions
    isolate: bool = False
    watch: WatchOptions | None = None
    retry: Retry | None = None

    def _jobs(self, payloads: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        listed = [self._payload(payload, f"payloads[{i}]") for i, payload in enumerate(payloads)]
        return {"task": self.name, "payloads": listed, **self.defaults.arguments()}

    def _gang(
        self,
        size: int | None,
        payload: Mapping[str, Any] | None,
        payloads: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        one = None if payload is None else as_object(payload, "payload")
        each = None if payloads is None else [as_object(p, f"payloads[{i}]") for i, p in enumerate(payloads)]
        if options.get("roles") is None:
            for given_to in [one or {}] if each is None else each:
                self._check(given_to)
        gang = {key: value for key, value in options.items() if key in _GANG_OPTIONS}
        members = {key: value for key, value in options.items() if key not in _GANG_OPTIONS}
        if gang.get("roles") is not None:
            gang["roles"] = [
                self._role(as_role(role, n), members, one) for n, role in enumerate(gang["roles"])
            ]
        return {
            "task": self.name,
            "size": size,
            "payload": one,
            "payloads": each,
            **gang,
            **self.defaults.changed(members).arguments(),
        }

    def _payload(self, payload: object, what: str) -> dict[str, Any]:
        """The payload as a dict that the function, where it is known, can be called with."""
        given = as_object(payload, what)
        self._check(given)
        return given

    def _check(self, payload: Mapping[str, Any]) -> None:
        why = None if self.function is None else misfit(self.function, payload)
        if why is not None:
            raise InvalidInput(f"the arguments do not fit task {self.name!r}: {why}")

    @abstractmethod
    def _job(self, id: int) -> H: ...

    @abstractmethod
    def _gang_of(self, made: GangSubmitted) -> G: ...

    def _role(self, role: Role, options: Mapping[str, Any], payload: Mapping[str, Any] | None) -> Role:
        """The role, filled up. What a member needs is first what its role says, then what the call says (`options`),
        then what the role's task is declared with; never what the gang's task is declared with.
        """
        task = self.name if role.task is None else role.task
        declared = task if isinstance(task, _Declaration) else self.app.tasks.get(task)
        if declared is None:
            return role
        for given_to in role.payloads or [role.payload or payload or {}]:
            declared._check(given_to)
        if role.task is None:
            return role
        theirs = {**_NO_NEEDS, **declared.defaults.declared()}
        unsaid = (key for key in _RESOURCES if getattr(role, key) is None)
        # The option budget is the argument budget_s.
        filled: dict[str, Any] = {
            key: theirs.get(key) for key in unsaid if key.removesuffix("_s") not in options
        }
        return dataclasses.replace(role, **filled)


# Steps of submitting ----------------------------------------------------------------------------------------


def submit(task: _Declaration[P, R, H, G], /, **payload: Any) -> Steps[H]:
    """Submit one job; `payload` becomes the function's keyword arguments (SQL: gangq.submit).

    Raises `InvalidInput` when the function is known here and cannot be called with them.
    """
    return (yield from submit_many(task, [payload]))[0]


def submit_many(task: _Declaration[P, R, H, G], /, payloads: Iterable[Mapping[str, Any]]) -> Steps[list[H]]:
    """Submit one job per payload in one statement; return their handles in order."""
    arguments = task._jobs(payloads)
    ids = (yield from Verbs.submit(**arguments)) if arguments["payloads"] else []
    return [task._job(id) for id in ids]


def submit_gang(
    task: _Declaration[P, R, H, G],
    /,
    size: int | None = None,
    payload: Mapping[str, Any] | None = None,
    *,
    payloads: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Steps[G]:
    """Submit `size` members, or those of `roles`, that start together or not at all (SQL: gangq.submit_gang).

    `payload` goes to every member, or `payloads` one to each rank. `options` are those of the task, per member
    (`TaskOptions`), and those of the gang (`gangq.client.options.SubmitGangOptions`). A role whose task is a task
    of the App, or its name, needs what that was declared with, unless the role says otherwise.
    """
    return task._gang_of((yield from Verbs.submit_gang(**task._gang(size, payload, payloads, options))))


@dataclass(frozen=True, eq=False)
class Task(_Declaration[P, R, Handle, GangHandle]):
    """A task of an App: call it as the plain function it is, or submit it.

    `name`; `function` (None when it is implemented elsewhere); `defaults`, its options; `isolate`: run it in
    a child process; `watch`: how patient the watchdogs are (None: as for any task); `retry`: which errors are
    tried again, and when (None: all, as the queue says). `aio` is the same task with awaitable methods.
    """

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now; no queue is involved."""
        if self.function is None:
            raise InvalidInput(
                f"task {self.name!r} is implemented elsewhere: submit it, or import what implements it"
            )
        return self.function(ctx, *args, **kwargs)

    @property
    def aio(self) -> AsyncTask[P, R]:
        """The same task with awaitable methods."""
        return AsyncTask(
            self.app, self.name, self.function, self.defaults, self.isolate, self.watch, self.retry
        )

    def options(self, **options: Any) -> Task[P, R]:
        """Return the task with other options (see `TaskOptions`); this one stays as it is."""
        return dataclasses.replace(self, defaults=self.defaults.changed(options))

    submit = now(submit)
    submit_many = now(submit_many)
    submit_gang = now(submit_gang)

    def _run(self, steps: Steps[T]) -> T:
        return self.app.client.execute(steps)

    def _job(self, id: int) -> Handle:
        return self.app.job(id)

    def _gang_of(self, made: GangSubmitted) -> GangHandle:
        return GangHandle(self.app._client, made.gang_id, made.job_ids, made.note)


@dataclass(frozen=True, eq=False)
class AsyncTask(_Declaration[P, R, AsyncHandle, AsyncGangHandle]):
    """`Task` for asyncio: the same methods, awaited."""

    def options(self, **options: Any) -> AsyncTask[P, R]:
        """Return the task with other options (see `TaskOptions`); this one stays as it is."""
        return dataclasses.replace(self, defaults=self.defaults.changed(options))

    submit = later(submit)
    submit_many = later(submit_many)
    submit_gang = later(submit_gang)

    async def _run(self, steps: Steps[T]) -> T:
        return await self.app.aio.client.execute(steps)

    def _job(self, id: int) -> AsyncHandle:
        return self.app.aio.job(id)

    def _gang_of(self, made: GangSubmitted) -> AsyncGangHandle:
        return AsyncGangHandle(self.app.aio._client, made.gang_id, made.job_ids, made.note)


class _Clients(Generic[C]):
    """The clients of an App, made at first use: of its database, and inside a job one that submits through it."""

    def __init__(self, app: App, kind: Callable[[], type[C]], made: C | None = None) -> None:
        self._app = app
        self._kind = kind
        self._inside: C | None = None
        self.made = made

    def get(self) -> C:
        app, job = self._app, self._app._job()
        with app._lock:
            if job is not None:
                if self._inside is None or self._inside.through is not job:
                    self._inside = self._kind()(through=job)
                return self._inside
            if self.made is None:
                self.made = self._kind()(app.dsn)
            return self.made


class App:
    """One database and the tasks that run in it.

    `dsn` None: GANGQ_DSN; "embedded": a private PostgreSQL on this machine, started if need be. Nothing is
    resolved, started or connected before the first use. `client`: use this one instead.

    Inside a job an App without a dsn submits through the job's worker, on behalf of whoever submitted the job,
    and can do nothing else. A child process that has set GANGQ_DSN itself uses that.
    """

    def __init__(self, dsn: str | None = None, *, client: Client | None = None) -> None:
        if dsn is not None and client is not None:
            raise InvalidInput("both dsn and client are given to App: the client has its database already")
        self.given_dsn = client.target.conninfo if client else dsn
        """What it was made with; None: GANGQ_DSN, or inside a job its worker. It may hold a password."""
        self._dsn = client.target.conninfo if client else None
        self._lock = threading.RLock()
        self._clients = _Clients(self, lambda: Client, client)
        self._tasks: dict[str, Task[..., Any]] = {}
        self._schedules: dict[str, Schedule] = {}
        self.aio = AsyncApp(self)

    def __enter__(self) -> App:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client's connections; a later call connects again."""
        if self._clients.made is not None:
            self._clients.made.close()

    @property
    def dsn(self) -> str:
        """The database, resolved at first use. It may hold a password: do not print it."""
        with self._lock:
            if self._dsn is None:
                # Here and below: not what a worker has to carry about.
                from gangq import embedded

                self._dsn = embedded.resolve_dsn(self.given_dsn)
            return self._dsn

    @property
    def client(self) -> Client:
        """The client, made at first use; inside a job without a database, one that submits through the worker."""
        return self._clients.get()

    def _client(self) -> Client:
        return self.client

    def _job(self) -> Context | None:
        """The job through whose worker this App submits, if it does."""
        if self.given_dsn is not None:
            return None
        # A worker keeps its DSN from what it starts: in there, GANGQ_DSN is the job's own choice.
        if os.environ.get("GANGQ_SOCKET") and os.environ.get("GANGQ_DSN"):
            return None
        return find_current()

    # Tasks

    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        isolate: bool = False,
        retry: Retry | None = None,
        stall_timeout: float | None = None,
        load_grace: float | None = None,
        health_window: float | None = None,
        long_phase: float | None = None,
        **options: Any,
    ) -> Callable[[Callable[Concatenate[Context, P], R]], Task[P, R]]: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        isolate: bool = False,
        retry: Retry | None = None,
        stall_timeout: float | None = None,
        load_grace: float | None = None,
        health_window: float | None = None,
        long_phase: float | None = None,
        **options: Any,
    ) -> Any:
        """Declare a function as a task; it stays callable. With or without parentheses.

        It is called as `f(ctx, **payload)` and returns JSON. `async def` and generator functions are refused.
        `name`: default the function's. `isolate`: run it in a child process. `retry`: which errors are tried again,
        and when; its `attempts` are the option `max_attempts`. `stall_timeout`, `load_grace`, `health_window`,
        `long_phase`: seconds, see `WatchOptions`. `options`: see `TaskOptions`.
        """
        if retry is not None and retry.attempts is not None:
            if "max_attempts" in options:
                raise InvalidInput("both retry and max_attempts say how many attempts: leave one of them out")
            options["max_attempts"] = retry.attempts
        defaults = TaskOptions().changed(options)
        given = WatchOptions(stall_timeout, load_grace, health_window, long_phase)
        watch = None if given == WatchOptions() else given

        def declare(function: Callable[Concatenate[Context, P], R]) -> Task[P, R]:
            called = name or function.__name__
            require_plain(function, called)
            return self._add(Task(self, called, function, defaults, isolate, watch, retry))

        return declare if function is None else declare(function)

    def declare_task(self, name: str, **options: Any) -> Task[..., Any]:
        """Declare a task that is implemented elsewhere, so that it can be submitted from here."""
        return self._add(Task(self, name, None, TaskOptions().changed(options)))

    def _add(self, task: Task[P, R]) -> Task[P, R]:
        if not task.name or task.name == COMMAND:
            raise InvalidInput(
                f"a task cannot be called {task.name!r}: pass another name to @app.task(name=...)"
            )
        if task.name in self._tasks:
            raise InvalidInput(
                f"task {task.name!r} is declared twice in this App: give one of them another name, "
                "@app.task(name=...)"
            )
        self._tasks[task.name] = task
        return task

    @property
    def tasks(self) -> dict[str, Task[..., Any]]:
        """The tasks by name; a copy."""
        return dict(self._tasks)

    def get_task(self, name: str) -> Task[..., Any]:
        """Return the task with this name. Raises `UnknownTask`, naming those there are."""
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise UnknownTask(
                f"this App has no task {name!r} (it has: {known}): import the module that declares it, or "
                "correct the name"
            ) from None

    # Schedules

    @overload
    def schedule(
        self, cron: str | None = None, **options: Unpack[ScheduleDeclaration]
    ) -> Callable[[Task[P, R]], Task[P, R]]: ...

    @overload
    def schedule(
        self, cron: str, task: Task[..., Any], **options: Unpack[ScheduleDeclaration]
    ) -> Schedule: ...

    @overload
    def schedule(self, *, task: Task[..., Any], **options: Unpack[ScheduleDeclaration]) -> Schedule: ...

    def schedule(
        self,
        cron: str | None = None,
        task: Task[..., Any] | None = None,
        **options: Unpack[ScheduleDeclaration],
    ) -> Any:
        """Declare that a task is submitted again and again: above `@app.task`, or with a task.

            @app.schedule("0 3 * * *", tz="Europe/Oslo", payload={"days": 1})
            @app.task
            def report(ctx, days): ...

            retrain = app.schedule(task=train, every="6h", name="retrain", size=4)

        Workers store it when they start, where their login is a submitter too; the newest declaration wins. Each due
        time is submitted once, with the task's options and on behalf of that login.

        `cron`: minute, hour, day of month, month, day of week; `gangq.due` says what happens when a clock is changed.
        `options`: see `gangq.schedules.ScheduleDeclaration`.
        """
        from gangq import schedules

        def declare(scheduled: Task[P, R]) -> Schedule:
            if not isinstance(scheduled, Task):
                raise InvalidInput(
                    f"{scheduled!r} is no task: @app.schedule stands above @app.task, or takes a task"
                )
            made = schedules.make(self, scheduled, cron, **options)
            if made.name in self._schedules:
                raise InvalidInput(
                    f"schedule {made.name!r} is declared twice in this App: give one of them another name, "
                    "@app.schedule(..., name=...)"
                )
            self._schedules[made.name] = made
            return made

        def decorate(scheduled: Task[P, R]) -> Task[P, R]:
            declare(scheduled)
            return scheduled

        return decorate if task is None else declare(task)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules by name; a copy."""
        return dict(self._schedules)

    def store_schedules(self, source: str) -> list[str]:
        """Store the schedules as a worker does when it starts: from a login that is a submitter, if theirs is not.

        `source` names this program ("tasks:app"). Returns schedules that it declared before and does not any more:
        they go on until `Client.forget_schedule`. Raises the first refusal, after all others are stored.
        """
        from gangq import schedules

        refused, undeclared = self.client.execute(schedules.store(self._schedules.values(), source))
        for problem in refused.values():
            raise problem
        return undeclared

    # Work

    @overload
    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: None = None,
        **options: Any,
    ) -> Handle: ...

    @overload
    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int,
        **options: Any,
    ) -> GangHandle: ...

    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int | None = None,
        **options: Any,
    ) -> Handle | GangHandle:
        """Submit a command, or with `gang` that many members of it.

        `argv`: the program and its arguments; with `shell` one string for /bin/sh. `env` is added to the
        worker's environment and is stored in the database: no secrets. `cwd`: default the worker's.
        `options`: as of `Task.submit_gang`, but no roles.
        """
        payload = command_payload(argv, shell=shell, env=env, cwd=cwd)
        task: Task[..., Any] = Task(self, COMMAND, None, TaskOptions())
        if gang is None:
            return task.options(**options).submit(**payload)
        return task.submit_gang(gang, payload, **options)

    def job(self, id: int) -> Handle:
        """Return a handle for the job with this id; nothing is asked yet."""
        return Handle(self._client, id)

    def gang(self, id: int) -> GangHandle:
        """Return a handle for the gang with this id. Raises `NotFound`."""
        return GangHandle(self._client, id, self.client.execute(member_ids(id)))

    def run_worker(self, **options: Any) -> int:
        """Run a worker for these tasks in this process until it is told to stop; return its exit code.

        `options` are those of `gangq worker`; see `gangq.worker.main.run_worker`. A script calls it under
        `if __name__ == "__main__":`, because the worker's child processes load that script for its handlers.
        """
        # Imported here: who only submits needs no watchdogs and no device libraries.
        from gangq.worker.child_main import SCRIPT
        from gangq.worker.main import run_worker

        if SCRIPT in sys.modules:
            raise InvalidInput(
                "this script starts a worker when it is loaded for its handlers: put run_worker() under "
                'if __name__ == "__main__":'
            )
        return run_worker(self, **options)


class AsyncApp:
    """`App` for asyncio, as `app.aio`: the same tasks and database, awaitable methods. Close it before its
    event loop ends."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._clients: _Clients[AsyncClient] = _Clients(app, _async_client)

    async def __aenter__(self) -> AsyncApp:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the async client's connections; a later call connects again."""
        if self._clients.made is not None:
            await self._clients.made.close()

    @property
    def client(self) -> AsyncClient:
        """The async client, made at first use; inside a job as `App.client`."""
        return self._clients.get()

    def _client(self) -> AsyncClient:
        return self.client

    @property
    def tasks(self) -> dict[str, AsyncTask[..., Any]]:
        """The tasks by name; a copy."""
        return {name: task.aio for name, task in self._app.tasks.items()}

    def get_task(self, name: str) -> AsyncTask[..., Any]:
        """Return the task with this name. Raises `UnknownTask`, naming those there are."""
        return self._app.get_task(name).aio

    @overload
    async def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: None = None,
        **options: Any,
    ) -> AsyncHandle: ...

    @overload
    async def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int,
        **options: Any,
    ) -> AsyncGangHandle: ...

    async def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int | None = None,
        **options: Any,
    ) -> AsyncHandle | AsyncGangHandle:
        """Submit a command, or with `gang` that many members of it; see `App.submit_command`."""
        payload = command_payload(argv, shell=shell, env=env, cwd=cwd)
        task: AsyncTask[..., Any] = AsyncTask(self._app, COMMAND, None, TaskOptions())
        if gang is None:
            return await task.options(**options).submit(**payload)
        return await task.submit_gang(gang, payload, **options)

    def job(self, id: int) -> AsyncHandle:
        """Return a handle for the job with this id; nothing is asked yet."""
        return AsyncHandle(self._client, id)

    async def gang(self, id: int) -> AsyncGangHandle:
        """Return a handle for the gang with this id. Raises `NotFound`."""
        return AsyncGangHandle(self._client, id, await self.client.execute(member_ids(id)))


def _async_client() -> type[AsyncClient]:
    from gangq.client.aio import AsyncClient

    return AsyncClient


def command_payload(
    argv: Sequence[str] | str,
    *,
    shell: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> dict[str, Any]:
    """Return the payload of a command's job: {"argv": [...], "shell": bool, "env": {...}, "cwd": str or
    null}.

    Raises `InvalidInput` when there is nothing to run, or when `argv` and `shell` do not fit.
    """
    words = [argv] if isinstance(argv, str) else list(argv)
    if isinstance(argv, str) and not shell:
        raise InvalidInput(
            f"command {argv!r} is one string: pass a list such as {argv.split()!r}, or shell=True for /bin/sh"
        )
    if not words or not words[0]:
        raise InvalidInput("the command is empty: pass the program and its arguments as a list")
    if shell and len(words) != 1:
        raise InvalidInput(f"with shell=True the command is one string, and {len(words)} were given")
    for what, texts in (("argv", words), ("env", [*(env or {}), *(env or {}).values()])):
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise InvalidInput(f"{what} holds {wrong!r}, which is {type(wrong).__name__}: use strings")
    ours = sorted(name for name in env or {} if name.startswith("GANGQ_"))
    if ours:
        raise InvalidInput(
            f"env names {', '.join(ours)}: variables that begin with GANGQ_ are set by the worker; use another name"
        )
    return {"argv": words, "shell": shell, "env": dict(env or {}), "cwd": cwd}
