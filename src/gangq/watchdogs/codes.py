"""With which status a worker process leaves, and what each one means."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a worker process ended itself, or was ended by its supervisor. 0 is a stop as asked.

    ``word`` is the name under which events, views and ``notify_only`` know it, ``meaning`` one sentence for
    people. A service manager starts the worker again after all of them except ``UNKILLABLE`` and ``UNFIT``
    (``restart`` is false): after those a second worker beside the first would make it worse.
    """

    word: str
    meaning: str
    restart: bool

    BUDGET = 75, "budget", "the job outran its wall-clock budget"
    STALL = 76, "stall", "no progress, and nothing moving; or none for far too long although busy"
    LOST = 77, "lost", "the claim is no longer this worker's: reaped, cancelled, or its lease not renewable"
    HEALTH = 78, "health", "the devices did nothing for a whole window, and nothing else moved"
    UNSTOPPED = 79, "unstopped", "told to stop, and did not stop within its grace"
    FROZEN = 80, "frozen", "the interpreter was frozen: no Python ran any more"
    FAULT = 85, "fault", "a device of the job failed"
    MEMORY = 86, "memory", "out of memory"
    UNKILLABLE = 87, "unkillable", "a process survived SIGKILL: the host needs a reboot"
    UNFIT = 88, "unfit", "unfit to start: leftovers, devices missing or in quarantine"

    def __new__(cls, code: int, word: str, meaning: str) -> ExitCode:
        """Make the number carry its word and its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.word = word
        member.meaning = meaning
        member.restart = code not in (87, 88)
        return member


NOTIFY_CLASSES = ("budget", "stall", "health", "fault", "gang")
"""Classes of trips that an operator may set to notify only: they report and stop nothing."""
