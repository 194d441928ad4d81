"""What events mean: the tables, and how a stream of readings becomes events."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from gangq.gpu import DeviceEvent, DeviceReading
from gangq.gpu.faults import _XIDS, FAULTS, REMEDIES, judge
from gangq.gpu.findings import Findings
from gangq.gpu.reading import EventKind


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def findings(clock: Clock) -> Findings:
    return Findings(clock=clock)


def reading(**values: Any) -> DeviceReading:
    return DeviceReading("A", 0.0, **values)


@pytest.mark.parametrize(
    ("code", "bucket", "fatal", "application"),
    [
        (13, "restart_app", False, True),
        (31, "restart_app", False, True),
        (43, "ignore", False, True),
        (45, "workflow", False, True),
        (48, "workflow", True, False),
        (54, "power", True, False),
        (63, "ignore", False, False),
        (74, "workflow", False, False),
        (79, "reboot", True, False),
        (94, "restart_app", False, True),
        (95, "reset_gpu", True, False),
        (119, "reset_gpu", True, False),
        (142, "support", False, False),
        (154, "recovery", False, False),
        (999, "unknown", False, False),
    ],
)
def test_an_xid_says_what_to_do_whether_work_can_go_on_and_who_is_to_blame(
    code: int, bucket: str, fatal: bool, application: bool
) -> None:
    fault = judge("xid", code)
    assert (fault.bucket, fault.fatal, fault.application) == (bucket, fatal, application)
    assert f"Xid {code}" in fault.advice
    assert REMEDIES[fault.bucket] in fault.advice


def test_no_xid_that_a_program_causes_is_fatal_and_each_code_is_in_one_bucket() -> None:
    xids = {code: fault for (kind, code), fault in FAULTS.items() if kind == "xid" and code is not None}
    assert not [code for code, fault in xids.items() if fault.application and fault.fatal]
    assert sum(len(codes) for codes in _XIDS.values()) == len(xids) > 90


def test_every_fault_has_advice_that_names_it() -> None:
    faults = [judge(*of) for of in FAULTS]
    assert all(": " in fault.advice and len(fault.advice) > 20 for fault in faults)


def test_only_recovery_actions_that_end_all_work_are_fatal() -> None:
    assert [action for action in range(9) if judge("recovery", action).fatal] == [1, 2, 6, 7]
    assert "42" in judge("recovery", 42).advice


def test_a_storm_of_one_event_does_not_push_out_the_others(findings: Findings, clock: Clock) -> None:
    assert findings.notice("A", "xid", 79)
    for _ in range(1000):
        findings.notice("A", "xid", 43)
        clock.now += 0.005
    assert [event.code for event in findings.since(0)] == [79, 43]
    clock.now += 10
    assert findings.notice("A", "xid", 43)


def test_events_are_kept_in_bounds(findings: Findings) -> None:
    for code in range(1000):
        findings.notice("A", "xid", code)
    assert len(findings.since(0)) == 256


def test_who_asks_with_the_last_event_misses_none_of_the_same_instant(findings: Findings) -> None:
    first, second = findings.notice("A", "xid", 79), findings.notice("B", "xid", 79)
    assert first is not None
    assert findings.since(first.at) == [second]


def test_a_lost_device_is_said_again_every_minute_and_at_once_when_it_is_lost_anew(
    findings: Findings, clock: Clock
) -> None:
    said: list[DeviceEvent | None] = []
    for _ in range(121):
        said.append(findings.notice("A", "lost", 15))
        findings.reading(DeviceReading.nothing("A", 0.0, "failed: lost"))
        clock.now += 1
    assert len([event for event in said if event]) == 3
    findings.reading(reading(gpu_pct=1.0))
    assert findings.notice("A", "lost", 15)


def test_uncorrectable_errors_count_from_the_first_look_and_from_every_reset(findings: Findings) -> None:
    counts = [7, 7, None, 9, 0, 0, 1]
    found = [findings.reading(reading(ecc_uncorrectable=count)) for count in counts]
    assert [[(e.kind, e.code, e.fatal) for e in events] for events in found] == [
        [], [], [], [("ecc", 2, True)], [], [], [("ecc", 1, True)],
    ]  # fmt: skip


def test_a_recovery_action_is_an_event_as_long_as_it_stands(findings: Findings, clock: Clock) -> None:
    assert findings.reading(reading(recovery_action=0)) == []
    assert findings.reading(reading(recovery_action=None)) == []
    assert [(e.code, e.fatal) for e in findings.reading(reading(recovery_action=4))] == [(4, False)]
    assert findings.reading(reading(recovery_action=4)) == []
    assert [(e.code, e.fatal) for e in findings.reading(reading(recovery_action=1))] == [(1, True)]
    clock.now += 61
    assert [e.code for e in findings.reading(reading(recovery_action=1))] == [1]


def test_fewer_devices_than_before_are_an_event_and_more_are_none(findings: Findings) -> None:
    found = [findings.count(devices) for devices in (8, 8, 7, 8)]
    assert [event and (event.uuid, event.code, event.fatal) for event in found] == [
        None,
        None,
        (None, 7, False),
        None,
    ]


def test_a_second_hang_within_ten_minutes_is_fatal_and_a_later_one_is_not(
    findings: Findings, clock: Clock
) -> None:
    def hang(uuid: str | None, call: str = "temp") -> tuple[str | None, bool, str] | None:
        event = findings.hang(uuid, call, unkillable=False)
        return event and (event.uuid, event.fatal, event.bucket)

    assert hang("A") == ("A", False, "driver")
    assert hang("B") == ("B", False, "driver")
    assert findings.last_hung() in ("A", "B")
    assert hang("A") == ("A", True, "driver")
    assert findings.hangs("A") == 2
    clock.now += 601
    assert findings.last_hung() is None
    assert hang("A") == ("A", False, "driver")
    assert hang(None) == (None, False, "driver")
    assert hang("A", "util") == ("A", False, "driver"), "it was another call"
    assert hang("A", "util") == ("A", True, "driver")


def test_a_process_that_survives_sigkill_is_fatal_the_first_time(findings: Findings) -> None:
    event = findings.hang("A", "temp", unkillable=True)
    assert event is not None
    assert (event.fatal, event.bucket) == (True, "reboot")
    assert "SIGKILL" in event.advice


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_every_kind_has_a_meaning(kind: EventKind) -> None:
    assert judge(kind, None).advice
