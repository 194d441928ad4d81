"""What the GPU tests share: building a fake driver library, the lines that script it, and reading through it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from gangq.gpu import Detection, Device, DeviceEvent, DeviceReading, SamplerProcess
from gangq.gpu.reading import VALUES

T = TypeVar("T")
HERE = Path(__file__).parent
RESTRICTIONS = ("CUDA", "HIP", "ROCR", "NVIDIA")
ERRORS = [*range(1, 31), 999]
"""Every code of an NVML error."""

_READ = """
import itertools, json, os, sys
from dataclasses import astuple
from gangq.gpu import nvml_readings
from gangq.gpu.nvml_readings import NvmlReader
from gangq.gpu.rocm_readings import AmdsmiReader
wanted = json.load(sys.stdin)
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
seconds = itertools.count(1000)
nvml_readings.boottime = lambda: 2.0 * next(seconds)
state, reader, out = os.environ[wanted["variable"]], None, []
for script in wanted["scripts"]:
    with open(state + ".new", "w") as file:
        file.write(script)
    os.replace(state + ".new", state)
    if reader is None:
        reader = NvmlReader(os.environ) if wanted["variable"] == "FAKE_NVML" else AmdsmiReader(os.environ)
        reader.open()
    reading, notices = reader.read(wanted["uuid"], set(wanted["pids"]))
    out.append([reading.as_json(), [astuple(notice) for notice in notices]])
json.dump(out, answers)
"""


_LIST = """
import json, os, sys
from gangq.gpu.nvml import NvmlDriver
from gangq.gpu.rocm import AmdsmiDriver
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
out = []
for restriction in json.load(sys.stdin):
    kind = NvmlDriver if "FAKE_NVML" in os.environ else AmdsmiDriver
    driver = kind({**os.environ, **restriction})
    out.append([[device.uuid for device in driver.devices()], driver.warnings])
json.dump(out, answers)
"""


def compile_library(source: Path, target: Path, *options: str) -> None:
    """Build `source` as a shared library whose soname is the file name of `target`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver library")
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-Wall", "-Werror", *options]
    subprocess.run(
        [compiler, *flags, f"-Wl,-soname,{target.name}", "-o", str(target), str(source)], check=True
    )


def clean_environ() -> dict[str, str]:
    """Return this process's environment without any restriction on devices."""
    environ = dict(os.environ)
    for vendor in RESTRICTIONS:
        environ.pop(f"{vendor}_VISIBLE_DEVICES", None)
    environ.pop("CUDA_DEVICE_ORDER", None)
    return environ


def line(kind: str, **fields: object) -> str:
    """Return one line of a fake library's script."""
    return "\t".join([kind, *(f"{key}={value}" for key, value in fields.items())])


def gpu(letter: str, **fields: object) -> str:
    """Return the line of an NVIDIA card whose UUID is made of one letter."""
    return line("gpu", **{"uuid": f"GPU-{letter * 8}", "name": "NVIDIA H200", "total_mib": 143771, **fields})


def card(digit: str, hip_id: int, **fields: object) -> str:
    """Return the line of an AMD card whose serial number is made of one digit."""
    defaults = {"serial": f"0x{digit * 16}", "name": "AMD Instinct MI300X", "total_mib": 196592}
    return line("gpu", **{**defaults, "hip_id": hip_id, "hip_uuid": f"GPU-{digit * 16}", **fields})


def text(lines: Iterable[str]) -> str:
    """Return a script of these lines."""
    return "".join(f"{each}\n" for each in lines)


def rewrite(state: Path, *lines: str) -> None:
    """Give a running fake library a new script, all of it at once."""
    fresh = state.with_suffix(".new")
    fresh.write_text(text(lines))
    fresh.replace(state)


def read(
    environ: Mapping[str, str], uuid: str, *scripts: str, pids: Iterable[int] = ()
) -> list[tuple[DeviceReading, list[tuple[Any, ...]]]]:
    """Read a device once under each script, in one process of its own; returns readings and notices."""
    variable = "FAKE_NVML" if "FAKE_NVML" in environ else "FAKE_AMDSMI"
    wanted = {"variable": variable, "scripts": scripts, "uuid": uuid, "pids": list(pids)}
    said = subprocess.run(
        [sys.executable, "-c", _READ],
        env=dict(environ),
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    return [
        (DeviceReading.from_json(reading), [tuple(notice) for notice in notices])
        for reading, notices in json.loads(said.stdout)
    ]


def restricted(
    environ: Mapping[str, str], restrictions: Iterable[Mapping[str, str]]
) -> list[tuple[list[str], list[str]]]:
    """Return what the driver lists, and warns of, under each restriction, asked in one process."""
    said = subprocess.run(
        [sys.executable, "-c", _LIST],
        env=dict(environ),
        input=json.dumps(list(restrictions)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    return [(found, warnings) for found, warnings in json.loads(said.stdout)]


def neither_set_nor_unknown(reading: DeviceReading) -> set[str]:
    """The values of a reading that are missing without a reason. No throttling is a value."""
    return {name for name in VALUES if getattr(reading, name) is None and name not in reading.unknown}


def both_set_and_unknown(reading: DeviceReading) -> set[str]:
    """The values of a reading that are there, with a reason why they are not."""
    return {name for name in reading.unknown if getattr(reading, name) not in (None, ())}


def eventually(look: Callable[[], T], timeout_s: float = 20.0) -> T:
    """Return the first true answer of `look`; fails when there is none in time."""
    until = time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < until, f"not within {timeout_s:g} s"
        time.sleep(0.01)
    return answer


def whole_cards(environ: Mapping[str, str]) -> Detection:
    """Return what detection would find of whole NVIDIA cards, without the time that it takes."""
    uuids = re.findall(r"uuid=(GPU-\w+)", Path(environ["FAKE_NVML"]).read_text())
    return Detection(tuple(Device(i, uuid, 1, "H200", "nvml") for i, uuid in enumerate(uuids)), "nvml")


@contextmanager
def sampling(
    environ: Mapping[str, str], found: Detection | None = None, **options: Any
) -> Iterator[SamplerProcess]:
    """Run a sampler over `found`, else over the whole cards; a round every 0.2 s unless said otherwise."""
    found = whole_cards(environ) if found is None else found
    sampler = SamplerProcess(found, environ, **{"poll_s": 0.2, "deadline_s": 1.0, **options})
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def state(environ: dict[str, str]) -> Path:
    return Path(environ["FAKE_NVML"])


def sampler_child() -> psutil.Process | None:
    """The sampling process of this process, if it has one."""
    for each in psutil.Process().children():
        try:
            if "gangq.gpu.sampling" in each.cmdline() and each.status() != psutil.STATUS_ZOMBIE:
                return each
        except psutil.NoSuchProcess:
            continue
    return None


def known(sampler: SamplerProcess, *uuids: str) -> bool:
    """Say whether the latest reading of each device has values."""
    readings = sampler.readings()
    return all(uuid in readings and len(readings[uuid].unknown) < len(VALUES) for uuid in uuids)


def heard(sampler: SamplerProcess, kind: str, *, fatal: bool | None = None) -> list[DeviceEvent]:
    return [e for e in sampler.events(0) if e.kind == kind and fatal in (None, e.fatal)]
