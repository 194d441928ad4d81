"""Running a program of the host for a bounded time, whatever it does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangq import private
from gangq.proc import killing

_OUTPUT = 2000
"""Bytes kept of what a program said, the last ones."""


@dataclass(frozen=True)
class Ran:
    """How a program ended. ``code`` is None when it was ended at its time limit, or never started."""

    argv: tuple[str, ...]
    code: int | None
    output: str
    problem: str | None = None
    """Why there is no exit code, in words; None where there is one."""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def why(self) -> str:
        """Why it did not succeed, in one line."""
        said = " ".join(self.output.split())
        return self.problem or f"{self.argv[0]} ended with {self.code}" + (f": {said}" if said else "")


def run(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, stdin: bytes = b""
) -> Ran:
    """Run ``argv``, without a shell, for at most ``timeout_s`` seconds; never raises for what becomes of it.

    ``stdin`` is what it reads. ``environ`` is added to this process's environment, without the address of the
    database. At the limit its whole process group is killed. What it leaves in the background when it ends by itself
    (a worker that it has started) lives on, and is not waited for: input and output are files, because a pipe would
    stay open as long as that worker, or block where nobody reads it.
    """
    words = tuple(argv)
    try:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
            given.write(stdin)
            given.seek(0)
            started = subprocess.Popen(
                words,
                stdin=given,
                stdout=out,
                stderr=out,
                env={**private.without_secrets(os.environ), **(environ or {})},
                start_new_session=True,
            )
            problem = None
            try:
                started.wait(timeout_s)
            except subprocess.TimeoutExpired:
                how = "was killed" if killing.end_group(started) else "could not be killed"
                problem = f"{words[0]} did not end within {timeout_s:.0f} s and {how}"
            said = os.pread(out.fileno(), _OUTPUT, max(0, os.fstat(out.fileno()).st_size - _OUTPUT))
    except OSError as refused:
        # The program is not there, or there is no room for its input and output.
        return Ran(words, None, "", f"{words[0]} could not be started: {refused.strerror or refused}")
    return Ran(words, None if problem else started.returncode, said.decode(errors="replace"), problem)
