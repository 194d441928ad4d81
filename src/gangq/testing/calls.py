"""Calling a handler as a worker does, with no worker and no database."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

from gangq.client.encoding import dumps
from gangq.context import find_current, runs_handler, set_current
from gangq.coroutines import run_to_end
from gangq.errors import InvalidInput, ResultNotStored, Stopped
from gangq.signatures import by_name, misfit, unfinished
from gangq.tasks import AsyncTask, Task
from gangq.testing.context import FakeContext
from gangq.worker.endings import HandlerUnfit, what_follows
from gangq.worker.results import dumps_result

R = TypeVar("R")


Declared: TypeAlias = Task[..., R] | AsyncTask[..., R]


def run(task: Declared[R], /, *args: Any, context: FakeContext | None = None, **kwargs: Any) -> R:
    """Call the handler of `task` with these arguments as a worker would; return its result as it would be stored.

    - The arguments become the payload and come back out of JSON: a tuple is a list to the handler.
    - `context` [a new one] is what the handler gets and `gangq.current()` finds. An App without a dsn submits
      through it (`FakeContext.submitted`). With devices it sets CUDA_VISIBLE_DEVICES for as long as this lasts.
    - The result comes back out of JSON, too. What the handler raises is raised here.
    - An async handler runs in an event loop of its own, so not where one runs already: await the task there.
    - Hooks of the App are called: those of `on_worker_start` before the first handler of this process.

    Limits on sizes and time (`budget`) are not checked, and no watchdog looks.

    Raises `InvalidInput` for arguments that do not fit, `NotSerializable` for those that are not JSON; `TypeError`
    for a handler that runs nothing when it is called, `ResultNotStored` for a result that is not JSON; `Stopped`
    also when the handler returned None after it saw that it should stop: a worker hands such a job back; `StaleToken`
    when it returned after its claim was lost (`FakeContext.lose`): a worker reports nothing.
    """
    function = task.function
    if function is None:
        raise InvalidInput(f"task {task.name!r} is implemented elsewhere: import what implements it")
    given = by_name(function, args, kwargs, task.name)
    payload: dict[str, Any] = json.loads(dumps(given, "payload"))
    why = misfit(function, payload)
    if why is not None:
        raise InvalidInput(f"the arguments do not fit task {task.name!r}: {why}")
    context = FakeContext() if context is None else context
    context.is_for(task.name, task.defaults, payload)
    result: Any = None
    problem: BaseException | None = None
    hooks = task.app.hooks
    hooks.worker_started()
    with _current(context), _shown(context):
        try:
            hooks.started(context)
            result = function(context, **payload)
            if inspect.iscoroutinefunction(function):
                result = run_to_end(result)
            if (why := unfinished(result)) is not None:
                raise HandlerUnfit(why)
        except BaseException as raised:
            problem = raised
            raise
        finally:
            again = None if problem is None else what_follows(problem, task, payload, context.attempt)
            hooks.ended(context, result, problem, again)
    found: R = _stored(task.name, context, result)
    return found


def _stored(name: str, context: FakeContext, result: object) -> Any:
    """Return what a worker would store for a handler that returned `result`; raises what `run` says of results."""
    if context.completed:
        stored = context.result
    else:
        context._require_claim()
        if result is None and context.stop_seen:
            raise Stopped(
                f"the handler of task {name!r} returned None after it saw that it should stop: a worker hands the "
                "job back, to be run again"
            )
        stored = json.loads(dumps_result(result, f"the result of task {name!r}"))
    match stored:
        case {ResultNotStored.KEY: str(note), **others} if not others:
            raise ResultNotStored(f"task {name!r} is done, its result is not stored: {note}", context.job.id)
    return stored


@contextlib.contextmanager
def _current(context: FakeContext) -> Iterator[None]:
    before = find_current() if runs_handler() else None
    set_current(context)
    try:
        yield
    finally:
        set_current(before)


@contextlib.contextmanager
def _shown(context: FakeContext) -> Iterator[None]:
    """With the devices of the job as the only ones that are visible, as far as it has any."""
    if not context.devices:
        yield
        return
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = ",".join(str(device.index) for device in context.devices)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
