"""What is known of the devices: written by the sampler's thread, read by any."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gangq.gpu.findings import Findings
from gangq.gpu.reading import VALUES, DeviceEvent, DeviceReading
from gangq.proc.clock import boottime

log = logging.getLogger("gangq.gpu.sampler")

_ALONE_S = 60.0
"""For how long a device that hung repeatedly is not read, so that its neighbours are."""


class SamplerState:
    """Readings, events and doubts of the devices watched. Owns the lock; no method waits for a driver or a process.

    ``poll_s`` is the time of a round, ``late_s`` after how long a reading is late, ``start_s`` how long a driver may
    take to open.
    """

    def __init__(
        self, watched: Iterable[str], *, poll_s: float, late_s: float, start_s: float, history_s: float
    ) -> None:
        self._poll_s = poll_s
        self._late_s = late_s
        self._start_s = start_s
        self._lock = threading.Lock()
        self._watched = dict.fromkeys(watched, 0.0)
        """The devices watched, and since when (boottime)."""
        self._pids: Callable[[], Iterable[int]] = tuple
        """Code of the caller, which may raise anything."""
        self._readings: dict[str, deque[DeviceReading]] = {}
        """The latest of each device, oldest first."""
        self._most_readings = max(2, int(history_s / poll_s))
        self._findings = Findings()
        self._slow: frozenset[str] = frozenset()
        self._alone_until: dict[str, float] = {}

    # -- for any thread --------------------------------------------------------------------------------------

    def watch(self, uuids: Iterable[str], pids: Callable[[], Iterable[int]]) -> None:
        """Read these devices from the next round on; `pids` names the caller's own processes, asked each round."""
        now = boottime()
        with self._lock:
            self._watched = {uuid: self._watched.get(uuid, now) for uuid in uuids}
            self._pids = pids

    def readings(self) -> dict[str, DeviceReading]:
        """The latest reading of each watched device, without values where it gives none; none before its first."""
        with self._lock:
            return {uuid: last for uuid in self._watched if (last := self._last(uuid))}

    def history(self, uuid: str, since: float) -> list[DeviceReading]:
        """The kept readings of a device taken after `since` (boottime seconds), oldest first."""
        with self._lock:
            return [reading for reading in self._readings.get(uuid, ()) if reading.at > since]

    def events(self, since: float) -> list[DeviceEvent]:
        """The kept events learned of after `since` (boottime seconds), oldest first.

        A caller that passes the `at` of the last event it got misses none.
        """
        with self._lock:
            return self._findings.since(since)

    def doubtful(self) -> frozenset[str]:
        """The devices of which the driver does not answer in time: no new work should begin there."""
        return self._slow

    # -- for the sampler's thread ----------------------------------------------------------------------------

    def due(self) -> list[str]:
        """The watched devices that are to be read. Those that hung come last, after all others."""
        now = time.monotonic()
        with self._lock:
            due = [uuid for uuid in self._watched if self._alone_until.get(uuid, 0.0) <= now]
            return sorted(due, key=self._findings.hangs)

    def take(self, line: Mapping[str, Any]) -> None:
        """Take what the process said of a device."""
        found: list[DeviceEvent | None] = []
        with self._lock:
            if "reading" in line:
                reading = DeviceReading.from_json(line["reading"])
                took_s = boottime() - reading.at
                self._keep(reading)
                if len(reading.unknown) < len(VALUES):
                    self._doubt(reading.uuid, took_s > self._late_s)
                found.extend(self._findings.reading(reading))
            elif "notice" in line:
                found.append(self._findings.notice(*line["notice"]))
            elif "count" in line:
                found.append(self._findings.count(line["count"]))
        if "no_events" in line:
            said = "device_events" if line["why"] is None else "no_device_events"
            log.info(said, extra={"device": line["no_events"], "reason": line["why"]})
        for event in found:
            _tell(event)

    def hang(self, blamed: str | None, during: str, survived: bool) -> float:
        """A driver call did not return, for the device `blamed` (None: for any). Returns for how many seconds no
        process shall be started: a driver that hangs repeatedly as a whole is left alone, as a device is.

        What happens with the defaults, in seconds since the first call that does not return:

        ======  ======================================  ===============================================
        at      one device hangs                        the whole driver hangs
        ======  ======================================  ===============================================
        6       no reading came, of any device: all     the same
                are doubtful, and no new job begins
        30      the process is killed; the event        the same
                ``driver_hang`` is not fatal; a fresh
                process reads the other devices first
        61      the same call hangs: fatal (85)         opening the driver hangs, another call: not
                                                        fatal
        91                                              opening it hangs again: fatal (85)
        ======  ======================================  ===============================================

        If the process survives SIGKILL the first event is fatal, at 32 s. After two hangs of one call the device (or
        the driver) is left alone for a minute.

        The whole driver takes longer on purpose: a process that was killed in a call may hold the driver for as long
        as it takes to die, so the first opening that hangs proves nothing.
        """
        with self._lock:
            event = self._findings.hang(blamed, during, unkillable=survived)
            again = self._findings.hung_again(blamed)
            at = boottime()
            for uuid in self._watched if blamed is None else (blamed,):
                self._keep(DeviceReading.nothing(uuid, at, "timeout"))
                self._doubt(uuid, True)
        _tell(event)
        if again and blamed is not None:
            self._alone_until[blamed] = time.monotonic() + _ALONE_S
        return _ALONE_S if again and blamed is None else 0.0

    def mark_stale(self, why_not: str, known_from: float, *, running: bool) -> None:
        """Give every watched device without a fresh reading one that says why there is none, once a round.

        Nothing is missed that should have come before `known_from` (boottime), or before the device was watched;
        `running`: there is a process that reads.
        """
        now = boottime()
        with self._lock:
            for uuid, watched_from in self._watched.items():
                last = self._last(uuid)
                heard_at = max(known_from, watched_from, 0.0 if last is None else last.at)
                if now - heard_at > self._patience_s(last, running):
                    self._keep(DeviceReading.nothing(uuid, now, why_not))
                    if why_not == "timeout":
                        self._doubt(uuid, True)

    def _keep(self, reading: DeviceReading) -> None:
        self._readings.setdefault(reading.uuid, deque(maxlen=self._most_readings)).append(reading)

    def _last(self, uuid: str) -> DeviceReading | None:
        kept = self._readings.get(uuid)
        return kept[-1] if kept else None

    def _patience_s(self, last: DeviceReading | None, running: bool) -> float:
        """How long after a reading the next one is missed."""
        if not running:
            return self._poll_s
        if last is None:
            return self._start_s  # The driver may still be opened.
        if len(last.unknown) == len(VALUES):
            return self._poll_s  # It was missed before.
        return self._late_s + 2 * self._poll_s

    def _doubt(self, uuid: str, slow: bool) -> None:
        if (uuid in self._slow) is not slow:
            self._slow = self._slow | {uuid} if slow else self._slow - {uuid}
            log.warning("device_silent" if slow else "device_answers", extra={"device": uuid})


def _tell(event: DeviceEvent | None) -> None:
    if event is not None:
        level = logging.ERROR if event.fatal else logging.WARNING
        log.log(level, "device_event", extra={"event": event.as_json()})
