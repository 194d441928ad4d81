"""Watches a job's devices: whether they do anything at all, and whether they still work."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from gangq.watchdogs.activity import movement
from gangq.watchdogs.beats import WAIT_FACTOR, Beat, Beaten, BeatWatch, Terms
from gangq.watchdogs.codes import ExitCode
from gangq.watchdogs.findings import Trip
from gangq.watchdogs.idle import QUIET_PCT, Sample, Verdict, judge, summary
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.sensors import WorkSensors
from gangq.watchdogs.watch import Setup

if TYPE_CHECKING:
    from typing import Unpack

    from gangq.gpu.reading import DeviceEvent, DeviceReading

_SUSPECT_SHARE = 0.2
"""Of a window. A share and no number of seconds: a replica, whose window never ends, may be idle for ever."""
_LEAST_SAMPLES = 5
_KEPT_SAMPLES = 30


class _Seen(NamedTuple):
    """What a look finds that may end a window, besides the samples: how many beats have come, the pauses counted, and
    whether the devices may be idle now.
    """

    beats: int
    paused: float
    exempt: bool


class _WithDevices(Beaten):
    __slots__ = (
        "before",
        "errors_from",
        "event_at",
        "first_at",
        "kept",
        "quiet_since",
        "sample_at",
        "seen",
        "touched",
        "waited",
    )

    def __init__(self, since: float, paused: float, job: Any, sensors: WorkSensors, terms: Terms) -> None:
        super().__init__(since, paused, job, sensors, terms)
        self.event_at = since
        self.first_at: dict[str, float] = {}
        """When each device was first read while the job ran."""
        self.errors_from: dict[str, DeviceReading] = {}
        """The reading of each device from which on its memory errors are this job's."""
        self.before: Sample | None = None
        self.kept: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        """The latest samples of the window."""
        self.quiet_since: float | None = None
        self.sample_at = since
        self.touched = False
        self.waited = False
        """Whether it was seen to wait, rather than to be silent, since it fell quiet."""
        self.seen: _Seen | None = None
        """What was seen at the look before; None: there was none."""


