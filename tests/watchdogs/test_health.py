"""The health watchdog's rules, in virtual time."""

from __future__ import annotations

import logging

import pytest
from fakes import GPU, World

from gangq.errors import InvalidInput
from gangq.gpu.findings import Findings
from gangq.gpu.reading import DeviceReading
from gangq.watchdogs import ExitCode, GpuHealthWatchdog


def test_loading_is_given_its_grace_and_then_a_whole_window() -> None:
    world = World(GpuHealthWatchdog)
    world.run(1498)
    assert world.reasons == []
    world.run(6)
    trip = world.record.trips[0]
    assert (trip.code, trip.reason) == (ExitCode.HEALTH, "idle")
    assert trip.evidence["window"]["samples"] > 5


def test_what_only_waits_is_given_three_windows() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.scene.waiting = True
    world.run(890)
    assert world.reasons == []
    world.run(20)
    assert world.reasons == ["idle"]
    assert "only waited" in world.record.trips[0].message


def test_a_loop_that_was_seen_to_get_on_in_the_window_waits() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(100)
    world.scene.got_on_at = world.clock.now
    world.run(500)
    assert world.reasons == []


def test_who_says_that_it_waits_is_not_judged_until_the_next_beat() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.dog.beat(phase="wait")
    world.run(10_000)
    assert world.reasons == []
    world.dog.beat()
    world.run(310)
    assert world.reasons == ["idle"]


def test_it_is_suspect_first() -> None:
    world = World(GpuHealthWatchdog)
    world.run(1258)
    assert world.suspected == []
    world.run(10)
    assert len(world.suspected) == 1
    world.run(100)
    assert len(world.suspected) == 1


def test_what_was_seen_before_a_window_is_not_counted_in_it() -> None:
    """It takes five samples, however short the window."""
    world = World(GpuHealthWatchdog, load_grace_s=0, window_s=60, sample_s=30)
    world.sampler.set(gpu_pct=80.0)
    world.run(300)
    world.sampler.set(gpu_pct=0.0)
    world.run(115)
    assert world.reasons == []
    world.run(35)
    assert world.reasons == ["idle"]


def test_a_job_whose_window_is_as_good_as_endless_is_no_suspect_when_its_devices_idle() -> None:
    """Replicas of a service have one. A fleet of them without requests would hold the trips of all other jobs."""
    world = World(GpuHealthWatchdog, window_s=1e9)
    world.dog.beat()
    world.run(2000)
    assert world.suspected == []


def test_a_device_that_was_touched_ends_the_grace() -> None:
    world = World(GpuHealthWatchdog)
    world.run(20)
    world.sampler.set(gpu_pct=70.0)
    world.run(10)
    world.sampler.set(gpu_pct=0.0)
    world.run(298)
    assert world.reasons == []
    world.run(6)
    assert world.reasons == ["idle"]


@pytest.mark.parametrize("ats", [[-1.0], [0.5], [-1.0, 0.5]], ids=["before it", "over its beginning", "both"])
def test_what_the_job_before_did_to_a_device_does_not_end_the_grace(ats: list[float]) -> None:
    world = World(GpuHealthWatchdog)
    # The reading says what was busiest since the one before it: of the second, part is from before the job.
    world.scene.first = [
        DeviceReading(GPU, world.clock.now + at, gpu_pct=97.0, gpu_scope="device") for at in ats
    ]
    world.run(1490)
    assert world.reasons == []
    world.run(20)
    assert world.reasons == ["idle"]


def test_what_a_neighbour_does_to_a_shared_device_does_not_end_the_grace() -> None:
    world = World(GpuHealthWatchdog)
    world.sampler.set(gpu_pct=70.0, shared=True)
    world.run(20)
    world.sampler.set(gpu_pct=0.0)
    world.run(1470)
    assert world.reasons == []
    world.run(20)
    assert world.reasons == ["idle"]


def test_a_beat_ends_the_grace_unless_it_says_load() -> None:
    world = World(GpuHealthWatchdog)
    world.dog.beat(phase="load")
    world.run(900)
    assert world.reasons == []
    world.dog.beat(1)
    world.run(310)
    assert world.reasons == ["idle"]


def test_each_beat_counts_as_movement() -> None:
    world = World(GpuHealthWatchdog)
    for step in range(20):
        world.dog.beat(step)
        world.run(290)
    assert world.reasons == []


def test_a_busy_device_never_trips() -> None:
    world = World(GpuHealthWatchdog)
    world.sampler.set(gpu_pct=50.0)
    world.run(5000)
    assert world.reasons == []


