"""What a GPU can be doing, one state a process: `python gpu_states.py STATE FOLDER` says "ready" and goes on.

Each state is what a watchdog must tell from the others: work (busy, tiny, h2d, d2h, d2d, load, load_direct), no
work (idle, cpu), and a hang that looks like work (spin, gil: the same under the interpreter's lock).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_FILE_MB = 2048
_CHUNK = 64 << 20
_FOREVER_CYCLES = 1 << 62


def idle(folder: Path) -> Iterator[None]:
    while True:
        time.sleep(0.1)
        yield


def cpu(folder: Path) -> Iterator[None]:
    while True:
        sum(range(10**6))
        yield


def busy(folder: Path) -> Iterator[None]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while True:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        yield


def tiny(folder: Path) -> Iterator[None]:
    a = torch.randn(64, device="cuda")
    while True:
        a.add_(1)
        torch.cuda.synchronize()
        time.sleep(0.01)
        yield


def _copies(source: torch.Tensor, target: torch.Tensor) -> Iterator[None]:
    while True:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        yield


def _pinned() -> torch.Tensor:
    return torch.empty(_CHUNK * 4, dtype=torch.uint8, pin_memory=True)


def h2d(folder: Path) -> Iterator[None]:
    return _copies(_pinned(), torch.empty(_CHUNK * 4, dtype=torch.uint8, device="cuda"))


def d2h(folder: Path) -> Iterator[None]:
    return _copies(torch.empty(_CHUNK * 4, dtype=torch.uint8, device="cuda"), _pinned())


def d2d(folder: Path) -> Iterator[None]:
    return _copies(*(torch.empty(_CHUNK * 16, dtype=torch.uint8, device="cuda") for _ in range(2)))


def _weights(folder: Path) -> Path:
    path = folder / "weights"
    if not path.exists():
        with path.open("wb") as file:
            for _ in range(_FILE_MB):
                file.write(os.urandom(1 << 20))
    return path


def _load(folder: Path, flags: int) -> Iterator[None]:
    path = _weights(folder)
    buffer = mmap.mmap(-1, _CHUNK)
    host = torch.frombuffer(buffer, dtype=torch.uint8)
    device = torch.empty(_FILE_MB << 20, dtype=torch.uint8, device="cuda")
    while True:
        fd = os.open(path, os.O_RDONLY | flags)
        try:
            at = 0
            while got := os.readv(fd, [buffer]):
                device[at : at + got].copy_(host[:got])
                at += got
                # A model loads at hundreds of megabytes a second, not at the speed of a warm cache.
                time.sleep(0.1)
                yield
        finally:
            os.close(fd)


def load(folder: Path) -> Iterator[None]:
    return _load(folder, 0)


def load_direct(folder: Path) -> Iterator[None]:
    return _load(folder, os.O_DIRECT)


def spin(folder: Path) -> Iterator[None]:
    while True:
        torch.cuda._sleep(_FOREVER_CYCLES)
        yield
        torch.cuda.synchronize()


def gil(folder: Path) -> Iterator[None]:
    # Through PyDLL the call keeps the interpreter's lock: no thread of this process runs while it waits.
    synchronise = ctypes.PyDLL("libcuda.so.1").cuCtxSynchronize
    while True:
        torch.cuda._sleep(_FOREVER_CYCLES)
        yield
        synchronise()


STATES: dict[str, Callable[[Path], Iterator[None]]] = {
    each.__name__: each for each in (idle, cpu, busy, tiny, h2d, d2h, d2d, load, load_direct, spin, gil)
}


def main(name: str, folder: Path) -> None:
    """Open a context, say so once the state has begun, and stay in it."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    state = STATES[name](folder)
    next(state)
    print("ready", flush=True)
    for _ in state:
        pass


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
