"""Running programs as a user that is not root: what root may see, everybody may not, and tests often run as root.

The interpreter, or this checkout, may lie in a directory that is closed to others (root's home). Then that directory
is covered by an empty one with only what is needed in it, for the program that is started and nobody else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UID = 1_000_000 + os.getpid()
"""Of this test run alone: whatever has it may be ended."""


def needed() -> None:
    """Skip where this user cannot become another one."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("becoming another user needs root, setpriv and unshare")
    tried = subprocess.run([*prefix(), sys.executable, "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"another user cannot run this interpreter: {tried.stderr.strip()}")


def prefix(uid: int = UID) -> list[str]:
    """What goes before an argument list, so that it runs as that user."""
    switch = (
        f'exec setpriv --reuid {uid} --regid {uid} --clear-groups --inh-caps=-all --bounding-set=-all -- "$@"'
    )
    wanted = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]}
    covered: dict[Path, set[Path]] = {}
    for path in wanted:
        closed = next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)
        if closed is not None:
            covered.setdefault(closed, set()).add(path)
    steps = []
    for closed, paths in covered.items():
        keep = {path: f"/run/gangq-test-{n}" for n, path in enumerate(sorted(paths))}
        steps += ["mount -t tmpfs -o mode=755 none /run"]
        for path, place in keep.items():
            steps += [f"mkdir {place}", f"mount --bind {shlex.quote(str(path))} {place}"]
        steps += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed))}"]
        for path, place in keep.items():
            steps += [f"mkdir -p {shlex.quote(str(path))}", f"mount --move {place} {shlex.quote(str(path))}"]
    script = "; ".join(["set -e", *steps, switch])
    namespace = ["unshare", "--mount", "--propagation", "private", "--"] if steps else []
    return [*namespace, "sh", "-c", script, "sh"]


@contextmanager
def directory() -> Iterator[Path]:
    """A directory of that user's own."""
    place = Path(tempfile.mkdtemp(prefix="gangq-user-"))
    os.chown(place, UID, UID)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