def test_a_device_that_was_busy_between_two_looks_starts_the_window_anew() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(290)
    world.clock.now += 0.2
    world.sampler.flash(gpu_pct=70.0)
    world.run(298)
    assert world.reasons == []
    world.run(10)
    assert world.reasons == ["idle"]


def test_a_use_between_two_looks_ends_the_grace() -> None:
    world = World(GpuHealthWatchdog)
    world.run(20)
    world.clock.now += 0.2
    world.sampler.flash(gpu_pct=70.0)
    world.run(310)
    assert world.reasons == ["idle"]


def test_movement_on_the_host_starts_the_window_anew() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(290)
    world.scene.moving = True
    world.run(2)
    world.scene.moving = False
    world.run(298)
    assert world.reasons == []
    world.run(8)
    assert world.reasons == ["idle"]


@pytest.mark.parametrize("unknown", ["host", "device", "uncalibrated", "shared", "missing"])
def test_what_cannot_be_known_convicts_nobody(unknown: str) -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    if unknown == "host":
        world.scene.moving = None
    elif unknown == "device":
        world.sampler.set(gpu_pct=None, unknown={"gpu_pct": "not_supported"})
    elif unknown == "uncalibrated":
        world.sampler.kept.clear()
    elif unknown == "shared":
        world.sampler.set(shared=True)
    else:
        world.sampler.now.clear()
    world.run(5000)
    assert world.reasons == []


def test_one_of_two_devices_at_work_is_enough() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.sampler.set("GPU-2", gpu_pct=80.0)
    world.scene.uuids = (GPU, "GPU-2")
    world.run(2000)
    assert world.reasons == []


@pytest.mark.parametrize(("phase", "limit"), [("long", 2000), ("save", 1200)])
def test_a_phase_that_may_idle_is_exempt_and_bounded(phase: str, limit: float) -> None:
    world = World(GpuHealthWatchdog, long_phase_s=2000)
    world.dog.beat(phase=phase)
    world.run(limit + 296)
    assert world.reasons == []
    world.run(8)
    assert world.reasons == ["idle"]


def test_a_pause_starts_the_window_anew() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(290)
    world.clock.now += 600
    world.dog.pauses.note(600, "stopped")
    world.run(298)
    assert world.reasons == []
    world.run(8)
    assert world.reasons == ["idle"]


def test_a_window_that_a_pause_ended_is_logged_as_that(caplog: pytest.LogCaptureFixture) -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(100)
    assert len(world.suspected) == 1
    world.dog.pauses.note(600, "stopped")
    with caplog.at_level(logging.INFO, "gangq.watchdogs"):
        world.run(20)
    assert [vars(line)["reason"] for line in caplog.records if line.message == "rearmed"] == [
        "there was a pause"
    ]


def test_a_pause_does_not_use_up_the_grace() -> None:
    world = World(GpuHealthWatchdog)
    world.run(600)
    world.clock.now += 5000
    world.dog.pauses.note(5000, "stopped")
    world.run(896)
    assert world.reasons == []
    world.run(8)
    assert world.reasons == ["idle"]


def test_a_pause_takes_nothing_from_a_phase_that_may_idle() -> None:
    world = World(GpuHealthWatchdog, long_phase_s=2000)
    world.dog.beat(phase="long")
    world.run(600)
    world.clock.now += 1300
    world.dog.pauses.note(1300, "stopped")
    world.run(1400 + 296)
    assert world.reasons == []
    world.run(8)
    assert world.reasons == ["idle"]


def test_a_window_begins_after_the_phase_that_may_idle_and_not_at_its_last_look() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=90, sample_s=60)
    world.dog.beat(phase="save")
    # Looks at 1, 61 and 121 s: the second is the last one within the phase.
    world.run(420)
    assert world.reasons == []
    world.run(2)
    assert world.reasons == ["idle"]


def test_a_short_window_needs_its_samples_too() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0, window_s=1)
    world.run(8)
    assert world.reasons == []
    world.run(2)
    assert world.reasons == ["idle"]


def test_called_off_it_takes_another_whole_window() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0, call_off=True)
    world.run(306)
    assert len(world.record.trips) == 1
    world.run(290)
    assert len(world.record.trips) == 1
    world.run(10)
    assert len(world.record.trips) == 2


def test_stopped_it_never_trips() -> None:
    world = World(GpuHealthWatchdog, load_grace_s=0)
    world.run(290)
    world.dog.stop()
    world.run(5000)
    assert world.reasons == []


def test_a_job_without_devices_is_not_watched() -> None:
    world = World(GpuHealthWatchdog, device=False, load_grace_s=0)
    world.run(5000)
    assert world.reasons == []


# -- faults --------------------------------------------------------------------------------------------------


