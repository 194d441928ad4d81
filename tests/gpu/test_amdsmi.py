"""AMD detection: the true amdsmi binding over a scripted libamd_smi.so, in real subprocesses."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gangq.gpu import Detection, Device, DriverUnavailable, detect
from gangq.gpu.rocm import AmdsmiDriver
from gpu.gpu_fakes import card, gpu, line, restricted

Script = Callable[..., dict[str, str]]


def uuids(detection: Detection) -> list[str]:
    return [device.uuid for device in detection.devices]


def test_every_card_is_listed_in_the_runtimes_order_under_the_runtimes_uuid(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(card("a", 1), card("b", 0)))
    assert found.source == "amdsmi"
    assert found.devices == (
        Device(0, f"GPU-{'b' * 16}", 196592, "AMD Instinct MI300X", "amdsmi"),
        Device(1, f"GPU-{'a' * 16}", 196592, "AMD Instinct MI300X", "amdsmi"),
    )


def test_without_the_enumeration_the_serial_number_gives_the_same_uuid(fake_amdsmi: Script) -> None:
    assert uuids(detect(environ=fake_amdsmi(card("a", -1, hip_uuid="")))) == [f"GPU-{'a' * 16}"]


@pytest.mark.parametrize("serial", ["", "0x0"])
def test_a_card_without_a_serial_number_is_named_by_host_and_bus_and_shown_by_index(
    fake_amdsmi: Script, serial: str
) -> None:
    found = detect(environ=fake_amdsmi(card("a", 0), card("b", 1, serial=serial, hip_uuid="")))
    assert found.devices[1].uuid == f"PCI-{socket.gethostname()}-0000:04:00.0"
    assert found.visible_env(found.devices) == {
        "ROCR_VISIBLE_DEVICES": f"GPU-{'a' * 16},1",
        "HIP_VISIBLE_DEVICES": "0,1",
    }


def test_partitions_of_one_card_are_devices_of_their_own_and_shown_by_index(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(card("a", 0), card("a", 1), card("b", 2)))
    assert uuids(found) == [f"GPU-{'a' * 16}/0", f"GPU-{'a' * 16}/1", f"GPU-{'b' * 16}"]
    assert found.visible_env(found.devices[1:])["ROCR_VISIBLE_DEVICES"] == f"1,GPU-{'b' * 16}"


NOT_KNOWN = 2**64 - 1


@pytest.mark.parametrize(
    ("hives", "links"),
    [([7, 7, 9, 9], "aacc"), ([7, 7, 7, 7], "aaaa"), ([0, 0, 9, 9], "--cc"), ([NOT_KNOWN, NOT_KNOWN], "--")],
)
def test_cards_of_one_xgmi_hive_have_one_link(fake_amdsmi: Script, hives: list[int], links: str) -> None:
    host = [card(letter, n, hive=hive) for n, (letter, hive) in enumerate(zip("abcd", hives, strict=False))]
    found = detect(environ=fake_amdsmi(*host))
    assert [device.link for device in found.devices] == [
        None if letter == "-" else f"GPU-{letter * 16}" for letter in links
    ]


def test_partitions_and_cards_that_do_not_say_their_hive_have_no_link(fake_amdsmi: Script) -> None:
    host = (card("a", 0, hive=7), card("a", 1, hive=7), card("b", 2, hive=7))
    assert [device.link for device in detect(environ=fake_amdsmi(*host)).devices] == [None] * 3
    silent = [card(letter, n, hive=7, fail="xgmi:2") for n, letter in enumerate("ab")]
    assert [device.link for device in detect(environ=fake_amdsmi(*silent)).devices] == [None] * 2


def test_a_lost_card_is_left_out_with_a_warning_and_the_rest_are_kept(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(card("a", 0, lost=10), card("b", 1, memory=7), card("c", 2)))
    assert uuids(found) == [f"GPU-{'c' * 16}"]
    assert "AMD GPU 0 of 3 is left out" in found.warnings[-2]
    assert "AMD GPU 1 of 3 is left out" in found.warnings[-1]


@pytest.mark.parametrize("unified", [{"memory": 2}, {"total_mib": 0}])
def test_a_part_with_unified_memory_gets_the_hosts_memory_and_a_warning(
    fake_amdsmi: Script, unified: dict[str, int]
) -> None:
    found = detect(environ=fake_amdsmi(card("a", 0, **unified)))
    assert found.devices[0].vram_mb == psutil.virtual_memory().total // 2**20
    assert "--devices" in found.warnings[-1]


RESTRICTED: list[tuple[dict[str, str], str]] = [
    ({}, "abc"),
    ({"ROCR_VISIBLE_DEVICES": "2,0"}, "ca"),
    ({"ROCR_VISIBLE_DEVICES": "GPU-B"}, "b"),
    ({"ROCR_VISIBLE_DEVICES": ""}, ""),
    ({"HIP_VISIBLE_DEVICES": "1"}, "b"),
    ({"CUDA_VISIBLE_DEVICES": "1"}, "b"),
    ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "a"),
    # HIP counts within what the runtime shows it.
    ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "0"}, "c"),
]


def test_the_operators_own_restriction_is_respected(fake_amdsmi: Script) -> None:
    environ = fake_amdsmi(card("a", 0), card("b", 1), card("c", 2))
    restrictions = [restriction for restriction, _ in RESTRICTED]
    for (restriction, left), (listed, _) in zip(RESTRICTED, restricted(environ, restrictions), strict=True):
        assert listed == [f"GPU-{letter * 16}" for letter in left], restriction
    found = detect(environ={**environ, "ROCR_VISIBLE_DEVICES": "2,0"})
    assert uuids(found) == [f"GPU-{letter * 16}" for letter in "ca"]


def test_hip_indexes_still_mean_the_same_cards_when_an_earlier_one_is_lost(fake_amdsmi: Script) -> None:
    host = (card("a", 0, lost=10), card("b", 1), card("c", 2))
    assert uuids(detect(environ=fake_amdsmi(*host, HIP_VISIBLE_DEVICES="1"))) == [f"GPU-{'b' * 16}"]


def test_a_driver_without_cards_is_no_source_and_no_warning(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(line("driver")))
    assert found.source is None
    assert not [warning for warning in found.warnings if "AMD" in warning]


def test_a_child_that_holds_no_device_is_shown_none(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(card("a", 0)))
    assert found.visible_env([]) == {"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def test_a_driver_call_that_hangs_becomes_a_warning_that_names_the_library(fake_amdsmi: Script) -> None:
    found = detect(environ=fake_amdsmi(line("driver", hang=1), card("a", 0)), timeout_s=1)
    assert found.devices == ()
    assert "libamd_smi.so did not answer within 1 s" in found.warnings[-1]


@pytest.mark.parametrize("there", [True, False])
def test_a_library_that_cannot_start_is_a_warning_only_where_the_kernel_driver_is_loaded(
    fake_amdsmi: Script, tmp_path: Path, there: bool
) -> None:
    if there:
        (tmp_path / "kfd").touch()
    program = (
        "import sys; from pathlib import Path; from gangq.gpu import DriverUnavailable\n"
        "from gangq.gpu.rocm import AmdsmiDriver\n"
        "AmdsmiDriver.loaded = Path(sys.argv[1])\n"
        "try: AmdsmiDriver().devices()\n"
        "except DriverUnavailable as error: print(error.absent, error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kfd")],
        env=fake_amdsmi(line("driver", init=34)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.startswith(f"{not there} libamd_smi.so cannot start")
    assert "render and video" in said.stdout


def test_a_binding_that_breaks_on_import_is_silent_without_a_card_and_a_warning_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find it')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(AmdsmiDriver, "loaded", tmp_path / "kfd")
    with pytest.raises(DriverUnavailable) as without:
        AmdsmiDriver({}).devices()
    assert without.value.absent
    (tmp_path / "kfd").touch()
    with pytest.raises(DriverUnavailable, match=r"KeyError.*gangq\[rocm\]") as loaded:
        AmdsmiDriver({}).devices()
    assert not loaded.value.absent


@pytest.mark.parametrize(
    ("fault", "said"), [("hang=init", "did not answer"), ("crash=1", "was killed by SIGSEGV")]
)
def test_cards_are_found_behind_another_driver_that_hangs_or_crashes(
    fake_amdsmi: Script, fake_nvml: Script, fault: str, said: str
) -> None:
    name, value = fault.split("=")
    broken = fake_nvml(line("driver", **{name: value}), gpu("a"))
    found = detect(
        environ=fake_amdsmi(card("a", 0), **{key: broken[key] for key in ("LD_LIBRARY_PATH", "FAKE_NVML")}),
        timeout_s=2,
    )
    assert (found.source, len(found.devices), found.silent) == ("amdsmi", 1, False)
    assert f"libnvidia-ml.so.1 {said}" in found.warnings[0]
