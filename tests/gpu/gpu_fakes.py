"""What the GPU tests share: building a fake driver library, and the lines that script it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RESTRICTIONS = ("CUDA", "HIP", "ROCR", "NVIDIA")


def compile_library(source: Path, target: Path) -> None:
    """Build `source` as a shared library whose soname is the file name of `target`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver library")
    options = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-Wall", "-Werror"]
    subprocess.run(
        [compiler, *options, f"-Wl,-soname,{target.name}", "-o", str(target), str(source)], check=True
    )


def clean_environ() -> dict[str, str]:
    """Return this process's environment without any restriction on devices."""
    environ = dict(os.environ)
    for vendor in RESTRICTIONS:
        environ.pop(f"{vendor}_VISIBLE_DEVICES", None)
    environ.pop("CUDA_DEVICE_ORDER", None)
    return environ


def line(kind: str, **fields: object) -> str:
    """Return one line of the fake library's script."""
    return "\t".join([kind, *(f"{key}={value}" for key, value in fields.items())])


def gpu(letter: str, **fields: object) -> str:
    """Return the line of a card whose UUID is made of one letter."""
    return line("gpu", **{"uuid": f"GPU-{letter * 8}", "name": "NVIDIA H200", "total_mib": 143771, **fields})
