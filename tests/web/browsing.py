"""What tests of the page share: names, a server in a thread, a page of the browser."""

from __future__ import annotations

import asyncio
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
Serve = Callable[..., str]


@dataclass(frozen=True)
class Shown:
    """A gang of two that runs on the worker w1 of the host alpha, and a job with hostile texts that waits."""

    gang: int
    job: int
    incarnation: int


def fetch(dsn: str, *paths: str, host: str = "127.0.0.1", **options: str) -> list[httpx.Response]:
    """What the page of this database answers, without a server."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=asgi(dsn, **options))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as web:
            return [await web.get(path) for path in paths]

    return asyncio.run(ask())


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
