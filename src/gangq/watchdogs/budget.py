"""The wall clock: the one watchdog that needs no evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gangq.watchdogs.codes import ExitCode
from gangq.watchdogs.findings import Trip
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.watch import Setup, Watch, Watched

if TYPE_CHECKING:
    from typing import Self, Unpack

BUDGET_S = 2100.0
"""What a job gets by default, seconds."""

_SUSPECT_SHARE = 0.9


class _Budgeted(Watched):
    __slots__ = ("limit_s", "trips_at_s")

    def __init__(self, since: float, paused: float, job: Any, limit_s: float) -> None:
        super().__init__(since, paused, job)
        self.limit_s = limit_s
        self.trips_at_s = limit_s


class Watchdog(Watch[_Budgeted]):
    """Brackets every job: once it has run for its budget, exit 75.

    Time counts from :meth:`start`, less the pauses of this process (stopped, starved, asleep with the host).
    At 90 % of the budget it is suspect, once. A trip that was called off is tried again after another budget.
    """

    _class = "budget"
    _thread_name = "gangq-budget"

    def __init__(self, *, budget_s: float = BUDGET_S, **setup: Unpack[Setup]) -> None:
        """``budget_s`` is what :meth:`start` takes when it is given none; see
        :class:`gangq.watchdogs.watch.Setup` for the rest.

        Raises:
            InvalidInput: a number that makes no sense, by name.
        """
        super().__init__(**setup)
        self._budget_s = length_s("budget_s", budget_s)

    def start(self, *, budget_s: float | None = None, job: Any = None) -> Self:
        """A job begins. ``budget_s`` [the constructor's]; ``job`` is passed on in trips and suspicions.

        Raises:
            InvalidInput: a budget that makes no sense.
        """
        limit_s = self._budget_s if budget_s is None else length_s("budget_s", budget_s)
        self._begin(_Budgeted(self._clock(), self.pauses.total_s, job, limit_s))
        return self

    def _look(self, job: _Budgeted, now: float) -> None:
        ran_s = job.ran_s(now, self.pauses.total_s)
        if ran_s >= job.trips_at_s:
            message = f"it ran for {ran_s:.1f} s, its budget is {job.limit_s:g} s"
            self._trip(job, Trip(ExitCode.BUDGET, "budget", message, self._evidence(job, ran_s), job=job.job))
            job.trips_at_s = ran_s + job.limit_s
        elif ran_s >= _SUSPECT_SHARE * job.limit_s and not job.suspected:
            job.suspected = True
            message = f"it has run for {ran_s:.1f} s of its budget of {job.limit_s:g} s"
            self._suspect(job, message, self._evidence(job, ran_s))

    def _evidence(self, job: _Budgeted, ran_s: float) -> dict[str, Any]:
        return {
            "ran_s": round(ran_s, 3),
            "budget_s": job.limit_s,
            "paused_s": round(self.pauses.total_s - job.paused, 3),
        }
