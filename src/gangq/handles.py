"""What submit returns: handles that wait for a job, gang or batch, fetch what came of it, and stop it.

Each method is written once, in `gangq.handle_steps`; `Job` carries its steps out, `AsyncJob` awaits them.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from gangq import handle_steps as steps
from gangq.client import Client
from gangq.client.rows import BatchRow, GangRow, JobRow
from gangq.client.verb import Steps, show_answer
from gangq.durations import Duration
from gangq.errors import GangqError, InvalidInput
from gangq.handle_steps import Handle, Limit, first_ended
from gangq.status import Status

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient

P = ParamSpec("P")
R = TypeVar("R")
J = TypeVar("J")
T = TypeVar("T")
S = TypeVar("S")


class _OfJob(Handle[R, JobRow]):
    kind = "job"

    def __init__(
        self, client: Callable[[], Any], id: int, existed: bool = False, replaced: bool = False
    ) -> None:
        super().__init__(client, id, existed)
        self.replaced = replaced

    @property
    def job_ids(self) -> list[int]:
        """The one job, for `after`."""
        return [self.id]


class _OfGang(Handle[R, GangRow], Generic[R, J]):
    kind = "gang"
    _job: Callable[..., J]

    def __init__(
        self,
        client: Callable[[], Any],
        id: int,
        job_ids: list[int],
        note: str | None = None,
        existed: bool = False,
    ) -> None:
        super().__init__(client, id, existed)
        self.job_ids = job_ids
        self.note = note

    @property
    def members(self) -> list[J]:
        """A handle for each member, by rank."""
        return [self._job(self._client, id) for id in self.job_ids]


class _OfBatch(Handle[R, BatchRow], Generic[R, J]):
    kind = "batch"
    _job: Callable[..., J]

    def __init__(self, client: Callable[[], Any], job_ids: Sequence[int]) -> None:
        # A batch has the id of its first job.
        super().__init__(client, job_ids[0])
        self.job_ids = [*job_ids]

    def __len__(self) -> int:
        return len(self.job_ids)

    def __iter__(self) -> Iterator[J]:
        return (self._job(self._client, id) for id in self.job_ids)

    @overload
    def __getitem__(self, index: int) -> J: ...
    @overload
    def __getitem__(self, index: slice) -> list[J]: ...
    def __getitem__(self, index: int | slice) -> J | list[J]:
        if isinstance(index, slice):
            return [self._job(self._client, id) for id in self.job_ids[index]]
        return self._job(self._client, self.job_ids[index])


class _Sync:
    _client: Callable[[], Client]
    phrase: str
    status: Callable[[], Status]

    def _run(self, steps: Steps[T]) -> T:
        return self._client().execute(steps)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        # For IPython, which shows what it is now.
        try:
            printer.text(f"<{self.status()}>")
        except GangqError as problem:
            printer.text(f"<{self.phrase.capitalize()}: {problem}>")

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except GangqError as problem:
            return f"<div><b>{html.escape(self.phrase.capitalize())}</b> {html.escape(str(problem))}</div>"


class _Async:
    _client: Callable[[], AsyncClient]

    async def _run(self, steps: Steps[T]) -> T:
        return await self._client().execute(steps)


def now(written: Callable[Concatenate[S, P], Steps[R]]) -> Callable[Concatenate[S, P], R]:
    """Make a method that carries out these steps; `help` and `inspect` know it as such."""
    show_answer(written)

    @functools.wraps(written)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(written(self, *args, **kwargs))
        return result

    return method


def later(
    written: Callable[Concatenate[S, P], Steps[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Make a method that is awaited; see `now`."""
    show_answer(written)

    @functools.wraps(written)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._run(written(self, *args, **kwargs))
        return result

    return method


class Job(_Sync, _OfJob[R]):
    """A submitted job, which returns R: `id`, and the methods below. Made by submit, or by `App.job(id)`.

    `existed`: it was submitted before, and its unique key stood for it; `replaced`: it has the new payload.
    """

    wait = now(steps.wait)
    result = now(steps.result)
    cancel = now(steps.cancel)
    retry = now(steps.retry)
    state = now(steps.state)
    row = now(steps.row)
    status = now(steps.status)
    events = now(steps.events)
    logs = now(steps.logs)


