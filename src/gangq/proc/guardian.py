"""The small program between a worker and one command: it ends the command on time and proves that it is gone.

There is one for each command: run as ``python -I -S guardian.py <fd>`` by :class:`gangq.worker.child.Child`, or, for
a handler, forked from the process that has imported its App (:mod:`gangq.worker.forkserver`). The work of a worker
must be dead before its lease ends, also when the worker is frozen by a library that holds the GIL, stopped, or
killed. So that is enforced here, in a process that does nothing else:

* It is a *subreaper*: whatever the command starts and however it detaches (double fork, ``setsid``, closed
  files), it stays below this process, because orphans are handed to their nearest subreaper. When the kernel
  says ``ECHILD``, the tree is dead: no reading of ``/proc`` is as sure.
* Where the host allows it, the command is started in a *control group* of its own, which is ended at one
  instant and removed; it holds on to what detaches also when this process is killed.
* It keeps the *deadline* on a timer of the kernel, on ``CLOCK_BOOTTIME``, which runs on while a machine
  sleeps.
* It sees the worker die (end of file on its channel, or the worker's pidfd: a forked handler may hold the
  channel open) and then stops the command by itself.
* It reads the command's output and writes a bounded log, so a command never blocks on a worker that does not
  read. A thread does that, because a file system may hang and a deadline may not.
* It reports ``gone`` only after the whole tree is. A tree that survives SIGKILL is reported as ``stuck``, and
  waited for.

Both directions of the channel are JSON, a line each. In: first the specification, then any of ``{"op":
"deadline", "at": s, "grace_s": s}``, ``{"op": "stop", "grace_s": s}``, ``{"op": "kill"}``, each repeatable.
Out: ``started`` or ``failed``, perhaps ``stuck``, and last ``gone``.

It must not import gangq and imports little: it is started for every command. Forked for a handler it shares the
memory of that App, and runs nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time

if __name__ == "__main__":
    # Its package is the folder that this file lies in, without gangq above it. Appended, so that nothing beside that
    # folder can ever stand in for a module of the standard library.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from proc.guardian import main as guard  # type: ignore[import-not-found]

    guard(int(sys.argv[1]))
    sys.exit()
from . import bounded_log, cgroup, clock, kernel, killing, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_CHUNK = 1 << 16
_CHUNKS_PER_TURN = 64
_POLL_S = 0.1
_TOO_LATE = "its deadline has passed already"


def _refusal(stage: str, text: str, errno: int | None = 0) -> bytes:
    """Why a command does not start, as a ``failed`` event says it."""
    return json.dumps({"stage": stage, "errno": errno, "text": text}).encode()


class Timer:
    """A kernel timer on ``CLOCK_BOOTTIME``; the timeouts of ``poll`` stand still while a host sleeps."""

    def __init__(self) -> None:
        self.fd: int = kernel.libc.timerfd_create(time.CLOCK_BOOTTIME, _TFD_FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, at: float | None) -> None:
        """Become readable at this instant (seconds), now if it is past, never for None."""
        whole, nanos = (0, 0) if at is None else (int(max(at, 1e-6)), int(max(at, 1e-6) % 1 * 1e9))
        spec = (ctypes.c_long * 4)(0, 0, whole, nanos)
        kernel.libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, spec, None)


class Inside(BaseException):
    """Raised in the process of a handler that is forked, not executed: it leaves the guardian's frames by this."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec


