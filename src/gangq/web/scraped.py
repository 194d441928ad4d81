"""`/metrics` of the page: what `gangq metrics` serves, with the rights of the DSN's login."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gangq.client import Client

log = logging.getLogger("gangq.web.metrics")

_CONNECT_S = 2.0
_ANSWER_S = 5.0
WITH_LOGIN = PlainTextResponse("no metrics with --login: gangq metrics serves them\n", 404)
"""A scraper has no session, and the page with --login has no rights of its own."""
_NOT_INSTALLED = PlainTextResponse("metrics need prometheus_client: pip install 'gangq[metrics]'\n", 404)


class Scraped:
    """An ASGI app over one connection of its own, which the first scrape opens."""

    def __init__(self, dsn: str | None) -> None:
        self._client = Client(dsn, max_size=1, connect_s=_CONNECT_S, timeout_s=_ANSWER_S)
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._app is None:
            self._app = self._made()
        await self._app(scope, receive, send)

    def _made(self) -> ASGIApp:
        try:
            import prometheus_client  # noqa: F401 - asked at the first scrape, because it takes 30 ms to load
        except ModuleNotFoundError:
            return _NOT_INSTALLED
        from gangq.metrics import Collector, MetricsApp

        def failed(problem: object) -> None:
            log.warning("scrape_failed", extra={"error": str(problem)})

        return cast(ASGIApp, MetricsApp(Collector(self._client.metrics, failed=failed)))

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.to_thread(self._client.close)
