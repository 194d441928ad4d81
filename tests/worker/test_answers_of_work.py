"""What a job says of itself: no number, however odd, and no value that cannot be stored, undoes work that is done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gangq import App, ResultNotStored
from gangq.client import Client
from gangq.worker.jobs import BEAT_BYTES
from gangq.worker.results import as_progress
from worker.worker_process import Fleet, eventually, until_state

INLINE_AND_ISOLATED = pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])


def run(client: Client, task: str, **payload: object) -> Any:
    (job_id,) = client.submit(task=task, payloads=[payload], max_attempts=1)
    return until_state(client, job_id, "done", "failed")


def until_told(client: Client, job_id: int, step: int) -> Any:
    """Its progress, once it has come to this step."""
    eventually(
        lambda: (
            (client.job(id=job_id).progress or {}).get("step") == step or client.job(id=job_id).finished_at
        ),
        f"job {job_id} tells of step {step}",
    )
    return client.job(id=job_id).progress


ODD_BEAT = """
    class Odd:
        def __repr__(self):
            return 1 / 0
    loop = []
    loop.append(loop)
    ctx.beat(
        step=np.int64(7), total=10, phase="run", loss=float("nan"), rate=np.float32(0.5), peak=float("-inf"),
        when={1, 2}, odd=Odd(), text="a" + chr(0), loop=loop, each={"lr": np.float64("inf"), 3: 4},
        deep=[np.bool_(True), b"bytes" * 200],
    )
"""


@INLINE_AND_ISOLATED
def test_progress_of_any_kind_is_stored_as_well_as_it_can_be_and_never_ends_the_job(
    client: Client, fleet: Fleet, isolate: bool
) -> None:
    fleet.define(f"""
import numpy as np

@app.task(isolate={isolate})
def train(ctx):{ODD_BEAT}
    ctx.beat(step=8, blob="x" * 20_000, **{{str(n): "y" * 900 for n in range(30)}})
    ctx.beat(step=9, loss=np.float32("nan"))
{ODD_BEAT}
    while not (HERE / "gate").exists():
        time.sleep(0.02)
    return "trained"
""")
    fleet.start()
    (job_id,) = client.submit(task="train", max_attempts=1)
    told = until_told(client, job_id, 7)
    (fleet.directory / "gate").touch()
    job = until_state(client, job_id, "done", "failed")
    assert (job.state, job.result, job.attempts) == ("done", "trained", 1)
    assert (told["step"], told["total"], told["phase"], told["rate"]) == (7, 10, "run", 0.5)
    assert (told["loss"], told["peak"], told["each"]) == (None, None, {"lr": None, "3": 4})
    assert (told["when"], told["text"], told["loop"]) == ("{1, 2}", "'a\\x00'", ["[[...]]"])
    assert "Odd" in told["odd"]
    assert told["deep"][0] is True
    assert 100 < len(told["deep"][1]) < 300
    kept = "".join(row.chunk for row in client.logs(job_id=job.id))
    said = "a beat was not stored as it was given" if isolate else "beat_not_stored_whole"
    assert kept.count(said) == 1, "said once, not with every beat"


DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "more",
    [
        {"blob": "x" * 20_000},
        {"a\0": 1},
        {"digits": 10**5000},
        {"deep": DEEP},
        {str(n): "y" * 900 for n in range(30)},
    ],
    ids=["large", "NUL", "digits", "deep", "many"],
)
def test_of_a_beat_that_cannot_be_stored_whole_step_total_phase_and_loss_are_kept(
    more: dict[str, Any],
) -> None:
    known = {"step": 8, "total": 9, "phase": "run", "loss": None}
    stored, why = as_progress({**known, "loss": float("nan"), **more}, BEAT_BYTES)
    assert stored == known
    assert why is not None
    assert why.endswith("only step, total, phase and loss are kept")
    assert as_progress({"step": 8, "loss": [0.5] * 9000}, BEAT_BYTES)[0] == {"step": 8}
    assert as_progress({"step": 10**5000, "phase": "run"}, BEAT_BYTES)[0] == {"phase": "run"}


RETURNS = [
    ("{'loss': float('nan'), 'best': np.float32(0.5), 'steps': [np.int64(3), float('inf')]}",
     {"loss": None, "best": 0.5, "steps": [3, None]}),
    ("np.float64('nan')", None),
    ("(1, np.bool_(True))", [1, True]),
]  # fmt: skip
CANNOT_BE_STORED = [
    ("object()", "has object at $, which is not JSON"),
    ("{'at': [Path('/')]}", "at $.at[0], which is not JSON"),
    ("loop", "contains itself"),
    ("'a' + chr(0)", "NUL"),
    ("{1: 2}", "key of type int"),
    ("10**5000", "digits"),
    ("'x' * 2_000_000", "bytes"),
    ("'x' * 9_000_000", "bytes"),
]


@INLINE_AND_ISOLATED
def test_a_result_of_odd_numbers_is_stored_and_what_cannot_be_leaves_a_note(
    client: Client, fleet: Fleet, dsn: str, isolate: bool
) -> None:
    bodies = [body for body, _ in RETURNS + CANNOT_BE_STORED]
    fleet.define(f"""
