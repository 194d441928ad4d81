"""The Python of a page runs, in its order, beside a worker; its first piece of code is tasks.py."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangq.client import Client

TOP = Path(__file__).parents[2]
PAGES = {
    "README.md": ["--devices", "4x24GiB"],
    "docs/manual/tasks.md": ["--devices", "none", "--slots", "2"],
    "docs/manual/schedules.md": ["--slots", "2"],
    "docs/manual/batches.md": [],
    "docs/manual/hooks.md": ["--slots", "0"],
}
"""With the options of the worker."""
FAILS = {"docs/manual/hooks.md": ["train"]}
"""The tasks of the jobs that fail there."""


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_the_page_runs(dsn: str, client: Client, tmp_path: Path, page: str) -> None:
    client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.1)
    first, *others = re.findall(r"```python\n(.*?)```", (TOP / page).read_text(encoding="utf-8"), re.DOTALL)
    assert first.startswith("# tasks.py\n")
    assert others
    (tmp_path / "tasks.py").write_text(first)
    (tmp_path / "page.py").write_text("\n".join(others))
    environ = {"PATH": "/usr/bin:/bin", "GANGQ_DSN": dsn}
    command = [sys.executable, "-m", "gangq", "worker", "tasks:app", "--name", "w"]
    worker = subprocess.Popen([*command, *PAGES[page]], cwd=tmp_path, env=environ)
    try:
        deadline = time.monotonic() + 30
        while not client.workers():
            assert time.monotonic() < deadline, "it registers"
            time.sleep(0.05)
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
    assert [job.task for job in client.jobs(state="failed")] == FAILS.get(page, [])
