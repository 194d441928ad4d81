"""Tasks of an App: functions that can be submitted, as single jobs and as gangs."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from gangq.client.encoding import as_object
from gangq.client.roles import Role, as_role
from gangq.client.submitter_verbs import from_now
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.context import Context
from gangq.errors import InvalidInput
from gangq.handles import AsyncBatch, AsyncGang, AsyncJob, Batch, Gang, Job
from gangq.retry import Retry
from gangq.signatures import by_name, misfit
from gangq.task_options import (
    TaskGangOptions,
    TaskOptions,
    WatchOptions,
    arguments,
    changed,
    declared,
    is_for_gangs,
)

if TYPE_CHECKING:
    from gangq.app import App
    from gangq.client import AsyncClient, Client

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")
Js = TypeVar("Js")
B = TypeVar("B")
G = TypeVar("G")
Gr = TypeVar("Gr")

_RESOURCES = ("gpus", "vram_mb", "memory_mb", "cpus", "labels", "selector", "tolerates", "model", "budget_s")
"""What a role has of its task."""
_NO_NEEDS: dict[str, Any] = {"gpus": 0, "vram_mb": 0, "memory_mb": 0, "cpus": 0}
"""What a task needs that is declared without."""


@dataclass(frozen=True, eq=False)
class _Task(ABC, Generic[P, R, J, Js, B, G, Gr]):
    """What a task is, whoever submits it: that returns J for one job, Js for several, B for a batch of them, G for a
    gang, Gr for one of roles, which may run other tasks.
    """

    app: App
    name: str
    function: Callable[Concatenate[Context, P], R] | None
    defaults: TaskOptions
    isolate: bool = False
    watch: WatchOptions | None = None
    retry: Retry | None = None
    _job: ClassVar[Callable[..., Any]]
    _batch: ClassVar[Callable[..., Any]]
    _of_gang: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        if self.function is not None:
            # What functools.update_wrapper does, which a frozen dataclass does not let it do.
            found: dict[str, Any] = {
                key: getattr(self.function, key, None) for key in functools.WRAPPER_ASSIGNMENTS
            }
            vars(self).update(found, __wrapped__=self.function)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __reduce__(self) -> Any:
        return _restore, (type(self), self.app, self.name, self.defaults)

    def options(self, **options: Unpack[TaskOptions]) -> Self:
        """Return the task with other options (see `TaskOptions`); this one stays as it is."""
        return dataclasses.replace(self, defaults=changed(self.defaults, options))

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> J:
        """Submit one job; the arguments are those of the function (SQL: gangq.submit, gangq.submit_unique).

        Raises `InvalidInput` when the function is known here and cannot be called with them.
        """
        return cast(J, self._run(self._submit(self._payload(args, kwargs))))

    @overload
    def submit_many(self, payloads: Iterable[Mapping[str, Any]], /) -> Js: ...
    @overload
    def submit_many(
        self,
        payloads: Iterable[Mapping[str, Any]],
        /,
        *,
        name: str,
        tags: Sequence[str] = (),
        at_most: int | None = None,
        indexes: Sequence[int] | None = None,
    ) -> B: ...
    def submit_many(
        self,
        payloads: Iterable[Mapping[str, Any]],
        /,
        *,
        name: str | None = None,
        tags: Sequence[str] = (),
        at_most: int | None = None,
        indexes: Sequence[int] | None = None,
    ) -> Any:
        """Submit one job per payload in one statement; return their handles in order. Raises `InvalidInput`.

        With `name` they are a batch of this name, and its handle is returned: see `gangq.Batch`. `tags`: up to 20
        marks of it. `at_most`: of its jobs at most so many are placed at once. `indexes`: of each its `ctx.index`
        [0, 1, 2, ...].
        """
        of_batch = {"name": name, "tags": tags or None, "at_most": at_most, "indexes": indexes}
        given = {key: value for key, value in of_batch.items() if value is not None}
        return self._run(self._submit_many(self._payloads(payloads), given))

    @overload
    def gang(self, size: int, /, **options: Unpack[TaskGangOptions]) -> GangTask[P, G]: ...
    @overload
    def gang(
        self, /, *, roles: Sequence[Role | Mapping[str, Any]], **options: Unpack[TaskGangOptions]
    ) -> GangTask[..., Gr]: ...
    def gang(self, size: int | None = None, /, **options: Any) -> GangTask[..., Any]:
        """Return what submits gangs of this task: `size` members, or those of `roles`, that start together or not at
        all. `options`: see `gangq.client.options.GangOptions`; those of `TaskOptions` hold for each member.

            train.gang(4, strategy="pack").submit(lr=0.1)
            train.gang(2).submit_each([{"lr": 0.1}, {"lr": 0.2}])

        A role whose task is a task of the App, or its name, needs what that was declared with, unless the role, or
        these options, say otherwise.
        """
        return GangTask(self, size, options)

    def _payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = by_name(self.function, args, kwargs, self.name)
        self._check(given)
        return given

    def _payloads(self, payloads: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        listed = [as_object(payload, f"payloads[{n}]") for n, payload in enumerate(payloads)]
        for payload in listed:
            self._check(payload)
        return listed

    def _check(self, payload: Mapping[str, Any]) -> None:
        why = None if self.function is None else misfit(self.function, payload)
        if why is not None:
            raise InvalidInput(f"the arguments do not fit task {self.name!r}: {why}")

    def _submit(self, payload: dict[str, Any]) -> Steps[Any]:
        given = yield from self._arguments(self.defaults)
        if "unique_key" in given:
            made = yield from Verbs.submit_unique(task=self.name, payload=payload, **given)
            return self._job(self._client, *made)
        (id,) = yield from Verbs.submit(task=self.name, payloads=[payload], **given)
        return self._job(self._client, id)

    def _submit_many(self, payloads: Sequence[dict[str, Any]], of_batch: Mapping[str, Any]) -> Steps[Any]:
        if of_batch and not payloads:
            raise InvalidInput(
                f"no payloads are given: a batch such as {of_batch.get('name')!r} has a job at least"
            )
        given = yield from self._arguments(self.defaults)
        if "unique_key" in given:
            raise InvalidInput(f"unique is {given['unique_key']!r}: a key stands for one job, so use submit")
        given |= of_batch
        ids = (yield from Verbs.submit(task=self.name, payloads=payloads, **given)) if payloads else []
        if of_batch:
            return self._batch(self._client, ids)
        return [self._job(self._client, id) for id in ids]

    def _submit_gang(
        self,
        size: int | None,
        options: Mapping[str, Any],
        payload: Mapping[str, Any] | None,
        payloads: Sequence[Mapping[str, Any]] | None,
    ) -> Steps[Any]:
        work, members = self._gang(size, options, payload, payloads)
        given = yield from self._arguments(members)
        replaces = given.pop("replaces", False)
        if "unique_key" not in given:
            return self._of_gang(self._client, *(yield from Verbs.submit_gang(**work, **given)))
        if replaces:
            raise InvalidInput("replace is for single jobs: a gang that waits stays as it was submitted")
        return self._of_gang(self._client, *(yield from Verbs.submit_unique_gang(**work, **given)))

    def _arguments(self, options: TaskOptions) -> Steps[dict[str, Any]]:
        given = arguments(options)
        if "delay" in options:
            connection = options.get("connection")
            inside = connection is None and self.app._job() is not None
            given["due_at"] = yield from from_now(
                cast(float, options["delay"]), connection=connection, inside_job=inside
            )
        return given

    def _gang(
        self,
        size: int | None,
        options: Mapping[str, Any],
        payload: Mapping[str, Any] | None,
        payloads: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[dict[str, Any], TaskOptions]:
        """What `Client.submit_gang` is given for the gang, and the options of its members."""
        of_gang = {key: value for key, value in options.items() if is_for_gangs(key)}
        of_members = {key: value for key, value in options.items() if not is_for_gangs(key)}
        members = changed(self.defaults, of_members)
        if of_gang.get("roles") is None:
            for given_to in [payload or {}] if payloads is None else payloads:
                self._check(given_to)
        else:
            by_rank = None if payloads is None else iter(payloads)
            roles = [as_role(role, n) for n, role in enumerate(of_gang["roles"])]
            of_gang["roles"] = [
                self._role(role, of_members, _called_with(role, payload, by_rank)) for role in roles
            ]
        return {"task": self.name, "size": size, "payload": payload, "payloads": payloads, **of_gang}, members

    def _role(self, role: Role, options: Mapping[str, Any], called_with: Sequence[Mapping[str, Any]]) -> Role:
        """The role, filled up. What a member needs is first what its role says, then what the call says (`options`),
        then what the role's task is declared with; never what the gang's task is declared with.
        """
        task = self.name if role.task is None else role.task
        known = task if isinstance(task, _Task) else self.app.tasks.get(task)
        if known is None:
            return role
        for given_to in called_with:
            known._check(given_to)
        if role.task is None:
            return role
        theirs = {**_NO_NEEDS, **declared(known.defaults)}
        unsaid = (key for key in _RESOURCES if getattr(role, key) is None)
        # The option budget is the argument budget_s.
        filled: dict[str, Any] = {
            key: theirs.get(key) for key in unsaid if key.removesuffix("_s") not in options
        }
        return dataclasses.replace(role, **filled)

    @property
    @abstractmethod
    def _client(self) -> Callable[[], Any]:
        """What gives the client, for this task and for its handles."""

    def _run(self, steps: Steps[Any]) -> Any:
        return self._client().execute(steps)


@dataclass(frozen=True, eq=False)
class GangTask(Generic[P, G]):
    """A task with what makes a gang of it; submitting returns G. Made by `Task.gang`."""

    task: _Task[..., Any, Any, Any, Any, Any, Any]
    size: int | None
    options: Mapping[str, Any]

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> G:
        """Submit a gang whose members all get these arguments, but those whose role has a payload of its own (SQL:
        gangq.submit_gang, gangq.submit_unique_gang).

        Raises `InvalidInput` where a function is known here and cannot be called with what it would get.
        """
        task = self.task
        payload = by_name(task.function, args, kwargs, task.name)
        return cast(G, task._run(task._submit_gang(self.size, self.options, payload, None)))

    def submit_each(self, payloads: Iterable[Mapping[str, Any]], /) -> G:
        """Submit a gang of whose members each gets one payload, by rank. Raises `InvalidInput`."""
        task = self.task
        each = [as_object(payload, f"payloads[{n}]") for n, payload in enumerate(payloads)]
        return cast(G, task._run(task._submit_gang(self.size, self.options, None, each)))


@dataclass(frozen=True, eq=False, repr=False)
class Task(_Task[P, R, Job[R], list[Job[R]], Batch[R], Gang[R], Gang[Any]]):
    """A task of an App: call it as the plain function it is, or submit it.

    `name`; `function` (None when it is implemented elsewhere), whose docstring and signature it has; `defaults`, its
    options; `isolate`: run it in a child process; `watch`: how patient the watchdogs are (None: as for any task);
    `retry`: which errors are tried again, and when (None: all, as the queue says). `aio` is the same task with
    awaitable methods. It can be pickled where its App is a variable of a module.
    """

    _job, _batch, _of_gang = Job, Batch, Gang

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

    @property
    def _client(self) -> Callable[[], Client]:
        return self.app._client


@dataclass(frozen=True, eq=False, repr=False)
class CoroutineTask(Task[P, R]):
    """A task whose handler is an `async def`: calling it gives a coroutine, and everything else is as for `Task`."""

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        """Call the function here; awaiting that runs it. No queue is involved."""
        return cast("Coroutine[Any, Any, R]", super().__call__(ctx, *args, **kwargs))


@dataclass(frozen=True, eq=False, repr=False)
class AsyncTask(
    _Task[
        P,
        R,
        Coroutine[Any, Any, AsyncJob[R]],
        Coroutine[Any, Any, list[AsyncJob[R]]],
        Coroutine[Any, Any, AsyncBatch[R]],
        Coroutine[Any, Any, AsyncGang[R]],
        Coroutine[Any, Any, AsyncGang[Any]],
    ]
):
    """`Task` for asyncio: the same methods, awaited."""

    _job, _batch, _of_gang = AsyncJob, AsyncBatch, AsyncGang

    @property
    def _client(self) -> Callable[[], AsyncClient]:
        return self.app.aio._client


def _called_with(
    role: Role, payload: Mapping[str, Any] | None, by_rank: Iterator[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    """What the members of a role are called with: the next of `by_rank`, else what the role says, else `payload`."""
    if by_rank is not None:
        return [*islice(by_rank, role.count)]
    if role.payloads is not None:
        return role.payloads
    return [role.payload if role.payload is not None else payload or {}]


def _restore(
    kind: type[object], app: App, name: str, defaults: TaskOptions
) -> Task[..., Any] | AsyncTask[..., Any]:
    """What a pickled task is: that of the App, with its options of then."""
    task = app.get_task(name)
    if defaults != task.defaults:
        task = dataclasses.replace(task, defaults=defaults)
    return task if issubclass(kind, Task) else task.aio
