"""What a running sampler tells: readings, histories and events, through a real process and the true binding."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gangq.gpu import DeviceReading, SamplerProcess, detect, sampler_state
from gangq.gpu.reading import VALUES
from gangq.gpu.sampler_state import SamplerState
from gangq.proc.clock import boottime
from gpu.gpu_fakes import (
    clean_environ,
    eventually,
    gpu,
    heard,
    known,
    line,
    rewrite,
    sampler_child,
    sampling,
    state,
)

Script = Callable[..., dict[str, str]]
A, B, C = (f"GPU-{letter * 8}" for letter in "abc")


@pytest.mark.parametrize(
    ("restriction", "expected"),
    [({"CUDA_VISIBLE_DEVICES": "2,0"}, {C: 3, A: 1}), ({"NVIDIA_VISIBLE_DEVICES": B}, {B: 2})],
)
def test_readings_go_to_the_devices_that_the_operator_shows_whatever_their_numbers(
    fake_nvml: Script, restriction: dict[str, str], expected: dict[str, int]
) -> None:
    host = (gpu("a", used_mib=1), gpu("b", used_mib=2), gpu("c", used_mib=3))
    environ = fake_nvml(*host, **restriction)
    with sampling(environ, detect(environ=environ)) as sampler:
        eventually(lambda: known(sampler, *expected))
        assert {uuid: r.used_mb for uuid, r in sampler.readings().items()} == expected


def test_mig_instances_are_read_by_their_own_name(fake_nvml: Script) -> None:
    instances = [line("mig", uuid=f"MIG-{n}", name="1g", total_mib=9000, used_mib=n) for n in (1, 2)]
    environ = fake_nvml(gpu("a", mig=1), *instances, gpu("b", used_mib=3), CUDA_VISIBLE_DEVICES="MIG-2,1")
    with sampling(environ, detect(environ=environ)) as sampler:
        eventually(lambda: known(sampler, "MIG-2", B))
        assert {uuid: r.used_mb for uuid, r in sampler.readings().items()} == {"MIG-2": 2, B: 3}
        rewrite(state(environ), gpu("a", mig=1, event="1:8:95"), *instances, gpu("b"))
        assert {event.uuid for event in eventually(lambda: heard(sampler, "xid"))} == {"MIG-2"}


def test_what_befalls_one_mig_instance_is_not_told_of_its_neighbour(fake_nvml: Script) -> None:
    instances = [line("mig", uuid=f"MIG-{n}", name="1g", total_mib=9000, instance=n) for n in (1, 2)]
    environ = fake_nvml(gpu("a", mig=1), *instances)
    with sampling(environ, detect(environ=environ), poll_s=5.0) as sampler:
        eventually(lambda: known(sampler, "MIG-1", "MIG-2"))
        rewrite(state(environ), gpu("a", mig=1, event="1:8:48:2"), *instances)
        (error,) = eventually(lambda: heard(sampler, "xid"))
        assert (error.uuid, error.code) == ("MIG-2", 48)


def test_a_curve_of_utilisation_becomes_a_history_and_the_history_is_bounded(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", util=0))
    with sampling(environ, poll_s=0.1, history_s=1.0) as sampler:
        for util in (10, 60, 0):
            rewrite(state(environ), gpu("a", util=util))
            eventually(lambda util=util: util in {r.gpu_pct for r in sampler.readings().values()})
        curve = [reading.gpu_pct for reading in sampler.history(A, 0)]
        assert [pct for pct in dict.fromkeys(curve) if pct] == [10, 60]
        last = sampler.readings()[A]
        assert last.at <= boottime()
        assert sampler.history(A, last.at) == []
        eventually(lambda: len(sampler.history(A, 0)) == 10)
        newest = sampler.readings()[A].at
        eventually(lambda: sampler.readings()[A].at > newest)
        assert len(sampler.history(A, 0)) == 10


def test_watched_devices_and_own_processes_change_without_a_restart(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", pids=f"{os.getpid()}:7"), gpu("b"))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A, B))
        pid = eventually(sampler_child).pid
        sampler.watch([A], lambda: [os.getpid()])
        assert set(sampler.readings()) == {A}
        eventually(lambda: sampler.readings()[A].own_mb == 7)
        eventually(sampler_child)
        assert eventually(sampler_child).pid == pid


@pytest.mark.parametrize("read_before", [False, True])
def test_a_device_that_is_watched_later_has_its_full_time_from_then(
    read_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(sampler_state, "boottime", lambda: now[0])
    known = SamplerState([A, B], poll_s=1.0, late_s=5.0, start_s=30.0, history_s=60.0)
    if read_before:
        known.take({"reading": DeviceReading(B, 1000.0, gpu_pct=1.0).as_json()})
    known.watch([A], tuple)
    now[0] += 100
    known.watch([A, B], tuple)
    patience_s = 7.0 if read_before else 30.0
    now[0] += patience_s - 1
    known.watch([A, B], tuple)
    known.mark_stale("timeout", 1000.0, running=True)
    assert known.doubtful() == {A}
    now[0] += 2
    known.mark_stale("timeout", 1000.0, running=True)
    assert known.doubtful() == {A, B}


def test_a_device_is_doubtful_until_a_reading_has_a_value() -> None:
    known = SamplerState([A], poll_s=1.0, late_s=5.0, start_s=30.0, history_s=60.0)
    known.hang(A, "temp", False)
    known.take({"reading": DeviceReading.nothing(A, boottime(), "timeout").as_json()})
    assert known.doubtful() == {A}
    known.take({"reading": DeviceReading(A, boottime(), gpu_pct=1.0).as_json()})
    assert known.doubtful() == frozenset()


def test_a_caller_that_cannot_name_its_processes_does_not_blind_the_sampler(fake_nvml: Script) -> None:
    with sampling(fake_nvml(gpu("a"))) as sampler:
        sampler.watch([A], lambda: 1 / 0)  # type: ignore[return-value]
        eventually(lambda: known(sampler, A))


@pytest.mark.parametrize(
    ("event", "kind", "code", "fatal"),
    [
        ("8:79", "xid", 79, True),
        ("8:13", "xid", 13, False),
        ("2:0", "ecc", 0x2, True),
        ("4096:0", "poison", 0x1000, False),
        ("8192:0", "poison", 0x2000, True),
        ("16384:0", "unavailable", None, True),
    ],
)
def test_the_drivers_events_arrive_within_a_second(
    fake_nvml: Script, event: str, kind: str, code: int | None, fatal: bool
) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    # Rounds are far apart: what arrives did not wait for the next one.
    with sampling(environ, poll_s=5.0) as sampler:
        eventually(lambda: known(sampler, A, B))
        before = boottime()
        rewrite(state(environ), gpu("a"), gpu("b", event=f"1:{event}"))
        (found,) = eventually(lambda: sampler.events(0))
        assert found.at - before < 1.0
        assert (found.uuid, found.kind, found.code, found.fatal) == (B, kind, code, fatal)
        assert sampler.events(found.at) == []


def test_a_device_that_comes_back_under_another_handle_is_heard_again(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), gpu("a", lost=1))
        eventually(lambda: heard(sampler, "lost"))
        rewrite(state(environ), gpu("b"), gpu("a"))
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), gpu("b"), gpu("a", event="1:8:13"))
        (xid,) = eventually(lambda: heard(sampler, "xid"))
        assert (xid.uuid, xid.code) == (A, 13)


def test_after_an_event_the_device_is_read_at_once(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", recovery=0))
    with sampling(environ, poll_s=30.0, deadline_s=60.0) as sampler:
        eventually(lambda: known(sampler, A))
        # 154: the recovery action has changed. It says so, and the field says to what.
        rewrite(state(environ), gpu("a", recovery=1, event="1:8:154"))
        (recovery,) = eventually(lambda: heard(sampler, "recovery"), 5.0)
        assert (recovery.code, recovery.fatal, recovery.bucket) == (1, True, "reset_gpu")


def test_without_events_the_rounds_find_what_befalls_a_device(fake_nvml: Script) -> None:
    deaf = {"fail": "events:3"}
    environ = fake_nvml(gpu("a", **deaf, ecc=5), gpu("b", **deaf))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A, B))
        assert sampler.events(0) == []
        rewrite(state(environ), gpu("a", **deaf, ecc=7), gpu("b", lost=1), line("driver"))
        eventually(lambda: heard(sampler, "ecc") and heard(sampler, "lost"))
        rewrite(state(environ), gpu("a", fail="handle:16;temp:16", ecc=7), gpu("b"), line("driver", count=1))
        eventually(lambda: heard(sampler, "reset_required") and heard(sampler, "count"))
    found = {e.kind: (e.uuid, e.code, e.fatal) for e in sampler.events(0)}
    assert found == {
        "ecc": (A, 2, True),
        "lost": (B, 15, True),
        "reset_required": (A, 16, True),
        "count": (None, 1, False),
    }


def test_a_device_that_drops_out_of_the_list_is_lost_and_its_neighbour_is_read_on(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A, B))
        rewrite(state(environ), gpu("a", fail="handle:6", lost=1), gpu("b", used_mib=9))
        (lost,) = eventually(lambda: heard(sampler, "lost"))
        assert (lost.uuid, lost.fatal) == (A, True)
        eventually(lambda: sampler.readings()[B].used_mb == 9)
        assert sampler.readings()[A].gpu_pct is None


def test_a_host_without_a_driver_has_no_readings_and_no_thread() -> None:
    for found in (detect("none"), detect("1x1GiB")):
        sampler = SamplerProcess(found, clean_environ())
        sampler.watch(["x"], tuple)
        sampler.start()
        assert (sampler.readings(), sampler.history("x", 0), sampler.events(0)) == ({}, [], [])
        assert (sampler.pids(), sampler.doubtful()) == ([], frozenset())
        assert "gangq-sampler" not in {thread.name for thread in threading.enumerate()}
        sampler.stop()


def _on_cpu_s(task: str) -> float:
    return int(Path(f"/proc/{task}/schedstat").read_text().split()[0]) / 1e9


def test_a_round_costs_less_than_five_milliseconds_of_a_core(fake_nvml: Script) -> None:
    with sampling(fake_nvml(gpu("a", samples="1/2/3", pids=f"{os.getpid()}:1")), poll_s=0.25) as sampler:
        sampler.watch([A], lambda: [os.getpid()])
        eventually(lambda: len(sampler.history(A, 0)) >= 2)
        thread = next(t for t in threading.enumerate() if t.name == "gangq-sampler")
        tasks = (str(eventually(sampler_child).pid), f"self/task/{thread.native_id}")
        before, rounds = [_on_cpu_s(task) for task in tasks], len(sampler.history(A, 0))
        eventually(lambda: len(sampler.history(A, 0)) >= rounds + 5)
        spent = [_on_cpu_s(task) - was for task, was in zip(tasks, before, strict=True)]
        assert sum(spent) / (len(sampler.history(A, 0)) - rounds) < 0.005, spent


def test_an_unknown_reading_is_unknown_in_every_value() -> None:
    reading = DeviceReading.nothing(A, 1.0, "timeout")
    assert set(reading.unknown) == set(VALUES)
    assert all(getattr(reading, name) in (None, ()) for name in VALUES)
