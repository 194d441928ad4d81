"""Drivers that hang, crash and never come back, and owners that are stopped or killed: the sampler outlives all."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gangq.gpu import SamplerProcess
from gangq.gpu.current_call import Call, CurrentCall
from gangq.gpu.reading import VALUES
from gangq.gpu.sampling_child import SamplingChild
from gangq.proc import killing
from gpu.gpu_fakes import (
    eventually,
    gpu,
    heard,
    known,
    line,
    rewrite,
    sampler_child,
    sampling,
    state,
    whole_cards,
)

Script = Callable[..., dict[str, str]]
A, B = (f"GPU-{letter * 8}" for letter in "ab")


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
        first = eventually(sampler_child)
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
        # The neighbour had its turn in between: whoever hung goes last.
        assert [r for r in sampler.history(B, hang.at) if r.at < again.at and r.used_mb == 9]
        # And from then on it is left alone, for its neighbours' sake.
        eventually(lambda: known(sampler, B) and sampler.readings()[B].used_mb == 9)
        assert len(heard(sampler, "driver_hang")) == 2


@pytest.mark.parametrize(("silent_s", "hangs"), [(29.0, False), (31.5, True)])
def test_a_driver_call_of_a_worker_has_30_seconds(fake_nvml: Script, silent_s: float, hangs: bool) -> None:
    # Made as a worker makes it. The process is a real one, whose silence is put back.
    sampler = SamplerProcess(whole_cards(fake_nvml(gpu("a"))), fake_nvml(gpu("a")))
    child = SamplingChild.start("nvml", 1.0, fake_nvml(gpu("a")), time.monotonic() - silent_s)
    child.call.read = lambda: Call(0.0, A, "read", "temp")
    try:
        sampler._judge_silence(child)
        assert (child.process.poll() is not None) == hangs
        assert len(heard(sampler, "driver_hang")) == hangs
    finally:
        if child.process.poll() is None:
            child.end()


def test_a_device_that_hung_twice_is_left_alone_and_its_silence_is_no_third_hang(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", hang="temp"))
    with sampling(environ, poll_s=0.1, deadline_s=0.3, start_s=1.0) as sampler:
        eventually(lambda: len(heard(sampler, "driver_hang")) == 2)
        readings = len(sampler.history(A, 0))
        # As long as opening a driver may take, and more.
        eventually(lambda: len(sampler.history(A, 0)) >= readings + 11)
        assert len(heard(sampler, "driver_hang")) == 2
        assert sampler.pids() == []


def test_a_driver_whose_every_call_is_slow_is_doubtful_and_never_at_fault(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ, deadline_s=1.5) as sampler:
        eventually(lambda: known(sampler, A, B))
        assert sampler.doubtful() == frozenset()
        # A whole reading takes longer than one call may.
        rewrite(state(environ), gpu("a", slow_ms=300, used_mib=7), gpu("b"))
        eventually(lambda: sampler.doubtful() >= {A})
        asked = time.monotonic()
        eventually(lambda: [r for r in sampler.history(A, 0) if r.used_mb == 7], 30)
        assert time.monotonic() - asked > 0.5
        assert A in sampler.doubtful(), "it answered, and too late"
        eventually(lambda: len([r for r in sampler.history(A, 0) if r.used_mb == 7]) >= 2, 30)
        assert heard(sampler, "driver_hang") == []
        rewrite(state(environ), gpu("a"), gpu("b"))
        eventually(lambda: sampler.doubtful() == frozenset(), 30)


def test_a_call_that_hangs_in_one_process_and_not_in_the_next_is_no_fault(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    with sampling(environ, deadline_s=0.7) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), gpu("a", hang="temp"))
        eventually(lambda: Path(f"{state(environ)}.hung").exists())
        rewrite(state(environ), gpu("a"))
        (hang,) = eventually(lambda: heard(sampler, "driver_hang"))
        assert not hang.fatal
        assert A in sampler.doubtful()
        eventually(lambda: known(sampler, A) and not sampler.doubtful())
        rewrite(state(environ), gpu("a", hang="util"))
        eventually(lambda: len(heard(sampler, "driver_hang")) >= 2)
        # Of two calls that hung each did so once; now the second does it again.
        assert [event.fatal for event in heard(sampler, "driver_hang")[:2]] == [False, False]
        eventually(lambda: heard(sampler, "driver_hang", fatal=True), 30)


def test_hangs_on_two_devices_are_two_accidents(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ, deadline_s=0.5) as sampler:
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
    found = whole_cards(environ)
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


def test_a_process_that_survives_sigkill_is_fatal_left_behind_and_not_waited_for(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "DEATH_S", 0.2)
    environ = fake_nvml(gpu("a"))
    spared: list[int] = []
    with monkeypatch.context() as patch, sampling(environ, deadline_s=0.5) as sampler:
        patch.setattr(os, "killpg", lambda pid, _: spared.append(pid))
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
        last = eventually(sampler_child)
        patch.undo()
    reapers = [t for t in threading.enumerate() if t.name.startswith("gangq-reap-")]
    for reaper in reapers:
        reaper.join(10)
    assert not last.is_running()


def test_opening_a_driver_that_hangs_is_blamed_on_the_device_that_hung_before(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"), gpu("b"))
    with sampling(environ, deadline_s=0.5, start_s=1.0) as sampler:
        eventually(lambda: known(sampler, A, B))
        rewrite(state(environ), line("driver", hang="init"), gpu("a", hang="temp"), gpu("b"))
        eventually(lambda: len(heard(sampler, "driver_hang")) == 2)
        # It is another call that hangs, so that proves nothing yet.
        assert [(e.uuid, e.fatal) for e in heard(sampler, "driver_hang")] == [(A, False), (A, False)]
        # The second time that opening it hangs, it is no accident.
        eventually(lambda: len(heard(sampler, "driver_hang")) == 3)
        assert [(e.uuid, e.fatal) for e in heard(sampler, "driver_hang", fatal=True)] == [(A, True)]


def test_no_more_than_three_processes_are_left_in_the_kernel(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "DEATH_S", 0.1)
    spared: list[int] = []
    environ = fake_nvml(*(gpu(letter, hang="temp") for letter in "abcd"))
    sampler = SamplerProcess(whole_cards(environ), environ, 0.1, 0.2)
    monkeypatch.setattr(os, "killpg", lambda pid, _: spared.append(pid))
    sampler.start()
    try:
        eventually(lambda: len(heard(sampler, "driver_hang")) == 3)
        readings = len(sampler.history(A, 0))
        eventually(lambda: len(sampler.history(A, 0)) > readings + 8)
        assert (len(spared), len(heard(sampler, "driver_hang"))) == (3, 3)
        assert sorted(sampler.pids()) == sorted(spared)
    finally:
        sampler.stop()
        for pid in spared:
            # Its pipes are closed by now: it may have ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for reaper in [t for t in threading.enumerate() if t.name.startswith("gangq-reap-")]:
        reaper.join(10)


def test_the_process_ends_with_its_input_and_at_once_when_its_owner_is_already_gone(
    fake_nvml: Script,
) -> None:
    call = CurrentCall.create()
    for parent, stdin in ((os.getpid(), subprocess.DEVNULL), (os.getpid() + 1, subprocess.PIPE)):
        process = subprocess.Popen(
            [sys.executable, "-m", "gangq.gpu.sampling", "nvml", str(parent), "1", str(call.fd)],
            pass_fds=[call.fd],
            env=fake_nvml(gpu("a")),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # Not communicate(), which would close the input.
        assert process.wait(20) == 0
        assert process.communicate() == (b"", b"")
    call.close()


class Halfway(mmap.mmap):
    """Lets the other side act in the midst of reading or writing the text of a note."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def _once(self) -> None:
        act, self.act = self.act, lambda: None
        act()

    def __getitem__(self, key: Any) -> Any:
        self._once()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._once()


