"""A fleet that is shown, the page as a server of its own, and Debian's Chromium without a screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from browsing import HOSTILE, Serve, Shown, Tab, serving
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from gangq.client import Client
from gangq.web import asgi
from sql.drive import Q

# Pages are told of everything within 5 s: what is expected of them has longer.
expect.set_options(timeout=10_000)
CHROMIUM = shutil.which("chromium")


@pytest.fixture
def shown(client: Client) -> Shown:
    devices = [
        {"uuid": f"G{n}", "index": n, "vram_mb": 1024, "model": "H9", "source": "nvml"} for n in range(3)
    ]
    worker = client.register_worker(name="w1", host="alpha", queues=["default"], slots=3, devices=devices)
    gang = client.submit_gang(task="train", size=2, gpus=1, name=HOSTILE).gang_id
    client.tick(force=True)
    assert len(client.claim(incarnation=worker.incarnation, max_jobs=3, ports=[29500])) == 2
    client.set_queue(name="later")
    job = client.submit(task="hostile", queue="later", payloads=[{"x": HOSTILE}])[0]
    return Shown(gang, job, worker.incarnation)


@pytest.fixture
def q(db: psycopg.Connection[dict[str, Any]], clock: Any) -> Q:
    return Q(db, clock)


@pytest.fixture
def serve(dsn: str) -> Iterator[Serve]:
    """Serve the page of this database; takes the options of `asgi`, returns the address."""
    with ExitStack() as stack:
        yield lambda dsn=dsn, **options: stack.enter_context(serving(asgi(dsn, **options)))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        # Its sandbox needs user namespaces, which containers often lack.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def profile(chromium: Browser) -> Iterator[BrowserContext]:
    """For all tests of a file. Its window stays open: to open one costs a second of a processor, a page 0.2 s."""
    context = chromium.new_context()
    context.set_default_timeout(10_000)
    context.new_page()
    yield context
    context.close()


@pytest.fixture
def tab(profile: BrowserContext) -> Iterator[Tab]:
    tab = Tab(profile.new_page())
    tab.page.on("console", lambda m: tab.problems.append(m.text) if m.type == "error" else None)
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on("dialog", lambda dialog: (tab.problems.append(dialog.message), dialog.dismiss()))
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    yield tab
    tab.page.close()
    profile.clear_cookies()
