"""Commands: what they are told, what becomes of their output, and how they end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gangq.client import Client
from worker.worker_process import Fleet, eventually, until_state


def run(client: Client, *argv: str, shell: bool = False, **options: Any) -> int:
    payload = {"argv": list(argv), "shell": shell, "env": options.pop("env", {}), "cwd": None}
    return client.submit(task="command", payloads=[payload], **{"max_attempts": 1, **options})[0]


def output(client: Client, job_id: int) -> str:
    return "".join(row.chunk for row in client.logs(job_id=job_id))


def alive(text: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or [])]


def test_a_command_runs_and_its_output_is_kept(client: Client, fleet: Fleet) -> None:
    fleet.start()
    job_id = run(client, "echo one; echo two >&2; echo $WHO", shell=True, env={"WHO": "me"})
    until_state(client, job_id, "done")
    assert output(client, job_id) == "one\ntwo\nme\n"


def test_a_command_hands_its_job_back_to_wait(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    gangq, ready = f"{sys.executable} -m gangq", tmp_path / "ready"
    job_id = run(client, f"[ -e {ready} ] || {{ touch {ready}; {gangq} snooze 100ms; exit; }}", shell=True)
    job = until_state(client, job_id, "done", "failed")
    assert (job.state, job.attempts, job.snoozes) == ("done", 1, 1)
    assert [attempt.cause for attempt in client.attempts(job_id=job_id)] == ["snoozed", "done"]


def test_a_python_program_hands_its_job_back_without_a_trace(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start()
    program = (
        "import pathlib, sys, gangq\n"
        "ready = pathlib.Path(sys.argv[1])\n"
        "if not ready.exists():\n    ready.touch()\n    gangq.current().snooze('100ms')\n"
    )
    job_id = run(client, sys.executable, "-c", program, str(tmp_path / "ready"))
    assert until_state(client, job_id, "done", "failed").snoozes == 1
    assert output(client, job_id) == ""


def test_a_member_of_a_gang_that_snoozes_is_refused(client: Client, fleet: Fleet) -> None:
    fleet.start()
    payload = {
        "argv": [sys.executable, "-m", "gangq", "snooze", "1m"],
        "shell": False,
        "env": {},
        "cwd": None,
    }
    made = client.submit_gang(task="command", size=1, payload=payload, max_attempts=1)
    job = until_state(client, made.job_ids[0], "failed")
    assert f"member of gang g{made.gang_id}" in output(client, job.id)


def test_a_command_knows_its_job_and_no_secret(
    client: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "tell-nobody")
    monkeypatch.setenv("GANGQ_DSN", "postgresql://me:tell-nobody@nowhere/x")
    fleet.start()
    job_id = run(client, "env")
    job = until_state(client, job_id, "done")
    env = dict(line.split("=", 1) for line in output(client, job_id).splitlines() if "=" in line)
    assert env["GANGQ_JOB_ID"] == str(job_id)
    assert env["GANGQ_TOKEN"] == str(job.token)
    assert env["GANGQ_ATTEMPT"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "RANK" not in env
    assert "tell-nobody" not in output(client, job_id)


def test_devices_are_shown_to_the_command_that_holds_them(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start(devices="4x24GiB", slots=2)
    said = "echo [$CUDA_VISIBLE_DEVICES]"
    job_id = run(client, f"{said}; until [ -e {tmp_path}/go ]; do sleep 0.1; done", shell=True, gpus=2)
    without = run(client, said, shell=True)
    until_state(client, job_id, "running")
    held = sorted(device.index for device in client.devices() if device.job_id == job_id)
    (tmp_path / "go").touch()
    until_state(client, job_id, "done")
    until_state(client, without, "done")
    assert output(client, job_id) == f"[{held[0]},{held[1]}]\n"
    assert output(client, without) == "[]\n"


@pytest.mark.parametrize(
    ("script", "message", "status"),
    [("echo last words; exit 3", "exited with 3", 3), ("kill -9 $$", "killed by SIGKILL", 137)],
)
def test_a_command_that_fails_says_how(
    client: Client, fleet: Fleet, script: str, message: str, status: int
) -> None:
    fleet.start()
    job = until_state(client, run(client, script, shell=True), "failed")
    assert job.error is not None
    assert (job.error["type"], job.error["message"]) == ("ExitStatus", message)
    assert job.error["exit_status"] == status
    assert job.error["log_tail"] == ("last words\n" if status == 3 else "")


def test_a_program_that_does_not_exist_fails_its_job_and_names_it(client: Client, fleet: Fleet) -> None:
    fleet.start()
    job = until_state(client, run(client, "no-such-program"), "failed")
    assert job.error is not None
    assert job.error["type"] == "CommandStartError"
    assert "no-such-program" in job.error["message"]


@pytest.mark.parametrize("payload", [{}, {"argv": []}, {"argv": "ls"}, {"argv": ["ls"], "env": {"A": 1}}])
def test_a_malformed_command_fails_its_job_only(
    client: Client, fleet: Fleet, payload: dict[str, Any]
) -> None:
    fleet.start()
    bad = client.submit(task="command", payloads=[payload], max_attempts=1)[0]
    until_state(client, bad, "failed")
    until_state(client, run(client, "true"), "done")


def test_output_without_end_is_bounded_and_its_last_words_are_kept(client: Client, fleet: Fleet) -> None:
    client.configure(log_bytes=65536)
    fleet.start()
    job_id = run(client, "head -c 30000000 /dev/zero | tr '\\0' 'x'; printf '\\377\\000end'", shell=True)
    until_state(client, job_id, "done")
    kept = output(client, job_id)
    assert kept.endswith("end")
    assert "bytes dropped here" in kept
    assert len(kept.encode()) <= 65536


def test_output_that_could_not_be_kept_is_told_of_in_the_output(client: Client, fleet: Fleet) -> None:
    fleet.start()
    program = """
