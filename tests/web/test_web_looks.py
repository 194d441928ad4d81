"""How pages look, of an empty, a busy and a broken fleet: in light and dark, on a wide screen and on a phone."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from pathlib import Path

import httpx
import pytest
from browsing import UNREADABLE, UNSEEN, Serve, Tab
from fleets import FLEETS

import gangq.web
from sql.drive import Q

pytestmark = pytest.mark.slow

MANUAL = Path(__file__).parents[2] / "docs" / "manual"
STYLE = Path(gangq.web.__file__).parent / "static" / "style.css"
SCREENS = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "tablet": ("light", 800),
    "phone": ("light", 360),
    "dark phone": ("dark", 360),
}
IN_THE_MANUAL = {
    ("busy", "fleet", "light"): "web.png",
    ("busy", "fleet", "dark"): "web-dark.png",
    ("busy", "fleet", "phone"): "web-phone.png",
    ("broken", "life", "light"): "web-gang.png",
}
"""The pictures of the manual: of which fleet, page and screen each is."""
SIDEWAYS = """() => [...document.querySelectorAll("body *")].filter(
    e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !e.closest(".wide")
      && /auto|scroll/.test(getComputedStyle(e).overflowX)).map(e => e.outerHTML.slice(0, 100))"""
"""What is to be scrolled sideways to be read, but for the picture of a timeline."""
_MADE_OF = b"Made of"


@pytest.mark.parametrize("name", FLEETS)
def test_every_page_of_a_fleet_is_readable_on_every_screen_and_is_as_the_manual_shows_it(
    serve: Serve, q: Q, tab: Tab, name: str
) -> None:
    """GANGQ_WRITE_PICTURES=1 makes the pictures of the manual anew."""
    paths, at = FLEETS[name](q), serve()
    for page, path in paths.items():
        tab.page.set_viewport_size({"width": 1280, "height": 800})
        tab.page.goto(at + path)
        tab.page.wait_for_function("window.htmx !== undefined")
        for screen, (scheme, width) in SCREENS.items():
            tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            tab.page.set_viewport_size({"width": width, "height": 800})
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, (path, screen)
            if width < 1280:
                assert tab.page.evaluate(SIDEWAYS) == [], (path, screen)
            assert tab.page.evaluate(UNREADABLE) == [], (path, screen)
            if width == 1280:
                assert tab.page.evaluate(UNSEEN) == [], (path, screen)
            if picture := IN_THE_MANUAL.get((name, page, screen)):
                made_of = digest(at + path)
                if os.environ.get("GANGQ_WRITE_PICTURES") == "1":
                    tab.page.evaluate("scrollTo(0, 0)")  # Where the focus was looked for last.
                    (MANUAL / picture).write_bytes(signed(tab.page.screenshot(), made_of))
                assert made_of in (MANUAL / picture).read_bytes(), f"{picture} is not of this page any more"
    assert tab.problems == []
    assert {url for url in tab.asked if not url.startswith((at, "data:"))} == set()


def digest(url: str) -> bytes:
    """Of what a picture is made of: fonts differ from one machine to the next, page and style do not."""
    page = httpx.get(url).text
    return hashlib.sha256((page + STYLE.read_text()).encode()).hexdigest().encode()


def signed(picture: bytes, made_of: bytes) -> bytes:
    """A PNG with one more text in it, before its end."""
    text = b"tEXt" + _MADE_OF + b"\0" + made_of
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return picture[:-12] + chunk + picture[-12:]


def test_every_picture_of_the_manual_is_one_that_the_test_makes() -> None:
    shown = set(re.findall(r"\((web[\w-]*\.png)\)", (MANUAL / "web.md").read_text()))
    assert shown == set(IN_THE_MANUAL.values()) == {path.name for path in MANUAL.glob("web*.png")}
