"""The package's own surface."""

from __future__ import annotations

import subprocess
import sys

import gangq


def test_every_public_name_is_there_and_nothing_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, gangq; assert 'psycopg' not in sys.modules; "
        "assert all(getattr(gangq, name) is not None for name in gangq.__all__); "
        "assert set(gangq.__all__) == set(gangq._HOME) <= set(dir(gangq)); assert 'psycopg' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(gangq, "Celery")
