"""Testing what uses gangq: handlers without a worker, and an App on a database that lasts for one test.

- `FakeContext` and `run` call a handler; they need no database.
- `drain` runs all that waits in an App's database, in this process.
- `submitted` and `assert_submitted` look at what was submitted.

The pytest plugin (`gangq.pytest_plugin`) has fixtures: `gangq_app`, `gangq_database`, `gangq_clock`, `gangq_device`.
See docs/manual/testing.md.
"""

from __future__ import annotations

from gangq.testing.calls import run
from gangq.testing.children import Submission
from gangq.testing.context import FakeContext
from gangq.testing.database import Clock
from gangq.testing.draining import Drained, drain
from gangq.testing.submissions import assert_submitted, submitted

__all__ = ["Clock", "Drained", "FakeContext", "Submission", "assert_submitted", "drain", "run", "submitted"]
