"""One job under one stall watchdog, inside its own process: ``python judged.py <row> [device|none] [library]``.

Prints ``ready`` when it begins to be silent, and what it was taken for when the watchdog has made up its mind.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time

from fakes import GPU, Sampler

from gangq.proc.clock import boottime
from gangq.watchdogs import StallWatchdog, Trip, WorkSensors

TIMEOUT_S = 2.0
CONFIRM_S = 1.0


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


def reads_slowly() -> None:
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        while True:
            far.send(bytes(4000))
            time.sleep(0.2)
    far.close()
    while near.recv(65536):
        pass


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


def main(row: str, device: str) -> None:
    phase = None
    if row.endswith(" and says so"):
        row, phase = row.removesuffix(" and says so"), "wait"
    sampler = Sampler(boottime)
    sampler.set(gpu_pct=0.0)
    sensors = WorkSensors(uuids=(GPU,), sampler=sampler) if device == "device" else WorkSensors()

    def trips(trip: Trip) -> bool:
        os.write(1, f"{trip.reason} {trip.evidence['silence_s'] / TIMEOUT_S:.2f} {trip.message}\n".encode())
        os._exit(0)

    dog = StallWatchdog(
        stall_timeout_s=TIMEOUT_S, confirm_s=CONFIRM_S, sensors=sensors, poll_s=0.2, on_trip=trips
    )
    with dog:
        dog.beat(1, phase=phase)
        os.write(1, b"ready\n")
        globals()[row]()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
