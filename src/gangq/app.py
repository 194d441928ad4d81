"""The App: which database, and which tasks.

app = App()

@app.task(queue="gpu", gpus=1, budget=3600)
def train(ctx, epochs):
    ...

train.submit(epochs=10).result()
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from gangq.client import Client
from gangq.commands import COMMAND, command_payload
from gangq.context import Context, find_current
from gangq.durations import Duration
from gangq.errors import InvalidInput, UnknownTask
from gangq.handle_steps import batch_job_ids, member_ids
from gangq.handles import AsyncBatch, AsyncGang, AsyncJob, Batch, Gang, Job
from gangq.hooks import EndHook, Hooks, StartHook, WorkerHook, require_hook
from gangq.retry import Retry
from gangq.signatures import require_handler
from gangq.task_options import TaskGangOptions, TaskOptions, WatchOptions, changed
from gangq.tasks import AsyncTask, CoroutineTask, Task

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient
    from gangq.declarations import Declared
    from gangq.schedules import Schedule, ScheduleDeclaration
    from gangq.services import Service, ServiceTaskOptions

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")
G = TypeVar("G")
C = TypeVar("C", bound="Client | AsyncClient")
S = TypeVar("S", bound=StartHook)
E = TypeVar("E", bound=EndHook)
W = TypeVar("W", bound=WorkerHook)


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


class _Declare(Protocol):
    """What `App.task` with options returns."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...


class _OfCommands(ABC, Generic[J, G]):
    """What submits commands, as jobs (it returns J) and as gangs (G)."""

    @abstractmethod
    def _command(self) -> Task[..., Any] | AsyncTask[..., Any]:
        """The task of commands."""

    @overload
    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: None = None,
        **options: Unpack[TaskOptions],
    ) -> J: ...

    @overload
    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int,
        **options: Unpack[TaskGangOptions],
    ) -> G: ...

    def submit_command(
        self,
        argv: Sequence[str] | str,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        gang: int | None = None,
        **options: Any,
    ) -> Any:
        """Submit a command, or with `gang` that many members of it.

        `argv`: the program and its arguments; with `shell` one string for /bin/sh. `env` is added to the
        worker's environment and is stored in the database: no secrets. `cwd`: default the worker's.
        `options`: as of `Task.gang`, but no roles.
        """
        payload = command_payload(argv, shell=shell, env=env, cwd=cwd)
        task = self._command()
        if gang is None:
            return task.options(**options).submit(**payload)
        return task.gang(gang, **options).submit(**payload)


