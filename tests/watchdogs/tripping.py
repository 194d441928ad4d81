"""One job that trips, inside its own process: ``python tripping.py <what> <dsn> <incarnation> <job> <token> <code>``.

``what`` is the name of a function below "what it does". The process prints the instant (boottime seconds)
from which its end is timed, then what it has to say. One of its threads hangs in ``where_it_hangs``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gangq.proc.clock import boottime
from gangq.watchdogs import ExitCode, Trip, Watchdog
from gangq.watchdogs import trip as trip_module
from gangq.watchdogs.pending import Gate
from gangq.watchdogs.trip import TripPath

DSN = sys.argv[2]
INCARNATION, JOB, TOKEN, CODE = map(int, sys.argv[3:])
TRIP = Trip(ExitCode(CODE), "idle", "no beat for 130 s", {"silence_s": 130.0}, devices=("GPU-1",))


def where_it_hangs() -> None:
    time.sleep(60)


def say(*words: object) -> None:
    print(*words, flush=True)


def begin() -> None:
    say(boottime())


def trip(what: Trip = TRIP, *, token: int = TOKEN, timed: bool = False, **options: Any) -> bool:
    path = TripPath(DSN, INCARNATION, **options)
    if timed:
        begin()
    return path(what, job_id=JOB, token=token)


def trip_later() -> None:
    """From another thread, when the handler is where it is to be."""
    time.sleep(0.3)
    trip()


def go_on_after(seconds: float) -> None:
    """A handler in one call, and its next line."""
    time.sleep(seconds)
    os.write(1, b"the next line ran\n")
    time.sleep(60)


def in_a_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


# -- what it does ---------------------------------------------------------------------------------------------


def trips(**options: Any) -> None:
    say(trip(timed=True, **options))


def trips_by_its_own_fault() -> None:
    trips(what=replace(TRIP, application=True, reason="xid"))


def tries_again() -> None:
    trip_module._DATABASE_S = 1
    trips()


def cannot_hand_in_its_results() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    trips(first=fails)


def hangs_as_it_hands_in_its_results() -> None:
    def hangs() -> None:
        say("first")
        time.sleep(60)

    trips(first=hangs)


def freezes_within_the_path() -> None:
    trips(deadline_s=1.5, first=lambda: ctypes.PyDLL(None).sleep(30))


def is_called_off_twice_and_stays() -> None:
    say(trip(timed=True, token=TOKEN + 1))
    say(trip(timed=True, deadline_s=1.2))
    say("stayed")
    time.sleep(1.6)
    say("alive")


def leaves_children() -> None:
    kept, gone = sleeper(), sleeper()
    begin()
    say(kept.pid, gone.pid)
    trip(ignored=lambda: [kept.pid])


def waits_for_a_child(run: Callable[[Callable[[], None]], object] = lambda handler: handler()) -> None:
    # The trip kills the child.
    child = sleeper()

    def handler() -> None:
        child.wait()
        os.write(1, b"the next line ran\n")

    begin()
    in_a_thread(trip_later)
    run(handler)


def waits_for_a_child_in_another_thread() -> None:
    def run(handler: Callable[[], None]) -> None:
        threading.Thread(target=handler).start()
        time.sleep(60)

    waits_for_a_child(run)


def wakes_up_while_it_trips() -> None:
    begin()
    in_a_thread(trip_later)
    go_on_after(3)


def goes_on_if_called_off() -> None:
    def off() -> None:
        trip_later()
        say("off")

    begin()
    in_a_thread(off).join()
    say("it went on")


# -- the queue of pending calls -------------------------------------------------------------------------------

nothing = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)


def add_pending_call() -> int:
    return int(ctypes.pythonapi.Py_AddPendingCall(nothing, None))


def fills_the_queue_before_it_trips() -> None:
    def fill() -> None:
        while add_pending_call() == 0:
            pass

    path = TripPath(DSN, INCARNATION)
    begin()
    threading.Timer(0.4, fill).start()
    with Watchdog(budget_s=0.8, poll_s=0.1, on_trip=lambda what: path(what, job_id=JOB, token=TOKEN)):
        go_on_after(1.8)


def is_called_off_a_hundred_times() -> None:
    def off() -> None:
        for _ in range(100):
            with Gate():
                pass
        say(add_pending_call())

    begin()
    in_a_thread(off).join()


def gets_a_signal_while_it_trips() -> None:
    def too_late(*_: object) -> None:
        os.write(1, b"the handler of the signal ran\n")
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_late)
    begin()
    in_a_thread(trip_later)
    threading.Timer(3.5, os.kill, [os.getpid(), signal.SIGALRM]).start()
    go_on_after(3)


def gets_a_signal_before_it_is_called_off() -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError

    def off() -> None:
        with Gate():
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.3)
            say("opens")

    signal.signal(signal.SIGALRM, too_late)
    begin()
    try:
        # The gate may be shut before this call is over.
        threading.Thread(target=off).start()
        time.sleep(0.3)
        say("went on")
        time.sleep(10)
    except TimeoutError:
        say("raised")


if __name__ == "__main__":
    in_a_thread(where_it_hangs)
    globals()[sys.argv[1]]()
