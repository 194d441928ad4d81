"""Ends this process when no Python code has run in it for too long.

A worker without a supervisor has no other protection against a frozen interpreter. A supervised worker has its
supervisor first, and this second.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, TYPE_CHECKING

from gangq.errors import InvalidInput
from gangq.watchdogs import signs
from gangq.watchdogs.codes import ExitCode
from gangq.watchdogs.deadman import Deadman
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.pending import GiveWay

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("gangq.watchdogs.backstop")

DUMP_SIGNAL: int = getattr(signal, "SIGRTMIN", 0) + 8
"""The signal on which this process writes its stacks; nothing else in it may use that number."""

_REARMS = 6
_STACKS_S = 0.5
_EARLY = 0.9
"""Of an interval: a sign that comes sooner moves no timer."""
_LATE = 1.5
"""Intervals without a sign after which the main thread is asked for one."""


class Backstop:
    """Exits this process with 80 once no Python thread could run for ``silence_s`` seconds.

    Watchdog threads cannot fire while C code holds the GIL or the process is stopped. So a kernel timer is set to end
    the process, and every thread of the library moves it ahead whenever it runs (:mod:`gangq.watchdogs.signs`). One
    thread does nothing else. While the interpreter is frozen no thread runs, and the timer fires. A process without
    Linux timers is refused (`Unsupported`).

    A handler that makes many calls which hold the GIL, one after another, is not frozen, but starves the other
    threads. A second timer then asks the main thread to move the first one, and to let other threads run
    (:class:`gangq.watchdogs.pending.GiveWay`).

    Silence is counted on the monotonic clock, which stands still while the host sleeps. It runs on while the process
    is stopped (SIGSTOP, Ctrl-Z, ``docker pause``, a debugger), so a pause counts as silence: a timer cannot tell the
    two apart, and when the process continues the timer that came due meanwhile fires first. Therefore

    * a supervised worker leaves the verdict to its supervisor, which knows how long it was itself paused, and gives
      this timer much more time (:meth:`allow`);
    * a process without a supervisor survives pauses of up to ``silence_s``. To pause it for longer, run it under a
      supervisor or :meth:`stop` this first.
    """

    def __init__(
        self,
        *,
        silence_s: float = 30.0,
        dump_file: IO[str] | None = None,
        interval_s: float | None = None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """``dump_file`` (a real file, kept open) is where all stacks go half a second before the end, or when
        the process receives :attr:`dump_signal`. ``beat`` is called with every sign, which comes every
        ``interval_s`` [a sixth of the silence] at least; it must not block.

        Raises:
            InvalidInput: a silence that makes no sense.
            Unsupported: this platform has no such timers.
        """
        self._silence_s = length_s("silence_s", silence_s, most=86400)
        self._interval_s = self._silence_s / _REARMS
        if interval_s is not None:
            self._interval_s = length_s("interval_s", interval_s, most=self._silence_s / 2)
        self._dumps = dump_file is not None
        self._ends_at: float | None = None
        self._lost = False
        self._beat = beat
        self.dump_signal = 0 if dump_file is None else DUMP_SIGNAL
        """On this signal the process writes its stacks to ``dump_file``; 0: there is none."""
        self._turns = threading.Lock()
        """Held by the thread that moves the timers. It is only tried: its holder is giving the same sign."""
        self._due = 0.0
        self._give_way = GiveWay(self.sign)
        self.thread_id = 0
        """The kernel's id of the thread that has nothing else to do; 0: it has not been started."""
        self._deadman = Deadman("monotonic", dump_file=dump_file, dump_signal=DUMP_SIGNAL)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Arm it. Starting twice is the same as once. Where no thread can be started nothing is armed."""
        if self._thread is None:
            self._stopping.clear()
            self._ends_at = None
            thread = threading.Thread(target=self._run, name="gangq-backstop", daemon=True)
            try:
                self.check()
                thread.start()
            except BaseException:
                # Nothing would move the timers.
                self.stop()
                raise
            self._thread = thread
            self.thread_id = thread.native_id or 0
            signs.listen(self.sign)
        return self

    def stop(self) -> None:
        """Disarm it: from here on nothing ends this process."""
        thread, self._thread = self._thread, None
        signs.forget(self.sign)
        self._stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        # With the lock: a thread that is moving the timers would set them again after they were disarmed.
        with self._turns:
            self._give_way.off()
            self._deadman.disarm()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def allow(self, silence_s: float) -> None:
        """From now on, this much silence.

        Raises:
            InvalidInput: a silence that makes no sense, or in which two signs do not come.
        """
        silence_s = length_s("silence_s", silence_s, most=86400)
        if silence_s < 2 * self._interval_s:
            raise InvalidInput(
                f"silence_s is {silence_s!r}: a sign comes every {self._interval_s:g} s, so allow twice that at least"
            )
        self._silence_s = silence_s
        self._due = 0.0
        if self._thread is not None:
            self.sign()

    def sign(self) -> None:
        """Python runs. For any thread, as often as it likes: the timers are moved every ``interval_s``."""
        if self._beat is not None:
            self._beat()
        if time.monotonic() < self._due or not self._turns.acquire(blocking=False):
            return
        try:
            if not self._stopping.is_set():
                self.check()
        except OSError as problem:
            self._give_up(problem)
        finally:
            self._turns.release()

    def check(self) -> None:
        """Move the timer ahead. Called several times in each ``silence_s``.

        Raises:
            OSError: the timer cannot be set.
        """
        now, silence_s = time.monotonic(), self._silence_s
        dump_before_s = min(_STACKS_S, silence_s / 4) if self._dumps else 0.0
        if dump_before_s and self._ends_at is not None and now >= self._ends_at - dump_before_s:
            # The stacks are being written, and that signal has interrupted whatever held the interpreter. A thread
            # that could run only because of it proves nothing: each dump would move the timer, for ever.
            return
        self._due = now + self._interval_s * _EARLY
        self._give_way.at(now + self._interval_s * _LATE)
        self._deadman.arm(now + silence_s, ExitCode.FROZEN, dump_before_s=dump_before_s)
        self._ends_at, self._lost = now + silence_s, False

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.sign()
            self._stopping.wait(self._interval_s)

    def _give_up(self, problem: OSError) -> None:
        """Disarm the timer until it can be set again: if it stayed armed it would kill a healthy process."""
        with contextlib.suppress(OSError):
            self._deadman.disarm()
        said, self._lost, self._ends_at = self._lost, True, None
        if not said:
            log.error("backstop_lost", extra={"error": str(problem)})
