"""gangq web --login: who gets in, with which rights, for how long, and what pages elsewhere can make a browser do."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from browsing import UNREADABLE, UNSEEN, Shown, Tab, cells, serving
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from databases import OwnServer
from gangq.client import Client
from gangq.embedded import Server
from gangq.web import asgi, sessions
from gangq.web.sessions import Attempts

pytestmark = pytest.mark.slow

PASSWORD = "pass <b>&\"'word"
LOGINS = {"ada": "gangq_admin", "sam": "gangq_submitter", "vera": "gangq_viewer", "wim": "gangq_worker",
          "hal": "gangq_host"}  # fmt: skip


@dataclass(frozen=True)
class Guarded:
    """A server that takes logins over TCP by password, and anybody over its socket."""

    server: Server
    port: int


@pytest.fixture(scope="module")
def guarded(own_server: OwnServer) -> Iterator[Guarded]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with own_server(settings={"listen_addresses": "127.0.0.1", "port": str(port)}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as db:
            for login, role in LOGINS.items():
                db.execute(f"create role {login} login in role {role}".encode())
                db.execute(
                    psycopg.sql.SQL("alter role {} password {}").format(
                        psycopg.sql.Identifier(login), PASSWORD
                    )
                )
        yield Guarded(server, port)


_numbers = itertools.count()


@pytest.fixture
def dsn(guarded: Guarded) -> str:
    """In place of that of all tests: the owner's, over the socket."""
    return guarded.server.create_database(f"test_{next(_numbers)}", template="gangq")


