"""/metrics of the page: scraped over HTTP, with the rights of the DSN's login."""

from __future__ import annotations

import sys

import httpx
import pytest
from browsing import Serve, Shown, fetch, serving
from prometheus_client.parser import text_string_to_metric_families

from gangq.web import asgi


def test_the_page_serves_what_gangq_metrics_serves(serve: Serve, shown: Shown) -> None:
    at = serve(base_path="/q")
    for path in ("/metrics", "/q/metrics"):
        answer = httpx.get(at + path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        assert found["gangq_up",] == 1
        assert found["gangq_jobs", "default", "running"] == 2
        assert found["gangq_devices", "H9", "busy"] == 2
    assert httpx.post(f"{at}/metrics").status_code == 405


def test_a_database_that_is_away_is_said_in_the_metrics_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (answer,) = fetch("postgresql://127.0.0.1:1/fleet", "/metrics")
    assert answer.status_code == 200
    assert "gangq_up 0.0" in answer.text
    assert [record.message for record in caplog.records] == ["scrape_failed"]


def test_with_a_login_there_are_none_and_no_way_around_it(dsn: str) -> None:
    with serving(asgi(dsn, login=True)) as at:
        answer = httpx.get(f"{at}/metrics")
    assert answer.status_code == 404
    assert "gangq metrics" in answer.text
    assert "gangq_up" not in answer.text


def test_without_the_extra_they_say_what_to_install(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    (answer,) = fetch(dsn, "/metrics")
    assert answer.status_code == 404
    assert "pip install 'gangq[metrics]'" in answer.text
