"""An unmodified torch.distributed script trains with only the environment that a gang's member gets."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torch_ddp" / "train.py"

# Looked for, not imported: the test process needs no torch, only the ranks do.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("world_size", [2, 4])
def test_plain_torch_processes_reach_the_held_out_accuracy_together(world_size: int) -> None:
    base = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, [err[-2000:] for _, err in ended]
    assert [out for out, _ in ended[1:]] == [""] * (world_size - 1), "only rank 0 reports"
    result = json.loads(ended[0][0])
    assert result["world_size"] == world_size
    assert result["accuracy"] >= 0.95
