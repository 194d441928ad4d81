"""A real systemd in user mode, in namespaces of its own, for tests that run units.

It needs root, `unshare`, `nsenter` and systemd's own binary, and no running system manager. `/run` is a tmpfs of
its own with /run/systemd/system in it: without that directory systemctl believes that there is no systemd.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.worker_process import eventually

_BINARIES = (Path("/lib/systemd/systemd"), Path("/usr/lib/systemd/systemd"))
_HIERARCHIES = (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))

# A cgroup of its own, which is all the manager sees of cgroups; then the namespaces, then systemd: below a shell, for
# as pid 1 it refuses to be a user's.
_BOOT = """
set -e
for place in {cgroups}; do echo $$ > $place/cgroup.procs; done
exec unshare --pid --fork --kill-child --mount --mount-proc --cgroup --propagation private sh -ec '
  mount -t tmpfs tmpfs /run
  mkdir -p /run/systemd/system /run/user/0 /run/cgroups
  chmod 700 /run/user/0
  for place in {cgroups}; do
    name=$(basename $(dirname $place))
    mkdir /run/cgroups/$name
    mount --bind $place /run/cgroups/$name
  done
  if test -e /run/cgroups/cgroup; then
    mount --move /run/cgroups/cgroup /sys/fs/cgroup
  else
    mount -t tmpfs tmpfs /sys/fs/cgroup
    for place in /run/cgroups/*; do
      mkdir /sys/fs/cgroup/$(basename $place)
      mount --move $place /sys/fs/cgroup/$(basename $place)
    done
  fi
  # As systemd makes it at boot: a unit receives its credentials through a mount. Shared within these namespaces only.
  mount --make-rshared /
  {systemd} --user --log-target=console --log-level=info --show-status=no
  exit 1
'
"""


def missing() -> str | None:
    """Why there is no user-mode systemd to be had here; None when there is."""
    if sys.platform != "linux":
        return "systemd is for Linux"
    if os.geteuid() != 0:
        return "running units needs root (namespaces, cgroups)"
    if not any(binary.exists() for binary in _BINARIES):
        return "systemd is not installed (apt-get install systemd)"
    for program in ("systemctl", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not any((place / "cgroup.procs").exists() for place in _HIERARCHIES):
        return "there is no cgroup hierarchy here"
    probe = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--cgroup", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Manager:
    """A running service manager. Units go to :attr:`units`, their environment to :attr:`environment`, the database's
    address to :attr:`address`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = directory / "config"
        self.units = config / "systemd" / "user"
        self.environment = config / "gangq" / "worker.env"
        self.address = config / "gangq" / "dsn"
        self.units.mkdir(parents=True)
        self.environment.parent.mkdir()
        self._log_path = directory / "systemd.log"
        self._environ = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("GANGQ_", "PG", "XDG_"))
            },
            "HOME": str(directory),
            "XDG_CONFIG_HOME": str(config),
            "XDG_RUNTIME_DIR": "/run/user/0",
        }
        self._cgroups = [
            place / f"gangq-test-{os.getpid()}" for place in _HIERARCHIES if (place / "cgroup.procs").exists()
        ]
        for cgroup in self._cgroups:
            cgroup.mkdir()
        systemd = next(binary for binary in _BINARIES if binary.exists())
        script = _BOOT.format(systemd=systemd, cgroups=" ".join(map(str, self._cgroups)))
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", script], env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.pid = eventually(self._systemd, "systemd runs")
            eventually(lambda: self.try_("is-system-running").stdout.strip() == "running", "systemd is up")
        except BaseException:
            self.close()
            raise

    def _systemd(self) -> int | None:
        """Its pid as seen from here: the grandchild of unshare."""
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            pid = _child(_child(self._process.pid))
            if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                return pid
        if self._process.poll() is not None:
            raise AssertionError(f"systemd does not start:\n{self.log}")
        return None

    @property
    def log(self) -> str:
        """What systemd and its units have said."""
        return self._log_path.read_text(errors="replace")

    def run(self, *argv: str, timeout: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program beside systemd, in its namespaces."""
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--cgroup", "--", *argv]
        return subprocess.run(
            inside,
            env={**self._environ, **more},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def try_(self, *words: str) -> subprocess.CompletedProcess[str]:
        """systemctl, whatever comes of it."""
        return self.run("systemctl", "--user", "--no-pager", *words)

    def systemctl(self, *words: str) -> str:
        """systemctl, which has to succeed."""
        done = self.try_(*words)
        assert done.returncode == 0, f"systemctl {words}: {done.stdout}{done.stderr}\n{self.log}"
        return done.stdout

    def show(self, unit: str) -> dict[str, str]:
        """The properties of a unit."""
        lines = self.systemctl("show", unit).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit, or a template."""
        place = self.units / f"{unit}.d"
        place.mkdir(exist_ok=True)
        (place / "test.conf").write_text(text)

    def processes_of(self, unit: str) -> list[int]:
        """Pids of a unit, as seen from here."""
        pids = set()
        for cgroup in self._cgroups:
            for procs in cgroup.rglob("cgroup.procs"):
                if procs.parent.name == unit:
                    with contextlib.suppress(OSError):
                        pids.update(map(int, re.findall(r"\d+", procs.read_text())))
        return sorted(pids)

    def close(self) -> None:
        """End it, and everything it has started."""
        self._process.kill()
        self._process.wait(10)
        for cgroup in self._cgroups:
            below = sorted(
                (path for path in cgroup.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts)
            )
            eventually(
                lambda places=(*below, cgroup): all(_removed(place) for place in places), f"{cgroup} is empty"
            )


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def manager(directory: Path) -> Iterator[Manager]:
    """A service manager for the length of a block; on failure its log is shown."""
    running = Manager(directory)
    try:
        yield running
    finally:
        running.close()
        print(f"---- systemd\n{running.log}")
