"""Detection against a real NVIDIA driver; skipped where none answers."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from gangq.gpu import Detection, detect
from gpu.gpu_fakes import clean_environ

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def real() -> Detection:
    """Return what detection finds on this host, or skip."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("no NVIDIA driver: nvidia-smi is not installed")
    try:
        answered = subprocess.run([tool, "-L"], capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        answered = False
    if not answered:
        pytest.skip("no NVIDIA driver answers: nvidia-smi -L failed")
    return detect(environ=clean_environ(), timeout_s=60)


def smi(query: str) -> list[list[str]]:
    rows = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [[cell.strip() for cell in row.split(",")] for row in rows.stdout.splitlines()]


def test_the_real_devices_are_those_that_nvidia_smi_lists(real: Detection) -> None:
    assert real.source == "nvml", real.warnings
    whole = {device.uuid: device for device in real.devices if not device.mig}
    listed = [row for row in smi("uuid,name,memory.total,mig.mode.current") if row[3] != "Enabled"]
    assert set(whole) == {uuid for uuid, *_ in listed}
    for uuid, name, total, _ in listed:
        assert uuid.startswith("GPU-")
        assert whole[uuid].model == name
        if total.isdecimal():
            assert whole[uuid].vram_mb == int(total)


def test_the_real_devices_have_distinct_names_and_at_least_a_gibibyte(real: Detection) -> None:
    assert real.devices, real.warnings
    assert len({device.uuid for device in real.devices}) == len(real.devices)
    assert all(device.vram_mb >= 1024 for device in real.devices)
    assert all(device.uuid.startswith("MIG-" if device.mig else "GPU-") for device in real.devices)


def test_the_real_driver_answers_within_the_default_timeout(real: Detection) -> None:
    started = time.monotonic()
    assert detect(environ=clean_environ()).devices == real.devices
    assert time.monotonic() - started < 10


def test_hiding_every_real_device_leaves_none(real: Detection) -> None:
    assert detect(environ={**clean_environ(), "CUDA_VISIBLE_DEVICES": ""}).devices == ()
