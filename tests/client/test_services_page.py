"""docs/manual/services.md: every piece of code in it runs, in its order, beside a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from gangq.client import Client

PAGE = (Path(__file__).parents[2] / "docs/manual/services.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(dsn: str, client: Client, tmp_path: Path) -> None:
    tasks, page = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shell,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert PAGE.count("```") == 6
    (tmp_path / "tasks.py").write_text(tasks)
    (tmp_path / "page.py").write_text(page)
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "GANGQ_DSN": dsn}
    options = ["--name", "w", "--devices", "none", "--slots", "3", "--address", "127.0.0.1"]
    worker = subprocess.Popen(
        [sys.executable, "-m", "gangq", "worker", "tasks:app", *options],
        cwd=tmp_path,
        env={**os.environ, **environ},
    )
    try:
        for command in ([sys.executable, "page.py"], ["sh", "-ec", shell]):
            done = subprocess.run(
                command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        worker.terminate()
        worker.wait(60)
    assert client.jobs(state="failed") == []
