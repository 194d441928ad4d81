"""Each small file in examples/ is started by the command that its first line names, and shows what it says.

All run as a new user would: in a private PostgreSQL that the first of them makes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gangq.cli import main
from gangq.embedded import Server

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMPOSE = EXAMPLES / "compose"
FILES = sorted(EXAMPLES.glob("*.py"))


def command_of(file: Path) -> str:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return re.sub(r'^("""|# )', "", first)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a new user has; somebody else has a schedule in the same database."""
    home = tmp_path_factory.mktemp("home")
    found = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "HOME": str(home),
        "GANGQ_DATA_DIR": str(home / "server"),
        "PYTHONWARNINGS": "error",
    }
    if "GANGQ_PG_BINDIR" in os.environ:
        found["GANGQ_PG_BINDIR"] = os.environ["GANGQ_PG_BINDIR"]
    try:
        printed("gangq schedule add --embedded archive '0 5 * * *' archive", found)
        yield found
    finally:
        Server(found["GANGQ_DATA_DIR"]).stop()


def printed(command: str, environment: dict[str, str]) -> list[str]:
    """Lines of a shell command that has to succeed, in the directory of the examples."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=EXAMPLES,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def output_of(name: str, environment: dict[str, str]) -> list[str]:
    return printed(command_of(EXAMPLES / name), environment)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("sweep.py", ["rate 1.00 .*", "rate .*", "rate .*", "40 rates tried; the best is 1.00"]),
        (
            "batch_inference.py",
            ["loading painter", "a picture of a fjord", "a picture of a fox", "a picture of a boat"],
        ),
        (
            "pipeline.py",
            ["report: {'sum': 499500, 'shards': 4}", r"the next night is: .* 0[12]:00:00\+00:00"],
        ),
        (
            "outbox.py",
            ["rolled back: Alien is not paid for", r"film: \(1, 'Heat', 24\)", r"jobs: \[\(1, 'done'\)\]"],
        ),
        ("service.py", ["hello from job .*", "hello from job .*", r"endpoints after scale\(1\): 1"]),
    ],
)
def test_it_shows_what_it_says(name: str, shown: list[str], environment: dict[str, str]) -> None:
    lines = output_of(name, environment)
    assert len(lines) == len(shown), lines
    for line, pattern in zip(lines, shown, strict=True):
        assert re.fullmatch(pattern, line), line
        assert len(line) <= 80


def test_the_outbox_runs_under_a_worker_of_its_own(environment: dict[str, str]) -> None:
    (worker,) = re.findall(
        r"^A worker of its own: (.*)$", (EXAMPLES / "outbox.py").read_text("utf-8"), re.MULTILINE
    )
    output_of("outbox.py", environment)
    (job,) = printed("gangq submit --embedded render film=1", environment)
    printed(f"{worker} --once", environment)
    (shown,) = map(json.loads, printed(f"gangq show --embedded {job} --json", environment))
    assert (shown["job"]["state"], shown["job"]["result"]) == ("done", "rendered"), shown


def test_the_web_service_answers(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"exec env {command_of(EXAMPLES / 'api.py')} --port {port}"
    service = subprocess.Popen(command, shell=True, cwd=EXAMPLES, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=40) as browser:
            end = time.monotonic() + 60
            while True:
                try:
                    answer = browser.post("/primes/100", params={"wait": 30})
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < end, "the web service does not answer"
                    time.sleep(0.1)
            assert answer.json()["primes"] == 25
            job = browser.post("/primes/100", params={"wait": 0.001}).json()
            assert browser.get(f"/jobs/{job['job']}").json()["state"] in ("pending", "running", "done")
            assert browser.get("/jobs/999999").status_code == 404
    finally:
        service.send_signal(signal.SIGINT)
        service.wait(40)


def test_each_is_short_and_is_in_the_table_with_its_command() -> None:
    for file in [*FILES, COMPOSE / "compose.yaml"]:
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, file.name
        assert f"({file.relative_to(EXAMPLES)})" in README, file.name
        assert f"| `{command_of(file)}`" in README, file.name


def compose_text() -> str:
    return (COMPOSE / "compose.yaml").read_text(encoding="utf-8")


def parts() -> dict[str, Any]:
    """The services of the compose file."""
    found: dict[str, Any] = yaml.safe_load(compose_text())["services"]
    return found


@pytest.mark.parametrize("part", sorted(parts().keys() - {"db"}))
def test_each_command_of_the_compose_file_is_one_of_gangq(part: str) -> None:
    name, *words = shlex.split(parts()[part]["command"])
    assert name == "gangq"
    context = click.Context(main, info_name="gangq")
    command: click.Command = main
    while isinstance(command, click.Group):
        found, _, words = command.resolve_command(context, words)
        assert found == part or part == "migrate"
        (command,) = [one for one in [command.get_command(context, found or "")] if one]
        if found == "worker":
            break
    command.make_context(part, list(words), parent=context)


def test_the_compose_file_names_variables_and_secrets_that_exist() -> None:
    whole = compose_text() + (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "src/gangq").rglob("*.py")
    )
    named = set(re.findall(r"\bGANGQ_\w+", whole))
    assert "GANGQ_DSN_FD" in named
    for variable in named:
        assert f'"{variable}"' in sources, variable
    for part in parts().values():
        assert not [name for name in part.get("environment", {}) if name != "POSTGRES_PASSWORD_FILE"]


def test_the_logins_of_the_compose_file_can_do_their_part(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    first = command_of(COMPOSE / "compose.yaml")
    assert first.startswith("sh secrets.sh && docker compose up")
    subprocess.run(["sh", COMPOSE / "secrets.sh"], cwd=tmp_path, check=True)
    secrets = tmp_path / "secrets"
    compose = yaml.safe_load(compose_text())
    for secret in compose["secrets"].values():
        assert (tmp_path / secret["file"]).is_file()
    for name in ("owner.dsn", "worker.dsn", "viewer.dsn"):
        assert (secrets / name).stat().st_mode & 0o777 == 0o600

    # The private server has the six roles already, and logins by its socket need no password.
    server = Server(environment["GANGQ_DATA_DIR"])
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in (secrets / "init.sql").read_text(encoding="utf-8").splitlines():
            if not re.fullmatch(r"create role gangq_\w+;", statement):
                connection.execute(statement.encode())

    def gangq(command: str, login: str) -> str:
        """Run it as the image does: the secret is its standard input."""
        given = conninfo_to_dict((secrets / f"{login}.dsn").read_text(encoding="utf-8").strip())
        there = conninfo_to_dict(server.dsn())
        dsn = make_conninfo(**{**given, "host": there["host"], "port": there["port"]})
        done = subprocess.run(
            shlex.split(command),
            input=dsn,
            cwd=EXAMPLES,
            env={**environment, "GANGQ_DSN_FD": "0"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    gangq(compose["services"]["migrate"]["command"], "owner")
    (submit,) = re.findall(r"GANGQ_DSN_FD=0 (gangq submit .*) < secrets/worker.dsn", compose_text())
    gangq(submit, "worker")
    gangq(compose["services"]["worker"]["command"] + " --once", "worker")
    gangq(compose["services"]["tick"]["command"].removesuffix(" --loop"), "worker")
    (job,) = json.loads(f"[{gangq('gangq ls --json', 'viewer')}]")
    assert (job["task"], job["state"]) == ("evaluate", "done")


def test_the_gang_of_the_demo_survives_the_death_of_a_rank(environment: dict[str, str]) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed (pip install 'gangq[demo]')")
    output_of("digits/digits_app.py", environment)  # which fails unless it did


STARTED_BY = {
    "digits/digits_app.py": "examples/test_examples.py",
    "team/api.py": "examples/test_team.py",
    "team/notebook.py": "examples/test_team.py",
    "team/tasks.py": "examples/test_team.py",
    "team/test_team.py": "examples/test_team.py",
}
"""The programs in directories of their own, and the test that starts them by their first line."""
NOT_HERE = {
    "compose/compose.yaml": "docker: it would build an image and start containers; its commands are run above",
    "torch_ddp/train.py": "torch: make test-torch starts it",
}


@pytest.mark.parametrize("file", [*STARTED_BY, *NOT_HERE])
def test_a_larger_one_is_started_by_its_first_line(file: str) -> None:
    command = command_of(EXAMPLES / file)
    assert re.match(r"(gangq|python|pytest|sh|uvicorn) ?", command), command
    if file in NOT_HERE:
        pytest.skip(NOT_HERE[file])
    test = (EXAMPLES.parent / "tests" / STARTED_BY[file]).read_text(encoding="utf-8")
    started = re.findall(r"""(?:command_of|output_of)\("([^"]+)""", test)
    assert file.removeprefix("team/") in started


def test_every_program_is_started_by_some_test() -> None:
    imported = {"digits/train.py"}  # by digits_app.py
    programs = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} - imported
    small = {str(path.relative_to(EXAMPLES)) for path in FILES}
    assert programs | {"compose/compose.yaml"} == small | {*STARTED_BY, *NOT_HERE}
