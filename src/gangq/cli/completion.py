"""gangq completion: commands, options, ids and names by TAB."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from gangq.cli import output
from gangq.cli.group import Subgroup
from gangq.cli.output import say

_SHELLS = ("bash", "zsh", "fish")
_COMPINIT = "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n"


def _or_this(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    del param
    shell = value or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise click.UsageError(f"name a shell: {', '.join(_SHELLS)}", ctx)
    return shell


_shell = click.argument(
    "shell", type=click.Choice(_SHELLS), required=False, callback=_or_this, metavar="[bash|zsh|fish]"
)


@click.group(cls=Subgroup)
def completion() -> None:
    """Complete commands, options, ids, queues, tasks and hosts by TAB.

    Names come from the database of GANGQ_DSN or --dsn; where it does not answer at once, none are offered. Of a
    device commands take as much of its UUID as no other has; names of hosts, workers and queues they take whole.
    """


@completion.command()
@_shell
def show(shell: str) -> None:
    """Print the script for SHELL [that of $SHELL]."""
    output.write(_script(shell), nl=False)


@completion.command()
@_shell
def install(shell: str) -> None:
    """Write the script for SHELL [that of $SHELL] below your home, where new shells load it.

    For fish into its completions. For bash and zsh into ~/.local/share/gangq, with a line in .bashrc or .zshrc.
    """
    home = Path.home()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        _write(config / "fish/completions/gangq.fish", _script(shell))
        return
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    script = data / f"gangq/completion.{shell}"
    _write(script, _script(shell))
    start = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    path = shlex.quote(str(script))
    line = f"[ -r {path} ] && . {path}"
    text = start.read_text() if start.exists() else ""
    if line not in text.splitlines():
        with start.open("a") as file:
            file.write(("" if text.endswith("\n") or not text else "\n") + line + "\n")
        say(f"{start} loads it")


def _script(shell: str) -> str:
    from gangq.cli import main

    found = get_completion_class(shell)
    assert found is not None
    # Made by hand: source() would first run a bash to ask for its version.
    parts = found(main, {}, "gangq", "_GANGQ_COMPLETE")
    script: str = parts.source_template % parts.source_vars()
    # A zsh has no compdef before compinit. Each new shell whose .zshrc lacks that would say so, and complete nothing.
    return script.replace("    compdef ", f"{_COMPINIT}    compdef ") if shell == "zsh" else script


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    say(f"wrote {path}; new shells complete gangq")
