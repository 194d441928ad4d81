"""Whom a private server runs as.

PostgreSQL refuses to run as root. Whom a server of root runs as depends on the owner of its data directory, and on
whether root may make user namespaces here:

============================  ===========  ========================================================
the data directory belongs to  namespaces   its server runs as
============================  ===========  ========================================================
another user                  either       that user: root looks after the server of that user
root, or is new               allowed      root in a user namespace, where root looks like `nobody`
root, or is new               not allowed  `nobody`, to whom the directory is handed over
============================  ===========  ========================================================

Everybody else's server runs as who starts it.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_USERNS = ("unshare", "--user", "--map-user=65534", "--map-group=65534", "--")


@dataclass(frozen=True)
class Identity:
    """Whom the server runs as: `prefix` goes before its argv; `switch` means another uid than ours."""

    uid: int
    gid: int
    switch: bool = False
    prefix: tuple[str, ...] = ()

    def run(self, argv: list[str], timeout_s: float = 120.0) -> tuple[int, str]:
        """Run `argv` to its end as this identity; return its exit status and what it printed.

        It gets its own session (a Ctrl-C in the caller's terminal must reach no part of the server) and none
        of our file descriptors; its output goes to a file: a server that inherited a pipe would keep whoever
        reads that pipe waiting for ever. PG* variables are dropped, they would redirect the programs.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        env |= {"LC_ALL": "C"}
        with tempfile.TemporaryFile() as out:
            try:
                done = subprocess.run(
                    [*self.prefix, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    env=env,
                    start_new_session=True,
                    umask=0o077,
                    user=self.uid if self.switch else None,
                    group=self.gid if self.switch else None,
                    extra_groups=[] if self.switch else None,
                    timeout=timeout_s,
                )
            except (OSError, subprocess.TimeoutExpired) as e:
                return 126, str(e)
            out.seek(0)
            return done.returncode, out.read().decode(errors="replace").strip()


def identity_of(data_dir: Path) -> Identity:
    """Whom the server of a data directory runs as, whether or not the directory is there."""
    uid = os.geteuid()
    if uid != 0:
        return Identity(uid, os.getegid())
    try:
        owner = data_dir.stat().st_uid
    except OSError:
        owner = 0
    if owner != 0:
        return _other_user(owner)
    return Identity(0, 0, prefix=_USERNS) if userns_works() else nobody()


def this_process() -> Identity:
    """Who we are."""
    return Identity(os.geteuid(), os.getegid())


def userns_works() -> bool:
    """Can root make a user namespace here? Containers' seccomp profiles often say no."""
    return Identity(0, 0).run([*_USERNS, "true"], 10)[0] == 0


def _other_user(uid: int) -> Identity:
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        gid = uid
    return Identity(uid, gid, switch=True)


def nobody() -> Identity:
    """The user without rights."""
    try:
        return _other_user(pwd.getpwnam("nobody").pw_uid)
    except KeyError:
        return _other_user(65534)


def user_name(uid: int) -> str:
    """How a user is called; the number of one that has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
