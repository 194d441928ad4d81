"""What attempts leave behind, so that it can be judged exactly whether two of them ever lived at once.

Every process of an attempt appends lines to one journal and says when it ended by itself. A line is one
``write`` to a file opened for appending: whole, in order, and in the kernel's hands at once, so that SIGKILL
loses none. An attempt that starts writes that down first and *then* looks whether any process of another
attempt of its job is alive; so of two that overlap, at least the later one sees it, however short it was.

Run as a program it is a command's work, and with ``--below`` also what that command starts: a process in a
session of its own, whose parent has gone. Imported, :func:`live` is the same work for a handler. Imports no
gangq: a command of this file starts in some 30 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ALIVE_EVERY_S = 0.02
_LATER_ATTEMPTS_S = 0.2


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_ticks(pid: int) -> int | None:
    """When this process started, by the kernel; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Journal:
    """The file, as both sides see it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def note(self, what: str, job: int, token: int, **more: Any) -> None:
        line = {"what": what, "job": job, "token": token, "pid": os.getpid(), "at": boottime(), **more}
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)

    def entries(self, what: str | None = None, job: int | None = None) -> list[dict[str, Any]]:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        # A line that crosses a page of the file may be seen while only half of it is there.
        mine = "" if job is None else f'"job": {job},'
        found = [
            json.loads(line)
            for line in text.splitlines(keepends=True)
            if mine in line and line.endswith("\n")
        ]
        return [e for e in found if what in (None, e["what"]) and job in (None, e["job"])]

    def attempts(self, job: int) -> list[int]:
        """The tokens under which this job has started, in order."""
        return list(dict.fromkeys(e["token"] for e in self.entries("start", job)))

    def living(self, job: int, *, token: int | None = None, but: int | None = None) -> list[int]:
        """Pids at work for this job now: started, not ended by themselves, and that very process alive. Of an attempt
        what was started below it comes last, whichever of them was first to write."""
        entries = sorted(self.entries(job=job), key=lambda e: (e["what"] == "below", e["at"]))
        ended = {(e["token"], e["pid"]) for e in entries if e["what"] == "end"}
        return [
            e["pid"]
            for e in entries
            if e["what"] in ("start", "below")
            and (e["token"], e["pid"]) not in ended
            and token in (None, e["token"])
            and e["token"] != but
            and start_ticks(e["pid"]) == e["ticks"]
        ]


def live(
    path: Path,
    job: int,
    token: int,
    *,
    stopping: Callable[[], bool] = lambda: False,
    what: str = "start",
    seconds: float = 60.0,
) -> str | None:
    """One attempt. The first of a job works for ``seconds``, or until the file ``<journal>.go`` is there;
    later ones work a moment, and so does the first when it is told to stop, which it says by returning None.
    """
    journal = Journal(path)
    journal.note(what, job, token, ticks=start_ticks(os.getpid()))
    first = journal.attempts(job)[:1] == [token] or what == "below"
    for pid in journal.living(job, but=token):
        journal.note("overlap", job, token, other=pid)
    go = Path(f"{path}.go")
    until = boottime() + (seconds if first else _LATER_ATTEMPTS_S)
    stopped = False
    try:
        while boottime() < until and not (first and go.exists()):
            if stopping():
                stopped = True
                return None
            journal.note("alive", job, token)
            time.sleep(_ALIVE_EVERY_S)
        return "first" if first else "later"
    finally:
        journal.note("end", job, token, stopped=stopped)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("journal", type=Path)
    parser.add_argument("--below", action="store_true", help="start a process below, which detaches itself")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM, in every process")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a first attempt works")
    parser.add_argument("--role", default="start")
    given = parser.parse_args()
    told: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if given.deaf else lambda number, _: told.append(number))
    if given.below:
        again = [sys.executable, "-S", __file__, str(given.journal), "--role", "below"]
        middle = os.fork()
        if middle == 0:
            subprocess.Popen(again + ["--deaf"] * given.deaf, start_new_session=True)
            os._exit(0)
        os.waitpid(middle, 0)
    ended = live(
        given.journal,
        int(os.environ["GANGQ_JOB_ID"]),
        int(os.environ["GANGQ_TOKEN"]),
        stopping=lambda: bool(told),
        what=given.role,
        seconds=given.seconds,
    )
    sys.exit(0 if ended else 143)


if __name__ == "__main__":
    _main()
