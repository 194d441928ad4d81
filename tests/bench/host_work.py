"""A worker that runs commands and is a host of its own: ``host_work.py NAME DSN DEVICES``."""

from __future__ import annotations

import sys

from gangq.worker.main import run_worker

if __name__ == "__main__":
    _, name, dsn, devices = sys.argv
    sys.exit(run_worker(None, dsn=dsn, name=name, host=name, devices=devices, light=0))
