"""Half an hour of hangs, crashes, faults and restarts of PostgreSQL on eight workers (``make soak``).

Whatever is injected is freed in time and told apart, nothing honest is stopped, every job is done once.
``GANGQ_SOAK_S`` makes it shorter.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq import schema
from gangq.client import Client
from gangq.embedded import Server
from gangq.errors import GangqError
from gpu.gpu_fakes import HERE as GPU_ROOM
from gpu.gpu_fakes import compile_library, gpu, rewrite
from process.machines import Machine
from worker.worker_process import eventually

SECONDS = float(os.environ.get("GANGQ_SOAK_S", "1800"))
WORKERS = 8
SILENCE_S = 6.0
STALL_S = 4.0
WINDOW_S = 25.0
BUDGET_S = 45.0
SLACK_S = 12.0
"""For two cores that start interpreters over and over."""

TROUBLE: dict[str, tuple[str, float]] = {
    # What it is to be called, and how long it may take from its beginning.
    "outruns": ("75", BUDGET_S),
    "stalls": ("76", 1.5 + STALL_S + 10),
    "spins": ("76", 1 + 10 * STALL_S),
    "wedges": ("78", 2.5 + WINDOW_S + 4),
    "holds_the_gil": ("80", 1 + SILENCE_S),
    "backtracks": ("80", 1 + SILENCE_S),
    "is_stopped": ("80", 1 + SILENCE_S),
    "is_killed": ("crash", 1),
    "device_fails": ("85", 2.5 + 2),
}
HONEST = ("beats", "never_beats", "loads_first", "loads_between", "slow_step")


class MachineWithCard(Machine):
    """A worker and its card, which somebody has exchanged whenever the worker starts again: after 88 too."""

    def __init__(self, letter: str, dsn: str, directory: Path, library: Path) -> None:
        self._letter = letter
        self._script = directory / f"card-{letter}"
        tests = Path(__file__).parent.parent
        environ = {
            "SOAK_DSN": dsn,
            "SOAK_DIRECTORY": str(directory),
            "SOAK_LETTER": letter,
            "FAKE_NVML": str(self._script),
            "LD_LIBRARY_PATH": str(library),
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "process"), os.environ["PYTHONPATH"]]),
            "GANGQ_DEVICE_WAIT_S": "5",
        }
        options = ("soak_tasks:app", "--silence-s", f"{SILENCE_S:g}", "--no-commands")
        super().__init__(f"w{letter}", f"h{letter}", dsn, directory, *options, restart_s=0, **environ)

    def _start(self) -> subprocess.Popen[bytes]:
        rewrite(self._script, gpu(self._letter, used_mib=100, util=0, memutil=0, milliwatts=70_000))
        return super()._start()


class Hall:
    """The machines, whoever restarts them, and an operator who puts repaired cards back into service."""

    def __init__(self, client: Client, machines: list[Machine]) -> None:
        self._client = client
        self._machines = machines
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hall", daemon=True)

    def __enter__(self) -> Hall:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(30)
        for machine in self._machines:
            machine.end()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for machine in self._machines:
                machine.look()
            with contextlib.suppress(GangqError):
                for device in self._client.devices():
                    if device.state == "quarantined" and "fault under job" in (device.reason or ""):
                        self._client.unquarantine(device_uuid=device.uuid)


@pytest.fixture
def ground(server: Server, tmp_path: Path) -> Iterator[tuple[Server, Client, str]]:
    """A server that may be killed, with little patience in its database."""
    with Server.temporary(binaries=server.binaries, durable=True) as mortal:
        dsn = mortal.create_database("soak")
        schema.migrate(dsn, log=lambda _: None)
        with Client(dsn) as client:
            client.configure(
                heartbeat_s=1, lease_s=30, lease_margin_s=5, grace_s=2, flag_after_s=10, ack_timeout_s=8,
                stall_timeout_s=STALL_S, load_grace_s=30, health_window_s=WINDOW_S, long_phase_s=30,
                # The machines here are at fault all the time; brake and quarantine have tests of their own.
                brake_share=1, device_trips=30000,
            )  # fmt: skip
            client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.5)
            yield mortal, client, dsn


def cause(client: Client, job: int) -> tuple[str, float | None]:
    """What its first ending is called, and when that was (seconds since 1970)."""
    trips = [trip for trip in client.trips(job_id=job) if trip.outcome not in ("notify", "held")]
    if trips:
        first = min(trips, key=lambda trip: trip.at)
        return str(first.code), first.at.timestamp()
    lost = [event.at.timestamp() for event in client.events(job_id=job, kind="reap")]
    return ("crash", min(lost)) if lost else ("none", None)


def journal(directory: Path, what: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for line in (directory / "soak.journal").read_text().splitlines():
        entry = json.loads(line)
        if entry["what"] == what:
            found[entry["job"]].append(entry["at"])
    return found


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 900)
def test_hangs_crashes_faults_and_restarts_for_half_an_hour(
    ground: tuple[Server, Client, str], tmp_path: Path
) -> None:
    server, client, dsn = ground
    library = tmp_path / "nvml"
    library.mkdir()
    compile_library(GPU_ROOM / "fake_nvml.c", library / "libnvidia-ml.so.1")
    seed = int(os.environ.get("GANGQ_SOAK_SEED", time.time()))
    print(f"seed {seed} (GANGQ_SOAK_SEED repeats it), {SECONDS:.0f} s")
    dice = random.Random(seed)
    kinds: dict[int, str] = {}
    outages: list[float] = []
    machines = [MachineWithCard(letter, dsn, tmp_path, library) for letter in "abcdefgh"[:WORKERS]]
    with Hall(client, machines):
        began = time.monotonic()
        next_outage = began + 60
        while time.monotonic() - began < SECONDS:
            waiting = sum(state in ("pending", "scheduled") for state in states(client, kinds).values())
            if waiting < WORKERS:
                for _ in range(WORKERS):
                    kind = dice.choice([*TROUBLE, *HONEST])
                    budget = BUDGET_S if kind == "outruns" else 300.0
                    ids = client.submit(task="job", payloads=[{"kind": kind}], gpus=1, budget_s=budget)
                    kinds[ids[0]] = kind
            if time.monotonic() > next_outage:
                outages.append(time.time())
                server.kill()
                time.sleep(dice.uniform(0.0, 2.0))
                server.start()
                next_outage = time.monotonic() + dice.uniform(90, 180)
            time.sleep(1.0)
            left = SECONDS - (time.monotonic() - began)
            if int(left) % 60 == 0:
                print(
                    f"{left:.0f} s left, {len(kinds)} jobs, {Counter(states(client, kinds).values())}",
                    flush=True,
                )
        try:
            eventually(lambda: set(states(client, kinds).values()) == {"done"}, "every job is done", 300.0)
        except AssertionError:
            tell_what_is_left(client, kinds)
            raise
    judge(client, kinds, tmp_path, outages, machines)


def states(client: Client, kinds: dict[int, str]) -> dict[int, str]:
    with contextlib.suppress(GangqError):
        return client.job_states(ids=list(kinds)) if kinds else {}
    return dict.fromkeys(kinds, "unknown")


def tell_what_is_left(client: Client, kinds: dict[int, str]) -> None:
    for job, state in states(client, kinds).items():
        if state != "done":
            print(f"job {job} ({kinds[job]}) is {state}: {client.explain_job(job_id=job)}")
    for worker in client.workers():
        print(worker)
    for device in client.devices():
        print(device)


def judge(
    client: Client, kinds: dict[int, str], directory: Path, outages: list[float], machines: list[Machine]
) -> None:
    """The verdicts, with a table of what happened."""
    troubles, ends = journal(directory, "trouble"), journal(directory, "end")
    called: dict[str, Counter[str]] = defaultdict(Counter)
    took: dict[str, list[float]] = defaultdict(list)
    late: list[str] = []
    wronged: list[str] = []
    for job, kind in kinds.items():
        name, at = cause(client, job)
        called[kind][name] += 1
        if kind in HONEST:
            # A restart of PostgreSQL is shorter than any lease: it must cost nothing either.
            if name != "none":
                wronged.append(f"job {job} ({kind}): {name}")
        elif at is not None:
            seconds = at - troubles[job][0]
            took[kind].append(seconds)
            near = any(-5 < at - outage < 40 for outage in outages)
            if seconds > TROUBLE[kind][1] + SLACK_S + (30 + 10 if near else 0):
                late.append(f"job {job} ({kind}): {seconds:.1f} s")
    print("\nkind            jobs  called                     seconds to be freed: median, most (limit)")
    for kind, names in sorted(called.items()):
        times = sorted(took[kind])
        spent = f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else "-"
        limit = f" ({TROUBLE[kind][1]:.1f})" if kind in TROUBLE else ""
        print(f"{kind:15} {sum(names.values()):4}  {dict(names)!s:26} {spent}{limit}")
    print(
        f"PostgreSQL was killed {len(outages)} times; exit codes {Counter(c for m in machines for c in m.codes)}"
    )
    injected = sum(sum(names.values()) for kind, names in called.items() if kind in TROUBLE)
    right = sum(called[kind][name] for kind, (name, _) in TROUBLE.items())
    print(f"causes called by their name: {right} of {injected}")
    assert wronged == []
    assert late == []
    assert right >= 0.95 * injected
    assert {job: len(times) for job, times in ends.items()} == dict.fromkeys(kinds, 1)
    assert client.violations() == []
