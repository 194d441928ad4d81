"""Handlers inside the worker process: what they are given, and that they harm nobody but their own job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from gangq.client import Client
from worker.worker_process import Fleet, eventually, short_leases, until_state


def submit(client: Client, task: str, payload: dict[str, object] | None = None, **options: object) -> int:
    return client.submit(task=task, payloads=[payload or {}], **options)[0]  # type: ignore[arg-type]


def test_a_handler_gets_its_payload_and_its_result_is_kept(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def add(ctx, a, b):
    assert gangq.current() is ctx
    assert ctx.gang is None and ctx.devices == () and ctx.checkpoint is None and not ctx.stopping
    return {"sum": a + b, "job": ctx.job.id, "attempt": ctx.attempt, "token": ctx.token}
""")
    fleet.start()
    job = until_state(client, submit(client, "add", {"a": 1, "b": 2}), "done")
    assert job.result == {"sum": 3, "job": job.id, "attempt": 1, "token": job.token}
    assert client.violations() == []


def test_a_batch_runs_in_order_and_all_of_it_is_reported(client: Client, fleet: Fleet) -> None:
    fleet.define("""
seen = []
@app.task
def number(ctx, n):
    seen.append(n)
    return {"n": n, "before": len(seen) - 1}
""")
    ids = client.submit(task="number", payloads=[{"n": n} for n in range(200)])
    fleet.start(prefetch=50)
    eventually(lambda: set(client.job_states(ids=ids).values()) == {"done"}, "all 200 are done")
    assert [client.job(id=i).result for i in ids] == [{"n": n, "before": n} for n in range(200)]


def test_a_placed_job_need_not_wait_until_small_ones_run_out(client: Client, fleet: Fleet) -> None:
    fleet.define("""
seen = 0
@app.task
def small(ctx):
    global seen
    seen += 1
    time.sleep(0.0002)
    if seen == 100:
        app.submit_now()
@app.task
def whole(ctx):
    pass
app.submit_now = lambda: whole.options(memory_mb=1).submit()
""")
    client.submit(task="small", payloads=[{}] * 30_000)
    worker = fleet.start(prefetch=40)
    whole = eventually(lambda: client.jobs(task="whole"), "it is there")[0]
    until_state(client, whole.id, "done")
    assert client.jobs(task="small", state="pending", limit=1), "it has waited for them"
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    # What was claimed ahead goes back too: the drain takes jobs that have not begun from a call under way.
    assert client.jobs(state="running") == []
    assert client.violations() == []


@pytest.mark.parametrize("isolate", [False, True])
def test_jobs_one_after_another_cost_one_commit_each(
    db: psycopg.Connection[dict[str, object]], client: Client, fleet: Fleet, isolate: bool
) -> None:
    count = 5 if isolate else 100
    fleet.define(f"""
@app.task(isolate={isolate})
def small(ctx):
    return None
""")
    db.execute("create table claimed (job_id bigint, xid text)")
    db.execute(
        "create function note() returns trigger language plpgsql security definer as $$ begin "
        "insert into public.claimed values (new.id, pg_current_xact_id()::xid::text); return null; end $$"
    )
    db.execute(
        "create trigger note after update on gangq.live_jobs for each row when (new.state = 'running') "
        "execute function note()"
    )
    ids = client.submit(task="small", payloads=[{}] * count)
    # One lane: while the claim of another lane holds the worker's row, a completion claims nothing.
    fleet.start(slots=0)
    eventually(lambda: set(client.job_states(ids=ids).values()) == {"done"}, "all are done")
    # All but the first are claimed in the transaction in which their predecessor was completed.
    along = db.execute(
        "select count(*) as n from claimed c join gangq.history h on h.xmin::text = c.xid and h.job_id = c.job_id - 1"
    ).fetchone()
    assert along == {"n": count - 1}


