"""The page in a browser: nothing fails or comes from elsewhere, texts stay texts, and what changes is seen."""

from __future__ import annotations

import time

import pytest
from browsing import HOSTILE, Serve, Shown, Tab
from playwright.sync_api import Route, expect

from gangq.client import Client


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_an_error_or_is_wider_than_the_screen(
    serve: Serve, shown: Shown, tab: Tab, width: int, scheme: str
) -> None:
    at = serve()
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for path in ("/", f"/gangs/{shown.gang}", f"/jobs/{shown.job}", "/usage"):
        tab.page.goto(at + path)
        tab.page.wait_for_function("window.htmx !== undefined")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path
    assert tab.problems == []
    assert {url for url in tab.asked if not url.startswith((at, "data:"))} == set()


def test_what_others_wrote_is_shown_as_text(serve: Serve, shown: Shown, tab: Tab) -> None:
    at = serve()
    tab.page.goto(f"{at}/jobs/{shown.job}")
    expect(tab.page.locator("pre").first).to_contain_text("<script>alert(1)</script>")
    tab.page.goto(f"{at}/gangs/{shown.gang}")
    expect(tab.page.locator("h1")).to_contain_text(HOSTILE)
    assert tab.problems == []


def test_a_change_is_seen_without_a_reload(serve: Serve, shown: Shown, tab: Tab, client: Client) -> None:
    tab.page.goto(serve())
    tab.page.evaluate("window.loadedOnce = true")
    expect(tab.page.locator("a.gpu.held")).to_have_count(2)
    single = client.submit(task="seen-live", payloads=[{}], gpus=1)[0]
    client.tick(force=True)
    expect(tab.page.locator(".host .gpu.reserved")).to_be_visible(timeout=3_000)
    # Nobody is told of a claim: it is seen within 5 s all the same.
    client.claim(incarnation=shown.incarnation, max_jobs=1)
    expect(tab.page.locator(f'a.gpu.held[href="/jobs/{single}"]')).to_be_visible(timeout=10_000)
    assert tab.page.evaluate("window.loadedOnce")
    assert tab.problems == []


def test_a_page_is_live_however_slowly_its_scripts_come(serve: Serve, shown: Shown, tab: Tab) -> None:
    def late(route: Route) -> None:
        time.sleep(0.5)
        route.continue_()

    at = serve()
    tab.page.route("**/hx-sse.min.js", late)
    with tab.page.expect_request(f"{at}/live", timeout=5_000):
        tab.page.goto(at)


def test_behind_a_base_path_links_styles_and_live_changes_work(
    serve: Serve, shown: Shown, tab: Tab, client: Client
) -> None:
    at = serve(base_path="/q")
    tab.page.goto(f"{at}/q/")
    tab.page.locator(f'td a[href="/q/gangs/{shown.gang}"]').click()
    expect(tab.page.locator("svg.timeline")).to_be_visible()
    client.cancel(gang_ids=[shown.gang], reason="seen live")
    expect(tab.page.get_by_role("cell", name="seen live").first).to_be_visible()
    assert tab.problems == []
