"""What a process that knows the database's password keeps from the other processes of its user.

A job runs as its worker's user. Linux shows a process's environment, memory and open files to every process of
the same user, unless the process says no (``PR_SET_DUMPABLE`` 0). Then only root can look. So a worker closes itself
first, and the variables that hold a password travel from one program to the next in a socket: a program that has just
been started is open, and what is in its sockets can still not be opened through ``/proc``, as files and pipes can.

The environment comes last: a program started by a service manager can get the address from a descriptor that was
opened for it (``GANGQ_DSN_FD``) or from a credential, and no process ever has it in its environment.

The command line imports this before anything else, so it imports what takes time only where that is needed.
"""

from __future__ import annotations

import os
import sys

from gangq.proc import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

DSN_VARIABLE = "GANGQ_DSN"
EMBEDDED = "embedded"
"""The address of the private server."""
FD_VARIABLE = "GANGQ_DSN_FD"
"""A descriptor from which the address is read, once: ``StandardInput=file:`` of systemd is 0."""
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"
"""Where systemd puts what ``LoadCredential=`` names; gangq reads the one called ``dsn``."""

_DSN_MAX = 1 << 16

_kept: dict[str, int] = {}
"""Descriptors of files about this process itself, opened while they could be."""


def is_secret(name: str) -> bool:
    """Whether no job may see this variable of the environment: ``GANGQ_DSN`` and all of libpq's."""
    return name.startswith("PG") or name in (DSN_VARIABLE, FD_VARIABLE, CREDENTIALS_VARIABLE)


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Take the secrets out of an environment."""
    return {name: environ.pop(name) for name in list(environ) if is_secret(name)}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a program that needs no database."""
    return {name: value for name, value in environ.items() if not is_secret(name)}


def given_dsn(environ: MutableMapping[str, str] | None = None) -> str | None:
    """The database that the environment names: ``GANGQ_DSN``, else what is read from ``GANGQ_DSN_FD``, else the
    credential ``dsn``. None: it names none.

    Empty lines and lines that begin with ``#`` are passed over. What was read is put into ``GANGQ_DSN`` here.
    Standard input that was opened for the address is replaced by an empty one in any case: no handler reads it.

    Raises:
        InvalidInput: the descriptor or the credential is needed and cannot be read.
    """
    from gangq.errors import InvalidInput

    environ = os.environ if environ is None else environ
    fd = environ.pop(FD_VARIABLE, None)
    if environ.get(DSN_VARIABLE):
        if fd == "0":
            _empty_standard_input()
        return environ[DSN_VARIABLE]
    found = _first_line(_read_descriptor(fd)) if fd else None
    credentials = environ.get(CREDENTIALS_VARIABLE)
    if not found and credentials:
        try:
            with open(os.path.join(credentials, "dsn")) as file:
                found = _first_line(file.read(_DSN_MAX))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise InvalidInput(f"the credential dsn cannot be read: {problem}") from problem
    if found:
        environ[DSN_VARIABLE] = found
    return found or None


def _read_descriptor(named: str) -> str:
    from gangq.errors import InvalidInput

    try:
        fd = int(named)
        with open(fd, closefd=fd > 2) as file:
            text = file.read(_DSN_MAX)
        if fd == 0:
            _empty_standard_input()
    except (OSError, ValueError) as problem:
        raise InvalidInput(
            f"{FD_VARIABLE} is {named!r}, and no address can be read from there: {problem}"
        ) from problem
    return text


def _empty_standard_input() -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def hand_over(secrets: Mapping[str, str]) -> int:
    """Put secrets where the program that this process becomes finds them, as one message of a socket; the descriptor
    of it.
    """
    import json
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(json.dumps(dict(secrets)).encode(), socket.MSG_DONTWAIT)
    theirs.set_inheritable(True)
    return theirs.detach()


# -- closing ---------------------------------------------------------------------------------------------------


def close(name: str | None = None) -> tuple[int, bytes]:
    """Show the memory, environment and files of this process to nobody but root from now on; returns what
    :func:`reopen` puts back.

    ``name`` (15 characters) is what it is called from then on. It is all that other processes of the same user can
    still learn of it, and children that are forked and execute nothing inherit it.
    """
    if sys.platform != "linux":
        return 1, b""
    for path in ("/proc/self/io", f"/proc/self/task/{os.getpid()}/syscall"):
        if path not in _kept:
            try:
                _kept[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
    was = b"" if name is None else kernel.set_name(name.encode())
    return kernel.set_dumpable(0), was


def reopen(was: tuple[int, bytes]) -> None:
    """Put back what :func:`close` has changed."""
    if sys.platform == "linux":
        dumpable, name = was
        kernel.set_dumpable(dumpable)
        if name:
            kernel.set_name(name)


def own_file(path: str) -> bytes | None:
    """What one of the files under ``/proc/self`` says that a closed process can no longer open; None where it was
    never open, or this is a fork of the process that opened it.
    """
    fd = _kept.get(path)
    try:
        return None if fd is None else os.pread(fd, 4096, 0)
    except OSError:
        return None


def _forget() -> None:
    # In a forked child they still tell of the parent.
    for fd in _kept.values():
        os.close(fd)
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
