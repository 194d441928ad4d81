"""Starting, stopping, and starting again under the same name."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gangq.client import Client
from worker.worker_process import Fleet, eventually, short_leases, until_state

WAITS = """
@app.task
def waits(ctx, until=None):
    (HERE / f"started-{ctx.attempt}").touch()
    while not ctx.stopping:
        if until and Path(until).exists():
            return "finished"
        time.sleep(0.01)
"""


def worker_state(client: Client, name: str) -> str | None:
    return next((w.state for w in client.workers() if w.name == name), None)


def test_sigterm_hands_running_and_waiting_jobs_back_with_their_attempts(
    client: Client, fleet: Fleet
) -> None:
    fleet.define(WAITS)
    worker = fleet.start(prefetch=2)
    first, second = client.submit(task="waits", payloads=[{}, {}])
    until_state(client, first, "running")
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    for job_id in (first, second):
        job = client.job(id=job_id)
        assert (job.state, job.attempts) == ("pending", 0)
    assert worker_state(client, "w1") == "retired"
    assert client.violations() == []


def test_a_drain_timeout_lets_running_jobs_finish_and_takes_no_new_ones(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(WAITS)
    gate = tmp_path / "gate"
    job_id, held = client.submit(task="waits", payloads=[{"until": str(gate)}, {}])
    worker = fleet.start(drain_timeout_s=30.0, prefetch=2)
    eventually((tmp_path / "started-1").exists, "the handler runs")
    assert client.job(id=held).state == "running"
    worker.signal(signal.SIGTERM)
    until_state(client, held, "pending")
    eventually(lambda: worker_state(client, "w1") == "draining", "it is draining")
    later = client.submit(task="waits")[0]
    submitted_at = client.job(id=later).submitted_at
    eventually(lambda: client.workers()[0].renewed_at > submitted_at, "it renews its lease")
    assert worker.process.poll() is None
    gate.touch()
    assert worker.exit_code() == 0
    assert client.job(id=job_id).state == "done"
    assert client.job(id=later).state == "pending"


def test_a_second_sigterm_skips_the_grace(client: Client, fleet: Fleet) -> None:
    client.configure(grace_s=60, lease_s=120)
    script = (
        "trap 'told=1' TERM; touch ready; until test $told; do sleep 0.1; done; "
        "sleep 0.3; touch outlived; while :; do sleep 0.1; done"
    )
    worker = fleet.start()
    job_id = client.submit(
        task="command", payloads=[{"argv": [script], "shell": True, "cwd": str(fleet.directory)}]
    )[0]
    eventually((fleet.directory / "ready").exists, "the command runs")
    worker.signal(signal.SIGTERM)
    eventually((fleet.directory / "outlived").exists, "the command has outlived the SIGTERM")
    assert worker.process.poll() is None
    worker.signal(signal.SIGTERM)
    assert worker.exit_code(10) == 0
    assert client.job(id=job_id).state == "pending"


def test_sigterm_is_heard_while_a_handler_holds_the_main_thread(client: Client, fleet: Fleet) -> None:
    fleet.define("""
import hashlib
@app.task
def in_a_library(ctx):
    (HERE / "started").touch()
    # Lets go of the GIL, and no Python signal handler can run in this thread meanwhile.
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
""")
    worker = fleet.start()
    client.submit(task="in_a_library")
    eventually((fleet.directory / "started").exists, "the handler runs")
    job_id = client.jobs()[0].id
    worker.signal(signal.SIGTERM)
    assert worker.exit_code(10) == 79
    fleet.start()  # It finds the word its predecessor left: nobody's fault.
    eventually(lambda: client.job(id=job_id).stops == 1, "the job was handed back")
    assert client.job(id=job_id).crashes == 0


def test_a_worker_publishes_what_its_tasks_are_declared_with_and_submissions_follow_it(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task(max_attempts=7, priority=5)
def declared(ctx):
    pass

@app.task
def plain(ctx):
    pass
""")
    fleet.start()
    eventually(lambda: client.workers(), "it is registered")
    published = client.workers()[0].task_options
    assert published is not None
    assert published["declared"] == {"max_attempts": 7, "priority": 5}
    job = client.job(id=client.submit(task="declared")[0])
    assert (job.max_attempts, job.priority) == (7, 5)


def test_two_live_workers_cannot_have_one_name(client: Client, fleet: Fleet) -> None:
    first = fleet.start("twin")
    eventually(lambda: worker_state(client, "twin") == "live", "the first is there")
    second = fleet.start("twin")
    assert second.exit_code() == 1
    assert "WorkerNameTaken" in second.log
    assert first.process.poll() is None


