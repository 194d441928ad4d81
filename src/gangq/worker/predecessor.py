"""A dead predecessor of the same name: what it left on this host is ended, and it is reported dead.

A worker that was SIGKILLed and started again finds its name taken by an incarnation whose lease runs on for
minutes. On the same host it need not wait: it proves that nothing the predecessor started is alive, and the
predecessor's jobs are free at once.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangq.proc import cgroup, procfs
from gangq.proc.proof import (
    Evidence,
    HostIdentity,
    ProcessIdentity,
    confirm_gone,
    is_same_process,
    process_identity,
)
from gangq.worker import fitness, host_record
from gangq.worker.death_main import report_end

if TYPE_CHECKING:
    from gangq.client import Client

log = logging.getLogger("gangq.worker.predecessor")

_KILL_S = 10.0
_LOOK_S = 0.3


@dataclass(frozen=True)
class Predecessor:
    """An earlier incarnation of a worker's name, as the database and this host know it."""

    name: str
    incarnation: int
    mark: str
    host: HostIdentity
    process: ProcessIdentity
    record: host_record.HostRecord | None
    """What that very incarnation left on this host. Without it nothing is ended or removed here, because every
    worker's login can write the database's record.
    """

    @classmethod
    def of(
        cls, name: str, incarnation: object, identity: object, *, own_mark: str, own_directory: Path
    ) -> Predecessor | None:
        """From what it registered; None where that does not identify a process. ``own_mark`` begins the marks of this
        process, whose directory is ``own_directory``.
        """
        told = identity if isinstance(identity, Mapping) else {}
        mark, host = told.get("mark"), HostIdentity.of(told.get("host"))
        process = ProcessIdentity.of(told.get("process"))
        if not (isinstance(mark, str) and mark) or host is None or process is None:
            return None
        if not isinstance(incarnation, int):
            return None
        record = host_record.find(name, mark)
        if record is None and process == process_identity(os.getpid()) and mark.startswith(own_mark):
            record = host_record.HostRecord(name, mark, process, own_directory)
        return cls(name, incarnation, mark, host, process if record is None else record.process, record)

    def prove_and_report_dead(self, client: Client, *, exiting: bool = False) -> bool:
        """Report it dead, if nothing of it lives; False when that cannot be said. ``exiting``: it has announced its
        end, so what still lives of it is ended even if its worker does.

        Raises:
            Unfit: processes of it cannot be ended.
        """
        if self._lives() and not (exiting and self.record is not None):
            return False
        evidence = self._confirm_gone()
        log.warning(
            "predecessor",
            extra={
                "incarnation": self.incarnation,
                "dead": evidence.proves_death,
                "recorded_here": self.record is not None,
                "survivors": [survivor.pid for survivor in evidence.survivors],
            },
        )
        if evidence.survivors and self.record is not None:
            raise fitness.unfit_beside(self.name, [survivor.pid for survivor in evidence.survivors])
        if not evidence.proves_death:
            return False
        self._report(client, evidence)
        self._remove_leftovers()
        return True

    def _lives(self) -> bool:
        """Whether its process runs on. One that was killed may be slow to give its memory back: that is awaited."""
        process = self.process
        if process.pid == os.getpid() or self.host != HostIdentity.here() or not is_same_process(process):
            return False
        entry = procfs.stat(process.pid)
        if self.record is None or entry is None or not procfs.dying(process.pid):
            return is_same_process(process)
        procfs.await_end([entry])
        if is_same_process(process):
            raise fitness.unfit_beside(self.name, [process.pid])
        return False

    def _confirm_gone(self) -> Evidence:
        """Give the guardians time to end their commands, then kill what is left."""
        if self.record is None:
            return confirm_gone(self.mark, [self.process], host=self.host, timeout_s=_LOOK_S)
        evidence = confirm_gone(self.mark, [self.process], host=self.host, timeout_s=procfs.LET_END_S)
        if evidence.survivors:
            evidence = self._kill(_KILL_S)
        if evidence.survivors:
            found = [procfs.stat(survivor.pid) for survivor in evidence.survivors]
            procfs.await_end([entry for entry in found if entry is not None])
            evidence = self._kill(_LOOK_S)
        return evidence

    def _kill(self, timeout_s: float) -> Evidence:
        return confirm_gone(self.mark, [self.process], host=self.host, kill=True, timeout_s=timeout_s)

    def _report(self, client: Client, evidence: Evidence) -> None:
        reason, freed = report_end(
            client,
            self.name,
            self.incarnation,
            None if self.record is None else self.record.directory,
            os.getuid(),
            {"by": "its next incarnation", **evidence.as_json()},
        )
        about = {"incarnation": self.incarnation}
        if reason is None:
            log.warning("predecessor_reported_dead", extra={**about, "jobs": freed})
        else:
            log.warning("predecessor_retired", extra={**about, "reason": reason})

    def _remove_leftovers(self) -> None:
        if self.record is None:
            return
        for group in cgroup.left_by(self.mark):
            cgroup.remove(group)
        if not self.record.lives():
            shutil.rmtree(self.record.directory, ignore_errors=True)
