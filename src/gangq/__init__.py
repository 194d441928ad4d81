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

    from gangq.app import App as App
    from gangq.app import AsyncApp as AsyncApp
    from gangq.client import AsyncClient as AsyncClient
    from gangq.client import Client as Client
    from gangq.client.roles import Role as Role
    from gangq.client.selectors import parse_selector as parse_selector
    from gangq.context import Checkpoint as Checkpoint
    from gangq.context import Context as Context
    from gangq.context import DeviceInfo as DeviceInfo
    from gangq.context import GangInfo as GangInfo
    from gangq.context import JobInfo as JobInfo
    from gangq.context import Peer as Peer
    from gangq.context import ServiceInfo as ServiceInfo
    from gangq.context import current as current
    from gangq.errors import Busy as Busy
    from gangq.errors import DatabaseUnreachable as DatabaseUnreachable
    from gangq.errors import Fail as Fail
    from gangq.errors import GangqError as GangqError
    from gangq.errors import HookFailed as HookFailed
    from gangq.errors import IncarnationEnded as IncarnationEnded
    from gangq.errors import InvalidInput as InvalidInput
    from gangq.errors import JobCancelled as JobCancelled
    from gangq.errors import JobFailed as JobFailed
    from gangq.errors import NotAllowed as NotAllowed
    from gangq.errors import NotFound as NotFound
    from gangq.errors import NotSerializable as NotSerializable
    from gangq.errors import ResultNotStored as ResultNotStored
    from gangq.errors import RetryLater as RetryLater
    from gangq.errors import SchemaMismatch as SchemaMismatch
    from gangq.errors import Snoozed as Snoozed
    from gangq.errors import StaleToken as StaleToken
    from gangq.errors import Stopped as Stopped
    from gangq.errors import TooLarge as TooLarge
    from gangq.errors import Unfit as Unfit
    from gangq.errors import UnknownTask as UnknownTask
    from gangq.errors import WaitTimeout as WaitTimeout
    from gangq.errors import WorkerNameTaken as WorkerNameTaken
    from gangq.errors import WrongIsolation as WrongIsolation
    from gangq.errors import WrongState as WrongState
    from gangq.handles import AsyncBatch as AsyncBatch
    from gangq.handles import AsyncGang as AsyncGang
    from gangq.handles import AsyncJob as AsyncJob
    from gangq.handles import Batch as Batch
    from gangq.handles import Gang as Gang
    from gangq.handles import Job as Job
    from gangq.handles import as_completed as as_completed
    from gangq.hooks import Outcome as Outcome
    from gangq.retry import Retry as Retry
    from gangq.services import Scale as Scale
    from gangq.task_options import TaskOptions as TaskOptions
    from gangq.tasks import AsyncTask as AsyncTask
    from gangq.tasks import CoroutineTask as CoroutineTask
    from gangq.tasks import GangTask as GangTask
    from gangq.tasks import Task as Task

_HOME = {
    name: module
    for module, names in {
        "gangq.app": "App AsyncApp",
        "gangq.client": "AsyncClient Client",
        "gangq.client.roles": "Role",
        "gangq.client.selectors": "parse_selector",
        "gangq.context": "Checkpoint Context DeviceInfo GangInfo JobInfo Peer ServiceInfo current",
        "gangq.errors": (
            "Busy DatabaseUnreachable Fail GangqError HookFailed IncarnationEnded InvalidInput JobCancelled "
            "JobFailed NotAllowed NotFound NotSerializable ResultNotStored RetryLater SchemaMismatch Snoozed "
            "StaleToken "
            "Stopped TooLarge Unfit UnknownTask WaitTimeout WorkerNameTaken WrongIsolation WrongState"
        ),
        "gangq.handles": "AsyncBatch AsyncGang AsyncJob Batch Gang Job as_completed",
        "gangq.hooks": "Outcome",
        "gangq.retry": "Retry",
        "gangq.services": "Scale",
        "gangq.task_options": "TaskOptions",
        "gangq.tasks": "AsyncTask CoroutineTask GangTask Task",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOME)


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
