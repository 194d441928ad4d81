"""The command ``gangq`` by another name: what :mod:`idle` starts."""

from __future__ import annotations

import sys

from gangq.cli import main

if __name__ == "__main__":
    sys.exit(main())
