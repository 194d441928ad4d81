"""What an App calls around its handlers, in their process: for MLflow, W&B, Sentry. See docs/manual/hooks.md."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gangq.errors import HookFailed, InvalidInput, RetryLater, Snoozed

if TYPE_CHECKING:
    from gangq.context import Context
    from gangq.retry import Again
    from gangq.worker.context_impl import HandlerContext

log = logging.getLogger("gangq.hooks")

WorkerHook = Callable[[], object]
StartHook = Callable[["Context"], object]
EndHook = Callable[["Context", "Outcome"], object]


@dataclass(frozen=True)
class Outcome:
    """How a handler ended, for the hooks of `App.on_end` and `App.on_failure`.

    - `state`: "done"; "failed", it raised; "stopped", it was told to stop (a cancel, a drain, a preemption) and did;
      "later", it raised `RetryLater` and has another attempt, or called `ctx.snooze`.
    - `result`: what it returned. `error`: what it raised, None where it is done.
    - `final`: whether the job has no further attempt, as far as this process knows. For a member of a gang its
      policy decides.
    """

    state: Literal["done", "failed", "stopped", "later"]
    result: Any = None
    error: BaseException | None = None
    final: bool = True


@dataclass
class Hooks:
    """The hooks of one App, each kind in the order of declaration."""

    worker_start: list[tuple[WorkerHook, bool]] = field(default_factory=list)
    """With whether child processes call it too; so is `worker_stop`."""
    worker_stop: list[tuple[WorkerHook, bool]] = field(default_factory=list)
    start: list[StartHook] = field(default_factory=list)
    end: list[EndHook] = field(default_factory=list)
    failure: list[EndHook] = field(default_factory=list)
    _started_in: int = 0
    """The process that has called hooks of `worker_start`, and of how many of them it is done: so each is called once
    there, also where a later one raises and another call follows.
    """
    _started: int = 0

    def worker_started(self, *, child: bool = False) -> None:
        """Call what is to be called once in this process, unless it was. Raises `HookFailed`; a further call goes on
        with the hook that raised.
        """
        if self._started_in != os.getpid():
            self._started_in, self._started = os.getpid(), 0
        for hook, children in self.worker_start[self._started :]:
            if children or not child:
                try:
                    hook()
                except (Exception, SystemExit) as problem:
                    raise HookFailed(
                        f"the hook {_name(hook)} of on_worker_start raised {type(problem).__name__}: {problem}. No "
                        "handler runs in this process: correct the hook, or what it needs, and start it again"
                    ) from problem
            self._started += 1

    def worker_stopped(self, *, child: bool = False) -> None:
        """This process has run its last handler."""
        self._started_in = 0
        for hook, children in reversed(self.worker_stop):
            if children or not child:
                _quietly(hook)

    def started(self, context: Context) -> None:
        """A handler is about to run. Raises what a hook raises."""
        for hook in self.start:
            hook(context)

    def ended(
        self, context: HandlerContext, result: Any, problem: BaseException | None, again: Again | None
    ) -> None:
        """A handler has returned or raised this, and nothing of it was reported yet."""
        if not self.end and not self.failure:
            return
        seen = context.stop_seen
        outcome = _outcome(context, result, problem, again)
        if outcome.state == "failed":
            for hook in reversed(self.failure):
                _quietly(hook, context, outcome)
        for hook in reversed(self.end):
            _quietly(hook, context, outcome)
        # A hook that has looked at `ctx.stopping` is not the handler, which may have done its work to the end.
        context.stop_seen = seen


def _outcome(
    context: HandlerContext, result: Any, problem: BaseException | None, again: Again | None
) -> Outcome:
    if context.told_to_stop and (problem is not None or (context.stop_seen and result is None)):
        return Outcome("stopped", error=problem, final=False)
    if problem is None:
        return Outcome("done", result)
    if isinstance(problem, Snoozed):
        return Outcome("later", error=problem, final=False)
    job = context.job
    spent = (again is not None and not again.retryable) or job.attempt >= job.max_attempts
    if isinstance(problem, RetryLater) and not spent:
        return Outcome("later", error=problem, final=False)
    return Outcome("failed", error=problem, final=spent)


def require_hook(hook: Callable[..., object]) -> None:
    """Raise `InvalidInput` for a function that runs nothing when it is called."""
    unfinished = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(hook) for kind in unfinished):
        raise InvalidInput(
            f"the hook {_name(hook)} runs nothing when it is called: define it without async and yield"
        )


def hooks_of(handler: object) -> Hooks | None:
    """Return the hooks of the App whose task this is; None for another callable."""
    return getattr(getattr(handler, "app", None), "hooks", None)


def _quietly(hook: Callable[..., object], *args: object) -> None:
    """Call a hook that comes too late to change anything: what it raises is logged."""
    try:
        hook(*args)
    except BaseException:
        # SystemExit too: the handler has ended, and only its outcome counts.
        log.exception("hook_failed", extra={"hook": _name(hook)})


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)
