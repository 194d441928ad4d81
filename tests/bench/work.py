"""A worker process of one system: ``work.py SYSTEM DSN MARKS BATCH``. Runs until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

from marks import Marks
from systems import load

if __name__ == "__main__":
    _, system, dsn, marks, batch = sys.argv
    load(system).work(dsn, Marks(Path(marks)), int(batch))
