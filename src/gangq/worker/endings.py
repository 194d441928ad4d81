"""How an attempt ended: one decision for handlers in the main thread, handlers in child processes and commands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from gangq.watchdogs import ExitCode

WorkEnd = Literal["result", "error", "stopped", "snoozed", "exit 0"]
"""How the work ended, as it says itself: it returned, it raised, it stopped as asked, it is to run again later; a
command exited with 0.
"""
WORK_ENDS = frozenset(get_args(WorkEnd)) - {"exit 0"}
"""What a handler in a child process may say."""


class Ending(Enum):
    """What is reported of an attempt."""

    NOTHING = "its claim is lost: the database knows more than this worker"
    COMMITTED_OR_FAILED = (
        "the handler completed the job in its own transaction, which it may not have committed"
    )
    DONE = "done"
    TRIPPED = "a watchdog ended it"
    STOPPED = "it was told to stop, and did"
    SNOOZED = "it handed itself back, to be run again later"
    ERROR = "it failed, and said how"
    FAILED = "it failed, and said nothing"


@dataclass(frozen=True)
class Attempt:
    """What is known of an attempt once nothing of it runs any more.

    ``lost``: its claim is. ``completed``: `Context.complete` was called. ``trip``: the
    code of the watchdog that tripped. ``cause``: what ended the process, as in :class:`gangq.worker.child.Exit`;
    ``exit`` for a handler in the main thread. ``socket_gone``: it could not reach its worker, whose socket is gone.
    """

    work_end: WorkEnd | None
    lost: bool = False
    completed: bool = False
    told_to_stop: bool = False
    trip: ExitCode | None = None
    cause: str = "exit"
    socket_gone: bool = False


def ending_of(attempt: Attempt) -> Ending:
    """Decide what to report. The first rule that fits decides."""
    if attempt.lost:
        return Ending.NOTHING
    if attempt.completed:
        return Ending.COMMITTED_OR_FAILED
    if attempt.work_end == "result":
        return Ending.DONE
    # A process that exited by itself while the watchdog decided was not ended by it. Out of memory is different: the
    # kernel killed it, and the trip says so.
    if attempt.trip is not None and (attempt.cause != "exit" or attempt.trip is ExitCode.MEMORY):
        return Ending.TRIPPED
    # Its guardian ended it: the lease was about to end, or the worker had died.
    if attempt.cause in ("deadline", "orphan"):
        return Ending.STOPPED
    if attempt.told_to_stop and (attempt.cause in ("stop", "kill") or attempt.work_end == "stopped"):
        return Ending.STOPPED
    if attempt.work_end == "snoozed":
        return Ending.SNOOZED
    if attempt.work_end == "error":
        return Ending.ERROR
    if attempt.work_end == "exit 0":
        return Ending.DONE
    # What it could not say or ask may be why it failed.
    return Ending.STOPPED if attempt.socket_gone else Ending.FAILED
