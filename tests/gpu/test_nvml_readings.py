"""What one look at an NVIDIA device says: the true binding over a scripted libnvidia-ml.so.1."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.gpu import DeviceReading, nvml_readings
from gangq.gpu.nvml_readings import NvmlReader
from gangq.gpu.reading import VALUES
from gpu.gpu_fakes import ERRORS, both_set_and_unknown, gpu, line, neither_set_nor_unknown, read

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


def test_the_first_samples_that_come_are_the_first_look_although_there_were_none_before() -> None:
    buffer: list[SimpleNamespace] = []
    reader = bound(nvmlDeviceGetSamples=lambda handle, kind, since: (1, buffer))
    assert reader.read(A, ())[0].gpu_pct is None
    buffer += [sample(1_000_000, 99), sample(9_500_000, 40), sample(10_000_000, 0)]
    assert reader.read(A, ())[0].gpu_pct == 40


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


def test_what_was_seen_of_an_earlier_jobs_process_is_no_zero_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed: list[SimpleNamespace] = []
    reader = bound(
        nvmlDeviceGetProcessUtilization=lambda handle, since: listed,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=88, memory=1),
    )

    def look(at: float, pct: int | None, own: tuple[int, ...]) -> tuple[float | None, str | None]:
        monkeypatch.setattr(nvml_readings, "boottime", lambda: 2.0 * at)
        listed[:] = [] if pct is None else [SimpleNamespace(pid=71, timeStamp=at * 1_000_000, smUtil=pct)]
        reading = reader.read(A, own)[0]
        return reading.gpu_pct, reading.gpu_scope

    # Listed at zero is what a driver says of a process that it does not see at work, too.
    assert look(1, 0, (71,)) == (88, "device")
    assert look(2, 40, (71, 72)) == (40, "process")
    # The driver adds a sample once a second at the least: until then the last one holds.
    assert look(2.4, None, (71, 72)) == (40, "process")
    assert look(3, None, (71, 72)) == (0, "process")
    assert look(4, 0, (71,)) == (0, "process")
    assert look(5, None, (72,)) == (88, "device")
    # The number is given to a process of the next job.
    assert look(6, None, (71, 72)) == (88, "device")
    assert look(7, 20, (71, 72)) == (20, "process")
    assert look(8, None, ()) == (88, "device")
    assert look(9, None, (71,)) == (88, "device")


def test_a_process_is_busy_once_for_a_sample_that_the_driver_hands_out_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = [SimpleNamespace(pid=71, timeStamp=1_000_000, smUtil=60)]
    reader = bound(nvmlDeviceGetProcessUtilization=lambda handle, since: buffer)
    for uptime, pct in ((2.0, 60), (4.0, 0), (6.0, 0)):
        monkeypatch.setattr(nvml_readings, "boottime", lambda now=uptime: now)
        assert reader.read(A, (71,))[0].gpu_pct == pct, uptime


def test_a_busy_process_is_not_idle_after_the_hosts_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, uptime = SimpleNamespace(time=lambda: 0.0), SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(nvml_readings, "time", clock)
    monkeypatch.setattr(nvml_readings, "boottime", lambda: uptime.seconds)

    def newer(since: int) -> list[SimpleNamespace]:
        """The driver stamps its samples by that clock, and has one of this moment."""
        now = SimpleNamespace(**vars(sample(int(clock.time() * 1e6), 60)), pid=71, smUtil=60)
        return [now] if now.timeStamp > since else []

    reader = bound(
        nvmlDeviceGetProcessUtilization=lambda handle, since: newer(since),
        nvmlDeviceGetSamples=lambda handle, kind, since: (1, newer(since)),
    )
    for seconds in (50_000.0, 50_001.0, 46_400.0, 46_401.0):
        clock.time, uptime.seconds = lambda at=seconds: at, uptime.seconds + 2
        reading = reader.read(A, (71,))[0]
        assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct) == (60, "process", 60), seconds


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


def test_every_value_is_set_or_has_a_reason_whichever_call_fails(fake_nvml: Script) -> None:
    calls = ["", *(f"{call}:3" for call in (*CALLS, "util", "samples", "procs", "all"))]
    scripts = [script(gpu("a", **BUSY, pids=f"{OWN}:1", fail=call)) for call in calls]
    shared = script(gpu("a", **BUSY, pids=f"{NEIGHBOUR}:1"))
    readings = [reading for reading, _ in read(fake_nvml(), A, *scripts, shared, pids=(OWN,))]
    instance = script(gpu("a", mig=1), line("mig", uuid="MIG-1", name="1g", total_mib=9000))
    readings += [reading for reading, _ in read(fake_nvml(), "MIG-1", instance, pids=(OWN,))]
    for reading in readings:
        assert (neither_set_nor_unknown(reading), both_set_and_unknown(reading)) == (set(), set()), reading


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


@pytest.mark.parametrize(
    ("event", "befallen"),
    [
        ((8, 48, 2), ["MIG-2"]),
        ((8, 94, 3), []),
        # A double-bit error that names no instance may have been contained in any; an Xid 95 was not.
        ((8, 48, 0xFFFFFFFF), []),
        ((2, 0, 0xFFFFFFFF), []),
        ((8, 95, 0xFFFFFFFF), ["MIG-1", "MIG-2"]),
        ((2048, 0, 0xFFFFFFFF), ["MIG-1", "MIG-2"]),
        # A binding from before MIG names none either.
        ((8, 95, None), ["MIG-1", "MIG-2"]),
    ],
)
def test_an_event_that_names_a_mig_instance_is_told_of_no_other(
    event: tuple[int, int, int | None], befallen: list[str]
) -> None:
    kind, data, instance = event
    told = SimpleNamespace(device=9, eventType=kind, eventData=data)
    if instance is not None:
        told.gpuInstanceId = instance
    reader = bound(
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda device: 9,
        nvmlDeviceGetGpuInstanceId=lambda device: device,
        nvmlEventSetWait=lambda events, timeout: told,
    )
    reader._nvml.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[4:])
    reader._events, reader._listens = object(), True
    for uuid in ("MIG-1", "MIG-2"):
        reader.read(uuid, ())
    assert [notice.uuid for notice in reader.wait(1.0)] == befallen


def test_an_event_of_a_card_that_cannot_be_named_is_not_told_of_the_whole_driver() -> None:
    told = SimpleNamespace(device=9, eventType=8, eventData=79)
    reader = bound(
        nvmlEventSetWait=lambda events, timeout: told, nvmlDeviceGetUUID=lambda device: "GPU-other"
    )
    reader._events, reader._listens = object(), True
    assert [notice.uuid for notice in reader.wait(1.0)] == ["GPU-other"]
    # It has fallen off the bus, and the handle is not that of a card watched here.
    del reader._nvml.nvmlDeviceGetUUID
    assert reader.wait(1.0) == []


def test_a_driver_that_refuses_events_is_asked_again_with_the_same_set() -> None:
    sets: list[object] = []

    def refuse(*args: object) -> None:
        raise reader._nvml.NVMLError

    reader = bound(
        nvmlDeviceGetSupportedEventTypes=lambda device: 8,
        nvmlEventSetCreate=lambda: sets.append(object()) or sets[-1],
        nvmlDeviceRegisterEvents=refuse,
    )
    assert [reader.subscribe(A) for _ in range(3)] == ["not_supported"] * 3
    assert len(sets) == 1
    # Nothing was put into it: to wait on it would fail at once, every time.
    reader._nvml.nvmlEventSetWait = lambda events, timeout: pytest.fail("waited on an empty set")
    assert reader.wait(0.01) == []


def test_the_last_event_of_a_card_is_its_own_until_it_has_another_handle() -> None:
    device, told = 9, SimpleNamespace(device=9, eventType=8, eventData=79)
    registered: list[int] = []
    reader = bound(
        nvmlDeviceGetSupportedEventTypes=lambda device: 8,
        nvmlEventSetCreate=object,
        nvmlDeviceRegisterEvents=lambda device, types, events: registered.append(device),
        nvmlEventSetWait=lambda events, timeout: told,
        nvmlDeviceGetUUID=lambda device: "GPU-other",
    )
    reader._nvml.nvmlDeviceGetHandleByUUID = lambda uuid: device
    assert reader.subscribe(A) is None
    reader._forget(A)
    assert [notice.uuid for notice in reader.wait(1.0)] == [A]
    # The driver may use the address again, and know nothing of the former registration.
    assert reader.subscribe(A) is None
    assert registered == [9, 9]
    reader._forget(A)
    device = 10
    assert reader.subscribe(A) is None
    assert reader.subscribe(A) is None
    assert registered == [9, 9, 10]
    assert [notice.uuid for notice in reader.wait(1.0)] == ["GPU-other"]
    told.device = 10
    assert [notice.uuid for notice in reader.wait(1.0)] == [A]


def test_a_lookup_that_fails_for_another_cards_sake_is_not_this_ones_end(fake_nvml: Script) -> None:
    instance = line("mig", uuid="MIG-1", name="1g", used_mib=3)
    environ = fake_nvml()
    # A call of the device itself that says it is gone has its handle looked up anew.
    gone = script(gpu("a", fail="temp:15"))
    misled = [script(gpu("b", lost=1), gpu("a", fail=f"uuid:{code}", util=5)) for code in (6, *GONE)]
    scripts = [each for pair in zip([gone] * len(misled), misled, strict=True) for each in pair]
    for reading, notices in read(environ, A, *scripts)[1::2]:
        assert (reading.gpu_pct, notices) == (5, [])
    in_mig_mode = script(gpu("b", lost=1), gpu("a", mig=1), line("mig", uuid=""), f"{instance}\tfail=uuid:15")
    ((reading, notices),) = read(environ, "MIG-1", in_mig_mode)
    assert (reading.used_mb, notices) == (3, [])
    # That instance is gone: its card says so, and no other one has it.
    ((reading, notices),) = read(environ, "MIG-1", script(gpu("a", mig=1), gpu("b", lost=1)))
    assert notices == [("MIG-1", "lost", 15)]


def test_one_card_that_does_not_answer_leaves_open_whether_a_missing_device_is_lost(
    fake_nvml: Script,
) -> None:
    codes = [code for code in ERRORS if code not in GONE]
    # Its own lookup fails for once; or it is not listed while a card may be it that does not say who it is.
    own = [script(gpu("a", fail=f"handle:{code}"), gpu("b")) for code in codes]
    unclear = [script(gpu("b", fail=f"handle:{code}")) for code in codes]
    for reading, notices in read(fake_nvml(), A, *own, *unclear):
        assert notices == []
        assert set(reading.unknown) == set(VALUES)


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
    assert reading.temperature_c == 55


def test_the_errors_of_a_mig_instance_are_its_own_and_never_those_of_its_card(fake_nvml: Script) -> None:
    def host(card: int, **mine: object) -> str:
        return script(gpu("a", mig=1, ecc=card), line("mig", uuid="MIG-1", name="1g", **mine))

    readings = [r for r, _ in read(fake_nvml(), "MIG-1", host(0), host(7, ecc=2), host(7, fail="ecc:3"))]
    assert [r.ecc_uncorrectable for r in readings] == [0, 2, None]
    assert readings[2].unknown["ecc_uncorrectable"] == "not_supported"


def test_a_reading_survives_the_way_through_json(fake_nvml: Script) -> None:
    reading = one(fake_nvml(), gpu("a", **BUSY))
    assert DeviceReading.from_json(reading.as_json()) == reading
