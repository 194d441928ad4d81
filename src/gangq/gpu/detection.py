"""Which devices this host has, found out without trusting a driver to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gangq.gpu.declared import DeclaredDriver
from gangq.gpu.device import Device, Source
from gangq.gpu.driver import Driver
from gangq.gpu.nvml import NvmlDriver
from gangq.gpu.rocm import AmdsmiDriver
from gangq.gpu.sampling_child import how_ended, start_module
from gangq.proc import killing, procfs

_LOOK: dict[Source, str] = {
    "nvml": "Run nvidia-smi and look at dmesg for Xid lines",
    "amdsmi": "Run amd-smi list and look at dmesg for amdgpu lines",
}

_DRIVERS: dict[Source, type[Driver]] = {
    "nvml": NvmlDriver,
    "amdsmi": AmdsmiDriver,
    "declared": DeclaredDriver,
}


@dataclass(frozen=True)
class Detection:
    """The devices a worker may offer, the driver that lists them (None: there is none), and what the operator should
    know.

    A source without devices is a driver that answered and shows this worker none. `silent`: a driver is there and did
    not answer in time, so what devices there are is unknown. `stuck` is a process that asked and that SIGKILL did not
    end: it is inside the driver.
    """

    devices: tuple[Device, ...]
    source: Source | None
    warnings: tuple[str, ...] = ()
    silent: bool = False
    stuck: procfs.Stat | None = None

    def visible_env(
        self, devices: Iterable[Device], *, environ: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the environment that shows a child exactly these devices; `environ` is the worker's own.

        No devices hides them all from the child. Where nothing was detected the result is empty: gangq then
        knows of no device and leaves the child's environment alone.
        """
        if self.source is None:
            return {}
        return _DRIVERS[self.source](environ=environ).visible_env(devices)


def detect(
    declared: str | None = None,
    *,
    timeout_s: float = 10.0,
    worker: str = "",
    environ: Mapping[str, str] | None = None,
) -> Detection:
    """Find this worker's devices: as declared, else NVIDIA's, else AMD's, else none.

    `declared` ("2x24GiB", see `parse_declared`) wins over any driver; `worker` goes into its UUIDs.
    The drivers are asked in a process of their own, `timeout_s` at most: a hung or crashed one becomes a warning,
    and the next is asked in another. If one hung and no other has devices, the result is `silent`. A restriction in
    `environ` (default: this process's), such as CUDA_VISIBLE_DEVICES, is respected.
    Warnings are returned, not logged. Raises `DeviceSpecError` for a declaration that cannot be read.
    """
    environ = os.environ if environ is None else environ
    if declared is not None:
        operator = DeclaredDriver(declared, environ=environ, worker=worker)
        devices = operator.devices()
        return Detection(tuple(devices), "declared", tuple(operator.warnings))
    warnings: list[str] = []
    drivers: list[Driver] = [NvmlDriver(environ), AmdsmiDriver(environ)]
    silent, stuck = False, None
    while drivers:
        answers, failure = _ask(drivers, timeout_s=timeout_s, environ=environ)
        failed = () if failure is None else (failure.message,)
        if failure is not None:
            silent, stuck = silent or failure.silent, stuck or failure.stuck
        for driver, answer in zip(drivers, answers, strict=False):
            if answer["problem"] is None:
                found = tuple(Device(**fields) for fields in answer["devices"])
                said = (*warnings, *answer["warnings"], *failed)
                return Detection(found, driver.name, said, stuck=stuck)
            if not answer["absent"]:
                warnings.append(answer["problem"])
        warnings.extend(failed)
        drivers = drivers[len(answers) + 1 :]
    return Detection((), None, tuple(warnings), silent, stuck)


class _Failure(NamedTuple):
    """What became of a probe that gave no answer, or does not end; see `Detection` for the last two."""

    message: str
    silent: bool = False
    stuck: procfs.Stat | None = None


def _ask(
    drivers: Sequence[Driver],
    *,
    timeout_s: float,
    environ: Mapping[str, str],
) -> tuple[list[dict[str, Any]], _Failure | None]:
    """Run the probe for these drivers, in turn until one has devices. Returns their answers, and what became of the
    next one where it gave none, or of the probe where SIGKILL does not end it.
    """
    names = [driver.name for driver in drivers]
    limit_s = str(timeout_s + 2 * killing.DEATH_S)
    try:
        probe = start_module("gangq.gpu.probe", limit_s, *names, environ=environ, stdin=subprocess.DEVNULL)
    except OSError as error:
        return [], _Failure(
            f"cannot start {sys.executable!r} to ask {drivers[0].library} for its devices ({error}): this worker "
            "starts without them; repair the Python installation, or declare them with --devices"
        )
    late = False
    try:
        out, err = probe.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        out, err, late = error.output or b"", b"", True
    answers = _answers(out)
    unanswered = [] if answers and answers[-1]["problem"] is None else drivers[len(answers) :]
    if late:
        abandoned = _abandon((unanswered or drivers)[0], probe, timeout_s)
        if unanswered:
            return answers, abandoned
        # One that has answered may still hang where it ends. Its answers count, and it is named if SIGKILL fails.
        message = f"The probe, pid {probe.pid}, has answered and does not die of SIGKILL: it is stuck in the kernel."
        return answers, _Failure(message, stuck=abandoned.stuck) if abandoned.stuck is not None else None
    return answers, _crashed(unanswered[0], probe.returncode, err) if unanswered else None


def _answers(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines(keepends=True) if line.endswith(b"\n")]


def _abandon(driver: Driver, probe: subprocess.Popen[bytes], timeout_s: float) -> _Failure:
    """Kill a probe that hangs and say so; a probe that outlives SIGKILL is left behind, never waited for."""
    message = (
        f"{driver.library} did not answer within {timeout_s:g} s. {_LOOK[driver.name]}; if that hangs too, the "
        "driver is wedged and needs a GPU reset or a reboot."
    )
    dead = killing.end_group(probe)
    for stream in (probe.stdout, probe.stderr):
        if stream is not None:
            stream.close()
    if dead:
        return _Failure(message, True)
    message += f" The probe, pid {probe.pid}, does not die of SIGKILL: it is stuck in the kernel."
    return _Failure(message, True, procfs.stat(probe.pid))


def _crashed(driver: Driver, returncode: int, err: bytes) -> _Failure:
    return _Failure(
        f"the probe of {driver.library} {how_ended(returncode, err)}: this worker starts without its devices. "
        f"{_LOOK[driver.name]}; a driver whose parts are of different versions crashes like this."
    )
