"""A durable job queue inside PostgreSQL for work that occupies GPUs.

`App` declares tasks and submits them; `Client` and `AsyncClient` are the SQL functions as methods; a handler
receives a `Context`, also found by `current()`. Every error is a `GangqError`.

What is named here is imported when it is first used, so that a command as small as `gangq beat` starts fast.
"""

from __future__ import annotations

from importlib import import_module

# Not typing: it would double the time in which the command `gangq` can still be read by others.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    __version__: str

    from gangq.app import App, AsyncApp, AsyncTask, Task, TaskOptions
    from gangq.client import AsyncClient, Client
    from gangq.client.roles import Role
    from gangq.client.selectors import parse_selector
    from gangq.context import Checkpoint, Context, DeviceInfo, GangInfo, JobInfo, Peer, current
    from gangq.errors import (
        Busy,
        DatabaseUnreachable,
        Fail,
        GangqError,
        IncarnationEnded,
        InvalidInput,
        JobCancelled,
        JobFailed,
        NotAllowed,
        NotFound,
        NotSerializable,
        ResultNotStored,
        RetryLater,
        SchemaMismatch,
        StaleToken,
        Stopped,
        TooLarge,
        Unfit,
        UnknownTask,
        WaitTimeout,
        WorkerNameTaken,
        WrongIsolation,
        WrongState,
    )
    from gangq.handles import AsyncGangHandle, AsyncHandle, GangHandle, Handle
    from gangq.retry import Retry

_HOME = {
    "App": "gangq.app",
    "AsyncApp": "gangq.app",
    "AsyncClient": "gangq.client",
    "AsyncGangHandle": "gangq.handles",
    "AsyncHandle": "gangq.handles",
    "AsyncTask": "gangq.app",
    "Busy": "gangq.errors",
    "Checkpoint": "gangq.context",
    "Client": "gangq.client",
    "Context": "gangq.context",
    "DatabaseUnreachable": "gangq.errors",
    "DeviceInfo": "gangq.context",
    "Fail": "gangq.errors",
    "GangHandle": "gangq.handles",
    "GangInfo": "gangq.context",
    "GangqError": "gangq.errors",
    "Handle": "gangq.handles",
    "IncarnationEnded": "gangq.errors",
    "InvalidInput": "gangq.errors",
    "JobCancelled": "gangq.errors",
    "JobFailed": "gangq.errors",
    "JobInfo": "gangq.context",
    "NotAllowed": "gangq.errors",
    "NotFound": "gangq.errors",
    "NotSerializable": "gangq.errors",
    "Peer": "gangq.context",
    "ResultNotStored": "gangq.errors",
    "Retry": "gangq.retry",
    "RetryLater": "gangq.errors",
    "Role": "gangq.client.roles",
    "SchemaMismatch": "gangq.errors",
    "StaleToken": "gangq.errors",
    "Stopped": "gangq.errors",
    "Task": "gangq.app",
    "TaskOptions": "gangq.app",
    "TooLarge": "gangq.errors",
    "Unfit": "gangq.errors",
    "UnknownTask": "gangq.errors",
    "WaitTimeout": "gangq.errors",
    "WorkerNameTaken": "gangq.errors",
    "WrongIsolation": "gangq.errors",
    "WrongState": "gangq.errors",
    "current": "gangq.context",
    "parse_selector": "gangq.client.selectors",
}

__all__ = [
    "App",
    "AsyncApp",
    "AsyncClient",
    "AsyncGangHandle",
    "AsyncHandle",
    "AsyncTask",
    "Busy",
    "Checkpoint",
    "Client",
    "Context",
    "DatabaseUnreachable",
    "DeviceInfo",
    "Fail",
    "GangHandle",
    "GangInfo",
    "GangqError",
    "Handle",
    "IncarnationEnded",
    "InvalidInput",
    "JobCancelled",
    "JobFailed",
    "JobInfo",
    "NotAllowed",
    "NotFound",
    "NotSerializable",
    "Peer",
    "ResultNotStored",
    "Retry",
    "RetryLater",
    "Role",
    "SchemaMismatch",
    "StaleToken",
    "Stopped",
    "Task",
    "TaskOptions",
    "TooLarge",
    "Unfit",
    "UnknownTask",
    "WaitTimeout",
    "WorkerNameTaken",
    "WrongIsolation",
    "WrongState",
    "current",
    "parse_selector",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = globals()[name] = _version()
        return value
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gangq' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("gangq")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
        return "0+checkout"


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "__version__"})