import numpy as np
loop = []
loop.append(loop)

@app.task(isolate={isolate})
def work(ctx, body):
    return eval(body)
""")
    fleet.start()
    ids = client.submit(task="work", payloads=[{"body": body} for body in bodies], max_attempts=1)
    rows = [until_state(client, job_id, "done", "failed", timeout=60) for job_id in ids]
    assert [(row.state, row.attempts) for row in rows] == [("done", 1)] * len(rows)
    assert [row.result for row in rows[: len(RETURNS)]] == [expected for _, expected in RETURNS]
    with App(dsn) as app:
        for job_id, (_, said) in zip(ids[len(RETURNS) :], CANNOT_BE_STORED, strict=True):
            assert app.job(job_id).wait() == "done"
            with pytest.raises(ResultNotStored) as refused:
                app.job(job_id).result()
            assert said in str(refused.value)
            assert refused.value.job_id == job_id
            assert list(client.job(id=job_id).result) == ["gangq_note"]


def test_a_command_reports_what_it_likes_and_goes_on(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    script = (
        f'set -e; gangq() {{ {sys.executable} -m gangq "$@"; }}; gangq beat --step 1 --loss nan; '
        "gangq beat --step 2 --loss inf lr=NaN best=0.5 --json; "
        f"while [ ! -e {tmp_path / 'gate'} ]; do sleep 0.05; done"
    )
    fleet.start()
    (job_id,) = client.submit(
        task="command", payloads=[{"argv": [script], "shell": True, "env": {}, "cwd": None}], max_attempts=1
    )
    assert until_told(client, job_id, 2) == {"step": 2, "loss": None, "lr": None, "best": 0.5}
    (tmp_path / "gate").touch()
    job = until_state(client, job_id, "done", "failed")
    output = "".join(row.chunk for row in client.logs(job_id=job_id))
    assert job.state == "done", output
    assert '"loss": null' in output or '"loss":null' in output


def test_a_result_completed_in_the_callers_transaction_is_stored_alike(client: Client, fleet: Fleet) -> None:
    fleet.define("""
import psycopg, numpy as np

@app.task
def own(ctx, odd):
    with psycopg.connect(os.environ["TEST_DSN"]) as conn:
        ctx.complete(conn, object() if odd else {"loss": float("nan"), "best": np.float32(2)})
""")
    fleet.start()
    assert run(client, "own", odd=False).result == {"loss": None, "best": 2.0}
    noted = run(client, "own", odd=True)
    assert (noted.state, list(noted.result)) == ("done", ["gangq_note"])
