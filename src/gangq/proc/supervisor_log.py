"""The supervisor's log lines, in the form that the worker's have. json is imported when a line is written."""

from __future__ import annotations

import errno
import os
import select
import time

_WRITE_S = 0.2
_FILE_KIND = 0o170000
_WAITED_FOR = (0o010000, 0o140000)
"""Pipes and sockets: a write to them may wait for ever."""


class Log:
    """Writes lines as JSON to standard output, or as text to standard error."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def say(self, level: str, event: str, **fields: object) -> None:
        """One line of the log, in the form that the worker's have."""
        import json

        at = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        if self._as_json:
            stamp = f"{seconds}.{int(at % 1 * 1e6):06d}+00:00"
            words: dict[str, object] = {
                "at": stamp,
                "level": level.upper(),
                "logger": "gangq.proc.supervisor",
            }
            line = json.dumps({**words, "message": event, **fields})
        else:
            extra = " ".join(f"{k}={json.dumps(v)}" for k, v in fields.items() if v is not None)
            local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            zone = time.strftime("%z", time.localtime(at))
            stamp = f"{local}.{int(at % 1 * 1e3):03d}{zone[:3]}:{zone[3:]}"
            line = f"{stamp} {level.upper()} gangq.proc.supervisor {event} {extra}".rstrip()
        offer(1 if self._as_json else 2, line.encode() + b"\n")


def offer(fd: int, data: bytes) -> None:
    """Write what can be written within 0.2 s: a full pipe that is not read must not keep a supervisor from ending."""
    until = time.monotonic() + _WRITE_S
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    try:
        while data and poll.poll(max(0.0, until - time.monotonic()) * 1000):
            data = data[_write_now(fd, data[: select.PIPE_BUF]) :]
            if time.monotonic() >= until:
                return
    except OSError:
        return


def _write_now(fd: int, piece: bytes) -> int:
    """Write it without waiting, as far as the kernel can; how much of it was taken.

    The descriptor is shared with others, so it cannot be set not to block; and they may have taken the room that
    poll() saw.
    """
    if os.fstat(fd).st_mode & _FILE_KIND in _WAITED_FOR and hasattr(os, "RWF_NOWAIT"):
        try:
            return os.pwritev(fd, [piece], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            time.sleep(0.01)
            return 0
        except OSError as problem:
            if problem.errno == errno.EPIPE:
                raise
    return os.write(fd, piece)
