"""Devices by declaration, where no driver answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gangq.errors import GangqError
from gangq.gpu import Detection, DeviceSpecError, declared_uuid, detect, parse_declared


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("2x24GiB", [24576, 24576]),
        ("1x80GB", [76293]),
        ("2x24GiB,1x80GiB", [24576, 24576, 81920]),
        (" 1x512mib , 1X1.5tib ", [512, 1572864]),
        ("none", []),
    ],
)
def test_a_declaration_gives_devices_of_these_sizes(spec: str, sizes: list[int]) -> None:
    devices = parse_declared(spec)
    assert [device.vram_mb for device in devices] == sizes
    assert [device.index for device in devices] == list(range(len(sizes)))
    assert all(device.source == "declared" for device in devices)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "24GiB", "2x24", "2x24G", "x24GiB", "0x24GiB", "-1x24GiB", "2x0GiB", "1x1KB", "1x0.5MiB"),
        *("2x24GiB,", "2 x 24GiB", "1025x1GiB", "1000x1GiB,1000x1GiB", "1x999999999TiB", "two"),
        *("2x24GiB;1x80GiB", "٣x24GiB"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_named_with_the_accepted_forms(spec: str) -> None:
    with pytest.raises(DeviceSpecError) as raised:
        parse_declared(spec)
    assert isinstance(raised.value, GangqError)
    assert isinstance(raised.value, ValueError)
    assert repr(spec) in str(raised.value)
    assert "2x24GiB" in str(raised.value)


def test_a_declared_uuid_is_the_same_in_another_process_and_different_for_every_neighbour() -> None:
    program = "from gangq.gpu import declared_uuid; print(declared_uuid('h', 'w', 1))"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == declared_uuid("h", "w", 1)
    names = [("h", "w", 1), ("h", "w", 2), ("h", "w1", 1), ("hw", "", 1), ("h", "w,1", 1), ("", "hw", 1)]
    assert len({declared_uuid(*name) for name in names}) == len(names)


def test_a_declaration_wins_over_a_driver_that_would_hang() -> None:
    found = detect("1x24GiB", worker="w1", environ={"LD_LIBRARY_PATH": "/nowhere"}, timeout_s=0.001)
    assert (found.source, len(found.devices), found.warnings) == ("declared", 1, ())


def test_two_workers_of_one_host_declare_different_devices() -> None:
    first, second = detect("1x24GiB", worker="w1"), detect("1x24GiB", worker="w2")
    assert first.devices[0].uuid != second.devices[0].uuid


def test_a_child_is_shown_declared_devices_by_index() -> None:
    found = detect("3x24GiB", environ={})
    assert found.visible_env(found.devices[1:], environ={}) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert found.visible_env([], environ={}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_declared_devices_are_the_cards_that_the_worker_itself_was_given() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "5,GPU-b"}
    found = detect("2x24GiB", environ=given)
    assert found.warnings == ()
    assert found.visible_env([found.devices[1]], environ=given) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    more = detect("3x24GiB", environ=given)
    assert "CUDA_VISIBLE_DEVICES='5,GPU-b' shows this worker 2" in more.warnings[0]
    assert more.visible_env(more.devices, environ=given) == {"CUDA_VISIBLE_DEVICES": "5,GPU-b"}


def test_where_nothing_was_detected_the_childs_environment_is_left_alone() -> None:
    assert Detection((), None).visible_env([]) == {}


def test_a_device_as_json_has_exactly_the_fields_that_registration_takes() -> None:
    assert parse_declared("1x1GiB", host="h", worker="w")[0].as_json() == {
        "index": 0,
        "uuid": declared_uuid("h", "w", 0),
        "vram_mb": 1024,
        "model": "declared",
        "source": "declared",
        "mig": False,
        "link": None,
    }
