"""The ways to restart a worker of this host: its systemd unit, its Docker container, or a command.

Each restart is bounded: it asks, waits ``kill_after_s``, then kills. That the former processes are gone is for
:mod:`gangq.proc.proof` to say. Which backend a worker gets is decided in :mod:`gangq.host.choice`.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Backend(Protocol):
    """One way to restart one worker."""

    kills_first: bool
    """Whether the caller is to end the worker's processes first: the backend only starts it again."""

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
        [90 s]: if its main process, or what that has left behind, is still there after ``kill_after_s``, all its
        processes are killed at once. But not while ExecStopPost= runs, which reports its death.
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
        if not self._stopped(main, kill_after_s):
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

    def _stopped(self, main: procfs.Stat, within_s: float) -> bool:
        """Whether it has ended, or does within that time: its main process, then what that leaves behind."""
        until = time.monotonic() + within_s
        if not _ended(main, within_s):
            return False
        while self._show("SubState").output.strip() == "final-sigterm":
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def _show(self, what: str = "MainPID") -> Ran:
        return run(self._argv("show", f"--property={what}", "--value", "--", self.unit), _ASK_S)

    def _command(self, verb: str) -> str:
        return shlex.join(self._argv(verb, self.unit))

    def _argv(self, *words: str) -> list[str]:
        return ["systemctl", *(["--user"] if self.user else []), *words]


class DockerContainer:
    """A container of this host's Docker."""

    kills_first = False

    def __init__(self, container: str) -> None:
        self.container = container

    def __str__(self) -> str:
        return shlex.join(["docker", "restart", self.container])

    def main_pid(self) -> int | None:
        """The first process in it, as this host numbers it."""
        return _pid(self._show().output)

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """Restart it; the daemon sends SIGKILL after ``kill_after_s``. A container that is not running was
        stopped on purpose, or ended for good, and is left alone.
        """
        del environ
        shown = self._show()
        if not shown.ok:
            return Restarted(False, f"{shown.why} (docker inspect {self.container})")
        if _pid(shown.output) is None:
            return Restarted(
                False,
                f"container {self.container} is not running and is left alone: it was stopped, or it ended for good "
                f"(87: reboot this host first; 88: make it fit). See docker logs {self.container}, then docker start "
                f"{self.container}",
            )
        limit = str(max(1, round(kill_after_s)))
        asked = ["docker", "restart", "-t", limit, "--", self.container]
        done = run(asked, kill_after_s + _AFTER_KILL_S)
        if not done.ok:
            return Restarted(
                False,
                f"{done.why} (docker restart {self.container}): if the container does not stop, a process of it may "
                "be stuck in the kernel; look for state D, and reboot this host if there is one",
            )
        return Restarted(True, f"container {self.container} was restarted")

    def _show(self) -> Ran:
        form = ["--type", "container", "--format", "{{.State.Pid}}"]
        return run(["docker", "inspect", *form, "--", self.container], _ASK_S)


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
