"""Every piece of code in these pages runs, in its order, beside a worker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gangq.client import Client

PAGES = {
    "tasks.md": ["--slots", "2", "--light", "1"],
    "hooks.md": ["--slots", "0", "--light", "1"],
}
"""With the options of the worker."""
FAIL = {"hooks.md": ["train"]}
"""The tasks of the jobs that fail there."""


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_the_page_runs(dsn: str, client: Client, tmp_path: Path, name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.1)
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert page.count("```") == 2 * (1 + len(others))
    assert first.startswith("# tasks.py\n")
    (tmp_path / "tasks.py").write_text(first)
    (tmp_path / "page.py").write_text("\n".join(others))
    environ = {"PATH": "/usr/bin:/bin", "GANGQ_DSN": dsn}
    options = ["--name", "w", "--devices", "none", *PAGES[name]]
    worker = subprocess.Popen(
        [sys.executable, "-m", "gangq", "worker", "tasks:app", *options], cwd=tmp_path, env=environ
    )
    try:
        done = subprocess.run(
            [sys.executable, "page.py"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        worker.terminate()
        worker.wait(30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [job.task for job in client.jobs(state="failed")] == FAIL.get(name, [])
