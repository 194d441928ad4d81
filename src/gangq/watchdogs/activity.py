"""Whether the host side of a job moves: what its threads and children read, write, map, wait for and hold.

No counter is enough alone: a staged read, O_DIRECT, a mapping, a growing heap and a download each leave a different
one of them unchanged. The CPU time of the process that drives the device does not count, because a thread that spins
uselessly uses all of it. The CPU time of the processes below it does: they prepare its data.

A job that only waits is neither moving nor silent (:attr:`Movement.waits`): it sleeps, polls in a loop, or waits for
a lock that another program holds. Such a wait may be legitimate, so it gets more time than silence.

Counters are kept absolute and compared pair by pair (:func:`movement`), so that a window is judged over all of
its length and not by its end points.

Two kinds of threads would make a hung job look alive, so their counters are subtracted:

* The library's own threads (heartbeat, lease, listener), in the process that runs the handler. Beside a handler that
  spins, each wake-up of such a thread also makes the spinning thread hand over the GIL. The kernel counts that as two
  waits of the spinning thread, so these are subtracted as well.
* Threads that wait for the GIL while another thread keeps it. They wake every 5 ms to ask again, which is 200 waits a
  second, as many as a fast download makes. They are told apart by what they wait in: a futex, not a socket.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gangq.proc import procfs
from gangq.proc.clock import boottime
from gangq.watchdogs.counters import (
    Counters,
    Wait,
    driver_threads,
    library_threads,
    own_counters,
    process_counters,
    thread_counters,
    with_main_thread,
)
from gangq.watchdogs.family import Family

_MB = 1_000_000

# What moves, per 2 s: more than so much. Scaled to the interval, which never counts as less than a quarter
# second: below that, one stray wake-up would be movement.
_PER_S = 2.0
_LEAST_S = 0.25
IO_BYTES = 2 * _MB
MEMORY_BYTES = 16 * _MB
FAULTS = 200
SWITCHES = 20

_BUSY_CPU = 0.02
_CHILD_CPU = 0.05
"""Cores that processes below the one with the device need to use to count as work."""
_LOCKS_BYTES = 1 << 22
"""Of /proc/locks, 60 bytes a lock: a database on the host has thousands."""
_GIL_WAITS_PER_S = (50.0, 260.0)
_NOTHING = Counters(io_bytes=0)


@dataclass(frozen=True)
class HostSample:
    """The counters of a job's processes at one instant (boottime seconds), by pid and start time.

    ``library`` are the library's own threads inside the first of them, and a driver's, to be taken off. ``own`` is
    this process among them, ``drivers`` those that may drive a device (None: each of them may), ``locked`` those that
    wait for the lock on a file that a living process outside the job holds. ``unknown`` says why no trip may rest on
    this sample; None where everything could be read.
    """

    at: float
    processes: Mapping[tuple[int, int], Counters] = field(default_factory=dict)
    library: Mapping[int, Counters] = field(default_factory=dict)
    own: tuple[int, int] | None = None
    drivers: frozenset[tuple[int, int]] | None = None
    locked: frozenset[int] = frozenset()
    unknown: str | None = None


@dataclass(frozen=True)
class Movement:
    """What happened between two samples: ``moved`` None means that it cannot be known.

    ``cpu_share`` is in cores, and that of the process with the device never counts as movement, but tells a
    computation from a wait. ``waits`` names a wait that may be legitimate; it counts where nothing moved.
    """

    moved: bool | None
    why: str
    interval_s: float
    io_bytes: int
    faults: int
    switches: int
    memory_bytes: int
    cpu_share: float
    child_share: float = 0.0
    waits: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for evidence, numbers rounded."""
        return {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def movement(before: HostSample, after: HostSample) -> Movement:
    """Compare two samples of the same job. A process that came in between counts with all it has done."""
    interval = after.at - before.at
    unknown = before.unknown or after.unknown
    io = faults = switches = 0
    cpu = child_cpu = 0.0
    for key, now in after.processes.items():
        then = before.processes.get(key, _NOTHING)
        if now.io_bytes is None or then.io_bytes is None:
            unknown = unknown or f"the I/O of process {key[0]} cannot be read"
        else:
            io += now.io_bytes - then.io_bytes
        faults += now.faults - then.faults
        cpu += now.cpu_s - then.cpu_s
        if after.drivers is not None and key not in after.drivers:
            child_cpu += now.cpu_s - then.cpu_s
        switches += _waits(then, now, interval, key[0] if key == after.own else None)
    for tid, now in after.library.items():
        then = before.library.get(tid, _NOTHING)
        io -= (now.io_bytes or 0) - (then.io_bytes or 0)
        faults -= now.faults - then.faults
        cpu -= now.cpu_s - then.cpu_s
    switches -= _library_waits(before, after, busy=cpu > _BUSY_CPU * interval)
    memory = _held(after) - _held(before)
    found = _signs_of_work(interval, io, memory, faults, switches, child_cpu)
    moved: bool | None = True
    why = "; ".join(found)
    if not found:
        moved, why = (False, "nothing moved") if unknown is None else (None, unknown)
    return Movement(
        moved,
        why,
        interval,
        max(0, io),
        max(0, faults),
        max(0, switches),
        memory,
        max(0.0, cpu) / max(interval, 1e-3),
        max(0.0, child_cpu) / max(interval, 1e-3),
        _waiting_for(before, after),
    )


def _library_waits(before: HostSample, after: HostSample, *, busy: bool) -> int:
    """The voluntary waits that the library's own threads cause. `busy`: the job's threads used the processor."""
    own = sum(
        now.switches.get(0, 0) - before.library.get(tid, _NOTHING).switches.get(0, 0)
        for tid, now in after.library.items()
    )
    # Each of them may have made a busy thread hand over the GIL. That thread then waits twice: until the other one
    # has taken the GIL, and until it is free again.
    return 3 * own if busy else own


def _signs_of_work(
    interval: float, io: int, memory: int, faults: int, switches: int, child_cpu: float
) -> list[str]:
    """Name each amount that is more than a job that only waits would reach in this interval."""
    scale = max(interval, _LEAST_S) / _PER_S
    found = [
        f"{what} {amount}"
        for what, amount, limit in (
            ("bytes read or written:", io, IO_BYTES),
            ("bytes of memory gained or lost:", abs(memory), MEMORY_BYTES),
            ("page faults:", faults, FAULTS),
            ("voluntary waits:", switches, SWITCHES),
        )
        if amount > limit * scale
    ]
    if child_cpu > _CHILD_CPU * max(interval, _LEAST_S):
        found.append(f"processor time of child processes: {child_cpu:.2f} s")
    return found


def _waiting_for(before: HostSample, after: HostSample) -> str | None:
    """A wait between two samples that may be legitimate; None: none was seen."""
    for pid in before.locked & after.locked:
        return f"process {pid} waits for a lock that another program holds"
    for key, now in after.processes.items():
        then = before.processes.get(key)
        if then is None:
            return f"process {key[0]} was started"
        main = key[0]
        waits = {tid: count - then.switches.get(tid, 0) for tid, count in now.switches.items()}
        if any(_asks_for_gil(tid, more, then, now, after.at - before.at) for tid, more in waits.items()):
            # One of its threads cannot get the GIL, so its main thread holds it, whatever that waits in.
            continue
        seen = _seen(main, then, now)
        if seen == [Wait.SLEEP, Wait.SLEEP] and waits.get(main) == 0:
            return f"process {main} sleeps"
        # Not in this process: there PythonSteps knows whether the main thread returned from its call. A call into C
        # that polls for ever looks the same from outside.
        if key != after.own and waits.get(main) and (Wait.SLEEP in seen or Wait.DATA in seen):
            return f"process {main} waits again and again"
    return None


def _held(sample: HostSample) -> int:
    return sum(process.memory_bytes for process in sample.processes.values())


def _waits(then: Counters, now: Counters, interval: float, own_main: int | None) -> int:
    """Voluntary waits that show work: not those for the GIL, nor a thread that only sleeps; of this process's main
    thread only those for data, because handing over the GIL is a wait as well.
    """
    waits = 0
    for tid, count in now.switches.items():
        more = count - then.switches.get(tid, 0)
        seen = _seen(tid, then, now)
        in_vain = Wait.SLEEP in seen or tid == own_main or _asks_for_gil(tid, more, then, now, interval)
        if Wait.DATA in seen or not in_vain:
            waits += more
    return waits


def _asks_for_gil(tid: int, waits: int, then: Counters, now: Counters, interval: float) -> bool:
    """Whether it waits as often as a thread that wants the GIL, and was seen to wait for a lock and not for data."""
    least, most = (rate * interval for rate in _GIL_WAITS_PER_S)
    seen = _seen(tid, then, now)
    return least <= waits <= most and Wait.LOCK in seen and Wait.DATA not in seen


def _seen(tid: int, then: Counters, now: Counters) -> list[Wait]:
    """What a thread was seen to wait in at the two looks."""
    return [found.waits[tid] for found in (then, now) if tid in found.waits]


class HostActivity:
    """Reads the counters of one job's processes. Safe to share between threads.

    ``pids`` names the roots of what is watched: they and everything below them count. With ``own`` this
    process is one of them, without the library's own threads (names that begin with ``gangq-`` or ``pool-``,
    and the thread that samples). ``ignored`` names pids, and what is below them, that are not the job's.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]] | None = None,
        *,
        own: bool = False,
        ignored: Callable[[], Iterable[int]] | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self._pids = pids
        self._own = own
        self._ignored = ignored
        self._clock = clock
        self._family = Family()

    def pids(self) -> list[int]:
        """The processes that count now."""
        roots = set(self._pids()) if self._pids is not None else set()
        ignored = set(self._ignored()) if self._ignored is not None else set()
        if self._own:
            roots.add(os.getpid())
        return self._family.members(roots, ignored, self._clock())

    def sample(self) -> HostSample:
        """Read them all, once. Never raises: what cannot be read makes the sample unknown."""
        try:
            pids = self.pids()
        except OSError as problem:
            return HostSample(self._clock(), unknown=f"/proc cannot be read: {problem}")
        me = os.getpid()
        own = self._own and me in pids
        processes: dict[tuple[int, int], Counters] = {}
        library: dict[int, Counters] = {}
        at = self._clock()
        if own:
            # Read the waits of this thread and of the process at one instant: beside a handler that spins, each file
            # read below adds one to both, and these must cancel out.
            mine = own_counters(thread=True)
            processes[me, 0] = with_main_thread(own_counters())
            library = {
                tid: counters
                for tid in [*library_threads(), *driver_threads(me)]
                if (counters := thread_counters(me, tid)) is not None
            }
            tid = threading.get_native_id()
            library[tid] = replace(mine, io_bytes=library[tid].io_bytes if tid in library else None)
        for pid in pids:
            if not (own and pid == me) and (found := process_counters(pid)) is not None:
                processes[pid, found[0]] = found[1]
        unknown = None if processes else "none of its processes is visible"
        drivers = frozenset({(me, 0)}) if own else self._family.drivers(processes)
        return HostSample(
            at, processes, library, (me, 0) if own else None, drivers, _locked(set(pids)), unknown
        )


def _locked(pids: set[int]) -> frozenset[int]:
    """Which of these wait for the lock on a file while a living process that is none of them holds it."""
    waiting: set[int] = set()
    holder = 0
    for line in (procfs.read("/proc/locks", _LOCKS_BYTES) or b"").splitlines():
        fields = line.split()
        blocked = len(fields) > 1 and fields[1] == b"->"
        try:
            pid = int(fields[5 if blocked else 4])
        except (IndexError, ValueError):
            continue
        if not blocked:
            holder = pid
        elif pid in pids and holder not in pids and (holder <= 0 or os.path.exists(f"/proc/{holder}")):
            # One of another pid namespace has no number here.
            waiting.add(pid)
    return frozenset(waiting)
