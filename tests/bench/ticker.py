"""A dedicated ticker: ``ticker.py DSN``. Ticks when asked on gangq_tick, and when the tick itself says so."""

from __future__ import annotations

import sys

from gangq.client import Client


def main(dsn: str) -> None:
    """Tick until killed."""
    with Client(dsn, min_size=1, max_size=1) as client:
        ear = client.connect_listener()
        ear.execute("listen gangq_tick")
        asked = True
        while True:
            row = client.tick(force=asked)
            wait_s = (
                (row.next_in_s or 0.0) if row.ran and row.again else min(1.0, max(0.01, row.next_in_s or 1.0))
            )
            asked = bool(list(ear.notifies(timeout=wait_s, stop_after=1)))


if __name__ == "__main__":
    main(sys.argv[1])
