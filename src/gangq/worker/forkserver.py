"""A process that has imported the App, of which the processes of handlers are forks.

To start Python and import an App takes from half a second to a minute; a fork takes milliseconds. So the first job
that needs a process of its own starts this one, and it and all later ones are forked from it: one process a job, that
ends with it. What a job leaves in memory no other job finds, and nothing has to be cleaned or counted.

A fork copies the thread that forks, no other thread, and a GPU runtime that was initialised before does not work in
it. Where importing the App starts Python threads or opens a GPU, every handler's process is executed afresh
instead, and the worker says so (``handlers_spawned``). Threads of a numerical library do not
count: it handles forks, and starts them anew.

Each fork begins as the guardian of its job (:mod:`gangq.proc.guardian`), and forks once more into the handler. This
process itself runs nothing of a job, has no connection, and ends with its worker, with the incarnation, or after
:data:`IDLE_S` without a job.

The channel is a socket that keeps messages whole. Out, once: that the App is imported, or why there will be no forks.
In: a socket, the guardian's end of its channel. Out: the guardian's pid, with its pidfd.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from gangq import private
from gangq.proc import guardian, killing, procfs
from gangq.worker import child_main

log = logging.getLogger("gangq.worker.forkserver")

IDLE_S = 600.0
_IMPORT_S = 600.0
_ANSWER_S = 30.0
_SLICE_S = 0.2
_END_S = 5.0
_MESSAGE = 4096
_READY = "ready"
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


class Forked:
    """A guardian that is no child of this process. As much of :class:`subprocess.Popen` as is used of one."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """0 when it has ended, however, and None while it runs."""
        return 0 if self._pidfd < 0 or self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """0 when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, within ``timeout`` seconds.
        """
        if self._pidfd >= 0 and not self._ended(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("guardian", timeout or 0)
        return 0

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Send it, unless it has ended."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                return

    def _ended(self, timeout_ms: float | None) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout_ms):
            return False
        os.close(self._pidfd)
        self._pidfd = -1
        return True


class ForkServer:
    """The worker's side of it. Thread-safe."""

    def __init__(self, environ: Mapping[str, str], directory: str, mark: str) -> None:
        """``environ`` is what the App is imported with and ``directory`` where, ``mark`` that of the incarnation."""
        self._environ = dict(environ)
        self._directory = directory
        self._mark = mark
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._target = ""
        self._refused = False

    def warm(self, target: str, given_up: Callable[[], bool]) -> bool:
        """Wait until the App at ``target`` is imported. False where handlers have to be executed instead, or when
        ``given_up()``.
        """
        while not self._lock.acquire(timeout=_SLICE_S):
            if given_up():
                return False
        try:
            if self._refused:
                return False
            if self._process is not None and self._process.poll() is None:
                return True
            self._end()
            self._target = target
            try:
                why = self._begin(given_up)
            except OSError:
                # Its directory was removed, say: what fails to execute the handler says what to do.
                self._end()
                return False
            if why:
                self._end()
            if why and not given_up():
                self._refused = True
                log.warning("handlers_spawned", extra={"reason": why})
            return not why
        finally:
            self._lock.release()

    def fork(self, theirs: socket.socket) -> Forked:
        """A guardian that listens on ``theirs``, forked from the process that has imported the App.

        Raises:
            OSError: there is no such process, or it could not fork.
        """
        with self._lock:
            for again in (True, False):
                try:
                    return self._ask(theirs)
                except (ConnectionResetError, BrokenPipeError):
                    # It may have ended just now, because it was idle.
                    self._end()
                    if not again or self._begin(lambda: False):
                        raise
                except OSError:
                    # The guardian may be there: a second one would take orders from the same channel.
                    self._end()
                    raise
        raise AssertionError

    def close(self) -> None:
        """End it. Guardians and handlers that were forked from it go on."""
        with self._lock:
            self._refused = True
            self._end()

    def _ask(self, theirs: socket.socket) -> Forked:
        if self._channel is None:
            raise ConnectionResetError("the process that has imported the App has ended")
        socket.send_fds(self._channel, [b"fork"], [theirs.fileno()])
        # If it ended before it read that, the kernel says so: ECONNRESET.
        answer, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE, 1)
        if not answer:
            raise OSError("the process that has imported the App ended while it was to fork a guardian")
        if not fds:
            raise OSError(f"no guardian was forked, or it cannot be waited for: {answer.decode()}")
        return Forked(int(answer), fds[0])

    def _begin(self, given_up: Callable[[], bool]) -> str:
        """Start it and wait for the import; empty, or why there is none."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv, env = child_main.program(__name__, str(theirs.fileno()), self._target)
        with theirs:
            self._process = subprocess.Popen(
                argv,
                env={**self._environ, **env, procfs.MARK_VARIABLE: f"{self._mark}/0"},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._channel.settimeout(_SLICE_S)
        until = time.monotonic() + _IMPORT_S
        while True:
            try:
                said = self._channel.recv(_MESSAGE)
                break
            except TimeoutError:
                if given_up():
                    return "given up"
                if time.monotonic() > until:
                    return f"importing {self._target} took longer than {_IMPORT_S:.0f} s"
        self._channel.settimeout(_ANSWER_S)
        if not said:
            return f"importing {self._target} ended the process"
        return said.decode("utf-8", "replace").removeprefix(_READY)

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            killing.end_group(self._process, _END_S)
            self._process = None


def main(argv: list[str]) -> int:
    """Import the App at ``argv[1]`` and fork for the process at the other end of socket ``argv[0]``."""
    control = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(control.fileno(), False)
    child_main.log_to_stderr()
    target = argv[1]
    try:
        app = child_main.find_app(target)
    except Exception as problem:
        log.exception("import_failed", extra={"target": target})
        control.send(f"importing {target} failed: {type(problem).__name__}: {problem}"[:_MESSAGE].encode())
        return 1
    if why := _not_to_be_forked():
        control.send(f"importing {target} {why}".encode())
        return 1
    # The App may ignore it, or this process may have been started so: then no fork could be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kept = _open_files() - {control.fileno()}
    gc.collect()
    gc.freeze()
    shown = private.close(procfs.work_name(os.environ[procfs.MARK_VARIABLE]))
    control.send(_READY.encode())
    try:
        _serve(control)
        return 0
    except guardian.Inside as started:
        spec = started.spec
    # From here on this is the process of a handler.
    for fd in _open_files() - kept - {0, 1, 2}:
        os.close(fd)
    private.reopen(shown)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(spec["env"])
    if "numpy" in sys.modules:
        # As Python itself does with `random`: else all jobs draw the same numbers.
        sys.modules["numpy"].random.seed()
    return child_main.run(lambda: app, spec["argv"][-1])


def _serve(control: socket.socket) -> None:
    """Fork for each socket that arrives, until the worker ends or nothing has happened for long."""
    poller = select.poll()
    parent = os.pidfd_open(os.getppid())
    poller.register(control, select.POLLIN)
    # Beside the channel: a fork of the worker may hold that open after its death.
    poller.register(parent, select.POLLIN)
    children: dict[int, int] = {}
    while True:
        ready = poller.poll(None if children else IDLE_S * 1000)
        if not ready:
            return
        for fd, _ in ready:
            if fd == parent:
                return
            if fd == control.fileno():
                message, fds, _, _ = socket.recv_fds(control, _MESSAGE, 1)
                if not message:
                    return
                if not fds:  # There was no room for it.
                    control.send(os.strerror(errno.EMFILE).encode())
                    continue
                forked = _fork(control, fds[0])
                os.close(fds[0])
                if forked is not None:
                    children.update([forked])
                    poller.register(forked[0], select.POLLIN)
            else:
                os.waitpid(children.pop(fd), 0)
                poller.unregister(fd)
                os.close(fd)


def _fork(control: socket.socket, channel: int) -> tuple[int, int] | None:
    """The guardian's pidfd and pid; None where the host refuses, which is said."""
    try:
        pid = os.fork()
    except OSError as problem:
        control.send(str(problem).encode())
        return None
    if pid == 0:
        control.close()
        try:
            os.setsid()
            os.chdir("/")
            guardian.main(channel, inside=True)
        except Exception:
            log.exception("guardian_fault")
        # Not reached by the handler's process, which goes up by guardian.Inside.
        os._exit(0)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as problem:
        # It has no order yet.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        control.send(str(problem).encode())
        return None
    socket.send_fds(control, [str(pid).encode()], [pidfd])
    return pidfd, pid


def _open_files() -> set[int]:
    """What is open now."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # That of the listing is closed by now.
            os.fstat(int(name))
            found.add(int(name))
    return found


def _not_to_be_forked() -> str:
    """What importing the App has done that no fork survives; empty: nothing."""
    if not hasattr(os, "pidfd_open"):
        return "is not enough: this Python or kernel has no pidfd"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"starts threads ({', '.join(others[:3])}): start them in the handler, and jobs begin faster"
    for fd in _open_files():
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(_GPU_FILES):
            return f"opens {path}: use the GPU first in the handler, and jobs begin faster"
    return ""
