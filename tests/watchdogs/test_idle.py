"""The one definition of idle, as the pure function it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import GPU, Clock, Sampler
from hypothesis import given, settings
from hypothesis import strategies as st

from gangq.gpu.reading import DeviceReading
from gangq.watchdogs import WorkSensors
from gangq.watchdogs.activity import FAULTS, IO_BYTES, MEMORY_BYTES, SWITCHES, HostSample
from gangq.watchdogs.counters import Counters
from gangq.watchdogs.idle import Sample, judge
from gangq.watchdogs.sensors import Calibration


def window(
    *,
    seconds: int = 10,
    hosts: list[Counters] | None = None,
    unknown: str | None = None,
    calibrated: bool = True,
    **values: Any,
) -> list[Sample]:
    """A sample a second: a quiet device, and a host that stands still unless ``hosts`` says otherwise."""
    found = []
    for second in range(seconds + 1):
        reading = DeviceReading(GPU, float(second), **{"gpu_pct": 0.0, "gpu_scope": "device", **values})
        counters = Counters(io_bytes=0) if hosts is None else hosts[min(second, len(hosts) - 1)]
        host = HostSample(float(second), {(1, 1): counters}, unknown=unknown)
        trusted = frozenset([GPU] if calibrated else [])
        found.append(Sample(float(second), host, (reading,), (GPU,), trusted))
    return found


def test_quiet_throughout_is_idle() -> None:
    verdict = judge(window())
    assert verdict.idle is True
    assert verdict.known


def test_one_look_is_no_window() -> None:
    assert judge(window(seconds=0)).idle is None
    assert judge([]).idle is None


@pytest.mark.parametrize("pct", [0.0, 5.0])
def test_up_to_five_percent_is_quiet(pct: float) -> None:
    assert judge(window(gpu_pct=pct)).idle is True


@pytest.mark.parametrize(
    "values",
    [{"gpu_pct": 5.1}, {"memory_pct": 5.1}, {"pcie_kb_s": 40_001}, {"gpu_pct": 30.0, "shared": True}],
)
def test_a_busy_device_is_not_idle_whosever_it_is(values: dict[str, Any]) -> None:
    assert judge(window(**values)).idle is False


@pytest.mark.parametrize("name", ["used_mb", "own_mb"])
def test_device_memory_that_moves_is_not_idle(name: str) -> None:
    quiet = window(**{name: 1000})
    assert judge(quiet).idle is True
    moved = [replace(quiet[5].devices[0], **{name: 1017})]
    quiet[5] = replace(quiet[5], devices=tuple(moved))
    assert judge(quiet).idle is False


def test_a_single_busy_sample_in_the_middle_is_enough() -> None:
    quiet = window()
    quiet[5] = replace(quiet[5], devices=(replace(quiet[5].devices[0], gpu_pct=40.0),))
    assert judge(quiet).idle is False


def test_memory_that_swings_and_returns_has_moved() -> None:
    # The end points are the same: comparing those alone calls a swing of 40 GB static.
    swing = [Counters(io_bytes=0, memory_bytes=40 * 10**9 if second == 5 else 0) for second in range(11)]
    assert judge(window(hosts=swing)).idle is False


@pytest.mark.parametrize(
    ("name", "per_s"),
    [
        ("io_bytes", IO_BYTES / 2),
        ("memory_bytes", MEMORY_BYTES / 2),
        ("faults", FAULTS / 2),
        ("switches", SWITCHES / 2),
    ],
)
def test_each_counter_of_the_host_alone_shows_movement(name: str, per_s: float) -> None:
    def grown(second: int, factor: float) -> Counters:
        value = int(second * per_s * factor)
        more: dict[str, Any] = {name: {1: value} if name == "switches" else value}
        return Counters(**{"io_bytes": 0, **more})

    assert judge(window(hosts=[grown(second, 1.2) for second in range(11)])).idle is False
    assert judge(window(hosts=[grown(second, 0.8) for second in range(11)])).idle is True


def test_processor_time_is_no_movement_for_work_with_devices() -> None:
    spinning = [Counters(io_bytes=0, cpu_s=float(second)) for second in range(11)]
    assert judge(window(hosts=spinning)).idle is True


def test_processor_time_is_work_where_there_are_no_devices() -> None:
    spinning = [Counters(io_bytes=0, cpu_s=float(second)) for second in range(11)]
    bare = [replace(s, devices=(), held=()) for s in window(hosts=spinning)]
    assert judge(bare).idle is False
    assert judge([replace(s, devices=(), held=()) for s in window()]).idle is True


@pytest.mark.parametrize(
    "case",
    [
        {"gpu_pct": None, "unknown_why": "not_supported"},
        {"calibrated": False},
        {"shared": True},
        {"host": "hidden"},
    ],
)
def test_unknown_is_not_idle_and_not_busy(case: dict[str, Any]) -> None:
    case = dict(case)
    host = case.pop("host", None)
    why = case.pop("unknown_why", None)
    samples = window(unknown=host, **case)
    if why:
        samples = [
            replace(s, devices=tuple(replace(r, unknown={"gpu_pct": why}) for r in s.devices))
            for s in samples
        ]
    verdict = judge(samples)
    assert verdict.idle is None
    assert (why or "") in verdict.why


def test_io_that_cannot_be_read_makes_the_host_unknown_unless_something_else_moves() -> None:
    blind = [Counters(io_bytes=None, switches={1: second}) for second in range(11)]
    assert judge(window(hosts=blind)).idle is None
    moving = [Counters(io_bytes=None, switches={1: 100 * second}) for second in range(11)]
    assert judge(window(hosts=moving)).idle is False


def test_a_host_that_was_not_sampled_is_unknown() -> None:
    assert judge([replace(sample, host=None) for sample in window()]).idle is None


def test_readings_that_stopped_coming_are_unknown() -> None:
    samples = window(seconds=20)
    frozen = samples[3].devices
    samples = [s if s.at <= 3 else replace(s, devices=frozen) for s in samples]
    assert judge(samples).idle is None


def test_a_device_it_holds_and_nobody_reads_is_unknown() -> None:
    assert judge([replace(sample, held=(GPU, "GPU-2")) for sample in window()]).idle is None


def test_the_same_reading_looked_at_twice_is_one() -> None:
    samples = window(seconds=2)
    assert judge([replace(s, devices=samples[0].devices) for s in samples]).idle is None


def test_nothing_known_at_all_is_told_apart() -> None:
    samples = window(unknown="hidden", gpu_pct=None)
    assert not judge(samples).known
    assert judge(window(unknown="hidden")).known
    assert judge(window(gpu_pct=None)).known


readings = st.builds(
    DeviceReading,
    uuid=st.just(GPU),
    at=st.just(0.0),
    gpu_pct=st.none() | st.floats(0, 100),
    gpu_scope=st.sampled_from(["process", "mig", "device"]),
    memory_pct=st.none() | st.floats(0, 100),
    used_mb=st.none() | st.integers(0, 100),
    power_w=st.none() | st.floats(1, 700),
    shared=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(readings, min_size=3, max_size=8),
    st.booleans(),
    st.none() | st.just("hidden"),
    st.integers(0, 7),
)
def test_whatever_else_is_seen_one_unknown_keeps_a_window_from_being_idle(
    seen: list[DeviceReading], calibrated: bool, hidden: str | None, blind: int
) -> None:
    trusted = frozenset([GPU] if calibrated else [])
    samples = [
        Sample(
            float(at),
            HostSample(float(at), {(1, 1): Counters(io_bytes=0)}, unknown=hidden),
            (replace(reading, at=float(at)),),
            (GPU,),
            trusted,
        )
        for at, reading in enumerate(seen)
    ]
    verdict = judge(samples)
    if hidden or not calibrated or any(reading.gpu_pct is None for reading in seen):
        assert verdict.idle is not True
    at = blind % len(samples)
    samples[at] = replace(samples[at], devices=(replace(samples[at].devices[0], gpu_pct=None),))
    assert judge(samples).idle is not True


@settings(max_examples=100, deadline=None)
@given(st.lists(readings, min_size=3, max_size=8), st.integers(0, 7))
def test_making_a_window_quieter_never_makes_it_busier(seen: list[DeviceReading], which: int) -> None:
    def verdict(them: list[DeviceReading]) -> bool | None:
        host = {(1, 1): Counters(io_bytes=0)}
        return judge(
            [
                Sample(
                    float(at),
                    HostSample(float(at), host),
                    (replace(r, at=float(at)),),
                    (GPU,),
                    frozenset([GPU]),
                )
                for at, r in enumerate(them)
            ]
        ).idle

    before = verdict(seen)
    quiet = list(seen)
    at = which % len(seen)
    quiet[at] = replace(quiet[at], gpu_pct=0.0, memory_pct=0.0)
    if before is True:
        assert verdict(quiet) is True
    if verdict(quiet) is False:
        assert before is False


# -- what only looks like work ---------------------------------------------------------------------------------


def spinning(hosts: list[Counters] | None = None, **values: Any) -> list[Sample]:
    """A device that is busy in the way that dead work is, at 1.1 times its idle power."""
    busy = {"gpu_pct": 99.0, "memory_pct": 0.0, "power_w": 77.0, **values}
    return [replace(sample, idle_w={GPU: 70.0}) for sample in window(hosts=hosts, **busy)]


def test_busy_without_memory_traffic_or_power_is_a_spin() -> None:
    assert judge(spinning()).spinning
    assert judge(spinning(shared=True, gpu_scope="process")).spinning


@pytest.mark.parametrize("watts", [85.0, 0.0, 0.4, None])
def test_more_power_and_none_that_is_known_are_not(watts: float | None) -> None:
    assert not judge(spinning(power_w=watts)).spinning


def test_what_may_be_a_neighbours_is_no_spin() -> None:
    assert not judge(spinning(shared=True)).spinning


@pytest.mark.parametrize("moves", [{"io_bytes": 500 * 10**6}, {"io_bytes": 0, "faults": 9000}])
def test_a_job_that_moves_does_not_spin(moves: dict[str, int]) -> None:
    hosts = [Counters(**{name: value * second for name, value in moves.items()}) for second in range(11)]
    assert judge(spinning(hosts)).idle is False
    assert not judge(spinning(hosts)).spinning


# -- calibration ---------------------------------------------------------------------------------------------


def reading(at: float, **values: Any) -> DeviceReading:
    return DeviceReading(GPU, at, **{"gpu_scope": "device", **values})


def test_zeros_are_trusted_once_something_else_was_seen_by_the_same_way_of_counting() -> None:
    calibration = Calibration()
    calibration.learn(reading(1, gpu_pct=0.0))
    assert not calibration.trusted(reading(2, gpu_pct=0.0))
    calibration.learn(reading(3, gpu_pct=40.0))
    assert calibration.trusted(reading(4, gpu_pct=0.0))
    assert not calibration.trusted(reading(4, gpu_pct=0.0, gpu_scope="process"))
    assert not calibration.trusted(replace(reading(4, gpu_pct=0.0), uuid="GPU-2"))


def test_idle_power_is_learned_only_with_a_programs_memory_on_the_device() -> None:
    calibration = Calibration()
    calibration.learn(reading(1, gpu_pct=0.0, used_mb=10, power_w=30.0))
    assert calibration.idle_w() == {}
    calibration.learn(reading(2, gpu_pct=0.0, used_mb=600, power_w=80.0))
    calibration.learn(reading(3, gpu_pct=90.0, used_mb=600, power_w=20.0))
    calibration.learn(reading(4, gpu_pct=0.0, used_mb=600, power_w=90.0))
    assert calibration.idle_w() == {GPU: 80.0}


def test_old_readings_are_not_learned_twice() -> None:
    calibration = Calibration()
    calibration.learn(reading(5, gpu_pct=0.0))
    calibration.learn(reading(4, gpu_pct=50.0))
    assert calibration.last_at(GPU) == 5
    assert not calibration.trusted(reading(6, gpu_pct=0.0))


@pytest.mark.parametrize("watts", [0.0, 0.4])
def test_a_reading_of_next_to_no_power_teaches_nothing(watts: float) -> None:
    calibration = Calibration()
    calibration.learn(reading(1, gpu_pct=0.0, used_mb=4000, power_w=watts))
    assert calibration.idle_w() == {}
    calibration.learn(reading(2, gpu_pct=0.0, used_mb=4000, power_w=70.0))
    assert calibration.idle_w() == {GPU: 70.0}


def test_a_counter_of_energy_that_ticks_once_in_a_while_teaches_nothing() -> None:
    calibration = Calibration()
    for at, energy_mj in enumerate([1000, 1000, 1001, 1001, 1001, 1001]):
        calibration.learn(reading(at, gpu_pct=0.0, used_mb=4000, energy_mj=energy_mj, power_w=70.0))
    assert calibration.idle_w() == {GPU: 70.0}


def test_idle_power_by_the_energy_counter_is_that_of_at_least_two_seconds() -> None:
    calibration = Calibration()
    # It counts in lumps: half a second without one would be 10 W.
    for step, energy_mj in enumerate(
        [0, 5_000, 60_000, 100_000, 140_000, 175_000, 245_000, 245_000, 280_000]
    ):
        calibration.learn(reading(10 + step / 2, gpu_pct=0.0, used_mb=4000, energy_mj=energy_mj))
    assert calibration.idle_w() == {GPU: 70.0}


@pytest.mark.parametrize("between", [{"gpu_pct": 60.0}, {"gpu_pct": None}, {"gpu_pct": 0.0, "used_mb": 10}])
def test_idle_power_by_the_energy_counter_is_that_of_an_idle_stretch(between: dict[str, Any]) -> None:
    calibration = Calibration()
    for at, more in ((0.0, {}), (1.0, between), (2.0, {})):
        values = {"gpu_pct": 0.0, "used_mb": 4000, "energy_mj": int(at * 40_000), **more}
        calibration.learn(reading(at, **values))
    assert calibration.idle_w() == {}


def test_a_hang_at_its_usual_power_is_idle_after_a_reading_of_none() -> None:
    calibration = Calibration()
    for at, watts in enumerate([70.0, 0.0, 70.0]):
        calibration.learn(reading(at, gpu_pct=0.0, used_mb=4000, power_w=watts))
    hung = [replace(sample, idle_w=calibration.idle_w()) for sample in window(power_w=70.0)]
    assert judge(hung).idle is True


def test_lumps_of_an_energy_counter_are_no_work() -> None:
    hung = []
    for sample in window():
        lumps = int(sample.at // 3) * 210_000  # 70 W, counted every three seconds.
        seen = replace(sample.devices[0], energy_mj=lumps, power_w=70.0)
        hung.append(replace(sample, devices=(seen,), idle_w={GPU: 70.0}))
    assert judge(hung).idle is True


def test_a_sample_has_every_reading_since_the_one_before_it_else_the_latest() -> None:
    clock = Clock()
    sampler = Sampler(clock)
    sampler.set(gpu_pct=0.0)
    sensors = WorkSensors(uuids=(GPU,), sampler=sampler, clock=clock)
    first = sensors.sample()
    clock.now += 2
    sampler.flash(gpu_pct=80.0)
    seen = [sample.devices for sample in (first, sensors.sample(first.at), sensors.sample(clock.now))]
    assert [[one.gpu_pct for one in devices] for devices in seen] == [[0.0], [80.0, 0.0], [0.0]]
