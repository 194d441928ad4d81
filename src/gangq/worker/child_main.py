"""A Python handler in a process of its own.

Started by a worker for tasks with ``isolate=True``, and for every task of a lane with several slots: forked from the
process that has imported the App (:mod:`gangq.worker.forkserver`), or executed with :func:`program`. The job, its
payload and its checkpoint come over the worker's socket, the result goes back over it; the exit status only says
whether that worked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gangq import tracing
from gangq.app import App, variables
from gangq.context import set_current
from gangq.errors import GangqError
from gangq.retry import Again
from gangq.tasks import Task
from gangq.watchdogs import dumps
from gangq.worker.child_context import ChildContext, Link
from gangq.worker.endings import attempt, what_follows, work_end
from gangq.worker.signals import restore_signals

SCRIPT = "__gangq_main__"
"""The module name under which a script is loaded for its App."""


def find_app(target: str) -> Any:
    """The app at ``module:name`` or ``/path/to/file.py:name``.

    A file is loaded under another name than ``__main__``, so that its own start-up code behind the usual
    ``if`` does not run again.

    Raises:
        GangqError: there is no such module, or no app of that name in it.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise GangqError(f"{target!r} names no app: write module:app, for example training:app")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as problem:
        if problem.name is not None and not (where + ".").startswith(problem.name + "."):
            raise
        raise GangqError(
            f"module {where!r} cannot be imported: run this where it lies, or put its directory on PYTHONPATH"
        ) from problem
    found = getattr(module, name, None)
    if found is None:
        raise GangqError(f"module {where!r} has no {name!r}: name the variable that holds the gangq.App")
    return found


def _load_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    if spec is None or spec.loader is None:
        raise GangqError(f"{path!r} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = module
    spec.loader.exec_module(module)
    return module


def app_target(app: Any) -> str:
    """Where a child finds this app; the reverse of :func:`find_app`.

    Raises:
        GangqError: it is in no module's variable, so no other process can find it.
    """
    for name, variable in variables(app):
        if name != "__main__":
            return f"{name}:{variable}"
        path = getattr(sys.modules[name], "__file__", None)
        if path:
            return f"{Path(path).resolve()}:{variable}"
    raise GangqError(
        "handlers with isolate=True run in a child process, which must be able to find the app: keep it in a "
        "variable of a module or script"
    )


def program(module: str, *argv: str) -> tuple[list[str], dict[str, str]]:
    """A command line for ``main(argv)`` of this module, with what its environment needs: it imports what this
    process imports, wherever it was started.
    """
    code = (
        "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('GANGQ_SYS_PATH')); "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, *argv], {"GANGQ_SYS_PATH": json.dumps(sys.path)}


def main(argv: Sequence[str]) -> int:
    """Import the App and run the handler of the job this process belongs to."""
    log_to_stderr()
    target, task = argv
    return run(lambda: find_app(target), task)


def log_to_stderr() -> None:
    """What a handler logs is part of its output."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")


def run(find: Callable[[], Any], task: str) -> int:
    """Run the handler of the job this process belongs to, of the App that ``find()`` returns; or many jobs, if this
    process belongs to none.
    """
    link = Link.from_environ()
    dumps.offer(link.path.parent)
    if "GANGQ_JOB_ID" not in os.environ:
        # Not at the top: most handlers need no event loop.
        from gangq.worker import async_main

        return async_main.run(find, task)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    # A fork of the handler must die of SIGTERM: a pool of processes ends its workers with that.
    restore_signals([signal.SIGTERM])
    context = ChildContext(link, stopping)
    set_current(context)
    try:
        app, handler = prepare(find, task)
    except BaseException as problem:
        return report(context, None, problem, what_follows(problem, None, None, context.attempt))
    with tracing.continued(os.environ.get("TRACEPARENT")):
        returned = attempt(handler, context, context.job.payload)
    code = report(context, *returned)
    app.hooks.worker_stopped(child=True)
    return code


def prepare(find: Callable[[], App], task: str) -> tuple[App, Task[..., Any]]:
    """The App and the handler, when the hooks of the process were called."""
    app = find()
    handler = app.get_task(task)
    app.hooks.worker_started(child=True)
    return app, handler


def report(context: ChildContext, result: Any, problem: BaseException | None, again: Again | None) -> int:
    """Tell the worker how it ended; the exit code of this process."""
    said = work_end(context, result, problem, again)
    if said["kind"] == "result":
        context.returned(result)
    else:
        context.outcome(**said)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
