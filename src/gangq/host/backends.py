"""The ways to restart a worker of this host: its systemd unit, its Docker container, or a command.

Each restart is bounded: it asks, waits ``kill_after_s``, then kills. What a backend can itself prove about the
end of the former processes it returns as ``proof``; the rest is for :mod:`gangq.proc.proof`. Which backend a worker
gets is decided in :mod:`gangq.host.choice`.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gangq.errors import InvalidInput
from gangq.host.commands import Ran, run
from gangq.watchdogs.codes import ExitCode

NEVER_RESTART = tuple(str(int(code)) for code in ExitCode if not code.restart)
"""87, a process cannot be killed, and 88, unfit to work: a second worker beside the first makes it worse."""

_ASK_S = 10.0
_AFTER_KILL_S = 30.0
_POLL_S = 0.1
_BETWEEN_S = 1.0
"""How long a unit may be down with no job to start it, between its stop and its start."""
_DOWN = ("failed", "inactive")
"""The active states of a unit of which nothing runs."""
_REPORTING = ("stop-post", "final-sigterm", "final-sigkill", "final-watchdog")
"""The substates of a unit whose ExecStopPost= runs."""
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
    """A service of the system manager, or of this user's with ``user``.

    The restart is asked for without waiting, because a stuck service is stopped within TimeoutStopSec= only
    [90 s]: what of it is left after ``kill_after_s`` is killed, all its processes at once.
    """

    kills_first = False

    def __init__(
        self,
        unit: str,
        *,
        user: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.unit = unit
        self.user = user
        self._clock = clock
        self._wait = wait

    def __str__(self) -> str:
        return shlex.join(self._argv("restart", self.unit))

    def main_pid(self) -> int | None:
        """Its main process, as the service manager knows it."""
        state, _ = self._state()
        return _pid(state.get("MainPID", ""))

    def restart(self, kill_after_s: float, environ: Mapping[str, str]) -> Restarted:
        """Restart it; a unit that is not running was stopped on purpose, or for good (87, 88), and is left alone."""
        del environ
        before, problem = self._state()
        if problem is not None:
            return Restarted(False, f"{problem.why} (asked for the state of {self.unit})")
        if before.get("LoadState") != "loaded":
            return Restarted(
                False,
                f"there is no unit {self.unit} here ({before.get('LoadState')}): map the worker to the one it "
                "runs as, --map NAME=unit:...",
            )
        if before.get("ActiveState") in _DOWN:
            return Restarted(False, self._not_running(before))
        asked = run(self._argv("restart", "--no-block", "--", self.unit), _ASK_S)
        if not asked.ok:
            return Restarted(False, f"{asked.why} (asked to restart {self.unit})")
        return self._follow(str(before.get("InvocationID")), kill_after_s)

    def _not_running(self, state: Mapping[str, str]) -> str:
        code = state.get("ExecMainStatus", "")
        if code in NEVER_RESTART:
            return (
                f"{self.unit} ended with {code} and is left alone: a restart would not help. See its journal; "
                "87: reboot this host, 88: make it fit, then start the unit"
            )
        return (
            f"{self.unit} is not running ({state.get('ActiveState')}, {state.get('Result')}) and is left alone: "
            "it was stopped, or its starts are used up; see its journal, then "
            f"{shlex.join(self._argv('start', self.unit))}"
        )

    def _follow(self, before: str, kill_after_s: float) -> Restarted:
        """Look at the unit until it has been started anew, or will not be. ``before`` is its former invocation.

        =========  =================================================  ===============================================
        the unit   is known by                                        then
        =========  =================================================  ===============================================
        started    a new invocation, active or activating             done
        ended      a new invocation, failed or inactive               failed
        refused    no new invocation, stopped, no job to start it     failed, if still so after the first second
        stopping   none of these                                      SIGKILL ``kill_after_s`` after the request, or
                                                                      once ExecStopPost= has ended; given up 30 s
                                                                      after that, or after it was due
        unknown    systemctl does not answer                          as for stopping
        =========  =================================================  ===============================================
        """
        asked_at = self._clock()
        killed_at: float | None = None
        while True:
            state, problem = self._state()
            now = self._clock()
            if problem is None:
                how = "in its own time" if killed_at is None else f"after SIGKILL, {kill_after_s:.0f} s"
                outcome = self._settled(state, before, how)
                if outcome is None and now - asked_at > _BETWEEN_S:
                    outcome = self._refused(state)
                if outcome is not None:
                    return outcome
            due = now - asked_at >= kill_after_s
            # Not while ExecStopPost= reports the death: the process it would kill is that reporter.
            if killed_at is None and due and state.get("SubState") not in _REPORTING:
                run(self._argv("kill", "--signal=SIGKILL", "--", self.unit), _ASK_S)
                # Not before: a request that takes its 10 s would leave time for one look that takes as long.
                killed_at = now = self._clock()
            if now - (asked_at + kill_after_s if killed_at is None else killed_at) >= _AFTER_KILL_S:
                said = problem.why if problem is not None else f"it is {state.get('SubState')}"
                return Restarted(False, self._given_up(said, killed_at is not None, kill_after_s))
            self._wait(_POLL_S)

    def _given_up(self, said: str, killed: bool, kill_after_s: float) -> str:
        if killed:
            return (
                f"{self.unit} did not start again within {_AFTER_KILL_S:.0f} s of SIGKILL ({said}): a process of it "
                "may be stuck in the kernel; look for state D, and reboot this host if there is one"
            )
        return (
            f"{self.unit} did not start again within {kill_after_s + _AFTER_KILL_S:.0f} s ({said}): its "
            "ExecStopPost= reports the death and is not killed; see its journal"
        )

    def _settled(self, state: Mapping[str, str], before: str, how: str) -> Restarted | None:
        """What became of the new invocation; None: there is none, or it is in no final state."""
        if state.get("InvocationID") in ("", before):
            return None
        if state.get("ActiveState") in ("active", "activating"):
            return Restarted(True, f"{self.unit} was stopped ({how}) and started again")
        if state.get("ActiveState") in _DOWN:
            return Restarted(
                False,
                f"{self.unit} was started again and ended at once ({state.get('Result')}): see its journal",
            )
        return None

    def _refused(self, state: Mapping[str, str]) -> Restarted | None:
        """Stopped, with no job left to start it: refused, most likely by its start limit."""
        if state.get("ActiveState") not in _DOWN or state.get("Job", "") not in ("", "0"):
            return None
        return Restarted(
            False,
            f"{self.unit} was stopped and the service manager does not start it ({state.get('Result')}): "
            f"see its journal; {shlex.join(self._argv('reset-failed', self.unit))} lifts a start limit",
        )

    def _state(self) -> tuple[dict[str, str], Ran | None]:
        wanted = "LoadState,ActiveState,SubState,InvocationID,ExecMainStatus,Result,Job,MainPID"
        shown = run(self._argv("show", f"--property={wanted}", "--", self.unit), _ASK_S)
        if not shown.ok:
            return {}, shown
        lines = (line.partition("=") for line in shown.output.splitlines())
        return {key: value for key, _, value in lines}, None

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
    return int(text) or None if text.isdigit() else None


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