class App(_OfCommands[Job[Any], Gang[Any]]):
    """One database and the tasks that run in it.

    `dsn` None: GANGQ_DSN; "embedded": a private PostgreSQL on this machine, started if need be, with the
    schema made where it has none. Nothing is resolved, started or connected before the first use. `client`: use this
    one instead.

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
        self._services: dict[str, Service] = {}
        self.hooks = Hooks()
        """What was declared with `on_worker_start`, `on_start` and the like."""
        self.aio = AsyncApp(self)

    def __enter__(self) -> App:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        for place in variables(self):
            return _find, place
        raise pickle.PicklingError(
            "an App can be pickled where it is a variable of a module: other processes find it there"
        )

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
                from gangq import schema

                self._dsn = schema.resolve_dsn(self.given_dsn)
            return self._dsn

    @property
    def client(self) -> Client:
        """The client, made at first use; inside a job without a database, one that submits through the worker."""
        return self._clients.get()

    def _client(self) -> Client:
        """:attr:`client` as the function that a `Job` keeps: it makes no client, and is pickled with its App."""
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
    def task(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> CoroutineTask[P, R]: ...

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
        stall_timeout: Duration | None = None,
        load_grace: Duration | None = None,
        health_window: Duration | None = None,
        long_phase: Duration | None = None,
        **options: Unpack[TaskOptions],
    ) -> _Declare: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        isolate: bool = False,
        retry: Retry | None = None,
        stall_timeout: Duration | None = None,
        load_grace: Duration | None = None,
        health_window: Duration | None = None,
        long_phase: Duration | None = None,
        **options: Unpack[TaskOptions],
    ) -> Any:
        """Declare a function as a task; it stays callable. With or without parentheses.

        It is called as `f(ctx, **payload)` and returns JSON. It may be an `async def`: see docs/manual/tasks.md.
        `name`: default the function's. `isolate`: run it in a child process. `retry`: which errors are tried again,
        and when; its `attempts` are the option `max_attempts`. `stall_timeout`, `load_grace`, `health_window`,
        `long_phase`: see `WatchOptions`. `options`: see `TaskOptions`.
        """
        if retry is not None and retry.attempts is not None:
            if "max_attempts" in options:
                raise InvalidInput("both retry and max_attempts say how many attempts: leave one of them out")
            options["max_attempts"] = retry.attempts
        defaults = changed({}, options)
        watch = WatchOptions.of(
            stall_timeout=stall_timeout,
            load_grace=load_grace,
            health_window=health_window,
            long_phase=long_phase,
        )

        def declare(function: Callable[Concatenate[Context, P], R]) -> Task[P, R]:
            called = name or getattr(function, "__name__", None) or ""
            require_handler(function, called)
            kind = CoroutineTask if inspect.iscoroutinefunction(function) else Task
            return self._add(kind(self, called, function, defaults, isolate, watch, retry))

        return declare if function is None else declare(function)

    def declare_task(self, name: str, **options: Unpack[TaskOptions]) -> Task[..., Any]:
        """Declare a task that is implemented elsewhere, so that it can be submitted from here."""
        return self._add(Task(self, name, None, changed({}, options)))

    def _add(self, task: Task[P, R]) -> Task[P, R]:
        if not task.name or task.name == COMMAND:
            raise InvalidInput(
                f"a task cannot be called {task.name!r}: pass another name to @app.task(name=...)"
            )
        _add_once(self._tasks, task, "task", "@app.task(name=...)")
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

    # Hooks

    @overload
    def on_worker_start(self, hook: W, /) -> W: ...
    @overload
    def on_worker_start(self, /, *, children: bool = False) -> Callable[[W], W]: ...
    def on_worker_start(self, hook: Any = None, /, *, children: bool = False) -> Any:
        """Call `hook()` once in each process that runs handlers, before its first one; see docs/manual/hooks.md.

        By default only in the worker's own process, where that runs handlers; with `children` in its child processes
        too.
        What the hook raises ends the worker before it claims; in a child process it fails the job.
        """
        return _declare(self.hooks.worker_start, hook, children)

    @overload
    def on_worker_stop(self, hook: W, /) -> W: ...
    @overload
    def on_worker_stop(self, /, *, children: bool = False) -> Callable[[W], W]: ...
    def on_worker_stop(self, hook: Any = None, /, *, children: bool = False) -> Any:
        """Call `hook()` after the last handler of such a process, if it ends in order. What it raises is logged."""
        return _declare(self.hooks.worker_stop, hook, children)

    def on_start(self, hook: S, /) -> S:
        """Call `hook(ctx)` before each handler, in its process. What it raises fails the attempt."""
        require_hook(hook)
        self.hooks.start.append(hook)
        return hook

    def on_end(self, hook: E, /) -> E:
        """Call `hook(ctx, outcome)` after each handler, in its process; `outcome` is a `gangq.Outcome`.

        What was declared last is called first. What it raises is logged, and changes nothing.
        """
        require_hook(hook)
        self.hooks.end.append(hook)
        return hook

    def on_failure(self, hook: E, /) -> E:
        """Call `hook(ctx, outcome)` after a handler that failed, before those of `on_end` and before it is reported.

        Not after a stop, a cancel or a `RetryLater`. `outcome.final` says whether there is no further attempt. Where
        the process died no hook runs: `gangq notify` tells of those.
        """
        require_hook(hook)
        self.hooks.failure.append(hook)
        return hook

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
            _add_once(self._schedules, made, "schedule", "@app.schedule(..., name=...)")
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
        return self._store("schedule", self._schedules.values(), source)

    def _store(self, kind: str, declared: Iterable[Declared], source: str) -> list[str]:
        from gangq.declarations import store

        refused, undeclared = self.client.execute(store(kind, declared, source))
        for problem in refused.values():
            raise problem
        return undeclared

    # Services

    def service(
        self,
        *,
        name: str | None = None,
        **options: Unpack[ServiceTaskOptions],
    ) -> Callable[[Callable[Concatenate[Context, P], R] | Task[P, R]], Task[P, R]]:
        """Declare that replicas of a function are kept running, in whole gangs; it becomes a task unless it is one.

            @app.service(gpus=1, replicas=4, gang=2)
            def serve(ctx, model="m"): ...

        Workers store it when they start, where their login is a submitter too; the newest declaration wins. A replica
        says with `Context.ready` that it takes requests, at `ctx.service.port`. What is declared otherwise than
        before replaces the old gangs one by one. What was scaled or stopped by hand stays so until another number is
        declared. With `scale=gangq.Scale(min=1, max=8, load=0.7)` the number follows its load.

        `name` [the function's]. `options`: see `gangq.services.ServiceDeclaration`, and of the task `TaskOptions`.
        """
        from gangq import services

        of_task: dict[str, Any] = {**options}
        own = {key: of_task.pop(key) for key in services.ServiceDeclaration.__annotations__ if key in options}

        def declare(served: Callable[Concatenate[Context, P], R] | Task[P, R]) -> Task[P, R]:
            if not isinstance(served, Task):
                served = self.task(name=name, **of_task)(served)
            elif of_task:
                served = served.options(**of_task)
            made = services.make(self, served, name, **own)
            _add_once(self._services, made, "service", "@app.service(name=...)")
            return served

        return declare

    @property
    def services(self) -> dict[str, Service]:
        """The services by name; a copy."""
        return dict(self._services)

    def store_services(self, source: str) -> list[str]:
        """Store the services as a worker does when it starts: from a login that is a submitter, if theirs is not.

        `source` names this program ("tasks:app"). Returns services that it declared before and does not any more:
        they go on until `Client.delete_service`. Raises the first refusal, after all others are stored.
        """
        return self._store("service", self._services.values(), source)

    # Work

    def _command(self) -> Task[..., Any]:
        return Task(self, COMMAND, None, {})

    def job(self, id: int) -> Job[Any]:
        """Return a handle for the job with this id; nothing is asked yet."""
        return Job(self._client, id)

    def gang(self, id: int) -> Gang[Any]:
        """Return a handle for the gang with this id. Raises `NotFound`."""
        return Gang(self._client, id, self.client.execute(member_ids(id)))

    def batch(self, id: int) -> Batch[Any]:
        """Return a handle for the batch with this id. Raises `NotFound`."""
        return Batch(self._client, self.client.execute(batch_job_ids(id)))

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


class AsyncApp(_OfCommands[Coroutine[Any, Any, AsyncJob[Any]], Coroutine[Any, Any, AsyncGang[Any]]]):
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
        """:attr:`client` as the function that an `AsyncJob` keeps."""
        return self.client

    @property
    def tasks(self) -> dict[str, AsyncTask[..., Any]]:
        """The tasks by name; a copy."""
        return {name: task.aio for name, task in self._app.tasks.items()}

    def get_task(self, name: str) -> AsyncTask[..., Any]:
        """Return the task with this name. Raises `UnknownTask`, naming those there are."""
        return self._app.get_task(name).aio

    def _command(self) -> AsyncTask[..., Any]:
        return AsyncTask(self._app, COMMAND, None, {})

    def job(self, id: int) -> AsyncJob[Any]:
        """Return a handle for the job with this id; nothing is asked yet."""
        return AsyncJob(self._client, id)

    async def gang(self, id: int) -> AsyncGang[Any]:
        """Return a handle for the gang with this id. Raises `NotFound`."""
        return AsyncGang(self._client, id, await self.client.execute(member_ids(id)))

    async def batch(self, id: int) -> AsyncBatch[Any]:
        """Return a handle for the batch with this id. Raises `NotFound`."""
        return AsyncBatch(self._client, await self.client.execute(batch_job_ids(id)))


def _declare(hooks: list[tuple[WorkerHook, bool]], hook: WorkerHook | None, children: bool) -> Any:
    def declare(hook: WorkerHook) -> WorkerHook:
        require_hook(hook)
        hooks.append((hook, children))
        return hook

    return declare if hook is None else declare(hook)


def _add_once(known: dict[str, Any], made: Any, kind: str, how: str) -> None:
    if made.name in known:
        raise InvalidInput(
            f"{kind} {made.name!r} is declared twice in this App: give one of them another name, {how}"
        )
    known[made.name] = made


def _async_client() -> type[AsyncClient]:
    from gangq.client.aio import AsyncClient

    return AsyncClient


def variables(app: object) -> Iterator[tuple[str, str]]:
    """The names of the modules, and of the variables in them, that hold this App."""
    for name, module in list(sys.modules.items()):
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            if value is app:
                yield name, variable


def _find(module: str, variable: str) -> Any:
    return getattr(importlib.import_module(module), variable)
