"""gangq board, decide: what a pass decides from, as a file, and what is decided on it, without a database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from gangq.cli import output
from gangq.cli.listing import columns_option, wide_option
from gangq.cli.output import say
from gangq.cli.parsing import from_json, read_file
from gangq.cli.session import Session, common_options
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
@common_options
def board(session: Session, save: Path | None) -> None:
    """Tell what the next pass would decide from: workers, what is placed, what waits.

    One line of JSON, in one snapshot, for `gangq decide` and for bug reports: it names workers, hosts, queues and
    logins, and no payload. Needs one of gangq's roles.
    """
    text = session.client().board()
    if save is None:
        output.write(text)
        return
    try:
        save.write_text(text + "\n")
    except OSError as e:
        raise click.FileError(str(save), hint=e.strerror or str(e)) from None
    seen = Board.from_json(json.loads(text))
    kinds = (
        counted(len(seen.workers), "worker"),
        counted(len(seen.units), "unit"),
        counted(len(seen.asks), "ask"),
    )
    say(f"saved to {save}: {', '.join(kinds)}")


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
