"""The stall watchdog's rules, in virtual time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fakes import GPU, World, drive

from gangq.errors import InvalidInput
from gangq.watchdogs import ExitCode, StallWatchdog, Terms


def test_before_the_first_beat_nothing_is_policed() -> None:
    world = World(StallWatchdog)
    world.run(10_000)
    assert (world.reasons, world.suspected, world.scene.samples) == ([], [], 0)


def test_silence_with_everything_quiet_for_the_whole_window_trips() -> None:
    world = World(StallWatchdog)
    world.dog.beat(7, 100)
    world.run(119)
    assert (world.suspected, world.scene.samples) == ([], 0)
    world.run(1)
    assert len(world.suspected) == 1
    world.run(9)
    assert world.reasons == []
    world.run(1)
    trip = world.record.trips[0]
    assert (trip.code, trip.reason) == (ExitCode.STALL, "idle")
    assert trip.message.startswith("no beat for 130.0 s after step 7 of 100: ")
    assert trip.evidence["last_beat"]["step"] == 7
    assert trip.evidence["window"]["samples"] == 11


def test_beats_that_come_in_time_never_open_a_window() -> None:
    world = World(StallWatchdog)
    for step in range(100):
        world.dog.beat(step)
        world.run(119)
    assert world.suspected == []


def test_a_beat_that_says_nothing_new_is_a_beat_all_the_same() -> None:
    world = World(StallWatchdog)
    for _ in range(20):
        world.dog.beat(1)
        world.run(119)
    assert world.suspected == []


def test_a_window_needs_its_samples_however_long_it_is() -> None:
    world = World(StallWatchdog, poll_s=4)
    world.dog.beat()
    world.run(120)
    drive(world.dog, world.clock, 12, step=4)
    assert world.reasons == []  # 4 samples in 12 seconds
    drive(world.dog, world.clock, 4, step=4)
    assert world.reasons == ["idle"]


@pytest.mark.parametrize(
    "reading",
    [
        {"gpu_pct": 6.0},
        {"memory_pct": 6.0},
        {"pcie_kb_s": 50_000},
    ],
)
def test_a_busy_device_rearms(reading: dict[str, Any]) -> None:
    world = World(StallWatchdog)
    world.sampler.set(**reading)
    world.dog.beat()
    world.run(1000)
    assert world.reasons == []
    assert len(world.suspected) == 1  # Once for each silence, however often it is looked into.


def test_a_device_that_was_busy_between_two_looks_rearms() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(125)
    world.clock.now += 0.2
    world.sampler.flash(gpu_pct=80.0)
    world.run(110)
    assert world.reasons == []
    world.run(30)
    assert world.reasons == ["idle"]


def test_something_moving_on_the_host_rearms() -> None:
    world = World(StallWatchdog)
    world.scene.moving = True
    world.dog.beat()
    world.run(1000)
    assert world.reasons == []


def test_one_movement_at_the_very_end_of_the_window_saves_it() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(129)
    world.scene.moving = True
    world.run(1)
    assert world.reasons == []
    world.scene.moving = False
    world.run(119)
    assert world.reasons == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_a_suspicion_does_not_latch() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(125)
    world.dog.beat()
    world.run(119)
    assert (world.reasons, len(world.suspected)) == ([], 1)
    world.run(11)
    assert world.reasons == ["idle"]


def test_a_beat_that_comes_while_the_sample_is_taken_counts() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(129)
    world.scene.on_sample = world.dog.beat
    world.run(5)
    assert world.reasons == []


@pytest.mark.parametrize("unknown", ["host", "device", "uncalibrated", "shared", "missing"])
def test_what_cannot_be_known_convicts_nobody(unknown: str) -> None:
    world = World(StallWatchdog)
    if unknown == "host":
        world.scene.moving = None
    elif unknown == "device":
        world.sampler.set(gpu_pct=None, unknown={"gpu_pct": "not_supported"})
    elif unknown == "uncalibrated":
        world.sampler.kept.clear()
    elif unknown == "shared":
        world.sampler.set(gpu_pct=0.0, shared=True)
    else:
        world.sampler.now.clear()
    world.dog.beat()
    world.run(1150)
    assert world.reasons == []


def test_one_reading_that_failed_costs_no_whole_timeout() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(122)
    world.scene.moving = None
    world.run(1)
    world.scene.moving = False
    world.run(12)
    assert world.reasons == ["idle"]


def test_with_every_sensor_unknown_not_even_ten_times_overdue_trips() -> None:
    world = World(StallWatchdog)
    world.scene.moving = None
    world.sampler.set(gpu_pct=None, unknown={"gpu_pct": "timeout"})
    world.dog.beat()
    world.run(5000)
    assert world.reasons == []


@pytest.mark.parametrize("known", ["host", "device"])
def test_one_known_sensor_is_enough_for_ten_times_overdue(known: str) -> None:
    world = World(StallWatchdog)
    world.scene.moving = None if known == "device" else True
    if known == "host":
        world.sampler.set(gpu_pct=None, unknown={"gpu_pct": "timeout"})
    world.dog.beat()
    world.run(1199)
    assert world.reasons == []
    world.run(10)
    assert world.reasons == ["no_progress"]


def test_busy_is_not_progress() -> None:
    world = World(StallWatchdog)
    world.sampler.set(gpu_pct=100.0, memory_pct=40.0)
    world.scene.moving = True
    world.dog.beat(3)
    world.run(1199)
    assert world.reasons == []
    world.run(2)
    assert world.reasons == ["no_progress"]
    assert "10 times overdue" in world.record.trips[0].message


def spinning(world: World, **more: Any) -> None:
    """Idle power is known (100 W with a program's memory on it), then busy without memory traffic."""
    world.sampler.set(gpu_pct=0.0, own_mb=500, power_w=100.0)
    world.run(2)
    world.sampler.set(**{"gpu_pct": 100.0, "memory_pct": 0.0, "own_mb": 500, "power_w": 110.0, **more})


def test_busy_without_memory_traffic_or_power_trips_at_three_times() -> None:
    world = World(StallWatchdog)
    spinning(world)
    world.dog.beat()
    world.run(359)
    assert world.reasons == []
    world.run(13)
    assert world.reasons == ["spin"]
    assert world.record.trips[0].code == ExitCode.STALL


@pytest.mark.parametrize("honest", ["shared", "moving"])
def test_what_a_neighbour_may_do_and_a_job_that_moves_are_no_spin(honest: str) -> None:
    world = World(StallWatchdog)
    spinning(world, **({"shared": True} if honest == "shared" else {}))
    world.scene.moving = honest == "moving"
    world.dog.beat()
    world.run(1190)
    assert world.reasons == []
    world.run(15)
    assert world.reasons == ["no_progress"]


@pytest.mark.parametrize(
    "honest",
    [{"memory_pct": 2.0}, {"memory_pct": None}, {"power_w": 300.0}, {"power_w": None}, {"gpu_pct": 60.0}],
)
def test_whatever_else_a_busy_device_does_gives_it_ten_times(honest: dict[str, Any]) -> None:
    world = World(StallWatchdog)
    spinning(world, **honest)
    world.dog.beat()
    world.run(1190)
    assert world.reasons == []
    world.run(15)
    assert world.reasons == ["no_progress"]


@pytest.mark.parametrize("honest", [{"memory_pct": 2.0}, {"power_w": 300.0}, {"gpu_pct": 60.0}])
def test_so_does_what_it_did_between_two_looks(honest: dict[str, Any]) -> None:
    world = World(StallWatchdog)
    spinning(world)
    # Whenever it looks there is a spin to be seen, and every five seconds a reading in between that is none.
    world.scene.on_sample = lambda: world.clock.now % 5 == 0 and world.sampler.flash(**honest)
    world.dog.beat()
    world.run(1190)
    assert world.reasons == []
    world.run(15)
    assert world.reasons == ["no_progress"]


def test_spin_needs_an_idle_power_to_compare_with() -> None:
    world = World(StallWatchdog)
    world.sampler.set(gpu_pct=100.0, memory_pct=0.0, power_w=110.0)
    world.dog.beat()
    world.run(1150)
    assert world.reasons == []


def test_energy_counters_give_the_power_where_there_are_any() -> None:
    world = World(StallWatchdog)
    world.sampler.set(gpu_pct=0.0, own_mb=500, power_w=100.0)
    world.run(2)
    world.dog.beat()
    for second in range(372):
        # 400 W, whatever the instantaneous figure claims.
        world.sampler.set(
            gpu_pct=100.0, memory_pct=0.0, own_mb=500, power_w=100.0, energy_mj=second * 400_000
        )
        world.run(1)
    assert world.reasons == []


@pytest.mark.parametrize("phase", ["load", "save"])
def test_loading_and_saving_get_the_load_grace(phase: str) -> None:
    world = World(StallWatchdog)
    world.dog.beat(phase=phase)
    world.run(1199)
    assert world.suspected == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_a_load_grace_shorter_than_the_timeout_does_not_shorten_it() -> None:
    world = World(StallWatchdog, load_grace_s=10, stall_timeout_s=300)
    world.dog.beat(phase="load")
    world.run(299)
    assert world.suspected == []


def test_a_long_phase_is_exempt_and_bounded() -> None:
    world = World(StallWatchdog, long_phase_s=2000)
    world.dog.beat(phase="long")
    world.run(1999)
    assert world.suspected == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_repeating_that_it_is_long_does_not_prolong_it() -> None:
    world = World(StallWatchdog, long_phase_s=2000)
    for _ in range(5):
        world.dog.beat(phase="long")
        world.run(380)
    world.run(99)
    assert world.suspected == []
    world.run(13)
    assert world.reasons == ["idle"]


def test_a_pause_takes_nothing_from_a_long_phase() -> None:
    world = World(StallWatchdog, long_phase_s=2000)
    world.dog.beat(phase="long")
    world.clock.now += 1500
    world.dog.pauses.note(1500, "asleep")
    world.dog.beat(phase="long")
    world.run(1999)
    assert world.suspected == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_a_beat_without_a_phase_ends_a_long_one() -> None:
    world = World(StallWatchdog, long_phase_s=2000)
    world.dog.beat(phase="long")
    world.run(300)
    world.dog.beat(1)
    world.run(131)
    assert world.reasons == ["idle"]


def test_the_timeout_is_five_times_the_longest_gap_without_the_warm_up() -> None:
    world = World(StallWatchdog)
    for gap in (100, 110, 50, 50, 40, 30, 40):  # the first four gaps are warm-up
        world.dog.beat()
        world.run(gap)
    world.dog.beat()
    assert world.dog.learned == (40, 3)
    world.run(199)
    assert world.suspected == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_of_many_gaps_between_two_looks_the_longest_is_learned() -> None:
    world = World(StallWatchdog)
    for gap in (1, 1, 1, 1, 1, 40, 3):
        world.dog.beat()
        world.clock.now += gap
    world.dog.beat()
    assert world.dog.learned == (40, 3)


def test_short_gaps_never_shorten_the_timeout() -> None:
    world = World(StallWatchdog)
    for _ in range(20):
        world.dog.beat()
        world.run(1)
    world.run(118)
    assert world.suspected == []


def test_a_timeout_that_was_set_does_not_grow() -> None:
    world = World(StallWatchdog, stall_timeout_s=60)
    for _ in range(10):
        world.dog.beat()
        world.run(50)
    assert world.dog.learned == (50, 5)
    world.dog.beat()
    world.run(71)
    assert world.reasons == ["idle"]


def test_other_phases_teach_nothing() -> None:
    world = World(StallWatchdog)
    for _ in range(6):
        world.dog.beat()
        world.run(1)
    world.dog.beat(phase="save")
    world.run(500)
    world.dog.beat()
    assert world.dog.learned == (1, 3)


def test_a_gap_that_was_a_pause_teaches_nothing() -> None:
    world = World(StallWatchdog)
    for _ in range(7):
        world.dog.beat()
        world.run(10)
    world.clock.now += 300
    world.dog.beat()  # It beats before the watchdog's own thread has noticed the pause.
    world.dog.pauses.note(300, "stopped")
    assert world.dog.learned == (10, 3)


def test_a_pause_moves_the_deadline() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(60)
    world.clock.now += 1000
    world.dog.pauses.note(1000, "stopped")
    world.run(59)
    assert world.suspected == []
    world.run(12)
    assert world.reasons == ["idle"]


def test_a_pause_within_the_window_tears_it() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(128)
    world.clock.now += 30
    world.dog.pauses.note(30, "stopped")
    world.run(9)
    assert world.reasons == []
    world.run(3)
    assert world.reasons == ["idle"]


def test_without_devices_a_processor_at_work_is_busy_and_still_not_progress() -> None:
    world = World(StallWatchdog, device=False)
    world.scene.cpu_share = 1.0
    world.dog.beat()
    world.run(1199)
    assert world.reasons == []
    world.run(3)
    assert world.reasons == ["no_progress"]


def test_with_a_device_a_processor_at_work_is_no_excuse() -> None:
    world = World(StallWatchdog)
    world.scene.cpu_share = 1.0
    world.dog.beat()
    world.run(131)
    assert world.reasons == ["idle"]


@pytest.mark.parametrize("device", [True, False])
def test_what_only_waits_is_given_three_timeouts(device: bool) -> None:
    world = World(StallWatchdog, device=device)
    world.scene.waiting = True
    world.dog.beat(5)
    world.run(369)
    assert world.reasons == []
    world.run(3)
    (trip,) = world.record.trips
    assert trip.reason == "waits"
    assert "another program holds" in trip.message


def test_a_job_that_moves_while_it_waits_is_given_ten() -> None:
    world = World(StallWatchdog)
    world.scene.waiting = True
    world.dog.beat()
    world.run(365)
    world.scene.moving = True
    world.run(10)
    assert world.reasons == []


@pytest.mark.parametrize(
    ("cpu_share", "silence_s", "reason"), [(0.5, 1200, "no_progress"), (0.02, 370, "waits")]
)
def test_python_that_gets_on_beside_an_idle_device_computes_or_polls(
    cpu_share: float, silence_s: float, reason: str
) -> None:
    world = World(StallWatchdog)
    world.scene.cpu_share = cpu_share

    def get_on() -> None:
        world.scene.python_steps = (world.scene.python_steps or 0) + 1

    world.scene.on_sample = get_on
    world.dog.beat()
    world.run(silence_s - 3)
    assert world.reasons == []
    world.run(6)
    assert world.reasons == [reason]


@pytest.mark.parametrize(("until_s", "trips_at_s"), [(1000, 370), (40, 130)])
def test_a_loop_that_sleeps_for_longer_than_the_window_is_a_loop(until_s: float, trips_at_s: float) -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    began = world.clock.now
    while not world.reasons and world.clock.now - began < 1000:
        # Seen from a window of ten seconds it does nothing at all.
        ran_s = min(world.clock.now - began, until_s)
        world.scene.got_on_at = began + ran_s - ran_s % 40
        world.run(1)
    assert abs(world.clock.now - began - trips_at_s) <= 3


def test_who_says_that_it_waits_is_not_judged_until_the_next_beat() -> None:
    world = World(StallWatchdog)
    world.dog.beat(phase="wait")
    world.run(50_000)
    assert (world.reasons, world.suspected) == ([], [])
    world.dog.beat()
    world.run(131)
    assert world.reasons == ["idle"]


@pytest.mark.parametrize("cores", [0.03, 0.4])
def test_without_devices_a_processor_of_which_little_is_had_is_at_work(cores: float) -> None:
    world = World(StallWatchdog, device=False)
    world.scene.cpu_share = cores
    world.dog.beat()
    world.run(1190)
    assert world.reasons == []


def test_called_off_it_watches_on_for_another_timeout() -> None:
    world = World(StallWatchdog, call_off=True)
    world.dog.beat()
    world.run(130)
    assert world.reasons == ["idle"]
    world.run(119)
    assert world.reasons == ["idle"]
    world.run(12)
    assert world.reasons == ["idle", "idle"]
    world.run(1205 - 261)
    assert world.reasons == ["idle"] * 9 + ["no_progress"]  # Not a timeout late.
    assert len(world.suspected) == 1


def test_a_finished_job_is_not_policed_and_the_next_one_begins_afresh() -> None:
    world = World(StallWatchdog)
    world.dog.beat()
    world.run(115)
    world.dog.stop()
    world.dog.beat()  # A thread it left behind: nobody listens.
    world.run(500)
    world.dog.start()
    world.run(500)
    assert (world.reasons, world.suspected) == ([], [])


def test_what_start_is_given_holds_for_that_job_only() -> None:
    world = World(StallWatchdog)
    world.dog.start(Terms(stall_timeout_s=30), job="short")
    world.dog.beat()
    world.run(41)
    assert world.record.trips[0].job == "short"
    world.dog.start()
    world.dog.beat()
    world.run(100)
    assert len(world.record.trips) == 1


class Tensor:
    """What lives on a device whose work never ends: whatever is asked of it waits, or fails."""

    def _waits(self, *_: object) -> Any:
        raise AssertionError("the watchdog touched it")

    __sub__ = __rsub__ = __eq__ = __ne__ = __float__ = __bool__ = __len__ = __iter__ = _waits
    __str__ = __repr__ = __format__ = __hash__ = __getattr__ = _waits  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["step", "total", "phase", "loss"])
