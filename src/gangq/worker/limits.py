"""How long the jobs of each task may take, load and fall silent, as the database knows it.

Asked for when a task's first job begins, kept, and asked for again once a minute behind a heartbeat. A
database that does not answer at once gives the defaults until it does.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput
from gangq.proc.clock import boottime
from gangq.proc.within import within

if TYPE_CHECKING:
    from gangq.client.rows import Claim, WatchTerms
    from gangq.task_options import WatchOptions
    from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.limits")

_FRESH_S = 60.0
_KEPT_S = 86_400.0
_ASK_S = 2.0


@dataclass(frozen=True)
class Limits:
    """What the watchdogs allow one job; seconds. The defaults hold where the database has not answered yet.

    `learn`: the stall timeout is the default, and may grow with the job. `notify_only`: classes of trip that
    are reported and stop nothing.
    """

    budget_s: float = 2100.0
    stall_timeout_s: float = 120.0
    learn: bool = True
    load_grace_s: float = 1200.0
    health_window_s: float = 300.0
    long_phase_s: float = 3600.0
    notify_only: tuple[str, ...] = ()


_WITH_DEVICES = Limits(budget_s=8100.0)
_Key = tuple[str, str, str, bool]


class LimitsTable:
    """The limits of every task this worker has met. Thread-safe."""

    def __init__(self, session: Session, fresh_s: float = _FRESH_S) -> None:
        """``fresh_s``: seconds after which a number is asked for again."""
        self._fresh_s = fresh_s
        self._session = session
        self._lock = threading.Lock()
        self._known: dict[_Key, tuple[float, Limits]] = {}
        self._used_at: dict[_Key, float] = {}
        self._gaps: dict[tuple[str, str], tuple[float, int]] = {}
        self._told: dict[tuple[str, str], tuple[float, float]] = {}
        """The longest gap that the database was told of, and when."""

    def ask_for(self, claim: Claim, options: WatchOptions | None, device_class: str) -> Limits:
        """As :meth:`of`, for a job that is about to begin. If its limits are not known the database is asked, which
        may take 2 s: not for the control loop, which has to carry that call out.
        """
        key = _key(claim, device_class)
        if key not in self._known:
            self._ask(key)
        return self.of(claim, options, device_class)

    def of(self, claim: Claim, options: WatchOptions | None, device_class: str) -> Limits:
        """What holds for this job, but for a budget of its own: its task's options, then what the database has said.
        Never waits.
        """
        key = _key(claim, device_class)
        self._used_at[key] = boottime()
        known = self._known.get(key)
        limits = _default(key) if known is None else known[1]
        if options is None:
            return limits
        return replace(
            limits,
            stall_timeout_s=options.stall_timeout or limits.stall_timeout_s,
            learn=limits.learn and options.stall_timeout is None,
            load_grace_s=options.load_grace or limits.load_grace_s,
            health_window_s=options.health_window or limits.health_window_s,
            long_phase_s=options.long_phase or limits.long_phase_s,
        )

    def learned(self, task: str, device_class: str, longest_s: float, beats: int) -> None:
        """A job of this task went on after a gap between its beats as long as this: tell the database, later
        and only where it is news. After a minute all is: the database may have been told to forget.
        """
        key = (task, device_class)
        with self._lock:
            told_s, told_at = self._told.get(key, (0.0, 0.0))
            if told_at < boottime() - self._fresh_s:
                told_s = 0.0
            if longest_s <= max(told_s, self._gaps.get(key, (0.0, 0))[0]) * 1.1:
                return
            self._gaps[key] = (longest_s, beats)

    async def exchange(self) -> None:
        """Tell what was learned and ask anew what is older than a minute. For the control loop, now and then. What is
        refused, or not answered, is tried again by the next call.

        It makes one call after the other between two heartbeats. Each is short: it waits for a lock 2 s at most.

        Raises:
            DatabaseUnreachable: a call had no answer, and no further one was made.
        """
        client = self._session.control.client
        with self._lock:
            gaps = dict(self._gaps)
        for (task, device_class), (longest_s, beats) in gaps.items():
            try:
                await client.learn_gap(task=task, device_class=device_class, longest_s=longest_s, beats=beats)
            except InvalidInput as problem:
                log.warning("gap_refused", extra={"task": task, "error": str(problem)})
            except DatabaseUnreachable:
                raise
            except GangqError as problem:
                log.info("stall_gap_not_saved", extra={"task": task, "error": str(problem)})
                continue
            with self._lock:
                self._told[task, device_class] = (longest_s, boottime())
                if self._gaps.get((task, device_class)) == (longest_s, beats):
                    del self._gaps[task, device_class]
        now = boottime()
        held = {(job.claim.task, job.claim.queue) for job in self._session.table.snapshot()}
        for key, used_at in list(self._used_at.items()):
            # A job that began days ago may still run, and its limits may have been changed since.
            if now - used_at > _KEPT_S and key[:2] not in held:
                self._used_at.pop(key, None)
                self._known.pop(key, None)
            elif key in self._known and self._known[key][0] < now - self._fresh_s:
                try:
                    self._keep(key, await client.watch_terms(**_asked(key)))
                except DatabaseUnreachable:
                    raise
                except GangqError as problem:
                    log.info("limits_unknown", extra={"task": key[0], "error": str(problem)})

    def _ask(self, key: _Key) -> None:
        try:
            row = within(
                _ASK_S, lambda: self._session.control.for_threads.watch_terms(**_asked(key)), "gangq-limits"
            )
        except GangqError as problem:
            log.info("limits_unknown", extra={"task": key[0], "error": str(problem)})
            row = None
        self._keep(key, row)

    def _keep(self, key: _Key, row: WatchTerms | None) -> None:
        if row is None:
            # Another thread may have had an answer meanwhile.
            self._known.setdefault(key, (0.0, _default(key)))
            return
        limits = Limits(
            budget_s=row.budget_gpu_s if key[-1] else row.budget_s,
            stall_timeout_s=row.stall_timeout_s,
            learn=row.learned,
            load_grace_s=row.load_grace_s,
            health_window_s=row.health_window_s,
            long_phase_s=row.long_phase_s,
            notify_only=tuple(row.notify_only),
        )
        self._known[key] = (boottime(), limits)


def _key(claim: Claim, device_class: str) -> _Key:
    return claim.task, claim.queue, device_class, bool(claim.devices)


def _default(key: _Key) -> Limits:
    return _WITH_DEVICES if key[-1] else Limits()


def _asked(key: _Key) -> dict[str, str]:
    task, queue, device_class, _ = key
    return {"task": task, "device_class": device_class, "queue": queue}
