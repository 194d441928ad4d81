"""gangq run behaves like srun; gangq logs and gangq events follow what runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_process import (
    GANGQ,
    answers,
    environment,
    eventually,
    finished,
    gangq,
    objects,
    ok,
    running,
    worker,
)
from databases import OwnServer
from gangq.client import Client
from gangq.embedded import Server


@pytest.fixture(scope="module")
def served(server: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with a command worker of four slots and four light ones."""
    dsn = server.create_database("cli_run", template=template)
    with Client(dsn) as client:
        client.configure(heartbeat_s=0.5, grace_s=1)
        client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.2)
    with worker(
        dsn,
        tmp_path_factory.mktemp("worker"),
        "w1",
        *("--slots", "4", "--light", "4", "--host", "h1", "--address", "127.0.0.1"),
    ):
        yield dsn
    server.drop_database("cli_run")


def test_output_comes_on_standard_output_and_the_states_on_standard_error(
    served: str, tmp_path: Path
) -> None:
    done = finished(
        served, "run", "--cwd", tmp_path, "--", "sh", "-c", "echo hello; echo oops >&2; pwd; echo $A"
    )
    assert (done.returncode, done.stdout) == (0, f"hello\noops\n{tmp_path}\n\n")
    assert "submitted to queue default" in done.stderr
    done = finished(served, "run", "--shell", "--env", "A=b c", "--", 'echo "$A"')
    assert (done.returncode, done.stdout) == (0, "b c\n")


@pytest.mark.parametrize(
    ("command", "code"),
    [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], 137), (["no-such-program"], 127)],
)
def test_it_exits_as_the_command_did_and_does_not_try_again(
    served: str, command: list[str], code: int
) -> None:
    done = finished(served, "run", "--", *command)
    assert done.returncode == code, done.stderr
    assert "failed" in done.stderr
    assert answers(served, "ls", "--limit", "1")[0]["attempts"] == 1


def test_it_tries_again_when_asked_and_shows_the_output_of_each_attempt(served: str, tmp_path: Path) -> None:
    script = f"echo attempt $GANGQ_ATTEMPT; test -e {tmp_path}/x || {{ touch {tmp_path}/x; exit 4; }}"
    done = finished(served, "run", "--max-attempts", "2", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "attempt 1\nattempt 2\n")
    assert "failed: exited with 4; tried again" in done.stderr
    job = answers(served, "ls", "--limit", "1")[0]["id"]
    assert ok(served, "logs", job) == "attempt 2\n"
    assert ok(served, "logs", job, "--all") == "attempt 1\nattempt 2\n"


