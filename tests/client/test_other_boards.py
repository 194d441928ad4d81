"""A board that this library cannot read: every verb that decides raises a GangqError that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, get_args, get_type_hints

import pytest

from gangq.client.rows import PassRow, Reason
from gangq.client.sync import in_steps
from gangq.client.verb import Query
from gangq.decider.passes import MOST, PART, _parts, replayed, run_pass
from gangq.decider.previews import explain_now_steps, plan_steps
from gangq.errors import GangqError, InvalidInput, SchemaMismatch
from gangq.placement import Board
from gangq.placement import board as board_module
from gangq.placement.board import Ask
from gangq.placement.decisions import Decision, Seat

WAITS = [Reason("state", False, "pending", {"ask": "k1/0"}), Reason("start", True, "the next pass", None)]


def _sent(board: str) -> Callable[[Query[Any]], Any]:
    return lambda query: [[board]] if query.name == "gangq.board" else WAITS


VERBS: dict[str, Callable[[str], object]] = {
    "tick": lambda board: in_steps(_sent(board), run_pass()),
    "plan": lambda board: in_steps(_sent(board), plan_steps([])),
    "explain_now": lambda board: in_steps(
        _sent(board), explain_now_steps(Query("gangq.explain_job", "", {}, lambda found: found))
    ),
}

BOARDS = {
    "of a newer release": (
        '{"now": 1, "more": 2}',
        r"unknown fields \(more\).* newer gangq .*upgrade gangq here",
    ),
    "of a newer format": (
        '{"now": 1, "format": 2}',
        r"format 2, .* on format 1: .*newer gangq .*upgrade gangq here",
    ),
    "of an older format": (
        '{"now": 1, "format": 0}',
        r"format 0, .* on format 1: .*older gangq .*gangq migrate",
    ),
    "of an older release": (
        '{"now": 1, "asks": [{"id": "g1"}]}',
        r"board.asks\[0\] lacks fields \(kind\).*gangq migrate",
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("what", BOARDS)
def test_every_verb_that_decides_says_which_side_to_upgrade(verb: str, what: str) -> None:
    board, said = BOARDS[what]
    with pytest.raises(SchemaMismatch, match=said):
        VERBS[verb](board)


def test_a_board_tells_its_format_and_one_that_tells_none_is_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Board(now=1.0)
    assert seen.to_json() == {"format": 1, "now": 1.0}
    assert Board.from_json({"now": 1.0}) == seen
    monkeypatch.setattr(board_module, "FORMAT", 2)
    with pytest.raises(SchemaMismatch, match=r"format 1, .* on format 2: .*older gangq"):
        Board.from_json({"now": 1.0})


FORMAT_1 = {
    "": "now workers units kinds asks queues limits rates cut kept places levels warm_s planned_starts victims "
    "grace_s pass_number asked recorded format",
    "workers": "id name host slots memory_mb millicpus devices class_id domains open doubtful warm",
    "units": "id holds ends_at queue submitter priority since lost_s movable movable_at ends_by part_of leaving "
    "drained apart ask limit_key",
    "kinds": "id roles queue require prefer apart model limit_key paused_task",
    "asks": "id kind priority age submitter estimate_s count since missing mates avoid_hosts",
    "queues": "name paused policy weight maximum guaranteed submitter_maximum max_gangs max_jobs displaces "
    "light_jobs rate",
    "kept": "ask holds starts_at",
    "places": "id worker kind devices job",
}
"""The fields that 0.2.0 has written to its boards."""


def test_a_field_has_the_name_that_it_had_when_the_format_began() -> None:
    """Of a released format none is renamed or taken away: boards that are recorded or in a file have it, and after
    `gangq migrate` a worker of the release before decides on until it is replaced.
    """
    assert board_module.FORMAT == 1
    hints = get_type_hints(Board)
    for part, names in FORMAT_1.items():
        kind = get_args(hints[part])[0] if part else Board
        assert [name for name in names.split() if name not in kind._fields] == [], part
    (ask,) = Board.from_json({"now": 1, "asks": [{"id": "k1/0", "kind": 1, "count": 3}]}).asks
    assert ask == Ask("k1/0", 1, count=3)


@pytest.mark.parametrize("data", [[], "board", {"now": "soon"}, {"now": 1, "asks": 7}])
def test_what_is_no_board_is_a_gangq_error_too(data: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Board.from_json(data)
    assert isinstance(caught.value, GangqError)


@pytest.mark.parametrize("what", BOARDS)
def test_a_recorded_board_of_another_release_is_said_and_the_others_are_replayed(what: str) -> None:
    board, said = BOARDS[what]
    empty: dict[str, Any] = {"now": 1}
    found = replayed(
        [PassRow(datetime.now(UTC), n, None, [], told) for n, told in enumerate([json.loads(board), empty])]
    )
    assert found[0].same is None
    assert re.search(said, str(found[0].difference))
    assert found[1].same is True


def test_the_plans_of_a_pass_are_in_one_part_behind_all_that_starts() -> None:
    seats = (Seat(1),)
    waits = [Decision(f"g{n}") for n in range(2 * MOST)]
    plans = [Decision(f"g{n}", planned=seats) for n in (-1, -2)]
    starts = [Decision(f"k{n}/0", seats=seats) for n in range(PART + 1)]
    parts = list(_parts([*waits, *plans, *starts]))
    assert [len(part) for part in parts] == [PART, MOST, MOST, 3]
    assert parts[1][:3] == [starts[-1], *plans]
