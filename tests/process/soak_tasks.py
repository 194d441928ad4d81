"""What the soak runs: honest work of several habits, and work that hangs, breaks or dies the first time.

Each job writes down where its trouble begins and when it has ended, in a file all of them append to. Its device
is a line in a script that a stand-in for the driver library reads (``FAKE_NVML``).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gangq
from gpu.gpu_fakes import gpu, rewrite

app = gangq.App(os.environ["SOAK_DSN"])
HERE = Path(os.environ["SOAK_DIRECTORY"])
LETTER = os.environ["SOAK_LETTER"]
IDLE: dict[str, Any] = {"used_mib": 2048, "util": 0, "memutil": 0, "milliwatts": 70_000}
BUSY: dict[str, Any] = {**IDLE, "util": 80, "memutil": 40, "milliwatts": 400_000}


def note(what: str, ctx: gangq.Context, kind: str) -> None:
    line = {"what": what, "job": ctx.job.id, "kind": kind, "at": time.time()}
    fd = os.open(HERE / "soak.journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def card(**does: Any) -> None:
    rewrite(Path(os.environ["FAKE_NVML"]), gpu(LETTER, **does))


def works(ctx: gangq.Context, seconds: float, beats: bool = True) -> None:
    card(**BUSY)
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        step += 1
        if beats:
            ctx.beat(step=step, phase="run")
        time.sleep(0.2)


def loads(ctx: gangq.Context, seconds: float) -> None:
    """An honest loader: the device does nothing, the disk does."""
    card(**IDLE)
    until = time.monotonic() + seconds
    path = HERE / f"weights-{LETTER}"
    path.write_bytes(bytes(8 << 20))
    while time.monotonic() < until:
        path.read_bytes()
        time.sleep(0.2)


def first_time(ctx: gangq.Context) -> bool:
    try:
        (HERE / f"tried-{ctx.job.id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def deadlock() -> None:
    card(**IDLE)
    threading.Event().wait()


def spins_on_busy_device(ctx: gangq.Context) -> None:
    works(ctx, 1.0)
    card(**BUSY)
    threading.Event().wait()


def outruns(ctx: gangq.Context) -> None:
    works(ctx, 3600)


def holds_the_gil(ctx: gangq.Context) -> None:
    works(ctx, 1.0)
    while True:
        ctypes.PyDLL(None).sleep(3600)  # Which the signal that writes the stacks interrupts.


def backtracks(ctx: gangq.Context) -> None:
    works(ctx, 1.0)
    re.match(r"(a+)+$", "a" * 60 + "b")


def is_stopped(ctx: gangq.Context) -> None:
    works(ctx, 1.0)
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def is_killed(ctx: gangq.Context) -> None:
    works(ctx, 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def stalls(ctx: gangq.Context) -> None:
    works(ctx, 1.5)
    deadlock()


def wedges(ctx: gangq.Context) -> None:
    works(ctx, 2.5, beats=False)
    deadlock()


def device_fails(ctx: gangq.Context) -> None:
    works(ctx, 2.5)
    card(**BUSY, event="1:8:79")
    while True:
        ctx.beat(step=1)
        time.sleep(0.2)


TROUBLE = {
    "outruns": outruns,
    "stalls": stalls,
    "wedges": wedges,
    "holds_the_gil": holds_the_gil,
    "backtracks": backtracks,
    "is_stopped": is_stopped,
    "is_killed": is_killed,
    "device_fails": device_fails,
    "spins": spins_on_busy_device,
}
HONEST = {
    "beats": lambda ctx: works(ctx, 3.0),
    "never_beats": lambda ctx: works(ctx, 4.0, beats=False),
    "loads_first": lambda ctx: (loads(ctx, 6.0), works(ctx, 1.0)),
    "loads_between": lambda ctx: (works(ctx, 1.0), ctx.beat(phase="load"), loads(ctx, 6.0), works(ctx, 1.0)),
    "slow_step": lambda ctx: (works(ctx, 1.0), card(**BUSY), time.sleep(7.0)),
}


@app.task
def job(ctx: gangq.Context, kind: str) -> str:
    if kind in HONEST:
        HONEST[kind](ctx)
    elif first_time(ctx):
        note("trouble", ctx, kind)
        TROUBLE[kind](ctx)
    card(**IDLE)
    note("end", ctx, kind)
    return kind
