"""Hooks in real workers: in the process of the handler, each process once, and what their errors end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import Fleet, eventually, until_state

HOOKS = """
SEEN = []

def note(text):
    SEEN.append(text)
    with open(HERE / "seen", "a") as file:
        file.write(f"{os.getpid()} {text}\\n")

@app.on_worker_start(children=True)
def in_each():
    note("worker start")

@app.on_worker_start
def in_worker():
    note("worker start of main")

@app.on_worker_stop(children=True)
def leaves():
    note("worker stop")

@app.on_start
def starts(ctx):
    note(f"start {ctx.job.id}")

@app.on_failure
def fails(ctx, outcome):
    note(f"failure {ctx.job.id} {outcome.final}")

@app.on_end
def ends(ctx, outcome):
    note(f"end {ctx.job.id} {outcome.state}")
    raise RuntimeError("too late")

@app.task(isolate=ISOLATED)
def task(ctx, how="returns"):
    if how == "raises":
        raise ValueError("bad")
    if how == "dies":
        os._exit(3)
    if how == "waits":
        while not ctx.stopping:
            time.sleep(0.02)
        return None
    return list(SEEN)
"""


def seen(place: Path) -> list[tuple[int, str]]:
    path = place / "seen"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), text) for pid, _, text in (line.partition(" ") for line in lines)]


def submit(client: Client, how: str, **options: object) -> int:
    return client.submit(task="task", payloads=[{"how": how}], max_attempts=1, **options)[0]  # type: ignore[arg-type]


def test_a_worker_calls_them_in_its_own_process(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(HOOKS.replace("ISOLATED", "False"))
    worker = fleet.start(slots=0, light=1)
    done = submit(client, "returns")
    begun = ["worker start", "worker start of main"]
    assert until_state(client, done, "done").result == [*begun, f"start {done}"]
    failed = submit(client, "raises")
    assert until_state(client, failed, "failed").error["type"] == "ValueError"
    stopped = submit(client, "waits")
    until_state(client, stopped, "running")
    client.cancel(job_ids=[stopped])
    until_state(client, stopped, "cancelled")
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert [pid for pid, _ in seen(tmp_path)] == [worker.process.pid] * 10
    assert [text for _, text in seen(tmp_path)] == [
        *begun,
        f"start {done}",
        f"end {done} done",
        f"start {failed}",
        f"failure {failed} True",
        f"end {failed} failed",
        f"start {stopped}",
        f"end {stopped} stopped",
        "worker stop",
    ]
    assert worker.log.count("hook_failed") == 3


def test_a_handler_in_a_child_process_has_them_there(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(HOOKS.replace("ISOLATED", "True"))
    worker = fleet.start(slots=0, light=2)
    done, failed, dead = (submit(client, how) for how in ("returns", "raises", "dies"))
    assert until_state(client, done, "done").result == ["worker start", f"start {done}"]
    assert until_state(client, failed, "failed").error["type"] == "ValueError"
    assert until_state(client, dead, "failed").error["type"] == "ExitStatus"
    by_process: dict[int, list[str]] = {}
    for pid, text in seen(tmp_path):
        by_process.setdefault(pid, []).append(text)
    assert worker.process.pid not in by_process
    assert sorted(by_process.values()) == sorted(
        [
            ["worker start", f"start {done}", f"end {done} done", "worker stop"],
            [
                "worker start",
                f"start {failed}",
                f"failure {failed} True",
                f"end {failed} failed",
                "worker stop",
            ],
            ["worker start", f"start {dead}"],
        ]
    )


@pytest.mark.parametrize("child", [False, True], ids=["worker", "child"])
def test_a_start_hook_that_raises_ends_the_worker_before_it_claims_or_fails_the_job_of_a_child(
    client: Client, fleet: Fleet, child: bool
) -> None:
    fleet.define(f"""
@app.on_worker_start(children={child})
def connects():
    if {child} and not os.environ.get("GANGQ_KEY"):
        return
    raise ConnectionError("no tracking server")

@app.task(isolate={child})
def task(ctx, how):
    return how
""")
    job = submit(client, "returns")
    worker = fleet.start(slots=0, light=1)
    said = "the hook connects of on_worker_start raised ConnectionError: no tracking server"
    if child:
        error = until_state(client, job, "failed").error
        assert error["type"] == "HookFailed"
        assert said in error["message"]
        assert worker.process.poll() is None
    else:
        assert worker.exit_code() == 1
        assert said in worker.log
        assert (client.job(id=job).state, client.workers()) == ("pending", [])


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_time_in_a_hook_is_time_of_the_job(client: Client, fleet: Fleet, isolate: bool) -> None:
    fleet.define(f"""
@app.on_end
def hangs(ctx, outcome):
    time.sleep(60)

