"""The ways to restart a worker of this host: its systemd unit, its Docker container, or a command.

Each restart is bounded: it asks, waits ``kill_after_s``, then kills. What a backend can itself prove about the
end of the former processes it returns as ``proof``; the rest is for :mod:`gangq.proc.proof`. Which backend a worker
gets is decided in :mod:`gangq.host.choice`.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gangq.errors import InvalidInput
from gangq.host.commands import Ran, run
from gangq.proc import procfs

_ASK_S = 10.0
_AFTER_KILL_S = 30.0
_POLL_S = 0.1
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@][A-Za-z0-9:_.\\@-]*\.service")
_OTHER_UNIT = re.compile(r".*\.(socket|device|mount|automount|swap|target|path|timer|slice|scope)")
"""systemctl takes these names as they are, and adds ``.service`` to any other that does not end with it."""
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Restarted:
    """What came of a restart. ``detail`` is one line: what was done, or why it failed and what to do."""

    ok: bool
    detail: str
    proof: Mapping[str, Any] | None = None
    """Why no process of the former incarnation can be left, where the backend itself knows that."""


class Backend(Protocol):
    """One way to restart one worker."""

    kills_first: bool
    """Whether the caller is to end the worker's processes first: the backend only starts it again."""

    def main_pid(self) -> int | None:
        """The main process of what it restarts; None where that does not run, or is nothing that has one."""

    def __str__(self) -> str:
        """What it does, as a command line."""

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """End what is there, by SIGKILL after ``kill_after_s`` seconds, and start it again.

        ``environ`` names the worker as the database does (``GANGQ_WORKER``, ``GANGQ_INCARNATION``). Never raises for
        what the programs it calls do.
        """


class SystemdUnit:
    """A service of the system manager, or of this user's with ``user``."""

    kills_first = False

    def __init__(self, unit: str, *, user: bool = False) -> None:
        self.unit = unit
        self.user = user

    def __str__(self) -> str:
        return self._command("restart")

    def main_pid(self) -> int | None:
        """Its main process, as the service manager knows it."""
        return _pid(self._show().output)

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """Restart it; a unit that is not running was stopped on purpose, or for good (87, 88), and is left alone.

        The restart is asked for without waiting, because a stuck service is stopped within TimeoutStopSec= only
        [90 s]: if its main process is still there after ``kill_after_s``, all its processes are killed at once. When
        that process is gone nothing is killed, because ExecStopPost= then reports its death.
        """
        del environ
        shown = self._show()
        if not shown.ok:
            return Restarted(False, f"{shown.why} (asked for the main process of {self.unit})")
        pid = _pid(shown.output)
        main = None if pid is None else procfs.stat(pid)
        if main is None:
            return Restarted(
                False,
                f"{self.unit} is not running and is left alone: it was stopped, its starts are used up, or it ended "
                f"for good (87: reboot this host first; 88: make it fit). See {self._command('status')}, then "
                f"{self._command('start')}",
            )
        asked = run(self._argv("restart", "--no-block", "--", self.unit), _ASK_S)
        if not asked.ok:
            return Restarted(False, f"{asked.why} (asked to restart {self.unit})")
        how = "in its own time"
        if not _ended(main, kill_after_s):
            how = f"after SIGKILL, {kill_after_s:.0f} s"
            killed = run(self._argv("kill", "--signal=SIGKILL", "--", self.unit), _ASK_S)
            if not _ended(main, _AFTER_KILL_S):
                said = "" if killed.ok else f" ({killed.why})"
                return Restarted(
                    False,
                    f"process {main.pid} of {self.unit} did not end within {_AFTER_KILL_S:.0f} s of SIGKILL{said}: "
                    "it may be stuck in the kernel; look for state D, and reboot this host if there is one",
                )
        return Restarted(
            True, f"{self.unit} is restarted, it stopped {how}; {self._command('status')} shows how it starts"
        )

    def _show(self) -> Ran:
        return run(self._argv("show", "--property=MainPID", "--value", "--", self.unit), _ASK_S)

    def _command(self, verb: str) -> str:
        return shlex.join(self._argv(verb, self.unit))

    def _argv(self, *words: str) -> list[str]:
        return ["systemctl", *(["--user"] if self.user else []), *words]


