"""gangq metrics: printed once, and served by a process of its own."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.cli_process import answers, gangq, ok, running
from gangq.client import Client

Db = psycopg.Connection[dict[str, Any]]
ENDED = 'gangq_jobs_ended_total{outcome="done",queue="default",task="t"}'


def run_one(client: Client) -> None:
    row = client.register_worker(name="w", host="h", queues=["default"])
    client.submit(task="t")
    (claim,) = client.claim(incarnation=row.incarnation)
    client.complete(job_ids=[claim.job_id], tokens=[claim.token])
    client.retire_worker(incarnation=row.incarnation)


def test_once_prints_them_and_with_json_an_object_for_each(dsn: str, client: Client) -> None:
    run_one(client)
    said = ok(dsn, "metrics", "--once")
    assert f"{ENDED} 1.0\n" in said
    assert "gangq_up 1.0\n" in said
    names = {sample.name for f in text_string_to_metric_families(said) for sample in f.samples}
    rows = answers(dsn, "metrics", "--once")
    assert {row["name"] for row in rows} == names - {
        "gangq_up",
        "gangq_build_info",
        "gangq_scrape_duration_seconds",
    }


def test_without_prometheus_client_it_says_what_to_install(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for args in (["--once"], ["--listen", "127.0.0.1:0"]):
        refused = gangq(dsn, "metrics", *args)
        assert (refused.exit_code, "pip install 'gangq[metrics]'" in refused.stderr) == (1, True)
    assert answers(dsn, "metrics", "--once"), "JSON needs no library"


@pytest.mark.parametrize("address", ["host", "127.0.0.1:99999", "[::1]", "a b:1"])
def test_an_address_that_is_none_is_refused(dsn: str, address: str) -> None:
    refused = gangq(dsn, "metrics", "--listen", address)
    assert (refused.exit_code, "127.0.0.1:9187" in refused.stderr) == (2, True)


def test_it_serves_until_it_is_told_to_stop_and_counts_on_after_a_restart(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    for expected in (1, 2):
        run_one(client)
        with running(dsn, tmp_path, "metrics", "metrics", "--listen", "127.0.0.1:0") as process:
            process.until(lambda: "serves http" in process.err, "it listens")
            (url,) = re.findall(r"serves (http://\S+)", process.err)
            with urllib.request.urlopen(url, timeout=20) as answer:
                body = answer.read().decode()
            process.interrupt()
            assert process.code() == 0
        assert f"{ENDED} {expected}.0\n" in body


def test_a_login_of_the_role_viewer_is_enough_and_one_without_a_role_is_refused(dsn: str, db: Db) -> None:
    for login in ("gangq_scraper", "gangq_stranger"):
        db.execute(
            f"do $$ begin create role {login} login; exception when duplicate_object then null; end $$".encode()
        )
    db.execute("grant gangq_viewer to gangq_scraper")
    may = psycopg.conninfo.make_conninfo(dsn, user="gangq_scraper")
    assert "gangq_up 1.0" in ok(may, "metrics", "--once")
    may_not = psycopg.conninfo.make_conninfo(dsn, user="gangq_stranger")
    for args in (["--once"], ["--listen", "127.0.0.1:0"]):
        refused = gangq(may_not, "metrics", *args)
        assert (refused.exit_code, "may not use the schema" in refused.stderr) == (1, True), refused.stderr
