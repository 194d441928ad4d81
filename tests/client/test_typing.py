"""What mypy knows of tasks and handles, in programs as users write them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TASKS = """\
import gangq
from gangq.testing import FakeContext, run

app = gangq.App()


@app.task(gpus=1, budget="2h", retry=gangq.Retry(5, backoff="10s..10m"))
def train(ctx: gangq.Context, lr: float, epochs: int = 3) -> dict[str, float]:
    return {"loss": lr / epochs}


@app.task
async def evaluate(ctx: gangq.Context, prompt: str) -> list[float]:
    return [len(prompt) / 2]


@app.task(budget="1m")
async def embed(ctx: gangq.Context, text: str) -> int:
    return len(text)
"""

KNOWN = """
reveal_type(train)  # Task[[lr: float, epochs: int =], dict[str, float]]
reveal_type(train.submit(lr=0.1))  # Job[dict[str, float]]
reveal_type(train.submit(0.1, epochs=2).result(timeout="1m"))  # dict[str, float]
reveal_type(train.options(priority=10, unique="ds-7").submit(lr=0.1).existed)  # bool
reveal_type(train.submit_many([{"lr": 0.1}]))  # list[Job[dict[str, float]]]
reveal_type(train.submit_many([{"lr": 0.1}], name="sweep", at_most=2))  # Batch[dict[str, float]]
reveal_type([job.result() for job in train.submit_many([{"lr": 0.1}], name="sweep")])  # list[dict[str, float]]
reveal_type(train.submit_many([{"lr": 0.1}], name="sweep")[:1])  # list[Job[dict[str, float]]]
reveal_type(train.submit_many([{"lr": 0.1}], name="sweep").results())  # list[dict[str, float]]
reveal_type(train.gang(4, strategy="pack").submit(lr=0.1))  # Gang[dict[str, float]]
reveal_type(train.gang(4).submit_each([{"lr": 0.1}]).results())  # list[dict[str, float]]
reveal_type(train.gang(roles=[gangq.Role("a", 1)]).submit(any=1))  # Gang[Any]
reveal_type(train.gang(2).submit(lr=1).members[0].result())  # dict[str, float]
reveal_type([job.result() for job in gangq.as_completed([train.submit(lr=0.1)])])  # list[dict[str, float]]
reveal_type(next(gangq.as_completed([train.submit(lr=0.1), app.gang(7)])).wait())  # str
reveal_type(evaluate)  # CoroutineTask[[prompt: str], list[float]]
reveal_type(evaluate.submit(prompt="a"))  # Job[list[float]]
reveal_type(evaluate.options(priority=1).submit("a").result())  # list[float]
reveal_type(embed.submit_many([{"text": "a"}]))  # list[Job[int]]
reveal_type(run(embed, text="a"))  # int
reveal_type(app.declare_task("elsewhere").submit(any=1).result())  # Any
reveal_type(app.job(7).wait())  # str

async def main() -> None:
    reveal_type(await train.aio.submit(lr=0.1))  # AsyncJob[dict[str, float]]
    reveal_type(await (await train.aio.options(delay="1m").submit(lr=0.1)).result())  # dict[str, float]
    reveal_type(await train.aio.submit_many([{"lr": 0.1}], name="sweep"))  # AsyncBatch[dict[str, float]]
    reveal_type(await evaluate.aio.submit("a"))  # AsyncJob[list[float]]
    reveal_type(await evaluate(FakeContext(), "a"))  # list[float]
    reveal_type(await train.aio.gang(2).submit(lr=0.1))  # AsyncGang[dict[str, float]]
    reveal_type(await (await train.aio.gang(2).submit(lr=0.1)))  # dict[str, float]
    reveal_type(await (await train.aio.submit_many([{"lr": 0.1}], name="sweep")))  # list[dict[str, float]]
"""

REFUSED = """
train.submit()
train.submit(lr="fast")
evaluate.submit(text="a")
embed.submit(3)
train.submit(lr=0.1, steps=3)
train.submit(0.1, 3, 4)
train.gang(4).submit(rl=0.1)
train.gang("4").submit(lr=0.1)
train.gang(4, strategie="pack")
train.options(gpu=1)
train.options(priority="high")
app.task(budgets=1)
wrong: str = train.submit(lr=0.1).result()

async def main() -> None:
    await train.aio.submit(lr="fast")
    await train.aio.gang(2).submit(rate=0.1)

@app.task
def no_context() -> None: ...
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str, str]]]:
    """What mypy says of each program: of which line, as what kind, and what. It reads gangq once, for both."""
    place = tmp_path_factory.mktemp("typing")
    programs = {"known": TASKS + KNOWN, "refused": TASKS + REFUSED}
    for name, program in programs.items():
        (place / f"{name}.py").write_text(program)
    argv = ["--strict", "--config-file=", f"--cache-dir={place / 'cache'}", "--no-error-summary"]
    argv += [f"{name}.py" for name in programs]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *argv], capture_output=True, text=True, cwd=place, timeout=200
    )
    found = re.findall(r"(?m)^(\w+)\.py:(\d+): (\w+): (.*)$", done.stdout)
    assert found, done.stdout + done.stderr
    return {
        name: [
            (program.splitlines()[int(number) - 1].strip(), kind, text)
            for of, number, kind, text in found
            if of == name
        ]
        for name, program in programs.items()
    }


def test_mypy_knows_what_a_task_takes_and_what_its_handles_give(
    said: dict[str, list[tuple[str, str, str]]],
) -> None:
    known = said["known"]
    found = [
        re.sub(r"\b(?:gangq\.\w+|builtins)\.", "", re.findall('"(.*)"', text)[0]) for _, _, text in known
    ]
    assert found == [line.rpartition("# ")[2] for line in KNOWN.splitlines() if "reveal_type" in line]
    assert {kind for _, kind, _ in known} == {"note"}


def test_mypy_refuses_what_a_task_does_not_take(said: dict[str, list[tuple[str, str, str]]]) -> None:
    refused = {line for line, kind, _ in said["refused"] if kind == "error"}
    wanted = {line.strip() for line in REFUSED.splitlines() if line} - {
        "async def main() -> None:",
        "def no_context() -> None: ...",
    }
    assert refused == wanted
