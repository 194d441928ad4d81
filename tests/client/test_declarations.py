"""What a program declares is stored item by item: a refusal is of one item, an outage is of all."""

from __future__ import annotations

from typing import Any

import pytest

from gangq import App
from gangq.client.verb import Steps
from gangq.declarations import Declared, store
from gangq.errors import DatabaseUnreachable, InvalidInput


def declared(name: str) -> Declared:
    return Declared(App("dbname=d"), name, {"name": name, "task": "t", "cron": "0 3 * * *"})


def storing() -> Steps[Any]:
    """The steps, when this login has been found to be a submitter and the first item is on its way."""
    steps = store("schedule", [declared("a"), declared("b")], "tests:app")
    next(steps)
    assert steps.send(True).params["name"] == "a"
    return steps


def test_a_refusal_does_not_keep_the_others_from_being_stored() -> None:
    steps, refusal = storing(), InvalidInput("no")
    assert steps.throw(refusal).params["name"] == "b"
    assert steps.send(None).params == {"source": "tests:app", "names": ["a", "b"]}
    with pytest.raises(StopIteration) as ended:
        steps.send(["old"])
    assert ended.value.value == ({"a": refusal}, ["old"])


def test_an_outage_is_no_refusal() -> None:
    with pytest.raises(DatabaseUnreachable):
        storing().throw(DatabaseUnreachable("away"))
