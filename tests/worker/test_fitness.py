"""Who must not start: each refusal, what is not one, and that the message says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq.cli.group import exit_code
from gangq.client import Client
from gangq.errors import DriverUnavailable, InvalidInput, Unfit, WorkerNameTaken
from gangq.gpu import Detection, Device, SamplerProcess
from gangq.gpu.reading import DeviceReading
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity, process_identity
from gangq.watchdogs import ExitCode
from gangq.worker import fitness, host_record
from gangq.worker.options import Lanes, WorkerOptions
from gangq.worker.registration import register
from worker.controls import control_of

OPTIONS = WorkerOptions(name="w", host="h").resolved()


def cards(*numbers: int, source: str = "nvml", warnings: tuple[str, ...] = ()) -> Detection:
    devices = tuple(Device(n, f"GPU-{n}", 24576, "Card", source) for n in numbers)  # type: ignore[arg-type]
    return Detection(devices, source, warnings)  # type: ignore[arg-type]


class Readings(SamplerProcess):
    """A sampler whose readings follow a script: per round, the used memory of GPU-0 in MiB."""

    def __init__(self, *rounds: int | None) -> None:
        super().__init__(Detection((), None))
        self.rounds = list(rounds)
        self.started = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def readings(self) -> dict[str, DeviceReading]:
        used = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        return (
            {}
            if used is None
            else {"GPU-0": DeviceReading("GPU-0", 0.0, used_mb=used if used >= 0 else None)}
        )


def check(
    client: Client, detection: Detection, sampler: Readings | None = None, **environ: str
) -> list[float]:
    """Check; return how long it waited each time."""
    waits: list[float] = []
    fitness.check(
        client,
        OPTIONS,
        detection,
        environ,
        sampler_of=lambda *_: sampler or Readings(0),
        sleep=waits.append,
    )
    return waits


def registered(client: Client, detection: Detection, **more: Any) -> int:
    return client.register_worker(
        name="w",
        host=more.pop("host", "h"),
        queues=["default"],
        devices=[device.as_json() for device in detection.devices],
        **more,
    ).incarnation


def ended(client: Client, detection: Detection, **more: Any) -> int:
    incarnation = registered(client, detection, **more)
    client.retire_worker(incarnation=incarnation, final=True)
    return incarnation


def died(client: Client, detection: Detection, **more: Any) -> int:
    incarnation = registered(client, detection, **more)
    client.report_dead(worker="w", incarnation=incarnation, evidence={"by": "test"})
    return incarnation


def test_a_new_worker_and_one_that_came_back_whole_are_fit(client: Client) -> None:
    check(client, cards())
    check(client, cards(0, 1))
    ended(client, cards(0, 1))
    check(client, cards(0, 1))
    check(client, cards(0, 1, 2))


# -- devices missing -----------------------------------------------------------------------------------------


def test_one_that_sees_fewer_devices_than_the_last_time_is_refused(client: Client) -> None:
    ended(client, cards(0, 1, 2))
    with pytest.raises(
        Unfit, match=r"sees 2 devices, its predecessor .* saw 3 \(missing: GPU-1\).*--expect-gpus 2"
    ):
        check(client, cards(0, 2))


def test_exchanged_cards_are_as_good(client: Client) -> None:
    ended(client, cards(0, 1))
    check(client, cards(2, 3))


def test_the_operator_knows_better_than_the_last_time(client: Client) -> None:
    ended(client, cards(0, 1, 2))
    check(client, cards(0), GANGQ_EXPECT_GPUS="1")
    with pytest.raises(Unfit, match="sees 1 device, GANGQ_EXPECT_GPUS asks for 2"):
        check(client, cards(0), GANGQ_EXPECT_GPUS="2")
    with pytest.raises(InvalidInput, match="GANGQ_EXPECT_GPUS is 'many'"):
        check(client, cards(0), GANGQ_EXPECT_GPUS="many")


def test_what_was_declared_or_seen_by_another_host_counts_for_nothing(client: Client) -> None:
    ended(client, cards(0, 1, source="declared"))
    check(client, cards())
    ended(client, cards(0, 1), host="elsewhere")
    check(client, cards())


def test_devices_that_are_declared_now_are_not_compared(client: Client) -> None:
    ended(client, cards(0, 1))
    fitness.check(client, replace(OPTIONS, devices="none"), cards(), {})


# -- the driver ----------------------------------------------------------------------------------------------


def test_a_driver_whose_parts_do_not_fit_is_refused(client: Client) -> None:
    said = "libnvidia-ml.so.1 cannot start (Driver/library version mismatch): reload the nvidia modules"
    with pytest.raises(Unfit, match="reload the nvidia modules"):
        check(client, cards(warnings=(said,)))
    check(client, cards(0, warnings=("a card is slow",)))


class Driver:
    """Its answers to one probe after the other, the last one for ever; time passes only while a worker waits."""

    def __init__(self, *answers: Detection) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.now = 0.0
        self.stop_at = float("inf")

    def devices(self) -> Detection:
        return fitness.devices_of(OPTIONS, {}, ask=self.answer, pause=self.pause, clock=lambda: self.now)

    def answer(self, *_: Any, **__: Any) -> Detection:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def pause(self, seconds: float) -> bool:
        self.now += seconds
        return self.now >= self.stop_at


SILENT = Detection((), None, ("libnvidia-ml.so.1 did not answer within 10 s",), silent=True)


def test_a_driver_that_does_not_answer_is_asked_again_until_it_does(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    ended(client, cards(0))
    driver = Driver(SILENT, SILENT, SILENT, cards(0))
    check(client, driver.devices())
    assert driver.asked == 4
    told = [record for record in caplog.records if record.msg == "driver_silent"]
    assert len(told) == 3
    assert "libnvidia-ml.so.1 did not answer" in told[0].__dict__["advice"]


def test_one_whose_driver_is_silent_for_minutes_ends_with_a_code_that_is_started_again() -> None:
    driver = Driver(SILENT)
    with pytest.raises(DriverUnavailable, match=r"waited 300 s.*did not answer.*--devices none") as raised:
        driver.devices()
    assert driver.now == fitness.DRIVER_WAIT_S
    code = exit_code(raised.value)
    assert code not in [0, *(known for known in ExitCode if not known.restart)]
    # The unit allows so many starts; its worker must never use them up this way.
    unit = (Path(__file__).parents[2] / "systemd" / "gangq-worker@.service").read_text()
    (burst,) = re.findall(r"^StartLimitBurst=(\d+)$", unit, re.MULTILINE)
    assert "StartLimitIntervalSec=1h\n" in unit
    assert int(burst) / 2 > 3600 / fitness.DRIVER_WAIT_S


def test_a_probe_that_is_stuck_in_the_kernel_is_waited_for_and_not_joined_by_another() -> None:
    with sleeper("stuck") as entry:
        driver = Driver(replace(SILENT, stuck=entry), cards(0))
        with pytest.raises(Unfit, match=rf"reboot.*{entry.pid}"):
            driver.devices()
        assert driver.asked == 1
    driver = Driver(replace(SILENT, stuck=entry), cards(0))
    assert driver.devices() == cards(0)


def test_one_that_is_stopped_while_it_waits_for_its_driver_waits_no_longer() -> None:
    driver = Driver(SILENT)
    driver.stop_at = 6
    assert driver.devices() is SILENT
    assert driver.asked == 2


# -- quarantine ----------------------------------------------------------------------------------------------


def test_one_all_of_whose_devices_are_in_quarantine_is_refused(client: Client) -> None:
    ended(client, cards(0, 1))
    client.quarantine(device_uuid="GPU-0", reason="Xid 79")
    check(client, cards(0, 1))
    client.quarantine(device_uuid="GPU-1", reason="Xid 48")
    with pytest.raises(Unfit, match=r"GPU-0: Xid 79; GPU-1: Xid 48.*gangq unquarantine"):
        check(client, cards(0, 1))
    client.unquarantine(device_uuid="GPU-1")
    check(client, cards(0, 1))


def test_devices_withheld_until_a_tripped_worker_is_gone_are_no_reason(client: Client) -> None:
    incarnation = registered(client, cards(0))
    client.submit(task="t", gpus=1)
    client.tick(force=True)
    (claim,) = client.claim(incarnation=incarnation)
    client.trip(
        incarnation=incarnation,
        job_id=claim.job_id,
        token=claim.token,
        code=76,
        error={"type": "Stalled"},
        exit_in_s=5,
    )
    assert [(d.state, d.health) for d in client.devices()] == [("quarantined", "exiting")]
    check(client, cards(0))


# -- what nothing could kill ---------------------------------------------------------------------------------


def stuck(client: Client, boot_id: str | None) -> None:
    incarnation = registered(client, cards(), boot_id=boot_id)
    client.report_stuck(worker="w", incarnation=incarnation, evidence={"pid": 99})


def test_beside_an_unkillable_predecessor_it_does_not_start(client: Client) -> None:
    stuck(client, HostIdentity.here().boot_id)
    with pytest.raises(Unfit, match=r"process 99 cannot be killed.*Reboot the host"):
        check(client, cards())
    client.unquarantine(worker="w")
    check(client, cards())


def test_after_a_reboot_it_may_start(client: Client) -> None:
    stuck(client, "another-boot")
    check(client, cards())


# -- device memory -------------------------------------------------------------------------------------------


def test_after_a_death_it_waits_for_the_memory_of_its_devices(client: Client) -> None:
    died(client, cards(0))
    sampler = Readings(20000, 20000, 9000, 400)
    assert len(check(client, cards(0), sampler)) == 3
    assert (sampler.started, sampler.stopped) == (1, 1)


def test_memory_that_stays_taken_is_a_refusal(client: Client) -> None:
    died(client, cards(0))
    sampler = Readings(20000)
    with pytest.raises(Unfit, match=r"7 s after .* GPU-0 \(20000 MiB\).*GANGQ_DEVICE_WAIT_S=0"):
        check(client, cards(0), sampler, GANGQ_DEVICE_WAIT_S="7")
    assert sampler.stopped == 1
    assert check(client, cards(0), sampler, GANGQ_DEVICE_WAIT_S="0") == []


def test_after_a_clean_end_nobody_looks(client: Client) -> None:
    ended(client, cards(0))
    sampler = Readings(20000)
    check(client, cards(0), sampler)
    assert sampler.started == 0


def test_what_the_driver_does_not_say_is_no_refusal(client: Client) -> None:
    died(client, cards(0))
    assert check(client, cards(0), Readings(-1)) == []
    # One that never answers is waited for as long as a sampler needs to begin.
    assert 0 < sum(check(client, cards(0), Readings(None))) <= 11


def test_a_device_that_another_live_worker_offers_may_be_in_use(client: Client) -> None:
    died(client, cards(0))
    client.register_worker(
        name="other", host="h", queues=["default"], devices=[d.as_json() for d in cards(0).devices]
    )
    assert check(client, cards(0), Readings(20000)) == []


# -- registering beside a predecessor ------------------------------------------------------------------------


@contextmanager
def sleeper(mark: str) -> Iterator[procfs.Stat]:
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "GANGQ_MARK": mark})
    try:
        while (entry := procfs.stat(process.pid)) is not None and (entry.comm, entry.state) != ("sleep", "S"):
            time.sleep(0.01)
        assert entry is not None
        yield entry
    finally:
        process.kill()
        process.wait()


def identity(mark: str, pids: Sequence[int] = ()) -> dict[str, Any]:
    process = process_identity(pids[0] if pids else os.getpid())
    gone = replace(process, pid=2**22 - 1) if not pids else process
    return {"mark": mark, "host": asdict(HostIdentity.here()), "process": asdict(gone)}


def on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """The predecessor with this mark has described itself on this host, and has ended since."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / f"{host_record.DIRECTORY_PREFIX}{mark}"
    directory.mkdir(mode=0o700)
    host_record.write(directory, "w", mark, replace(process_identity(os.getpid()), pid=2**22 - 1))