class AsyncJob(_Async, _OfJob[R]):
    """`Job` for asyncio: the same methods, awaited; awaited itself it is its result."""

    wait = later(steps.wait)
    result = later(steps.result)
    cancel = later(steps.cancel)
    retry = later(steps.retry)
    state = later(steps.state)
    row = later(steps.row)
    status = later(steps.status)
    events = later(steps.events)
    logs = later(steps.logs)

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()


class Gang(_Sync, _OfGang[R, Job[R]]):
    """A submitted gang, of whose members each returns R: `id`, their `job_ids` by rank, `note` (why no registered
    worker set could hold it, else None), `existed` (as of a `Job`), and the methods below. Made by submitting
    `Task.gang`, or by `App.gang(id)`.
    """

    _job = Job

    wait = now(steps.wait)
    result = now(steps.gang_result)
    results = now(steps.gang_results)
    cancel = now(steps.cancel)
    retry = now(steps.retry)
    state = now(steps.state)
    row = now(steps.row)
    status = now(steps.status)
    events = now(steps.events)
    timeline = now(steps.gang_timeline)
    logs = now(steps.gang_logs)


class AsyncGang(_Async, _OfGang[R, AsyncJob[R]]):
    """`Gang` for asyncio: the same methods, awaited; awaited itself it is its result."""

    _job = AsyncJob

    wait = later(steps.wait)
    result = later(steps.gang_result)
    results = later(steps.gang_results)
    cancel = later(steps.cancel)
    retry = later(steps.retry)
    state = later(steps.state)
    row = later(steps.row)
    status = later(steps.status)
    events = later(steps.events)
    timeline = later(steps.gang_timeline)
    logs = later(steps.gang_logs)

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()


class Batch(_Sync, _OfBatch[R, Job[R]]):
    """The jobs that one call of `Task.submit_many` has submitted under a name, of which each returns R: `id`, their
    `job_ids` in order, and the methods below. It has a length, and is iterated over as a list of `Job`. Made with the
    option `name`, or by `App.batch(id)`.
    """

    _job = Job

    wait = now(steps.wait)
    results = now(steps.batch_results)
    cancel = now(steps.batch_cancel)
    retry_failed = now(steps.batch_retry_failed)
    state = now(steps.state)
    progress = now(steps.row)
    status = now(steps.status)


class AsyncBatch(_Async, _OfBatch[R, AsyncJob[R]]):
    """`Batch` for asyncio: the same methods, awaited; awaited itself it is its results."""

    _job = AsyncJob

    wait = later(steps.wait)
    results = later(steps.batch_results)
    cancel = later(steps.batch_cancel)
    retry_failed = later(steps.batch_retry_failed)
    state = later(steps.state)
    progress = later(steps.row)
    status = later(steps.status)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.results().__await__()


@overload
def as_completed(jobs: Iterable[Job[R]], *, timeout: Duration | None = None) -> Iterator[Job[R]]: ...
@overload
def as_completed(jobs: Iterable[Gang[R]], *, timeout: Duration | None = None) -> Iterator[Gang[R]]: ...
@overload
def as_completed(
    jobs: Iterable[Job[Any] | Gang[Any] | Batch[Any]], *, timeout: Duration | None = None
) -> Iterator[Job[Any] | Gang[Any] | Batch[Any]]: ...
def as_completed(jobs: Iterable[Any], *, timeout: Duration | None = None) -> Iterator[Any]:
    """Yield jobs, gangs and batches of one App as they end, whichever ends first; done or not.

    `timeout`: how long all of it may take, as in `wait`; then `WaitTimeout`. For async handles there is
    `asyncio.as_completed`.
    """
    given: list[Any] = [*jobs]
    for handle in given:
        if not isinstance(handle, _Sync) or handle._client != given[0]._client:
            raise InvalidInput(
                "as_completed takes jobs, gangs and batches of one App; for async ones see asyncio.as_completed: "
                f"{handle!r}"
            )
    waiting = [*dict.fromkeys(given)]
    limit = Limit(timeout)
    while waiting:
        ended: dict[Any, str] = waiting[0]._run(first_ended(waiting, limit))
        waiting = [handle for handle in waiting if handle not in ended]
        yield from ended
