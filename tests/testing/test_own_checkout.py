"""Tests are of the checkout that they lie in, and share each helper module."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import gangq
from cli.cli_process import environment
from examples import test_team

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


def test_what_tests_start_imports_gangq_from_their_checkout(tmp_path: Path) -> None:
    """In any directory, and without a look at what is installed (-S)."""
    code = "import importlib.util; print(importlib.util.find_spec('gangq').origin)"
    for environ in (environment(None), test_team.environment()):
        argv = [sys.executable, "-S", "-c", code]
        found = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == gangq.__file__


def test_each_helper_module_is_imported_by_one_name() -> None:
    """`from drive import Q` beside `from sql.drive import Q` would load the file twice, and make two classes Q."""
    tests = HERE / "tests"
    names: defaultdict[Path, set[str]] = defaultdict(set)
    for file in tests.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for module, part in re.findall(r"(?m)^\s*(?:from|import) (\w[\w.]*)(?: import (\w+))?", text):
            for name in (module, f"{module}.{part}"):
                beside = file.with_name(f"{name}.py")
                anywhere = tests.glob(f"{name.replace('.', '/')}.py" if "." in name else f"*/{name}.py")
                for helper in [beside] if beside.is_file() else anywhere:
                    names[helper].add(name)
    assert names[tests / "sql/drive.py"] == {"sql.drive"}
    assert {helper.name: found for helper, found in names.items() if len(found) > 1} == {}
