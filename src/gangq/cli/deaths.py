"""Reporting workers of this host dead: what `gangq bounce` and `gangq systemd report-death` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangq.client import Client
from gangq.errors import IncarnationEnded
from gangq.host.bouncer import CHECK_S, Proof
from gangq.proc import procfs
from gangq.proc.proof import Evidence, HostIdentity, ProcessIdentity, confirm_gone, is_same_process
from gangq.worker import host_record
from gangq.worker.host_record import DIRECTORY_PREFIX
from gangq.worker.report import deliver
from gangq.worker.session import clean_stop_reason


@dataclass(frozen=True)
class Registered:
    """What an incarnation recorded of itself, by which its work is found."""

    mark: str
    host: HostIdentity
    process: ProcessIdentity
    directory: Path | None

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
        return cls(mark, host, process, Path(directory) if isinstance(directory, str) else None)

    def clean_stop(self, incarnation: int) -> str | None:
        """Why it ended its own work for no fault of the jobs', if it left word of that."""
        return None if self.left is None else clean_stop_reason(self.left, incarnation, self.host.uid)

    @property
    def left(self) -> Path | None:
        """Its private directory, if it has one by its name. What is in it is read as nobody's word."""
        found = self.directory
        return found if found is not None and found.name.startswith(DIRECTORY_PREFIX) else None


def prove(identity: Mapping[str, Any], *, within_s: float, kill: str = "") -> Proof | None:
    """Look for the work of an incarnation for `within_s` seconds, and 30 s more where it is dying; None: this host
    cannot know.

    `kill`: SIGKILL it, if it is the worker of this name by the record that it left on this host. Which process that
    is and which mark its work carries come from the database, where every worker's login can write them: so nothing
    is killed without that record, and nothing of other users than the one who wrote it.
    """
    registered = Registered.of(identity)
    if registered is None:
        return None
    users = {registered.host.uid} if kill and _recorded_here(kill, registered) else set()

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
        # Killed and not dead yet. Who has much memory to give back takes long for it.
        stuck = procfs.await_end(left)
        evidence = look(min(within_s, CHECK_S))
    if not (evidence.proves_death or evidence.survivors):
        return None
    return Proof(
        dead=evidence.proves_death,
        evidence=evidence.as_json(),
        left=tuple(survivor.pid for survivor in evidence.survivors),
        stuck=tuple(entry.pid for entry in stuck if procfs.same(entry) is not None),
    )


def _recorded_here(worker: str, registered: Registered) -> bool:
    """Whether the user that it says it ran as has written the same on this host, where only that user can."""
    if registered.left is None:
        return False
    own = host_record.read(registered.left, registered.host.uid)
    return own is not None and (own.worker, own.mark, own.process) == (
        worker,
        registered.mark,
        registered.process,
    )


def bury(
    client: Client, worker: str, incarnation: int, identity: Mapping[str, Any], evidence: Mapping[str, Any]
) -> int:
    """Tell the database that an incarnation is proven dead; return how many jobs that freed.

    One that had ended its own work, for a reason that is no fault of the jobs', is retired: a release, not a crash.
    """
    registered = Registered.of(identity)
    clean_stop = None if registered is None else registered.clean_stop(incarnation)
    try:
        if clean_stop is not None:
            client.retire_worker(incarnation=incarnation, final=True)
            return 0
        if registered is not None and registered.left is not None:
            deliver(client, incarnation, registered.left, registered.host.uid)
        return client.report_dead(worker=worker, incarnation=incarnation, evidence=evidence)
    except IncarnationEnded:
        # Its successor, or its unit, was faster.
        return 0


@dataclass(frozen=True)
class Found:
    """One incarnation that `report` looked at. `jobs` is how many were freed."""

    worker: str
    incarnation: int
    dead: bool
    jobs: int
    detail: str


def report(client: Client, worker: str, *, within_s: float, evidence: Mapping[str, Any]) -> Iterator[Found]:
    """Report every incarnation of this name dead that is, and whose death is not on record yet."""
    for incarnation, identity in _unproven(client, worker):
        yield _looked_for(client, worker, incarnation, identity, within_s, evidence)


def _looked_for(
    client: Client,
    worker: str,
    incarnation: int,
    identity: Mapping[str, Any],
    within_s: float,
    evidence: Mapping[str, Any],
) -> Found:
    registered = Registered.of(identity)
    called = f"worker {worker}, incarnation {incarnation}"
    if (
        registered is not None
        and registered.host == HostIdentity.here()
        and is_same_process(registered.process)
    ):
        pid = registered.process.pid
        return Found(worker, incarnation, False, 0, f"{called} lives (process {pid}): nothing was reported")
    proof = prove(identity, within_s=within_s)
    if proof is None or not proof.dead:
        left = f"processes {', '.join(map(str, proof.left))} of it live" if proof else "it ran elsewhere"
        return Found(
            worker,
            incarnation,
            False,
            0,
            f"{called} cannot be proven dead from here ({left}): what it holds is free when its lease ends",
        )
    jobs = bury(client, worker, incarnation, identity, {**evidence, **proof.evidence})
    return Found(worker, incarnation, True, jobs, f"{called} is dead and was reported so; jobs freed: {jobs}")


def _unproven(client: Client, worker: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """What ended by a trip, and the latest if it has not ended."""
    for tripped in client.unproven(worker=worker):
        yield tripped.incarnation, tripped.identity
    for last in client.predecessor(worker=worker):
        if last.ended_at is None:
            yield last.incarnation, last.identity


__all__ = ["Found", "Registered", "bury", "prove", "report"]
