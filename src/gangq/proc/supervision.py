"""What the supervisor does; see :mod:`gangq.proc.supervisor`, the program.

In a file of its own because Python keeps the compiled form of what is imported, and compiles a program itself
every time: that took a megabyte more. It must not import gangq and imports little.
"""

from __future__ import annotations

# Not signal and socket, which import enum: a tenth of all the memory there is for this process.
import _signal as signal  # type: ignore[import-not-found]
import _socket
import ctypes
import errno
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from gangq.proc import cgroup, clock, liveness_memory, oom, procfs, statefile
else:
    import cgroup
    import clock
    import liveness_memory
    import oom
    import procfs
    import statefile

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
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_TURN_S = 0.25
_LEAST_TURN_S = 0.02
_PAUSED_S = 1.0
_STACKS_S = 0.2
_BETWEEN_LOOKS_S = 1.0
_LET_END_S = 8.0
"""For guardians: longer than the grace that they give a command whose worker died (5 s)."""
_KILL_S = 5.0
_REPORT_S = 5.0
_REPORTED_S = 2.0
"""For the death of a worker that has reported its trip itself."""
_LEAST_S = 0.7
"""A fresh Python says nothing in less."""
_WRITE_S = 0.2
_FILE_KIND = 0o170000
_WAITED_FOR = (0o010000, 0o140000)
"""Pipes and sockets: who writes to them may have to wait for ever."""


class Silence:
    """How long the worker has been silent, as far as this process was there to hear it."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self.silent_s = 0.0
        self._at = now

    def reset(self, ago_s: float = 0.0) -> None:
        """A sign of life, given so many seconds ago."""
        self.silent_s = max(0.0, min(ago_s, self.silent_s))

    def second_look_s(self) -> float:
        """The silence at which to look for the second time, having looked just now."""
        return max(self.limit_s, self.silent_s + self._between_s / 2)

    def wait_s(self) -> float:
        """How long to wait for one before looking at the clock again."""
        return max(0.0, min(_TURN_S, self.limit_s - self.silent_s))

    @property
    def _between_s(self) -> float:
        return min(_BETWEEN_LOOKS_S, self.limit_s / 4)

    @property
    def near_limit(self) -> bool:
        """Whether the limit is near: time for the first of two looks."""
        return self.silent_s >= self.limit_s - self._between_s

    def waited(self, now: float, wait_s: float) -> float:
        """Count a wait that was to end after ``wait_s`` seconds; return how long this process was not running.

        A wait that ends much too late means that this process was stopped, or the machine around it: the
        worker may have spoken, and then its word lies in the socket, or have been stopped just as well.
        """
        passed, self._at = now - self._at, now
        paused_s = passed - wait_s if passed > wait_s + _PAUSED_S else 0.0
        self.silent_s += passed - paused_s
        return paused_s

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.silent_s >= self.limit_s


class Look:
    """Where every thread of a worker stood at one instant: in Python, and in the kernel's books."""

    def __init__(self, stacks: bytes, threads: dict[int, tuple[str, int, str]]) -> None:
        """``stacks`` as faulthandler writes them; ``threads`` as :func:`procfs.thread_times` tells them."""
        self.threads = threads
        self.stacks: dict[bytes, bytes] = {}
        for block in stacks.split(b"\n\n"):
            head, _, frames = block.partition(b"\n")
            if b"hread 0x" in head:
                self.stacks[head.partition(b"hread ")[2].split()[0]] = frames.strip()

    def since(self, before: Look) -> str | None:
        """Why this is no frozen interpreter, two looks having been taken; None: it is one."""
        for thread, frames in self.stacks.items():
            if before.stacks.get(thread, frames) != frames:
                return f"thread {thread.decode()} went on"
        # Not one slice: who waits for the GIL wants the processor at many looks, and is given it every time.
        if any(now[0] == "R" and now == before.threads.get(tid) for tid, now in self.threads.items()):
            return "it wants the processor and was given none"
        return None


