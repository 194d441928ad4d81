"""What ``/proc`` says about processes, and how to kill exactly the ones meant.

Linux only at call time; importing is safe anywhere.

Three traps this module exists for:

* A pid is a number that gets reused. A process is a pid *and* its start time, so every signal is sent through
  a pidfd whose start time was compared after it was opened.
* A zombie is dead work: it holds no memory, no device and no file. ``kill(pid, 0)`` calls it alive.
* A zombie *thread leader* whose other threads run on is not dead work, though its state letter says ``Z``.
"""

from __future__ import annotations

# Not signal, which imports enum: a megabyte for each guardian and supervisor.
import _signal as signal  # type: ignore[import-not-found]
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MARK_VARIABLE = "GANGQ_MARK"
"""Environment variable that a worker puts on everything it starts; children inherit it."""

SUPERVISOR_NAME = "gangq-super"
"""What a supervisor is called; nothing that it starts inherits that name."""
_WORK_NAME = "gangq:"

PAGE = 4096
"""What one read of a file under ``/proc`` gives at most, in bytes."""
EXIT_S = 30.0
"""How long a process may take to exit after SIGKILL before it is given up: it gives its memory back first."""
ORPHAN_GRACE_S = 5.0
"""How long a guardian lets its command run on after SIGTERM when its worker has died."""
LET_END_S = 8.0
"""How long such a command is left to its guardian before any other program kills both: longer than that grace."""
_STUCK_S = 1.0
_LOOK_S = 0.1
_PF_EXITING = 0x4
_CAP_SYS_PTRACE = 1 << 19
_ALL_USERS = ["0", "0", "4294967295"]
_read_bytes = [0]


def read(path: str, most: int = PAGE) -> bytes | None:
    """The first ``most`` bytes of a file under ``/proc``; None where it cannot be read.

    The kernel gives such a file a page at a time. Not open(): each of its calls hands over the GIL, which costs a
    watchdog 5 ms beside a handler that spins.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.read(fd, most)
        while PAGE < most > len(found) and (more := os.read(fd, most - len(found))):
            found += more
        _read_bytes[0] += len(found)
        return found
    except OSError:
        return None
    finally:
        os.close(fd)


def bytes_read() -> int:
    """How many bytes :func:`read` has read in this process: a process that is watched reads them itself."""
    return _read_bytes[0]


def text(path: str, most: int = 2 * PAGE) -> str:
    """The same as text without the blanks around it, empty where it cannot be read."""
    return (read(path, most) or b"").decode("utf-8", "replace").strip()


def words(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone, and for a thread of the kernel."""
    raw = (read(f"/proc/{pid}/cmdline", 1 << 20) or b"").removesuffix(b"\0")
    return [os.fsdecode(word) for word in raw.split(b"\0")] if raw else []


def tids(pid: int) -> list[int]:
    """The ids of its threads, the lowest first; empty when it is gone."""
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []


class Stat:
    """One line of ``/proc/<pid>/stat``: who a process is and whose child, group and session it is in."""

    __slots__ = ("comm", "pgrp", "pid", "ppid", "session", "start_ticks", "state", "threads")

    def __init__(self, raw: bytes) -> None:
        # The name stands in parentheses and may itself hold blanks and parentheses: the last one ends it.
        head, _, rest = raw.rpartition(b")")
        pid, _, comm = head.partition(b"(")
        fields = rest.split()
        self.pid = int(pid)
        self.comm = comm.decode(errors="replace")
        self.state = fields[0].decode()
        self.ppid = int(fields[1])
        self.pgrp = int(fields[2])
        self.session = int(fields[3])
        self.threads = int(fields[17])
        self.start_ticks = int(fields[19])

    @property
    def alive(self) -> bool:
        """Whether any thread of it can still run: a zombie is not alive, a zombie leader with threads is."""
        return self.state not in "ZX" or self.threads > 1

    def __repr__(self) -> str:
        return f"<{self.comm} pid={self.pid} ppid={self.ppid} state={self.state} start={self.start_ticks}>"


def stat(pid: int) -> Stat | None:
    """The process with this pid, zombies included; None where there is none (or ``hidepid`` hides another
    user's).
    """
    raw = read(f"/proc/{pid}/stat")
    return Stat(raw) if raw else None


def stat_fields(path: str) -> list[str]:
    """The fields of a stat file after the name in parentheses, which may hold anything; empty where it is gone."""
    return text(path).rpartition(")")[2].split()


