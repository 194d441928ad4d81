"""Clients that submit one job per transaction: ``burst_client.py DSN FLAG CLIENTS``.

They submit while the byte in the file FLAG is not 0, until killed.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
from pathlib import Path

import psycopg

# What gangq's client sends on a connection of its own: only who sleeps is notified.
_SUBMIT = "select gangq.submit('noop', options => '{\"wake\": \"sleepers\"}')"


async def _client(dsn: str, go: mmap.mmap) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            if go[0]:
                await connection.execute(_SUBMIT, prepare=True)
            else:
                await asyncio.sleep(0.02)


async def _main(dsn: str, flag: Path, clients: int) -> None:
    with flag.open("r+b") as file:
        go = mmap.mmap(file.fileno(), 1)
    await asyncio.gather(*(_client(dsn, go) for _ in range(clients)))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
