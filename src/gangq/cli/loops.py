"""Commands that go on until a signal: woken by a notification, and in spite of a database that goes and comes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from gangq.cli.output import say
from gangq.errors import GangqError
from gangq.worker.repeating import backoff

if TYPE_CHECKING:
    import psycopg

    from gangq.client import Client


T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered, instead of breaking off wherever the program is.

    A SIGHUP that was ignored, as nohup does it, stays ignored.

    A KeyboardInterrupt in the middle of a submit would leave a job behind whose id nobody has seen. From the
    `last`th signal on KeyboardInterrupt is raised after all: whoever presses it again wants out now, also when a
    call to the database hangs.
    """

    def __init__(self, last: int = 2) -> None:
        self.count = 0
        self._last = last
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Interrupts:
        # Elsewhere than in the main thread Python sets no handlers: the program is embedded, and not ours.
        if threading.current_thread() is threading.main_thread():
            self._before = [
                (number, signal.signal(number, self._handle))
                for number in _SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")
        if self.count >= self._last:
            raise KeyboardInterrupt

    def wait(self, seconds: float, files: Sequence[int] = ()) -> bool:
        """Wait until a signal comes, one of `files` can be read, or the time is up; whether it was a file."""
        ready, _, _ = select.select([self._read, *files], [], [], max(0.0, seconds))
        if self._read in ready:
            with contextlib.suppress(OSError):
                os.read(self._read, 64)
        return any(file in ready for file in files)


_PACE_S = 0.05
"""Any login may notify: a flood of notifications is no reason to do nothing but look."""
_RETRY_S = (0.5, 10.0)


def until_interrupted(
    client: Client,
    interrupts: Interrupts,
    look: Callable[[bool], float],
    *,
    channel: str | None = None,
    check: Callable[[Client], None] = lambda _: None,
    final: Callable[[GangqError], bool] = lambda problem: not problem.retryable,
) -> None:
    """Call `look` until a signal comes: it returns in how many seconds at the latest it is to be called again, and
    is told whether a notification of `channel` came before that. `check` is called first, once it succeeds.

    After an error of the database both are tried again, later and later. One that is `final` is raised.
    """
    listener = _Listener(client, channel)
    retries = backoff(*_RETRY_S)
    notified, checked, paced_at = False, False, 0.0
    with contextlib.closing(listener):
        while not interrupts.count:
            try:
                if not checked:
                    check(client)
                    checked = True
                listener.listen()
                interrupts.wait(paced_at - time.monotonic())
                paced_at = time.monotonic() + _PACE_S
                wait_s = look(notified)
                retries = backoff(*_RETRY_S)
                notified = not interrupts.count and listener.wait(interrupts, wait_s)
            except GangqError as problem:
                if final(problem):
                    raise
                wait_s, notified = next(retries), False
                say(f"{problem}; trying again in {wait_s:.1f} s")
                listener.close()
                interrupts.wait(wait_s)


def once_there(look: Callable[[], T]) -> T:
    """What `look` returns, asked again, later and later, while the database is away."""
    for wait_s in backoff(*_RETRY_S):
        try:
            return look()
        except GangqError as problem:
            if not problem.retryable:
                raise
            say(f"{problem}; trying again in {wait_s:.1f} s")
        time.sleep(wait_s)
    raise AssertionError  # It waits without end.


class _Listener:
    """Listens on a channel, if there is one. After `close` the next `listen` makes a connection again."""

    def __init__(self, client: Client, channel: str | None) -> None:
        self._client = client
        self._channel = channel
        self._connection: psycopg.Connection[object] | None = None

    def listen(self) -> None:
        """Make the connection unless there is one. Raises `DatabaseUnreachable`, `Busy`."""
        if self._connection is None and self._channel is not None:
            self._connection = self._client.connect_listener()
            with self._translated():
                self._connection.execute(f"listen {self._channel}".encode())

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def wait(self, interrupts: Interrupts, seconds: float) -> bool:
        """Wait for a notification, a signal, or the end of the time; whether there was a notification. Raises
        `DatabaseUnreachable`.
        """
        if self._connection is None:
            return interrupts.wait(seconds)
        with self._translated():
            # What came meanwhile lies in the connection's buffer, where select does not see it.
            if any(True for _ in self._connection.notifies(timeout=0)):
                return True
            if not interrupts.wait(seconds, [self._connection.fileno()]):
                return False
            return any(True for _ in self._connection.notifies(timeout=0))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        # Not at the top: completion asks the commands for options, without a database.
        import psycopg

        try:
            yield
        except psycopg.Error as e:
            raise self._client.target.failed(e, "") from e
