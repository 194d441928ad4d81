"""What README's "Five minutes" costs the machine, from a fresh clone to the first gang done.

Its blocks are taken out of README.md as they stand. The reader's own time is not in it: reading, typing, deciding.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
DEVICES = "4x24GiB"
"""What README tells a reader without a driver to declare."""
_PATIENCE_S = 240.0


@dataclass(frozen=True)
class Step:
    """One command of the newcomer, and the seconds that the machine took for it."""

    command: str
    took_s: float


def steps(directory: Path, installed: Path | None = None) -> list[Step]:
    """Do it all in this directory, with a PostgreSQL of its own. Raises where a command fails.

    `installed`: a site-packages directory with all that gangq needs, so that nothing is fetched.
    """
    clone, home = directory / "gangq", directory / "state"
    home.mkdir()
    tasks, commands, client = blocks((TOP / "README.md").read_text(encoding="utf-8"))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GANGQ_", "PYTHON", "VIRTUAL"))},
        "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
        "XDG_DATA_HOME": str(home), "XDG_STATE_HOME": str(home), "XDG_RUNTIME_DIR": str(home),
        "GANGQ_DSN": "embedded",
    }  # fmt: skip
    migrate, worker = (line.partition("#")[0].strip() for line in commands if line.startswith("gangq "))
    taken = [
        _timed(["git", "clone", "--quiet", str(TOP), str(clone)], "git clone URL gangq", directory, environ),
        _timed([sys.executable, "-m", "venv", ".venv"], "python3 -m venv .venv", clone, environ),
    ]
    if installed:
        (site,) = (clone / ".venv/lib").glob("python*/site-packages")
        (site / "installed.pth").write_text(f"{clone / 'src'}\n{installed}\n")
        (clone / ".venv/bin/gangq").write_text(f'#!/bin/sh\nexec {clone}/.venv/bin/python -m gangq "$@"\n')
        (clone / ".venv/bin/gangq").chmod(0o755)
    else:
        pip = ["pip", "install", "--quiet", ".[embedded]"]
        taken.append(_timed(pip, "pip install '.[embedded]'", clone, environ))
    (clone / "tasks.py").write_text(tasks)
    (clone / "first.py").write_text(client)
    taken.append(_timed(migrate.split(), migrate, clone, environ))
    argv = [*worker.split(), "--devices", DEVICES]
    with (directory / "worker.log").open("wb") as log:
        serving = subprocess.Popen(argv, cwd=clone, env=environ, stdout=log, stderr=log)
        try:
            taken.append(_timed(["python", "first.py"], "python first.py", clone, environ))
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.wait(60)
            subprocess.run(["gangq", "db", "stop"], cwd=clone, env=environ, capture_output=True, check=False)
    return taken


def blocks(readme: str) -> tuple[str, list[str], str]:
    """tasks.py, the shell's lines, and the client up to its gang."""
    section = readme[readme.index("## Five minutes") : readme.index("## A day's commands")]
    tasks, shell, client = re.findall(r"```(?:python|sh)\n(.*?)```", section, re.DOTALL)
    lines = client.splitlines(keepends=True)
    gang = next(n for n, line in enumerate(lines) if ".gang(" in line)
    return tasks, shell.splitlines(), "".join(lines[: gang + 1])


def _timed(argv: list[str], command: str, directory: Path, environ: Mapping[str, str]) -> Step:
    began = time.monotonic()
    done = subprocess.run(
        argv, cwd=directory, env=environ, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Step(command, time.monotonic() - began)