def test_a_gang_is_tagged_by_rank_and_logs_shows_the_same(served: str) -> None:
    script = "echo rank $RANK of $WORLD_SIZE; printf end"
    done = finished(served, "run", "--gang", "3", "--", "sh", "-c", script)
    wanted = sorted(f"[{rank}] {text}" for rank in range(3) for text in (f"rank {rank} of 3", "end"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == wanted
    gang = answers(served, "ls", "gangs", "--limit", "1")[0]["id"]
    assert f"gang g{gang} submitted to queue default: 3 members" in done.stderr
    assert sorted(ok(served, "logs", f"g{gang}").splitlines()) == wanted
    assert {row["rank"] for row in answers(served, "logs", f"g{gang}")} == {0, 1, 2}
    assert ok(served, "logs", f"g{gang}", "--rank", "1").splitlines() == ["rank 1 of 3", "end"]
    assert {row["rank"] for row in answers(served, "logs", f"g{gang}", "--rank", "2")} == {2}
    refused = gangq(served, "logs", f"g{gang}", "--rank", "3")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"gang g{gang} has no rank 3: it has 3 members, from 0 on" in refused.stderr


def test_a_gang_exits_with_the_status_of_the_member_it_failed_for(served: str) -> None:
    script = "[ $RANK = 0 ] && sleep 60; exit 5"
    done = finished(served, "run", "--gang", "2", "--max-attempts", "1", "--", "sh", "-c", script)
    assert done.returncode == 5, done.stderr
    assert "drains (fail): rank 1 exited with 5" in done.stderr
    assert "rank 1 exited with 5" in done.stderr.splitlines()[-1]
    gang = answers(served, "ls", "gangs", "--limit", "1")[0]["id"]
    (drain,) = answers(served, "drains", f"g{gang}")
    assert (drain["cause"], drain["outcome"]) == ("fail", "failed")


def test_the_newest_drains_come_first_and_those_of_one_gang_in_their_order(dsn: str, client: Client) -> None:
    worker = client.register_worker(name="w1", host="h1", queues=["default"]).incarnation

    def drain(gang: int) -> None:
        client.tick(force=True)
        (claim,) = client.claim(incarnation=worker)
        client.cancel(gang_ids=[gang])
        client.ack_preempted(job_id=claim.job_id, token=claim.token)

    first, second = (client.submit_gang(task="a", size=1).gang_id for _ in range(2))
    drain(first)
    drain(second)
    client.retry(gang_ids=[second])
    drain(second)
    assert [row["gang_id"] for row in answers(dsn, "drains", "--limit", "2")] == [second, second]
    (shown,) = answers(dsn, "show", f"g{second}")
    assert [drained["epoch"] for drained in shown["drains"]] == [1, 2]


def test_a_gang_that_drains_starts_again_at_the_next_epoch(served: str, tmp_path: Path) -> None:
    # In epoch 1 rank 1 fails once rank 0 is up, which then sleeps for long.
    script = f"""
echo epoch $GANGQ_EPOCH
[ $GANGQ_EPOCH = 2 ] && exit
[ $RANK = 0 ] && touch {tmp_path}/up && exec sleep 60
while [ ! -e {tmp_path}/up ]; do sleep 0.05; done
exit 9
"""
    done = finished(served, "run", "--json", "--gang", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stdout
    told = objects(done.stdout)
    assert [t["kind"] for t in told if t["event"] == "happened"] == ["drain", "drained"]
    states = [(t["state"], t["epoch"]) for t in told if t["event"] == "state" and "epoch" in t]
    assert states == [("reserved", 1), ("running", 1), ("reserved", 2), ("running", 2)]
    assert {t["text"] for t in told if t["event"] == "output"} == {"epoch 1\n", "epoch 2\n"}
    assert told[0]["event"] == "submitted"
    assert (told[-1]["event"], told[-1]["state"], told[-1]["exit_code"]) == ("end", "done", 0)


def test_it_says_why_it_waits_when_it_waits_for_long(served: str, tmp_path: Path) -> None:
    with running(served, tmp_path, "run", "run", "--gpus", "1", "--wait-for-hardware", "--", "true") as run:
        run.until(lambda: "is pending for" in run.err and "GPUs" in run.err, "it says why")
        run.interrupt()
        assert run.code() == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_cancels_and_waits_until_the_command_is_gone(
    served: str, tmp_path: Path, number: signal.Signals
) -> None:
    script = "trap 'echo stopping; sleep 0.3; echo stopped; exit 1' TERM; echo up; sleep 60 & wait"
    with running(served, tmp_path, "run", "run", "--", "sh", "-c", script) as run:
        run.until(lambda: run.out == "up\n", "the command runs")
        run.interrupt(number)
        assert run.code() == 130
        assert run.out == "up\nstopping\nstopped\n"
    assert answers(served, "ls", "--limit", "1")[0]["state"] == "cancelled"


def test_a_second_ctrl_c_leaves_at_once_and_tells_the_id(served: str, tmp_path: Path) -> None:
    with running(served, tmp_path, "run", "run", "--", "sh", "-c", "trap '' TERM; echo up; sleep 60") as run:
        run.until(lambda: run.out == "up\n", "the command runs")
        job = answers(served, "ls", "--limit", "1")[0]["id"]
        run.interrupt()
        run.until(lambda: "cancelling" in run.err, "the first Ctrl-C is heard")
        run.interrupt()
        assert run.code(2) == 130
        assert f"left job {job} to itself" in run.err
    eventually(
        lambda: answers(served, "show", job)[0]["job"]["state"] == "cancelled", "it is cancelled all the same"
    )


def test_detached_it_prints_the_id_and_logs_follows_it_to_its_end(served: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two"
    job = int(ok(served, "run", "--detach", "--", "sh", "-c", script))
    with running(served, tmp_path, "logs", "logs", "-f", job) as logs:
        logs.until(lambda: logs.out == "one\n", "what it printed so far is shown")
        gate.touch()
        assert logs.code() == 0
        assert logs.out == "one\ntwo\n"


def test_events_follows_a_gang_to_its_end_and_everything_until_told_to_stop(
    served: str, tmp_path: Path
) -> None:
    with running(served, tmp_path, "all", "events", "-f", "--limit", "1") as everything:
        everything.until(lambda: everything.out, "the newest event is shown")
        gate = tmp_path / "gate"
        wait = f"while [ ! -e {gate} ]; do sleep 0.05; done"
        gang = ok(served, "run", "--detach", "--gang", "2", "--", "sh", "-c", wait).strip()
        with running(served, tmp_path, "one", "events", "-f", "--json", gang) as one:
            one.until(lambda: '"go"' in one.out, "the gang has started")
            gate.touch()
            assert one.code() == 0
            kinds = [event["kind"] for event in objects(one.out)]
        assert kinds == ["submit", "reserve", "claim", "claim", "go", "done", "done", "end"]
        everything.until(lambda: f"end  {gang}" in everything.out, "the whole story is shown")
        everything.interrupt()
        assert everything.code() == 130
        shown = [line for line in everything.out.splitlines() if gang in line.split()]
        assert len(shown) == len(set(shown)) == len(kinds)
        assert everything.err == ""


def test_a_command_beats_and_keeps_a_checkpoint_through_its_worker(served: str, tmp_path: Path) -> None:
    me = " ".join(GANGQ)
    script = f"""
{me} checkpoint load state; echo none: $?
echo -n data > new
{me} beat --step 3 --total 10 --phase train --loss 0.5 lr=0.1
{me} checkpoint save 3 new && {me} checkpoint load state && cat state; echo
printf more | {me} checkpoint save 4 - && {me} checkpoint load - 2>/dev/null; echo
{me} checkpoint save 5 nowhere; echo bad: $?
"""
    done = finished(served, "run", "--cwd", tmp_path, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if not line.startswith("gangq:")]
    assert said == ["none: 4", "3", "data", "more", "bad: 2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "state"]


def test_progress_told_by_a_command_is_shown(served: str, tmp_path: Path) -> None:
    me = " ".join(GANGQ)
    wait = f"while [ ! -e {tmp_path}/gate ]; do sleep 0.05; done"
    script = f"{me} beat --step 3 --total 10 --phase train --loss 0.5; {wait}"
    job = int(ok(served, "run", "--detach", "--", "sh", "-c", script))
    eventually(lambda: "train 3/10 loss=0.5" in ok(served, "show", job), "the beat arrives")
    (tmp_path / "gate").touch()
    eventually(lambda: answers(served, "show", job)[0]["job"]["state"] == "done", "it ends")


def test_a_command_that_has_closed_its_output_beats(served: str) -> None:
    done = finished(served, "run", "--", "sh", "-c", f"exec >&-; {sys.executable} -m gangq beat --step 1")
    assert done.returncode == 0, done.stderr


def test_beat_outside_of_a_job_says_so() -> None:
    done = finished(None, "beat", "--step", "1")
    assert done.returncode == 1
    assert "no job runs here" in done.stderr


@pytest.mark.slow
def test_a_database_restart_does_not_end_it(own_server: OwnServer, tmp_path: Path) -> None:
    # A server of its own, so that the others' connections live on.
    with own_server() as own:
        dsn = own.dsn()
        with worker(dsn, tmp_path, "w2"):
            gate = tmp_path / "gate"
            wait = f"echo up; while [ ! -e {gate} ]; do sleep 0.05; done; echo down"
            # Of a gang there are events to be seen.
            with running(dsn, tmp_path, "run", "run", "--gang", "1", "--", "sh", "-c", wait) as run:
                run.until(lambda: run.out == "[0] up\n", "the command runs")
                (job,) = answers(dsn, "ls")
                with (
                    running(dsn, tmp_path, "events", "events", "-f", job["id"]) as events,
                    running(dsn, tmp_path, "logs", "logs", "-f", job["id"]) as logs,
                    running(dsn, tmp_path, "all", "events", "-f") as everything,
                ):
                    logs.until(lambda: logs.out == "up\n", "what it printed so far is shown")
                    events.until(lambda: events.out, "it follows")
                    everything.until(lambda: everything.out, "it follows")
                    own.stop("immediate")
                    run.until(lambda: "waiting for the database" in run.err, "it notices")
                    for one in (logs, events, everything):
                        one.until(lambda one=one: "trying again in" in one.err, "it notices")
                    own.start()
                    gate.touch()
                    assert run.code() == logs.code() == events.code() == 0
                    assert run.out == "[0] up\n[0] down\n"
                    assert logs.out == "up\ndown\n"
                    everything.interrupt()
                    assert everything.code() == 130
                assert "discarding" not in run.err + logs.err + events.err + everything.err


def test_one_member_is_said_in_the_singular_and_nohup_keeps_its_meaning(served: str, tmp_path: Path) -> None:
    ignoring = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from gangq.cli import main; main()"
    )
    done = subprocess.Popen(
        [
            sys.executable,
            "-c",
            ignoring,
            "run",
            "--gang",
            "1",
            "--",
            "sh",
            "-c",
            "echo up; sleep 1; echo over",
        ],
        env=environment(served),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stdout is not None
    said = done.stdout.readline()
    done.send_signal(signal.SIGHUP)
    out, err = done.communicate(timeout=30)
    assert ("up" in said, "over" in out, done.returncode) == (True, True, 0)
    assert re.search(r": 1 member, job \d+\n", err)
