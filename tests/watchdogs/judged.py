"""One job under one watchdog, inside its own process: ``python judged.py <row> device|none|health [library]``.

``health``: under a health watchdog that reads device A through a driver library; otherwise under a stall watchdog.
Prints ``ready`` when it begins to be silent, and what it was taken for when the watchdog has made up its mind.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from fakes import GPU, Sampler

from gangq.gpu import Detection, Device, SamplerProcess
from gangq.proc.clock import boottime
from gangq.watchdogs import GpuHealthWatchdog, StallWatchdog, Trip, WorkSensors

A = "GPU-aaaaaaaa"
TIMEOUT_S = 2.0
"""A limit of the stall watchdog, and a window of the health watchdog."""
CONFIRM_S = 1.0


def writes() -> None:
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            file.write(bytes(1 << 20))
            time.sleep(0.2)


def reads() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.truncate(1 << 20)
        while True:
            file.seek(0)
            file.read(1 << 20)
            time.sleep(0.2)


def maps() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(16 << 20)
        while True:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                mapped[:: mmap.PAGESIZE]
            time.sleep(0.2)


def grows() -> None:
    kept = []
    while True:
        kept.append(b"x" * (4 << 20))
        time.sleep(0.2)


def downloads() -> None:
    receives(1000, every_s=0.02)


def computes() -> None:
    while True:
        sum(range(10_000))


def sorts() -> None:
    data = [hash(str(number)) for number in range(100_000)]
    while True:
        sorted(data)


def computes_without_the_gil() -> None:
    data = bytes(4 << 20)
    while True:
        hashlib.sha256(data).digest()


def prepares() -> None:
    # A pipeline of a dozen stages, each of which is a function of its own.
    stages = [eval(f"lambda: [str(n + {stage}) for n in range(3000)]") for stage in range(12)]
    while True:
        for stage in stages:
            stage()


def computes_in_a_thread() -> None:
    thread = threading.Thread(target=prepares)
    thread.start()
    thread.join()


def computes_in_a_child() -> None:
    subprocess.run([sys.executable, "-c", "while True: pass"], check=True)


def sleeps_in_a_loop() -> None:
    while True:
        time.sleep(0.3)


def sleeps_once() -> None:
    time.sleep(600)


def polls_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    while not lock.acquire(timeout=0.5):
        pass


def receives(size: int, every_s: float) -> None:
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        while True:
            far.send(bytes(size))
            time.sleep(every_s)
    far.close()
    while near.recv(65536):
        pass


def reads_slowly() -> None:
    receives(4000, every_s=0.2)


def waits_for_a_file_lock() -> None:
    with open(os.environ["TEST_LOCK"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def deadlocks() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def deadlocks_beside_a_ticking_thread() -> None:
    threading.Thread(target=sleeps_in_a_loop, daemon=True).start()
    deadlocks()


def deadlocks_beside_a_drivers_thread() -> None:
    threading.Thread(target=ctypes.CDLL(sys.argv[3]).drive, daemon=True).start()
    deadlocks()


def receives_nothing() -> None:
    near, _far = socket.socketpair()
    near.recv(1)


def spins_in_one_call() -> None:
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1 << 30)


def polls_in_one_call() -> None:
    ctypes.CDLL(sys.argv[3]).poll_for_ever()


def stalls(device: str, beats: list[str | None], on_trip: Callable[[Trip], bool]) -> StallWatchdog:
    sampler = Sampler(boottime)
    sampler.set(gpu_pct=0.0)
    sensors = WorkSensors(uuids=(GPU,), sampler=sampler) if device == "device" else WorkSensors()
    dog = StallWatchdog(
        stall_timeout_s=TIMEOUT_S, confirm_s=CONFIRM_S, sensors=sensors, poll_s=0.2, on_trip=on_trip
    ).start()
    for phase in beats or [None]:
        dog.beat(1, phase=phase)
    return dog


def idles(beats: list[str | None], on_trip: Callable[[Trip], bool]) -> GpuHealthWatchdog:
    sampler = SamplerProcess(Detection((Device(0, A, 1, "H200", "nvml"),), "nvml"), os.environ, poll_s=0.2)
    sampler.start()
    sampler.watch([A], lambda: [os.getpid()])
    sensors = WorkSensors(uuids=(A,), sampler=sampler, ignored=sampler.pids)
    while not any(reading.gpu_pct for reading in sampler.history(A, 0)):
        time.sleep(0.05)  # A device that was never seen busy is not judged.
    dog = GpuHealthWatchdog(
        window_s=TIMEOUT_S, load_grace_s=0, sensors=sensors, sample_s=0.3, poll_s=0.2, on_trip=on_trip
    ).start()
    for phase in beats:
        dog.beat(1, phase=phase)
    return dog


def main(row: str, device: str) -> None:
    handler, _, said = row.partition(" and ")
    beats: list[str | None] = {"": [], "beats once": [None], "says so": ["wait"]}[said]

    def trips(trip: Trip) -> bool:
        silence_s = trip.evidence["quiet_s" if device == "health" else "silence_s"]
        # The health watchdog has one reason for both, and says which in its message.
        reason = "waits" if "only waited" in trip.message else trip.reason
        os.write(1, f"{reason} {silence_s / TIMEOUT_S:.2f} {trip.message}\n".encode())
        os._exit(0)

    with idles(beats, trips) if device == "health" else stalls(device, beats, trips):
        os.write(1, b"ready\n")
        globals()[handler]()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