def test_a_finished_job_of_a_batch_is_reported_while_its_successor_runs(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def wait(ctx, path):
    while path and not Path(path).exists():
        time.sleep(0.01)
""")
    gate = fleet.directory / "gate"
    first, second = client.submit(task="wait", payloads=[{"path": ""}, {"path": str(gate)}])
    fleet.start(prefetch=2)
    until_state(client, first, "done")
    assert client.job(id=second).state == "running"
    gate.touch()
    until_state(client, second, "done")


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("raise ValueError('no such epoch')", "ValueError", "no such epoch"),
        ("sys.exit(3)", "SystemExit", "sys.exit(3)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("raise MemoryError('no room')", "MemoryError", "no room"),
        ("def f(): return f()\n    f()", "RecursionError", "recursion"),
        ("raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()", "Odd", "could not be formatted"),
        ("raise ValueError('nul ' + chr(0) + ' surrogate ' + chr(0xd800))", "ValueError", "nul"),
    ],
)
def test_a_handler_that_misbehaves_fails_its_own_job_only(
    client: Client, fleet: Fleet, body: str, kind: str, message: str
) -> None:
    fleet.define(f"""
@app.task
def bad(ctx):
    {body}

@app.task
def good(ctx):
    return os.getpid()
""")
    worker = fleet.start()
    bad = until_state(client, submit(client, "bad", max_attempts=1), "failed")
    assert bad.error is not None
    assert bad.error["type"] == kind
    assert message in bad.error["message"]
    assert until_state(client, submit(client, "good"), "done").result == worker.process.pid


def test_one_refused_result_of_a_batch_does_not_take_the_others_along(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def sized(ctx, n):
    return "x" * n
""")
    sizes = [1, 2_000_000, 2]
    ids = client.submit(task="sized", payloads=[{"n": n} for n in sizes])
    fleet.start(prefetch=3)
    rows = [until_state(client, i, "done", "failed") for i in ids]
    assert [row.state for row in rows] == ["done"] * 3
    assert (rows[0].result, list(rows[1].result), rows[2].result) == ("x", ["gangq_note"], "xx")
    assert [client.job(id=i).stops for i in ids] == [0, 0, 0]