class Guardian:
    """One command from its start to the proof that nothing of it is left."""

    def __init__(self, channel: int, wakeup: int, inside: bool) -> None:
        self.channel = channel
        self.inside = inside
        self.wakeup = wakeup
        self.timer = Timer()
        self.poll = select.poll()
        self.inbox = b""
        self.child = 0
        self.worker = -1
        self.output = -1
        self.writer = threading.Thread(target=self.write_log, daemon=True)
        self.status: int | None = None
        self.cause = "exit"
        self.deadline: float | None = None
        self.grace = 0.0
        self.stop_by: float | None = None
        self.terminated = False
        self.killing = False
        self.reaped = False
        self.left: list[int] = []
        self.cgroup: str | None = None

    # -- talking to the worker -----------------------------------------------------------------------------

    def say(self, event: str, **fields: object) -> None:
        """Send one event. If the worker is dead or does not read, the event is dropped and the guarding goes on."""
        try:
            os.write(self.channel, json.dumps({"event": event, **fields}).encode() + b"\n")
        except OSError:
            return

    def listen(self) -> bool:
        """Read what has arrived; False when the worker closed its end or died."""
        try:
            data = os.read(self.channel, _CHUNK)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self.inbox += data
        return bool(data)

    def next_message(self) -> dict[str, Any] | None:
        """The next whole message received, if any."""
        line, newline, rest = self.inbox.partition(b"\n")
        if not newline:
            return None
        self.inbox = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def carry_out_orders(self) -> None:
        """Carry out every order received. An end that has begun can be made sooner, not taken back."""
        while message := self.next_message():
            op = message["op"]
            if op == "deadline":
                self.deadline, self.grace = message["at"], message["grace_s"]
            elif op == "stop":
                self.stop("stop", clock.boottime() + message["grace_s"])
            elif op == "kill":
                self.begin_kill("kill")

    def read_channel(self) -> None:
        """The channel is readable: orders, or the end of the worker."""
        if not self.listen():
            self.poll.unregister(self.channel)
            self.orphaned()
        self.carry_out_orders()

    # -- the command ---------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Read the specification and exec the command. If that fails, send the reason and return False; also where
        the worker has died before it sent what to run.
        """
        while (spec := self.next_message()) is None:
            if not self.listen():
                return False
        os.set_blocking(self.channel, False)
        self.mark: str = spec["mark"]
        kernel.set_name(procfs.work_name(self.mark).encode())
        self.orphan_grace: float = spec["orphan_grace_s"]
        self.stuck_after: float = spec["stuck_after_s"]
        self.deadline, self.grace = spec["deadline"], spec["grace_s"]
        try:
            self.log = bounded_log.BoundedLog(spec["log_path"], spec["log_head"], spec["log_tail"])
        except OSError as problem:
            self.say("failed", stage="log", errno=problem.errno, text=str(problem))
            return False
        # Beside the channel, because a process forked by the worker may hold the channel open after its
        # death. On an old kernel, or if the worker is dead already, the channel has to say it alone.
        with contextlib.suppress(AttributeError, OSError):
            self.worker = os.pidfd_open(spec["worker_pid"])
            self.poll.register(self.worker, select.POLLIN)
        for fd in (self.channel, self.timer.fd):
            self.poll.register(fd, select.POLLIN)
        self.make_cgroup(spec["cgroup"])
        # Not before the log is open: its file system may have hung for long.
        late = self.deadline is not None and clock.boottime() >= self.deadline
        refusal = _refusal("deadline", _TOO_LATE) if late else self.fork(spec)
        if refusal:
            self.log.finish()
            if self.cgroup is not None:
                cgroup.remove(self.cgroup)
            self.say("failed", **json.loads(refusal))
            return False
        entry = procfs.stat(self.child)
        ticks = entry.start_ticks if entry else 0
        self.say("started", pid=self.child, start_ticks=ticks, cgroup=self.cgroup)
        return True

    def make_cgroup(self, folder: str | None) -> None:
        """Make the command's group. A host that refuses it now has its command without one."""
        if folder is not None:
            with contextlib.suppress(OSError):
                os.mkdir(folder, 0o755)
                self.cgroup = folder

    def fork(self, spec: dict[str, Any]) -> bytes:
        """Start the command; empty when it runs, else the reason it does not, as JSON."""
        self.output, child_end = os.pipe()
        verdict, verdict_end = os.pipe()
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become(spec, child_end, verdict_end, me)
        os.close(child_end)
        os.close(verdict_end)
        os.set_blocking(self.output, False)
        refusal = self.hear(verdict)
        os.close(verdict)
        self.child = pid
        if refusal:
            # Most often it has ended by itself. It may also have become the command at the last moment, and have
            # forked. One that a file system holds cannot be waited for, and executes nothing any more.
            until = clock.boottime() + killing.DEATH_S
            while not self.sweep() and clock.boottime() < until:
                time.sleep(0.001)
        return refusal

    def hear(self, verdict: int) -> bytes:
        """Wait for what the forked child says; empty when it has become the command, else why not, as JSON.

        To look for a directory or a program takes for ever where a file system does not answer. So the wait ends with
        the worker, and at the deadline; what else limits it is the worker, which kills this process.
        """
        self.poll.register(verdict, select.POLLIN)
        self.timer.set(self.deadline)
        refusal = b""
        while True:
            ready = {fd for fd, _ in self.poll.poll()}
            if verdict in ready:
                data = os.read(verdict, _CHUNK)
                refusal += data
                if not data:  # End of file: exec closed it, or the child has said why not and ended.
                    self.poll.unregister(verdict)
                    return refusal
            elif self.timer.fd in ready:
                return _refusal("deadline", _TOO_LATE)
            elif self.worker in ready or not self.listen():
                return _refusal("guardian", "its worker has ended")

    def become(self, spec: dict[str, Any], output: int, verdict: int, guardian: int) -> None:
        """In the forked child: become the command, in a session of its own, or send why not; never return.

        Raises:
            Inside: this process is to run a handler.
        """
        stage = "exec"
        try:
            os.setsid()
            if self.cgroup is not None:
                with contextlib.suppress(OSError):
                    cgroup.enter(self.cgroup)
            for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            # If this guardian gets SIGKILL, the kernel kills the command too.
            kernel.die_with_parent()
            # If the guardian died before that line, the kernel sends nothing.
            if os.getppid() != guardian:
                os._exit(127)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            stage = "cwd"
            os.chdir(spec["cwd"])
            stage = "exec"
            if not self.inside:
                os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
            os.close(verdict)
        except BaseException as problem:
            os.write(verdict, _refusal(stage, str(problem), getattr(problem, "errno", 0)))
            os._exit(127)
        raise Inside(spec)

    # -- watching ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Serve until the command has ended or must be killed."""
        # Not before: the process of a handler would inherit them.
        self.over, self.over_end = os.pipe()
        try:
            self.writer.start()
        except RuntimeError as problem:
            # Read and dropped here: the command neither waits for a reader nor dies of SIGPIPE.
            self.log.error = f"{problem}: its output is dropped"
            self.poll.register(self.output, select.POLLIN)
        self.poll.register(self.wakeup, select.POLLIN)
        self.carry_out_orders()
        self.apply_deadlines()
        while not self.killing:
            # Once the command itself is gone, look now and then whether the rest of its group is too.
            for fd, _ in self.poll.poll(None if self.status is None else _POLL_S * 1000):
                if fd == self.channel:
                    self.read_channel()
                elif fd == self.wakeup:
                    os.read(fd, _CHUNK)
                elif fd == self.worker:
                    self.poll.unregister(fd)
                    self.orphaned()
                elif fd == self.output and not os.read(fd, _CHUNK):
                    self.poll.unregister(fd)
                # The timer needs no answer: apply_deadlines() sets it anew.
            self.reap()
            self.apply_deadlines()

    def apply_deadlines(self) -> None:
        """Stop or kill the command if that is due now, then set the timer for the next such instant."""
        now = clock.boottime()
        if self.deadline is not None and not self.terminated and now >= self.deadline - self.grace:
            self.stop("deadline", self.deadline)
        limits = [at for at in (self.deadline, self.stop_by) if at is not None]
        kill_at = min(limits, default=None)
        if kill_at is not None and now >= kill_at:
            self.begin_kill("deadline" if kill_at == self.deadline else self.cause)
        # A shell dies of SIGTERM at once while the training below it is still saving. So after SIGTERM the grace
        # is for the whole group, not only its leader. Without SIGTERM, what a command leaves behind is killed when
        # the command has ended.
        if self.status is not None and not (self.terminated and self.group_alive()):
            self.killing = True
        if self.deadline is not None and not self.terminated:
            self.timer.set(self.deadline - self.grace)
        else:
            self.timer.set(kill_at)

    def orphaned(self) -> None:
        """The worker is dead, so the deadline will not be renewed and the result not be read: stop the command."""
        self.stop("orphan", clock.boottime() + self.orphan_grace)

    def stop(self, cause: str, kill_at: float) -> None:
        """SIGTERM to the whole group, once; SIGKILL at the earliest instant that was asked for."""
        self.stop_by = kill_at if self.stop_by is None else min(self.stop_by, kill_at)
        if self.terminated or self.status is not None:
            return
        self.terminated, self.cause = True, cause
        self.signal_group(signal.SIGTERM)
        # In a stopped process SIGTERM would stay pending until its SIGKILL.
        self.signal_group(signal.SIGCONT)

    def begin_kill(self, cause: str) -> None:
        """End :meth:`watch`, so that :meth:`finish` kills what is left."""
        if self.status is None and not self.killing:
            self.cause = cause
        self.killing = True

    def signal_group(self, signum: int) -> None:
        """Signal the command's process group; the number is its own until :meth:`sweep` reaps the command."""
        if self.child and not self.reaped:
            try:
                os.killpg(self.child, signum)
            except (ProcessLookupError, PermissionError):
                return  # None left, or only those of another user: the proof at the end finds them.

    def group_alive(self) -> bool:
        """Whether any process of the group is alive."""
        return any(entry.pgrp == self.child and entry.alive for entry in procfs.table().values())

    def write_log(self) -> None:
        """In a thread of its own: move output into the log, until there is no more or :meth:`finish` wants none."""
        poll = select.poll()
        for fd in (self.output, self.over):
            poll.register(fd, select.POLLIN)
        last = False
        try:
            while not last:
                last = self.over in {fd for fd, _ in poll.poll()}
                with contextlib.suppress(BlockingIOError):
                    # Not for ever: a process that is not the command's may have its standard output.
                    for _ in range(_CHUNKS_PER_TURN):
                        if not (data := os.read(self.output, _CHUNK)):
                            last = True
                            break
                        self.log.write(data)
        except Exception as problem:
            self.log.error = repr(problem)
        # After a fault the command would wait for ever to be read.
        os.close(self.output)
        self.log.finish()

    def reap(self) -> None:
        """Reap adopted orphans and note the end of the command. The command itself stays a zombie for now: that keeps
        its pid, and so the number of its process group, from being reused.
        """
        while self.status is None:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return
            if info.si_pid == self.child:
                self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            else:
                os.waitpid(info.si_pid, 0)

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self, fault: str | None = None) -> None:
        """Kill what is left, wait until nothing is left, and only then report ``gone``."""
        since, reported, pause = clock.boottime(), False, 0.001
        while not self.sweep():
            if not reported and clock.boottime() - since >= self.stuck_after:
                reported = True
                self.say("stuck", pids=self.left)
            time.sleep(pause)
            pause = min(pause * 2, 1.0 if reported else 0.05)
        if self.writer.is_alive():
            os.close(self.over_end)
            self.writer.join(self.stuck_after)
        unwritten = "its file system does not answer" if self.writer.is_alive() else self.log.error
        self.say("gone", exit=self.status, cause=self.cause, log_error=unwritten, fault=fault)

    def sweep(self) -> bool:
        """Kill everything of the command once; True when this process has no child any more and the control group
        is empty.
        """
        self.signal_group(signal.SIGKILL)  # All members at one instant: none can escape by forking.
        left = killing.strike_command(
            self.mark, self.cgroup, lambda processes: procfs.descendants(processes, {os.getpid()})
        )
        self.left = [entry.pid for entry in left]
        self.reap()
        if left or self.status is None:
            return False
        # Nothing that /proc showed is alive. A process that was forked while /proc was read became a child of this
        # process when its parent died. So reap all children; only ECHILD proves that none is left.
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return self.cgroup is None or cgroup.remove(self.cgroup)
            if info is None:
                return False
            self.reaped = self.reaped or info.si_pid == self.child


def main(channel: int, *, inside: bool = False) -> None:
    """Guard one command for the process at the other end of this socket. ``inside``: a handler of this very program,
    which is not executed but forked.

    Raises:
        Inside: only in the process of that handler.
    """
    os.set_inheritable(channel, False)
    # A command that could open its guardian's files could send events to the worker.
    kernel.set_dumpable(0)
    kernel.adopt_orphans()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guardian = Guardian(channel, wakeup, inside)
    if not guardian.start():
        return
    fault = None
    try:
        guardian.watch()
    except Exception as problem:
        # A fault here must not leave a command without a guardian: it is killed, and the reason is reported.
        fault = repr(problem)
        guardian.begin_kill("guardian_fault")
    guardian.finish(fault)
