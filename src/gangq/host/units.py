"""The systemd units that gangq ships: where they are, how they look on this host, and putting them in place.

The files in ``systemd/`` are for the system manager as they stand. Installed, they name the ``gangq`` that
installs them by its full path, because the service manager's PATH has no virtual environment in it. For a user's
own manager (``--user``) the part that only the system manager can do is left out: another user, the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangq.errors import GangqError, NotFound
from gangq.host.commands import Ran, run

UNITS = (
    "gangq-worker@.service",
    "gangq-tick.service",
    "gangq-bounce.service",
    "gangq-bounce.timer",
    "gangq-notify@.service",
)
RESTART_STEPS = "restart-steps.conf"
ENVIRONMENT = "worker.env.example"
ADDRESS = "dsn.example"
SHIPPED = (*UNITS, RESTART_STEPS, ENVIRONMENT, ADDRESS)
STEPS_SINCE = 254
"""The first systemd that knows RestartSteps=."""

_SYSTEM_ONLY = "# System manager only:"
_PROGRAM = "/usr/bin/env gangq"
_ASK_S = 10.0


@dataclass(frozen=True)
class UnitFile:
    """One file to be put in place: the path it gets, its text and its mode."""

    path: Path
    text: str
    mode: int = 0o644
    keep: bool = False
    """Whether one that is there already is its owner's, and stays."""


@dataclass(frozen=True)
class Placed:
    """What became of one file: ``written``, ``updated``, ``unchanged`` or ``kept``; in a dry run what would."""

    file: str
    action: str


def shipped(name: str) -> str:
    """The text of one of the shipped files.

    Raises:
        NotFound: there is none of that name.
    """
    path = _root() / name
    if name not in SHIPPED:
        raise NotFound(f"gangq ships no {name!r}: it has {', '.join(SHIPPED)}")
    try:
        return path.read_text()
    except OSError as e:
        raise GangqError(
            f"{path} of this installation cannot be read ({e.strerror}): install gangq again"
        ) from e


def _root() -> Path:
    packaged = Path(__file__).parents[1] / "systemd"
    # An editable install and a checkout have it at the top level only.
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "systemd"


def program(executable: str | None = None) -> tuple[str, ...]:
    """The ``gangq`` of the interpreter ``executable`` [this one] as an argument list that needs no PATH."""
    # Not resolved: a virtual environment is found by the path of its own interpreter.
    python = Path(os.path.abspath(executable or sys.executable))
    script = python.parent / "gangq"
    return (str(script),) if os.access(script, os.X_OK) else (str(python), "-m", "gangq")


def as_installed(name: str, *, user: bool, argv: Sequence[str]) -> str:
    """One shipped file as it is installed: for this ``gangq``, and for a user's manager if ``user``."""
    text = shipped(name)
    if user:
        text = _for_user(text)
    return text.replace(_PROGRAM, " ".join(_quoted(word) for word in argv))


def _for_user(text: str) -> str:
    lines: list[str] = []
    left_out = False
    for line in text.splitlines():
        left_out = line.startswith(_SYSTEM_ONLY) or (left_out and not line.startswith("["))
        # What is ordered and wanted are units of the system manager.
        if not left_out and not line.startswith(("After=", "Wants=", "# Its device number")):
            lines.append(line)
    return "\n".join(lines).rstrip().replace("multi-user.target", "default.target") + "\n"


def _quoted(word: str) -> str:
    escaped = word.replace("%", "%%")
    if not re.search(r"[\s\"'\\$;]", word):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{inner}"'


@dataclass(frozen=True)
class Places:
    """Where the files of one manager go."""

    units: Path
    environment: Path
    address: Path

    @classmethod
    def of(cls, *, user: bool, directory: Path | None = None) -> Places:
        """The system manager's, this ``user``'s, or ``directory`` for everything."""
        if directory is not None:
            return cls(directory, directory / ENVIRONMENT, directory / ADDRESS)
        if not user:
            return cls(Path("/etc/systemd/system"), Path("/etc/gangq/worker.env"), Path("/etc/gangq/dsn"))
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return cls(home / "systemd" / "user", home / "gangq" / "worker.env", home / "gangq" / "dsn")


def files(places: Places, *, user: bool, steps: bool, argv: Sequence[str]) -> Iterator[UnitFile]:
    """Everything to be put in place. ``steps``: the manager knows the words of the drop-in."""
    for name in UNITS:
        yield UnitFile(places.units / name, as_installed(name, user=user, argv=argv))
    if steps:
        drop_in = places.units / "gangq-worker@.service.d" / RESTART_STEPS
        yield UnitFile(drop_in, as_installed(RESTART_STEPS, user=user, argv=argv))
    # What was filled in is kept: a password, and in settings of an earlier release too.
    yield UnitFile(places.environment, shipped(ENVIRONMENT), mode=0o600, keep=True)
    yield UnitFile(places.address, shipped(ADDRESS), mode=0o600, keep=True)


def place(file: UnitFile, *, dry_run: bool) -> Placed:
    """Put one file in place, all of it or nothing.

    Raises:
        GangqError: the directory cannot be written.
    """
    try:
        before = file.path.read_text()
    except FileNotFoundError:
        before = None
    except OSError as e:
        raise GangqError(f"{file.path} cannot be read ({e.strerror}): {_advice(e)}") from e
    if before is not None and (file.keep or before == file.text):
        return Placed(str(file.path), "unchanged" if before == file.text else "kept")
    if not dry_run:
        try:
            _write(file)
        except OSError as e:
            raise GangqError(f"{file.path} cannot be written ({e.strerror}): {_advice(e)}") from e
    return Placed(str(file.path), "written" if before is None else "updated")


def _write(file: UnitFile) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.path.with_name(f".{file.path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode), "w") as out:
        out.write(file.text)
        os.fchmod(out.fileno(), file.mode)
    fresh.replace(file.path)


def _advice(problem: OSError) -> str:
    if isinstance(problem, PermissionError):
        return "run it as root, or with --user for workers of your own"
    return "name another directory with --dir"


def manager_version() -> int | None:
    """The major version of this host's systemd; None where there is none."""
    asked = run(["systemctl", "--version"], _ASK_S)
    found = re.match(r"systemd (\d+)", asked.output)
    return int(found[1]) if asked.ok and found else None


def reload(*, user: bool) -> Ran:
    """Have the manager read its units again."""
    return run(["systemctl", *(["--user"] if user else []), "daemon-reload"], _ASK_S)


CLOSED = (
    ("/home", "a home is closed to other users"),
    ("/root", "root's home is closed to other users"),
    ("/tmp", "the unit has a /tmp of its own"),
    ("/var/tmp", "the unit has a /var/tmp of its own"),
)
"""Where the unit's own user sees nothing of what others see, and why."""


def out_of_reach(argv: Sequence[str]) -> str | None:
    """Why the unit's own user could not start this ``gangq``, if the place it is in says so."""
    for place_, why in CLOSED:
        if Path(argv[0]).is_relative_to(place_):
            return (
                f"{argv[0]} is in {place_}, and {why}: install gangq where everybody can read it (/opt/gangq), "
                "or run the worker as your user: systemctl edit gangq-worker@ with DynamicUser=no, User=you, "
                "ProtectHome=no, PrivateTmp=no"
            )
    return None
