# pytest
"""How the team tests its tasks, without a worker and without a GPU."""

import pytest
from fastapi.testclient import TestClient

import gangq
from api import web
from gangq.testing import FakeContext, assert_submitted, drain, run
from tasks import evaluate, prepare, publish, retrain, train

ROWS = [[x / 10, 3 * x / 10] for x in range(-10, 11)]


def test_a_handler_is_a_function():
    assert run(prepare, dataset="a") == run(prepare, dataset="a")
    assert run(evaluate, rate=0.5, context=FakeContext(inputs={1: ROWS}))["loss"] < 0.01


def test_training_resumes_where_it_was_stopped():
    ctx = FakeContext(gang=(0, 2), inputs={1: ROWS}, stop_at=2)
    with pytest.raises(gangq.Stopped):
        run(train, epochs=4, context=ctx)
    assert [beat["step"] for beat in ctx.beats] == [1, 2]
    assert run(train, epochs=4, context=ctx.next_attempt())["resumed_from"] == 2


def test_the_night_submits_an_experiment():
    ctx = FakeContext()
    run(retrain, dataset="a", context=ctx)
    assert_submitted(evaluate, count=30, context=ctx)
    assert_submitted(train, epochs=20, context=ctx)


def test_publishing_is_tried_again(gangq_app, gangq_clock):
    job = publish.submit()
    for _ in range(3):
        drain(gangq_app)
        gangq_clock.advance("10s")
    assert job.row().attempts == 3


def test_an_experiment_is_stored_and_submitted_or_neither(gangq_app):
    with TestClient(web) as client:
        for status in (201, 409):
            answer = client.post("/experiments", params={"name": "a", "dataset": "digits"})
            assert answer.status_code == status
            assert_submitted(evaluate, count=30)
        assert client.get("/experiments/a").json()["sweep"] == {"done": 0, "running": 0, "of": 30}
