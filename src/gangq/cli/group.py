"""Groups that import a command only when it is called, and turn errors into a line and an exit code."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from gangq.cli import output

if TYPE_CHECKING:
    from gangq.errors import GangqError

_NEVER_CUT = 1000
EXIT_REFUSED = 1
EXIT_BAD_INPUT = 2
EXIT_NO_DATABASE = 3
EXIT_INTERRUPTED = 130
STDOUT_CLOSED = "standard output is closed; send it to /dev/null"


class Subgroup(click.Group):
    """A group of commands of which the help gives whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands."""
        _list(formatter, {"Commands": self.list_commands(ctx)}, self.commands)


class LazyGroup(click.Group):
    """The top-level group. `sections` of its help name for each command the module of this package it is in."""

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._commands_in = {name: module for part in sections.values() for name, module in part.items()}

    def main(self, *args: Any, **more: Any) -> Any:
        """Run a command. Where its answer cannot be written, a sentence says so; `invoke` does not see what --help,
        --version and the errors of click print.
        """
        if sys.stdin is None:
            sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
        is_closed = sys.stdout is None
        if is_closed:
            # A write to it fails; a command that prints nothing, as `gangq beat`, does what it is to do.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", errors="backslashreplace")
        if sys.stderr is None:
            sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")
        try:
            return super().main(*args, **more)
        except OSError as e:
            if not _is_unwritten(e) or _shows_tracebacks():
                raise
            problem = f"{STDOUT_CLOSED} if none is wanted" if is_closed else e.strerror
            with suppress(OSError):
                output.say(f"not all of the answer could be written: {problem}")
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    # The interpreter would try again at its end, and complain.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.exit(EXIT_REFUSED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse what no database could store: bytes of the command line that are not UTF-8."""
        for arg in args:
            if any("\ud800" <= c <= "\udfff" for c in arg):
                raise click.UsageError(f"the argument {output.harmless(arg)!r} is not UTF-8", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the one that was most likely meant."""
        if args[0] not in self._commands_in and (alike := _alike(args[0], self._commands_in)):
            ctx.fail(f"No such command {args[0]!r}. (Did you mean {alike[0]!r}?)")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the sections, not of the alphabet."""
        del ctx
        return list(self._commands_in)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        del ctx
        if cmd_name not in self._commands_in:
            return None
        module = importlib.import_module(f"gangq.cli.{self._commands_in[cmd_name]}")
        found = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in their sections."""
        del ctx
        _list(formatter, self._sections, self._unloaded())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, and the options of the group itself."""
        commands = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self._unloaded().items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def _unloaded(self) -> dict[str, click.Command]:
        """The commands, of which only the help is known. It is read from the source of their modules: to import them
        all takes half a second, and most of them need psycopg.
        """
        docs: dict[tuple[str, str], str | None] = {}
        for module in set(self._commands_in.values()):
            for node in ast.parse(Path(__file__).with_name(f"{module}.py").read_bytes()).body:
                if isinstance(node, ast.FunctionDef):
                    docs[module, node.name] = ast.get_docstring(node)
        return {
            name: click.Command(name, help=docs[module, name.replace("-", "_")])
            for name, module in self._commands_in.items()
        }

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours becomes one message and an exit code."""
        try:
            return super().invoke(ctx)
        except click.ClickException as e:
            if isinstance(e, click.NoSuchOption):
                # Click would put those alike behind the last line.
                vars(e).update(message=e.format_message(), possibilities=None)
            vars(e)["message"] = _in_lines(e)  # Final to mypy, and shown as it is
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except Exception as e:
            problem = _as_ours(e)
            if problem is None or _shows_tracebacks():
                raise
            output.say(f"{problem}{_alternatives(ctx, problem)}")
            ctx.exit(exit_code(problem))


def _list(
    formatter: click.HelpFormatter,
    sections: Mapping[str, Iterable[str]],
    commands: Mapping[str, click.Command],
) -> None:
    """List the commands of each section, with their help in a sentence."""
    longest = max(map(len, commands))
    for title, names in sections.items():
        with formatter.section(title):
            formatter.write_dl(
                [
                    (name.ljust(longest), _short(commands[name], formatter.width - longest - 6))
                    for name in names
                ]
            )


def _alike(name: str, names: Iterable[str]) -> list[str]:
    import difflib  # Not at the top: a name that is spelled right needs it not.

    return difflib.get_close_matches(name, names, 1)


def _in_lines(error: click.ClickException) -> str:
    """The message of an error that click shows, as a terminal can show it."""
    # What click puts in front of it.
    begins_at = len("Error: ") + max(0, error.format_message().find(error.message))
    first, *others = output.harmless(error.message).splitlines() or [""]
    return "\n".join(
        [
            output.wrapped(first, begins_at=begins_at, err=True),
            *(output.wrapped(line, err=True) for line in others),
        ]
    )


def _short(command: click.Command, room: int) -> str:
    """The first sentence of a command's help; of one that is too long, what stands before a colon, else a comma."""
    whole = command.get_short_help_str(_NEVER_CUT)
    if len(whole) <= room:
        return whole
    begun = re.match(rf"(.{{1,{room - 1}}})[;:] ", whole) or re.match(rf"(.{{1,{room - 1}}}), ", whole)
    return f"{begun[1]}." if begun else command.get_short_help_str(room)


def _shows_tracebacks() -> bool:
    return os.environ.get("GANGQ_DEBUG", "0") not in ("", "0")


def _is_unwritten(raised: OSError) -> bool:
    """Whether it is of what was printed, and not of a file or socket that a command uses."""
    frames = (frame for frame, _ in traceback.walk_tb(raised.__traceback__))
    return any(frame.f_code is click.echo.__code__ for frame in frames)


def _as_ours(raised: Exception) -> GangqError | None:
    # Not at the top: --version, --help and completion should not wait for psycopg.
    import psycopg

    from gangq.errors import GangqError, translate

    if isinstance(raised, psycopg.Error):
        return translate(raised)
    if isinstance(raised, OSError) and not isinstance(raised, (GangqError, BrokenPipeError)):
        return None if _is_unwritten(raised) else GangqError(str(raised))
    return raised if isinstance(raised, GangqError) else None


def _alternatives(ctx: click.Context, problem: GangqError) -> str:
    """What there is in place of what was not found, as a sentence to be put behind the problem."""
    from gangq.cli.session import Session
    from gangq.errors import NotFound

    session = ctx.find_object(Session)
    if session is None or not session.has_client or not isinstance(problem, NotFound):
        return ""
    from gangq.cli.stored import alike

    found = alike(session.client(), problem)
    return found and ("" if str(problem).endswith(".") else ".") + f" {found}"


def exit_code(problem: GangqError) -> int:
    """The exit code for an error: 2 bad input or not found, 3 no database or another schema, 88 a worker that
    is unfit to start, else 1.
    """
    from gangq.errors import DatabaseUnreachable, EmbeddedError, SchemaMismatch, Unfit
    from gangq.watchdogs.codes import ExitCode

    if isinstance(problem, Unfit):
        return ExitCode.UNFIT
    if isinstance(problem, (DatabaseUnreachable, SchemaMismatch, EmbeddedError)):
        return EXIT_NO_DATABASE
    if isinstance(problem, (ValueError, TypeError, LookupError)):
        return EXIT_BAD_INPUT
    return EXIT_REFUSED
