"""Running a program of the host for a bounded time, whatever it does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from gangq import private
from gangq.proc import killing

_KEPT = 2000
"""Bytes kept of the standard output, and as many of the standard error: the last ones."""


@dataclass(frozen=True)
class Ran:
    """How a program ended. ``code`` is None when it was ended at its time limit, or never started."""

    argv: tuple[str, ...]
    code: int | None
    output: str
    """The end of its standard output."""
    errors: str = ""
    """The end of its standard error: a warning there must not become part of an answer."""
    problem: str | None = None
    """Why there is no exit code, in words; None where there is one."""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def why(self) -> str:
        """Why it did not succeed, in one line."""
        said = " ".join(f"{self.output} {self.errors}".split())
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
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(stdin)
            given.seek(0)
            started = subprocess.Popen(
                words,
                stdin=given,
                stdout=out,
                stderr=err,
                env={**private.without_secrets(os.environ), **(environ or {})},
                start_new_session=True,
            )
            problem = None
            try:
                started.wait(timeout_s)
            except subprocess.TimeoutExpired:
                how = "was killed" if killing.end_group(started) else "could not be killed"
                problem = f"{words[0]} did not end within {timeout_s:.0f} s and {how}"
            output, errors = _end_of(out), _end_of(err)
    except OSError as refused:
        # The program is not there, or there is no room for its input and output.
        problem = f"{words[0]} could not be started: {refused.strerror or refused}"
        return Ran(words, None, "", problem=problem)
    return Ran(words, None if problem else started.returncode, output, errors, problem)


def _end_of(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _KEPT, max(0, size - _KEPT)).decode(errors="replace")
