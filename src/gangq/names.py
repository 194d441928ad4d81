"""What workers and hosts may be called.

Names reach command lines of the bouncer, which runs as root, the screens of operators and the addresses that
members of a gang are given. The database refuses every other name (SQL: a CHECK, and ``register_worker``).
"""

from __future__ import annotations

import re
import socket

from gangq.errors import InvalidInput

LONGEST = 200
LAWFUL = re.compile(rf"[A-Za-z0-9._@:][A-Za-z0-9._@:-]{{0,{LONGEST - 1}}}")
RULE = f"1 to {LONGEST} letters, digits, and . _ @ : - (no - first)"


def check(what: str, name: str, advice: str) -> str:
    """``name``, if a worker or host may be called that.

    Raises:
        InvalidInput: it may not; ``what`` and ``advice`` say which name it was and what to do.
    """
    if not LAWFUL.fullmatch(name):
        raise InvalidInput(f"{what} cannot be {name[:80]!r}: {RULE}; {advice}")
    return name


def host_name() -> str:
    """This host's name, with a dash for each character that no name may have.

    Raises:
        InvalidInput: nothing of it is left.
    """
    return check("this host's name", lawful(socket.gethostname()), "pass --host NAME")


def lawful(name: str) -> str:
    """``name`` with a dash for each character that no name may have, none of them first; "" if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._@:-]", "-", name).lstrip("-")[:LONGEST].rstrip("-")
