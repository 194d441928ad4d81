"""A worker process with GPUs or without: ``gpu_work.py NAME DSN MARKS DEVICES SECONDS``. A job sleeps so long."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from marks import Marks

from gangq.app import App
from gangq.worker.main import run_worker


def main(name: str, dsn: str, marks: Marks, devices: str, seconds: float) -> int:
    """Run until killed."""
    app = App(dsn)

    @app.task
    def noop(ctx: Any, n: int = -1) -> None:
        marks.started(n)
        if seconds:
            time.sleep(seconds)

    return run_worker(app, dsn=dsn, name=name, devices=devices)


if __name__ == "__main__":
    _, name, dsn, path, devices, seconds = sys.argv
    sys.exit(main(name, dsn, Marks(Path(path)), devices, float(seconds)))
