"""A command as its worker sees it: start, deadline, stop, output, and its end, reported once nothing of it is left.

Between the worker and the command is a guardian (:mod:`gangq.proc.guardian`), which does what must happen even when
the worker cannot. This class talks to it, and kills the command if the guardian itself was killed.

The mark: every process of a command carries ``GANGQ_MARK=<incarnation>/<command>`` in its environment, so
that it can be found again by the guardian (that exact mark) and by a later incarnation of the worker
(everything under ``<incarnation>``, see :mod:`gangq.proc.proof`).
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangq.errors import CommandStartError
from gangq.proc import bounded_log, procfs
from gangq.proc.clock import boottime
from gangq.worker.forkserver import Forked, ForkServer
from gangq.worker.launch import Sweep, launch, start_error
from gangq.worker.output import LogReader

__all__ = ["Child", "CommandStartError", "Exit"]

log = logging.getLogger("gangq.worker.child")

_READ = 1 << 16
_RECOVERY_PAUSE_S = 0.05


@dataclass(frozen=True)
class Exit:
    """How a command ended.

    ``code`` is its exit status or None, ``signal`` the number of the signal that killed it or None; both are
    None when its guardian was killed and took the knowledge with it, or while it is stuck. ``cause`` says who
    ended it: ``exit`` (it did, by itself), ``stop``, ``kill``, ``deadline``, ``orphan`` (its worker died),
    ``guardian_lost``, ``guardian_fault`` or ``stuck``. ``tree_dead`` is True once every process it started is
    confirmed gone; where it is False, ``stuck`` names the pids that survived SIGKILL (usually state D: a
    driver or a dead mount) and the host needs a look.
    """

    code: int | None
    signal: int | None
    tree_dead: bool
    stuck: tuple[int, ...] = ()
    cause: str = "exit"


class Child:
    """One running command. Every method may be called from any thread, at any time until :meth:`close`."""

    def __init__(
        self,
        sock: socket.socket,
        process: subprocess.Popen[bytes] | Forked,
        spec: dict[str, Any],
        pid: int,
        start: int,
    ) -> None:
        """Use :meth:`start`."""
        self.pid = pid
        """The command's own pid, which is also its process group and its session."""
        self.guardian_pid = process.pid
        self.log_path: str = spec["log_path"]
        self.mark: str = spec["mark"]
        self._grace_s: float = spec["grace_s"]
        self._stuck_after_s: float = spec["stuck_after_s"]
        self._sock = sock
        self._process = process
        self._lock = threading.RLock()
        self._inbox = b""
        self._exit: Exit | None = None
        self.not_kept: str | None = None
        """Once it has ended: why some of its output was not kept."""
        self._lost_at: float | None = None
        self._sweep = Sweep(spec, {pid}, start)
        self._log = LogReader(self.log_path)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str | os.PathLike[str],
        log_path: str | os.PathLike[str],
        mark: str,
        deadline_boottime: float | None = None,
        grace_s: float = 15.0,
        orphan_grace_s: float = procfs.ORPHAN_GRACE_S,
        log_head: int = 4 << 20,
        log_tail: int = 1 << 20,
        stuck_after_s: float = 30.0,
        start_timeout_s: float = 30.0,
        group: str | None = None,
        forks: ForkServer | None = None,
    ) -> Child:
        """Start ``argv`` without a shell, in its own session, stdin empty, stdout and stderr together in
        ``log_path``.

        ``env`` is its whole environment (``PATH`` in it finds the program); ``GANGQ_MARK`` is added. SIGKILL
        falls at ``deadline_boottime`` (seconds of :func:`gangq.proc.clock.boottime`; None for never),
        SIGTERM ``grace_s`` before. Should this process die, the command gets SIGTERM and ``orphan_grace_s``
        later SIGKILL. ``log_head`` and ``log_tail`` are the bytes of output kept from its beginning and its
        end. ``group``: the folder of a control group that is made for it, where the host allows that (see
        :func:`gangq.proc.cgroup.home`). ``forks``: a handler, whose task is the last of ``argv``, is forked from
        there in place of executing ``argv``.

        Raises:
            CommandStartError: it cannot run; says whether program, directory, log or host is at fault.
            ValueError: an empty argv, or a mark that this process carries itself.
        """
        _check(argv, mark)
        spec = {
            "argv": list(argv),
            "env": {**env, procfs.MARK_VARIABLE: mark},
            "cwd": os.path.abspath(cwd),
            "log_path": os.path.abspath(log_path),
            "log_head": log_head,
            "log_tail": log_tail,
            "mark": mark,
            "deadline": deadline_boottime,
            "grace_s": grace_s,
            "orphan_grace_s": orphan_grace_s,
            "stuck_after_s": stuck_after_s,
            "worker_pid": os.getpid(),
            "cgroup": group,
        }
        sock, process, answer, rest = launch(spec, start_timeout_s, forks)
        if process is None or answer["event"] != "started":
            sock.close()
            raise start_error(answer, spec)
        if group is not None and answer["cgroup"] is None:
            log.warning("cgroup_refused", extra={"cgroup": group})
        child = cls(sock, process, {**spec, "cgroup": answer["cgroup"]}, answer["pid"], answer["start_ticks"])
        child._inbox = rest
        log.info(
            "command_started",
            extra={"pid": child.pid, "guardian_pid": child.guardian_pid, "mark": child.mark},
        )
        return child

    # -- orders ----------------------------------------------------------------------------------------------

    def set_deadline(self, at: float | None, grace_s: float | None = None) -> None:
        """Move the instant of SIGKILL (seconds on ``CLOCK_BOOTTIME``; None for never); SIGTERM falls a grace
        earlier.

        Once SIGTERM was sent for a deadline, a later deadline does not take that back.
        """
        with self._lock:
            self._grace_s = self._grace_s if grace_s is None else grace_s
            self._send({"op": "deadline", "at": at, "grace_s": self._grace_s})

    def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM to the whole group now, SIGKILL to the whole tree after the grace [the one given at start].

        A repeat sends no second SIGTERM; a shorter grace hastens the SIGKILL, a longer one changes nothing.
        """
        self._send({"op": "stop", "grace_s": self._grace_s if grace_s is None else grace_s})

    def lose(self) -> None:
        """As :meth:`stop` without a grace."""
        self.stop(0.0)

    def kill(self) -> None:
        """SIGKILL to the whole tree now. Returns at once: :meth:`wait` tells when it is gone."""
        self._send({"op": "kill"})

    # -- the end ---------------------------------------------------------------------------------------------

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs. Never waits.

        An ``Exit`` with ``tree_dead`` False is not final: the tree is still being waited for, and once it
        does die (the mount came back, the driver let go) a later call says so.
        """
        with self._lock:
            self._receive()
            return self._exit

    def wait(self, timeout: float | None = None) -> Exit | None:
        """As :meth:`poll`, waiting up to ``timeout`` seconds (None: as long as it takes)."""
        until = None if timeout is None else time.monotonic() + timeout
        while (ended := self.poll()) is None:
            left = 3600.0 if until is None else until - time.monotonic()
            if left <= 0:
                return None
            if self._lost_at is not None:
                time.sleep(min(left, _RECOVERY_PAUSE_S))
                continue
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            poller.poll(left * 1000)
        return ended

    def close(self) -> None:
        """Let go of the channel. A command that still runs is killed first, and waited for, but not for ever: that
        nothing of it is left is known only if :meth:`poll` says so. A repeat is harmless.
        """
        self.kill()
        if self._sock.fileno() >= 0:
            self.wait(self._stuck_after_s + 5)
        with self._lock:
            self._sock.close()
            self._process.poll()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- output ----------------------------------------------------------------------------------------------

    def read_new_output(self, limit: int = 1 << 20) -> bytes:
        """Output that has been logged since the last call, at most ``limit`` bytes of it; empty when there is
        none.

        Beyond the first ``log_head`` bytes nothing comes while the command runs; at its end, a line that says
        how many bytes were dropped and then the last ``log_tail`` ones.
        """
        with self._lock:
            return self._log.read_new(limit)

    def log_tail(self, count: int = 8192) -> bytes:
        """The last ``count`` bytes of output as of now, whether it runs or has ended."""
        return self._log.last(count)

    # -- inside ----------------------------------------------------------------------------------------------

    def _send(self, order: dict[str, object]) -> None:
        with self._lock:
            if self._sock.fileno() < 0:
                return
            try:
                # Short enough to go whole or not at all.
                self._sock.send(json.dumps(order).encode() + b"\n")
            except BlockingIOError:
                log.warning(
                    "guardian_channel_full", extra={"guardian_pid": self.guardian_pid, "order": order["op"]}
                )
            except OSError:
                return  # It has ended; poll() finds out how.
            if self._process.poll() is None:
                # If the guardian was stopped (SIGSTOP), only this makes it read, keep deadlines and see the end.
                self._process.send_signal(signal.SIGCONT)

    def _receive(self) -> None:
        if self._exit is not None and self._exit.tree_dead:
            return
        while self._lost_at is None and self._sock.fileno() >= 0:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lost_at = boottime()
                log.error("guardian_lost", extra={"guardian_pid": self.guardian_pid, "pid": self.pid})
                break
            self._inbox += data
            if self._take_events():
                return
        self._take_events()
        if self._lost_at is not None:
            self._recover(self._lost_at)

    def _take_events(self) -> bool:
        """Process the events received; True after the last one, ``gone``."""
        while b"\n" in self._inbox:
            line, _, self._inbox = self._inbox.partition(b"\n")
            event = json.loads(line)
            if event["event"] == "stuck":
                self._exit = Exit(None, None, False, tuple(event["pids"]), "stuck")
                log.error("command_stuck", extra={"pid": self.pid, "stuck": event["pids"]})
            elif event["event"] == "gone":
                status = event["exit"]
                code, killer = (status, None) if status >= 0 else (None, -status)
                self._finish(Exit(code, killer, True, cause=event["cause"]))
                self.not_kept = event["log_error"]
                if event["log_error"] or event["fault"]:
                    extra = {"pid": self.pid, "log_error": event["log_error"], "fault": event["fault"]}
                    log.error("guardian_trouble", extra=extra)
                return True
        return False

    def _recover(self, since: float) -> None:
        """One pass of the guardian's work after its death: kill what is left of the command, and see whether
        anything is.
        """
        self._process.kill()
        self._process.wait()
        left = self._sweep.once()
        if left is None:
            try:
                bounded_log.unroll(self.log_path)
            except OSError as problem:
                log.error("log_unfinished", extra={"path": self.log_path, "error": str(problem)})
            self._finish(Exit(None, None, True, cause="guardian_lost"))
        elif left and boottime() - since >= self._stuck_after_s:
            self._exit = Exit(None, None, False, tuple(entry.pid for entry in left), "stuck")

    def _finish(self, ended: Exit) -> None:
        self._exit = ended
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            log.error("guardian_still_running", extra={"guardian_pid": self.guardian_pid})
        log.info("command_gone", extra={"pid": self.pid, "exit": ended})


def _check(argv: Sequence[str], mark: str) -> None:
    if not argv:
        raise ValueError("argv is empty: a command needs at least the name of its program")
    if mark == os.environ.get(procfs.MARK_VARIABLE):
        # The guardian kills whatever carries its mark: with ours, it would kill our other children.
        raise ValueError(f"mark {mark!r} is the worker's own: add the command to it, as in {mark + '/1'!r}")