class DockerContainer:
    """A container of this host's Docker.

    ``worker_container`` is the id that the worker itself registered: where it is this container's, its restart
    is proof that every process of the worker is gone, for they lived in its pid namespace. ``may_run`` false: the
    worker was not found in it, so that it is left alone if it runs at the moment of the restart.
    """

    kills_first = False

    def __init__(self, container: str, *, worker_container: str | None = None, may_run: bool = True) -> None:
        self.container = container
        self._worker_container = worker_container
        self._may_run = may_run

    def __str__(self) -> str:
        return shlex.join(["docker", "restart", self.container])

    def name(self) -> str | None:
        """Its name, without the slash; None when Docker does not know it, or does not answer."""
        seen = self._inspect()
        return None if seen is None else seen["name"]

    def while_stopped(self) -> DockerContainer | None:
        """The same, to be left alone once it runs again; None if it runs now, or Docker does not know it."""
        seen = self._inspect()
        if seen is None or seen["running"] != "false":
            return None
        return DockerContainer(self.container, worker_container=self._worker_container, may_run=False)

    def main_pid(self) -> int | None:
        """The first process in it, as this host numbers it."""
        seen = self._inspect()
        return None if seen is None else _pid(seen["pid"])

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """Restart it; the daemon sends SIGKILL after ``kill_after_s``. A container that is not running was
        stopped on purpose, or ended for good, and is left alone.
        """
        del environ
        before = self._inspect()
        if before is not None and before["running"] == "false":
            return Restarted(
                False,
                f"container {self.container} is not running (exit code {before['exit_code']}) and is left alone: see "
                f"docker logs, then docker start {self.container}; 87: reboot this host first, 88: make it fit",
                self._proof(before),
            )
        if not self._may_run:
            runs = (
                f"docker inspect does not say whether container {self.container} runs"
                if before is None
                else f"container {self.container} runs again, perhaps by its restart policy"
            )
            return Restarted(
                False, f"{runs}, and the worker was not found in it, so it is left alone: look at the host"
            )
        done = run(
            ["docker", "restart", "-t", str(max(1, round(kill_after_s))), "--", self.container],
            kill_after_s + _AFTER_KILL_S,
        )
        if not done.ok:
            return Restarted(
                False,
                f"{done.why} (docker restart {self.container}): if the container does not stop, a process of it may "
                "be stuck in the kernel; look for state D, and reboot this host if there is one",
            )
        after = self._inspect()
        again = before is not None and after is not None and before["started"] != after["started"]
        proof = self._proof(after) if after is not None and again else None
        return Restarted(True, f"container {self.container} was restarted", proof)

    def _proof(self, seen: Mapping[str, str]) -> dict[str, Any] | None:
        """Of a container that has ended since the worker was last renewed."""
        registered = self._worker_container
        its = registered is not None and len(registered) >= 12 and seen["id"].startswith(registered)
        # With the host's (or another container's) pid namespace its processes may outlive the container.
        if not its or seen["pid_mode"] not in ("", "private"):
            return None
        return {
            "container": seen["id"],
            "started": seen["started"],
            "running": seen["running"],
            "checked": "its pid namespace ended with its container",
        }

    def _inspect(self) -> dict[str, str] | None:
        fields = {
            "id": ".Id",
            "name": ".Name",
            "started": ".State.StartedAt",
            "running": ".State.Running",
            "exit_code": ".State.ExitCode",
            "pid_mode": ".HostConfig.PidMode",
            "pid": ".State.Pid",
        }
        form = "\t".join(f"{{{{{field}}}}}" for field in fields.values())
        seen = run(
            ["docker", "inspect", "--type", "container", "--format", form, "--", self.container], _ASK_S
        )
        words = seen.output.rstrip("\n").split("\t")
        if not seen.ok or len(words) != len(fields):
            return None
        found = dict(zip(fields, words, strict=True))
        return {**found, "name": found["name"].lstrip("/")}


class RestartCommand:
    """A program that starts the worker again: an argument list, run without a shell.

    It finds ``GANGQ_WORKER`` and ``GANGQ_INCARNATION`` in its environment. The worker's own processes, as far as they
    can be seen from here, have been ended before.
    """

    kills_first = True

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)

    def __str__(self) -> str:
        return shlex.join(self.argv)

    def main_pid(self) -> int | None:
        """None: a program has none before it is run."""
        return None

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """Run it, for at most ``kill_after_s`` + 30 seconds."""
        done = run(self.argv, kill_after_s + _AFTER_KILL_S, environ)
        return Restarted(done.ok, f"ran {self}" if done.ok else f"{done.why} (ran {self})")


def _pid(text: str) -> int | None:
    return int(text) or None if text.strip().isdigit() else None


def _ended(process: procfs.Stat, within_s: float) -> bool:
    """Whether that process has ended, or does within that time."""
    until = time.monotonic() + within_s
    while procfs.same(process) is not None:
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


def unit_name(name: str) -> str:
    """``name`` as the name of a service, with ``.service`` where it has no suffix that systemd knows.

    Raises:
        InvalidInput: no service is called that.
    """
    other = _OTHER_UNIT.fullmatch(name)
    if other is not None:
        raise InvalidInput(f"{name!r} is a {other[1]}, and a worker runs as a service: name that")
    full = name if name.endswith(".service") else f"{name}.service"
    if not _UNIT.fullmatch(full) or len(full) > 255:
        raise InvalidInput(
            f"{name!r} is no service unit: write it as systemctl shows it, gangq-worker@0.service"
        )
    return full


def container_name(name: str) -> str:
    """``name`` as the name or id of a container.

    Raises:
        InvalidInput: no container is called that.
    """
    if not _CONTAINER.fullmatch(name):
        raise InvalidInput(f"{name!r} is no container: write its name or id as docker ps shows it")
    return name
