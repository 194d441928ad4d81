"""Which lane has how many slots, and where its jobs run."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.errors import InvalidInput
from gangq.worker.options import Lanes, WorkerOptions, choose_lanes


def lanes(devices: int = 0, handlers: bool = True, unreachable: str | None = None, **options: Any) -> Lanes:
    return choose_lanes(WorkerOptions(**options), devices, handlers, unreachable)


@pytest.mark.parametrize(
    ("devices", "options", "wanted"),
    [
        (0, {}, Lanes(1, 1, "light")),
        (1, {}, Lanes(1, 1, "placed")),
        (4, {}, Lanes(4, 1, None)),
        (4, {"slots": 1}, Lanes(1, 1, "placed")),
        (0, {"slots": 3}, Lanes(3, 1, "light")),
        (0, {"light": 2}, Lanes(1, 2, None)),
        (0, {"light": 0}, Lanes(1, 0, "placed")),
        (1, {"slots": 0}, Lanes(0, 1, "light")),
        (1, {"light": 0}, Lanes(1, 0, "placed")),
        (1, {"light": 5}, Lanes(1, 5, "placed")),
    ],
)
def test_the_main_thread_has_the_placed_lane_where_there_are_devices_if_that_has_one_slot(
    devices: int, options: dict[str, int], wanted: Lanes
) -> None:
    assert lanes(devices, **options) == wanted


def test_without_handlers_everything_runs_in_children() -> None:
    assert lanes(1, handlers=False) == Lanes(1, 1, None)


@pytest.mark.parametrize(
    ("devices", "options", "children", "lane"),
    [
        (0, {}, 1, "placed"),
        (1, {}, 1, "light"),
        (4, {}, 5, None),
        (0, {"light": 2, "slots": 0}, 2, "light"),
        (0, {"slots": 2, "light": 0}, 2, "placed"),
        (0, {"slots": 0}, 0, "placed"),
    ],
)
def test_the_other_jobs_run_in_children(
    devices: int, options: dict[str, int], children: int, lane: str | None
) -> None:
    found = lanes(devices, **options)
    assert found.children == children
    assert not children or found.of_children == lane


@pytest.mark.parametrize(
    ("devices", "options", "wanted"),
    [
        (0, {}, Lanes(0, 1, "light")),
        (2, {}, Lanes(1, 0, "placed")),
        (0, {"light": 0}, Lanes(1, 0, "placed")),
    ],
)
def test_handlers_that_no_child_could_import_leave_the_lane_of_the_main_thread_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, devices: int, options: dict[str, int], wanted: Lanes
) -> None:
    assert lanes(devices, unreachable="it is in no module", **options) == wanted
    said = [record for record in caplog.records if record.message == "one_lane"]
    assert [record.__dict__["reason"] for record in said] == ["it is in no module"] * (
        lanes(devices, **options) != wanted
    )


@pytest.mark.parametrize("options", [{"slots": 2}, {"light": 3}])
def test_slots_that_no_child_could_serve_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="it is in no module"):
        lanes(2, unreachable="it is in no module", **options)


@pytest.mark.parametrize(("devices", "used"), [(0, True), (1, False)])
def test_a_prefetch_that_the_main_thread_has_no_use_for_is_said(
    caplog: pytest.LogCaptureFixture, devices: int, used: bool
) -> None:
    lanes(devices, prefetch=5)
    assert ("prefetch_unused" in caplog.messages) is not used
