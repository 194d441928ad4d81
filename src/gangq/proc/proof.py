"""Proof that the work of a dead worker is dead too, by looking at the host it ran on.

Devices and jobs of a lost worker are free when its lease ends. They are free at once when it is *proven* that no
process it started is left. The worker's supervisor, its next incarnation or the host's bouncer prove it, with this
module.

What is looked for: the processes recorded by identity (pid *and* start time: pids are reused); whatever
belongs to the process groups or sessions those led; whatever is in the control group of one of its attempts,
where the host allows such groups; whatever carries the incarnation's mark in its
environment (``GANGQ_MARK=<incarnation>`` or ``<incarnation>/<command>``); and everything that descends from
any of them. A zombie is dead. A reading of ``/proc`` is not a snapshot, so it takes two clean ones in a row.

When there is no proof, by design:

* *Another pid namespace.* Processes of a container cannot be seen from another one. The same namespace number
  is proof enough: the kernel reuses a number only after every process of the former namespace is gone.
* *Another machine* under the same host name: its boot id would differ as after a reboot, so machine ids are
  compared first.
* *Processes that could be ours and will not be read.* An environment is unreadable if the process belongs to
  another user or has changed its credentials (``sudo``, file capabilities). It could be ours if any of its
  user ids is one that the dead worker or this process has; a program that became wholly another user is found
  by descent or session, or not at all: do not give commands that.
* *A /proc that hides processes* (``hidepid``, ``ProtectProc=``) from who asks. Workers are closed to their own user,
  so also that user does not see them. Root does, and members of its ``gid=``.

A different boot id on the same machine is proof at once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

from . import cgroup, procfs

_PAUSE_S = 0.05
_GUARDIAN_S = 0.5
"""How long a guardian whose work was killed may take to tell its worker and end, before it is killed too."""
_MOST_PIDS = 1 << 22


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for ever: its pid, its start time in clock ticks since boot, and which boot that was."""

    pid: int
    start_ticks: int
    boot_id: str | None

    @classmethod
    def of(cls, recorded: object) -> ProcessIdentity | None:
        """Out of the database, where every worker's login can write it; None for anything else than that."""
        if not isinstance(recorded, Mapping):
            return None
        pid, ticks, boot_id = (recorded.get(name) for name in ("pid", "start_ticks", "boot_id"))
        if not (_number(pid, _MOST_PIDS) and _number(ticks) and _word(boot_id)):
            return None
        return cls(pid, ticks, boot_id)


@dataclass(frozen=True)
class HostIdentity:
    """Where an incarnation ran, recorded when it registers; None stands for what this host does not tell.

    ``machine`` is a hash of ``/etc/machine-id`` (which is not for handing around), ``pid_namespace`` the
    number of the pid namespace, ``uid`` the user the worker ran as.
    """

    boot_id: str | None
    machine: str | None
    pid_namespace: int | None
    uid: int

    @classmethod
    def of(cls, recorded: object) -> HostIdentity | None:
        """Out of the database, where every worker's login can write it; None for anything else than that."""
        if not isinstance(recorded, Mapping):
            return None
        boot_id, machine, namespace, uid = (
            recorded.get(name) for name in ("boot_id", "machine", "pid_namespace", "uid")
        )
        if not (_word(boot_id) and _word(machine) and _number(uid)):
            return None
        if not (namespace is None or _number(namespace)):
            return None
        return cls(boot_id, machine, namespace, uid)

    @classmethod
    def here(cls) -> HostIdentity:
        """Of this process, now."""
        machine = procfs.text("/etc/machine-id") or None
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            namespace = None
        return cls(
            boot_id=procfs.text("/proc/sys/kernel/random/boot_id") or None,
            machine=hashlib.sha256(b"gangq:" + machine.encode()).hexdigest()[:16] if machine else None,
            pid_namespace=namespace,
            uid=os.getuid(),
        )


@dataclass(frozen=True)
class Survivor:
    """A live process that belongs to the work in question, and why it was taken for one of it.

    ``why`` is ``recorded``, ``group`` (or session of a recorded one), ``cgroup``, ``mark`` or ``descendant``.
    """

    pid: int
    start_ticks: int
    name: str
    why: str


