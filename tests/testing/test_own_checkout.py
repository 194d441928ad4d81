"""Tests are of the checkout that they lie in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]


def test_tests_refuse_to_run_against_the_code_of_another_checkout(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(HERE / "src", other / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "pyproject.toml", other)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/placement/test_when.py"],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(other / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 4
    assert f"these tests are of {HERE}, and gangq is imported from {other}" in run.stderr
