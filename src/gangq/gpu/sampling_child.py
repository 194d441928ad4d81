"""The sampling process as its owner holds it: pipes that never block, its latest call, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from gangq import private
from gangq.gpu.current_call import CurrentCall
from gangq.proc import killing, procfs

_STDERR_BYTES = 2000
_MAX_LINE = 1 << 20


def start_module(
    module: str, *arguments: str, environ: Mapping[str, str], **more: Any
) -> subprocess.Popen[bytes]:
    """Start a program of this package in a session of its own, in a process that this one can afford to lose.

    Raises:
        OSError: it cannot be started.
    """
    # It must import what this process imports, and nothing that merely lies in the working directory (a training
    # script called random.py).
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**private.without_secrets(environ), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
        **more,
    )


def how_ended(code: int, stderr: bytes) -> str:
    """How a process ended, by its status and the last line on its standard error."""
    try:
        how = f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        how = f"exited with {code}"
    words = stderr.decode("utf-8", "replace").strip().splitlines()
    return how + (f", last words {words[-1][:200]!r}" if words else "")


class SamplingChild:
    """One sampling process: its pipes, its latest call, and how it ended."""

    def __init__(self, process: subprocess.Popen[bytes], call: CurrentCall, now: float) -> None:
        self.process = process
        self.call = call
        self.active_at = now
        self.sent = b""
        self.failed: str | None = None
        self.stderr_tail = b""
        self._rest = b""
        self._unsent = b""
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @classmethod
    def start(cls, source: str, poll_s: float, environ: Mapping[str, str], now: float) -> SamplingChild:
        """Start one that reads the devices of that driver.

        Raises:
            OSError: it cannot be started.
        """
        call = CurrentCall.create()
        try:
            process = start_module(
                "gangq.gpu.sampling",
                source,
                str(os.getpid()),
                str(poll_s),
                str(call.fd),
                environ=environ,
                stdin=subprocess.PIPE,
                pass_fds=[call.fd],
            )
        except OSError:
            call.close()
            raise
        return cls(process, call, now)

    def streams(self) -> list[IO[bytes]]:
        """What it speaks through, as far as that is open."""
        both = (self.process.stdout, self.process.stderr)
        return [stream for stream in both if stream is not None and not stream.closed]

    def kernel_state(self) -> str:
        """What the kernel says that it does: its state letter and what it waits in."""
        entry = procfs.stat(self.process.pid)
        return (
            "?"
            if entry is None
            else f"{entry.state} {procfs.text(f'/proc/{self.process.pid}/wchan')}".strip()
        )

    def why_ended(self) -> str:
        """Why it ended, once it has: as it said itself, or by its status and the last line on its stderr."""
        if self.failed:
            return self.failed
        code = self.process.returncode
        if code is None:
            return "the sampling process closed its side, and SIGKILL does not end it"
        return f"the sampling process ended: it {how_ended(code, self.stderr_tail)}"

    def end(self, grace_s: float = 0.0) -> bool:
        """Kill it, if it has not ended within the grace, and close its pipes; says whether it is dead."""
        dead = killing.end_group(self.process, grace_s)
        # A library that aborts says why at the very end.
        self.read_stderr()
        self.call.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return dead

    def lines(self, now: float) -> list[dict[str, Any]] | None:
        """Return what it has said since; None when it has closed its side."""
        assert self.process.stdout is not None
        said: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return said
            if not data:
                # A process that ends in the middle of a line has said nothing by it.
                return said or None
            self.active_at = now
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-_MAX_LINE:]
            for line in lines:
                with contextlib.suppress(ValueError):
                    said.append(json.loads(line))

    def read_stderr(self) -> None:
        """Keep the end of what it prints on stderr."""
        stderr = self.process.stderr
        if stderr is None or stderr.closed:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(stderr.fileno(), 1 << 16)
            self.stderr_tail = (self.stderr_tail + data)[-_STDERR_BYTES:]
            if not data:
                stderr.close()

    def order(self, line: bytes) -> None:
        """Send an order unless it is the last one sent; never waits for a process that does not read."""
        if not self._unsent and line != self.sent:
            self.sent = self._unsent = line
        if self._unsent and self.process.stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                self._unsent = self._unsent[os.write(self.process.stdin.fileno(), self._unsent) :]