class Notifier:
    """What a service manager is told, if there is one; see sd_notify(3)."""

    def __init__(self, environ: dict[str, str]) -> None:
        """Takes what is meant for the main process of a unit out of ``environ``: a worker does not speak for
        it.
        """
        self._socket: _socket.socket | None = None
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", "")
        self.watchdog_s: float | None = None
        """A sign of life is due that often; None: the service manager does not ask for any."""
        if usec.isdigit() and int(usec) > 0 and pid in ("", str(os.getpid())):
            self.watchdog_s = int(usec) / 1e6
        self._beat_at = 0.0
        self._status = ""
        if address:
            self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def say(self, *lines: str) -> None:
        """Send these assignments. A service manager that does not listen is no reason to end a worker."""
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def relay(self, now: float) -> None:
        """The worker gave a sign of life: pass it on, as often as is asked for."""
        if self.watchdog_s is not None and now - self._beat_at >= self.watchdog_s / 4:
            self._beat_at = now
            self.say("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What people see in ``systemctl status``."""
        if text != self._status:
            self._status = text
            self.say(f"STATUS={text}")


class Supervisor:
    """One worker, from its start to the proof that nothing of it is left."""

    def __init__(
        self, argv: list[str], *, silence_s: float, start_s: float, as_json: bool, secrets: bytes = b"{}"
    ) -> None:
        self.argv = argv
        self.secrets = secrets
        self.start_s = start_s
        self.silence_s = silence_s
        self.as_json = as_json
        self.environ = dict(os.environ)
        self.notifier = Notifier(self.environ)
        self.libc = ctypes.CDLL(None, use_errno=True)
        interval_s = min(1.0, silence_s / 4)
        if self.notifier.watchdog_s is not None:
            interval_s = min(interval_s, self.notifier.watchdog_s / 4)
        self.memory = liveness_memory.Memory.create(interval_s=interval_s, silence_s=silence_s)
        self.silence = Silence(start_s, time.monotonic())
        self.alive = False
        self.signed_at = 0.0
        """When the worker's last sign of life was given."""
        self.leaving = False
        self.first_look: Look | None = None
        self.second_look_s = 0.0
        """The silence at which to look again."""
        self.child = 0
        self.status: int | None = None
        """The worker's exit status, or minus the signal that killed it; None: it lives."""
        self.frozen_s: float | None = None
        self.verdict_at = 0.0
        self.oomed = False
        self.paused_s = 0.0
        self.killed_at: float | None = None
        self.threads: list[dict[str, object]] = []
        self.incarnation = 0
        self.job = (0, 0)
        self.left: list[procfs.Stat] = []
        self.stuck: list[procfs.Stat] = []
        """Those of them that SIGKILL will never end."""
        self.foreign: dict[int, int] = {}
        """Children from before: a shell may have started them and become this program. Not ours to end."""

    # -- the worker ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fork, and become the worker in the child."""
        self.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.foreign = _children()
        signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
        self.signals = _signalfd(self.libc, [*_FORWARDED, signal.SIGCHLD])
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
        # In both: whoever comes second finds it done.
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
            self.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # A parent that died before that line sends nothing any more.
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.set_inheritable(channel, True)
            env = {**self.environ, liveness_memory.VARIABLE: str(channel)}
            os.execve(self.argv[0], self.argv, env)
        except BaseException as problem:
            _offer(2, f"gangq supervisor: cannot start {self.argv[0]!r}: {problem}\n".encode())
        finally:
            os._exit(127)

    def watch(self) -> None:
        """Serve until the worker has died or is found frozen."""
        while self.status is None and self.frozen_s is None:
            # Over the limit it may wait for the second look.
            wait_s = max(self.silence.wait_s(), _LEAST_TURN_S)
            ready = self.poll.poll(wait_s * 1000)
            now = time.monotonic()
            paused_s = self.silence.waited(now, wait_s)
            if paused_s:
                self.paused_s += paused_s
                self.say("warning", "supervisor_paused", paused_s=round(paused_s, 1))
            for fd, _ in ready:
                if fd == self.channel:
                    self.read_channel()
                elif fd == self.signals:
                    self.forward_signals()
            self.read_signs(now)
            self.reap()
            if self.status is None and self.alive and self.silence.near_limit:
                self.compare_looks()
            elif self.status is None and self.silence.over:
                self.frozen_s = self.silence.silent_s

    def read_channel(self) -> None:
        """What wakes this process, or the end of whoever could."""
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
        """Take note of a sign of life that was given since the last turn."""
        signed_at = self.memory.signed_at
        if signed_at == self.signed_at:
            return
        self.signed_at, self.alive, self.first_look = signed_at, True, None
        self.silence.reset(now - signed_at)
        self.notifier.relay(now)
        self.oom.look(now)
        if self.leaving:
            return
        self.silence.limit_s = self.silence_s
        if self.memory.incarnation:
            job, _ = self.memory.job
            what = f"running job {job}" if job else "serving"
            self.notifier.status(f"incarnation {self.memory.incarnation}, {what}")

    def compare_looks(self) -> None:
        """The worker has been silent for nearly the limit: look at it now and at the limit. Signs that were missed
        are no freeze: it is frozen when it stands at the second look where it stood at the first.
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
        self.say("warning", "silent_but_not_frozen", silent_s=round(self.silence.silent_s, 1), reason=why)
        self.first_look = second
        self.second_look_s = self.silence.second_look_s()

    def look(self) -> Look:
        """Where the worker's threads stand. Nothing of it interrupts what the worker does."""
        threads = procfs.thread_times(self.child)
        if any(state not in "tT" for state, _, _ in threads.values()):
            self.memory.forget_stacks()
            self.dump(time.monotonic() + _STACKS_S)
        return Look(self.memory.stacks(), threads)

    def dump(self, until: float, *, go_on: bool = False) -> None:
        """Have the worker's stacks written, as far as that is done by then. With ``go_on`` a stopped process is
        made to go on, and takes the signal first.
        """
        number, thread = self.memory.dump_signal, self.memory.dump_thread
        if not number:
            return
        # To a thread of the library: a system call of the handler that is interrupted may return, which would be a
        # disturbance, and would look like life.
        tgkill = getattr(self.libc, "tgkill", None)
        if go_on or not thread or tgkill is None or tgkill(self.child, thread, number) != 0:
            os.kill(self.child, number)
        if go_on:
            os.kill(self.child, signal.SIGCONT)
        written = -1
        while (left := until - time.monotonic()) > 0 and self.status is None:
            time.sleep(min(left, 0.04))
            self.reap()
            former, written = written, self.memory.stacks_written
            if 0 < written == former:
                return

    def forward_signals(self) -> None:
        """Pass signals on. The death of a child is looked for after every turn anyway."""
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
        """Bury whoever has died."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            if info.si_pid == self.child:
                # While the zombie holds the number, the group is its own: whoever stayed in it goes at once.
                _kill_group(self.child)
                self.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            os.waitpid(info.si_pid, 0)

    # -- the end ---------------------------------------------------------------------------------------------

    def end_frozen(self) -> None:
        """Evidence, then SIGKILL for everything."""
        # Before it is made to go on: what it writes now is written by a worker that is already judged.
        self.verdict_at = clock.boottime()
        self.remember()
        self.notifier.status("frozen: being killed")
        until = time.monotonic() + _STACKS_S
        self.threads = procfs.threads(self.child)
        if not self.memory.stacks_written:
            self.dump(until, go_on=True)
        self.kill_all()
        # Not before: nothing that is written may stand between a frozen worker and its end.
        self.say("error", "frozen", silent_s=round(self.frozen_s or 0.0, 1), job=self.job[0] or None)

    def remember(self) -> None:
        """Whom and what to report."""
        self.incarnation, self.job = self.memory.incarnation, self.memory.job

    def kill_all(self) -> None:
        """SIGKILL for the whole tree, the worker first: it starts no more."""
        self.killed_at = time.monotonic()
        if self.status is None:
            _kill_group(self.child)
            os.kill(self.child, signal.SIGKILL)

    def finish(self) -> int:
        """End what is left, say how it ended, and return the exit code."""
        if self.frozen_s is None:
            self.remember()
            self.let_end()
        self.sweep()
        code = UNKILLABLE if self.stuck else self.code()
        stacks = self.memory.stacks() if self.code() == FROZEN else b""
        if self.incarnation:
            self.report(code, stacks)
        if stacks:
            _offer(2, b"gangq: the stacks of the frozen worker\n" + stacks)
        if self.stuck:
            self.say("critical", "unkillable", pids=[entry.pid for entry in self.stuck])
            self.notifier.status("a process cannot be killed: reboot this host")
        if code and (self.incarnation or self.status != code):
            # A worker that never began has said itself why, and that should be the last line.
            self.say("warning", "worker_ended", exit_code=code, status=self.status)
        return code

    def code(self) -> int:
        """The exit code, as far as the worker itself decides it."""
        if self.frozen_s is not None:
            return FROZEN
        if self.status is None or self.status >= 0:
            return self.status or 0
        return MEMORY if self.status == -signal.SIGKILL and self.oomed else 128 - self.status

    def let_end(self) -> None:
        """Give guardians the time they give to their commands; what nobody guards ends at once."""
        self.oomed = self.oom.killed()
        until = clock.boottime() + _LET_END_S
        while clock.boottime() < until:
            processes = procfs.table()
            ours = self.tree(processes)
            known = self.memory.guardians
            guardians = {pid for pid in ours if (pid, processes[pid].start_ticks) in known}
            guarded = guardians | procfs.descendants(processes, guardians)
            procfs.strike([processes[pid] for pid in ours - guarded])
            self.reap()
            if not guardians:
                return
            time.sleep(0.05)

    def sweep(self) -> None:
        """SIGKILL until the kernel knows no child of ours any more, for 5 s; 30 s for those who are exiting."""
        self.killed_at = self.killed_at or time.monotonic()
        clean, pause, looks = 0, 0.001, procfs.Dying()
        while True:
            self.reap()
            processes = procfs.table()
            self.left = procfs.strike([processes[pid] for pid in self.tree(processes)])
            self.reap()
            if not self.left and self.status is not None:
                # A reading of /proc is no snapshot. With children that are not ours to end, ECHILD never
                # comes: then two clean ones in a row.
                clean += 1
                if clean >= 2 or not _has_children():
                    self.stuck = []
                    return
            else:
                clean = 0
            passed = time.monotonic() - self.killed_at
            if passed >= _KILL_S / 2:
                # Every thread of them is looked at, which costs: not more often than it takes.
                pause = 0.1
                self.stuck = looks.stuck(self.left)
            if passed >= _KILL_S:
                named = {entry.pid for entry in self.stuck}
                exiting = any(entry.pid not in named and procfs.dying(entry.pid) for entry in self.left)
                if not exiting or passed >= procfs.EXIT_S:
                    return
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    def tree(self, processes: dict[int, procfs.Stat]) -> set[int]:
        """Pids of all that is alive and ours."""
        spared = {pid for pid, ticks in self.foreign.items() if _is(processes, pid, ticks)}
        below = procfs.descendants(processes, {os.getpid()})
        # Only what the worker has named: what a process says of itself is believed by nobody.
        server, ticks = self.memory.spared
        if server in below and _is(processes, server, ticks):
            spared.add(server)
        ours = below - spared - procfs.descendants(processes, spared)
        return {pid for pid in ours if processes[pid].alive}

    # -- saying it -------------------------------------------------------------------------------------------

    def report(self, code: int, stacks: bytes) -> None:
        """Have a fresh process tell the database, until 5 s after the verdict. What it cannot tell stays on this
        host: the next start, the bouncer or report-death tells it.
        """
        import json

        job, token = self.job
        facts = {
            "exit_code": code,
            "status": self.status,
            "signal": -self.status if self.status is not None and self.status < 0 else None,
            "silent_s": self.frozen_s,
            "paused_s": self.paused_s,
            "out_of_memory": code == MEMORY,
            "job": job,
            "token": token,
            "threads": self.threads,
            "stacks": stacks.decode(errors="replace"),
            "stuck": [_describe(entry) for entry in self.stuck],
            "left": [_describe(entry) for entry in self.left],
            "tree_dead": not self.left and self.status is not None,
        }
        directory = json.loads(self.memory.record).get("directory") or ""
        trip = self.kept_trip(directory)
        reported = bool(trip.get("reported"))
        if not reported and directory:
            try:
                kept = json.dumps({**facts, "incarnation": self.incarnation}).encode()
                statefile.write(directory, statefile.DEATH, kept)
            except OSError as problem:
                self.say("warning", "death_not_kept", error=str(problem))
        left = self.left_s(trip.get("until"), reported)
        if left < _LEAST_S:
            self.say("warning", "report_skipped", advice="the next start of this worker tells it")
            return
        said = {"record": self.memory.record, "secrets": self.secrets, "facts": json.dumps(facts).encode()}
        words = b"{" + b", ".join(b'"%s": %s' % (key.encode(), value) for key, value in said.items()) + b"}"
        self.notifier.status("reporting the death of the worker")
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            status = _run_report(root, words, self.environ, left)
        except OSError as problem:
            self.say("error", "reporter_not_started", error=str(problem))
            return
        if status != 0:
            self.say(
                "error",
                "death_not_reported",
                exit_code=status,
                advice="the next start of this worker tells it",
            )

    def kept_trip(self, directory: str) -> dict[str, object]:
        """The trip that the worker began to tell; empty: it began none."""
        import json

        raw = statefile.read(directory, statefile.TRIP, uid=os.getuid(), most=statefile.REPORT_BYTES)
        try:
            trip = json.loads(raw or b"{}")
        except ValueError:
            return {}
        ours = isinstance(trip, dict) and trip.get("incarnation") == self.incarnation
        return trip if ours else {}

    def left_s(self, until: object, reported: bool) -> float:
        """For how long to report: worker and supervisor have one deadline together."""
        now = clock.boottime()
        if self.stuck:
            return _REPORT_S
        if self.frozen_s is not None:
            until = self.verdict_at + _REPORT_S
        left = min(_REPORT_S, until - now) if isinstance(until, (int, float)) else _REPORT_S
        # That it is gone is known in a moment without this.
        return min(left, _REPORTED_S) if reported else left

    def say(self, level: str, event: str, **fields: object) -> None:
        """One line of the log, in the form that the worker's have."""
        import json

        at = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        if self.as_json:
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
        _offer(1 if self.as_json else 2, line.encode() + b"\n")

    def run(self) -> int:
        """All of it; returns the exit code."""
        self.start()
        self.watch()
        if self.frozen_s is not None:
            self.end_frozen()
        self.notifier.say("STOPPING=1")
        return self.finish()


def _offer(fd: int, data: bytes) -> None:
    """Write as much of this as is taken within 0.2 s. A full pipe that nobody reads must not keep a supervisor
    from ending.
    """
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


def _own_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0)
    except OSError:
        return  # Done by the other side already, and it has become the worker; or it is gone.


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # Nobody left, or none but another user's: the sweep sees what remains.


