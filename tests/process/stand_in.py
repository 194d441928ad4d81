"""A worker reduced to what its supervisor sees of one: signs of life, an incarnation, a job, and what goes wrong.

``python stand_in.py <what> [arguments]``; with ``TEST_DSN`` it registers as ``TEST_WORKER`` and, unless
``TEST_IDLE`` is set, claims one job first. Whatever it does is preceded by a line in ``TEST_MARKS``: the instant
(monotonic) and its pid.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangq.client import Client
from gangq.proc.proof import HostIdentity, process_identity
from gangq.worker.liveness import Liveness


def marked(word: str = "now") -> None:
    with Path(os.environ["TEST_MARKS"]).open("a") as file:
        file.write(f"{word} {time.monotonic()} {os.getpid()}\n")


def holds_the_gil_in_c() -> None:
    """A library that was built for this and never lets go."""
    library = ctypes.PyDLL(os.environ["TEST_LIBRARY"])
    marked()
    library.park()


def backtracks() -> None:
    marked()
    re.match(r"(a+)+$", "a" * 60 + "b")


def is_stopped() -> None:
    marked()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def finishes() -> None:
    marked()


def lives() -> None:
    marked()
    while True:
        time.sleep(60)


def exits(code: str) -> None:
    marked()
    os._exit(int(code))


def lapses() -> None:
    """Its lease ended before it could renew: it leaves word and ends its work."""
    Path(os.environ["TEST_DIRECTORY"], "lapsed").write_text(os.environ["TEST_INCARNATION"])
    exits("77")


def leaves_a_process(code: str) -> None:
    """Starts something that detaches as well as a process can, then exits."""
    script = (
        "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    )
    subprocess.run([sys.executable, "-S", "-c", script], stdin=subprocess.DEVNULL, check=True)
    exits(code)


def starts_a_tree() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    lives()


def spends_memory() -> None:
    marked()
    hog = []
    while True:
        hog.append(bytearray(b"x") * (1 << 20))


def reads(path: str) -> None:
    """A read that is never answered, in the main thread; then it is asked to end, and cannot."""
    marked()
    Path(path).read_bytes()


def orphans_children() -> None:
    """Processes whose parent is gone, and that end: somebody has to bury them."""
    for _ in range(5):
        subprocess.run(
            [sys.executable, "-S", "-c", "import os\nfor _ in range(9):\n  os.fork() or os._exit(0)"],
            check=True,
        )
        subprocess.run(["sh", "-c", "(sleep 0.1 &) ; (true &)"], stdin=subprocess.DEVNULL, check=True)
    lives()


def counts_signals() -> None:
    """Ends at the second SIGTERM."""
    heard = []

    def handler(number: int, _frame: object) -> None:
        heard.append(number)
        marked(f"signal{number}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)
    marked()
    while heard.count(signal.SIGTERM) < 2:
        time.sleep(0.02)


def shows_environment() -> None:
    Path(os.environ["TEST_MARKS"]).with_name("environment").write_text(repr(dict(os.environ)))
    marked()


ACTIONS: dict[str, Callable[..., None]] = {
    action.__name__: action
    for action in (
        backtracks,
        counts_signals,
        exits,
        finishes,
        holds_the_gil_in_c,
        is_stopped,
        lapses,
        leaves_a_process,
        lives,
        orphans_children,
        reads,
        shows_environment,
        spends_memory,
        starts_a_tree,
    )
}


def main(what: str, *arguments: str) -> None:
    if what == "is_slow_to_start":
        # What an import of a large library does, before there can be a sign of life.
        ctypes.PyDLL(None).usleep(int(float(arguments[0]) * 1e6))
        what, arguments = "exits", ("5",)
    liveness = Liveness.of_environment(dump_file=sys.stderr)
    liveness.start()
    dsn = os.environ.get("TEST_DSN")
    if dsn:
        become_incarnation(liveness, dsn)
    elif os.environ.get("TEST_REGISTERS"):
        liveness.registered(
            worker="w",
            host="h",
            incarnation=7,
            mark="m",
            directory=Path("/none"),
            dsn="host=/none",
            lease_s=float(os.environ.get("TEST_LEASE_S", "60")),
        )
    ACTIONS[what](*arguments)
    liveness.ended()
    liveness.stop()


def become_incarnation(liveness: Liveness, dsn: str) -> None:
    name = os.environ["TEST_WORKER"]
    client = Client(dsn, max_size=1)
    identity: dict[str, Any] = {
        "mark": uuid.uuid4().hex,
        "host": asdict(HostIdentity.here()),
        "process": asdict(process_identity(os.getpid())),
    }
    row = client.register_worker(
        name=name, host="here", queues=["default"], boot_id=HostIdentity.here().boot_id, identity=identity
    )
    directory = Path(os.environ["TEST_MARKS"]).with_name("gangq-w-test")
    directory.mkdir()
    os.environ.update(TEST_DIRECTORY=str(directory), TEST_INCARNATION=str(row.incarnation))
    liveness.registered(
        worker=name,
        host="here",
        incarnation=row.incarnation,
        mark=identity["mark"],
        directory=directory,
        dsn=dsn,
        lease_s=row.lease_granted_s,
    )
    if not os.environ.get("TEST_IDLE"):
        (claim,) = client.claim(incarnation=row.incarnation, request_id=uuid.uuid4())
        liveness.job(claim.job_id, claim.token)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