def table() -> dict[int, Stat]:
    """Every process visible in this ``/proc``, zombies included, by pid.

    Not a snapshot: a process that forks and exits while the table is read may leave neither itself nor its
    child in it. For certainty read it twice or, better, be the tree's subreaper and ask the kernel
    for ``ECHILD``.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := stat(int(name))) is not None:
            found[entry.pid] = entry
    return found


def hides() -> bool:
    """Whether this ``/proc`` may hide processes from this one (``hidepid``): those of other users, and those of its
    own user that are closed, as workers are.
    """
    mounts = (line.split() for line in text("/proc/self/mountinfo", 1 << 20).splitlines())
    # Of several mounts on one place the last one is seen.
    given = [fields[-1] for fields in mounts if fields[4:5] == ["/proc"]][-1:]
    options = dict(option.partition("=")[::2] for option in ",".join(given).split(","))
    mode = options.get("hidepid", "0")
    if mode in ("0", "off"):
        return False
    if text("/proc/self/uid_map").split() != _ALL_USERS:
        # What it may do it may do in its user namespace only.
        return True
    if int(status("/proc/self").get("CapEff", "0"), 16) & _CAP_SYS_PTRACE:
        return False
    return mode in ("4", "ptraceable") or int(options.get("gid", "0")) not in (os.getegid(), *os.getgroups())


def descendants(
    processes: dict[int, Stat], roots: set[int], leave_out: Callable[[int], bool] = lambda _: False
) -> set[int]:
    """Pids below any of ``roots`` in this table, without those to leave out and what is below those only. The roots
    themselves are not included unless one is below another.
    """
    children: dict[int, list[int]] = {}
    for entry in processes.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    below: set[int] = set()
    frontier = list(roots)
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            if pid not in below and not leave_out(pid):
                below.add(pid)
                frontier.append(pid)
    return below


def ancestors(processes: dict[int, Stat], pid: int) -> set[int]:
    """Pids above this process in this table, and pid 1, which is above everything even where a chain leads
    past it (a ``docker exec`` has no visible parent).
    """
    above = {1}
    # A parent may have ended while the table was read, and its number be that of a process below by now.
    while (entry := processes.get(pid)) is not None and entry.ppid and entry.ppid not in above:
        pid = entry.ppid
        above.add(pid)
    return above


def mark_of(pid: int) -> str | None:
    """The mark in the environment that process was *started* with, or None.

    Programs that rewrite their title may overwrite it, and one started with a scrubbed environment never had
    it: a mark finds processes, its absence proves nothing alone.

    Raises:
        PermissionError: the environment exists and is not ours to read.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    prefix = MARK_VARIABLE.encode() + b"="
    for entry in raw.split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def work_name(mark: str) -> str:
    """What a worker and the guardians of this mark are called.

    Their environment is closed to other processes of their user, and their name is not. What a handler forks
    inherits it.
    """
    return _WORK_NAME + mark[:8]


def names_work(entry: Stat) -> bool:
    """Whether it is called as workers, guardians and forked handlers are: its name then says whose it is."""
    return entry.comm.startswith(_WORK_NAME)


def carriers(processes: dict[int, Stat], mark: str) -> set[int]:
    """Pids whose environment carries exactly this mark, as far as we may read."""
    found = set()
    for pid in processes:
        try:
            if mark_of(pid) == mark:
                found.add(pid)
        except PermissionError:
            continue
    return found