def test_what_a_program_hands_to_a_beat_is_never_touched(name: str) -> None:
    world = World(StallWatchdog)
    world.dog.beat(**{"step": 7, "total": 9, name: Tensor()})  # type: ignore[arg-type]
    world.run(140)
    (trip,) = world.record.trips
    assert trip.reason == "idle"
    assert trip.evidence["last_beat"][name] == (None if name == "phase" else "Tensor")
    assert ("Tensor" in trip.message) is (name in ("step", "total"))


@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        (0.5, 0.5),
        (3, 3),
        (None, None),
        (True, True),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("x" * 500, "x" * 200),
        ([1.0], "list"),
    ],
)
def test_of_a_loss_numbers_words_and_the_names_of_types_are_kept(loss: Any, kept: Any) -> None:
    world = World(StallWatchdog)
    world.dog.beat(1, loss=loss)
    world.run(140)
    assert world.record.trips[0].evidence["last_beat"]["loss"] == kept


def test_rearming_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = World(StallWatchdog)
    world.sampler.set(gpu_pct=80.0)
    world.dog.beat()
    with caplog.at_level(logging.INFO, "gangq.watchdogs"):
        world.run(125)
    (record,) = [record for record in caplog.records if record.message == "rearmed"]
    assert f"device {GPU} was 80" in record.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(("gpu_pct", "silence_s"), [(0.0, 125), (80.0, 200)], ids=["looking", "rearmed"])
def test_a_beat_that_ends_a_suspicion_is_logged_with_how_long_it_was_awaited(
    caplog: pytest.LogCaptureFixture, gpu_pct: float, silence_s: float
) -> None:
    world = World(StallWatchdog)
    world.sampler.set(gpu_pct=gpu_pct)
    world.dog.beat()
    world.run(silence_s)
    world.clock.now += 30
    world.dog.pauses.note(30, "stopped")
    world.dog.beat()
    with caplog.at_level(logging.INFO, "gangq.watchdogs"):
        world.run(1)
    (record,) = [record for record in caplog.records if record.message == "beat_came"]
    assert record.silence_s == silence_s  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "junk"),
    [
        ("stall_timeout_s", 0),
        ("stall_timeout_s", "120"),
        ("stall_timeout_s", float("nan")),
        ("confirm_s", -1),
        ("load_grace_s", float("inf")),
        ("long_phase_s", None),
        ("overdue_factor", 0.5),
        ("overdue_factor", "3"),
        ("poll_s", 0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name: str, junk: object) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is "):
        StallWatchdog(**{name: junk})  # type: ignore[arg-type]
