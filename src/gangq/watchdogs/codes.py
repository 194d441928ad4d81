"""With which status a worker process leaves, and what follows from each: all that is known of an exit code."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

Reporter = Literal["worker", "supervisor"]


class ExitCode(IntEnum):
    """Why a worker process ended itself, or was ended by its supervisor. 0 is a stop as asked.

    The database has the same rows in ``gangq.trip_classes``; ``tests/watchdogs/test_codes.py`` compares the two.
    """

    word: str
    """The class: under this name events, views and ``notify_only`` know it."""
    meaning: str
    """One sentence for people."""
    reporter: Reporter | None
    """Which process reports a trip of the handler in the worker's own process. The supervisor repeats the worker's
    report, in case the worker could not make it. None: this code is not reported as such a trip.
    """
    notify: bool
    """An operator may set the class to notify only: it is reported, and nothing is stopped."""
    may_be_held: bool
    """The verdict is a conclusion, not a fact: the database holds the trip back while much of the fleet trips."""
    restart: bool
    """A service manager starts the worker again. False where a second worker beside the first would harm."""

    BUDGET = 75, "budget", "worker notify", "the job outran its wall-clock budget"
    STALL = (
        76,
        "stall",
        "worker notify held",
        "no progress, and nothing moving; or none for far too long although busy",
    )
    LOST = (
        77,
        "lost",
        "",
        "the claim (reaped, cancelled, lease not renewable) or the worker's directory is gone",
    )
    HEALTH = (
        78,
        "health",
        "worker notify held",
        "the devices did nothing for a whole window, and nothing else moved",
    )
    UNSTOPPED = 79, "unstopped", "", "told to stop, and did not stop within its grace"
    FROZEN = 80, "frozen", "supervisor", "the interpreter was frozen: no Python ran any more"
    FAULT = 85, "fault", "worker notify", "a device of the job failed"
    MEMORY = 86, "memory", "supervisor", "out of memory"
    UNKILLABLE = 87, "unkillable", "no-restart", "a process survived SIGKILL: the host needs a reboot"
    UNFIT = 88, "unfit", "no-restart", "unfit to start: leftovers, devices missing or in quarantine"

    def __new__(cls, code: int, word: str, traits: str, meaning: str) -> ExitCode:
        """Make the number carry what is known of it."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.word = word
        member.meaning = meaning
        has = traits.split()
        member.reporter = "worker" if "worker" in has else "supervisor" if "supervisor" in has else None
        member.notify = "notify" in has
        member.may_be_held = "held" in has
        member.restart = "no-restart" not in has
        return member

    @classmethod
    def of(cls, status: int) -> ExitCode | None:
        """The code with this number; None: a status that no worker ends itself with."""
        return next((code for code in cls if code == status), None)


NOTIFY_CLASSES = (*(code.word for code in ExitCode if code.notify), "gang")
"""Classes of trips that an operator may set to notify only: they report and stop nothing."""