def send(target: Stat, signum: int) -> bool:
    """Send a signal to that very process; False when it is gone (or its pid belongs to another process by now).

    Raises:
        PermissionError: it exists and belongs to another user.
    """
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        handle = (
            -1
        )  # A kernel before 5.3, or a Python built on its headers: a window of microseconds remains.
    try:
        now = stat(target.pid)
        if now is None or now.start_ticks != target.start_ticks:
            return False
        if handle < 0:
            os.kill(target.pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def strike(targets: list[Stat]) -> list[Stat]:
    """SIGKILL each of them; those still alive just after the pass, which is normal, are returned.

    A process of another user (a ``sudo`` in the command) cannot be killed by us: it stays in the list, so
    that the caller reports it instead of taking it for dead.
    """
    for target in targets:
        try:
            send(target, signal.SIGKILL)
        except PermissionError:
            continue
    return [now for target in targets if (now := same(target)) is not None]


def same(target: Stat) -> Stat | None:
    """The present state of that very process while it is alive, else None."""
    now = stat(target.pid)
    if now is None or now.start_ticks != target.start_ticks or not now.alive:
        return None
    return now


def status(place: str) -> dict[str, str]:
    """The fields of the status file of a process or thread (``/proc/<pid>``, ``/proc/<pid>/task/<tid>``); empty when
    it is gone.
    """
    rows = (line.partition(":") for line in text(f"{place}/status").splitlines())
    return {name: value.strip() for name, _, value in rows}


def user_ids(pid: int) -> set[int]:
    """Its real, effective, saved and file system user ids; empty when it is gone.

    Raises:
        OSError: they cannot be read, which does not say that it is gone.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return {int(word) for line in file if line.startswith(b"Uid:") for word in line.split()[1:]}
    except (FileNotFoundError, ProcessLookupError):
        return set()


def threads(pid: int, most: int = 64) -> list[dict[str, object]]:
    """Where each thread of a process is in the kernel: tid, name, state letter, signals pending (a mask in hex,
    the process's own among them), wait channel and system call.

    None of these files waits for the process: unlike its environment or command line they are not read from
    its memory, which a thread that is stuck in the kernel may have locked.
    """
    found: list[dict[str, object]] = []
    for tid in tids(pid)[:most]:
        place = f"/proc/{pid}/task/{tid}"
        said = status(place)
        if not said:
            continue
        found.append(
            {
                "tid": tid,
                "name": said.get("Name", ""),
                "state": said.get("State", "?")[:1],
                "pending": f"{int(said.get('SigPnd', '0'), 16) | int(said.get('ShdPnd', '0'), 16):x}",
                "wchan": text(f"{place}/wchan"),
                "syscall": text(f"{place}/syscall"),
            }
        )
    return found


def thread_times(pid: int) -> dict[int, tuple[str, int, str]]:
    """State letter, processor time (clock ticks) and the scheduler's own books (they change with every slice of
    processor; empty where the kernel keeps none) of each thread of a process, by thread id.
    """
    found = {}
    for tid in tids(pid):
        fields = stat_fields(f"/proc/{pid}/task/{tid}/stat")
        if fields:
            slices = text(f"/proc/{pid}/task/{tid}/schedstat")
            found[tid] = (fields[0], int(fields[11]) + int(fields[12]), slices)
    return found


def dying(pid: int) -> bool:
    """Whether the end of this process has begun: each of its threads has SIGKILL pending, or is exiting.

    For most that is over at once. To give back hundreds of gigabytes takes longer than a few seconds, and is no
    sign that it will not end; :class:`StuckWatch` tells the two apart.
    """
    found = [_end_of_thread(pid, tid) for tid in tids(pid)]
    ends = [ended for ended, _ in filter(None, found)]
    return bool(ends) and all(ends)


class StuckWatch:
    """Tells what SIGKILL will never end from what is merely exiting, by looking more than once.

    Unkillable is a process of which one thread, its end begun, is in state D (the kernel waits for a driver, a
    mount, the freezer of cgroups v1) at every look for a second. A process that exits is seen running, or for a
    moment in state D: not for a second on end.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[int, int, int], float] = {}

    def stuck(self, targets: list[Stat]) -> list[Stat]:
        """Look once more at these; those that nothing will end. Call it several times a second."""
        now = time.monotonic()
        waiting = {
            (target.pid, target.start_ticks, tid)
            for target in targets
            if same(target) is not None
            for tid in tids(target.pid)
            if _end_of_thread(target.pid, tid) == (True, "D")
        }
        self._since = {thread: self._since.get(thread, now) for thread in waiting}
        pids = {pid for (pid, _, _), since in self._since.items() if now - since >= _STUCK_S}
        return [target for target in targets if target.pid in pids]


def await_end(targets: list[Stat], within_s: float = EXIT_S) -> list[Stat]:
    """Wait while any of these is dying, for ``within_s`` at most; return those among them that are unkillable.

    Returns at once where none is dying.
    """
    until = time.monotonic() + within_s
    looks = StuckWatch()
    while True:
        stuck = looks.stuck(targets)
        named = {target.pid for target in stuck}
        left = [target for target in targets if target.pid not in named and same(target) is not None]
        if not any(dying(target.pid) for target in left) or time.monotonic() >= until:
            return stuck
        time.sleep(_LOOK_S)


def _end_of_thread(pid: int, tid: int) -> tuple[bool, str] | None:
    """Whether the end of this thread has begun, and its state; None when it is gone.

    SIGKILL is not pending where a process ended itself and hangs in that (the kernel drops the signal then).
    """
    place = f"/proc/{pid}/task/{tid}"
    fields, said = stat_fields(f"{place}/stat"), status(place)
    if not fields or "ShdPnd" not in said:
        return None
    pending = int(said["SigPnd"], 16) | int(said["ShdPnd"], 16)
    begun = bool(int(fields[6]) & _PF_EXITING) or bool(pending & 1 << (signal.SIGKILL - 1))
    return begun, fields[0]
