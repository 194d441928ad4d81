"""Where the threads of a handler's process stand in its Python code, as its worker asks.

1. The process offers it: on a signal ``faulthandler`` writes the stacks into a file in the directory of the worker,
   without the interpreter, so also while C code holds the GIL.
2. The worker sends that signal and reads what is new in the file.

A process that does not catch the signal would die of it. So only one that catches it, as the kernel says, is asked,
and only if its file is there: what it forks catches the signal too, but has no file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from traceback import FrameSummary

from gangq.proc import procfs

DUMP_SIGNAL: int = getattr(signal, "SIGRTMIN", 0) + 6
"""The signal on which a handler's process writes its stacks; nothing else in it may use that number."""

_LIMIT_S = 0.4
_LOOK_S = 0.01
_MOST_BYTES = 1 << 18
_THREAD = re.compile(r"^(Current thread|Thread) 0x.*:\n((?:  .*\n)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OUTERMOST = re.compile(r"(?: in <module>|^  \.\.\.)\n\Z", re.MULTILINE)
_PACKAGE = f'  File "{Path(__file__).parents[1]}{os.sep}'
_RUNNER = f"{_PACKAGE}{os.path.join('worker', 'runner_inline.py')}"


def path_of(directory: Path, pid: int) -> Path:
    """The file of the process ``pid`` of the worker with this directory."""
    return directory / f"{pid}.stacks"


def offer(directory: Path) -> None:
    """From now on this process writes its stacks when it is asked, as long as the directory can be written."""
    with contextlib.suppress(OSError):
        # Appended to: faulthandler writes where the descriptor stands.
        file = open(path_of(directory, os.getpid()), "ab")  # noqa: SIM115
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


def ask(directory: Path, pid: int) -> str:
    """The stacks of that process, after 0.4 s at most; empty if it offers none or does not answer."""
    found = ""
    with contextlib.suppress(OSError), open(path_of(directory, pid), "rb") as file:
        target = procfs.stat(pid)
        start = file.seek(0, os.SEEK_END)
        if target is None or not _catches(pid) or not procfs.send(target, DUMP_SIGNAL):
            return ""
        until = time.monotonic() + _LIMIT_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            file.seek(start)
            before, found = found, file.read(_MOST_BYTES).decode("utf-8", "replace")
            # Its end has no mark: the main thread comes last, and its outermost frame is a module.
            if found == before and _OUTERMOST.search(found):
                break
    return found


def main_thread(stacks: str) -> list[FrameSummary]:
    """The frames of the thread that took the signal, innermost first: the kernel prefers the main thread."""
    for which, frames in _THREAD.findall(stacks):
        if which == "Current thread":
            return [
                FrameSummary(file, int(line), name, lookup_line=False)
                for file, line, name in _FRAME.findall(frames)
            ]
    return []


def inline_handler(stacks: str) -> str:
    """The own frames of the handler that runs in a worker's main thread, innermost last; empty: none runs there.

    The signal may have met another thread, so it is looked for in all: where the worker's runner has called it.
    """
    for _, thread in _THREAD.findall(stacks):
        frames = thread.splitlines()
        run_by = next((n for n, frame in enumerate(frames) if frame.startswith(_RUNNER)), 0)
        own = [frame for frame in frames[:run_by] if not frame.startswith(_PACKAGE)]
        if own:
            return "\n".join(reversed(own))
    return ""


def _catches(pid: int) -> bool:
    caught = int(procfs.status(f"/proc/{pid}").get("SigCgt", "0"), 16)
    return bool(caught >> (DUMP_SIGNAL - 1) & 1)
