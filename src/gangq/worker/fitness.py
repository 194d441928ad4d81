"""Whether this worker may take work at all: looked at before it registers.

A worker that is started again beside what its predecessor left, on a host that has lost a GPU, or with a driver
that was exchanged under it, would fail every job it takes, one after the other, quickly. It does better not to
start (exit code 88), and to say what has to be done.

A driver that does not answer is not a missing device. The worker waits for it (:func:`devices_of`), five minutes at
most, and then ends with a code with which it is started again.

What is looked for, each only with evidence: a predecessor of the same name that could not be killed, on the
same boot; a driver whose parts do not fit together; devices missing, compared with what the operator expects
(``--expect-gpus``) or else with what the predecessor on this host saw; all devices in quarantine; device memory
that stays taken although its owner is dead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gangq.errors import DriverUnavailable, GangqError, Unfit
from gangq.gpu import Detection, SamplerProcess, detect
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity
from gangq.worker.liveness import number_of

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.client.rows import Predecessor
    from gangq.worker.options import WorkerOptions

log = logging.getLogger("gangq.worker.fitness")

EXPECT_VARIABLE = "GANGQ_EXPECT_GPUS"
"""How many devices this worker must see [as many as the last time]; ``gangq worker --expect-gpus``."""
DEVICE_WAIT_VARIABLE = "GANGQ_DEVICE_WAIT_S"
"""How long to wait for the memory of a dead worker's devices, seconds [50]; 0: do not look."""
DEFAULT_DEVICE_WAIT_S = 50.0

DRIVER_WAIT_S = 300.0
"""How long a driver may take to answer. Half of what the supervisor allows before the first sign of life (600 s), and
so long that the unit's limit of starts (60 an hour) is never used up.
"""

_ASK_AGAIN_S = 5.0
_FREE_MB = 512
"""What a driver may keep for itself, and a desktop for its windows."""
_POLL_S = 0.5
_FIRST_READING_S = 10.0
_STUCK_S = 2.0
_MISMATCH = ("version mismatch", "upgraded under a running system")

SamplerOf = Callable[[Detection, Mapping[str, str]], SamplerProcess]


