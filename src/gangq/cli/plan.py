"""gangq plan, replay, board, decide: what the next pass would do, and what is decided on a board that was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click

from gangq.cli import output, queries
from gangq.cli.group import EXIT_REFUSED
from gangq.cli.options import columns_option, table_options, wide_option
from gangq.cli.output import gang, say, seconds
from gangq.cli.parsing import Due, NewWorkers, from_json, read_file, typed
from gangq.cli.session import Session, common_options
from gangq.cli.tables import columns
from gangq.cli.which import WhichType
from gangq.client.encoding import counted
from gangq.errors import GangqError
from gangq.placement.board import Board
from gangq.placement.decide import decide as decide_on
from gangq.placement.decisions import Decision
from gangq.placement.explain import explain

_REPLAYED = columns(
    ">ago at:4 decisions same difference digest:5",
    {"same": lambda r: {True: "yes", False: "no", None: "?"}[r.same]},
)


def _pair(text: str, option: str, example: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise click.UsageError(f"{option} {text!r}: write {option} {example}")
    return left, right


def _priority(text: str) -> dict[str, Any]:
    which, value = _pair(text, "--priority", "g7=50")
    id = WhichType("gang").convert(which, None, None).id
    if not re.fullmatch(r"-?\d+", value, re.ASCII):
        raise click.UsageError(f"--priority {text!r}: a priority is a whole number, -1000 to 1000")
    return {"priority": {"gang": id, "value": int(value)}}


def _quota(text: str) -> dict[str, Any]:
    queue, limits = _pair(text, "--quota", "research=gpus:8,jobs:20")
    maximum = {}
    for part in limits.split(","):
        resource, colon, most = part.partition(":")
        number = typed(most)
        if not colon or isinstance(number, bool) or not isinstance(number, (int, float)):
            raise click.UsageError(f"--quota {text!r}: write --quota research=gpus:8,jobs:20")
        maximum[resource] = number
    return {"quota": {"queue": queue, "maximum": maximum}}


def _cell(action: str, starts_at: datetime | None, now: datetime) -> str:
    if action == "plan" and starts_at is not None:
        return f"in {seconds((starts_at - now).total_seconds())}"
    return {"start": "starts", "wait": "waits", "stop": "displaces", "move": "moves"}.get(action, action)


@click.command()
@click.option("--add-worker", type=NewWorkers(), multiple=True, help="2x8xH100, or 2xNAME: like worker NAME.")
@click.option("--remove-host", metavar="HOST", multiple=True, help="Without this host, and what runs there.")
@click.option("--priority", metavar="gN=P", multiple=True, help="With another priority of a gang.")
@click.option("--cancel", type=WhichType(), metavar="ID", multiple=True, help="Without this job or gang.")
@click.option("--quota", metavar="QUEUE=gpus:8", multiple=True, help="With another maximum of a queue.")
@click.option(
    "--submit", metavar="FILE", multiple=True, help="With one gang more: arguments of submit_gang, JSON."
)
@click.option("--all", "everything", is_flag=True, help="Also the gangs for which nothing changes.")
@table_options
def plan(
    session: Session,
    add_worker: tuple[dict[str, Any], ...],
    remove_host: tuple[str, ...],
    priority: tuple[str, ...],
    cancel: tuple[Any, ...],
    quota: tuple[str, ...],
    submit: tuple[str, ...],
    everything: bool,
) -> None:
    """Show what the next pass would do, and with changes what would then be different.

    Nothing is applied: it is the decision of a pass, on a board with these changes. Without a change every gang that
    waits is listed. With --json one object per gang, also those for which nothing changes: {"gang_id", "queue",
    "task", "priority", "size", "before", "after", "starts_before", "starts_after", "place", "members", "hosts",
    "stop", "gate", "changed", "why"}.
    """
    changes: list[dict[str, Any]] = [
        *({"cancel": {"gang" if which.gang else "job": which.id}} for which in cancel),
        *(_priority(text) for text in priority),
        *(_quota(text) for text in quota),
        *(
            {"submit": from_json(read_file(file, f"--submit {file!r}"), f"--submit {file!r}")}
            for file in submit
        ),
        *({"remove_host": host} for host in remove_host),
        *add_worker,
    ]
    client = session.client()
    rows = client.plan(changes=changes)
    if session.json:
        session.rows(rows, [], "")
        return
    now = client.execute(queries.database_time())
    shown = rows if everything or not changes else [row for row in rows if row.changed]
    moves = "now then" if changes else "next_pass"
    table = columns(
        f">gang task queue:2 prio:3 size:1 {moves} hosts:2 why",
        {
            "gang": lambda r: gang(r.gang_id) or "new",
            "now": lambda r: _cell(r.before, r.starts_before, now),
            **dict.fromkeys(("then", "next_pass"), lambda r: _cell(r.after, r.starts_after, now)),
            "hosts": lambda r: " ".join(f"{host}:{n}" for host, n in sorted((r.hosts or {}).items())),
        },
    )
    session.rows(shown, table, "nothing changes" if changes else "no gang waits")
    if len(shown) < len(rows):
        say(f"not shown: {counted(len(rows) - len(shown), 'gang')} whose wait is as before; --all lists them")


@click.command()
@click.option(
    "--since", type=Due(), default="1h", show_default=True, help="From then on: 1h (ago), or a time."
)
@click.option("--until", type=Due(), default="0s", show_default=True, help="Up to then.")
@table_options
def replay(session: Session, since: datetime | timedelta, until: datetime | timedelta) -> None:
    """Decide on recorded boards once more: each must decide what it decided then.

    Passes are recorded while settings.record_decisions is on; of the others only the digest is known. Ends with 1
    where one decides otherwise. With --json one object per pass: {"at", "digest", "decisions", "same", "difference"}.
    """
    client = session.client()
    now = client.execute(queries.database_time())
    first, last = (now - moment if isinstance(moment, timedelta) else moment for moment in (since, until))
    found = client.replay(since=first, until=last)
    session.rows(found, _REPLAYED, "no pass decided anything in that time")
    if not session.json and found and found[-1].same is None:
        say("to record the next boards: select gangq.configure('{\"record_decisions\": true}')")
    if any(row.same is False for row in found):
        click.get_current_context().exit(EXIT_REFUSED)


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


class _Row(NamedTuple):
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
