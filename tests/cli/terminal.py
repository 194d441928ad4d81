"""A command at a real terminal of a certain size."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable

from cli.cli_process import GANGQ, environment


class Terminal:
    """A command whose standard input, output and error are a terminal."""

    def __init__(
        self, dsn: str | None, *args: object, columns: int = 80, lines: int = 24, **env: str
    ) -> None:
        self._own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        known = environment(dsn, **{"TERM": "xterm", **env})
        known.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [*GANGQ, *map(str, args)], stdin=its, stdout=its, stderr=its, env=known, start_new_session=True
        )
        os.close(its)
        self._read = b""
        self._reader = threading.Thread(target=self._read_all)
        self._reader.start()

    def _read_all(self) -> None:
        while True:
            try:
                piece = os.read(self._own, 65536)
            except OSError:  # Linux: the other end is closed.
                return
            if not piece:
                return
            self._read += piece

    @property
    def said(self) -> str:
        """All that was written to it, with its escapes."""
        return self._read.decode(errors="replace")

    def until(self, look: Callable[[str], object], timeout: float = 30) -> None:
        """Wait until what was written is so."""
        deadline = time.monotonic() + timeout
        while not look(self.said):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._own, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout: float = 60) -> int:
        """Wait for its end; return the exit code."""
        try:
            code = self.process.wait(timeout)
        finally:
            self.process.kill()
        self._reader.join(10)
        os.close(self._own)
        return code


def screen(said: str) -> list[str]:
    """The lines that are left of it: of the escapes only those that move up, and erase what is below."""
    lines, row, rest = [""], 0, said.replace("\r\n", "\n")
    while rest:
        if rest.startswith("\x1b["):
            end = next(i for i in range(2, len(rest)) if rest[i].isalpha())
            if rest[end] == "A":
                row -= int(rest[2:end])
            elif rest[end] == "J":
                del lines[row + 1 :]
                lines[row] = ""
            rest = rest[end + 1 :]
            continue
        if rest[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif rest[0] != "\r":
            lines[row] += rest[0]
        rest = rest[1:]
    return lines
