"""A real GPU under a real, supervised worker: honest work is left alone, each kind of hang is ended with its code.

Run by `make test-gpu`, with torch. A hang holds memory of the device, which is back before the next attempt begins.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gangq.client import Client
from gangq.gpu import detect
from gpu.gpu_fakes import clean_environ
from process.machines import supervised_worker
from worker.worker_process import eventually, short_leases, until_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("torch") is None, reason="torch is not installed: it is what the jobs compute with"
    ),
]

PATIENCE_S = 120.0
"""For what begins with an import of torch, from a disk that has not read it yet."""

SILENCE_S = 8.0
STALL_S = 5.0
WINDOW_S = 5.0
HELD_GB = 16

TASKS = f"""
import ctypes, os, threading, time
from pathlib import Path
import gangq

app = gangq.App(os.environ["GANGQ_DSN"])
HERE = Path(__file__).parent

def multiply(seconds, ctx=None):
    import torch
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        if ctx:
            ctx.beat()

def begin(ctx, beats=False):
    "Hold memory and compute, the first time. The second time say what of the device's memory is taken."
    import torch
    free, total = torch.cuda.mem_get_info()
    try:
        (HERE / f"tried-{{ctx.job.id}}").touch(exist_ok=False)
    except FileExistsError:
        return (total - free) / 2**30
    begin.held = torch.empty({HELD_GB} << 30, dtype=torch.uint8, device="cuda")
    multiply(8, ctx if beats else None)

@app.task
def works(ctx, seconds):
    multiply(seconds)

@app.task
def steps(ctx, seconds):
    "Kernels of microseconds, each waited for: what a small model on a large GPU looks like."
    import torch
    a = torch.randn(64, device="cuda")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        a.add_(1)
        torch.cuda.synchronize()

@app.task
def prepares(ctx, seconds):
    "Computes, then works in Python only, with the device idle: a data set between two epochs."
    multiply(8)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10**5))

@app.task
def waits(ctx):
    "For an answer that never comes."
    return begin(ctx) or threading.Event().wait()

@app.task
def spins(ctx):
    "In a kernel that never ends: a collective whose peer is gone."
    import torch
    if used := begin(ctx, beats=True):
        return used
    torch.cuda._sleep(1 << 62)
    torch.cuda.synchronize()

@app.task
def freezes(ctx):
    "In the same kernel, in a call that keeps the interpreter's lock."
    import torch
    if used := begin(ctx):
        return used
    torch.cuda._sleep(1 << 62)
    ctypes.PyDLL("libcuda.so.1").cuCtxSynchronize()
"""


@pytest.fixture(scope="module", autouse=True)
def real() -> None:
    """Skip where no NVIDIA device answers."""
    found = detect(environ=clean_environ(), timeout_s=60)
    if not found.devices or found.source != "nvml":
        pytest.skip(f"no NVIDIA device is detected: {found.warnings}")


@pytest.fixture(autouse=True)
def quick(client: Client) -> None:
    """Limits of seconds in place of minutes."""
    # A frozen worker's supervisor is to be sooner than its lease.
    short_leases(client, lease_s=60, lease_margin_s=5)
    client.configure(load_grace_s=WINDOW_S, health_window_s=WINDOW_S, stall_timeout_s=STALL_S)


def worker(directory: Path, dsn: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """`gangq worker` with all devices of this host."""
    (directory / "computes.py").write_text(TASKS)
    arguments = ("computes:app", "--silence-s", f"{SILENCE_S}")
    return supervised_worker(dsn, directory, "w", *arguments, inherited=clean_environ())


def on_a_gpu(client: Client, task: str, **payload: Any) -> int:
    return client.submit(task=task, gpus=1, payloads=[payload], wait_for_hardware=True)[0]


@pytest.mark.parametrize("task", ["works", "steps", "prepares"])
def test_honest_work_without_a_beat_is_left_alone(
    task: str, tmp_path: Path, dsn: str, client: Client
) -> None:
    with worker(tmp_path, dsn) as process:
        job = on_a_gpu(client, task, seconds=4 * WINDOW_S)
        found = until_state(client, job, "done", "failed", timeout=PATIENCE_S)
        assert (found.state, found.attempts, found.trips) == ("done", 1, 0)
        assert process.poll() is None
    assert client.trips(job_id=job) == []


def test_what_the_device_reads_is_in_the_database(tmp_path: Path, dsn: str, client: Client) -> None:
    with worker(tmp_path, dsn):
        job = on_a_gpu(client, "works", seconds=15)
        eventually(
            lambda: any(((device.reading or {}).get("gpu_pct") or 0) >= 50 for device in client.devices()),
            "the device is seen busy",
            PATIENCE_S,
        )
        until_state(client, job, "done", timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("task", "code", "within_s"),
    [
        ("waits", 78, 2 * WINDOW_S + 15),
        ("spins", 76, 10 * STALL_S + 25),
        ("freezes", 80, SILENCE_S + 15),
    ],
)
def test_a_hang_is_ended_with_its_code_and_its_memory_is_back_before_the_next_attempt(
    task: str, code: int, within_s: float, tmp_path: Path, dsn: str, client: Client
) -> None:
    with worker(tmp_path, dsn) as process:
        job = on_a_gpu(client, task)
        eventually((tmp_path / f"tried-{job}").exists, "the first attempt has begun", PATIENCE_S)
        time.sleep(8)  # It computes.
        began = time.monotonic()
        assert process.wait(within_s) == code
        print(f"{task}: {time.monotonic() - began:.1f} s until exit {code}")
    (trip,) = client.trips(job_id=job)
    assert trip.code == code
    print(trip.reason, trip.evidence)
    with worker(tmp_path, dsn):
        found = until_state(client, job, "done", "failed", timeout=PATIENCE_S)
    assert (found.state, found.trips) == ("done", 1)
    assert found.result < HELD_GB / 2