class Visitor:
    """A browser without scripts: it keeps cookies, and sends the forms that it was shown."""

    def __init__(self, at: str, headers: dict[str, str]) -> None:
        self.http = httpx.Client(base_url=at, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def token(self, path: str) -> str:
        """Of the last form of this page: the first is the one to log out."""
        found = re.findall('name="token" value="([^"]+)"', self.get(path).text)
        return str(found[-1]) if found else ""

    def send(self, form: str, to: str, **fields: str) -> httpx.Response:
        """Load the page that has the form, then send that."""
        return self.http.post(to, data={"token": self.token(form), **fields})

    def log_in(self, login: str, password: str = PASSWORD) -> httpx.Response:
        return self.send("/login", "/login", login=login, password=password)

    def do(self, action: str, what: object, **fields: str) -> httpx.Response:
        asked = self.get(f"/do/{action}?{urlencode({'what': what})}")
        if asked.status_code != 200:
            return asked
        return self.send(str(asked.url), f"/do/{action}", what=str(what), **fields)


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(guarded: Guarded, dsn: str) -> Iterator[Visit]:
    """A new visitor of a page of this database, the same page for all who come with the same options."""
    pages: dict[str, str] = {}
    with ExitStack() as stack:

        def come(
            login: str | None = None,
            over: str | None = None,
            headers: dict[str, str] | None = None,
            **options: Any,
        ) -> Visitor:
            name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
            to = over or f"postgresql://127.0.0.1:{guarded.port}/{name}"
            key = repr((to, options))
            if key not in pages:
                pages[key] = stack.enter_context(serving(asgi(to, login=True, **options)))
            visitor = Visitor(pages[key] + options.get("base_path", ""), headers or {})
            stack.enter_context(visitor.http)
            if login is not None:
                assert visitor.log_in(login).status_code == 303
            return visitor

        yield come


def connections(dsn: str, login: str) -> int:
    with psycopg.connect(dsn) as db:
        row = db.execute(
            "select count(*) from pg_stat_activity where usename = %s and datname = current_database()",
            [login],
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_without_a_session_nothing_is_shown_or_done(visit: Visit, shown: Shown, client: Client) -> None:
    visitor = visit()
    for path in ("/", "/usage", "/services", "/batches",
                 f"/gangs/{shown.gang}", f"/jobs/{shown.job}", f"/do/cancel-job?what={shown.job}",
                 "/static/../usage", "/login/../usage", "//usage", "/login/", "/static"):  # fmt: skip
        for headers in (
            {},
            {"hx-request": "true"},
            {"cookie": "gangq_session="},
            {"cookie": "gangq_session=x"},
        ):
            answer = visitor.http.get(path, headers=headers)
            assert answer.status_code in (303, 307, 401, 404), path
            assert "hostile" not in answer.text
    assert visitor.get("/live").status_code == 401
    for path in ("/do/cancel-job", "/logout"):
        assert visitor.http.post(path, data={"what": shown.job}).headers["location"] == "/login?ended"
        live = visitor.http.post(path, data={"what": shown.job}, headers={"hx-request": "true"})
        assert live.status_code == 401
    assert client.jobs(ids=[shown.job])[0].state == "pending"


def test_a_viewer_sees_the_fleet_and_is_offered_nothing(visit: Visit, shown: Shown, client: Client) -> None:
    visitor = visit("vera")
    (batch,) = client.submit(task="sweep", payloads=[{}], name="b")
    paths = (
        "/",
        f"/gangs/{shown.gang}",
        f"/jobs/{shown.job}",
        "/services",
        "/batches",
        f"/batches/{batch}",
        "/schedules",
        "/limits",
        "/usage",
    )
    for path in paths:
        page = visitor.get(path)
        assert page.status_code == 200, path
        assert "/do/" not in page.text
    for path in (
        f"/do/cancel-gang?what={shown.gang}",
        "/do/pause-queue?what=later",
        "/do/pause-task?what=train",
    ):
        assert visitor.get(path).status_code == 403, "it is not even asked"
    token = visitor.token("/")
    for action, what in (("cancel-gang", shown.gang), ("pause-queue", "later"), ("pause-task", "train"),
                         ("resume-task", "train"), ("cordon-host", "alpha")):  # fmt: skip
        answer = visitor.http.post(f"/do/{action}", data={"token": token, "what": what})
        assert answer.status_code == 403, action
    assert client.gangs(ids=[shown.gang])[0].state == "running"


def test_a_submitter_cancels_what_is_theirs_and_nothing_else(
    visit: Visit, shown: Shown, guarded: Guarded, client: Client, dsn: str
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with Client(f"host=127.0.0.1 port={guarded.port} dbname={name}", user="sam", password=PASSWORD) as sam:
        own = sam.submit(task="own", queue="later", payloads=[{}])[0]
    visitor = visit("sam")
    assert "/do/cancel-job" in visitor.get(f"/jobs/{own}").text
    assert "/do/pause-task" not in visitor.get(f"/jobs/{own}").text
    asked = visitor.get("/do/pause-task?what=own")
    assert (asked.status_code, "sam may not pause tasks" in asked.text) == (403, True)
    assert "/do/" not in visitor.get(f"/jobs/{shown.job}").text
    assert "/do/" not in visitor.get("/").text
    assert visitor.do("cancel-job", own).headers["location"] == f"/jobs/{own}"
    assert visitor.get(f"/do/cancel-job?what={shown.job}").status_code == 403, "it is not even asked"
    forced = visitor.http.post("/do/cancel-job", data={"token": visitor.token("/"), "what": shown.job})
    assert forced.status_code == 403
    assert [client.jobs(ids=[id])[0].state for id in (own, shown.job)] == ["cancelled", "pending"]
    assert visitor.do("retry-job", own).status_code == 303
    assert client.jobs(ids=[own])[0].state == "pending"


def test_an_admin_cancels_pauses_and_cordons(visit: Visit, shown: Shown, client: Client) -> None:
    visitor = visit("ada")
    assert visitor.do("pause-queue", "later").status_code == 303
    assert client.queues(name="later")[0].paused
    assert "/do/resume-queue?what=later" in visitor.get("/").text
    assert visitor.do("resume-queue", "later").status_code == 303
    assert not client.queues(name="later")[0].paused
    assert visitor.do("cordon-host", "alpha").status_code == 303
    assert [row.name for row in client.cordoned()] == ["alpha"]
    assert visitor.do("uncordon-host", "alpha").status_code == 303
    assert client.cordoned() == []
    assert visitor.do("cancel-gang", shown.gang).status_code == 303
    assert client.gangs(ids=[shown.gang])[0].state == "draining"
    assert visitor.do("retry-gang", shown.gang).status_code == 409


def test_a_task_is_paused_from_the_page_of_a_job_and_resumed_from_that_of_the_fleet(
    visit: Visit, shown: Shown, client: Client
) -> None:
    visitor = visit("ada")
    for path in (f"/jobs/{shown.job}", f"/gangs/{shown.gang}"):
        assert "/do/pause-task?what=" in visitor.get(path).text, path
    assert visitor.do("pause-task", "hostile", reason="<i>new data</i>").headers["location"] == "/"
    (task,) = client.tasks(task="hostile")
    assert (task.paused, task.paused_until, task.paused_by) == (True, None, "ada")
    fleet = visitor.get("/").text
    assert "/do/resume-task?what=hostile" in fleet
    assert "&lt;i&gt;new data&lt;/i&gt;" in fleet
    assert visitor.do("resume-task", "hostile").status_code == 303
    assert not client.tasks(task="hostile")


def test_a_pause_ends_so_long_from_now_as_its_form_said(visit: Visit, shown: Shown, client: Client) -> None:
    client.set_schedule(name="nightly", task="report", every="1h")
    visitor = visit("ada")
    for kind, name in (("queue", "later"), ("task", "hostile"), ("schedule", "nightly")):
        before = datetime.now(UTC)
        assert visitor.do(f"pause-{kind}", name, after=" 1h30m ").status_code == 303
        (row,) = {
            "queue": client.queues(name=name),
            "task": client.tasks(task=name),
            "schedule": client.schedules(),
        }[kind]
        assert row.paused_until is not None
        assert timedelta(minutes=89) < row.paused_until - before < timedelta(minutes=91), kind
    fleet = visitor.get("/").text
    assert "later (paused until 20" in fleet
    assert "<td>hostile</td><td>20" in cells(fleet)


@pytest.mark.parametrize("after", ["tomorrow", "-1h", "0", "9999w", "1e9", "2h; drop"])
def test_a_pause_of_no_length_is_asked_again_and_what_was_written_is_kept(
    visit: Visit, shown: Shown, client: Client, after: str
) -> None:
    again = visit("ada").do("pause-task", "hostile", after=after, reason='say "why"')
    assert again.status_code == 400
    assert "is no length of a pause" in again.text
    assert f'value="{after}"' in again.text
    assert 'value="say &#34;why&#34;"' in again.text
    assert not client.tasks(task="hostile")


def test_a_batch_is_cancelled_and_its_failed_jobs_are_retried(
    visit: Visit, shown: Shown, client: Client
) -> None:
    batch, *others = client.submit(task="sweep", payloads=[{}] * 3, name="lr", queue="default")
    (claim,) = client.claim(incarnation=shown.incarnation, max_jobs=1)
    assert claim.job_id == batch
    client.fail(job_id=batch, token=claim.token, error={"message": "nan"}, retryable=False)
    visitor = visit("ada")
    page = visitor.get(f"/batches/{batch}").text
    assert f"/do/cancel-batch?what={batch}" in page
    assert f"/do/retry-batch?what={batch}" in page
    asked = visitor.get(f"/do/cancel-batch?what={batch}").text
    assert f"Cancel batch b{batch} (lr, 3 jobs, running)?" in asked
    assert visitor.do("cancel-batch", batch).headers["location"] == f"/batches/{batch}"
    states = {job.id: job.state for job in client.jobs(ids=[batch, *others])}
    assert states == {batch: "failed", **dict.fromkeys(others, "cancelled")}
    assert "/do/cancel-batch" not in visitor.get(f"/batches/{batch}").text, "none is left"
    assert visitor.do("retry-batch", batch).status_code == 303
    assert client.jobs(ids=[batch])[0].state == "pending"


def test_a_schedule_is_paused_resumed_and_run_now(visit: Visit, client: Client) -> None:
    client.set_schedule(name="a/b c", task="report", every="1h")
    visitor = visit("ada")
    assert "/do/pause-schedule?what=a/b%20c" in visitor.get("/schedules").text
    assert visitor.do("pause-schedule", "a/b c").headers["location"] == "/schedules"
    assert client.schedules()[0].paused
    assert "/do/resume-schedule?what=a/b%20c" in visitor.get("/schedules").text
    assert visitor.do("resume-schedule", "a/b c").status_code == 303
    assert not client.schedules()[0].paused
    assert visitor.do("run-schedule", "a/b c").status_code == 303
    made = client.schedules()[0].last_job
    assert made is not None
    assert f'href="/jobs/{made}"' in visitor.get("/schedules").text


def test_a_service_is_stopped_and_started(visit: Visit, client: Client) -> None:
    client.set_service(name="chat", task="serve", replicas=1)
    visitor = visit("ada")
    assert "/do/stop-service?what=chat" in visitor.get("/services").text
    assert visitor.do("stop-service", "chat").headers["location"] == "/services"
    assert client.services()[0].state == "stopped"
    assert "/do/start-service?what=chat" in visitor.get("/services").text
    assert visitor.do("start-service", "chat").status_code == 303
    assert client.services()[0].state == "starting"


def test_batches_schedules_and_services_of_others_are_not_a_submitters(visit: Visit, client: Client) -> None:
    (batch,) = client.submit(task="sweep", payloads=[{}], name="lr")
    client.set_schedule(name="nightly", task="report", every="1h")
    client.set_service(name="chat", task="serve", replicas=1)
    visitor = visit("sam")
    token = visitor.token("/")
    for path in ("/schedules", "/services", f"/batches/{batch}"):
        assert "/do/" not in visitor.get(path).text, path
    for action, what in (
        ("cancel-batch", batch), ("retry-batch", batch), ("pause-schedule", "nightly"), ("run-schedule", "nightly"),
        ("stop-service", "chat"), ("start-service", "chat"),
    ):  # fmt: skip
        assert visitor.get(f"/do/{action}?what={what}").status_code == 403, "it is not even asked"
        answer = visitor.http.post(f"/do/{action}", data={"token": token, "what": what})
        assert answer.status_code == 403, action
    client.set_queue(name="default", others="shared")
    for path in ("/schedules", "/services", f"/batches/{batch}"):
        assert "/do/" in visitor.get(path).text, path
    assert visitor.do("cancel-batch", batch).status_code == 303


def test_what_does_not_exist_is_neither_changed_nor_made(visit: Visit, client: Client) -> None:
    visitor = visit("ada")
    for action, what in (("pause-queue", "nowhere"), ("cordon-host", "nowhere"), ("cancel-job", "9" * 30),
                         ("cancel-job", "1 or true"), ("cancel-gang", ""), ("drop", "x"), ("cancel-batch", "7"),
                         ("pause-schedule", "nowhere"), ("start-service", "nowhere"), ("pause-task", "nowhere"),
                         ("resume-task", "nowhere")):  # fmt: skip
        assert visitor.do(action, what).status_code == 404, action
    assert "nowhere" not in {queue.name for queue in client.queues()}
    assert client.tasks() == []


@pytest.mark.parametrize("login", ["wim", "hal"])
def test_a_login_of_a_program_is_shown_what_it_may_read_or_told_that_it_may_not(
    visit: Visit, shown: Shown, login: str
) -> None:
    visitor = visit()
    if visitor.log_in(login).status_code == 303:
        for path in ("/", "/services", "/batches", "/schedules", "/limits", "/usage", f"/gangs/{shown.gang}",
                     f"/jobs/{shown.job}", "/do/cancel-job?what=1"):  # fmt: skip
            answer = visitor.get(path)
            assert answer.status_code in (200, 403), path
            assert "/do/" not in answer.text, path


def test_what_is_sent_after_its_session_has_ended_is_not_done_and_says_so(
    visit: Visit, shown: Shown, client: Client
) -> None:
    visitor = visit("ada")
    token = visitor.token(f"/do/cancel-gang?what={shown.gang}")
    visitor.send("/", "/logout")
    late = visitor.http.post(
        "/do/cancel-gang", data={"token": token, "what": shown.gang}, follow_redirects=True
    )
    assert "Your session has ended, and nothing was done." in late.text
    assert 'name="password"' in late.text
    assert visitor.log_in("ada").status_code == 303
    # In another tab the form of the former session is still open.
    assert visitor.http.post("/do/cancel-gang", data={"token": token, "what": shown.gang}).status_code == 403
    assert client.gangs(ids=[shown.gang])[0].state == "running"


def test_each_of_two_tabs_that_ask_for_a_login_takes_it(visit: Visit) -> None:
    visitor = visit()
    first, second = visitor.token("/login"), visitor.token("/login")
    for token in (first, second):
        answer = visitor.http.post("/login", data={"token": token, "login": "vera", "password": PASSWORD})
        assert answer.status_code == 303


def test_a_planted_cookie_of_the_form_is_not_adopted(visit: Visit) -> None:
    visitor = visit()
    for planted in ("planted", '"><script>', "a" * 44):
        visitor.http.cookies.clear()
        visitor.http.cookies.set("gangq_form", planted)
        assert planted not in visitor.get("/login").text


def test_a_wrong_password_and_an_unknown_login_get_the_same_answer(visit: Visit, dsn: str) -> None:
    visitor = visit()
    refused = [visitor.log_in(*who) for who in (("ada", "wrong"), ("nobody", "wrong"), ("nobody", PASSWORD))]
    assert {answer.status_code for answer in refused} == {403}
    assert len({re.sub('value="[^"]*"', "", answer.text) for answer in refused}) == 1
    for who in (("ada", ""), ("", PASSWORD), ("ada\0", PASSWORD)):
        assert visitor.log_in(*who).status_code == 403
    assert visitor.get("/").status_code == 303
    assert connections(dsn, "ada") == 0


def test_a_server_that_asks_for_no_password_lets_nobody_in(visit: Visit, dsn: str) -> None:
    visitor = visit(over=dsn)
    answer = visitor.log_in("ada", "anything")
    assert answer.status_code == 403
    assert "asked for no password" in answer.text
    assert visitor.get("/").status_code == 303


def test_what_the_dsn_knows_is_no_help_to_who_logs_in(
    visit: Visit, guarded: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # libpq looks into this file if a password is empty.
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"*:*:*:*:{PASSWORD}\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    knows = {
        "host": "127.0.0.1",
        "port": guarded.port,
        "dbname": "gangq",
        "user": "ada",
        "password": PASSWORD,
    }
    visitor = visit(over=psycopg.conninfo.make_conninfo("", **knows))
    for who in (("ada", "wrong"), ("ada", ""), ("vera", "wrong"), ("", "")):
        assert visitor.log_in(*who).status_code == 403
    # A name is a name: it sets no other parameter of the connection.
    for login in ("ada host=elsewhere", "ada' passfile='/x", "postgresql://ada@elsewhere"):
        assert visitor.log_in(login, PASSWORD).status_code == 403


def test_a_form_that_another_page_or_session_made_is_refused(
    visit: Visit, shown: Shown, client: Client
) -> None:
    visitor, other = visit("ada"), visit("ada")
    to, what = "/do/cancel-job", str(shown.job)
    pause = {"what": "hostile"}
    token, foreign = visitor.token("/"), other.token("/")
    for sent in (
        {},
        {"token": ""},
        {"token": foreign},
        {"token": token[:-1]},
        {"token": "\N{SNOWMAN}"},
    ):
        assert visitor.http.post(to, data={"what": what, **sent}).status_code == 403
        assert visitor.http.post("/do/pause-task", data={**pause, **sent}).status_code == 403
        assert visitor.http.post("/logout", data=sent).status_code == 403
    right = {"what": what, "token": token}
    for headers in (
        {"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):  # fmt: skip
        assert visitor.http.post(to, data=right, headers=headers).status_code == 403
    assert visitor.http.post(to, data={**right, "x": "y" * 20_000}).status_code == 413
    assert visitor.http.post(to, data={**right, **{f"x{n}": "y" for n in range(9)}}).status_code == 413
    assert visitor.http.get(to, params=right).status_code == 200, "it only asks"
    assert client.jobs(ids=[shown.job])[0].state == "pending"
    assert client.tasks() == []
    assert visitor.http.post(to, data=right).status_code == 303


def test_a_login_that_another_page_sends_is_refused(visit: Visit) -> None:
    visitor = visit()
    fields = {"login": "ada", "password": PASSWORD}
    assert visitor.http.post("/login", data=fields).status_code == 403
    assert (
        visitor.http.post(
            "/login", data={**fields, "token": ""}, headers={"cookie": "gangq_form="}
        ).status_code
        == 403
    )
    assert "gangq_session" not in visitor.http.cookies


def test_the_cookie_is_for_this_page_only_and_a_planted_one_is_not_adopted(visit: Visit) -> None:
    visitor = visit(base_path="/q")
    visitor.http.cookies.set("gangq_session", "planted")
    plain = visitor.log_in("vera").headers["set-cookie"]
    assert "planted" not in plain
    assert {"HttpOnly", "Path=/q/", "SameSite=strict"} <= set(plain.split("; "))
    assert "Secure" not in plain
    behind_https = visit(headers={"x-forwarded-proto": "https", "origin": "https://127.0.0.1"})
    assert "Secure" in behind_https.get("/login").headers["set-cookie"]


def test_logging_in_again_and_out_ends_the_session_and_its_connections(visit: Visit, dsn: str) -> None:
    visitor = visit("vera")
    assert visitor.get("/").status_code == 200
    assert connections(dsn, "vera") > 0
    first = visitor.http.cookies["gangq_session"]
    assert visitor.log_in("vera").status_code == 303
    second = visitor.http.cookies["gangq_session"]
    assert visitor.send("/", "/logout").headers["location"] == "/login"
    for name in (first, second):
        visitor.http.cookies.clear()
        assert visitor.http.get("/", headers={"cookie": f"gangq_session={name}"}).status_code == 303
    assert connections(dsn, "vera") == 0


@pytest.mark.parametrize(("path", "headers"), [("/", {"hx-request": "true"}), ("/live", {})])
def test_a_session_that_is_not_used_ends_by_itself_and_live_requests_are_no_use(
    path: str, headers: dict[str, str], visit: Visit, dsn: str
) -> None:
    visitor = visit("vera", idle_s=2)
    assert visitor.get("/").status_code == 200
    began = time.monotonic()
    status = 200
    while status == 200:
        with visitor.http.stream("GET", path, headers=headers) as answer:
            status = answer.status_code
        assert time.monotonic() < began + 10
        time.sleep(0.1)
    while connections(dsn, "vera"):
        assert time.monotonic() < began + 10
        time.sleep(0.1)


def test_a_session_ends_after_its_longest_time_however_it_is_used(visit: Visit) -> None:
    visitor = visit("vera", most_s=2)
    began = time.monotonic()
    while visitor.get("/").status_code == 200:
        assert time.monotonic() < began + 10
        time.sleep(0.1)


def test_sessions_are_bounded_and_one_that_ends_makes_room(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SESSIONS", 1)
    first, second = visit("vera"), visit()
    assert second.log_in("ada").status_code == 503
    assert first.send("/", "/logout").status_code == 303
    assert second.log_in("ada").status_code == 303


def test_guesses_are_bounded_also_for_who_then_knows_the_password(visit: Visit) -> None:
    visitor = visit()
    answers = [visitor.log_in("ada", f"guess {n}").status_code for n in range(10)]
    assert answers == [403] * 10
    assert visitor.log_in("ada").status_code == 429


def test_attempts_are_counted_by_login_by_address_and_in_all() -> None:
    now = 0.0
    attempts = Attempts(lambda: now)
    assert sum(attempts.admit("ada", f"10.0.0.{n}") for n in range(30)) == 10
    assert sum(attempts.admit(f"u{n}", "10.1.0.1") for n in range(30)) == 10
    assert sum(attempts.admit(f"v{n}", f"10.2.0.{n}") for n in range(100)) == 40
    now = 61.0
    assert attempts.admit("ada", "10.1.0.1")


def test_no_page_and_no_log_has_a_secret(
    visit: Visit, shown: Shown, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    visitor = visit()
    pages = [visitor.log_in("ada", "not it").text, visitor.log_in("ada").text]
    session = visitor.http.cookies["gangq_session"]
    paths = (
        "/",
        "/usage",
        f"/gangs/{shown.gang}",
        f"/jobs/{shown.job}",
        "/jobs/99",
        f"/do/cancel-gang?what={shown.gang}",
    )
    pages += [visitor.get(path).text for path in paths]
    ours = [str(vars(record)) for record in caplog.records if not record.name.startswith("http")]
    said = "".join([*pages, *ours, *capfd.readouterr()])
    assert "login_refused" in said, "the log is read"
    for secret in (PASSWORD, "not it", session):
        assert secret not in said


def test_the_command_logs_who_did_what(
    guarded: Guarded, dsn: str, shown: Shown, client: Client, tmp_path: Path
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    argv = [sys.executable, "-m", "gangq", "web", "--login", "--port", port]
    environment = {**os.environ, "GANGQ_DSN": f"postgresql://127.0.0.1:{guarded.port}/{name}"}
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(argv, env=environment, stderr=said) as web,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        visitor = Visitor(f"http://127.0.0.1:{port}", {})
        began = time.monotonic()
        while True:
            try:
                http.get("/login")
                break
            except httpx.ConnectError:
                assert time.monotonic() < began + 30
                time.sleep(0.1)
        visitor.log_in("ada")
        assert visitor.do("cancel-job", shown.job).status_code == 303
        visitor.http.close()
        web.terminate()
        web.wait(30)
    lines = (tmp_path / "said").read_text()
    assert f'INFO gangq.web action action="cancel-job" target={shown.job} login="ada"' in lines
    assert 'INFO gangq.web.sessions login login="ada" address="127.0.0.1"' in lines
    assert PASSWORD not in lines
    assert client.jobs(ids=[shown.job])[0].state == "cancelled"


def test_a_page_without_login_has_no_login_and_no_actions(dsn: str, shown: Shown) -> None:
    with serving(asgi(dsn)) as at, httpx.Client(base_url=at) as http:
        assert "/do/" not in http.get(f"/gangs/{shown.gang}").text
        assert http.get("/login").status_code == 404
        for path in ("/login", "/logout", "/do/cancel-gang"):
            assert http.post(path, data={"what": shown.gang}).status_code == 404


def test_in_a_browser_a_gang_is_cancelled_after_a_question_by_keyboard_alone(
    visit: Visit, shown: Shown, tab: Tab, client: Client
) -> None:
    at = str(visit().http.base_url).rstrip("/")
    page = tab.page
    press = page.keyboard.press

    def tab_to(selector: str) -> None:
        for _ in range(40):
            press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        pytest.fail(f"Tab does not lead to {selector}")

    page.goto(f"{at}/gangs/{shown.gang}")
    # The form has the focus: the browser gives it when it first paints, which may be after the page has loaded.
    expect(page.get_by_label("Login")).to_be_focused()
    page.keyboard.type("ada")
    press("Tab")
    page.keyboard.type(PASSWORD)
    press("Enter")
    page.wait_for_url(f"{at}/")
    expect(page.locator("h1")).to_have_text("Fleet")
    tab_to(".skip")
    press("Enter")
    tab_to(f'td a[href="/gangs/{shown.gang}"]')
    press("Enter")
    page.wait_for_url(f"{at}/gangs/{shown.gang}")
    tab_to('a[href^="/do/cancel-gang"]')
    press("Enter")
    page.wait_for_url("**/do/cancel-gang?*")
    expect(page.locator("h1")).to_contain_text(f"Cancel gang g{shown.gang}")
    assert page.evaluate(UNREADABLE) == []
    assert page.evaluate(UNSEEN) == []
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert client.gangs(ids=[shown.gang])[0].state == "running"
    tab_to('input[name="reason"]')
    page.keyboard.type("<b>asked for</b>")
    press("Enter")
    expect(page.get_by_role("cell", name="<b>asked for</b>").first).to_be_visible()
    assert client.gangs(ids=[shown.gang])[0].state == "draining"
    assert tab.problems == []
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    assert "asked for" not in page.content()


def test_in_a_browser_an_open_page_asks_for_a_login_when_its_session_has_ended(
    visit: Visit, tab: Tab
) -> None:
    page = tab.page
    at = str(visit(idle_s=2).http.base_url).rstrip("/")
    page.goto(at)
    page.get_by_label("Login").fill("vera")
    page.get_by_label("Password").fill(PASSWORD)
    # It may be over before a look at the page: its answer is not missed.
    with page.expect_response(f"{at}/") as answer:
        page.get_by_role("button", name="Log in").click()
    assert answer.value.status == 200
    expect(page.get_by_label("Password")).to_have_value("", timeout=15_000)


def test_in_a_browser_a_page_elsewhere_cannot_send_a_form(
    visit: Visit, shown: Shown, tab: Tab, client: Client
) -> None:
    at = str(visit().http.base_url).rstrip("/")
    page = tab.page
    page.goto(at)
    page.get_by_label("Login").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{at}/")
    token = page.locator('input[name="token"]').first.get_attribute("value")

    async def evil(_: object) -> HTMLResponse:
        # With the token, which such a page cannot read: what says where the form came from has to do by itself.
        return HTMLResponse(
            f'<form method="post" action="{at}/do/cancel-gang"><input name="token" value="{token}">'
            f'<input name="what" value="{shown.gang}"><button>free GPUs</button></form>'
        )

    with serving(Starlette(routes=[Route("/", evil)])) as elsewhere:
        page.goto(elsewhere)
        page.get_by_role("button").click()
        page.wait_for_url(f"{at}/**")
        expect(page.locator("body")).to_contain_text("sent from elsewhere")
    assert client.gangs(ids=[shown.gang])[0].state == "running"
