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
from collections.abc import Callable, Iterable, Mapping

from gangq.gpu.detection import Detection
from gangq.gpu.sampler_state import SamplerState
from gangq.gpu.sampling_child import SamplingChild
from gangq.proc import killing
from gangq.proc.clock import boottime

log = logging.getLogger("gangq.gpu.sampler")

_MAX_LEFT_BEHIND = 3
_LATE_S = 1.0
_SLOW_S = 5.0
_MAX_PIDS = 4096


class SamplerProcess(SamplerState):
    """Reads devices through an expendable process, and makes a finding of a driver that does not answer.

    `detection` says whose devices and which driver; until `watch` is called all of them are read and no process
    is the caller's own. Without a driver (declared devices, or none) it starts nothing and has no readings.

    A round is read every `poll_s`. If a single driver call takes longer than `deadline_s` (`start_s` while the driver
    is being opened), the process gets SIGKILL and is replaced; nothing waits for it longer than two seconds. The hang
    is an event; `SamplerState.hang` says when it is fatal, and has the times. A device that hangs repeatedly is left
    out for a minute at a time, so that the others are read. `history` keeps `history_s` seconds.

    A slow driver is not a broken one: a device whose reading takes longer than five seconds (or
    `deadline_s`) is `doubtful`, and no event tells of it.

    One thread, "gangq-sampler", does all of it. No method but `start` and `stop` ever blocks.
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
    ) -> None:
        super().__init__(
            (device.uuid for device in detection.devices),
            poll_s=poll_s,
            late_s=min(deadline_s, _SLOW_S),
            start_s=start_s,
            history_s=history_s,
        )
        self._source = detection.source
        self._environ = dict(os.environ if environ is None else environ)
        self._deadline_s = deadline_s
        self._pipe_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._wake_r, self._wake_w = -1, -1
        # Changed by the thread alone; pids() reads the first two.
        self._child: SamplingChild | None = None
        self._left_behind: list[subprocess.Popen[bytes]] = []
        self._start_at = 0.0
        self._failures = 0
        self._why_not = "timeout"
        self._known_from = 0.0
        self._order_at = 0.0

    def start(self) -> None:
        """Start the thread and the process; a host without a driver gets neither.

        Raises:
            RuntimeError: `stop` was called, and the thread has not ended yet.
        """
        if self._thread is not None and self._stopping.is_set():
            raise RuntimeError("the former thread of the sampler has not ended: call stop() again")
        if self._thread is not None or self._source not in ("nvml", "amdsmi"):
            return
        self._stopping.clear()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gangq-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kill the process and end the thread; takes at most a few seconds, whatever the driver does."""
        thread = self._thread
        if thread is None:
            return
        self._stopping.set()
        self._wake()
        thread.join(2 * killing.DEATH_S + 1.0)
        with self._pipe_lock:
            if self._thread is thread and not thread.is_alive():
                os.close(self._wake_r)
                os.close(self._wake_w)
                self._wake_r = self._wake_w = -1
                self._thread = None

    def watch(self, uuids: Iterable[str], pids: Callable[[], Iterable[int]]) -> None:
        """As `SamplerState.watch`, and at once."""
        super().watch(uuids, pids)
        self._wake()

    def pids(self) -> list[int]:
        """Return the processes started here that may be alive."""
        child, left = self._child, tuple(self._left_behind)
        return [process.pid for process in (*left, *((child.process,) if child else ()))]

    def _wake(self) -> None:
        with self._pipe_lock, contextlib.suppress(OSError):
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
            if self._child is not None:
                self._end(self._child)

    def _once(self) -> None:
        now = time.monotonic()
        due = self.due()
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
        running = self._child is not None
        self.mark_stale(self._why_not, self._known_from, running=running)

    def _listen(self, child: SamplingChild | None, timeout_s: float) -> bool:
        """Wait for output of the process or for a wake-up by a caller; return whether there is output.

        After a wake-up the next order is due at once.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            if child is not None:
                for stream in child.streams():
                    selector.register(stream, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self._wake_r in ready:
            self._order_at = 0.0
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 4096)
        return any(not isinstance(stream, int) for stream in ready)

    def _order(self, due: list[str]) -> bytes:
        """Return what the process shall do, as it is to be sent."""
        try:
            own = sorted({int(pid) for pid in self._pids()})[:_MAX_PIDS]
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
        try:
            self._child = SamplingChild.start(
                str(self._source), self._poll_s, self._environ, time.monotonic()
            )
        except OSError as error:
            self._failed(f"cannot start {sys.executable!r}: {error}")

    def _read_child(self, child: SamplingChild) -> None:
        child.read_stderr()
        said = child.lines(time.monotonic())
        if said is None:
            self._ended(child)
            return
        for line in said:
            child.failed = line.get("failed", child.failed)
            self.take(line)
            if "round" in line:
                self._failures = 0
                self._why_not = "timeout"

    def _judge_silence(self, child: SamplingChild) -> None:
        """End the process if it has been silent for too long, and have another one started."""
        call = child.call.read()
        silent_s = time.monotonic() - max(child.active_at, call.since)
        opening = call.step in ("", "open")
        # To wait for events takes up to a round.
        limit_s = self._deadline_s + (self._poll_s if call.step == "wait" else 0.0)
        if silent_s <= (self._start_s if opening else limit_s):
            return
        kernel_state = child.kernel_state()
        # Opening the driver touches every device: most likely it is the one that hung before.
        blamed = call.device or (self._findings.last_hung() if opening else None)
        during = call.name or "start"
        survived = not self._end(child)
        self._start_at = time.monotonic()
        extra = {
            "device": blamed,
            "during": during,
            "silent_s": round(silent_s, 1),
            "kernel_state": kernel_state,
        }
        if kernel_state.startswith("T") and not survived:
            # It was stopped (SIGSTOP): the driver did not hang.
            log.warning("sampler_stopped", extra=extra)
            return
        self._why_not = "timeout"
        self._start_at += self.hang(blamed, during, survived)
        log.error("sampler_hung", extra={**extra, "pid": child.process.pid, "survived_sigkill": survived})

    def _ended(self, child: SamplingChild) -> None:
        """The process has closed its side: collect it and say why."""
        self._end(child, killing.DEATH_S)
        self._failed(child.why_ended())

    def _failed(self, why: str) -> None:
        self._failures += 1
        wait_s = min(60.0, self._poll_s * 2 ** min(self._failures - 1, 10))
        self._start_at = time.monotonic() + wait_s
        if self._why_not != f"failed: {why}":
            log.warning("sampler_ended", extra={"reason": why, "again_in_s": wait_s})
        self._why_not = f"failed: {why}"

    def _end(self, child: SamplingChild, grace_s: float = 0.0) -> bool:
        """Kill the process, if it has not ended within the grace; says whether it is dead, and leaves it behind where
        it is not.
        """
        dead = False
        try:
            dead = child.end(grace_s)
        finally:
            # In this order: pids() names it all the time.
            if not dead:
                self._left_behind.append(child.process)
            self._child = None
        return dead