@app.task(isolate={isolate}, budget=1)
def task(ctx, how):
    return how
""")
    worker = fleet.start(slots=0, light=1)
    job = submit(client, "returns", budget_s=1)
    eventually(lambda: client.trips(job_id=job), "the watchdog has tripped")
    assert client.trips(job_id=job)[0].code == 75
    if not isolate:
        assert worker.exit_code() == 75


RACES = """
def note(text):
    with open(HERE / "seen", "a") as file:
        file.write(f"{os.getpid()} {text}\\n")

@app.on_end
def ends(ctx, outcome):
    note(f"ends {outcome.state}")

@app.HOOK
def held(ctx, outcome=None):
    first = not (HERE / "held").exists()
    (HERE / "held").touch()
    note("held" if first else "not held")
    while first and not ctx.stopping:
        time.sleep(0.02)

@app.task(isolate=ISOLATED)
def task(ctx, how):
    note("handler")
    ran = time.time_ns()
    (HERE / "last").write_text(str(ran))
    return None if ctx.stopping else ran
"""
in_both_lanes = pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])


def texts(place: Path) -> list[str]:
    return [text for _, text in seen(place)]


def held(place: Path) -> None:
    eventually(lambda: "held" in texts(place), "the hook runs")


@in_both_lanes
@pytest.mark.parametrize(
    ("hook", "state", "seen_then"),
    [
        ("on_start", "cancelled", ["held", "handler", "ends stopped"]),
        ("on_end", "done", ["handler", "held", "ends done"]),
    ],
)
def test_a_cancel_in_a_hook_is_seen_there_and_the_handler_makes_the_outcome(
    client: Client, fleet: Fleet, tmp_path: Path, isolate: bool, hook: str, state: str, seen_then: list[str]
) -> None:
    fleet.define(RACES.replace("HOOK", hook).replace("ISOLATED", str(isolate)))
    worker = fleet.start(slots=0, light=1)
    job = submit(client, "returns")
    held(tmp_path)
    client.cancel(job_ids=[job])
    ended = until_state(client, job, "cancelled", "done")
    ran = int((tmp_path / "last").read_text())
    assert (ended.state, ended.result) == (state, ran if state == "done" else None)
    assert texts(tmp_path) == seen_then
    assert worker.process.poll() is None


@in_both_lanes
def test_a_gang_that_makes_way_in_a_hook_runs_again(
    client: Client, fleet: Fleet, tmp_path: Path, isolate: bool
) -> None:
    fleet.define(RACES.replace("HOOK", "on_start").replace("ISOLATED", str(isolate)))
    fleet.start(slots=1)
    gang = client.submit_gang(task="task", size=1, payload={"how": "returns"}, wait_for_hardware=True)
    held(tmp_path)
    client.call("preempt_gang", gang_id=gang.gang_id, reason="another's turn")
    until_state(client, gang.job_ids[0], "done")
    assert texts(tmp_path) == ["held", "handler", "ends stopped", "not held", "handler", "ends done"]


@in_both_lanes
def test_a_worker_that_was_given_up_in_a_hook_changes_nothing_any_more(
    client: Client, fleet: Fleet, tmp_path: Path, isolate: bool
) -> None:
    fleet.define(RACES.replace("HOOK", "on_end").replace("ISOLATED", str(isolate)))
    fleet.start(slots=0, light=1)
    job = client.submit(task="task", payloads=[{"how": "returns"}])[0]
    held(tmp_path)
    (row,) = client.workers()
    client.report_dead(worker="w1", incarnation=row.incarnation, evidence={"by": "test"})
    fleet.start("w2", slots=0, light=1)
    result = until_state(client, job, "done").result
    assert texts(tmp_path)[:2] == ["handler", "held"]
    # The hook of the first attempt may come to its end, too, before or after the second attempt begins.
    assert [text for text in texts(tmp_path)[2:] if text != "ends done"] == ["handler", "not held"]
    assert texts(tmp_path)[-1] == "ends done"
    assert str(result) == (tmp_path / "last").read_text(), "that of the second attempt"


@in_both_lanes
def test_a_hook_submits_as_the_handler_does(client: Client, fleet: Fleet, isolate: bool) -> None:
    fleet.define(f"""
@app.on_end
def reports(ctx, outcome):
    if ctx.job.task == "task":
        App().client.submit(task="report", payloads=[{{"of": ctx.job.id}}])

@app.task
def report(ctx, of):
    return of

@app.task(isolate={isolate})
def task(ctx, how):
    return how
""")
    fleet.start(slots=0, light=1)
    job = submit(client, "returns")
    until_state(client, job, "done")
    (told,) = [row for row in client.jobs() if row.task == "report"]
    assert until_state(client, told.id, "done").result == job
    assert told.parent == job
