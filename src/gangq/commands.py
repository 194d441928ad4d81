"""Commands: jobs that start a program, and need no `gangq.App`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gangq.errors import InvalidInput

COMMAND = "command"
"""The task of commands."""


def command_payload(
    argv: Sequence[str] | str,
    *,
    shell: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> dict[str, Any]:
    """Return the payload of a command's job: {"argv": [...], "shell": bool, "env": {...}, "cwd": str or
    null}.

    Raises `InvalidInput` when there is nothing to run, or when `argv` and `shell` do not fit.
    """
    words = [argv] if isinstance(argv, str) else list(argv)
    if isinstance(argv, str) and not shell:
        raise InvalidInput(
            f"command {argv!r} is one string: pass a list such as {argv.split()!r}, or shell=True for /bin/sh"
        )
    if not words or not words[0].strip():
        raise InvalidInput("the command is empty: pass the program and its arguments as a list")
    if shell and len(words) != 1:
        raise InvalidInput(f"with shell=True the command is one string, and {len(words)} were given")
    for what, texts in (("argv", words), ("env", [*(env or {}), *(env or {}).values()])):
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise InvalidInput(f"{what} holds {wrong!r}, which is {type(wrong).__name__}: use strings")
    ours = sorted(name for name in env or {} if name.startswith("GANGQ_"))
    if ours:
        raise InvalidInput(
            f"env names {', '.join(ours)}: variables that begin with GANGQ_ are set by the worker; use another name"
        )
    return {"argv": words, "shell": shell, "env": dict(env or {}), "cwd": cwd}
