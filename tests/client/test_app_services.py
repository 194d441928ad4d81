"""Services in code: declared by an App, stored by whoever may submit, scaled and stopped by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gangq import App, Context, Scale
from gangq.client import Client
from gangq.errors import InvalidInput, NotFound


@pytest.fixture
def app(client: Client) -> App:
    return App(client=client)


def serve(ctx: Context, model: str = "m") -> None:
    """It serves."""


def test_a_service_is_stored_as_it_is_declared_and_its_function_is_a_task(app: App, client: Client) -> None:
    task = app.service(
        name="chat", replicas=3, gang=2, gpus=1, queue="default", payload={"model": "a"}, surge=0,
        ready_within="1m", linger=1, gang_options={"strategy": "spread"}, version="7",
    )(serve)  # fmt: skip
    assert app.tasks == {"chat": task}
    assert app.store_services("tests:app") == []
    found = app.services["chat"].row()
    assert (found.replicas, found.gang, found.payload, found.surge) == (4, 2, {"model": "a"}, 0)
    assert (found.ready_within_s, found.linger_s, found.version, found.source) == (60, 1, "7", "tests:app")
    assert found.work == {"gpus": 1, "queue": "default", "strategy": "spread"}
    before = client.services()
    app.store_services("tests:app")
    assert client.services() == before


def test_a_task_may_be_kept_running_too(app: App) -> None:
    task = app.task(cpus=1)(serve)
    assert app.service(replicas=2)(task) is task
    app.store_services("tests:app")
    found = app.services["serve"].row()
    assert (found.task, found.replicas, found.work) == ("serve", 2, {"cpus": 1})


def test_a_handle_scales_stops_and_rolls_it_back(app: App) -> None:
    app.service(replicas=2)(serve)
    service = app.services["serve"]
    with pytest.raises(NotFound, match="is not stored"):
        service.scale(3)
    app.store_services("tests:app")
    service.scale(3)
    assert service.row().replicas == 3
    service.stop()
    assert service.row().state == "stopped"
    app.store_services("tests:app")
    assert (service.row().state, service.row().replicas) == ("stopped", 3), "as it was left by hand"
    service.scale(1)
    assert service.row().state == "starting"
    assert service.endpoints() == []
    assert service.roll_back(1) == 1


def test_it_is_scaled_as_it_is_declared(app: App, client: Client) -> None:
    app.service(scale=Scale(min=2, max=8, load=0.7, up_after="10s", down_after="2m"))(serve)
    app.store_services("tests:app")
    (row,) = client.scaling()
    assert (row.replicas, row.min_replicas, row.max_replicas) == (2, 2, 8)
    assert (row.target_load, row.up_after_s, row.down_after_s) == (pytest.approx(0.7), 10, 120)
    app.services["serve"].scale(5)
    app.store_services("tests:app")
    assert client.scaling()[0].replicas == 5, "where it was scaled to it stays"
    lower = App(client=client)
    lower.service(scale=Scale(min=3, max=8, load=0.7))(serve)
    lower.store_services("tests:app")
    assert client.scaling()[0].replicas == 5, "a new minimum that is lower changes nothing"
    other = App(client=client)
    other.service()(serve)
    other.store_services("tests:app")
    assert client.scaling() == []


@pytest.mark.parametrize(("given", "why"), [({}, "one target"), ({"load": 1, "min": 5}, "min is 5")])
def test_a_scale_that_makes_no_sense_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Scale(max=4, **given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"replicas": 0}, "0 replicas"),
        ({"payload": {"size": 1}}, "do not fit"),
        ({"payload": [1]}, "payload"),
        ({"ready_within": "soon"}, "ready_within"),
        ({"gang_options": {"heap": 1}}, "unknown option 'heap'"),
        ({"unique": "k"}, "option unique"),
        ({"gpu": 1}, "unknown option 'gpu'"),
    ],
)
def test_what_is_wrong_is_said_where_it_is_written(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        App("postgresql:///none").service(**given)(serve)


def test_a_name_is_declared_once() -> None:
    app = App("postgresql:///none")
    task = app.task()(serve)
    app.service()(task)
    with pytest.raises(InvalidInput, match="declared twice"):
        app.service()(task)
    app.service(name="other")(task)


def test_what_is_not_declared_any_more_is_returned_and_goes_on(app: App, client: Client) -> None:
    app.service()(serve)
    app.store_services("tests:app")
    assert App(client=client).store_services("tests:app") == ["serve"]
    assert client.services()[0].undeclared_at is not None
