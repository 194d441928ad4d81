"""What tells a worker something: notifications and signals."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from gangq.client import Client
from gangq.worker.listener import Listener
from gangq.worker.signals import SignalWatch
from worker.controls import control_of
from worker.parts import session_of
from worker.worker_process import Fleet, eventually, until_state


def test_the_listener_comes_back_after_its_connection_was_cut_and_polls_at_once(
    client: Client, db: Any, tmp_path: Path
) -> None:
    session = session_of(client, tmp_path)
    heard: list[str] = []
    handlers = {"wake": lambda: heard.append("wake"), "stop": lambda: heard.append("stop")}
    listener = Listener(session, ["default"], handlers)
    session.control.spawn(listener.run(), "listener")
    eventually(lambda: heard, "it polls after it connected")
    find = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    pids = [row["pid"] for row in db.execute(find).fetchall()]
    heard.clear()
    db.execute("select pg_terminate_backend(p) from unnest(%s::int[]) p", (pids,))
    eventually(lambda: heard, "it polls after it reconnected")

    def told() -> bool:
        """Everything sent before it has arrived once this comes back."""
        heard.clear()
        db.execute("select pg_notify(%s, 'stop')", (f"gangq_{session.incarnation}",))
        eventually(lambda: "stop" in heard, "it hears its own channel")
        return heard == ["stop"]

    eventually(told, "it is quiet")
    heard.clear()
    db.execute("select pg_notify('gangq_wake', 'a queue of somebody else')")
    db.execute("select pg_notify('gangq_wake', 'default')")
    eventually(lambda: heard, "it hears that somebody submitted")
    assert heard == ["wake"]
    assert not listener.notifications_lost


def test_a_signal_is_counted_once_on_whichever_way_it_comes(client: Client) -> None:
    calls: list[int] = []
    watch = SignalWatch(control_of(client), lambda: calls.append(1))
    watch.install()
    try:
        # One signal in a main thread that was in a library: its two halves arrive far apart.
        os.write(watch._write, bytes([signal.SIGTERM]))
        eventually(lambda: calls, "it is heard at once")
        watch._handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: len(calls) == 2, "the next one is heard")
        signal.set_wakeup_fd(-1)  # As asyncio leaves it behind.
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: len(calls) == 3, "one is heard without the pipe")
        threading.Event().wait(0.1)
        assert calls == [1, 1, 1]
    finally:
        watch.stop()


def test_a_handler_of_signals_that_a_job_left_behind_is_taken_back(client: Client) -> None:
    heard: list[int] = []
    watch = SignalWatch(control_of(client), lambda: heard.append(1))
    watch.install()
    try:
        own = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(-1)
        watch.renew()
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == own
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: heard, "SIGINT is heard again")
        assert signal.set_wakeup_fd(-1) == watch._write
    finally:
        watch.stop()


def test_what_a_library_hears_of_its_processes_by_stays(client: Client) -> None:
    def heard(*_: object) -> None:
        pass

    watch = SignalWatch(control_of(client), lambda: None)
    watch.install()
    try:
        signal.signal(signal.SIGCHLD, heard)
        watch.renew()
        assert signal.getsignal(signal.SIGCHLD) is heard
    finally:
        watch.stop()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def test_what_a_handler_leaves_to_signals_ends_no_worker_after_it(client: Client, fleet: Fleet) -> None:
    fleet.define("""
def late(*_):
    raise TimeoutError

@app.task
def leaves(ctx):
    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

@app.task
def finds(ctx):
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return left_s, signal.getsignal(signal.SIGALRM), subprocess.run(["false"]).returncode
""")
    fleet.start(slots=0, light=1)
    (first,) = client.submit(task="leaves")
    until_state(client, first, "done")
    (second,) = client.submit(task="finds")
    assert until_state(client, second, "done").result == [0, signal.SIG_DFL, 1]


@pytest.mark.parametrize("left_s", [0, 60], ids=["none before", "of the program around it"])
def test_a_timer_that_a_handler_left_ends_with_it(client: Client, left_s: int) -> None:
    watch = SignalWatch(control_of(client), lambda: None)
    signal.alarm(left_s)
    try:
        watch.install()
        # Without a handler of its own: this would end the process.
        signal.alarm(30 + left_s)
        watch.renew()
        assert (signal.alarm(0) > 0) is (left_s > 0)
    finally:
        signal.alarm(0)
        watch.stop()
