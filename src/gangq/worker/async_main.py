"""The process of async handlers: runs the jobs it is given, all at once, in one event loop.

The main thread has the event loop. The thread ``gangq-orders`` asks the worker what to do. Each job has its own
context, connection to the worker, and log. Its first and its last request are made in threads ``gangq-call_*``,
because handlers may have all of the event loop's own (``asyncio.to_thread``).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO, TypeVar

from gangq import tracing
from gangq.app import App
from gangq.context import set_current_of_task
from gangq.errors import GangqError, WorkerGone
from gangq.proc.bounded_log import BoundedLog
from gangq.retry import AGAIN
from gangq.worker.child_context import ChildContext, Link
from gangq.worker.child_main import prepare, report
from gangq.worker.endings import Returned, conclude, what_follows
from gangq.worker.output import Tee
from gangq.worker.shared_orders import Begin, Stop, WhoHolds, say_holder, taken
from gangq.worker.signals import restore_signals

log = logging.getLogger("gangq.worker.async")

_HELD_S = 1.0
"""An event loop that runs nothing else for so long is held."""

_CALLS = 4
"""Threads for requests to the worker, at most."""
_AGAIN_S = 0.1

T = TypeVar("T")

_here: contextvars.ContextVar[_Job] = contextvars.ContextVar("gangq_job")


class _Context(ChildContext):
    def _poll(self) -> None:
        """Its stop comes as an order."""

    def _say_snoozed(self, for_s: float) -> None:
        """Said when the handler has ended: an outcome is the end of the job, not of a process."""


class _JobLog:
    """The log of one job, written by the event loop and by the threads of the job."""

    def __init__(self, path: str, sizes: tuple[int, int]) -> None:
        self._log: BoundedLog | None = BoundedLog(path, *sizes)
        self._pid = os.getpid()
        # Reentrant: what is collected during a write may print in its turn.
        self._lock = threading.RLock()

    def write(self, text: str) -> bool:
        """False once it is finished: a thread of the job has outlived it."""
        # A fork has the lock in whatever state it was.
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():
            if self._log is None:
                return False
            self._log.write(text.encode("utf-8", "replace"))
            return True

    def finish(self) -> None:
        """Nothing is written any more. By then the number of its file may be that of another job's."""
        with self._lock:
            ended, self._log = self._log, None
            if ended is not None:
                ended.finish()
        if ended is not None and ended.error is not None:
            log.warning("output_not_kept: %s", ended.error)


class _Job:
    def __init__(self, order: Begin) -> None:
        self.order = order
        self.stopping = threading.Event()
        self.cancelled = False
        self.log: _JobLog | None = None
        """None: it could not be made."""
        self.work: asyncio.Task[Returned] | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.work is not None:
            self.work.cancel()


def _write(stream: TextIO, text: str) -> int:
    """What a job writes goes to its own log, the rest to the log of this process."""
    job = _here.get(None)
    if job is not None and job.log is not None and job.log.write(text):
        return len(text)
    return stream.write(text)


def run(find: Callable[[], App], task: str) -> int:
    """Run jobs of this task of the App that ``find()`` returns, until SIGTERM comes and none is left."""
    restore_signals([signal.SIGTERM])
    for name in ("stdout", "stderr"):
        Tee.install(name, _write)
    jobs = _Jobs(find, task)
    asyncio.run(jobs.serve())
    if jobs.app is not None:
        jobs.app.hooks.worker_stopped(child=True)
    return 0


