"""What each signal of a real GPU reads while it works, loads, idles and hangs (`pytest -m gpu`, a few minutes).

The table goes to bench-results/ and to the terminal: thresholds are set from it, not from memory. Seconds per
state: GANGQ_GPU_STATE_S [10].
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gangq.gpu import Detection, DeviceReading, SamplerProcess, detect
from gpu.gpu_fakes import HERE, clean_environ, eventually, sampler_child

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

STATES = ("idle", "cpu", "tiny", "h2d", "d2h", "d2d", "load", "load_direct", "busy", "spin", "gil")
STATE_S = float(os.environ.get("GANGQ_GPU_STATE_S", "10"))
POLL_S = 0.1
RESULTS = Path(__file__).parents[2] / "bench-results"
BACK_MB = 512
BACK_S = 50.0


@pytest.fixture(scope="module")
def real() -> Detection:
    """The devices of this host, or skip with the reason."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver: nvidia-smi is not installed")
    if find_spec("torch") is None:
        pytest.skip("torch is not installed: it is what puts the GPU into its states")
    found = detect(environ=clean_environ(), timeout_s=60)
    if not found.devices or found.source != "nvml":
        pytest.skip(f"no NVIDIA device is detected: {found.warnings}")
    return found


def span(values: list[float]) -> str:
    """Smallest, median and largest."""
    if not values:
        return "-"
    return "/".join(f"{value:.4g}" for value in (min(values), statistics.median(values), max(values)))


def slope(readings: list[DeviceReading]) -> float | None:
    """Watts, from the energy counter."""
    points = [(r.at, r.energy_mj) for r in readings if r.energy_mj is not None]
    if len(points) < 2 or points[-1][0] == points[0][0]:
        return None
    return (points[-1][1] - points[0][1]) / 1000 / (points[-1][0] - points[0][0])


def row(state: str, readings: list[DeviceReading]) -> dict[str, Any]:
    """What a state looked like."""
    seen: dict[str, Any] = {"state": state, "readings": len(readings)}
    for name in ("gpu_pct", "memory_pct", "pcie_kb_s", "power_w", "temperature_c", "used_mb", "own_mb"):
        seen[name] = span([float(v) for r in readings if (v := getattr(r, name)) is not None])
    watts = slope(readings)
    seen["energy_w"] = "-" if watts is None else f"{watts:.0f}"
    seen["scope"] = "/".join(sorted({str(reading.gpu_scope) for reading in readings}))
    seen["shared"] = any(reading.shared for reading in readings)
    seen["throttle"] = "/".join(sorted({name for reading in readings for name in reading.throttle})) or "-"
    gaps = [b.at - a.at for a, b in itertools.pairwise(readings)]
    seen["round_s"] = span(gaps)
    reasons = {f"{name}={reason}" for reading in readings for name, reason in reading.unknown.items()}
    seen["unknown"] = " ".join(sorted(reasons)) or "-"
    seen["problem"] = "-"
    return seen


def in_state(state: str, sampler: SamplerProcess, uuid: str, folder: Path) -> dict[str, Any]:
    """Put the GPU into a state, read it for a while, kill it, and see how soon its memory is back."""
    before = sampler.readings()[uuid].used_mb
    complaints = folder / f"{state}.txt"
    with complaints.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_states.py"), state, str(folder)],
            env={**clean_environ(), "CUDA_VISIBLE_DEVICES": uuid},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    readings: list[DeviceReading] = []
    try:
        sampler.watch([uuid], lambda: [process.pid])
        assert process.stdout is not None
        if process.stdout.readline() == "ready\n":
            # The first second still shows how it began.
            time.sleep(1.0)
            since = sampler.readings()[uuid].at
            time.sleep(STATE_S)
            readings = sampler.history(uuid, since)
        ended = process.poll()
    finally:
        process.kill()
        killed = time.monotonic()
        process.communicate()
    seen = row(state, readings)
    if ended is not None or not readings:
        seen["problem"] = " ".join(complaints.read_text().split()[-20:]) or f"it exited with {ended}"

    def back() -> bool:
        used = sampler.readings()[uuid].used_mb
        return before is None or (used is not None and used < before + BACK_MB)

    while not back() and time.monotonic() < killed + BACK_S:
        time.sleep(0.05)
    seen["memory_back_s"] = f"{time.monotonic() - killed:.1f}" if back() else f"not within {BACK_S:g}"
    return seen


def on_cpu_s(task: str) -> float:
    return int(Path(f"/proc/{task}/schedstat").read_text().split()[0]) / 1e9


def overhead(real: Detection) -> str:
    """Percent of a core that a round a second takes, in the process and in its owner."""
    sampler = SamplerProcess(real, clean_environ(), 1.0, start_s=60.0)
    sampler.start()
    try:
        eventually(lambda: len(sampler.history(real.devices[0].uuid, 0)) >= 2, 60.0)
        thread = next(t for t in threading.enumerate() if t.name == "gangq-sampler")
        tasks = (str(eventually(sampler_child).pid), f"self/task/{thread.native_id}")
        before, began = [on_cpu_s(task) for task in tasks], time.monotonic()
        time.sleep(10)
        took = time.monotonic() - began
        return "/".join(f"{100 * (on_cpu_s(t) - b) / took:.2f}" for t, b in zip(tasks, before, strict=True))
    except OSError as problem:
        return f"- ({problem})"
    finally:
        sampler.stop()


def test_every_state_is_recorded_and_work_hangs_and_idleness_look_as_the_watchdogs_assume(
    real: Detection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = real.devices[0]
    costs = overhead(real)
    sampler = SamplerProcess(real, clean_environ(), POLL_S, start_s=60.0)
    sampler.start()
    try:
        eventually(lambda: device.uuid in sampler.readings(), 60.0)
        rows = [in_state(state, sampler, device.uuid, tmp_path) for state in STATES]
        events = [event.as_json() for event in sampler.events(0)]
    finally:
        sampler.stop()
    report = {"device": device.as_json(), "state_s": STATE_S, "sampler_cpu_pct": costs, "events": events}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu-states.json").write_text(json.dumps({**report, "states": rows}, indent=2) + "\n")
    names = list(rows[0])
    lines = [
        f"{device.model}: smallest/median/largest, {STATE_S:g} s a state; sampler {costs} % of a core",
        "",
    ]
    lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(str(each[name]) for name in names) + " |" for each in rows]
    (RESULTS / "gpu-states.md").write_text("\n".join(lines) + "\n")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    if device.mig:
        return
    typical = {each["state"]: float(each["gpu_pct"].split("/")[1]) for each in rows if each["gpu_pct"] != "-"}
    assert {state: typical[state] for state in ("idle", "cpu") if typical.get(state, 0) > 5} == {}
    assert {state: typical[state] for state in ("busy", "spin", "gil") if typical.get(state, 100) < 90} == {}
    assert [event for event in events if event["fatal"]] == []
    assert {each["state"]: each["problem"] for each in rows if each["problem"] != "-"} == {}