def test_a_fork_that_returns_from_the_handler_never_becomes_a_second_worker(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def forks(ctx):
    pid = os.fork()
    if pid == 0:
        return "child"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
    fleet.start()
    assert until_state(client, submit(client, "forks"), "done").result == 1
    assert until_state(client, submit(client, "forks"), "done").result == 1


def test_a_failed_attempt_is_tried_again(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def flaky(ctx):
    if ctx.attempt < 3:
        raise RuntimeError("not yet")
    return ctx.attempt
""")
    fleet.start()
    job = until_state(client, submit(client, "flaky"), "done")
    assert (job.result, job.attempts) == (3, 3)


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_what_no_attempt_can_change_is_not_tried_again(client: Client, fleet: Fleet, isolate: bool) -> None:
    fleet.define(f"""
@app.task(isolate={isolate})
def takes_one(ctx, n):
    raise TypeError("inside")

async def later():
    return 1

@app.task(isolate={isolate})
def forgets(ctx):
    return later()
""")
    fleet.start()
    cases = [
        ("takes_one", {"m": 1}, 1, "unexpected keyword argument"),
        ("takes_one", {}, 1, "missing 1 required"),
        ("takes_one", {"n": 1, "ctx": 2}, 1, "multiple values for argument 'ctx'"),
        ("takes_one", {"n": 1}, 2, "inside"),
        ("forgets", {}, 1, "returned a coroutine"),
        ("command", {"argv": "no list"}, 1, "argv is 'no list'"),
    ]
    for task, payload, attempts, said in cases:
        job = until_state(client, submit(client, task, payload, max_attempts=2), "failed", "done")
        assert job.error is not None, job
        assert (job.state, job.attempts) == ("failed", attempts), job
        assert said in job.error["message"]


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_a_task_says_which_errors_are_tried_again_and_when(
    client: Client, fleet: Fleet, isolate: bool
) -> None:
    fleet.define(f"""
import gangq

policy = gangq.Retry(3, backoff="50ms", on=(OSError, KeyError), never=(FileNotFoundError,))

@app.task(isolate={isolate}, retry=policy)
def raises(ctx, kind):
    if kind == "later" and ctx.attempt == 1:
        raise gangq.RetryLater("100ms", "no licence")
    if kind == "fail":
        raise gangq.Fail("bad input")
    if kind != "later":
        raise dict(os=OSError, key=KeyError, file=FileNotFoundError, value=ValueError)[kind]("no")
    return ctx.attempt
""")
    fleet.start()
    jobs = {
        kind: submit(client, "raises", {"kind": kind}) for kind in ("os", "file", "value", "fail", "later")
    }
    ended = {kind: until_state(client, job, "failed", "done") for kind, job in jobs.items()}
    assert {kind: (job.state, job.attempts, job.max_attempts) for kind, job in ended.items()} == {
        "os": ("failed", 3, 3),
        "file": ("failed", 1, 3),
        "value": ("failed", 1, 3),
        "fail": ("failed", 1, 3),
        "later": ("done", 2, 3),
    }
    assert ended["fail"].error is not None
    assert (ended["fail"].error["type"], ended["fail"].error["message"]) == ("Fail", "bad input")
    retried = [event for event in client.events(job_id=jobs["later"], limit=None) if event.kind == "retry"]
    assert [event.reason for event in retried] == ["RetryLater"]


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_a_handler_hands_its_job_back_to_wait_and_is_charged_for_nothing(
    client: Client, fleet: Fleet, tmp_path: Path, isolate: bool
) -> None:
    fleet.define(f"""
import pathlib

@app.task(isolate={isolate}, max_attempts=1)
def waits(ctx, ready):
    try:
        if not pathlib.Path(ready).exists():
            pathlib.Path(ready).touch()
            ctx.snooze("100ms")
    except Exception:
        return "caught"
    return ctx.attempt

@app.task(isolate={isolate})
def naps(ctx):
    ctx.snooze(0)
""")
    fleet.start()
    waits = submit(client, "waits", {"ready": str(tmp_path / "ready")}, max_snoozes=3)
    done = until_state(client, waits, "done", "failed")
    assert (done.result, done.attempts, done.snoozes, done.max_snoozes) == (1, 1, 1, 3)
    assert [attempt.cause for attempt in client.attempts(job_id=waits)] == ["snoozed", "done"]
    failed = until_state(client, submit(client, "naps", {}, max_snoozes=1), "failed")
    assert failed.error is not None
    assert (failed.error["type"], failed.attempts, failed.snoozes) == ("SnoozedTooOften", 0, 2)


def test_a_member_of_a_gang_is_told_that_it_cannot_be_snoozed(client: Client, fleet: Fleet) -> None:
    fleet.define("""
import gangq

@app.task
def naps(ctx):
    try:
        ctx.snooze("1m")
    except gangq.WrongState as problem:
        return str(problem)
""")
    fleet.start()
    made = client.submit_gang(task="naps", size=1)
    done = until_state(client, made.job_ids[0], "done")
    assert f"member of gang g{made.gang_id}" in done.result


def test_beats_reach_the_database(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def beats(ctx):
    ctx.beat(step=3, total=10, phase="train", loss=0.5)
    ctx.wait_stopping()
""")
    fleet.start()
    job_id = submit(client, "beats")
    job = eventually(lambda: (j := client.job(id=job_id)) and j.progress and j, "the beat is stored")
    assert {"step": 3, "total": 10, "phase": "train", "loss": 0.5}.items() <= job.progress.items()


def test_a_checkpoint_comes_back_on_the_next_attempt(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def saves(ctx):
    if ctx.checkpoint is None:
        ctx.save_checkpoint(7, b"seven")
        raise RuntimeError("once more")
    found = ctx.checkpoint
    return [found.step, found.data.decode(), found.path.read_text()]
""")
    fleet.start()
    assert until_state(client, submit(client, "saves"), "done").result == [7, "seven", "seven"]


def test_cancel_reaches_a_handler_that_listens_within_a_moment(client: Client, fleet: Fleet) -> None:
    short_leases(client, heartbeat_s=5, lease_s=14)  # Not by the heartbeat: it is too slow to pass this.
    fleet.define("""
@app.task
def listens(ctx):
    (HERE / "started").touch()
    while not ctx.stopping:
        time.sleep(0.001)
""")
    worker = fleet.start()
    eventually(lambda: "listening" in worker.log, "the worker listens")
    job_id = submit(client, "listens")
    eventually(lambda: (fleet.directory / "started").exists(), "the handler runs")
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "cancelled", timeout=2)


def test_a_handler_that_ignores_cancel_takes_its_process_with_it(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def deaf(ctx):
    while True:
        time.sleep(0.01)
""")
    worker = fleet.start()
    job_id = submit(client, "deaf")
    until_state(client, job_id, "running")
    client.cancel(job_ids=[job_id])
    assert worker.exit_code(10) == 79
    assert "hard_exit" in worker.log
    fleet.start()  # Its next incarnation proves it dead.
    until_state(client, job_id, "cancelled")


def test_a_handler_that_holds_the_interpreter_cannot_outlive_its_grace(client: Client, fleet: Fleet) -> None:
    fleet.define("""
import re
@app.task
def frozen(ctx):
    (HERE / "started").touch()
    time.sleep(0.1)
    re.match("(a+)+b", "a" * 64)  # For ages, and without letting go of the GIL.
""")
    short_leases(client, heartbeat_s=0.5, lease_s=4)
    worker = fleet.start()
    until_state(client, submit(client, "frozen"), "running")
    eventually(lambda: (fleet.directory / "started").exists(), "the handler runs")
    assert worker.exit_code(10) == 77
    assert "in frozen" in worker.log  # Where it stood is on record all the same.


def test_a_success_told_while_stopping_counts_unless_the_handler_broke_off(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def finishes(ctx):
    (HERE / "started").touch()
    while not (HERE / "told").exists():
        time.sleep(0.01)
    return "all of it"
""")
    fleet.start()
    job_id = submit(client, "finishes")
    eventually(lambda: (fleet.directory / "started").exists(), "the handler runs")
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "preempting")
    (fleet.directory / "told").touch()
    assert until_state(client, job_id, "done", "cancelled").state == "done"


@pytest.mark.parametrize(
    ("commit", "state"),
    [("conn.commit()", "done"), ("conn.rollback()", "failed")],
)
def test_completing_in_the_callers_transaction_happens_with_its_commit_only(
    client: Client, fleet: Fleet, dsn: str, commit: str, state: str
) -> None:
    fleet.define(f"""
import psycopg
@app.task
def effects(ctx):
    with psycopg.connect({dsn!r}) as conn:
        conn.execute("create table effect ()")
        ctx.complete(conn, {{"made": 1}})
        {commit}
    time.sleep(1.2)  # Two heartbeats find the claim gone, and let it be.
""")
    fleet.start()
    job = until_state(client, submit(client, "effects", max_attempts=1), "done", "failed")
    assert job.state == state
    if state == "done":
        assert job.result == {"made": 1}
    else:
        assert job.error is not None
        assert job.error["type"] == "NotCommitted"
    assert until_state(client, submit(client, "effects", max_attempts=1), "failed").error is not None


def test_an_isolated_handler_runs_in_a_child_and_its_result_comes_back(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task(isolate=True)
def apart(ctx, n):
    assert gangq.current() is ctx
    ctx.beat(step=n)
    if n == 0:
        raise ValueError("zero")
    if n < 0:
        sys.exit(5)
    print("printed by", os.getpid())
    return {"pid": os.getpid(), "n": n, "dsn": os.environ.get("GANGQ_DSN")}
""")
    worker = fleet.start()
    good, bad, gone = client.submit(task="apart", payloads=[{"n": 5}, {"n": 0}, {"n": -1}], max_attempts=1)
    result = until_state(client, good, "done").result
    assert (result["n"], result["dsn"]) == (5, None)
    assert result["pid"] != worker.process.pid
    assert f"printed by {result['pid']}" in "".join(row.chunk for row in client.logs(job_id=good))
    failed = until_state(client, bad, "failed")
    assert failed.error is not None
    assert (failed.error["type"], failed.error["message"]) == ("ValueError", "zero")
    assert "in apart" in failed.error["traceback"]
    ended = until_state(client, gone, "failed")
    assert ended.error is not None
    assert ended.error["type"] == "SystemExit"


def test_a_job_with_some_of_the_workers_devices_runs_in_a_process_of_its_own(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def shown(ctx):
    return [os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), [d.index for d in ctx.devices]]
""")
    worker = fleet.start(devices="2x24GiB", slots=1)
    some = until_state(client, submit(client, "shown", gpus=1), "done").result
    every = until_state(client, submit(client, "shown", gpus=2), "done").result
    assert some[0] != worker.process.pid
    assert some[1:] == [str(some[2][0]), some[2]]
    assert every == [worker.process.pid, "0,1", [0, 1]]


def test_a_task_that_the_worker_does_not_have_is_not_claimed(client: Client, fleet: Fleet) -> None:
    fleet.define("app.declare_task('elsewhere')\n@app.task\ndef here(ctx): pass\n")
    fleet.start()
    elsewhere = submit(client, "elsewhere")
    until_state(client, submit(client, "here"), "done")
    assert client.job(id=elsewhere).state == "pending"


_TALKER = """
import logging, subprocess
@app.task
def talk(ctx):
    print("printed")
    print("complained", file=sys.stderr)
    logging.getLogger("mine").info("logged")
    aside = threading.Thread(target=lambda: print("said aside"))
    aside.start()
    aside.join()
    subprocess.run(["echo", "from a subprocess"], check=True)
@app.task
def quiet(ctx):
    return None
"""


def test_what_a_handler_writes_is_kept_for_its_job_and_still_shown(
    client: Client, fleet: Fleet, dsn: str
) -> None:
    fleet.define(_TALKER)
    worker = fleet.start()
    silent = submit(client, "quiet")
    job_id = submit(client, "talk")
    until_state(client, silent, "done")
    until_state(client, job_id, "done")
    kept = "".join(row.chunk for row in client.logs(job_id=job_id)).splitlines()
    assert kept[:2] + kept[3:] == ["printed", "complained", "said aside"]
    assert kept[2].endswith("INFO logged")
    for words in ("printed", "complained", "INFO logged", "said aside", "from a subprocess"):
        assert worker.log.count(words) == 1
    assert client.logs(job_id=silent) == []
    shown = subprocess.run(
        [sys.executable, "-m", "gangq", "--dsn", dsn, "logs", str(job_id)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines() == kept


def test_each_job_keeps_its_own_words_and_they_can_be_read_while_it_runs(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define("""
@app.task
def number(ctx, n):
    print(n)
    while n == 3 and not (HERE / "go").exists():
        time.sleep(0.01)
    print("over")
""")
    fleet.start(prefetch=4)
    ids = client.submit(task="number", payloads=[{"n": n} for n in range(4)])

    def said(job_id: int) -> str:
        return "".join(row.chunk for row in client.logs(job_id=job_id))

    eventually(lambda: said(ids[3]) == "3\n", "it is there while the job runs")
    (tmp_path / "go").touch()
    until_state(client, ids[3], "done")
    assert [said(job_id) for job_id in ids] == [f"{n}\nover\n" for n in range(4)]


def test_output_of_a_handler_without_end_is_bounded(client: Client, fleet: Fleet) -> None:
    client.configure(log_bytes=65536)
    fleet.define("""
@app.task
def flood(ctx):
    for _ in range(3000):
        print("x" * 1000)
    print("end")
""")
    worker = fleet.start()
    job_id = submit(client, "flood")
    until_state(client, job_id, "done")
    kept = "".join(row.chunk for row in client.logs(job_id=job_id))
    assert kept.endswith("end\n")
    assert "bytes dropped here" in kept
    assert len(kept.encode()) <= 65536
    assert worker.log.count("x" * 1000) == 3000


def test_a_checkpoint_that_was_laid_down_as_a_file_is_gone_after_its_job(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def saves(ctx):
    if ctx.checkpoint is None:
        ctx.save_checkpoint(1, b"saved")
        raise ValueError
    assert ctx.checkpoint.path.read_bytes() == b"saved"
    return str(ctx.checkpoint.path.parent)
""")
    fleet.start(slots=0, light=1)
    (job,) = client.submit(task="saves")
    place = Path(until_state(client, job, "done").result)
    assert place.parent.is_dir()
    assert not place.exists()
