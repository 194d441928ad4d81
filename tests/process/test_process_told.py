"""Told to stop is not stopped: what a job, a gang and a worker do when they are told, and when it counts."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from process.evidence import boottime
from process.floor import GRACE_S, LEASE_S, PATIENCE_S, TASKS, Floor, Restarter
from worker.worker_process import WorkerProcess, eventually, until_state


def until_cancelled_and_dead(floor: Floor, job: int) -> None:
    """Wait for ``cancelled``; until it is there a process may live, from then on none."""

    def look() -> bool:
        cancelled: bool = floor.client.job(id=job).state == "cancelled"
        left = floor.journal.living(job)
        assert not (cancelled and left), f"job {job} is cancelled, and {left} live"
        return cancelled

    eventually(look, f"job {job} is cancelled", PATIENCE_S)


@pytest.mark.parametrize("flags", [["--below"], ["--below", "--deaf"]], ids=["obeying", "deaf"])
def test_a_command_is_cancelled_only_when_its_whole_tree_is_gone(floor: Floor, flags: list[str]) -> None:
    worker = floor.start("w", ready=False)
    job = floor.command(*flags)
    floor.until_at_work(job, 2)
    asked = boottime()
    floor.client.cancel(job_ids=[job])
    until_cancelled_and_dead(floor, job)
    took = boottime() - asked
    if "--deaf" in flags:
        assert GRACE_S <= took < LEASE_S
    else:
        assert any(e["stopped"] for e in floor.journal.entries("end", job))
    assert worker.process.poll() is None
    floor.go()
    floor.until_done(floor.command())


def test_a_handler_that_obeys_is_cancelled_and_its_worker_takes_the_next(floor: Floor) -> None:
    worker = floor.start("w")
    job = floor.inline()
    floor.until_at_work(job)
    floor.client.cancel(job_ids=[job])
    until_cancelled_and_dead(floor, job)
    assert until_state(floor.client, floor.inline("quick"), "done").result == worker.process.pid


@pytest.mark.parametrize(
    "back", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["restarted", "gone"]
)
def test_a_handler_that_does_not_obey_ends_its_worker_and_is_cancelled_on_proof_or_at_the_lease_end(
    floor: Floor, back: bool
) -> None:
    if back:
        floor.configure(lease_s=600, lease_margin_s=60)
    worker = floor.start("w")
    job = floor.inline(payload={"deaf": True})
    floor.until_at_work(job)
    asked = boottime()
    floor.client.cancel(job_ids=[job])
    assert worker.exit_code() == 79
    assert GRACE_S <= boottime() - asked < LEASE_S
    # It is dead, and nobody has proven it.
    assert floor.client.job(id=job).state == "preempting"
    renewed = floor.worker_row("w").renewed_at
    floor.start("w" if back else "other", ready=False)
    row = until_state(floor.client, job, "cancelled", timeout=PATIENCE_S)
    assert row.attempts == 1
    if not back:
        assert (row.finished_at - renewed).total_seconds() >= LEASE_S
    until_state(floor.client, floor.inline("quick"), "done", timeout=PATIENCE_S)


_SAVES = """
import sys, time
import gangq.context
ctx = gangq.context.current()
start = ctx.checkpoint.step if ctx.checkpoint else 0
print("start", ctx.gang.epoch, start, flush=True)
if ctx.gang.epoch > 1:
    raise SystemExit(0)
for step in range(start + 1, 10_000):
    if ctx.gang.rank == 0:
        ctx.save_checkpoint(step, b"at %d" % step)
    time.sleep(0.05)
