"""Proving that workers of this host are dead, and reporting it: `gangq bounce`, `gangq systemd report-death`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.errors import IncarnationEnded
from gangq.proc import procfs
from gangq.proc.proof import Evidence, HostIdentity, ProcessIdentity, confirm_gone, is_same_process
from gangq.worker import host_record
from gangq.worker.death_main import report_end
from gangq.worker.host_record import DIRECTORY_PREFIX, HostRecord

if TYPE_CHECKING:
    from gangq.client import Client

CHECK_S = 0.3
"""How long to look whether a silent worker's processes are gone already."""
_FIRST_NAMESPACE = 0xEFFFFFFC
"""The number of the host's own pid namespace on every Linux."""


@dataclass(frozen=True)
class Proof:
    """What a look at this host's processes found of one incarnation's work."""

    dead: bool
    evidence: Mapping[str, Any]
    why_not: str = ""
    """Why it is not proven dead, in words; empty where it is."""
    stuck: tuple[int, ...] = ()
    """Pids of it that were sent SIGKILL and did not die of it."""


@dataclass(frozen=True)
class Registered:
    """What an incarnation recorded of itself, by which its work is found."""

    mark: str
    host: HostIdentity
    process: ProcessIdentity
    directory: Path | None
    """Its private directory, if what it has recorded has the name of one. Readers check who wrote what is in it."""

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Registered | None:
        """Out of the database; None where it is not what gangq's workers record."""
        if not isinstance(identity, Mapping):
            return None
        mark, directory = identity.get("mark"), identity.get("directory")
        host = HostIdentity.of(identity.get("host"))
        process = ProcessIdentity.of(identity.get("process"))
        if not (isinstance(mark, str) and mark) or host is None or process is None:
            return None
        found = Path(directory) if isinstance(directory, str) else None
        private = found is not None and found.name.startswith(DIRECTORY_PREFIX)
        return cls(mark, host, process, found if private else None)


def prove(identity: Mapping[str, Any], *, within_s: float, kill_worker: str = "") -> Proof | None:
    """Look for the work of an incarnation for `within_s` seconds, and 30 s more where it is dying; None: what it
    registered of itself cannot be read.

    `kill_worker`: SIGKILL it, if it is the worker of this name by the record that it left on this host. The database
    cannot be trusted with a process or a mark to kill by, because every worker's login can write there. So nothing is
    killed without that record, and only processes of the user who wrote it.
    """
    registered = Registered.of(identity)
    if registered is None:
        return None
    users: set[int] = set()
    if kill_worker:
        own = recorded(registered, registered.host.uid)
        if own is not None and (own.worker, own.mark) == (kill_worker, registered.mark):
            users = {registered.host.uid}

    def look(for_s: float) -> Evidence:
        return confirm_gone(
            registered.mark,
            [registered.process],
            host=registered.host,
            kill=bool(users),
            only=users,
            timeout_s=for_s,
        )

    evidence = look(within_s)
    stuck: list[procfs.Stat] = []
    left = [entry for survivor in evidence.survivors if (entry := procfs.stat(survivor.pid)) is not None]
    if any(procfs.dying(entry.pid) for entry in left):
        # Killed and not dead yet: a process that has much memory to give back takes long for it.
        stuck = procfs.await_end(left)
        evidence = look(min(within_s, CHECK_S))
    if not evidence.same_namespace and namespace_ended(registered.host):
        return Proof(True, {**evidence.as_json(), "namespace_ended": True, "proves_death": True})
    return Proof(
        dead=evidence.proves_death,
        evidence=evidence.as_json(),
        why_not=_why_not(evidence),
        stuck=tuple(entry.pid for entry in stuck if procfs.same(entry) is not None),
    )


