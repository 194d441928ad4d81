"""What one look at an NVIDIA device says: the true binding over a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_fakes import ERRORS, gpu, line, read

from gangq.gpu import DeviceReading
from gangq.gpu.nvml_readings import NvmlReader
from gangq.gpu.reading import VALUES

Script = Callable[..., dict[str, str]]
A = "GPU-aaaaaaaa"
OWN, NEIGHBOUR = os.getpid(), os.getppid()
BUSY = {
    "used_mib": 2048,
    "samples": "0/95/0",
    "memsamples": "1/7/2",
    "temp": 41,
    "milliwatts": 70500,
    "millijoules": 123456,
    "kb": 1000,
    "reasons": 0x8 | 0x40 | 0x4 | 0x1,
    "ecc": 2,
    "recovery": 0,
}


def one(environ: dict[str, str], *lines: str, pids: tuple[int, ...] = (), uuid: str = A) -> DeviceReading:
    return read(environ, uuid, script(*lines), pids=pids)[0][0]


def script(*lines: str) -> str:
    return "".join(f"{each}\n" for each in lines)


def test_every_value_is_read_in_its_unit(fake_nvml: Script) -> None:
    reading = one(fake_nvml(), gpu("a", **BUSY, pids=f"{OWN}:1500"), pids=(OWN,))
    assert reading.unknown == {}
    assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct) == (95.0, "device", 7.0)
    assert (reading.used_mb, reading.total_mb, reading.own_mb) == (2048, 143771, 1500)
    assert (reading.energy_mj, reading.pcie_kb_s, reading.power_w) == (123456, 3000, 70.5)
    assert (reading.temperature_c, reading.ecc_uncorrectable, reading.recovery_action) == (41, 2, 0)
    assert reading.throttle == ("hw_slowdown", "hw_thermal")
    assert not reading.shared


def test_without_buffered_samples_the_rate_of_the_moment_is_taken(fake_nvml: Script) -> None:
    (before, _), (after, _) = read(
        fake_nvml(), A, script(gpu("a", samples="80", util=7)), script(gpu("a", util=7, memutil=3))
    )
    assert before.gpu_pct == 80
    assert (after.gpu_pct, after.memory_pct) == (7, 3)


def bound(**functions: Any) -> NvmlReader:
    """A reader over a binding of these functions, opened, with one known handle."""
    error = type("NVMLError", (Exception,), {"value": 3})
    names = ("NVMLError_FunctionNotFound", "NVMLError_NotSupported")
    reader = NvmlReader({})
    reader._nvml = SimpleNamespace(NVMLError=error, **dict.fromkeys(names, error), **functions)
    reader._nvml.nvmlDeviceGetHandleByUUID = lambda uuid: 1
    return reader


def sample(at: int, value: int) -> SimpleNamespace:
    return SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value))


def test_a_sample_counts_once_even_where_the_driver_hands_out_its_whole_buffer_every_time() -> None:
    buffer = [sample(1_000_000, 99), sample(9_500_000, 40), sample(10_000_000, 0)]
    reader = bound(nvmlDeviceGetSamples=lambda handle, kind, since: (1, buffer))
    # What happened long before the first look is nobody's business any more.
    assert reader.read(A, ())[0].gpu_pct == 40
    buffer.append(sample(11_000_000, 3))
    assert reader.read(A, ())[0].gpu_pct == 3
    assert reader.read(A, ())[0].gpu_pct is None


def test_a_binding_that_does_not_match_the_library_leaves_a_reason(fake_nvml: Script) -> None:
    def mismatch(*args: object) -> None:
        raise type("NVMLLibraryMismatchError", (Exception,), {})("unversioned function")

    reading = bound(nvmlDeviceGetComputeRunningProcesses_v3=mismatch).read(A, ())[0]
    assert reading.unknown["own_mb"] == "library_mismatch"
    assert reading.unknown["temperature_c"] == "function_not_found"


def test_an_own_process_that_the_driver_lists_is_read_by_itself_and_its_silence_is_then_a_zero(
    fake_nvml: Script,
) -> None:
    both = {"pids": f"{OWN}:100;{NEIGHBOUR}:900", "samples": "97"}
    working = script(gpu("a", **both, procs=f"{OWN}:35;{NEIGHBOUR}:60"))
    silent = script(gpu("a", **both, procs=f"{NEIGHBOUR}:60"))
    nobody = script(gpu("a", **both))
    failing = script(gpu("a", **both, fail="procs:999"))
    readings = [reading for reading, _ in read(fake_nvml(), A, working, silent, nobody, failing, pids=(OWN,))]
    assert [(r.gpu_pct, r.gpu_scope) for r in readings] == [
        (35.0, "process"),
        (0.0, "process"),
        (0.0, "process"),
        (None, None),
    ]
    assert all(reading.shared and reading.own_mb == 100 for reading in readings)


def test_two_own_processes_add_up(fake_nvml: Script) -> None:
    reading = one(fake_nvml(), gpu("a", procs="70001:35;70002:20;70003:9"), pids=(70001, 70002))
    assert (reading.gpu_pct, reading.gpu_scope) == (55.0, "process")


def test_no_sample_of_an_unseen_process_is_not_a_zero(fake_nvml: Script) -> None:
    reading = one(fake_nvml(), gpu("a", pids=f"{OWN}:100", samples="88"), pids=(OWN,))
    assert (reading.gpu_pct, reading.gpu_scope) == (88.0, "device")


def test_when_the_two_lists_disagree_about_the_number_the_device_is_read_as_a_whole(
    fake_nvml: Script,
) -> None:
    mismatch = gpu("a", pids=f"{OWN}:100", procs="4194000:88", samples="88")
    reading = one(fake_nvml(), mismatch, pids=(OWN,))
    assert (reading.gpu_pct, reading.gpu_scope, reading.own_mb, reading.shared) == (
        88.0,
        "device",
        100,
        False,
    )


@pytest.mark.parametrize(
    "listed",
    [f"{OWN}:100;{NEIGHBOUR}:1", f"{NEIGHBOUR}:1", "4194001:1;4194002:1", f"{OWN}:100;4194001:1"],
    ids=["both", "the neighbour", "two unknown", "own and unknown"],
)
def test_on_a_shared_device_that_does_not_show_the_own_process_nothing_is_known(
    fake_nvml: Script, listed: str
) -> None:
    reading = one(fake_nvml(), gpu("a", pids=listed, samples="0"), pids=(OWN,))
    assert reading.shared
    assert (reading.gpu_pct, reading.gpu_scope) == (None, None)
    assert reading.unknown["gpu_pct"] == "no_own_process"


def test_a_single_process_under_a_number_that_this_container_does_not_know_is_the_own_one(
    fake_nvml: Script,
) -> None:
    reading = one(fake_nvml(), gpu("a", pids="4194001:100", samples="30"), pids=(OWN,))
    assert (reading.gpu_pct, reading.gpu_scope, reading.shared) == (30.0, "device", False)
    assert reading.unknown["own_mb"] == "no_own_process"


CALLS = {
    "memory": ("used_mb", "total_mb"),
    "energy": ("energy_mj",),
    "power": ("power_w",),
    "pcie": ("pcie_kb_s",),
    "temp": ("temperature_c",),
    "reasons": ("throttle",),
    "ecc": ("ecc_uncorrectable",),
    "fields": ("recovery_action",),
    "pids": ("own_mb",),
}
GONE = {15: "lost", 16: "reset_required", 28: "lost"}


def test_every_error_of_every_call_is_an_unknown_with_a_reason_and_never_a_number(fake_nvml: Script) -> None:
    cases = [(call, code) for call in CALLS for code in ERRORS if code not in GONE]
    scripts = [script(gpu("a", **BUSY, pids=f"{OWN}:1", fail=f"{call}:{code}")) for call, code in cases]
    reasons = {
        3: "not_supported",
        4: "no_permission",
        6: "not_found",
        10: "timeout",
        13: "function_not_found",
    }
    for (call, code), (reading, notices) in zip(
        cases, read(fake_nvml(), A, *scripts, pids=(OWN,)), strict=True
    ):
        assert set(reading.unknown) == set(CALLS[call]), (call, code)
        for name in CALLS[call]:
            assert getattr(reading, name) in (None, ()), (call, code)
            assert reading.unknown[name].startswith(reasons.get(code, "failed: ")), (call, code)
        assert notices == []


def test_a_driver_that_fails_every_utilisation_call_says_nothing_about_idleness(fake_nvml: Script) -> None:
    codes = [code for code in ERRORS if code not in GONE]
    scripts = [script(gpu("a", fail=f"util:{code};samples:{code};procs:{code}")) for code in codes]
    for reading, _ in read(fake_nvml(), A, *scripts, pids=(OWN,)):
        assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct) == (None, None, None)
        assert {"gpu_pct", "memory_pct"} <= set(reading.unknown)


@pytest.mark.parametrize("call", ["handle", "util", "temp", "fields", "pids"])
def test_a_device_that_is_gone_gives_no_value_and_a_notice_and_is_found_again_later(
    fake_nvml: Script, call: str
) -> None:
    scripts = [script(gpu("a", fail=f"{call}:{code}")) for code in GONE]
    *gone, (back, _) = read(fake_nvml(), A, *scripts, script(gpu("a", util=5)))
    for (code, kind), (reading, notices) in zip(GONE.items(), gone, strict=True):
        assert notices == [(A, kind, code)]
        assert set(reading.unknown) == set(VALUES)
    assert back.gpu_pct == 5


def test_a_device_that_the_driver_has_dropped_is_lost(fake_nvml: Script) -> None:
    _, (reading, notices) = read(fake_nvml(), A, script(gpu("a", fail="temp:15"), gpu("b")), script(gpu("b")))
    assert notices == [(A, "lost", 6)]
    assert reading.gpu_pct is None


def test_a_field_that_the_device_does_not_have_is_unknown_although_the_call_succeeds(
    fake_nvml: Script,
) -> None:
    environ = fake_nvml()
    (absent, _), (asks, _) = read(
        environ, A, script(gpu("a", recovery=0, recovery_code=3)), script(gpu("a", recovery=2))
    )
    assert (absent.recovery_action, absent.unknown["recovery_action"]) == (None, "not_supported")
    assert asks.recovery_action == 2


def test_an_old_driver_gives_what_it_has_and_reasons_for_the_rest(fake_nvml: Script, old_nvml: Path) -> None:
    environ = fake_nvml(LD_LIBRARY_PATH=str(old_nvml))
    reading = one(environ, gpu("a", **BUSY, util=12, memutil=3, pids=f"{OWN}:1"), pids=(OWN,))
    assert reading.unknown == {
        "energy_mj": "function_not_found",
        "recovery_action": "function_not_found",
    }
    assert (reading.gpu_pct, reading.memory_pct, reading.used_mb, reading.own_mb) == (12, 3, 2048, 1)
    assert reading.throttle == ("hw_slowdown", "hw_thermal")


def test_a_mig_instance_has_its_own_memory_and_no_utilisation_at_all(fake_nvml: Script) -> None:
    card = gpu("a", mig=1, samples="99", util=99, temp=55, ecc=1)
    instance = line("mig", uuid="MIG-1", name="1g", total_mib=16384, used_mib=300, util=99, pids=f"{OWN}:20")
    reading = one(fake_nvml(), card, instance, uuid="MIG-1", pids=(OWN,))
    assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct) == (None, "mig", None)
    assert reading.unknown == dict.fromkeys(
        ("gpu_pct", "memory_pct", "energy_mj", "pcie_kb_s"), "not_supported"
    )
    assert (reading.used_mb, reading.total_mb, reading.own_mb) == (300, 16384, 20)
    assert (reading.temperature_c, reading.ecc_uncorrectable) == (55, 1)


def test_a_reading_survives_the_way_through_json(fake_nvml: Script) -> None:
    reading = one(fake_nvml(), gpu("a", **BUSY))
    assert DeviceReading.from_json(reading.as_json()) == reading