def test_a_call_is_never_read_with_the_time_of_the_one_before_it() -> None:
    """At the limit it would blame the device whose call has just begun."""
    owner = CurrentCall.create()
    child = CurrentCall(owner.fd)
    child.enter("read", A)
    child.begin("temp")
    first = owner.read().since
    owner._map = Halfway(owner.fd, 512)
    owner._map.act = lambda: child.enter("count", B)
    second = owner.read()
    assert (second.since > first, *second[1:]) == (True, B, "count", "count")
    seen: list[Call] = []
    child._map = Halfway(owner.fd, 512)
    child._map.act = lambda: seen.append(owner.read())
    child.begin("power")
    assert [(call.since > second.since, call.name) for call in seen] == [(True, "power")]
    assert owner.read() == seen[0]
    child._map.close()
    owner.close()


def test_a_python_built_for_an_old_c_library_samples_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    call = CurrentCall.create()
    call.enter("read", A)
    call.begin("temp")
    assert call.read()[1:] == (A, "read", "temp")
    call.close()


def test_why_a_process_ended_holds_what_it_printed_last() -> None:
    code = "import os; os.write(2, b'symbol lookup error: nvmlInit\\n'); os.abort()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)
    child = SamplingChild(process, CurrentCall.create(), 0.0)
    process.wait(20)
    assert child.lines(0.0) is None, "it has closed its side"
    assert child.end()
    assert "was killed by SIGABRT, last words 'symbol lookup error: nvmlInit'" in child.why_ended()