def test_a_fatal_event_trips_at_the_next_look_even_while_loading() -> None:
    world = World(GpuHealthWatchdog)
    world.run(10)
    world.sampler.event("xid", fatal=True, advice="the card fell off the bus")
    world.dog.check()
    (trip,) = world.record.trips
    assert (trip.code, trip.reason, trip.devices, trip.application) == (ExitCode.FAULT, "xid", (GPU,), False)
    assert "xid 79: the card fell off the bus" in trip.message
    assert trip.evidence["event"]["code"] == 79


def test_a_fault_that_programs_cause_says_so() -> None:
    world = World(GpuHealthWatchdog)
    world.clock.now += 1
    world.sampler.event("xid", fatal=True, code=31, application=True)
    world.dog.check()
    assert world.record.trips[0].application


def test_what_befalls_another_device_is_not_its_affair() -> None:
    world = World(GpuHealthWatchdog)
    world.clock.now += 1
    world.sampler.event("xid", fatal=True, uuid="GPU-2")
    world.run(10)
    assert world.reasons == []


def test_what_befalls_the_whole_driver_is_and_all_its_devices_are_involved() -> None:
    world = World(GpuHealthWatchdog)
    world.clock.now += 1
    world.sampler.event("driver_hang", fatal=True, uuid=None, code=None)
    world.dog.check()
    assert [(trip.reason, trip.devices) for trip in world.record.trips] == [("driver_hang", (GPU,))]


def test_what_happened_before_the_job_is_not_its_affair() -> None:
    world = World(GpuHealthWatchdog)
    world.sampler.event("xid", fatal=True)
    world.dog.start()
    world.run(10)
    assert world.reasons == []


def test_an_event_that_is_not_fatal_is_a_suspicion_told_once() -> None:
    world = World(GpuHealthWatchdog)
    world.clock.now += 1
    world.sampler.event("xid", fatal=False, code=63)
    world.run(20)
    assert (world.reasons, world.suspected) == ([], ["fault"])


def test_a_fault_that_was_called_off_is_not_told_twice() -> None:
    world = World(GpuHealthWatchdog, call_off=True)
    world.clock.now += 1
    world.sampler.event("lost")
    world.run(20)
    assert world.reasons == ["lost"]


def test_a_count_of_errors_that_grows_while_it_runs_trips() -> None:
    world = World(GpuHealthWatchdog)
    world.sampler.set(ecc_uncorrectable=2)
    world.run(10)
    assert world.reasons == []  # It was there before.
    world.sampler.set(ecc_uncorrectable=3)
    world.run(2)
    (trip,) = world.record.trips
    assert (trip.code, trip.reason, trip.devices) == (ExitCode.FAULT, "ecc", (GPU,))


@pytest.mark.parametrize(
    ("action", "fatal"), [(1, True), (2, True), (3, False), (4, False), (5, False), (9, False)]
)
def test_of_a_recovery_that_a_driver_asks_for_the_event_says_whether_work_can_go_on(
    action: int, fatal: bool
) -> None:
    world = World(GpuHealthWatchdog)
    findings = Findings(clock=world.clock)
    world.sampler.set(recovery_action=0)
    world.run(10)
    world.sampler.set(recovery_action=action)
    world.clock.now += 1
    world.sampler.happened += findings.reading(world.sampler.now[GPU])
    world.run(10)
    assert (world.reasons, world.suspected) == ((["recovery"], []) if fatal else ([], ["fault"]))


def test_errors_that_were_counted_before_it_began_are_not_its_affair() -> None:
    world = World(GpuHealthWatchdog)
    old = DeviceReading(GPU, world.clock.now - 1, gpu_pct=0.0, gpu_scope="device", ecc_uncorrectable=2)
    world.scene.first = [old]
    world.sampler.set(ecc_uncorrectable=3)
    world.run(10)
    assert world.reasons == []
    world.sampler.set(ecc_uncorrectable=4)
    world.run(2)
    assert world.reasons == ["ecc"]


def test_a_count_that_the_driver_begins_to_tell_late_is_a_beginning_and_no_growth() -> None:
    world = World(GpuHealthWatchdog)
    world.run(10)
    world.sampler.set(ecc_uncorrectable=5)
    world.run(10)
    assert world.reasons == []
    world.sampler.set(ecc_uncorrectable=6)
    world.run(2)
    assert world.reasons == ["ecc"]


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("window_s", 0),
        ("window_s", "300"),
        ("load_grace_s", -1),
        ("long_phase_s", float("nan")),
        ("sample_s", 0),
        ("poll_s", True),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name: str, junk: object) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is "):
        GpuHealthWatchdog(**{name: junk})  # type: ignore[arg-type]
