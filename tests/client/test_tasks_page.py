"""docs/tasks.md: every piece of code in it runs, in its order, beside a worker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gangq.client import Client

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(dsn: str, client: Client, tmp_path: Path) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert PAGE.count("```") == 2 * (1 + len(others))
    assert first.startswith("# tasks.py\n")
    (tmp_path / "tasks.py").write_text(first)
    (tmp_path / "page.py").write_text("\n".join(others))
    environ = {"PATH": "/usr/bin:/bin", "GANGQ_DSN": dsn}
    options = ["--name", "w", "--devices", "none", "--slots", "2", "--light", "1"]
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
    assert client.jobs(state="failed") == []
