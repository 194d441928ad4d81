"""Small projects that use gangq, tested by a real pytest with the plugin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path


def run_pytest(place: Path, files: Mapping[str, str], *argv: str, **environ: str) -> str:
    """Write the files of a project, run pytest there, and return what it prints."""
    assert entry_points(group="pytest11", name="gangq"), (
        "the plugin is not installed: pip install -e . does it, once pyproject.toml names it"
    )
    for name, text in files.items():
        (place / name).write_text(text)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GANGQ"))
    }
    inherited["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"]  # Where it makes a PostgreSQL.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rA", *argv],
        cwd=place,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout + done.stderr


def outcomes(shown: str) -> dict[str, str]:
    """What came of each test, by its name."""
    found = re.findall(r"(?m)^(PASSED|FAILED|ERROR) \S+::(\S+)", shown)
    return {name: outcome for outcome, name in found}
