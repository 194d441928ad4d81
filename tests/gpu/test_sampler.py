"""The expendable sampling process and its owner: real processes, and drivers that hang, crash and lose cards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from gpu_fakes import clean_environ, eventually, gpu, line, rewrite, sampling

from gangq.gpu import DeviceEvent, DeviceReading, HostSampler, SamplerProcess, detect, device_sampler
from gangq.gpu.reading import VALUES, boottime

Script = Callable[..., dict[str, str]]
A, B, C = (f"GPU-{letter * 8}" for letter in "abc")


def state(environ: dict[str, str]) -> Path:
    return Path(environ["FAKE_NVML"])


def child() -> psutil.Process | None:
    """The sampling process of this process, if it has one."""
    for each in psutil.Process().children():
        try:
            if "gangq.gpu.sampling" in each.cmdline() and each.status() != psutil.STATUS_ZOMBIE:
                return each
        except psutil.NoSuchProcess:
            continue
    return None


def known(sampler: SamplerProcess, *uuids: str) -> bool:
    """Say whether the latest reading of each device has values."""
    readings = sampler.readings()
    return all(uuid in readings and len(readings[uuid].unknown) < len(VALUES) for uuid in uuids)


def heard(sampler: SamplerProcess, kind: str, *, fatal: bool | None = None) -> list[DeviceEvent]:
    return [e for e in sampler.events(0) if e.kind == kind and fatal in (None, e.fatal)]


@pytest.mark.parametrize(
    ("restriction", "expected"),
    [({"CUDA_VISIBLE_DEVICES": "2,0"}, {C: 3, A: 1}), ({"NVIDIA_VISIBLE_DEVICES": B}, {B: 2})],
)
def test_readings_go_to_the_devices_that_the_operator_shows_whatever_their_numbers(
    fake_nvml: Script, restriction: dict[str, str], expected: dict[str, int]
) -> None:
    host = (gpu("a", used_mib=1), gpu("b", used_mib=2), gpu("c", used_mib=3))
    with sampling(fake_nvml(*host, **restriction)) as sampler:
        eventually(lambda: known(sampler, *expected))
        assert {uuid: r.used_mb for uuid, r in sampler.readings().items()} == expected


def test_mig_instances_are_read_by_their_own_name(fake_nvml: Script) -> None:
    instances = [line("mig", uuid=f"MIG-{n}", name="1g", total_mib=9000, used_mib=n) for n in (1, 2)]
    environ = fake_nvml(gpu("a", mig=1), *instances, gpu("b", used_mib=3), CUDA_VISIBLE_DEVICES="MIG-2,1")
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, "MIG-2", B))
        assert {uuid: r.used_mb for uuid, r in sampler.readings().items()} == {"MIG-2": 2, B: 3}
        rewrite(state(environ), gpu("a", mig=1, event="1:8:95"), *instances, gpu("b"))
        assert {event.uuid for event in eventually(lambda: heard(sampler, "xid"))} == {"MIG-2"}


def test_a_curve_of_utilisation_becomes_a_history_and_the_history_is_bounded(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", util=0))
    with sampling(environ, history_s=2.0) as sampler:
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
        pid = eventually(child).pid
        sampler.watch([A], lambda: [os.getpid()])
        assert set(sampler.readings()) == {A}
        eventually(lambda: sampler.readings()[A].own_mb == 7)
        eventually(child)
        assert eventually(child).pid == pid


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


@pytest.mark.parametrize(
    "script",
    [{"hang": "util"}, {"hang": "fields"}, {"hang": "handle", "fail": "temp:15"}],
    ids=["in a reading", "at its end", "while a lost device is looked for"],
)
def test_a_call_that_hangs_names_its_device_and_the_others_are_read_on(
    fake_nvml: Script, script: dict[str, str]
) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ, deadline_s=0.5) as sampler:
        eventually(lambda: known(sampler, A, B))
        first = eventually(child)
        rewrite(state(environ), gpu("a", **script), gpu("b", used_mib=9))
        asked = time.monotonic()
        (hang,) = eventually(lambda: heard(sampler, "driver_hang"))
        assert (hang.uuid, hang.fatal, hang.bucket) == (A, False, "driver")
        assert time.monotonic() - asked < 0.5 + 1.5
        assert sampler.readings()[A].unknown["gpu_pct"] == "timeout"
        assert not first.is_running()
        # Again on the same device: now it is no accident.
        (again,) = eventually(lambda: heard(sampler, "driver_hang", fatal=True))
        assert again.uuid == A
        # And from then on it is left alone, for its neighbours' sake.
        eventually(lambda: known(sampler, B) and sampler.readings()[B].used_mb == 9)
        assert len(heard(sampler, "driver_hang")) == 2


def test_hangs_on_two_devices_are_two_accidents(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ, deadline_s=0.4) as sampler:
        eventually(lambda: known(sampler, A, B))
        rewrite(state(environ), gpu("a", hang="temp"), gpu("b"))
        eventually(lambda: len(heard(sampler, "driver_hang")) == 1)
        rewrite(state(environ), gpu("a"), gpu("b", hang="temp"))
        eventually(lambda: len(heard(sampler, "driver_hang")) == 2)
        rewrite(state(environ), gpu("a"), gpu("b"))
        eventually(lambda: known(sampler, A, B))
        assert [(e.uuid, e.fatal) for e in heard(sampler, "driver_hang")] == [(A, False), (B, False)]


def test_a_driver_that_hangs_while_it_is_opened_or_waited_for_is_blamed_as_a_whole(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    found = detect(environ=environ)
    rewrite(state(environ), line("driver", hang="init"), gpu("a"))
    sampler = SamplerProcess(found, environ, 0.2, 0.5, start_s=1.0)
    sampler.start()
    try:
        (hang,) = eventually(lambda: heard(sampler, "driver_hang"))
        assert (hang.uuid, hang.fatal) == (None, False)
        assert sampler.readings()[A].unknown["used_mb"] == "timeout"
    finally:
        sampler.stop()
    rewrite(state(environ), gpu("a"))
    with sampling(environ, deadline_s=0.5) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), gpu("a", hang="wait"))
        assert eventually(lambda: heard(sampler, "driver_hang"))[0].uuid is None


def test_a_process_that_survives_sigkill_is_fatal_left_behind_and_not_waited_for(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    spared: list[int] = []
    with sampling(environ, deadline_s=0.5, kill=lambda pid, _: spared.append(pid)) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), gpu("a", hang="temp"))
        (hang,) = eventually(lambda: heard(sampler, "driver_hang"))
        assert (hang.uuid, hang.fatal, hang.bucket) == (A, True, "reboot")
        assert psutil.pid_exists(spared[0])
        looked = time.monotonic()
        for _ in range(100):
            sampler.readings(), sampler.events(0), sampler.history(A, 0)
        assert time.monotonic() - looked < 0.5
        rewrite(state(environ), gpu("a"))
        for pid in spared:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: known(sampler, A))
        last = eventually(child)
        sampler._kill = os.killpg
    reapers = [t for t in threading.enumerate() if t.name.startswith("gangq-reap-")]
    for reaper in reapers:
        reaper.join(10)
    assert not last.is_running()


def test_a_process_that_dies_is_replaced_and_its_devices_are_unknown_meanwhile(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), line("driver", crash=1), gpu("a"))
        eventually(child).kill()
        eventually(lambda: not known(sampler, A))
        assert sampler.readings()[A].unknown["gpu_pct"].startswith("failed: the sampling process ended")
        # The next one is killed by the driver library itself.
        eventually(lambda: "signal 11" in sampler.readings()[A].unknown.get("gpu_pct", ""))
        rewrite(state(environ), gpu("a"))
        eventually(lambda: known(sampler, A))
        assert heard(sampler, "driver_hang") == []


def test_a_driver_that_cannot_be_opened_any_more_is_a_reason_in_every_reading(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    found = detect(environ=environ)
    rewrite(state(environ), line("driver", init=18), gpu("a"))
    sampler = SamplerProcess(found, environ, 0.2)
    sampler.start()
    try:
        reading = eventually(lambda: sampler.readings().get(A))
        assert "upgraded under a running system" in reading.unknown["gpu_pct"]
    finally:
        sampler.stop()


def test_a_process_without_a_single_value_makes_room_for_a_fresh_one(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    with sampling(environ, poll_s=0.05) as sampler:
        eventually(lambda: known(sampler, A))
        first = eventually(child).pid
        rewrite(state(environ), gpu("a", fail="all:1"))
        eventually(
            lambda: "not one" in (r := sampler.readings()[A].unknown.get("gpu_pct", "")) or "single" in r
        )
        rewrite(state(environ), gpu("a"))
        eventually(lambda: known(sampler, A))
        assert eventually(child).pid != first


OWNER = """
import json, sys, time
from gangq.gpu import SamplerProcess, Detection, Device
found = Detection(tuple(Device(**d) for d in json.loads(sys.argv[1])), "nvml")
sampler = SamplerProcess(found, None, 0.2, 1.0)
sampler.start()
while True:
    values = {u: len(r.unknown) for u, r in sampler.readings().items()}
    print(json.dumps([values, [e.kind for e in sampler.events(0)]]), flush=True)
    time.sleep(0.05)
