"""gangq board, decide: what a pass decides from, as a file, and what is decided on it, without a database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gangq.cli import output
from gangq.cli.listing import columns_option, wide_option
from gangq.cli.parsing import from_json, read_file
from gangq.cli.session import Session, common_options, say
from gangq.cli.tables import columns
from gangq.client.encoding import counted
from gangq.errors import GangqError
from gangq.placement.board import Board
from gangq.placement.decide import decide as decide_on
from gangq.placement.decisions import Decision
from gangq.placement.explain import explain


@click.command()
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Into this file, not standard output."
)
@click.option(
    "--make-test",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Into this file, as a test in Python that holds the board and what is decided on it now.",
)
@common_options
def board(session: Session, save: Path | None, make_test: Path | None) -> None:
    """Tell what the next pass would decide from: workers, what is placed, what waits.

    One line of JSON, in one snapshot, for `gangq decide` and for bug reports: it names workers, hosts, queues and
    logins, and no payload. Needs one of gangq's roles.
    """
    text = session.client().board()
    if make_test is not None:
        _write(make_test, as_test(Board.from_json(json.loads(text))))
        say(f"saved to {make_test}: say in it what should have been decided")
    if save is None:
        if make_test is None:
            output.write(text)
        return
    _write(save, text + "\n")
    seen = Board.from_json(json.loads(text))
    kinds = (
        counted(len(seen.workers), "worker"),
        counted(len(seen.units), "unit"),
        counted(len(seen.asks), "ask"),
    )
    say(f"saved to {save}: {', '.join(kinds)}")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as e:
        raise click.FileError(str(file), hint=e.strerror or str(e)) from None


_TEST = '''"""A board that `gangq board --make-test` has saved, and what was decided on it then."""

import json

from gangq.placement import Board, decide

# ruff: noqa: E501

BOARD = """
{board}
"""

DECIDED = """
{decided}
"""


def test_what_is_decided() -> None:
    decided = [one.to_json() for one in decide(Board.from_json(json.loads(BOARD)))]
    assert json.loads(json.dumps(decided)) == json.loads(DECIDED)
'''


def as_test(seen: Board) -> str:
    """A test that holds a board and what is decided on it, a worker, a unit or an ask a line."""
    board = _lines(seen.to_json())
    decided = ",\n".join(json.dumps(one.to_json()) for one in decide_on(seen))
    decided = f"[\n{decided}\n]"
    return _TEST.format(board=board.replace("\\", "\\\\"), decided=decided.replace("\\", "\\\\"))


def _lines(board: Mapping[str, Any]) -> str:
    fields = []
    for name, value in board.items():
        items = ",\n".join(json.dumps(item) for item in value) if isinstance(value, list) else ""
        fields.append(f"{json.dumps(name)}: " + (f"[\n{items}\n]" if items else json.dumps(value)))
    return "{\n" + ",\n".join(fields) + "\n}"


@dataclass(frozen=True)
class _Row:
    ask: str
    action: str
    where: dict[str, int]
    """Members by worker: now, or as planned."""
    stop: list[str]
    why: str | None
    unblocks: str | None

    @classmethod
    def of(cls, one: Decision, names: Mapping[int, str]) -> _Row:
        where: dict[str, int] = {}
        for seat in one.seats or one.planned:
            where[names[seat.worker]] = where.get(names[seat.worker], 0) + 1
        why, unblocks = explain(one.refused) if one.refused else (None, None)
        return cls(one.ask, one.action, where, list(one.stop), why, unblocks)


_COLUMNS = columns(
    "ask action where stops:2 why what_would_help=unblocks:1",
    {
        "where": lambda row: " ".join(f"{worker}:{members}" for worker, members in row.where.items()),
        "stops": lambda row: " ".join(row.stop),
    },
)


@click.command()
@click.argument("file", default="-")
@columns_option
@wide_option
@common_options
def decide(session: Session, file: str) -> None:
    """Decide on a board that `gangq board` has told, as the next pass would; - [default]: standard input.

    Needs no database. One row for each gang that waits, in the order in which they were judged. With --json one
    object each: {"ask", "action", "where", "stop", "why", "unblocks"}.
    """
    what = "the board" if file == "-" else f"board {file!r}"
    try:
        seen = Board.from_json(from_json(read_file(file, what), what))
    except GangqError as problem:
        raise click.UsageError(f"{what}: {problem}") from None
    kinds = {kind.id for kind in seen.kinds}
    if missing := [ask for ask in seen.asks if ask.kind not in kinds]:
        raise click.UsageError(
            f"{what}: ask {missing[0].id} is of kind {missing[0].kind}, which is not on the board"
        )
    decided = decide_on(seen)
    names = {worker.id: worker.name for worker in seen.workers}
    session.rows([_Row.of(one, names) for one in decided], _COLUMNS, "nothing waits on this board")