class _Jobs:
    def __init__(self, find: Callable[[], App], task: str) -> None:
        self.app: App | None = None
        """Found for the first job, which fails where that fails."""
        self._find = find
        self._task = task
        self._pid = os.getpid()
        self._path = os.environ["GANGQ_SOCKET"]
        self._jobs: dict[str, _Job] = {}
        self._of: weakref.WeakKeyDictionary[asyncio.Task[Any], _Job] = weakref.WeakKeyDictionary()
        self._loop: asyncio.AbstractEventLoop
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="gangq-call")
        self._ending = False
        self._over = asyncio.Event()

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._make_task)
        self._loop.add_signal_handler(signal.SIGTERM, self._end)
        threading.Thread(target=self._take_orders, name="gangq-orders", daemon=True).start()
        await self._over.wait()

    def _end(self) -> None:
        self._ending = True
        for job in self._jobs.values():
            job.stopping.set()
        if not self._jobs:
            self._over.set()

    # -- orders ----------------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        # Where the worker or the loop has ended, the guardian ends this process.
        with contextlib.suppress(GangqError, RuntimeError), Link.from_environ() as link:
            for number, order in taken(link):
                if isinstance(order, WhoHolds):
                    say_holder(link, number, self._holder())
                else:
                    self._loop.call_soon_threadsafe(self._carry_out, order)

    def _carry_out(self, order: Begin | Stop) -> None:
        if isinstance(order, Begin):
            job = self._jobs[order.key] = _Job(order)
            context = contextvars.copy_context()
            context.run(_here.set, job)
            context.run(self._loop.create_task, self._run(job))
        elif order.key in self._jobs:
            self._jobs[order.key].stopping.set()
            self._loop.call_later(order.grace_s, self._jobs[order.key].cancel)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **more)
        # What a job starts begins in the context of the job.
        job = _here.get(None)
        if job is not None:
            self._of[task] = job
        return task

    def _holder(self) -> str | None:
        """The key of the job that holds the event loop; None where the loop runs, or no job holds it."""
        ran = threading.Event()
        self._loop.call_soon_threadsafe(ran.set)
        if ran.wait(_HELD_S):
            return None
        task = asyncio.current_task(self._loop)
        job = None if task is None else self._of.get(task)
        return None if job is None else job.order.key

    # -- a job -----------------------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> None:
        key = job.order.key
        try:
            with Link(self._path, key) as link:
                try:
                    job.log = _JobLog(job.order.log, job.order.log_sizes)
                except OSError as problem:
                    log.warning("output_not_kept: %s", problem)
                context = await self._asked(lambda: _Context(link, job.stopping))
                job.work = self._loop.create_task(self._attempt(job, context))
                if job.cancelled:
                    job.work.cancel()
                await asyncio.wait([job.work])
                if job.log is not None:
                    job.log.finish()
                ended: Returned = (None, asyncio.CancelledError(), AGAIN)
                if not job.work.cancelled():
                    ended = job.work.result()
                await self._asked(lambda: report(context, *ended))
        except (GangqError, RuntimeError) as problem:
            log.warning("job_not_reported: %s", problem)  # Its claim is over, or this process is to end.
        finally:
            del self._jobs[key]
            if self._ending and not self._jobs:
                self._over.set()

    async def _asked(self, call: Callable[[], T]) -> T:
        """What ``call()`` returns, which asks the worker; made again until there is an answer.

        Raises:
            GangqError: the worker refused.
            GangqError, RuntimeError: there is no answer, and this process is to end.
        """
        while True:
            try:
                return await self._loop.run_in_executor(self._calls, call)
            except (WorkerGone, RuntimeError):
                # This process may have no file left for a connection, or start no thread. If the worker has ended,
                # SIGTERM comes.
                if self._ending:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _attempt(self, job: _Job, context: ChildContext) -> Returned:
        set_current_of_task(context)
        try:
            self.app, handler = prepare(lambda: self.app or self._find(), self._task)
        except BaseException as problem:
            return None, problem, what_follows(problem, None, None, context.attempt)
        result: Any = None
        raised: BaseException | None = None
        with tracing.continued(job.order.traceparent, send=False):
            try:
                self.app.hooks.started(context)
                result = await handler(context, **context.job.payload)
            except BaseException as problem:
                raised = problem
            return conclude(handler, context, result, raised, self._pid)