"""


def owner(environ: dict[str, str]) -> subprocess.Popen[str]:
    devices = json.dumps([device.as_json() for device in detect(environ=environ).devices])
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, devices], env=environ, stdout=subprocess.PIPE, text=True
    )


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    found = eventually(lambda: psutil.Process(process.pid).children())
    return found[0]


def test_the_process_dies_with_its_owner_even_inside_a_driver_call(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    process = owner(environ)
    try:
        rewrite(state(environ), gpu("a", hang="temp"))
        orphan = child_of(process)
    finally:
        process.kill()
        process.communicate()
    orphan.wait(10)


def test_an_owner_that_was_stopped_takes_the_silence_for_its_own(fake_nvml: Script) -> None:
    process = owner(fake_nvml(gpu("a")))
    assert process.stdout is not None
    try:
        while json.loads(process.stdout.readline())[0].get(A, len(VALUES)) == len(VALUES):
            pass
        sampler = child_of(process)
        sampler.suspend()
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        # Longer than the deadline and the lateness that is forgiven; nothing else can show that it passed.
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        sampler.resume()
        said = [json.loads(process.stdout.readline()) for _ in range(40)]
        assert said[-1] == [{A: 1}, []]
        assert sampler.is_running()
        assert child_of(process).pid == sampler.pid
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_somebody_stopped_is_replaced_without_blaming_the_driver(fake_nvml: Script) -> None:
    with sampling(fake_nvml(gpu("a")), deadline_s=0.5) as sampler:
        eventually(lambda: known(sampler, A))
        stopped = eventually(child)
        stopped.suspend()
        eventually(lambda: (c := child()) is not None and c.pid != stopped.pid)
        eventually(lambda: known(sampler, A))
        assert sampler.events(0) == []


def test_stop_is_quick_in_the_middle_of_a_hang_and_start_begins_anew(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", hang="temp"))
    with sampling(environ, deadline_s=30.0) as sampler:
        eventually(child)
        began = time.monotonic()
        sampler.stop()
        assert time.monotonic() - began < 3
        assert child() is None
        assert not [t for t in threading.enumerate() if t.name == "gangq-sampler"]
        rewrite(state(environ), gpu("a"))
        sampler.start()
        eventually(lambda: known(sampler, A))


def test_a_host_without_a_driver_gets_the_sampler_that_says_nothing() -> None:
    for found in (detect("none"), detect("1x1GiB")):
        sampler = device_sampler(found, clean_environ())
        assert isinstance(sampler, HostSampler)
        sampler.watch(["x"], tuple)
        sampler.start()
        assert (sampler.readings(), sampler.history("x", 0), sampler.events(0)) == ({}, [], [])
        sampler.stop()


def _on_cpu_s(task: str) -> float:
    return int(Path(f"/proc/{task}/schedstat").read_text().split()[0]) / 1e9


def test_a_round_a_second_costs_less_than_half_a_percent_of_a_core(fake_nvml: Script) -> None:
    with sampling(fake_nvml(gpu("a", samples="1/2/3", pids=f"{os.getpid()}:1")), poll_s=1.0) as sampler:
        sampler.watch([A], lambda: [os.getpid()])
        eventually(lambda: len(sampler.history(A, 0)) >= 2)
        thread = next(t for t in threading.enumerate() if t.name == "gangq-sampler")
        tasks = (str(eventually(child).pid), f"self/task/{thread.native_id}")
        began, before = time.monotonic(), [_on_cpu_s(task) for task in tasks]
        rounds = len(sampler.history(A, 0))
        eventually(lambda: len(sampler.history(A, 0)) >= rounds + 4)
        spent = [_on_cpu_s(task) - was for task, was in zip(tasks, before, strict=True)]
        share = sum(spent) / (time.monotonic() - began)
        assert share < 0.005, spent


def test_an_unknown_reading_is_unknown_in_every_value() -> None:
    reading = DeviceReading.nothing(A, 1.0, "timeout")
    assert set(reading.unknown) == set(VALUES)
    assert all(getattr(reading, name) in (None, ()) for name in VALUES)