def _signalfd(libc: ctypes.CDLL, numbers: list[int]) -> int:
    """A descriptor from which these (blocked) signals are read: nothing is interrupted, none is lost."""
    mask = (ctypes.c_ulong * (128 // ctypes.sizeof(ctypes.c_ulong)))()
    mask[0] = sum(1 << (number - 1) for number in numbers)
    fd = int(libc.signalfd(-1, mask, _SFD_FLAGS))
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


def _describe(entry: procfs.Stat) -> dict[str, object]:
    return {
        "pid": entry.pid,
        "start_ticks": entry.start_ticks,
        "name": entry.comm,
        "threads": procfs.threads(entry.pid),
    }


def _run_report(root: str, words: bytes, environ: dict[str, str], for_s: float) -> int | None:
    """Run the reporter on these words for so long; its exit status, minus the signal that ended it, None: too
    late.
    """
    import subprocess

    # The program is this package and no neighbour of the working directory that happens to bear a module's
    # name; that directory itself stays, because the address of a database may name files relative to it.
    program = (
        "import sys; sys.path[:] = [sys.argv[1]] + [place for place in sys.path if place]; "
        "from gangq import private; private.close(); from gangq.worker.report import main; main()"
    )
    # Not a pipe: until it is closed, other processes of its user could open that and read the secrets.
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    # Not the signals that this process has blocked: it could not even be interrupted.
    reporter = subprocess.Popen(
        [sys.executable, "-c", program, root],
        stdin=theirs.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
    )
    theirs.close()
    reporter.stdin = os.fdopen(ours.detach(), "wb", 0)
    # Not to our own standard error: who writes to a pipe that nobody reads does not get to report.
    try:
        said, _ = reporter.communicate(words, timeout=for_s)
    except subprocess.TimeoutExpired as late:
        reporter.kill()
        _offer(2, late.output or b"")
        return None
    _offer(2, said)
    return reporter.returncode


def main(argv: list[str]) -> int:
    """Supervise the worker that this command line names."""
    # First of all: from here on no job can look into this process.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, procfs.SUPERVISOR_NAME.encode(), 0, 0, 0)
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
