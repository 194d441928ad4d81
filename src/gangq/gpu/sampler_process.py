"""Owns the sampling process: starts it, reads its lines, and replaces it when a driver call hangs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gangq import private
from gangq.gpu.current_call import CurrentCall
from gangq.gpu.detection import Detection
from gangq.gpu.findings import Findings
from gangq.gpu.reading import VALUES, DeviceEvent, DeviceReading
from gangq.proc import killing, procfs
from gangq.proc.clock import boottime

log = logging.getLogger("gangq.gpu.sampler")

_MAX_LEFT_BEHIND = 3
_STDERR_BYTES = 2000
_LATE_S = 1.0
_SLOW_S = 5.0
_MAX_PIDS = 4096
_MAX_LINE = 1 << 20


class Child:
    """One sampling process: its pipes, its latest call, and how it ended."""

    def __init__(self, process: subprocess.Popen[bytes], call: CurrentCall, now: float) -> None:
        self.process = process
        self.call = call
        self.active_at = now
        self.calling: str | None = None
        self.what = "start"
        self.sent = b""
        self.rounds = 0
        self.failed: str | None = None
        self.stderr_tail = b""
        self._rest = b""
        self._unsent = b""
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    def lines(self, now: float) -> list[dict[str, Any]] | None:
        """Return what it has said since; None when it has closed its side."""
        assert self.process.stdout is not None
        said: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return said
            if not data:
                return said or None
            self.active_at = now
            *lines, self._rest = (self._rest + data).split(b"\n")
            # A process that ends in the middle of a line has said nothing by it.
            self._rest = self._rest[-_MAX_LINE:]
            for line in lines:
                with contextlib.suppress(ValueError):
                    said.append(json.loads(line))

    def read_stderr(self) -> None:
        """Keep the end of what it prints on stderr."""
        stderr = self.process.stderr
        if stderr is None or stderr.closed:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(stderr.fileno(), 1 << 16)
            self.stderr_tail = (self.stderr_tail + data)[-_STDERR_BYTES:]
            if not data:
                stderr.close()

    def order(self, line: bytes) -> None:
        """Send an order unless it is the last one sent; never waits for a process that does not read."""
        if not self._unsent and line != self.sent:
            self.sent = self._unsent = line
        if self._unsent and self.process.stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                self._unsent = self._unsent[os.write(self.process.stdin.fileno(), self._unsent) :]

    def close(self) -> None:
        """Close the pipes, and forget its last call."""
        self.call.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class SamplerProcess:
    """Reads devices through an expendable process, and makes a finding of a driver that does not answer.

    `detection` says whose devices and which driver; until `watch` is called all of them are read and no process
    is the caller's own. Without a driver (declared devices, or none) it starts nothing and has no readings.

    A round is read every `poll_s`. If a single driver call takes longer than `deadline_s` (`start_s` while the driver
    is being opened), the process gets SIGKILL and is replaced; nothing waits for it longer than two seconds. The hang
    is an event. It is fatal when the same call hangs again within ten minutes or when the process survives. A device
    that hangs repeatedly is left out for a minute at a time, so that the others are read. `history` keeps `history_s`
    seconds.

    A slow driver is not a broken one: a device whose reading takes longer than five seconds (or
    `deadline_s`) is `doubtful`, and no event tells of it.

    One thread, "gangq-sampler", does all of it; every other method only looks at what that thread has left.
    """

    def __init__(
        self,
        detection: Detection,
        environ: Mapping[str, str] | None = None,
        poll_s: float = 1.0,
        deadline_s: float = 30.0,
        *,
        start_s: float = 30.0,
        history_s: float = 360.0,
        kill: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = detection.source
        self._environ = dict(os.environ if environ is None else environ)
        self._poll_s = poll_s
        self._deadline_s = deadline_s
        self._late_s = min(deadline_s, _SLOW_S)
        self._start_s = start_s
        self._history_len = max(2, int(history_s / poll_s))
        self._kill = kill
        self._lock = threading.Lock()
        self._watched = tuple(device.uuid for device in detection.devices)
        self._pids: Callable[[], Iterable[int]] = tuple
        self._history: dict[str, deque[DeviceReading]] = {}
        self._findings = Findings()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._wake_r, self._wake_w = -1, -1
        # Of the thread alone.
        self._child: Child | None = None
        self._left_behind: list[subprocess.Popen[bytes]] = []
        self._start_at = 0.0
        self._failures = 0
        self._why_not = "timeout"
        self._alone_until: dict[str, float] = {}
        self._known_from = 0.0
        self._slow: frozenset[str] = frozenset()
        self._order_at = 0.0

    def start(self) -> None:
        """Start the thread and the process; a host without a driver gets neither."""
        if self._thread is not None or self._source not in ("nvml", "amdsmi"):
            return
        self._stopping.clear()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gangq-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill the process and end the thread; takes at most a few seconds, whatever the driver does."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._wake()
        thread.join(2 * killing.DEATH_S + 1.0)
        if not thread.is_alive():
            with self._lock:
                os.close(self._wake_r)
                os.close(self._wake_w)
                self._wake_r = self._wake_w = -1

    def watch(self, uuids: Iterable[str], pids: Callable[[], Iterable[int]]) -> None:
        """Read these devices from the next round on; `pids` names the caller's own processes, asked each round."""
        with self._lock:
            self._watched = tuple(dict.fromkeys(uuids))
            self._pids = pids
            self._order_at = 0.0
        self._wake()

    def readings(self) -> dict[str, DeviceReading]:
        """Return the latest reading of each watched device; of one that gives none, a reading without values."""
        with self._lock:
            return {uuid: kept[-1] for uuid in self._watched if (kept := self._history.get(uuid))}

    def history(self, uuid: str, since: float) -> list[DeviceReading]:
        """Return the kept readings of a device taken after `since` (boottime seconds), oldest first."""
        with self._lock:
            return [reading for reading in self._history.get(uuid, ()) if reading.at > since]

    def events(self, since: float) -> list[DeviceEvent]:
        """Return the kept events learned of after `since` (boottime seconds), oldest first."""
        with self._lock:
            return self._findings.since(since)

    def doubtful(self) -> frozenset[str]:
        """Return the devices of which the driver does not answer in time: no new work should begin there."""
        return self._slow

    def pids(self) -> list[int]:
        """Return the processes started here that may be alive."""
        child, left = self._child, tuple(self._left_behind)
        return [process.pid for process in (*left, *((child.process,) if child else ()))]

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._wake_w >= 0:
                os.write(self._wake_w, b"!")

    def _run(self) -> None:
        self._known_from = boottime()
        self._start_at = time.monotonic()
        try:
            while not self._stopping.is_set():
                try:
                    self._once()
                except Exception:
                    # Sampling is what watchdogs see by: it goes on whatever one round ran into.
                    log.exception("sampler_failed")
                    self._stopping.wait(self._poll_s)
        finally:
            child, self._child = self._child, None
            if child is not None:
                self._end(child)

    def _once(self) -> None:
        now = time.monotonic()
        due = self._due(now)
        # A process without anything to read would only open the driver, which may be what hangs.
        if self._child is None and now >= self._start_at and due:
            self._spawn(now)
        child = self._child
        if child is not None and (now >= self._order_at or not child.sent):
            self._order_at = now + self._poll_s
            child.order(self._order(due))
        timeout_s = min(self._poll_s, self._deadline_s / 4)
        asleep_at = time.monotonic()
        ready = self._listen(child, timeout_s)
        if time.monotonic() - asleep_at - timeout_s > _LATE_S:
            # This process was stopped, or could not get the GIL: the silence is its own.
            self._known_from = boottime()
            if child is not None:
                child.active_at = time.monotonic()
        if child is not None and ready:
            self._read_child(child)
        if self._child is not None:
            self._judge_silence(self._child)
        self._mark_stale()

    def _listen(self, child: Child | None, timeout_s: float) -> bool:
        """Wait until the process or a caller has something to say; says whether it was the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            if child is not None:
                for stream in (child.process.stdout, child.process.stderr):
                    if stream is not None and not stream.closed:
                        selector.register(stream, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        return any(not isinstance(stream, int) for stream in ready)

    def _due(self, now: float) -> list[str]:
        """Return the watched devices that are to be read; those that hung come last.

        A second time it must not cost its neighbours their reading.
        """
        with self._lock:
            due = [uuid for uuid in self._watched if self._alone_until.get(uuid, 0.0) <= now]
            return sorted(due, key=self._findings.hangs)

    def _order(self, due: list[str]) -> bytes:
        """Return what the process shall do, as it is to be sent."""
        with self._lock:
            pids = self._pids
        try:
            own = sorted({int(pid) for pid in pids()})[:_MAX_PIDS]
        except Exception:
            log.exception("sampler_pids_failed")
            own = []
        return json.dumps({"watch": due, "pids": own}).encode() + b"\n"

    def _spawn(self, now: float) -> None:
        self._left_behind = [process for process in self._left_behind if process.poll() is None]
        if len(self._left_behind) >= _MAX_LEFT_BEHIND:
            # Each of them holds the driver in the kernel; another one would only join them.
            self._start_at = now + 60.0
            return
        command = [sys.executable, "-m", "gangq.gpu.sampling"]
        call = CurrentCall.create()
        command += [str(self._source), str(os.getpid()), str(self._poll_s), str(call.fd)]
        # It must import what this process imports, and nothing that merely lies in the working directory.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**private.without_secrets(self._environ), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,
                pass_fds=[call.fd],
            )
        except OSError as error:
            call.close()
            self._failed(f"cannot start {command[0]!r}: {error}")
            return
        self._child = Child(process, call, time.monotonic())

    def _read_child(self, child: Child) -> None:
        child.read_stderr()
        said = child.lines(time.monotonic())
        if said is None:
            self._ended(child)
            return
        for line in said:
            self._take(child, line)

    def _take(self, child: Child, line: Mapping[str, Any]) -> None:
        found: list[DeviceEvent | None] = []
        if "calling" in line:
            child.calling, child.what = line["calling"], line["what"]
        elif "reading" in line:
            reading = DeviceReading.from_json(line["reading"])
            with self._lock:
                took_s = boottime() - reading.at
                self._keep(reading)
                if len(reading.unknown) < len(VALUES):
                    self._doubt(reading.uuid, took_s > self._late_s)
                found.extend(self._findings.reading(reading))
        elif "notice" in line:
            with self._lock:
                found.append(self._findings.notice(*line["notice"]))
        elif "count" in line:
            with self._lock:
                found.append(self._findings.count(line["count"]))
        elif "round" in line:
            child.rounds += 1
            self._failures = 0
            self._why_not = "timeout"
        elif "no_events" in line:
            said = "device_events" if line["why"] is None else "no_device_events"
            log.info(said, extra={"device": line["no_events"], "reason": line["why"]})
        elif "failed" in line:
            child.failed = line["failed"]
        for event in found:
            self._tell(event)

    def _tell(self, event: DeviceEvent | None) -> None:
        if event is not None:
            level = logging.ERROR if event.fatal else logging.WARNING
            log.log(level, "device_event", extra={"event": event.as_json()})

    def _keep(self, reading: DeviceReading) -> None:
        kept = self._history.setdefault(reading.uuid, deque(maxlen=self._history_len))
        kept.append(reading)

    def _doubt(self, uuid: str, slow: bool) -> None:
        if (uuid in self._slow) is not slow:
            self._slow = self._slow | {uuid} if slow else self._slow - {uuid}
            log.warning("device_silent" if slow else "device_answers", extra={"device": uuid})

    def _judge_silence(self, child: Child) -> None:
        since, device, call = child.call.read()
        silent_s = time.monotonic() - max(child.active_at, since)
        opening = child.what in ("start", "open")
        if silent_s <= (
            self._start_s if opening else self._deadline_s + self._poll_s * (child.what == "wait")
        ):
            return
        state = _state(child.process.pid)
        with self._lock:
            blamed = child.calling if device is None else device
            if blamed is None and opening:
                # Opening the driver touches every device: most likely it is the one that hung before.
                blamed = self._findings.last_hung()
        survived = not self._end(child)
        self._child = None
        extra = {
            "device": blamed,
            "during": call or child.what,
            "silent_s": round(silent_s, 1),
            "kernel_state": state,
        }
        if state.startswith("T") and not survived:
            # It was stopped (SIGSTOP): the driver did not hang.
            log.warning("sampler_stopped", extra=extra)
            self._start_at = time.monotonic()
            return
        with self._lock:
            event = self._findings.hang(blamed, call or child.what, unkillable=survived)
            again = self._findings.hung_again(blamed)
            at = boottime()
            for uuid in self._watched if blamed is None else (blamed,):
                self._keep(DeviceReading.nothing(uuid, at, "timeout"))
                self._doubt(uuid, True)
        log.error("sampler_hung", extra={**extra, "pid": child.process.pid, "survived_sigkill": survived})
        self._tell(event)
        self._why_not = "timeout"
        self._start_at = time.monotonic()
        if again:
            if blamed is None:
                self._start_at += 60.0
            else:
                self._alone_until[blamed] = time.monotonic() + 60.0

    def _ended(self, child: Child) -> None:
        """The process has closed its side: collect it and say why."""
        self._child = None
        self._end(child, killing.DEATH_S)
        code = child.process.returncode
        words = child.stderr_tail.decode("utf-8", "replace").strip().splitlines()
        how = (
            f"it was killed by signal {-code}" if code is not None and code < 0 else f"it exited with {code}"
        )
        last = f", last output {words[-1][:200]!r}" if words else ""
        self._failed(child.failed or f"the sampling process ended: {how}{last}")

    def _failed(self, why: str) -> None:
        self._failures += 1
        wait_s = min(60.0, self._poll_s * 2 ** min(self._failures - 1, 10))
        self._start_at = time.monotonic() + wait_s
        if self._why_not != f"failed: {why}":
            log.warning("sampler_ended", extra={"reason": why, "again_in_s": wait_s})
        self._why_not = f"failed: {why}"

    def _end(self, child: Child, grace_s: float = 0.0) -> bool:
        """Kill the process, if it has not ended within the grace; says whether it is dead, and leaves it behind where
        it is not.
        """
        dead = killing.end_group(child.process, grace_s, self._kill)
        child.close()
        if not dead:
            self._left_behind.append(child.process)
        return dead

    def _mark_stale(self) -> None:
        """Give every watched device without a fresh reading one that says so, once a round."""
        now = boottime()
        with self._lock:
            for uuid in self._watched:
                kept = self._history.get(uuid)
                last = kept[-1] if kept else None
                patience_s = self._late_s + 2 * self._poll_s
                if last is None and self._child is not None:
                    patience_s = self._start_s
                elif self._child is None or (last is not None and len(last.unknown) == len(VALUES)):
                    patience_s = self._poll_s
                heard_at = self._known_from if last is None else max(last.at, self._known_from)
                if now - heard_at > patience_s:
                    self._keep(DeviceReading.nothing(uuid, now, self._why_not))
                    if self._why_not == "timeout":
                        self._doubt(uuid, True)


def _state(pid: int) -> str:
    """Return what the kernel says a process does: its state letter and what it waits in."""
    entry = procfs.stat(pid)
    return "?" if entry is None else f"{entry.state} {procfs.text(f'/proc/{pid}/wchan')}".strip()
