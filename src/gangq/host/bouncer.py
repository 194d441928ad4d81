"""Restarting the workers of one host that are flagged dead.

A worker is flagged (`gangq.flagged`) when it has been silent for flag_after_s while it holds jobs. Flags free
nothing; the end of the lease does, minutes later, and the device stays with a process that may never end. The
host can do better, and this is how:

1. What is gone already is only reported dead: its jobs are free at once, and starting it again is its own
   service manager's business.
2. Otherwise the database decides (`gangq.bounce`). It refuses if the worker has renewed its lease or was replaced,
   if it was restarted bounces_per_hour times, and while another bouncer restarts it. It also refuses while workers of
   more than one host, and of more than a fifth of all hosts, are flagged: then the fault is elsewhere, and
   restarting everything would make it worse.
3. Its backend restarts it, with SIGKILL after a bounded time. What survives that is reported stuck: the host
   needs a reboot.
4. A new incarnation has to heartbeat within `verify_s`; if it does not, an operator has to look.

Every action is one line that says what was done and, where it was not enough, what to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput
from gangq.host.backends import Backend
from gangq.host.deaths import CHECK_S, Proof, prove, report_dead

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.client.rows import FlaggedRow

log = logging.getLogger("gangq.host")

_PROOF_AFTER_KILL_S = 5.0
_BY = "gangq bounce"
_REFUSALS = {
    "too_often": "left alone: it has been restarted as often as an hour allows (bounces_per_hour) and is silent "
    "again. Look at its log and its devices (gangq events, gangq devices), then restart it by hand",
    "fleet": "left alone: more than a fifth of all hosts are flagged at once, so the fault is elsewhere. Look at the "
    "database, the network and the shared storage (gangq workers, gangq doctor)",
}
"""Answers of the database that an operator should see; heard, replaced, taken and unknown need no attention."""


class Prover(Protocol):
    """Looks for the work of an incarnation on this host. None: what it registered of itself cannot be read."""

    def __call__(
        self, identity: Mapping[str, Any], *, within_s: float, kill_worker: str = ""
    ) -> Proof | None:
        """Look for ``within_s`` seconds. ``kill_worker``: the name of the worker whose work gets SIGKILL."""


@dataclass(frozen=True)
class Action:
    """One thing that was done or refused.

    ``action`` is dead (reported), gone, bounced, verified, unverified, failed, stuck, refused, unmapped, or would
    (in report-only mode); ``text`` the line for people. ``ok`` false: an operator should look.
    """

    worker: str
    incarnation: int
    action: str
    ok: bool
    text: str


@dataclass
class _Pending:
    """A restart whose success is yet to be seen."""

    flag: FlaggedRow
    how: str
    until: float
    ok: bool | None = None
    """What came of it; None: to be seen."""
    detail: dict[str, Any] = field(default_factory=dict)


class Bouncer:
    """The bouncer of one host. :meth:`round` ticks and acts on what is flagged now, :meth:`verify` looks what became
    of it.

    ``choose`` says how a worker is restarted, or raises `InvalidInput`; ``prove`` looks for its processes.
    ``kill_after_s`` is what a worker gets before SIGKILL, ``verify_s`` what its successor gets until its first
    heartbeat. ``report_only``: nothing is restarted or reported.
    """

    def __init__(
        self,
        client: Client,
        *,
        host: str,
        choose: Callable[[str, Mapping[str, Any]], Backend],
        prove: Prover = prove,
        kill_after_s: float = 15.0,
        verify_s: float = 120.0,
        report_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[Action], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._host = host
        self._choose = choose
        self._prove = prove
        self._kill_after_s = kill_after_s
        self._verify_s = verify_s
        self._report_only = report_only
        self._clock = clock
        self._say = say
        self._pending: dict[int, _Pending] = {}
        self._said: set[tuple[int, str]] = set()
        self.ok = True
        """Whether everything so far was done and nothing was refused."""

    @property
    def waiting(self) -> bool:
        """Whether the outcome of a restart is still to be seen."""
        return bool(self._pending)

    def round(self) -> None:
        """Act once on every fresh flag of this host. What the database refuses for one of them is said, and does
        not keep the others waiting.

        Raises:
            GangqError: the database is not there, or does not tell the flags; what had been restarted is
                remembered.
        """
        self._tick()
        flags = self._client.flagged(host=self._host)
        # A line about a flag that stands is said once, and again when the flag has come back.
        standing = {flag.incarnation for flag in flags}
        self._said = {said for said in self._said if said[0] in standing}
        for flag in flags:
            if flag.incarnation in self._pending:
                continue
            try:
                self._act(flag)
            except DatabaseUnreachable:
                raise
            except GangqError as problem:
                self._tell(flag, "failed", False, f"could not be dealt with: {problem}")

    def _tick(self) -> None:
        """If every worker of the fleet is silent, only this tick flags them."""
        if self._report_only:
            return
        try:
            self._client.tick()
        except DatabaseUnreachable:
            raise
        except GangqError as problem:
            log.warning("tick_failed", extra={"error": str(problem)})

    def verify(self) -> None:
        """Look which restarts have brought a new incarnation, and tell the database.

        Raises:
            DatabaseUnreachable: the database is not there; it is told the next time.
        """
        for incarnation, pending in list(self._pending.items()):
            try:
                if pending.ok is None:
                    self._look(pending)
                if pending.ok is not None:
                    self._client.bounced(incarnation=incarnation, ok=pending.ok, detail=pending.detail)
                    del self._pending[incarnation]
            except DatabaseUnreachable:
                raise
            except GangqError as problem:
                if problem.retryable and self._clock() < pending.until:
                    continue
                del self._pending[incarnation]
                said = f"what became of its restart is not recorded: {problem}"
                self._tell(pending.flag, "failed", False, said)

    # -- one flag ----------------------------------------------------------------------------------------

    def _act(self, flag: FlaggedRow) -> None:
        proof = self._prove(flag.identity, within_s=CHECK_S)
        if proof is not None and proof.stuck:
            # It was killed, perhaps just now.
            proof = self._prove(flag.identity, within_s=_PROOF_AFTER_KILL_S)
        if proof is not None and proof.dead:
            self._report_dead(flag, proof)
            return
        if proof is not None and proof.stuck:
            # Nothing can be started beside it.
            self._report_stuck(flag, proof)
            return
        try:
            backend = self._choose(flag.worker, flag.identity)
        except InvalidInput as problem:
            self._tell(flag, "unmapped", False, f"left alone: {problem}")
            return
        answer = self._client.bounce(
            incarnation=flag.incarnation, host=self._host, report_only=self._report_only
        )
        if answer != "go":
            self._refused(flag, answer)
        elif self._report_only:
            self._tell(flag, "would", True, f"would be restarted with: {backend}")
        else:
            self._restart(flag, backend)

    def _report_dead(self, flag: FlaggedRow, proof: Proof) -> None:
        if self._report_only:
            self._tell(flag, "would", True, "would be reported dead: every process of it is gone")
            return
        if not flag.jobs:
            # Its lease has ended meanwhile: there is nothing left to free, and it was not started again.
            self._tell(
                flag,
                "gone",
                False,
                "is gone, its jobs are free, and it was not started again: see why its service manager does not",
            )
            return
        jobs = self._record_death(flag, proof)
        if jobs == 0:
            # Its successor, or its unit, was faster.
            log.info("death_known", extra={"worker": flag.worker, "incarnation": flag.incarnation})
            return
        self._tell(
            flag,
            "dead",
            True,
            f"was gone already and is reported dead; jobs freed: {jobs}. To start it is for its service manager",
        )

    def _refused(self, flag: FlaggedRow, answer: str) -> None:
        problem = _REFUSALS.get(answer)
        if problem is not None:
            self._tell(flag, "refused", False, problem)
        else:
            said = {"worker": flag.worker, "incarnation": flag.incarnation, "answer": answer}
            log.info("bounce_not_needed", extra=said)

    def _restart(self, flag: FlaggedRow, backend: Backend) -> None:
        """Restart one worker. The order matters:

        1. It is pending first: whatever the database answers later, it is not restarted twice.
        2. What the backend does not end is killed. Nothing is started beside a process that survives SIGKILL. One
           that may not be killed from here (another user's) is left to the backend, whose command may end it; the
           database refuses a second live worker of one name.
        3. The successor's time begins after the restart, which may have taken a minute.
        4. A process that survives counts more than what the backend says: the host needs a reboot.
        5. The death is reported last: a database that is away must not keep the rest from being remembered.
        """
        pending = _Pending(flag, str(backend), self._clock() + self._verify_s)
        self._pending[flag.incarnation] = pending
        log.warning(
            "bounce", extra={"worker": flag.worker, "incarnation": flag.incarnation, "backend": str(backend)}
        )
        killed = None
        if backend.kills_first:
            # Silent for so long, it will not answer SIGTERM either.
            killed = self._prove(flag.identity, within_s=self._kill_after_s, kill_worker=flag.worker)
        if killed is not None and killed.stuck:
            self._stuck(pending, killed)
            return
        # No pid: the database's would be any that a worker's login wrote there, and a command would kill it as root.
        environ = {"GANGQ_WORKER": flag.worker, "GANGQ_INCARNATION": str(flag.incarnation)}
        done = backend.restart(self._kill_after_s, environ)
        pending.until = self._clock() + self._verify_s
        proof = killed
        if proof is None or not proof.dead:
            proof = self._prove(flag.identity, within_s=_PROOF_AFTER_KILL_S if done.ok else CHECK_S)
        if proof is not None and proof.stuck:
            self._stuck(pending, proof)
        elif not done.ok:
            pending.ok = False
            pending.detail = {"backend": str(backend), "problem": done.detail}
            self._tell(flag, "failed", False, f"could not be restarted: {done.detail}")
        else:
            pending.detail = {"backend": str(backend), "did": done.detail}
            self._tell(flag, "bounced", True, f"silent for {flag.silent_s:.0f} s: {done.detail}")
        if proof is not None and proof.dead:
            try:
                self._record_death(flag, proof)
            except GangqError as problem:
                # Its successor does the same when it registers: a database that is away now is no reason to stop.
                log.warning("death_not_reported", extra={"worker": flag.worker, "error": str(problem)})

    def _record_death(self, flag: FlaggedRow, proof: Proof) -> int:
        evidence = {"by": _BY, "host": self._host, **proof.evidence}
        return report_dead(self._client, flag.worker, flag.incarnation, flag.identity, evidence)

    def _stuck(self, pending: _Pending, proof: Proof) -> None:
        pending.ok = False
        pending.detail = {"backend": pending.how, "stuck": list(proof.stuck)}
        self._report_stuck(pending.flag, proof)

    def _report_stuck(self, flag: FlaggedRow, proof: Proof) -> None:
        """Report it, then say so; in report-only mode only say what is seen."""
        if self._report_only:
            self._tell_stuck(flag, proof, "Nothing is reported (report-only)")
            return
        evidence = {"by": _BY, "pid": proof.stuck[0], "pids": list(proof.stuck), **proof.evidence}
        self._client.report_stuck(worker=flag.worker, incarnation=flag.incarnation, evidence=evidence)
        self._tell_stuck(
            flag,
            proof,
            f"Worker and devices are quarantined; afterwards: gangq unquarantine --worker {flag.worker}",
        )

    def _tell_stuck(self, flag: FlaggedRow, proof: Proof, reported: str) -> None:
        pids = ", ".join(map(str, proof.stuck))
        text = f"process {pids} does not die of SIGKILL: reboot host {self._host}. {reported}"
        self._tell(flag, "stuck", False, text)

    # -- afterwards --------------------------------------------------------------------------------------

    def _look(self, pending: _Pending) -> None:
        flag = pending.flag
        for row in self._client.workers(name=flag.worker):
            beaten = row.renewed_at is not None and row.renewed_at > row.registered_at
            if row.incarnation > flag.incarnation and row.state in ("live", "draining") and beaten:
                pending.ok = True
                pending.detail["successor"] = row.incarnation
                self._tell(flag, "verified", True, f"is back as incarnation {row.incarnation} and heartbeats")
                return
        if self._clock() >= pending.until:
            pending.ok = False
            pending.detail["problem"] = f"no heartbeat of a new incarnation within {self._verify_s:.0f} s"
            self._tell(
                flag,
                "unverified",
                False,
                f"has not heartbeat again within {self._verify_s:.0f} s of its restart ({pending.how}): "
                "look at its log; gangq doctor on this host",
            )

    def _tell(self, flag: FlaggedRow, action: str, ok: bool, text: str) -> None:
        self.ok = self.ok and ok
        if (flag.incarnation, text) in self._said:
            return
        self._said.add((flag.incarnation, text))
        line = f"worker {flag.worker} (incarnation {flag.incarnation}) {text}"
        self._say(Action(flag.worker, flag.incarnation, action, ok, line))
