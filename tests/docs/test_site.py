"""The manual as a site: opened as a file, without a server and without a network, its search finds a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from manual_pages import MANUAL, TOP

CHROMIUM = shutil.which("chromium")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_search_of_the_site_finds_a_word_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (make docs installs it)")
    if CHROMIUM is None:
        pytest.skip("there is no chromium (apt-get install chromium)")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from playwright.sync_api import expect, sync_playwright

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    pages, site = tmp_path / "pages", tmp_path / "site"
    pages.mkdir()
    for name in ("index.md", "glossary.md", "iframe-worker.js"):
        shutil.copy(MANUAL / name, pages)
    # As it is, without the pages that are made of the code: their database would take most of the time.
    build(
        load_config(
            str(TOP / "docs/mkdocs.yml"),
            docs_dir=str(pages),
            site_dir=str(site),
            hooks=[],
            nav=["index.md", "glossary.md"],
            strict=False,
        )
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        # What is typed before the search has begun is lost.
        expect(page.locator(".md-search-result__meta")).to_have_text(
            "Type to start searching", timeout=20_000
        )
        page.locator(".md-search__input").press_sequentially("incarnation")
        page.locator(".md-search-result__link", has_text="Glossary").first.click(timeout=20_000)
        assert page.url.split("?")[0] == (site / "glossary.html").as_uri()
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