def test_a_process_that_closes_its_side_and_outlives_sigkill_is_a_failure_too(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose exit hangs in the driver: its pipes are closed by then."""
    monkeypatch.setattr(killing, "DEATH_S", 0.1)
    sampler = SamplerProcess(whole_cards(fake_nvml(gpu("a"))))
    code = "import os, time; os.close(1); time.sleep(600)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            child = SamplingChild(process, CurrentCall.create(), 0.0)
            with monkeypatch.context() as patch:
                patch.setattr(os, "killpg", lambda pid, _: None)
                sampler._ended(child)
            assert sampler.pids() == [process.pid]
            assert "SIGKILL does not end it" in sampler._why_not
            assert sampler._start_at > time.monotonic()
        finally:
            process.kill()


def test_a_process_that_dies_is_replaced_and_its_devices_are_unknown_meanwhile(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    with sampling(environ) as sampler:
        eventually(lambda: known(sampler, A))
        rewrite(state(environ), line("driver", crash=1), gpu("a"))
        eventually(sampler_child).kill()
        eventually(lambda: not known(sampler, A))
        assert sampler.readings()[A].unknown["gpu_pct"].startswith("failed: the sampling process ended")
        # The next one is killed by the driver library itself.
        eventually(lambda: "SIGSEGV" in sampler.readings()[A].unknown.get("gpu_pct", ""))
        rewrite(state(environ), gpu("a"))
        eventually(lambda: known(sampler, A))
        assert heard(sampler, "driver_hang") == []


def test_a_driver_that_cannot_be_opened_any_more_is_a_reason_in_every_reading(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a"))
    found = whole_cards(environ)
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
        first = eventually(sampler_child).pid
        rewrite(state(environ), gpu("a", fail="all:1"))
        eventually(lambda: "round after round" in sampler.readings()[A].unknown.get("gpu_pct", ""))
        rewrite(state(environ), gpu("a"))
        eventually(lambda: known(sampler, A))
        assert eventually(sampler_child).pid != first


OWNER = """
import json, sys, time
from gangq.gpu import SamplerProcess, Detection, Device
found = Detection(tuple(Device(**d) for d in json.loads(sys.argv[1])), "nvml")
sampler = SamplerProcess(found, None, 0.2, float(sys.argv[2]))
sampler.start()
while True:
    values = {u: len(r.unknown) for u, r in sampler.readings().items()}
    print(json.dumps([values, [e.kind for e in sampler.events(0)]]), flush=True)
    time.sleep(0.02)
"""


def owner(environ: dict[str, str], deadline_s: float) -> subprocess.Popen[str]:
    devices = json.dumps([device.as_json() for device in whole_cards(environ).devices])
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, devices, str(deadline_s)],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    found = eventually(lambda: psutil.Process(process.pid).children())
    return found[0]


def test_the_process_dies_with_its_owner_even_inside_a_driver_call(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", hang="temp"))
    process = owner(environ, 60.0)
    try:
        eventually(state(environ).with_name("nvml.txt.hung").exists)
        orphan = child_of(process)
    finally:
        process.kill()
        process.communicate()
    orphan.wait(10)


def test_an_owner_that_was_stopped_takes_the_silence_for_its_own(fake_nvml: Script) -> None:
    process = owner(fake_nvml(gpu("a")), 0.5)
    assert process.stdout is not None
    try:
        while json.loads(process.stdout.readline())[0].get(A, len(VALUES)) == len(VALUES):
            pass
        sampler = child_of(process)
        sampler.suspend()
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        # Longer than the deadline and the lateness that is forgiven; nothing else can show that it passed.
        time.sleep(1.5)
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
    with sampling(fake_nvml(gpu("a"))) as sampler:
        eventually(lambda: known(sampler, A))
        stopped = eventually(sampler_child)
        stopped.suspend()
        eventually(lambda: (c := sampler_child()) is not None and c.pid != stopped.pid)
        eventually(lambda: known(sampler, A))
        assert sampler.events(0) == []


def test_start_is_refused_while_a_former_thread_has_not_ended(
    fake_nvml: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killing, "DEATH_S", 0.1)
    asked, go_on = threading.Event(), threading.Event()

    def own_pids() -> list[int]:
        asked.set()
        go_on.wait()
        return []

    with sampling(fake_nvml(gpu("a"))) as sampler:
        sampler.watch([A], own_pids)
        assert asked.wait(20)
        sampler.stop()
        with pytest.raises(RuntimeError, match="has not ended"):
            sampler.start()
        go_on.set()
        sampler.stop()
        sampler.start()
        eventually(lambda: known(sampler, A))


def test_a_process_is_named_until_it_is_known_to_be_dead(fake_nvml: Script) -> None:
    sampler, named = SamplerProcess(whole_cards(fake_nvml(gpu("a")))), []

    def end(grace_s: float) -> bool:
        named.append(sampler.pids())
        return False

    child: Any = SimpleNamespace(process=SimpleNamespace(pid=4711), end=end, why_ended=lambda: "why")
    sampler._child = child
    sampler._ended(child)
    assert (named, sampler.pids()) == ([[4711]], [4711])


def test_stop_is_quick_in_the_middle_of_a_hang_and_start_begins_anew(fake_nvml: Script) -> None:
    environ = fake_nvml(gpu("a", hang="temp"))
    with sampling(environ, deadline_s=30.0) as sampler:
        eventually(sampler_child)
        began = time.monotonic()
        sampler.stop()
        assert time.monotonic() - began < 3
        assert sampler_child() is None
        assert not [t for t in threading.enumerate() if t.name == "gangq-sampler"]
        rewrite(state(environ), gpu("a"))
        sampler.start()
        eventually(lambda: known(sampler, A))
