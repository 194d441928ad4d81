"""What tests of the page share: names, a server in a thread, a page of the browser."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from playwright.sync_api import Page

from gangq.web import asgi

HOSTILE = "<script>alert(1)</script>\"'"
LONG = "a-name-without-a-place-to-break".replace("-", "_") * 6
Serve = Callable[..., str]
_CONTRAST = """
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    const color = getComputedStyle(e).backgroundColor;
    return /, 0\\)$/.test(color) ? behind(e.parentElement) : light(color);
  };
  const contrast = (color, e) => {
    const [ink, paper] = [light(color), behind(e)];
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  };
"""
UNREADABLE = (
    f"""() => {{{_CONTRAST}"""
    + """
  const wrong = [];
  const check = (holds, what) => { if (!holds) wrong.push(what); };
  const named = e => e.textContent.trim() || e.ariaLabel || e.labels?.length;
  check(document.documentElement.lang && document.title, "no language or title");
  check(document.querySelectorAll("h1").length === 1, "not one h1");
  let level = 0;
  for (const h of document.querySelectorAll("h1, h2, h3")) {
    check(h.tagName[1] - level <= 1, "a heading skips a level: " + h.textContent);
    level = +h.tagName[1];
  }
  const told = "a[href], button, input:not([type=hidden]), progress, [tabindex], [role=img]";
  for (const e of document.querySelectorAll(told))
    check(named(e), "no name: " + e.outerHTML);
  for (const e of document.querySelectorAll("i.gpu, i.bar")) check(e.ariaHidden || e.role === "img", e.outerHTML);
  for (const e of document.querySelectorAll("th")) check(e.textContent.trim(), "an empty heading of a column");
  check(document.querySelectorAll("main").length === 1 && document.querySelector("nav[aria-label]"), "no landmarks");
  for (const e of document.body.children)
    check(e.matches("main, nav, .skip, #live, script"), "outside of the landmarks: " + e.outerHTML.slice(0, 100));
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    if (e.closest("title, script")) continue;
    const style = getComputedStyle(e), found = contrast(e.closest("svg") ? style.fill : style.color, e);
    check(found >= 4.5, found.toFixed(1) + ": " + e.outerHTML.slice(0, 100));
  }
  for (const e of document.querySelectorAll(".gpu, input:not([type=hidden]), button"))
    check(contrast(getComputedStyle(e).borderColor, e.parentElement) >= 3, "its edge: " + e.outerHTML.slice(0, 100));
  return wrong;
}"""
)
"""What a person who does not see the page, or not well, would stumble over."""
UNSEEN = (
    f"""() => {{{_CONTRAST}"""
    + """
  const wrong = [];
  const all = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), [tabindex]")];
  // Of many that are alike the first ones.
  for (const e of all.slice(0, 40)) {
    e.focus({focusVisible: true});
    const style = getComputedStyle(e);
    if (document.activeElement !== e || style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 2
        || contrast(style.outlineColor, document.body) < 3)
      wrong.push(e.outerHTML.slice(0, 100));
  }
  document.activeElement.blur();
  return wrong;
}"""
)
"""What does not show that it has the focus."""


@dataclass(frozen=True)
class Shown:
    """A gang of two that runs on the worker w1 of the host alpha, and a job with hostile texts that waits."""

    gang: int
    job: int
    incarnation: int


def fetch(dsn: str, *paths: str, host: str = "127.0.0.1", **options: Any) -> list[httpx.Response]:
    """What the page of this database answers, without a server."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=asgi(dsn, **options))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as web:
            return [await web.get(path) for path in paths]

    return asyncio.run(ask())


def cells(page: str) -> str:
    """A page whose cells are plain: without the headings that they repeat, and the mark of numbers."""
    return re.sub('<td class="number"', "<td", re.sub(' data-label="[^"]*"', "", page))


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a server of this app, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="web")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@dataclass
class Tab:
    """A page of the browser, with what went wrong in it and what it asked for."""

    page: Page
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