"""


def _printed(floor: Floor, job: int) -> str:
    return "".join(log.chunk for log in floor.client.logs(job_id=job))


def test_a_preempted_gang_of_commands_resumes_from_its_checkpoint_at_epoch_two(floor: Floor) -> None:
    floor.start("w", slots=2)
    payload = {"argv": [sys.executable, "-c", _SAVES]}
    gang = floor.client.submit_gang(task="command", size=2, payload=payload, checkpoint_mode="rank0")
    with floor.client.connection() as conn:

        def saved() -> int:
            row = conn.execute("select max(step) from gangq.checkpoints").fetchone()
            return int(row[0] or 0) if row else 0

        eventually(lambda: saved() >= 3, "a checkpoint is there", PATIENCE_S)
    for job in gang.job_ids:
        eventually(lambda job=job: "start" in _printed(floor, job), f"job {job} has begun", PATIENCE_S)
    assert floor.client.call("preempt_gang", gang_id=gang.gang_id, reason="something better")
    eventually(lambda: floor.client.gang(id=gang.gang_id).state == "done", "it is done", PATIENCE_S)
    row = floor.client.gang(id=gang.gang_id)
    assert (row.epoch, row.preemptions) == (2, 1)
    (drain,) = floor.client.drains(gang_id=gang.gang_id)
    assert (drain.cause, drain.acked, drain.forced, drain.outcome) == ("preempt", 2, 0, "blocked")
    starts = []
    for job in gang.job_ids:
        assert (floor.client.job(id=job).attempts, floor.client.job(id=job).crashes) == (1, 0)
        lines = _printed(floor, job).splitlines()
        first, second = (line.split() for line in lines if line.startswith("start"))
        assert first == ["start", "1", "0"]
        assert second[:2] == ["start", "2"]
        starts.append(int(second[2]))
    # Both resume where rank 0 was, and that is where it was told to stop or later, never earlier.
    assert starts[0] == starts[1] >= 3


def test_sigterm_hands_everything_back_with_its_attempt_and_it_runs_elsewhere(floor: Floor) -> None:
    first = floor.start("first", slots=2, light=2)
    solo = floor.command("--below")
    gang = floor.client.submit_gang(task="command", size=2, payload=floor.work("--deaf"))
    for job, processes in ((solo, 2), (gang.job_ids[0], 1), (gang.job_ids[1], 1)):
        floor.until_at_work(job, processes)
    asked = boottime()
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 0
    assert boottime() - asked >= GRACE_S
    assert [floor.journal.living(job) for job in (solo, *gang.job_ids)] == [[], [], []]
    assert floor.worker_row("first").state == "retired"
    assert floor.client.gang(id=gang.gang_id).state == "blocked"
    floor.start("second", ready=False, slots=2, light=2)
    rows = floor.until_done(solo, *gang.job_ids)
    assert [(r.attempts, r.crashes) for r in rows] == [(1, 0)] * 3
    assert floor.client.gang(id=gang.gang_id).epoch == 2


def test_a_second_sigterm_skips_the_grace(floor: Floor) -> None:
    floor.configure(grace_s=60, lease_s=600, lease_margin_s=60)
    worker = floor.start("w", light=2)
    job = floor.command("--below", "--deaf")
    floor.until_at_work(job, 2)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "job_told_to_stop" in worker.log, "the job is told to stop", PATIENCE_S)
    eventually(lambda: floor.worker_row("w").state == "draining", "it takes nothing new", PATIENCE_S)
    assert len(floor.journal.living(job)) == 2
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert floor.journal.living(job) == []
    assert (floor.client.job(id=job).state, floor.client.job(id=job).attempts) == ("pending", 0)


def namesake(floor: Floor, first: WorkerProcess) -> tuple[int, str]:
    """Start another worker of that name; its exit code, and what the log they share says from then on."""
    earlier = len(first.log)
    second = floor.start(first.name, ready=False)
    return second.exit_code(), second.log[earlier:]


def test_the_second_of_two_workers_with_one_name_is_refused_and_the_first_is_left_alone(floor: Floor) -> None:
    first = floor.start("twin")
    job = floor.inline()
    floor.until_at_work(job)
    incarnation = floor.worker_row("twin").incarnation
    code, said = namesake(floor, first)
    assert code == 1
    assert "WorkerNameTaken" in said
    assert "twin" in said
    assert f"pid {first.process.pid}" in said
    assert floor.worker_row("twin").incarnation == incarnation
    assert floor.journal.living(job)
    floor.go()
    (row,) = floor.until_done(job)
    assert (row.attempts, row.crashes) == (1, 0)
    assert first.process.poll() is None


BAD = {
    "raises": "raise RuntimeError('as it was told')",
    "calls sys.exit": "sys.exit(3)",
    "recurses for ever": "def down(): return down() + 1\n    down()",
    "allocates too much": (
        "import resource\n"
        "    soft, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, hard))\n"
        "    try:\n"
        "        bytearray(8 << 30)\n"
        "    finally:\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))"
    ),
    "closes its standard streams": "os.close(1); os.close(2); raise RuntimeError('blind')",
    "changes the world around it": (
        "os.environ.clear(); os.chdir('/'); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "sys.stdout = None; raise RuntimeError('moved')"
    ),
}
WEIRD = {
    "returns what is no JSON": "return {1, 2}",
    "prints 100 MB": "for _ in range(100): print('x' * (1 << 20))\n    return 'printed'",
    "starts threads that never end": (
        "for _ in range(20): threading.Thread(target=time.sleep, args=(10**6,)).start()\n    return 'threads'"
    ),
    "forks, and returns in the child": "os.fork() and os.wait()\n    return 'parent'",
    "leaves a process behind": (
        "subprocess.Popen(['sleep', '20'], start_new_session=True)\n    return 'left'"
    ),
}
FATAL = {
    "calls os._exit": "os._exit(3)",
    "crashes the interpreter": "import ctypes; ctypes.string_at(0)",
    "kills its own process group": "os.setpgid(0, 0); os.killpg(0, signal.SIGKILL)",
}


def define(floor: Floor, bodies: dict[str, str]) -> dict[str, str]:
    """Tasks with these bodies; returns their names by what they do."""
    names = {what: f"task_{n}" for n, what in enumerate(bodies)}
    text = "".join(f"\n@app.task\ndef {names[what]}(ctx):\n    {body}\n" for what, body in bodies.items())
    floor.fleet.define(TASKS + text)
    return names


def test_handlers_that_end_badly_fail_their_own_job_and_the_worker_takes_the_next(floor: Floor) -> None:
    names = define(floor, BAD)
    worker = floor.start("w")
    for what, name in names.items():
        row = until_state(floor.client, floor.inline(name, max_attempts=1), "failed", timeout=PATIENCE_S)
        assert row.error, what
        assert (row.attempts, row.crashes) == (1, 0), what
        assert until_state(floor.client, floor.inline("quick"), "done").result == worker.process.pid, what
    # Whatever they did to it, it still stops as asked.
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0


def test_handlers_that_leave_a_mess_are_done_and_the_worker_takes_the_next(floor: Floor) -> None:
    names = define(floor, WEIRD)
    worker = floor.start("w")
    try:
        for what, name in names.items():
            row = until_state(floor.client, floor.inline(name, max_attempts=1), "done", timeout=PATIENCE_S)
            assert (row.attempts, row.crashes) == (1, 0), what
            next_row = until_state(floor.client, floor.inline("quick"), "done", timeout=PATIENCE_S)
            assert next_row.result == worker.process.pid, what
        worker.signal(signal.SIGTERM)
        eventually(lambda: floor.worker_row("w").state == "retired", "it has stopped", PATIENCE_S)
        # Twenty threads are asleep in it for months.
        assert worker.exit_code() == 0
    finally:
        # What was printed is of no use to whoever reads why this has failed.
        os.truncate(worker.log_path, 4096)


def test_handlers_that_kill_their_worker_are_charged_for_it_and_end_failed(floor: Floor) -> None:
    floor.configure(lease_s=600, lease_margin_s=60)
    names = define(floor, FATAL)
    floor.client.set_queue(name="default", max_crashes=1)
    with Restarter(floor, w={}) as running:
        for what, name in names.items():
            deaths = len(running.codes)
            row = until_state(floor.client, floor.inline(name), "failed", timeout=60)
            assert (row.error["type"], row.error["crashes"]) == ("WorkerLost", 2), what
            assert len(running.codes) - deaths == 2, what
            until_state(floor.client, floor.inline("quick"), "done", timeout=PATIENCE_S)
        assert set(running.codes) == {3, -signal.SIGSEGV, -signal.SIGKILL}


@pytest.mark.soak
def test_what_a_handler_left_behind_is_gone_before_its_job_runs_again(floor: Floor) -> None:
    floor.configure(lease_s=600, lease_margin_s=60)
    script = floor.work("--deaf")["argv"]
    floor.fleet.define(
        TASKS
        + f"""
@app.task
def leaves(ctx):
    env = {{**os.environ, "GANGQ_JOB_ID": str(ctx.job.id), "GANGQ_TOKEN": str(ctx.token)}}
    subprocess.Popen({script!r}, env=env, start_new_session=True)
    while ctx.token not in Journal(JOURNAL).attempts(ctx.job.id):
        time.sleep(0.01)
    if Journal(JOURNAL).attempts(ctx.job.id) == [ctx.token]:
        time.sleep(1000)
"""
    )
    worker = floor.start("w")
    job = floor.inline("leaves")
    floor.until_at_work(job)
    worker.signal(signal.SIGKILL)
    worker.exit_code()
    assert floor.journal.living(job)
    floor.start("w", ready=False)
    eventually(lambda: len(floor.journal.attempts(job)) == 2, "it runs again", PATIENCE_S)
    first = floor.journal.attempts(job)[0]
    assert floor.journal.living(job, token=first) == []
    floor.until_done(job)
