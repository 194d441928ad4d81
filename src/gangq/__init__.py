"""A durable job queue inside PostgreSQL for work that occupies GPUs.

`App` declares tasks and submits them; `Client` and `AsyncClient` are the SQL functions as methods; a handler
receives a `Context`, also found by `current()`. Every error is a `GangqError`.
"""

from importlib import metadata as _metadata

from gangq.app import App, AsyncApp, AsyncTask, Task, TaskOptions
from gangq.client import AsyncClient, Client
from gangq.context import Checkpoint, Context, DeviceInfo, GangInfo, JobInfo, Peer, current
from gangq.errors import (
    Busy,
    DatabaseUnreachable,
    GangqError,
    IncarnationEnded,
    InvalidInput,
    JobCancelled,
    JobFailed,
    NotAllowed,
    NotFound,
    NotSerializable,
    SchemaMismatch,
    StaleToken,
    Stopped,
    TooLarge,
    UnknownTask,
    WorkerNameTaken,
    WrongIsolation,
    WrongState,
)
from gangq.handles import AsyncGangHandle, AsyncHandle, GangHandle, Handle

try:
    __version__ = _metadata.version("gangq")
except _metadata.PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+checkout"

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
    "SchemaMismatch",
    "StaleToken",
    "Stopped",
    "Task",
    "TaskOptions",
    "TooLarge",
    "UnknownTask",
    "WorkerNameTaken",
    "WrongIsolation",
    "WrongState",
    "current",
]
