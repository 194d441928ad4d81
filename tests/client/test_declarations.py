"""What a program declares is stored item by item: a refusal is of one item, an outage is of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gangq.client.verb import Query, Steps
from gangq.declarations import store
from gangq.errors import DatabaseUnreachable, InvalidInput


@dataclass
class Item:
    name: str


def asked(name: str) -> Query[Any]:
    return Query(name, "select 1", {}, lambda found: found)


def storing() -> Steps[Any]:
    """The steps, when this login has been found to be a submitter and the first item is on its way."""
    steps = store(
        "item", [Item("a"), Item("b")], lambda item: asked(item.name), lambda names: asked(str(names))
    )
    next(steps)
    assert steps.send(True).name == "a"
    return steps


def test_a_refusal_does_not_keep_the_others_from_being_stored() -> None:
    steps, refusal = storing(), InvalidInput("no")
    assert steps.throw(refusal).name == "b"
    assert steps.send(None).name == "['a', 'b']"
    with pytest.raises(StopIteration) as ended:
        steps.send(["old"])
    assert ended.value.value == ({"a": refusal}, ["old"])


def test_an_outage_is_no_refusal() -> None:
    with pytest.raises(DatabaseUnreachable):
        storing().throw(DatabaseUnreachable("away"))