import os, resource
resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (8, 8))  # as if the disk of its guardian were full
print("x" * 100)
"""
    job_id = run(client, sys.executable, "-c", program)
    until_state(client, job_id, "done")
    assert output(client, job_id) == "x" * 8 + "\n[gangq: output is missing: [Errno 27] File too large]\n"


def test_output_can_be_followed_while_the_command_runs(client: Client, fleet: Fleet) -> None:
    fleet.start()
    job_id = run(client, "echo early; sleep 100", shell=True)
    eventually(lambda: output(client, job_id) == "early\n", "the first line is there")
    assert client.job(id=job_id).state == "running"
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "cancelled")


def test_cancel_ends_the_whole_tree_before_it_is_acknowledged(client: Client, fleet: Fleet) -> None:
    client.configure(ack_timeout_s=60)  # Told to stop, and not merely lost in the end.
    fleet.start()
    # The command ignores SIGTERM, and what it started has left its group.
    job_id = run(client, "trap '' TERM; setsid sleep 98765 & while :; do sleep 0.1; done", shell=True)
    eventually(lambda: alive("sleep 98765"), "the tree runs")
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "cancelled")
    assert alive("sleep 98765") == []


def test_a_command_may_save_itself_within_the_grace_and_is_not_taken_for_done(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start()
    saved = tmp_path / "saved"
    job_id = run(client, f"trap 'echo x > {saved}; exit 0' TERM; while :; do sleep 0.05; done", shell=True)
    until_state(client, job_id, "running")
    time.sleep(0.3)
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "cancelled")
    assert saved.exists()


def test_a_python_command_talks_to_its_worker(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.start()
    script = tmp_path / "talk.py"
    script.write_text("""
import gangq.context
ctx = gangq.context.current()
if ctx.checkpoint is None:
    ctx.beat(step=1, loss=0.25)
    ctx.save_checkpoint(4, b"four")
    raise SystemExit(1)
print(ctx.checkpoint.step, ctx.checkpoint.data, ctx.checkpoint.path.read_bytes(), ctx.job.payload["argv"][1:])
""")
    job_id = run(client, sys.executable, str(script), max_attempts=2)
    until_state(client, job_id, "done")
    assert f"4 b'four' b'four' ['{script}']" in output(client, job_id)


def test_a_worker_with_slots_runs_that_many_at_once(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(light=3)
    together = "touch $0.$GANGQ_JOB_ID; while [ $(ls $0.* | wc -l) -lt 3 ]; do sleep 0.02; done"
    ids = [run(client, "sh", "-c", together, str(tmp_path / "here")) for _ in range(3)]
    for job_id in ids:
        until_state(client, job_id, "done")
    assert client.violations() == []


def test_the_end_of_a_command_is_seen_although_its_guardian_was_stopped(client: Client, fleet: Fleet) -> None:
    fleet.start(slots=0, light=1)
    until_state(client, run(client, "sh", "-c", "sleep 1; kill -STOP $PPID"), "done")