class GpuHealthWatchdog(BeatWatch[_WithDevices]):
    """Watches a job that holds devices from its start. It needs no beats, but takes them into account.

    *Idle wedge*, exit 78: for a whole window no device did anything and nothing moved on the host.

    - A window can begin once the job has used a device, or has sent a beat (outside of ``load``), or its load grace
      is over. Use of a shared device does not count: it may be another program's.
    - A beat ends the window and begins a new one.
    - No window runs in phase ``long`` (for ``long_phase_s`` at most), in ``load`` and ``save`` (for the load grace),
      and in ``wait`` (until the next beat).
    - A wait that may be legitimate (a sleep, a loop that polls, a lock that another program holds) gets
      three windows.

    *Fault*, exit 85, at once: a fatal event of one of its devices or of the whole driver, uncorrectable memory
    errors growing. Other events of its devices are suspicions.

    A job without devices is not watched.
    """

    _class = "health"
    _thread_name = "gangq-health"

    def __init__(
        self,
        *,
        window_s: float = Terms.window_s,
        load_grace_s: float = Terms.load_grace_s,
        long_phase_s: float = Terms.long_phase_s,
        sample_s: float = 2.0,
        sensors: WorkSensors | None = None,
        **setup: Unpack[Setup],
    ) -> None:
        """Events are asked for every ``poll_s``, samples taken every ``sample_s``. ``sensors`` see the job, its
        devices and their events. See :class:`gangq.watchdogs.watch.Setup` for the rest.

        Raises:
            InvalidInput: a number that makes no sense, by name.
        """
        terms = Terms(load_grace_s=load_grace_s, long_phase_s=long_phase_s, window_s=window_s)
        super().__init__(terms, sensors, setup)
        self._sample_s = length_s("sample_s", sample_s, most=60)

    _watched = _WithDevices

    # -- the rules -------------------------------------------------------------------------------------------

    def _look(self, job: _WithDevices, now: float) -> None:
        if self._faults(job):
            return
        if now < job.sample_at:
            return
        job.sample_at = now + self._sample_s
        sample = job.sensors.sample(None if job.before is None else job.before.at)
        if not sample.uuids or self._memory_errors(job, sample):
            return
        before, job.before = job.before, sample
        self._note_use(job, sample)
        job.kept.append(sample)
        if before is not None:
            self._judge_sample(job, before, sample, now)

    def _note_use(self, job: _WithDevices, sample: Sample) -> None:
        """Note whether the job has used a device, and not the job before it or another program."""
        for reading in sample.devices:
            if reading.at < job.since:
                continue
            # A reading covers the time since the one before it, so a device's first may show the job before.
            first_at = job.first_at.setdefault(reading.uuid, reading.at)
            if reading.at == first_at or (reading.shared and reading.gpu_scope == "device"):
                continue
            if reading.gpu_pct is not None and reading.gpu_pct > QUIET_PCT:
                job.touched = True

    def _judge_sample(self, job: _WithDevices, before: Sample, sample: Sample, now: float) -> None:
        verdict = judge((before, sample))
        last, then = job.last, job.seen or _Seen(0, job.paused, False)
        beats = 0 if last is None else last.number
        seen = job.seen = _Seen(beats, self.pauses.total_s, self._exempt(job, last, now))
        ended = _why_ended(then, seen, verdict)
        if ended is None:
            first = sample if then.exempt else before
            self._judge_window(job, sample, self._extend_window(job, first, sample, verdict), now)
            return
        if job.suspected:
            self._log.info("rearmed", extra={"reason": ended})
        self._restart_window(job, sample)

    def _extend_window(self, job: _WithDevices, first: Sample, sample: Sample, verdict: Verdict) -> float:
        """Return for how many seconds it has been quiet: since ``first``, if a window begins now."""
        if job.quiet_since is None:
            job.quiet_since = first.at
        got_on_at = job.sensors.got_on_at
        job.waited = job.waited or verdict.waiting or (got_on_at is not None and got_on_at > job.quiet_since)
        return sample.at - job.quiet_since

    def _judge_window(self, job: _WithDevices, sample: Sample, quiet_s: float, now: float) -> None:
        window_s = job.terms.window_s * (WAIT_FACTOR if job.waited else 1)
        if quiet_s >= window_s and len(job.kept) >= _LEAST_SAMPLES:
            what = "it only waited" if job.waited else "nothing else moved"
            message = f"its devices did nothing and {what} for {quiet_s:.0f} s"
            evidence = self._evidence(job, quiet_s, now)
            self._trip(job, Trip(ExitCode.HEALTH, "idle", message, evidence, sample.uuids, job=job.job))
            self._restart_window(job, sample)
        elif quiet_s >= _SUSPECT_SHARE * job.terms.window_s and not job.suspected:
            job.suspected = True
            message = f"its devices have done nothing for {quiet_s:.0f} s; {window_s:g} s end it"
            self._suspect(job, message, self._evidence(job, quiet_s, now))

    def _restart_window(self, job: _WithDevices, sample: Sample) -> None:
        job.quiet_since, job.suspected, job.waited = None, False, False
        job.kept.clear()
        job.kept.append(sample)

    def _exempt(self, job: _WithDevices, last: Beat | None, now: float) -> bool:
        """Whether the devices may be idle now: the job loads, saves, waits, or is in a long phase."""
        paused = self.pauses.total_s
        phase = None if last is None else last.phase
        if last is not None and phase in ("load", "save", "long"):
            phase_s = now - last.phase_since - (paused - last.paused)
            return phase_s < (job.terms.long_phase_s if phase == "long" else job.terms.load_grace_s)
        if phase == "wait":
            return True
        return last is None and not job.touched and job.ran_s(now, paused) < job.terms.load_grace_s

    def _faults(self, job: _WithDevices) -> bool:
        """Trip or suspect for events of the devices; True when it tripped, even if that was called off."""
        if job.sensors.sampler is None:
            return False
        held = job.sensors.uuids
        for event in job.sensors.sampler.events(job.event_at):
            job.event_at = max(job.event_at, event.at)
            if event.uuid is not None and event.uuid not in held:
                continue
            evidence = {"event": event.as_json(), "samples": summary(list(job.kept))}
            message = _describe(event)
            if event.fatal:
                blamed = held if event.uuid is None else (event.uuid,)
                trip = Trip(ExitCode.FAULT, event.kind, message, evidence, blamed, event.application, job.job)
                self._trip(job, trip)
                return True
            self._suspect(job, message, evidence, "fault")
        return False

    def _memory_errors(self, job: _WithDevices, sample: Sample) -> bool:
        """Trip on uncorrectable memory errors that grow; True when it tripped."""
        # Not on the recovery action that a reading shows: only the event says whether work can go on.
        for reading in sample.devices:
            if reading.at < job.since:
                continue
            first = job.errors_from.setdefault(reading.uuid, reading)
            then, now = first.ecc_uncorrectable, reading.ecc_uncorrectable
            if now is None:
                continue
            if then is None:
                # Its first readings did not say: count from the first that does.
                job.errors_from[reading.uuid] = reading
            elif now > then:
                message = f"device {reading.uuid}: uncorrectable memory errors went from {then} to {now} while it ran"
                evidence = {"first": first.as_json(), "now": reading.as_json()}
                self._trip(job, Trip(ExitCode.FAULT, "ecc", message, evidence, (reading.uuid,), job=job.job))
                job.errors_from[reading.uuid] = reading
                return True
        return False

    def _evidence(self, job: _WithDevices, quiet_s: float, now: float) -> dict[str, Any]:
        kept = list(job.kept)
        hosts = [sample.host for sample in kept if sample.host is not None]
        return {
            "quiet_s": round(quiet_s, 1),
            "window_s": job.terms.window_s,
            "ran_s": round(job.ran_s(now, self.pauses.total_s), 1),
            "paused_s": round(self.pauses.total_s - job.paused, 3),
            "window": summary(kept, [movement(a, b) for a, b in pairwise(hosts) if b.at > a.at]),
        }


def _why_ended(then: _Seen, now: _Seen, verdict: Verdict) -> str | None:
    """Why a window ends between these two looks; None: it goes on."""
    if now.beats != then.beats:
        return "a beat came"
    if now.paused != then.paused:
        return "there was a pause"
    if now.exempt:
        return "its devices may idle in this phase"
    return None if verdict.idle or verdict.waiting else verdict.why


def _describe(event: DeviceEvent) -> str:
    whose = "the driver" if event.uuid is None else f"device {event.uuid}"
    code = "" if event.code is None else f" {event.code}"
    return f"{whose}: {event.kind}{code}: {event.advice}"