@dataclass(frozen=True)
class Evidence:
    """What was found when the work of one incarnation was looked for."""

    mark: str
    boot_id: str | None
    """This host's, now."""
    same_machine: bool
    same_boot: bool
    same_namespace: bool
    checked: int = 0
    """Processes looked at in the last pass."""
    survivors: tuple[Survivor, ...] = ()
    unreadable: tuple[int, ...] = ()
    """Pids that could be ours and would not be read."""
    hidden: bool = False
    """Whether processes may be hidden from this one."""
    complete: bool = False
    """Whether everything that could be ours was seen."""

    @property
    def proves_death(self) -> bool:
        """Whether nothing of that incarnation's work can be running any more."""
        if not self.same_machine:
            return False
        return not self.same_boot or (self.same_namespace and self.complete and not self.survivors)

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``report_dead`` and the event log, the verdict among them."""
        return {**asdict(self), "proves_death": self.proves_death}


@dataclass
class _Pass:
    """One reading of ``/proc``."""

    checked: int = 0
    survivors: list[Survivor] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    stats: dict[int, procfs.Stat] = field(default_factory=dict)


def process_identity(pid: int) -> ProcessIdentity:
    """The identity of a running process, to be recorded as soon as it is started.

    Raises:
        ProcessLookupError: there is no such process.
    """
    entry = procfs.stat(pid)
    if entry is None:
        raise ProcessLookupError(
            f"no process {pid} on this host: it has ended, or runs in another pid namespace"
        )
    return ProcessIdentity(pid, entry.start_ticks, HostIdentity.here().boot_id)


def is_same_process(identity: ProcessIdentity) -> bool:
    """Whether that very process is alive on this host: not a later one with its pid, and not its zombie."""
    boot_id = HostIdentity.here().boot_id
    if identity.boot_id is not None and boot_id is not None and identity.boot_id != boot_id:
        return False
    entry = procfs.stat(identity.pid)
    return entry is not None and entry.alive and entry.start_ticks == identity.start_ticks


def confirm_gone(
    mark: str,
    identities: Sequence[ProcessIdentity],
    *,
    host: HostIdentity,
    kill: bool = False,
    only: Collection[int] | None = None,
    timeout_s: float = 10.0,
) -> Evidence:
    """Wait up to ``timeout_s`` for the work of a dead incarnation to be gone, and say what was found.

    ``host`` is what that incarnation recorded of itself. With ``kill`` every survivor gets SIGKILL, guardians
    last: as long as a guardian lives, nothing below it can slip away, and with its work gone it tells how that
    ended and ends by itself. ``only``: no processes but those of these users, where the mark is not known to be
    that worker's. Without ``kill``, work that has a guardian ends by itself soon (its orphan grace). Never raises
    for what it finds; ask :attr:`Evidence.proves_death`.
    """
    here = HostIdentity.here()
    boot_id_matches = host.boot_id is not None and host.boot_id == here.boot_id
    same_machine = boot_id_matches or (host.machine is not None and host.machine == here.machine)
    same_boot = boot_id_matches or None in (host.boot_id, here.boot_id)
    # A /proc of some other namespace (a host's, mounted into a container) knows us under another pid.
    own_view = os.path.basename(os.path.realpath("/proc/self")) == str(os.getpid())
    same_namespace = own_view and host.pid_namespace is not None and host.pid_namespace == here.pid_namespace
    verdict = Evidence(mark, here.boot_id, same_machine, same_boot, same_namespace, hidden=procfs.hides())
    if not (same_machine and same_boot and same_namespace):
        return verdict
    until = time.monotonic() + timeout_s
    clean = 0
    alone_since: float | None = None
    while True:
        found = _look(mark, identities, uids={host.uid, os.getuid()})
        clean = 0 if found.survivors or found.unreadable else clean + 1
        if clean >= 2 or (time.monotonic() >= until and clean == 0):
            return replace(
                verdict,
                checked=found.checked,
                survivors=tuple(found.survivors),
                unreadable=tuple(found.unreadable),
                complete=not (found.unreadable or verdict.hidden),
            )
        if kill and found.survivors:
            doomed = [found.stats[survivor.pid] for survivor in found.survivors]
            if only is not None:
                doomed = [entry for entry in doomed if procfs.user_ids(entry.pid) <= set(only)]
            work = [entry for entry in doomed if not _guards(entry)]
            now = time.monotonic()
            alone_since = None if work else alone_since or now
            procfs.strike(doomed if alone_since is not None and now - alone_since >= _GUARDIAN_S else work)
            for group in cgroup.left_by(mark):
                if only is None or _owner(group) in only:
                    cgroup.kill(group)
        time.sleep(_PAUSE_S)


def _look(mark: str, recorded: Sequence[ProcessIdentity], uids: set[int]) -> _Pass:
    processes = procfs.table()
    boot_id = HostIdentity.here().boot_id
    led = {
        identity.pid: identity.start_ticks
        for identity in recorded
        if None in (identity.boot_id, boot_id) or identity.boot_id == boot_id
    }
    # The kernel gives no pid out again while a group or session goes by it. So if another process has a
    # leader's pid, that group had died out, and the present one of that number is a stranger's.
    leaders = {
        pid for pid, ticks in led.items() if pid not in processes or processes[pid].start_ticks == ticks
    }
    earliest = min(led.values(), default=0)
    above = procfs.ancestors(processes, os.getpid())
    seen = _Pass(checked=len(processes), stats=processes)
    others = [entry for entry in processes.values() if entry.alive and entry.pid != os.getpid()]
    why = {entry.pid: found for entry in others if (found := _found_by(entry, mark, led, leaders))}
    _add_descendants(processes, why)
    # Not the environment of these, as in strike_command: work that is stuck in the kernel may have locked its memory,
    # and this look would wait with it.
    for entry in [entry for entry in others if entry.pid not in why]:
        try:
            carried = _carries(entry, mark)
        except PermissionError:
            # None of its work: an agent that was there before it (ssh-agent hides its memory, too), and those that
            # this process itself descends from.
            stranger = entry.start_ticks < earliest or entry.pid in above
            if not stranger and uids & procfs.user_ids(entry.pid):
                seen.unreadable.append(entry.pid)
            continue
        if carried:
            why[entry.pid] = "mark"
    _add_descendants(processes, why)
    seen.unreadable = [pid for pid in seen.unreadable if pid not in why]
    seen.survivors = [
        Survivor(pid, processes[pid].start_ticks, processes[pid].comm, why[pid]) for pid in sorted(why)
    ]
    return seen


def _found_by(entry: procfs.Stat, mark: str, led: Mapping[int, int], leaders: set[int]) -> str | None:
    """What says that the process is of that work, but for its environment; None: nothing does."""
    if led.get(entry.pid) == entry.start_ticks:
        return "recorded"
    if any(entry.start_ticks >= led[leader] for leader in {entry.pgrp, entry.session} & leaders):
        return "group"
    if cgroup.holds(entry.pid, mark):
        return "cgroup"
    return "mark" if entry.comm == procfs.work_name(mark) else None


def _add_descendants(processes: dict[int, procfs.Stat], why: dict[int, str]) -> None:
    for pid in procfs.descendants(processes, set(why)) - {os.getpid()}:
        if processes[pid].alive:
            why.setdefault(pid, "descendant")


def _carries(entry: procfs.Stat, mark: str) -> bool:
    """Whether its environment has that mark.

    Raises:
        PermissionError: the environment cannot be read, and its name does not say whose it is.
    """
    try:
        carried = procfs.mark_of(entry.pid)
    except PermissionError:
        # Workers, supervisors and guardians are closed to their own user, and their names say whose they are.
        if procfs.names_work(entry) or entry.comm == procfs.SUPERVISOR_NAME:
            return False
        raise
    return carried is not None and (carried == mark or carried.startswith(mark + "/"))


def _guards(entry: procfs.Stat) -> bool:
    """Whether it is a guardian by its name and command line. A process that pretends to be one is killed a little
    later.
    """
    if not procfs.names_work(entry):
        return False
    return any(
        os.path.basename(word) == "guardian.py" or "gangq.worker.forkserver" in word
        for word in procfs.words(entry.pid)
    )


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _number(value: object, most: int | None = None) -> TypeGuard[int]:
    """Whether it is a number that a kernel gives out; JSON's true is none."""
    return type(value) is int and value >= 0 and (most is None or 0 < value <= most)


def _word(value: object) -> TypeGuard[str | None]:
    return value is None or isinstance(value, str)