def devices_of(
    options: WorkerOptions,
    environ: Mapping[str, str],
    *,
    ask: Callable[..., Detection] = detect,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Detection:
    """Find the devices that this worker may offer; a driver that does not answer in time is asked again.

    ``pause`` waits for some seconds, and says true if the worker was told to stop: then what is known is returned.

    Raises:
        DriverUnavailable: the driver did not answer for `DRIVER_WAIT_S`. A worker started again may find it well.
        Unfit: it did not, and a process that asked it is stuck in the kernel: each start would leave one more.
        DeviceSpecError: a declaration that cannot be read.
    """
    until = clock() + DRIVER_WAIT_S
    while True:
        found = ask(options.devices, worker=options.name, environ=environ)
        if not found.silent:
            return found
        advice = " ".join(found.warnings)
        log.warning("driver_silent", extra={"advice": advice, "left_s": round(until - clock(), 1)})
        while True:
            if clock() >= until:
                raise _silent(options.name, advice, found.stuck)
            if pause(_ASK_AGAIN_S):
                return found
            if found.stuck is None or procfs.same(found.stuck) is None:
                break


def _silent(name: str, advice: str, stuck: procfs.Stat | None) -> GangqError:
    waited = f"worker {name!r} waited {DRIVER_WAIT_S:g} s for a driver to answer: {advice}"
    if stuck is not None and procfs.same(stuck) is not None:
        return Unfit(f"{waited} Nothing but a reboot of this host ends process {stuck.pid}, which asked it")
    return DriverUnavailable(f"{waited} To start without its devices: --devices none")


def check(
    client: Client,
    options: WorkerOptions,
    detection: Detection,
    environ: Mapping[str, str],
    *,
    sampler_of: SamplerOf = SamplerProcess,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return if this worker may register.

    Raises:
        Unfit: it must not; the message says what to do about it.
        InvalidInput: a variable of the environment that is no number.
    """
    for warning in detection.warnings:
        if any(word in warning.lower() for word in _MISMATCH):
            raise Unfit(f"worker {options.name!r} does not start: {warning}")
    found = client.predecessor(worker=options.name)
    last = found[0] if found else None
    here = last is not None and last.host == options.host
    if last is not None:
        _not_beside_unkillable(options.name, last)
    _all_devices(options, detection, environ, last if here else None)
    _some_device_usable(client, options, detection)
    if last is not None and here and last.state == "dead" and last.exits_at is None:
        # It ended without retiring, so the memory of its devices may still be taken.
        memory_back(client, options, detection, environ, sampler_of=sampler_of, sleep=sleep)


def memory_back(
    client: Client,
    options: WorkerOptions,
    detection: Detection,
    environ: Mapping[str, str],
    *,
    sampler_of: SamplerOf = SamplerProcess,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the memory of this worker's devices is free, after a predecessor was found dead.

    A device that another live worker offers as well, or whose driver does not say, is passed over.

    Raises:
        Unfit: it is still taken after ``GANGQ_DEVICE_WAIT_S``, and no live worker is there to have taken it.
    """
    wait_s = number_of(environ, DEVICE_WAIT_VARIABLE, DEFAULT_DEVICE_WAIT_S, zero=True)
    uuids = [device.uuid for device in detection.devices if device.source != "declared"]
    if not uuids or wait_s <= 0:
        return
    others = {row.uuid for row in client.devices(host=options.host) if row.worker not in (None, options.name)}
    uuids = [uuid for uuid in uuids if uuid not in others]
    if not uuids:
        return
    sampler = sampler_of(detection, environ)
    sampler.watch(uuids, lambda: ())
    sampler.start()
    try:
        taken = _taken(sampler, uuids, wait_s, sleep)
    finally:
        sampler.stop()
    if taken:
        what = ", ".join(f"{uuid} ({mb} MiB)" for uuid, mb in taken.items())
        raise Unfit(
            f"worker {options.name!r} does not start: {wait_s:g} s after its predecessor died, device memory is "
            f"still taken and no live worker offers the device: {what}. See what holds it (nvidia-smi, "
            "fuser -v /dev/nvidia*) and end that; if nothing does, the device needs a reset or the host a "
            f"reboot. If other programs use the device by intention, set {DEVICE_WAIT_VARIABLE}=0"
        )


def _taken(
    sampler: SamplerProcess, uuids: Sequence[str], wait_s: float, sleep: Callable[[float], None]
) -> dict[str, int]:
    waited_s = 0.0
    while True:
        readings = sampler.readings()
        silent = [uuid for uuid in uuids if uuid not in readings]
        taken = {
            uuid: reading.used_mb
            for uuid, reading in readings.items()
            if uuid in uuids and reading.used_mb is not None and reading.used_mb > _FREE_MB
        }
        if not taken and (not silent or waited_s >= _FIRST_READING_S):
            return {}
        if waited_s >= wait_s:
            return taken
        if taken and waited_s == 0:
            log.info("waiting_for_device_memory", extra={"taken_mb": taken, "at_most_s": wait_s})
        sleep(_POLL_S)
        waited_s += _POLL_S


def _not_beside_unkillable(name: str, last: Predecessor) -> None:
    """A name whose last incarnation left a process that SIGKILL did not end. A reboot ends it, an operator who
    has looked may lift the quarantine; nothing else does.
    """
    if not last.reboot_needed or last.quarantined is None:
        return
    boot_id = HostIdentity.here().boot_id
    if last.boot_id is not None and last.boot_id != boot_id:
        log.warning(
            "predecessor_unkillable",
            extra={
                "quarantined": last.quarantined,
                "advice": "this is another boot, so that process is gone; the quarantine stays until an "
                f"operator lifts it: gangq unquarantine --worker {name}, and its devices",
            },
        )
        return
    raise Unfit(
        f"worker {name!r} does not start beside what its predecessor left: {last.quarantined}. Reboot the host; "
        f"if the process is gone and the devices answer, gangq unquarantine --worker {name}"
    )


def _all_devices(
    options: WorkerOptions, detection: Detection, environ: Mapping[str, str], last: Predecessor | None
) -> None:
    seen = [device.uuid for device in detection.devices]
    said = environ.get(EXPECT_VARIABLE)
    if said:
        expected = int(number_of(environ, EXPECT_VARIABLE, 0, zero=True))
        missing: list[str] = []
    elif last is not None and options.devices is None:
        expected = len(last.devices)
        missing = [uuid for uuid in last.devices if uuid not in seen]
    else:
        return
    if len(seen) >= expected:
        return
    # Only the number counts: cards are exchanged, and MIG instances made anew.
    names = f" (missing: {', '.join(missing)})" if missing else ""
    warnings = "".join(f" {warning}" for warning in detection.warnings)
    devices = "1 device" if len(seen) == 1 else f"{len(seen)} devices"
    source = f"{EXPECT_VARIABLE} asks for" if said else "its predecessor on this host saw"
    raise Unfit(
        f"worker {options.name!r} does not start: it sees {devices}, {source} {expected}{names}."
        f"{warnings} Look at nvidia-smi -L or amd-smi list, and at dmesg; if that is meant to be so, start it "
        f"with --expect-gpus {len(seen)}"
    )


def _some_device_usable(client: Client, options: WorkerOptions, detection: Detection) -> None:
    ours = {device.uuid for device in detection.devices}
    if not ours:
        return
    held = {
        row.uuid: row.reason
        for row in client.devices(host=options.host, state="quarantined")
        # Withheld for a moment only, until the worker that tripped there is proven gone.
        if row.health != "exiting"
    }
    if ours <= held.keys():
        reasons = "; ".join(f"{uuid}: {held[uuid]}" for uuid in sorted(ours))
        raise Unfit(
            f"worker {options.name!r} does not start: all its devices are in quarantine ({reasons}). Once they "
            f"are in order: gangq unquarantine --device UUID"
        )


def unfit_beside(name: str, pids: Sequence[int]) -> Unfit:
    """The refusal of a worker whose predecessor's processes survive SIGKILL."""
    left = [entry for pid in pids if (entry := procfs.stat(pid)) is not None]
    what = "; ".join(f"{entry.pid}: {entry.comm}, state {entry.state}" for entry in left)
    advice = (
        "Nothing but a reboot of this host ends them"
        if procfs.await_end(left, _STUCK_S)
        else "They are still giving their memory back, or belong to another user: wait, or end them as that user"
    )
    return Unfit(
        f"worker {name!r} does not start beside what its predecessor left, processes that it cannot end "
        f"({what or ', '.join(map(str, pids))}). {advice}, or give this worker another name and other devices"
    )
