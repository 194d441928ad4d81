"""A worker process of one system: ``work.py SYSTEM DSN MARKS BATCH``. Runs until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

from marks import Marks
from systems import SYSTEMS

if __name__ == "__main__":
    _, system, dsn, marks, batch = sys.argv
    SYSTEMS[system].work(dsn, Marks(Path(marks)), int(batch))