def test_a_killed_workers_next_incarnation_frees_its_jobs_at_once(client: Client, fleet: Fleet) -> None:
    short_leases(client, lease_s=120, lease_margin_s=10)
    fleet.define(WAITS)
    worker = fleet.start()
    job_id = client.submit(task="waits")[0]
    eventually((fleet.directory / "started-1").exists, "the handler runs")
    worker.signal(signal.SIGKILL)
    worker.exit_code()
    fleet.start()
    eventually(lambda: client.job(id=job_id).crashes == 1, "the crash is counted", 10)
    until_state(client, job_id, "running")
    assert client.violations() == []


def test_no_second_attempt_starts_while_the_first_ones_tree_lives(client: Client, fleet: Fleet) -> None:
    short_leases(client, lease_s=120, lease_margin_s=10)
    marker = fleet.directory / "alive"
    script = f"trap '' TERM; (trap '' TERM; while :; do date +%s.%N > {marker}; sleep 0.05; done) & sleep 90"
    worker = fleet.start()
    job_id = client.submit(task="command", payloads=[{"argv": [script], "shell": True}])[0]
    eventually(marker.exists, "the grandchild runs")
    trees = [p for p in psutil.process_iter(["cmdline"]) if str(marker) in " ".join(p.info["cmdline"] or [])]
    assert len(trees) >= 2
    worker.signal(signal.SIGKILL)
    worker.exit_code()
    fleet.start()
    eventually(lambda: client.job(id=job_id).crashes == 1, "the next incarnation reports it dead", 30)
    assert [p.pid for p in trees if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_worker_whose_incarnation_was_ended_stops_its_work_and_registers_anew(
    client: Client, fleet: Fleet
) -> None:
    worker = fleet.start()
    job_id = client.submit(task="command", payloads=[{"argv": ["sleep", "1000"]}])[0]
    until_state(client, job_id, "running")
    before = client.workers()[0].incarnation
    client.report_dead(worker="w1", incarnation=before, evidence={"by": "a test that lies"})
    eventually(lambda: client.workers()[0].incarnation > before, "it is back")
    until_state(client, job_id, "running")
    assert worker.process.poll() is None
    assert "incarnation_ended" in worker.log


def test_a_worker_starts_a_job_soon_after_it_was_submitted(client: Client, fleet: Fleet) -> None:
    fleet.define("@app.task\ndef nothing(ctx): pass\n")
    worker = fleet.start()
    eventually(lambda: "listening" in worker.log, "it listens")
    until_state(client, client.submit(task="nothing")[0], "done")
    waits = []
    for _ in range(10):
        job = until_state(client, client.submit(task="nothing")[0], "done")
        waits.append((job.claimed_at - job.submitted_at).total_seconds())
        time.sleep(0.1)
    assert sorted(waits)[5] < 0.1


def test_once_ends_when_nothing_is_left(client: Client, fleet: Fleet) -> None:
    fleet.define("@app.task\ndef nothing(ctx): pass\n")
    ids = client.submit(task="nothing", payloads=[{}] * 5)
    assert fleet.start(once=True).exit_code() == 0
    assert set(client.job_states(ids=ids).values()) == {"done"}


def test_an_unreachable_database_is_named(fleet: Fleet) -> None:
    worker = fleet.start(dsn="host=127.0.0.1 port=1 dbname=nowhere")
    assert worker.exit_code() == 1
    assert "DatabaseUnreachable" in worker.log
    assert "nowhere" in worker.log


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"queues": ["no-such-queue"]}, "NotFound", "no-such-queue"),
        ({"slots": 0, "light": 0}, "InvalidInput", "slots and light are both 0"),
        ({"light": -1}, "InvalidInput", "light is -1"),
        ({"prefetch": 2, "light": 2}, "InvalidInput", "prefetch is 2 with 2 light slots"),
        ({"queues": []}, "InvalidInput", "queues"),
        ({"devices": "many"}, "DeviceSpecError", "many"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    fleet: Fleet, options: dict[str, Any], error: str, name: str
) -> None:
    worker = fleet.start(**options)
    assert worker.exit_code() == 1
    assert error in worker.log
    assert name in worker.log


def test_what_one_step_of_a_tick_leaves_does_not_wait_for_the_next_safety_tick(
    client: Client, fleet: Fleet
) -> None:
    client.configure(tick_s=30)
    fleet.define("@app.task\ndef first(ctx): pass\n\n@app.task\ndef second(ctx): pass")
    first = client.submit(task="first")
    client.submit(task="second", payloads=[{}] * 1000, after=first)
    fleet.start(prefetch=50)
    until_state(client, first[0], "done")
    eventually(lambda: not client.jobs(state="waiting", limit=1), "all know that it is done", timeout=15)