def registration(client: Client, tmp_path: Path) -> Any:
    what = {"lanes": Lanes(1, 1, "light"), "tasks": [], "task_options": {}}
    return register(client, control_of(client), OPTIONS, **what, detection=cards(), directory=tmp_path)


def test_a_predecessor_that_tripped_is_proven_dead_before_registering(client: Client, tmp_path: Path) -> None:
    incarnation = registered(client, cards(0), identity=identity("gone"))
    job = client.submit(task="t", gpus=1)[0]
    client.tick(force=True)
    (claim,) = client.claim(incarnation=incarnation)
    error = {"type": "Stalled"}
    client.trip(incarnation=incarnation, job_id=job, token=claim.token, code=76, error=error, exit_in_s=300)
    assert client.job(id=job).state == "scheduled"
    registration(client, tmp_path)
    assert client.unproven(worker="w") == []
    assert client.job(id=job).state == "pending"
    assert [device.health for device in client.devices()] == ["ok"]


def test_what_a_tripped_predecessor_left_is_killed(client: Client, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(procfs, "LET_END_S", 0.2)
    on_record(tmp_path, monkeypatch, "left")
    with sleeper("left") as left:
        incarnation = registered(client, cards(0), identity=identity("left", [left.pid]))
        job = client.submit(task="t", gpus=1)[0]
        client.tick(force=True)
        (claim,) = client.claim(incarnation=incarnation)
        client.trip(
            incarnation=incarnation,
            job_id=job,
            token=claim.token,
            code=80,
            error={"type": "Frozen"},
            exit_in_s=0.1,
        )
        registration(client, tmp_path)
        assert procfs.same(left) is None


def test_processes_that_cannot_be_ended_are_a_refusal(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "LET_END_S", 0.2)
    monkeypatch.setattr("gangq.worker.predecessor._KILL_S", 0.2)
    # As those of another user are to somebody who is not root.
    monkeypatch.setattr(procfs, "strike", lambda targets: targets)
    on_record(tmp_path, monkeypatch, "left")
    with sleeper("left") as left:
        registered(client, cards(), identity=identity("left"), boot_id=HostIdentity.here().boot_id)
        with pytest.raises(Unfit, match=rf"cannot end \({left.pid}: sleep, state S\).*another user"):
            registration(client, tmp_path)


def test_a_live_worker_of_the_name_is_left_alone(client: Client, tmp_path: Path) -> None:
    with sleeper("alive") as alive:
        registered(client, cards(), identity=identity("alive", [alive.pid]))
        with pytest.raises(WorkerNameTaken):
            registration(client, tmp_path)
        assert procfs.same(alive) is not None


def test_a_worker_says_where_it_runs(
    client: Client, tmp_path: Path, db: psycopg.Connection[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangq.worker.registration.service_unit", lambda: {"unit": "w@0.service"})
    registration(client, tmp_path)
    (last,) = client.predecessor(worker="w")
    assert last.identity["unit"] == "w@0.service"
