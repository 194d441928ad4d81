"""Signs of life of a worker: to its supervisor, and to a timer of the kernel.

Every thread of the library says that it runs whenever it does, and one of them has nothing else to do than to
run once a second. When all fall silent, something holds the interpreter, or the process is stopped, and nothing
inside can help: the supervisor ends the worker
(:mod:`gangq.proc.supervisor`). If the supervisor cannot, a kernel timer does, one lease after the last sign of life.
Not earlier: if the host was paused, only the supervisor can tell. Without a supervisor (``App.run_worker()``) the
kernel is all there is, and a pause is silence like any other (:mod:`gangq.watchdogs.backstop`).

The supervisor also has to know what it ended: the worker writes its incarnation and the job in its own process
into memory they share (:mod:`gangq.proc.liveness_memory`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import IO

from gangq.errors import InvalidInput
from gangq.proc import liveness_memory, procfs
from gangq.proc.liveness_memory import Memory
from gangq.proc.supervision import SILENCE_S
from gangq.watchdogs.backstop import Backstop

log = logging.getLogger("gangq.worker.liveness")

SILENCE_VARIABLE = "GANGQ_SILENCE_S"
"""Seconds without a sign of life that end a worker [30]; ``gangq worker --silence-s`` says the same."""
START_VARIABLE = "GANGQ_START_S"
"""The same before the first sign of life [600]; ``gangq worker --start-s``."""
_AFTER_SUPERVISOR_S = 1.0
_UNLEASED_S = 120.0
"""What the timer of a supervised worker allows while it knows of no lease."""
_LONGEST_S = 86400.0


class Liveness:
    """The signs of life of this process. :meth:`of_environment` makes it, :meth:`start` begins.

    Without a supervisor, :meth:`registered`, :meth:`job` and :meth:`ended` do nothing.
    """

    def __init__(self, backstop: Backstop, memory: Memory | None = None, channel: int = -1) -> None:
        self._backstop = backstop
        self._memory = memory
        self._channel = channel
        self._slots = list(range(liveness_memory.GUARDIANS))
        self._lock = threading.Lock()

    @classmethod
    def of_environment(
        cls, environ: MutableMapping[str, str] | None = None, *, dump_file: IO[str] | None = None
    ) -> Liveness:
        """Of this process, whose supervisor, if it has one, is named in ``environ`` [``os.environ``].

        That name is taken out of it: no process started from here has the same supervisor. ``dump_file`` (a
        real file) gets the stacks when there is no supervisor to take them.
        """
        environ = os.environ if environ is None else environ
        handed_secrets(environ)
        named = environ.pop(liveness_memory.VARIABLE, "")
        found = _supervisor(named) if named else None
        if found is None:
            silence_s = number_of(environ, SILENCE_VARIABLE, SILENCE_S)
            return cls(Backstop(silence_s=silence_s, dump_file=dump_file))
        channel, memory = found
        backstop = Backstop(
            silence_s=max(memory.silence_s + _AFTER_SUPERVISOR_S, _UNLEASED_S),
            interval_s=memory.interval_s,
            dump_file=open(memory.fd, "w", closefd=False),  # noqa: SIM115
            beat=memory.sign,
        )
        return cls(backstop, memory, channel)

    def start(self) -> None:
        """Give the first sign of life, and go on. To be called once what may hold the interpreter for long
        (the import of the app) is done: from now on silence is judged.
        """
        self._backstop.start()
        if self._memory is not None:
            self._memory.dump_thread = self._backstop.thread_id
            self._memory.dump_signal = self._backstop.dump_signal

    def stop(self) -> None:
        """No more signs of life, and none are expected: the process is about to end, or goes on as
        something else than a worker. What was :meth:`registered` and has not :meth:`ended` stays known.
        """
        self._backstop.stop()
        if self._memory is not None:
            _write(self._channel, liveness_memory.LEAVING)

    def registered(
        self,
        *,
        worker: str,
        host: str,
        incarnation: int,
        mark: str,
        directory: Path,
        dsn: str,
        lease_s: float = _UNLEASED_S,
    ) -> None:
        """This process has become an incarnation: should it die, the supervisor reports it dead.

        ``dsn`` is where (``client.target.conninfo``); it stays in memory. ``lease_s`` is its lease: so long may
        worker and supervisor be paused together.
        """
        if self._memory is None:
            return
        silence_s = self._memory.silence_s + _AFTER_SUPERVISOR_S
        self._backstop.allow(min(_LONGEST_S, max(silence_s, lease_s)))
        record = {
            "worker": worker,
            "host": host,
            "incarnation": incarnation,
            "mark": mark,
            "directory": str(directory),
            "dsn": dsn,
            "pid": os.getpid(),
        }
        try:
            self._memory.register(incarnation, json.dumps(record).encode())
        except ValueError as problem:
            # The supervisor then ends this worker like any other, and leaves its jobs to the lease.
            log.warning("record_not_written", extra={"error": str(problem)})
        _write(self._channel, liveness_memory.REGISTERED)

    def job(self, job_id: int, token: int) -> None:
        """The handler of this job begins in this process; ``job(0, 0)``: no handler runs. For every job:
        costs a third of a microsecond.
        """
        if self._memory is not None:
            self._memory.set_job(job_id, token)

    def guardian(self, pid: int) -> Callable[[], None]:
        """This process of ours guards a command: should the worker die, it is given the time to end it. Call what
        is returned once it has ended.
        """
        memory, entry = self._memory, procfs.stat(pid)
        with self._lock:
            slot = self._slots.pop() if memory is not None and entry is not None and self._slots else None
        if memory is None or entry is None or slot is None:
            return lambda: None
        memory.set_guardian(slot, pid, entry.start_ticks)

        def over() -> None:
            memory.set_guardian(slot, 0, 0)
            with self._lock:
                self._slots.append(slot)

        return over

    def spare(self, pid: int) -> None:
        """The private PostgreSQL with this pid was started from here and outlives the worker."""
        entry = procfs.stat(pid)
        if self._memory is not None and entry is not None:
            self._memory.spared_pid, self._memory.spared_ticks = pid, entry.start_ticks

    def ended(self) -> None:
        """The incarnation has retired, or the database has ended it: there is nothing to report of it."""
        if self._memory is not None:
            self._memory.forget()


def handed_secrets(environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Take what this worker's supervisor keeps out of its environment; nothing where it has no supervisor, or the
    second time. Only for a process that is closed (:func:`gangq.private.close`).
    """
    environ = os.environ if environ is None else environ
    named = environ.get(liveness_memory.VARIABLE, "")
    if not named.isdigit():
        return {}
    try:
        channel = socket.socket(fileno=int(named))
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            message, fds, _, _ = socket.recv_fds(channel, liveness_memory.SECRETS_MAX, 1, flags)
        finally:
            channel.detach()
        environ[liveness_memory.VARIABLE] = f"{named}:{fds[0]}"
        found = json.loads(message)
    except (IndexError, OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()}


def number_of(environ: Mapping[str, str], variable: str, default: float, *, zero: bool = False) -> float:
    """The number that this variable of the environment holds, more than 0 (or, with ``zero``, not less).

    Raises:
        InvalidInput: it holds something else.
    """
    text = environ.get(variable)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value == 0 and not zero):
        more = "0 or more" if zero else "more than 0"
        raise InvalidInput(f"{variable} is {text!r}: give a number, {more}, such as {default:g}")
    return value


def _supervisor(named: str) -> tuple[int, Memory] | None:
    try:
        channel, memory_fd = (int(word) for word in named.split(":"))
        memory = Memory.of(memory_fd)
        os.set_blocking(channel, False)
    except (OSError, ValueError) as problem:
        log.warning(
            "supervisor_unknown",
            extra={
                "named": named,
                "error": str(problem),
                "advice": f"this worker goes on without it; do not set {liveness_memory.VARIABLE} yourself",
            },
        )
        return None
    os.set_inheritable(channel, False)
    return channel, memory


def _write(channel: int, what: bytes) -> None:
    """Write it if there is room. A supervisor that is stopped does not read; when one is killed this process is
    killed too (PDEATHSIG).
    """
    try:
        os.write(channel, what)
    except OSError:
        return
