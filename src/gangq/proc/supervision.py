"""What the supervisor does; see :mod:`gangq.proc.supervisor`, the program.

In a file of its own because Python keeps the compiled form of what is imported, and compiles a program itself
every time: that took a megabyte more.
"""

from __future__ import annotations

# Not signal and socket, which import enum: a tenth of all the memory there is for this process.
import _signal as signal  # type: ignore[import-not-found]
import _socket
import ctypes
import os
import select
import sys
import time

from . import (
    cgroup,
    clock,
    death_report,
    kernel,
    liveness_memory,
    oom,
    procfs,
    service_manager,
    silence,
    supervisor_log,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# As in gangq.watchdogs.codes, which this program cannot import; a test compares the two.
FROZEN = 80
MEMORY = 86
UNKILLABLE = 87

SILENCE_S = 30.0
START_S = 600.0

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_SIGINFO_BYTES = 128

_LEAST_TURN_S = 0.02
_STACKS_S = 0.2
_KILL_S = 5.0


class Supervisor:
    """One worker, from its start to the proof that nothing of it is left."""

    def __init__(
        self,
        argv: list[str],
        *,
        silence_s: float,
        start_s: float,
        as_json: bool,
        secrets: bytes = b"{}",
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """``argv``: the worker's command line. ``silence_s`` without a sign of life end it, before the first one
        ``start_s``. ``now`` is the monotonic clock.
        """
        self._now = now
        self._sleep = sleep
        self.argv = argv
        self.secrets = secrets
        self.start_s = start_s
        self.silence_s = silence_s
        self.environ = dict(os.environ)
        self.notifier = service_manager.Notifier(self.environ)
        interval_s = min(1.0, silence_s / 4)
        if self.notifier.watchdog_s is not None:
            interval_s = min(interval_s, self.notifier.watchdog_s / 4)
        self.memory = liveness_memory.Memory.create(interval_s=interval_s, silence_s=silence_s)
        self.log = supervisor_log.Log(as_json)
        self.silence = silence.Silence(start_s, now())
        self.signed_at = 0.0
        """When the worker's last sign of life was given; 0: none yet."""
        self.leaving = False
        self.first_look: silence.Look | None = None
        self.second_look_s = 0.0
        """The silence at which to look again."""
        self.child = 0
        self.status: int | None = None
        """The worker's exit status, or minus the signal that killed it; None: it lives."""
        self.paused_s = 0.0
        """For how long this process itself was stopped."""
        self.frozen_s: float | None = None
        """How long the worker was silent when it was found frozen; None: it ended by itself."""
        self.frozen_at: float | None = None
        """When that was, on the clock of leases."""
        self.out_of_memory = False
        self.killed_at: float | None = None
        self.incarnation = 0
        self.job = (0, 0)
        """Id and token of the job whose handler ran in it."""
        self.threads: list[dict[str, object]] = []
        """Where a frozen worker's threads were in the kernel."""
        self.left: list[procfs.Stat] = []
        """Processes of it that live."""
        self.stuck: list[procfs.Stat] = []
        """Those of them that SIGKILL will never end."""
        self.gone = False
        """Whether nothing of it lives."""
        self.foreign: dict[int, int] = {}
        """Children from before: a shell may have started them and become this program. Not ours to end."""

    # -- the worker ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork, and become the worker in the child."""
        kernel.adopt_orphans()
        # A process may have been started with it ignored: then the kernel reaps its children, and tells it no end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.foreign = _children()
        signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
        self.signals = _signalfd([*_FORWARDED, signal.SIGCHLD])
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        # The worker takes them once it is closed to other processes of its user, as this one is.
        memory = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, self.memory.fd.to_bytes(4, sys.byteorder))
        ours.sendmsg([self.secrets], [memory])
        ours.setblocking(False)
        self.channel = ours.detach()
        # Imports of the worker may take longer than a service manager waits for one to be ready.
        self.notifier.say(f"EXTEND_TIMEOUT_USEC={int(self.start_s * 1e6)}", "STATUS=starting")
        parent = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            self.become(theirs.fileno(), parent)
        # Both processes do this; the second one finds it done.
        _own_group(self.child)
        theirs.close()
        self.oom = oom.OomWatch(cgroup.find("memory", pid=self.child))
        self.poll = select.poll()
        self.poll.register(self.signals, select.POLLIN)
        self.poll.register(self.channel, select.POLLIN)

    def become(self, channel: int, parent: int) -> None:
        """In the forked child of ``parent``: turn into the worker; never return."""
        try:
            # A group of its own: what a terminal sends to the foreground comes through this process, once,
            # and its group can be killed at one instant.
            _own_group(0)
            # From there it cannot read a terminal: an error at once is better than a process that stops.
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)
            kernel.die_with_parent()
            # If the parent died before that line, the kernel sends nothing.
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.set_inheritable(channel, True)
            env = {**self.environ, liveness_memory.VARIABLE: str(channel)}
            os.execve(self.argv[0], self.argv, env)
        except BaseException as problem:
            supervisor_log.offer(2, f"gangq supervisor: cannot start {self.argv[0]!r}: {problem}\n".encode())
        finally:
            os._exit(127)

    def watch(self) -> None:
        """Serve until the worker has died or is found frozen."""
        while self.status is None and self.frozen_s is None:
            # Over the limit it may wait for the second look.
            wait_s = max(self.silence.wait_s(), _LEAST_TURN_S)
            ready = self.poll.poll(wait_s * 1000)
            now = self._now()
            paused_s = self.silence.waited(now, wait_s)
            if paused_s:
                self.paused_s += paused_s
                self.log.say("warning", "supervisor_paused", paused_s=round(paused_s, 1))
            for fd, _ in ready:
                if fd == self.channel:
                    self.read_channel()
                elif fd == self.signals:
                    self.forward_signals()
            self.read_signs(now)
            self.reap()
            if self.status is None and self.signed_at and self.silence.near_limit:
                self.compare_looks()
            elif self.status is None and self.silence.over:
                self.frozen_s = self.silence.silent_s

    def read_channel(self) -> None:
        """Read what the worker sent; at its end, stop polling the channel."""
        try:
            data = os.read(self.channel, 4096)
        except ConnectionResetError:  # It ended before it took its secrets.
            data = b""
        if not data:
            self.poll.unregister(self.channel)
            return
        self.silence.reset()
        if liveness_memory.REGISTERED in data:
            self.notifier.say("READY=1")
        if liveness_memory.LEAVING in data:
            self.leaving = True
            self.silence.limit_s = self.start_s
            self.notifier.status("leaving")

    def read_signs(self, now: float) -> None:
        """Note a sign of life that the worker gave since the last turn."""
        signed_at = self.memory.signed_at
        if signed_at == self.signed_at:
            return
        self.signed_at, self.first_look = signed_at, None
        self.silence.reset(now - signed_at)
        self.notifier.relay(now)
        self.oom.look(now)
        if self.leaving:
            return
        self.silence.limit_s = self.silence_s
        if self.memory.incarnation:
            what = f"running job {self.memory.job_id}" if self.memory.job_id else "serving"
            self.notifier.status(f"incarnation {self.memory.incarnation}, {what}")

    def compare_looks(self) -> None:
        """The worker has been silent for nearly the limit: look at its threads now and again at the limit.

        Silence alone is no freeze. The worker is frozen if no thread has moved between the two looks.
        """
        if self.first_look is None:
            self.first_look = self.look()
            self.second_look_s = self.silence.second_look_s()
            return
        if self.silence.silent_s < self.second_look_s:
            return
        second = self.look()
        if self.memory.signed_at != self.signed_at or self.status is not None:
            return
        why = second.since(self.first_look)
        if why is None:
            self.frozen_s = self.silence.silent_s
            return
        self.log.say("warning", "silent_but_not_frozen", silent_s=round(self.silence.silent_s, 1), reason=why)
        self.first_look = second
        self.second_look_s = self.silence.second_look_s()

    def look(self) -> silence.Look:
        """Where the worker's threads stand. Nothing of it interrupts what the worker does."""
        threads = procfs.thread_times(self.child)
        self.memory.forget_stacks()
        if any(state not in "tT" for state, _, _ in threads.values()):
            self.dump(self._now() + _STACKS_S)
        return silence.Look(self.memory.stacks(), threads)

    def dump(self, until: float, *, go_on: bool = False) -> None:
        """Have the worker's stacks written, as far as that is done by then. With ``go_on`` a stopped process is
        made to go on, and takes the signal first.
        """
        number, thread = self.memory.dump_signal, self.memory.dump_thread
        if number not in signal.valid_signals():  # None yet, or what a job has written there.
            return
        # To a thread of the library: the signal interrupts a system call. In the handler that call might return,
        # which would disturb the job and look like movement.
        tgkill = getattr(kernel.libc, "tgkill", None)
        if go_on or not thread or tgkill is None or tgkill(self.child, thread, number) != 0:
            os.kill(self.child, number)
        if go_on:
            os.kill(self.child, signal.SIGCONT)
        written = -1
        while (left := until - self._now()) > 0 and self.status is None:
            self._sleep(min(left, 0.04))
            self.reap()
            former, written = written, self.memory.stacks_written
            if 0 < written == former:
                return

    def forward_signals(self) -> None:
        """Pass signals on to the worker. SIGCHLD only ends the wait; every turn reaps children."""
        while True:
            try:
                info = os.read(self.signals, _SIGINFO_BYTES)
            except BlockingIOError:
                return
            number = int.from_bytes(info[:4], sys.byteorder)
            if number == signal.SIGCHLD:
                continue
            if number in _STOPPING:
                self.notifier.say("STOPPING=1", "STATUS=told to stop")
            if self.status is None:
                # Not reaped yet, so the pid is still its own.
                os.kill(self.child, number)

    def reap(self) -> None:
        """Reap every child that has died."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            if info.si_pid == self.child:
                # While the zombie keeps the number, the group is its own: kill everything that stayed in it.
                _kill_group(self.child)
                self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            os.waitpid(info.si_pid, 0)

    # -- the end ---------------------------------------------------------------------------------------------

    def end_frozen(self) -> None:
        """Evidence, then SIGKILL for everything."""
        # Before the worker is continued to write its stacks: what it writes to the memory after that is too late.
        self.frozen_at = clock.boottime()
        self.remember()
        self.notifier.status("frozen: being killed")
        until = self._now() + _STACKS_S
        self.threads = procfs.threads(self.child)
        if not self.memory.stacks_written:
            self.dump(until, go_on=True)
        self.kill_all()
        # Not before: writing may block, and nothing may delay the end of a frozen worker.
        self.log.say("error", "frozen", silent_s=round(self.frozen_s or 0.0, 1), job=self.job[0] or None)

    def remember(self) -> None:
        """Remember which incarnation and job are to be reported."""
        self.incarnation = self.memory.incarnation
        self.job = (self.memory.job_id, self.memory.token)

    def kill_all(self) -> None:
        """SIGKILL for the whole tree, the worker first: it starts no more."""
        self.killed_at = self._now()
        if self.status is None:
            _kill_group(self.child)
            os.kill(self.child, signal.SIGKILL)

    def finish(self) -> int:
        """End what is left, report how the worker ended, and return the exit code."""
        if self.frozen_s is None:
            self.remember()
            self.let_end()
        self.sweep()
        code = UNKILLABLE if self.stuck else self.code()
        stacks = self.memory.stacks() if self.code() == FROZEN else b""
        if self.incarnation:
            self.report(code, stacks)
        if stacks:
            supervisor_log.offer(2, b"gangq: the stacks of the frozen worker\n" + stacks)
        if self.stuck:
            self.log.say("critical", "unkillable", pids=[entry.pid for entry in self.stuck])
            self.notifier.status("a process cannot be killed: reboot this host")
        if code and (self.incarnation or self.status != code):
            # A worker that never registered has logged why; that should stay the last line.
            self.log.say("warning", "worker_ended", exit_code=code, status=self.status)
        return code

    def code(self) -> int:
        """The exit code, as far as the worker itself decides it."""
        if self.frozen_s is not None:
            return FROZEN
        if self.status is None or self.status >= 0:
            return self.status or 0
        return MEMORY if self.status == -signal.SIGKILL and self.out_of_memory else 128 - self.status

    def let_end(self) -> None:
        """Give guardians the time that they give their commands; kill everything that has no guardian at once."""
        self.out_of_memory = self.oom.killed()
        until = self._now() + procfs.LET_END_S
        while self._now() < until:
            processes = procfs.table()
            ours = self.tree(processes)
            known = self.memory.guardians
            guardians = {pid for pid in ours if (pid, processes[pid].start_ticks) in known}
            guarded = guardians | procfs.descendants(processes, guardians)
            procfs.strike([processes[pid] for pid in ours - guarded])
            self.reap()
            if not guardians:
                return
            self._sleep(0.05)

    def sweep(self) -> None:
        """SIGKILL until the kernel knows no child of ours any more, for 5 s; 30 s for those who are exiting."""
        if self.killed_at is None:
            self.killed_at = self._now()
        clean, pause, looks = 0, 0.001, procfs.StuckWatch()
        while True:
            self.reap()
            processes = procfs.table()
            self.left = procfs.strike([processes[pid] for pid in self.tree(processes)])
            self.reap()
            # A reading of /proc is no snapshot. With children that are not ours to end, ECHILD never comes: then
            # two clean ones in a row, unless some are hidden.
            clean = 0 if self.left or self.status is None else clean + 1
            self.gone = clean > 0 and (not _has_children() or (clean >= 2 and not procfs.hides()))
            if self.gone:
                self.stuck = []
                return
            passed = self._now() - self.killed_at
            if passed >= _KILL_S / 2:
                # Every thread of them is looked at, which costs: not more often than it takes.
                pause = 0.1
                self.stuck = looks.stuck(self.left)
            given_up = passed >= procfs.EXIT_S or (passed >= _KILL_S and not self.exiting())
            if given_up:
                return
            self._sleep(pause)
            pause = min(pause * 2, 0.05)

    def exiting(self) -> bool:
        """Whether one of those left, not known to be stuck, is exiting."""
        stuck = {entry.pid for entry in self.stuck}
        return any(entry.pid not in stuck and procfs.dying(entry.pid) for entry in self.left)

    def tree(self, processes: dict[int, procfs.Stat]) -> set[int]:
        """Pids of all that is alive and ours."""
        spared = {pid for pid, ticks in self.foreign.items() if _is(processes, pid, ticks)}
        below = procfs.descendants(processes, {os.getpid()})
        # Only the one that the worker has named. What a process says of itself is not trusted.
        server = self.memory.spared_pid
        if server in below and _is(processes, server, self.memory.spared_ticks):
            spared.add(server)
        ours = below - spared - procfs.descendants(processes, spared)
        return {pid for pid in ours if processes[pid].alive}

    def report(self, code: int, stacks: bytes) -> None:
        """Report the end to the database, or leave the report on this host."""
        status = self.status
        self.notifier.status("reporting the death of the worker")
        job, token = self.job
        death_report.send(
            self.log,
            self.environ,
            self.secrets,
            self.memory.record,
            self.incarnation,
            {
                "exit_code": code,
                "status": status,
                "signal": -status if status is not None and status < 0 else None,
                "silent_s": self.frozen_s,
                "paused_s": self.paused_s,
                "out_of_memory": code == MEMORY,
                "job": job,
                "token": token,
                "threads": self.threads,
                "stacks": stacks.decode(errors="replace"),
                "tree_dead": self.gone,
                "left": [_describe(entry) for entry in self.left],
                "stuck": [_describe(entry) for entry in self.stuck],
            },
            self.frozen_at,
        )

    def run(self) -> int:
        """Supervise from start to end; returns the exit code."""
        self.start()
        self.watch()
        if self.frozen_s is not None:
            self.end_frozen()
        self.notifier.say("STOPPING=1")
        return self.finish()


def _describe(entry: procfs.Stat) -> dict[str, object]:
    return {
        "pid": entry.pid,
        "start_ticks": entry.start_ticks,
        "name": entry.comm,
        "threads": procfs.threads(entry.pid),
    }


def _own_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0)
    except OSError:
        return  # Done by the other side already, and it has become the worker; or it is gone.


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # None left, or only those of another user: the sweep finds them.


def _signalfd(numbers: list[int]) -> int:
    """A descriptor from which these (blocked) signals are read: nothing is interrupted, none is lost."""
    mask = (ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong)))()
    mask[0] = sum(1 << (number - 1) for number in numbers)
    fd = int(kernel.libc.signalfd(-1, mask, _SFD_FLAGS))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return fd


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> dict[int, int]:
    """Pid and start time of every child there is."""
    if not _has_children():
        return {}
    me = os.getpid()
    return {entry.pid: entry.start_ticks for entry in procfs.table().values() if entry.ppid == me}


def _is(processes: dict[int, procfs.Stat], pid: int, start_ticks: int) -> bool:
    return pid in processes and processes[pid].start_ticks == start_ticks


def main(argv: list[str]) -> int:
    """Supervise the worker that this command line names."""
    # First of all: from here on no job can look into this process.
    kernel.set_dumpable(0)
    kernel.set_name(procfs.SUPERVISOR_NAME.encode())
    secrets = b"{}"
    options = {"--silence": SILENCE_S, "--start": START_S}
    as_json = False
    while argv and argv[0] != "--":
        name = argv.pop(0)
        if name == "--json":
            as_json = True
        elif name == "--secrets":
            with open(int(argv.pop(0)), "rb", 0) as file:
                secrets = file.read(liveness_memory.SECRETS_MAX)
        elif name in options:
            options[name] = float(argv.pop(0))
        else:
            sys.stderr.write(f"gangq supervisor: unknown option {name!r}\n")
            return 2
    command = argv[1:]
    return Supervisor(
        command,
        silence_s=options["--silence"],
        start_s=options["--start"],
        as_json=as_json,
        secrets=secrets,
    ).run()
