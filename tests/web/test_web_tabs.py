"""Many tabs of the page: a browser has about six connections to one server, and each event stream takes one."""

from __future__ import annotations

import shutil
import socket

import pytest
from browsing import Serve, Shown
from playwright.sync_api import Page, expect, sync_playwright

from gangq.client import Client

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium")
TABS = 8


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
@pytest.mark.parametrize("background", [True, False], ids=["in_the_background", "one_after_the_other"])
def test_many_tabs_leave_a_connection_for_the_one_that_is_seen_and_each_is_up_to_date_when_it_is_seen(
    serve: Serve, shown: Shown, client: Client, background: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with sync_playwright() as playwright:
        args = ["--no-sandbox", f"--remote-debugging-port={port}"]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=args) as launched:
            # By default Playwright makes each page believe that it is seen.
            browser = playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{port}", no_defaults=True)
            (context,) = browser.contexts
            context.set_default_timeout(10_000)
            session, at = browser.new_browser_cdp_session(), serve()

            def opened() -> Page:
                with context.expect_page() as page:
                    session.send("Target.createTarget", {"url": at, "background": background})
                page.value.wait_for_load_state()
                expect(page.value.locator("h1")).to_have_text("Fleet")
                return page.value

            front = context.new_page()
            tabs = [opened() for _ in range(TABS)]
            seen = tabs[-1]
            seen.bring_to_front()
            assert [tab.evaluate("document.hidden") for tab in [front, *tabs]] == [True] * TABS + [False]
            seen.locator(f'td a[href="/gangs/{shown.gang}"]').click()
            expect(seen.locator("svg.timeline")).to_be_visible()
            client.set_queue(name="made-meanwhile")
            tabs[0].bring_to_front()
            expect(tabs[0].get_by_role("cell", name="made-meanwhile")).to_be_visible()
            launched.close()
