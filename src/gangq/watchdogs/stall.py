"""Watches a job that sends beats: from the first beat on, another one is due."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gangq.watchdogs.beats import WAIT_FACTOR, WARM_UP_BEATS, Beat, Beaten, BeatWatch, Terms, inert
from gangq.watchdogs.codes import ExitCode
from gangq.watchdogs.findings import Trip
from gangq.watchdogs.idle import Sample, Verdict, judge
from gangq.watchdogs.sensors import WorkSensors
from gangq.watchdogs.watch import Setup

if TYPE_CHECKING:
    from typing import Unpack

STALL_TIMEOUT_S = 120.0
"""Seconds without a beat before a stall is suspected, by default."""
LEARNED_FACTOR = 5.0
"""A job may be silent for this many times the longest gap between two of its beats."""

_CONFIRM_SAMPLES = 5
_SLIDE_FACTOR = 3.0


class SilenceLimits(NamedTuple):
    """After how much silence what happens, seconds: ``due`` a suspicion, ``waited`` the limit for a job that waits
    (or whose devices spin), ``overdue`` the one that holds even for a busy job; ``unit`` is the re-arm period: how
    long until the next suspicion after one that was dropped.
    """

    due: float
    waited: float
    overdue: float
    unit: float


class _Silent(Beaten):
    __slots__ = ("next_s", "rearmed", "seen", "window", "window_paused")

    def __init__(self, since: float, paused: float, job: Any, sensors: WorkSensors, terms: Terms) -> None:
        super().__init__(since, paused, job, sensors, terms)
        self.seen: Beat | None = None
        """The latest beat at the look before."""
        self.next_s: float | None = None
        """At how much silence to look again; None: when it is due."""
        self.rearmed = 0
        self.window: list[Sample] = []
        self.window_paused = 0.0


class StallWatchdog(BeatWatch[_Silent]):
    """Inert until the first :meth:`beat`; then a beat is due every stall timeout. Exit 76.

    Silence is only a suspicion. It opens a window of at least ``confirm_s`` and five samples, and trips
    (reason ``idle``) when the devices were quiet and nothing moved in all of it. Something busy or moving in it
    re-arms for another timeout; so does what cannot be known.

    A wait that may be legitimate (a sleep, a loop that polls, a lock that another program holds) gets
    three timeouts (``waits``). Busy is not progress, though: at ``overdue_factor`` timeouts of silence it
    trips whatever the devices do (``no_progress``), at three where they are busy without touching memory or
    drawing power (``spin``). If nothing at all is known, of the host or the devices, neither limit trips.

    A beat's phase says what comes next: ``run`` (or none), ``load`` and ``save`` (the load grace instead of the
    timeout, unless that is longer), ``long`` (exempt, for ``long_phase_s`` at most), ``wait`` (exempt until the next
    beat).

    Unless it was set, the timeout grows with the job: 5 times the longest gap between two of its beats.
    """

    _class = "stall"
    _thread_name = "gangq-stall"
    _default_poll_s = 1.0

    def __init__(
        self,
        *,
        stall_timeout_s: float | None = None,
        confirm_s: float = Terms.confirm_s,
        load_grace_s: float = Terms.load_grace_s,
        long_phase_s: float = Terms.long_phase_s,
        overdue_factor: float = Terms.overdue_factor,
        sensors: WorkSensors | None = None,
        **setup: Unpack[Setup],
    ) -> None:
        """``stall_timeout_s`` [120, and learned]; given, it stays as it is. ``sensors`` [this process, without
        devices]. See :class:`gangq.watchdogs.watch.Setup` for the rest.

        Raises:
            InvalidInput: a number that makes no sense, by name.
        """
        terms = Terms(
            load_grace_s=load_grace_s,
            long_phase_s=long_phase_s,
            stall_timeout_s=stall_timeout_s,
            confirm_s=confirm_s,
            overdue_factor=overdue_factor,
        )
        super().__init__(terms, sensors, setup)

    _watched = _Silent

    @property
    def learned(self) -> tuple[float, int]:
        """Longest gap between two beats of the present job, in seconds, and how many beats that rests on; warm-up,
        other phases than ``run`` and pauses do not count.
        """
        job = self._job
        if job is None or job.last is None:
            return 0.0, 0
        self._learn(job)
        return job.longest_s, max(0, job.last.number - WARM_UP_BEATS)

    # -- the rules -------------------------------------------------------------------------------------------

    def _look(self, job: _Silent, now: float) -> None:
        job.sensors.look()
        self._learn(job)
        last = job.last
        if last is None:
            return
        if job.seen is not last:
            if job.seen is not None and (job.window or job.rearmed):
                silence_s = last.at - job.seen.at - (last.paused - job.seen.paused)
                self._log.info("beat_came", extra={"silence_s": round(silence_s, 1)})
            job.seen, job.next_s, job.window, job.rearmed = last, None, [], 0
        paused = self.pauses.total_s
        silence_s = now - last.at - (paused - last.paused)
        limits = _limits(job, last)
        if not job.window:
            if silence_s < (limits.due if job.next_s is None else job.next_s):
                return
            job.window_paused = paused
            if job.rearmed == 0:
                # Once for each silence: a job that is merely slow would fill the record, and make its whole fleet
                # look suspect.
                self._suspect(
                    job,
                    f"no beat for {silence_s:.1f} s, one is due every {limits.due:g} s",
                    self._evidence(job, last, silence_s, limits),
                )
        elif paused != job.window_paused:
            # What was seen before the pause and what is seen after it are not one window.
            job.window, job.window_paused = [], paused
        sample = job.sensors.sample(job.window[-1].at if job.window else None)
        if job.last is not last:
            return
        job.window.append(sample)
        if len(job.window) >= 2:
            self._decide(job, last, silence_s, limits)

    def _decide(self, job: _Silent, last: Beat, silence_s: float, limits: SilenceLimits) -> None:
        """Trip, re-arm, or go on looking."""
        verdict = judge(job.window)
        full, got_on = _full(job.window, job.terms), self._got_on(job, limits)
        outcome = _outcome(verdict, full, got_on, silence_s, limits)
        if outcome == "unknown":
            # One reading that failed must not cost a whole timeout: the window slides on for a while.
            verdict = judge(_tail(job.window, job.terms))
            slid = _length_s(job.window) >= _SLIDE_FACTOR * job.terms.confirm_s
            outcome = "idle" if verdict.idle else "rearm" if slid else "look"
        if outcome == "rearm":
            self._rearm(job, silence_s, limits, verdict)
        elif outcome != "look":
            self._trip_because(job, last, silence_s, limits, verdict, outcome)

    def _got_on(self, job: _Silent, limits: SilenceLimits) -> bool:
        """Whether Python got on lately, though not in this window: a loop may sleep for longer than that."""
        at = job.sensors.got_on_at
        return at is not None and self._clock() - at <= limits.unit / 2

    def _look_again(self, job: _Silent, silence_s: float, limits: SilenceLimits) -> None:
        """Close the window; the next one opens after another unit of silence, or where a limit comes before that."""
        job.window = []
        job.rearmed += 1
        job.next_s = silence_s + limits.unit
        for limit in (limits.overdue, limits.waited):
            if silence_s < limit < job.next_s:
                job.next_s = limit

    def _rearm(self, job: _Silent, silence_s: float, limits: SilenceLimits, verdict: Verdict) -> None:
        self._look_again(job, silence_s, limits)
        self._log.info(
            "rearmed",
            extra={"silence_s": round(silence_s, 1), "reason": verdict.why, "times": job.rearmed},
        )

    def _trip_because(
        self, job: _Silent, last: Beat, silence_s: float, limits: SilenceLimits, verdict: Verdict, reason: str
    ) -> None:
        evidence = self._evidence(job, last, silence_s, limits)
        evidence |= {"why": verdict.why, "window": verdict.evidence}
        what = {
            "idle": verdict.why,
            "waits": f"{verdict.why}, and that is {WAIT_FACTOR:g} times overdue",
            "spin": "its devices are busy without touching memory or drawing power",
            "no_progress": f"that is {job.terms.overdue_factor:g} times overdue, and busy is not progress",
        }[reason]
        message = f"no beat for {silence_s:.1f} s after {_place(last)}: {what}"
        self._trip(job, Trip(ExitCode.STALL, reason, message, evidence, job=job.job))
        # It was called off.
        self._look_again(job, silence_s, limits)

    def _learn(self, job: _Silent) -> None:
        new_gap = job.new_gap
        if new_gap is not None:
            job.new_gap = None
            gap, paused = new_gap
            job.longest_s = max(job.longest_s, gap - (self.pauses.total_s - paused))

    def _evidence(self, job: _Silent, last: Beat, silence_s: float, limits: SilenceLimits) -> dict[str, Any]:
        return {
            "silence_s": round(silence_s, 3),
            "due_s": limits.due,
            "overdue_s": limits.overdue,
            "longest_gap_s": round(job.longest_s, 3),
            "rearmed": job.rearmed,
            "paused_s": round(self.pauses.total_s - job.paused, 3),
            "last_beat": last.as_json(),
        }


def _outcome(verdict: Verdict, full: bool, got_on: bool, silence_s: float, limits: SilenceLimits) -> str:
    """What follows from a window: the reason of a trip, ``rearm``, ``look`` (go on looking) or ``unknown``. The first
    row that fits:

    ==============================================  ==============================  =====================
    the window shows                                and                             outcome
    ==============================================  ==============================  =====================
    anything that is known                          silent for ``limits.overdue``   ``no_progress``
    work                                                                            ``rearm``
    a wait; devices that spin; nothing, although    not yet silent for              ``rearm``
    Python got on lately (``got_on``)               ``limits.waited``
    the same                                        it is ``full``                  ``spin`` or ``waits``
    the same                                                                        ``look``
    nothing moved                                   it is ``full``                  ``idle``
    what cannot be known                            it is ``full``                  ``unknown``
    either of these                                                                 ``look``
    ==============================================  ==============================  =====================
    """
    if silence_s >= limits.overdue and verdict.known:
        return "no_progress"
    moved = verdict.idle is False
    if moved and not verdict.waiting and not verdict.spinning:
        return "rearm"
    if moved or (verdict.idle and got_on):
        if silence_s < limits.waited:
            return "rearm"
        reason = "spin" if verdict.spinning else "waits"
    else:
        reason = "idle" if verdict.idle else "unknown"
    return reason if full else "look"


def _limits(job: _Silent, last: Beat) -> SilenceLimits:
    terms = job.terms
    unit = due = STALL_TIMEOUT_S if terms.stall_timeout_s is None else terms.stall_timeout_s
    learns = terms.stall_timeout_s is None if terms.learn is None else terms.learn
    if learns:
        unit = due = max(due, LEARNED_FACTOR * job.longest_s)
    if last.phase in ("load", "save"):
        unit = due = max(due, terms.load_grace_s)
    elif last.phase == "long":
        # Repeating the word does not prolong the exemption: it counts from when the phase began.
        due = max(due, terms.long_phase_s - (last.at - last.phase_since))
    elif last.phase == "wait":
        return SilenceLimits(math.inf, math.inf, math.inf, unit)
    waited, overdue = (due + (times - 1) * unit for times in (WAIT_FACTOR, terms.overdue_factor))
    return SilenceLimits(due, waited, overdue, unit)


def _full(window: Sequence[Sample], terms: Terms) -> bool:
    return len(window) >= _CONFIRM_SAMPLES and _length_s(window) >= terms.confirm_s


def _length_s(window: Sequence[Sample]) -> float:
    return window[-1].at - window[0].at


def _tail(window: Sequence[Sample], terms: Terms) -> Sequence[Sample]:
    """The shortest end of a window that is one by itself."""
    first = len(window) - _CONFIRM_SAMPLES
    while first > 0 and not _full(window[first:], terms):
        first -= 1
    return window[max(first, 0) :]


def _place(beat: Beat) -> str:
    where = f"beat {beat.number}" if beat.step is None else f"step {inert(beat.step)}"
    return where if beat.total is None or beat.step is None else f"{where} of {inert(beat.total)}"
