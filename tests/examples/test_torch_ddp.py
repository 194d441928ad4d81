"""An unmodified torch.distributed script trains with only the environment that a gang's member gets."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
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
        ended = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, [err[-2000:] for _, err in ended]
    assert [out for out, _ in ended[1:]] == [""] * (world_size - 1), "only rank 0 reports"
    result = json.loads(ended[0][0])
    assert result["world_size"] == world_size
    assert result["accuracy"] >= 0.95


def test_gangq_runs_the_unmodified_script_as_a_gang_over_two_workers(dsn: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GANGQ_DSN": dsn, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    gangq = [sys.executable, "-m", "gangq"]
    worker = [*gangq, "worker", "--address", "127.0.0.1", "--slots", "2"]
    first = SCRIPT.read_text(encoding="utf-8").splitlines()[0]
    options = first.removeprefix('"""gangq ').removesuffix(" -- python train.py").split()
    assert options == ["run", "--gang", "4"], first
    with ExitStack() as open_logs:
        workers = [
            subprocess.Popen(
                [*worker, "--name", f"w{n}", "--host", f"h{n}"],
                env=environment,
                stderr=open_logs.enter_context((tmp_path / f"w{n}.log").open("w")),
            )
            for n in range(2)
        ]
        try:
            ran = subprocess.run(
                [*gangq, *options, "--", sys.executable, str(SCRIPT)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        finally:
            for process in workers:
                process.terminate()
            for process in workers:
                process.wait(60)
    logs = "".join((tmp_path / f"w{n}.log").read_text()[-2000:] for n in range(2))
    assert ran.returncode == 0, ran.stderr + logs
    (report,) = [line.removeprefix("[0] ") for line in ran.stdout.splitlines() if line.startswith("[0] {")]
    result = json.loads(report)
    assert result["world_size"] == 4
    assert result["accuracy"] >= 0.95