def _why_not(evidence: Evidence) -> str:
    """Why that proves no death; empty where it does."""
    if evidence.proves_death:
        return ""
    if not evidence.same_machine:
        return "it ran on another host"
    if not evidence.same_namespace:
        return "it ran in another pid namespace, which is not seen to have ended"
    if evidence.survivors:
        return f"processes {', '.join(str(survivor.pid) for survivor in evidence.survivors)} of it live"
    if evidence.hidden:
        return "/proc may hide processes of it (hidepid): ask as root"
    unreadable = ", ".join(map(str, evidence.unreadable))
    return f"processes {unreadable} may be of it and cannot be read: ask as root"


def namespace_ended(host: HostIdentity) -> bool:
    """Whether no process is left in the pid namespace of a container on this host, as far as root of the host itself
    can say: all namespaces are below its own, and one without processes has ended with all that was in it.
    """
    boot_id = HostIdentity.here().boot_id
    if host.pid_namespace is None or boot_id is None or host.boot_id != boot_id:
        return False
    found: dict[str, int] = {}
    try:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return False
    # Nothing is hidden in /proc from who may look at the first process of the host.
    return found.get("1") == _FIRST_NAMESPACE and host.pid_namespace not in found.values()


def recorded(registered: Registered, uid: int, root: str = "") -> HostRecord | None:
    """What a worker of that user has recorded of its process on this host, in its directory, where only that user can
    write; None where there is no such record of this process. ``root``: where the directory's path begins.
    """
    if registered.directory is None:
        return None
    own = host_record.read(Path(f"{root}{registered.directory}"), uid)
    return own if own is not None and own.process == registered.process else None


def report_dead(
    client: Client, worker: str, incarnation: int, identity: Mapping[str, Any], evidence: Mapping[str, Any]
) -> int:
    """Report an incarnation that is proven dead, as its supervisor would
    (:func:`gangq.worker.death_main.report_end`); return how many jobs that freed.
    """
    registered = Registered.of(identity)
    directory, uid = (None, 0) if registered is None else (registered.directory, registered.host.uid)
    try:
        return report_end(client, worker, incarnation, directory, uid, evidence)[1]
    except IncarnationEnded:
        # Its successor, or its unit, was faster.
        return 0


@dataclass(frozen=True)
class Found:
    """One incarnation that was looked for. `jobs` is how many were freed."""

    worker: str
    incarnation: int
    dead: bool
    jobs: int
    detail: str


def prove_and_report(
    client: Client, worker: str, *, within_s: float, evidence: Mapping[str, Any]
) -> Iterator[Found]:
    """Report every incarnation of this name dead that is, and whose death is not on record yet."""
    for incarnation, identity in _unproven(client, worker):
        dead, jobs, said = _looked_for(client, worker, incarnation, identity, within_s, evidence)
        yield Found(worker, incarnation, dead, jobs, f"worker {worker}, incarnation {incarnation} {said}")


def _looked_for(
    client: Client,
    worker: str,
    incarnation: int,
    identity: Mapping[str, Any],
    within_s: float,
    evidence: Mapping[str, Any],
) -> tuple[bool, int, str]:
    """Whether it is dead, how many jobs that freed, and both in words."""
    registered = Registered.of(identity)
    if (
        registered is not None
        and registered.host == HostIdentity.here()
        and is_same_process(registered.process)
    ):
        return False, 0, f"lives (process {registered.process.pid}): nothing was reported"
    proof = prove(identity, within_s=within_s)
    if proof is None or not proof.dead:
        why = "what it registered of itself cannot be read" if proof is None else proof.why_not
        return False, 0, f"cannot be proven dead from here ({why}): what it holds is free when its lease ends"
    jobs = report_dead(client, worker, incarnation, identity, {**evidence, **proof.evidence})
    return True, jobs, f"is dead and was reported so; jobs freed: {jobs}"


def _unproven(client: Client, worker: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """What ended by a trip, and the latest if it has not ended."""
    for tripped in client.unproven(worker=worker):
        yield tripped.incarnation, tripped.identity
    for last in client.predecessor(worker=worker):
        if last.ended_at is None:
            yield last.incarnation, last.identity
