"""NVIDIA detection: the true nvidia-ml-py binding over a scripted libnvidia-ml.so.1, in real subprocesses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gangq.gpu import Detection, Device, DriverUnavailable, detect, detection
from gangq.gpu.detection import _ask
from gangq.gpu.nvml import NvmlDriver
from gangq.proc import killing, procfs
from gpu.gpu_fakes import gpu, line, restricted

Script = Callable[..., dict[str, str]]


def uuids(detection: Detection) -> list[str]:
    return [device.uuid for device in detection.devices]


def test_every_card_is_listed_with_its_uuid_its_memory_and_its_model(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), gpu("b", name="NVIDIA A100", total_mib=81559)))
    assert found == Detection(
        (
            Device(0, "GPU-aaaaaaaa", 143771, "NVIDIA H200", "nvml"),
            Device(1, "GPU-bbbbbbbb", 81559, "NVIDIA A100", "nvml"),
        ),
        "nvml",
    )


def test_a_lost_card_is_left_out_with_a_warning_and_the_rest_keep_their_indexes(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), gpu("b", lost=1), gpu("c")))
    assert [(device.index, device.uuid) for device in found.devices] == [
        (0, "GPU-aaaaaaaa"),
        (2, "GPU-cccccccc"),
    ]
    assert len(found.warnings) == 1
    assert "GPU 1 of 3 is left out" in found.warnings[0]
    assert "reset" in found.warnings[0]


def test_a_card_whose_memory_cannot_be_read_is_left_out_rather_than_given_none(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a", memory=999), gpu("b")))
    assert uuids(found) == ["GPU-bbbbbbbb"]
    assert "GPU 0 of 2 is left out" in found.warnings[0]


@pytest.mark.parametrize("unified", [{"memory": 3}, {"total_mib": 0}])
def test_a_part_with_unified_memory_gets_the_hosts_memory_and_a_warning(
    fake_nvml: Script, unified: dict[str, int]
) -> None:
    found = detect(environ=fake_nvml(gpu("a", name="NVIDIA GB10", **unified)))
    assert found.devices[0].vram_mb == psutil.virtual_memory().total // 2**20
    assert "NVIDIA GB10" in found.warnings[0]
    assert "--devices" in found.warnings[0]


def test_in_mig_mode_the_instances_are_the_devices_and_the_card_is_not(fake_nvml: Script) -> None:
    found = detect(
        environ=fake_nvml(
            gpu("a", mig=1),
            line("mig", uuid="MIG-1111", name="NVIDIA H200 MIG 1g.18gb", total_mib=16384),
            line("mig", uuid=""),
            line("mig", uuid="MIG-2222", name="NVIDIA H200 MIG 3g.71gb", total_mib=70000),
            gpu("b"),
        )
    )
    assert found.devices == (
        Device(0, "MIG-1111", 16384, "NVIDIA H200 MIG 1g.18gb", "nvml", mig=True),
        Device(1, "MIG-2222", 70000, "NVIDIA H200 MIG 3g.71gb", "nvml", mig=True),
        Device(2, "GPU-bbbbbbbb", 143771, "NVIDIA H200", "nvml"),
    )
    assert found.warnings == ()


def test_a_mig_instance_that_does_not_answer_is_left_out_and_its_neighbours_stay(fake_nvml: Script) -> None:
    found = detect(
        environ=fake_nvml(
            gpu("a", mig=1),
            line("mig", uuid="MIG-1111", name="x", total_mib=1, memory=4),
            line("mig", uuid="MIG-2222", name="x", total_mib=16384),
        )
    )
    assert uuids(found) == ["MIG-2222"]
    assert "MIG slot 0 of NVIDIA GPU 0 is left out" in found.warnings[0]


def test_a_card_in_mig_mode_without_instances_offers_nothing_and_says_what_to_do(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a", mig=1)))
    assert found.devices == ()
    assert "nvidia-smi mig -cgi" in found.warnings[0]


def test_a_card_that_knows_no_mig_is_a_whole_device(fake_nvml: Script) -> None:
    assert uuids(detect(environ=fake_nvml(gpu("a", mig=-1)))) == ["GPU-aaaaaaaa"]


PAIRS = (gpu("a", nvlink="1"), gpu("b", nvlink="0"), gpu("c", nvlink="3"), gpu("d", nvlink="2"))
SWITCH = tuple(gpu(letter, nvlink="0/1/2/3") for letter in "abcd")
# As in a DGX-1: each card reaches the three beside it and one across.
MESH = tuple(
    gpu(letter, nvlink="/".join(str(m) for m in range(8) if m // 4 == n // 4 or m % 4 == n % 4))
    for n, letter in enumerate("abcdefgh")
)
LINKED: list[tuple[tuple[str, ...], dict[str, str], str]] = [
    (PAIRS, {}, "aacc"),
    (SWITCH, {}, "aaaa"),
    (MESH, {}, "aaaaeeee"),
    ((gpu("a"), gpu("b"), gpu("c", nvlink="3"), gpu("d", nvlink="2")), {}, "--cc"),
    # A worker that is given one card of each pair, or the second pair first.
    (PAIRS, {"CUDA_VISIBLE_DEVICES": "0,2"}, "--"),
    (PAIRS, {"CUDA_VISIBLE_DEVICES": "3,2,0"}, "dd-"),
    # The driver does not support the question, or the binding does not know its error.
    (tuple(gpu(letter, nvlink="0/1", fail="p2p:3") for letter in "ab"), {}, "--"),
    (tuple(gpu(letter, nvlink="0/1", fail="p2p:998") for letter in "ab"), {}, "--"),
    ((gpu("a", nvlink="1", lost=1), *PAIRS[1:]), {}, "-cc"),
]


@pytest.mark.parametrize(("host", "restriction", "links"), LINKED)
def test_cards_that_nvlink_joins_each_with_each_have_one_link(
    fake_nvml: Script, host: tuple[str, ...], restriction: dict[str, str], links: str
) -> None:
    found = detect(environ=fake_nvml(*host, **restriction))
    assert [device.link for device in found.devices] == [
        None if letter == "-" else f"GPU-{letter * 8}" for letter in links
    ]


def test_a_mig_instance_has_no_link_and_its_neighbours_keep_theirs(fake_nvml: Script) -> None:
    found = detect(
        environ=fake_nvml(
            gpu("a", mig=1, nvlink="0/1/2"),
            line("mig", uuid="MIG-1111", name="x", total_mib=1),
            line("mig", uuid="MIG-2222", name="x", total_mib=1),
            gpu("b", nvlink="0/1/2"),
            gpu("c", nvlink="0/1/2"),
        )
    )
    assert [device.link for device in found.devices] == [None, None, "GPU-bbbbbbbb", "GPU-bbbbbbbb"]


RESTRICTED: list[tuple[dict[str, str], str]] = [
    ({}, "abc"),
    ({"CUDA_VISIBLE_DEVICES": "2,0"}, "ca"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-bbbbbbbb"}, "b"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}, "ca"),
    ({"CUDA_VISIBLE_DEVICES": "1,GPU-b,0,1"}, "ba"),
    ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
    ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "a"),
    ({"NVIDIA_VISIBLE_DEVICES": "none"}, ""),
    ({"NVIDIA_VISIBLE_DEVICES": "all"}, "abc"),
    ({"NVIDIA_VISIBLE_DEVICES": "void"}, "abc"),
    ({"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, "abc"),
    ({"NVIDIA_VISIBLE_DEVICES": "GPU-bbbbbbbb"}, "b"),
    # A container with three of a host's eight cards: the runtime has chosen already.
    ({"NVIDIA_VISIBLE_DEVICES": "1,5,7"}, "abc"),
]


def test_the_operators_own_restriction_is_respected(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"), gpu("c"))
    restrictions = [restriction for restriction, _ in RESTRICTED]
    for (restriction, left), (listed, warnings) in zip(
        RESTRICTED, restricted(environ, restrictions), strict=True
    ):
        assert listed == [f"GPU-{letter * 8}" for letter in left], restriction
        assert warnings == [], restriction
    found = detect(environ={**environ, "CUDA_VISIBLE_DEVICES": "2,0"})
    assert (uuids(found), found.source, found.warnings) == (["GPU-cccccccc", "GPU-aaaaaaaa"], "nvml", ())


def test_two_restrictions_leave_what_both_allow(fake_nvml: Script) -> None:
    both = {"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1,2"}
    assert uuids(detect(environ=fake_nvml(gpu("a"), gpu("b"), gpu("c"), **both))) == ["GPU-bbbbbbbb"]


def test_an_entry_that_names_no_card_is_passed_over_with_a_warning(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), gpu("b"), CUDA_VISIBLE_DEVICES="7,GPU-zz,1"))
    assert uuids(found) == ["GPU-bbbbbbbb"]
    assert ["'7'" in found.warnings[0], "'GPU-zz'" in found.warnings[1]] == [True, True]


def test_a_restriction_to_a_lost_card_does_not_open_the_whole_host(fake_nvml: Script) -> None:
    host = (gpu("a"), gpu("b", lost=1), gpu("c"))
    assert uuids(detect(environ=fake_nvml(*host, NVIDIA_VISIBLE_DEVICES="0,1"))) == ["GPU-aaaaaaaa"]
    assert uuids(detect(environ=fake_nvml(*host, CUDA_VISIBLE_DEVICES="1"))) == []


def test_a_container_restriction_to_an_unknown_uuid_does_not_open_the_whole_host(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), NVIDIA_VISIBLE_DEVICES="GPU-zz"))
    assert found.devices == ()
    assert "'GPU-zz'" in found.warnings[0]


def test_a_start_of_a_uuid_that_fits_two_cards_chooses_neither(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), gpu("b"), CUDA_VISIBLE_DEVICES="GPU-"))
    assert found.devices == ()
    assert "more than one" in found.warnings[0]


def test_a_restriction_names_mig_instances_by_their_own_name_or_their_cards(fake_nvml: Script) -> None:
    host = (
        gpu("a", mig=1),
        line("mig", uuid="MIG-1111", name="x", total_mib=1),
        line("mig", uuid="MIG-2222", name="x", total_mib=1),
        gpu("b"),
    )
    for value, left in (
        ("MIG-2222", ["MIG-2222"]),
        ("0", ["MIG-1111", "MIG-2222"]),
        ("GPU-a", ["MIG-1111", "MIG-2222"]),
        ("1", ["GPU-bbbbbbbb"]),
    ):
        assert uuids(detect(environ=fake_nvml(*host, CUDA_VISIBLE_DEVICES=value))) == left


def test_indexes_on_a_host_of_mixed_models_get_a_warning_unless_the_order_is_pinned(
    fake_nvml: Script,
) -> None:
    host = (gpu("a"), gpu("b", name="NVIDIA T4"))
    assert (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        in detect(environ=fake_nvml(*host, CUDA_VISIBLE_DEVICES="1")).warnings[0]
    )
    pinned = fake_nvml(*host, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert detect(environ=pinned).warnings == ()


def test_a_child_is_shown_its_devices_by_uuid_and_none_when_it_holds_none(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(gpu("a"), gpu("b"), gpu("c")))
    assert found.visible_env([found.devices[2], found.devices[0]]) == {
        "CUDA_VISIBLE_DEVICES": "GPU-cccccccc,GPU-aaaaaaaa"
    }
    assert found.visible_env([]) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("code", "advice"),
    [(4, "DeviceAllow"), (9, "modprobe nvidia"), (18, "upgraded"), (999, "reboot"), (23, "nvidia-smi")],
)
def test_a_driver_that_cannot_start_is_a_warning_that_says_what_to_do(
    fake_nvml: Script, code: int, advice: str
) -> None:
    found = detect(environ=fake_nvml(line("driver", init=code), gpu("a")))
    assert (found.devices, found.source) == ((), None)
    assert "libnvidia-ml.so.1" in found.warnings[0]
    assert advice in found.warnings[0]


@pytest.mark.parametrize("place", ["init", "memory"])
def test_a_driver_call_that_hangs_costs_the_timeout_and_leaves_no_process(
    fake_nvml: Script, place: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    started = time.monotonic()
    found = detect(environ=fake_nvml(line("driver", hang=place), gpu("a")), timeout_s=1.0)
    assert time.monotonic() - started < 10
    assert (found.devices, found.silent) == ((), True)
    assert "libnvidia-ml.so.1 did not answer within 1 s" in found.warnings[0]
    assert "nvidia-smi" in found.warnings[0]
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_probe_that_outlives_sigkill_is_left_behind_and_named(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "DEATH_S", 1.0)
    environ = fake_nvml(line("driver", hang="init"), gpu("a"))
    unkillable: list[int] = []
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda pid, _: unkillable.append(pid))
            answers, failure = _ask([NvmlDriver(environ)], timeout_s=0.5, environ=environ)
        assert answers == []
        assert failure is not None
        assert failure.silent
        assert failure.stuck is not None
        assert failure.stuck.pid == unkillable[0]
        assert f"pid {unkillable[0]}, does not die of SIGKILL" in failure.message
        assert psutil.pid_exists(unkillable[0])
        reaper = next(t for t in threading.enumerate() if t.name == f"gangq-reap-{unkillable[0]}")
    finally:
        for pid in unkillable:
            os.killpg(pid, signal.SIGKILL)
    reaper.join(timeout=10)
    assert not psutil.pid_exists(unkillable[0])


def test_a_probe_that_has_answered_and_outlives_sigkill_is_named_with_its_devices(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = procfs.stat(os.getpid())
    assert entry is not None
    asked = detection._ask
    late = detection._Failure("does not die", stuck=entry)
    monkeypatch.setattr(detection, "_ask", lambda *args, **how: (asked(*args, **how)[0], late))
    found = detect(environ=fake_nvml(gpu("a")))
    assert (len(found.devices), found.silent, found.stuck) == (1, False, entry)
    assert "does not die" in found.warnings[-1]


def test_a_probe_that_hangs_after_its_answer_is_named_only_if_sigkill_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(killing, "DEATH_S", 0.5)
    spy = tmp_path / "python"
    spy.write_text('#!/bin/sh\necho \'{"devices": [], "warnings": [], "problem": null}\'\nexec sleep 60\n')
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(spy))
    spared: list[int] = []
    asking = {"timeout_s": 1.0, "environ": dict(os.environ)}
    answers, failure = detection._ask([NvmlDriver({})], **asking)
    assert (len(answers), failure) == (1, None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda pid, _: spared.append(pid))
            answers, failure = detection._ask([NvmlDriver({})], **asking)
        assert failure is not None
        assert failure.stuck is not None
        assert (len(answers), failure.silent, failure.stuck.pid) == (1, False, spared[0])
        assert f"pid {spared[0]}, has answered" in failure.message
    finally:
        for pid in spared:
            os.killpg(pid, signal.SIGKILL)


def test_a_probe_whose_caller_died_ends_itself_inside_the_driver_call(fake_nvml: Script) -> None:
    probe = subprocess.run(
        [sys.executable, "-m", "gangq.gpu.probe", "1", "nvml"],
        env=fake_nvml(line("driver", hang="init")),
        capture_output=True,
        timeout=30,
    )
    assert probe.returncode == -signal.SIGALRM


def test_a_driver_library_that_crashes_is_a_warning_that_names_the_signal(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(line("driver", crash=1), gpu("a")))
    assert (found.devices, found.silent) == ((), False)
    assert "libnvidia-ml.so.1 was killed by SIGSEGV" in found.warnings[0]


def test_a_driver_without_cards_is_no_source_and_no_warning(fake_nvml: Script) -> None:
    found = detect(environ=fake_nvml(line("driver")))
    assert found.source != "nvml"
    assert not [warning for warning in found.warnings if "NVIDIA" in warning]


def test_a_file_in_the_working_directory_does_not_reach_the_probe(
    fake_nvml: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a training script, not the library')\n")
    (tmp_path / "psutil.py").write_text("raise SystemExit('a training script, not the library')\n")
    monkeypatch.chdir(tmp_path)
    assert uuids(detect(environ=fake_nvml(gpu("a")))) == ["GPU-aaaaaaaa"]


def test_an_interpreter_that_cannot_be_started_is_a_warning(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = detect(environ=fake_nvml(gpu("a")))
    assert found.devices == ()
    assert "/nowhere/python" in found.warnings[0]


def test_the_probe_is_told_no_address_of_a_database(
    fake_nvml: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    spy = tmp_path / "python"
    spy.write_text(f"#!/bin/sh\nenv > {told}\n")
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(spy))
    detect(environ={**fake_nvml(gpu("a")), "GANGQ_DSN": "secret-one", "PGPASSWORD": "secret-two"})
    assert "FAKE_NVML" in told.read_text()
    assert "secret" not in told.read_text()


class NVMLError(Exception):
    value = 12


class OldBinding(SimpleNamespace):
    """The parts of a binding from the days when NVML strings were bytes."""

    NVMLError = NVMLError
    NVMLError_NotSupported = type("NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("FunctionNotFound", (NVMLError,), {})
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, init_error: Exception | None = None) -> None:
        super().__init__(
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetHandleByIndex=lambda ordinal: ordinal,
            nvmlDeviceGetUUID=lambda handle: b"GPU-aaaaaaaa",
            nvmlDeviceGetName=lambda handle: b"Tesla V100",
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=16384 * 2**20),
        )
        self._init_error = init_error

    def nvmlInit(self) -> None:
        if self._init_error:
            raise self._init_error

    def nvmlDeviceGetMigMode(self, handle: object) -> list[int]:
        raise self.NVMLError_FunctionNotFound


def test_a_binding_that_answers_in_bytes_gives_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", OldBinding())
    assert NvmlDriver({}).devices() == [Device(0, "GPU-aaaaaaaa", 16384, "Tesla V100", "nvml")]


@pytest.mark.parametrize("binding", [None, OldBinding(NVMLError("Library Not Found"))])
def test_no_library_is_silent_without_a_loaded_driver_and_a_warning_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binding: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    monkeypatch.setattr(NvmlDriver, "loaded", tmp_path / "version")
    with pytest.raises(DriverUnavailable) as without:
        NvmlDriver({}).devices()
    assert without.value.absent
    (tmp_path / "version").touch()
    with pytest.raises(DriverUnavailable, match=r"gangq\[nvidia\]|compute,utility") as loaded:
        NvmlDriver({}).devices()
    assert not loaded.value.absent
