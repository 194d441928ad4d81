"""Routes and templates. Every page is read in a transaction that cannot write."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gangq.cli.output import seconds
from gangq.client import AsyncClient, Client
from gangq.colours import colour_of
from gangq.errors import Busy, GangqError, InvalidInput, NotAllowed, NotFound, WrongState
from gangq.metrics import Collector, registry_of
from gangq.web.actions import ACTIONS, Action, Target, find_target, number, read_said
from gangq.web.gate import (
    FORM_COOKIE,
    SESSION_COOKIE,
    Gate,
    cookie_path,
    read_form,
    set_cookie,
)
from gangq.web.queries import ONE, PAGES, PREFIXES, Page, Row, reading
from gangq.web.sessions import IDLE_S, MOST_S, Refused, Sessions
from gangq.web.timeline import Life, day_and_time, displacer
from gangq.web.viewer import Viewer, viewer_of
from gangq.web.waits import OWNERS, waits

log = logging.getLogger("gangq.web")

_HERE = Path(__file__).parent
_MEMBERS = (1, 2, 4, 8)
_HEADING = re.compile('<th( class="number")?>(.*?)</th>')
_TOKEN = re.compile(r"[\w-]{43}", re.ASCII)
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_NO_METRICS = PlainTextResponse("no metrics with --login: gangq metrics serves them\n", 404)
"""A scraper has no session, and the page with --login has no rights of its own."""
_STATUS = ((NotFound, 404), (NotAllowed, 403), (InvalidInput, 400), (WrongState, 409))


def asgi(
    dsn: str | None = None,
    *,
    login: bool = False,
    base_path: str = "",
    hosts: Sequence[str] = (),
    idle_s: float = IDLE_S,
    most_s: float = MOST_S,
) -> Gate:
    """Return the page as an ASGI app: read-only, with the rights of the DSN's login.

    `login`: ask for a PostgreSQL login, and act with its rights on the DSN's database; a session ends when it is not
    used for `idle_s`, and after `most_s`. `base_path`: the path that a proxy has in front of it, e.g. "/gangq".
    `hosts`: names that the Host header may have beside 127.0.0.1, localhost and [::1].

    An app that it is mounted in closes its connections by `await app.close()`; a server of its own does so itself.
    Raises `InvalidInput` for a base path that does not begin with a slash.
    """
    if base_path and not base_path.startswith("/"):
        # Links would be relative to each page.
        raise InvalidInput(f"the base path {base_path!r} does not begin with a slash: write /{base_path}")
    sessions = Sessions(dsn, idle_s=idle_s, most_s=most_s) if login else None
    viewer = None if login else Viewer(AsyncClient(dsn, max_size=4))
    closing = AsyncExitStack()
    for part in (sessions, viewer):
        if part is not None:
            closing.push_async_callback(part.close)
    web = _Web(sessions)
    routes: list[BaseRoute] = [
        *map(web.follow, PAGES),
        Route("/live", web.live),
        Route("/metrics", _NO_METRICS if login else _metrics(dsn, closing)),
        Mount("/static", StaticFiles(directory=_HERE / "static")),
    ]
    if login:
        routes += [
            Route("/login", web.ask_login, methods=["GET"]),
            Route("/login", web.log_in, methods=["POST"]),
            Route("/logout", web.log_out, methods=["POST"]),
            Route("/do/{action}", web.ask_action, methods=["GET"]),
            Route("/do/{action}", web.act, methods=["POST"]),
        ]
    failures = (GangqError, Refused, HTTPException)
    inner = Starlette(routes=routes, exception_handlers=dict.fromkeys(failures, web.failed))
    # Such a redirect would not know the base path of a proxy that strips it.
    inner.router.redirect_slashes = False
    return Gate(inner, base_path.rstrip("/"), hosts, closing.aclose, sessions=sessions, viewer=viewer)


def _metrics(dsn: str | None, closing: AsyncExitStack) -> Callable[[Request], Response]:
    """What `gangq metrics` serves, over one connection of its own, which the first scrape opens."""

    def failed(problem: object) -> None:
        log.warning("scrape_failed", extra={"error": str(problem)})

    client = Client(dsn, max_size=1, connect_s=_CONNECT_S, timeout_s=_ANSWER_S)
    closing.push_async_callback(asyncio.to_thread, client.close)
    collector = Collector(client.metrics, failed=failed)

    # Not async: Starlette calls it in a thread, because the database may take its time.
    def scrape(request: Request) -> Response:
        try:
            collected = registry_of(collector)
        except GangqError as missing:
            return PlainTextResponse(f"{missing}\n", 404)
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(collected), media_type=content_type)

    return scrape


def _coloured(state: str) -> Markup:
    return Markup('<span class="state {}">{}</span>').format(colour_of(state) or "", state)


class _Web:
    def __init__(self, sessions: Sessions | None) -> None:
        self._sessions = sessions
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined
        )
        self._templates.filters["displacer"] = displacer
        self._templates.filters["gpus"] = _gpus
        self._templates.filters["at"] = lambda at: "" if at is None else day_and_time(at)
        self._templates.filters["span"] = lambda span: seconds(span.total_seconds())
        self._templates.filters["state"] = _coloured
        self._templates.filters["json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)

    def _page(
        self, request: Request, name: str, status: int = 200, *, live: bool = False, **values: Any
    ) -> Response:
        base = request.scope["gangq.base"]
        here = base + request.url.path.removeprefix(base)
        partial = request.headers.get("hx-request") == "true"
        viewer: Viewer | None = request.scope["gangq.viewer"]
        text = self._templates.get_template(name).render(
            base=base, here=here, partial=partial, viewer=viewer, live=live, **values
        )
        return HTMLResponse(labelled(text), status)

    async def failed(self, request: Request, problem: Exception) -> Response:
        said = str(problem)
        if isinstance(problem, Refused):
            status = problem.status
        elif isinstance(problem, HTTPException):
            # No route has this path, or not with this method.
            status, said = problem.status_code, f"{problem.detail}: {request.url.path[:100]}"
        else:
            status = next((status for kind, status in _STATUS if isinstance(problem, kind)), 503)
        if status == 503:
            log.warning("page_failed", extra={"path": request.url.path, "error": said})
            if not isinstance(problem, Busy):
                # The error names the server and the login of the DSN.
                said = "the database did not answer as it should: the log of gangq web says why"
        # Nothing is wrong with what was asked for: once the database answers, the open page shows it.
        live = status == 503 and request.method == "GET"
        return self._page(request, "problem.html", status, live=live, said=said)

    def follow(self, page: Page) -> Route:
        """The route of a page."""

        async def show(request: Request) -> Response:
            viewer = viewer_of(request)
            values: dict[str, Any] = {}
            key = {name: number(text) for name, text in request.path_params.items()}
            async with reading(viewer.client) as read:
                for name, query in page.queries.items():
                    values[name] = rows = await read(query, **key)
                    if name in ONE:
                        if not rows:
                            called = f"{name} {PREFIXES[name]}{key['id']}"
                            raise NotFound(f"{called} does not exist, or is older than its retention")
                        values |= {name: rows[0], "owns": await viewer.owns(read, rows[0])}
            if page.name == "fleet":
                values |= _by_host(values.pop("devices"))
            elif page.name == "gang":
                values |= _life(values, request.scope["gangq.base"])
            return self._page(request, f"{page.name}.html", live=True, **values)

        return Route(page.path, show)

    async def live(self, request: Request) -> Response:
        viewer = viewer_of(request)

        async def told() -> AsyncIterator[str]:
            yield ": open\n\n"
            async for changed in viewer.live.changes():
                yield "event: changed\ndata: 1\n\n" if changed else ": nothing\n\n"

        # nginx buffers an answer by default, and events would come late.
        return StreamingResponse(told(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    # With --login

    async def ask_login(self, request: Request) -> Response:
        said = "Your session has ended, and nothing was done" if "ended" in request.query_params else ""
        return self._login_page(request, 200, said)

    def _login_page(self, request: Request, status: int, said: str) -> Response:
        # One token for all tabs: when a session ends, each of them asks for a login.
        token = request.cookies.get(FORM_COOKIE, "")
        if not _TOKEN.fullmatch(token):
            token = secrets.token_urlsafe(32)
        page = self._page(request, "login.html", status, said=said, token=token)
        set_cookie(request, page, FORM_COOKIE, token)
        return page

    async def log_in(self, request: Request) -> Response:
        assert self._sessions is not None
        form = await read_form(request, request.cookies.get(FORM_COOKIE, ""))
        address = request.client.host if request.client else ""
        try:
            name = await self._sessions.open(form.get("login", ""), form.get("password", ""), address)
        except Refused as refused:
            return self._login_page(request, refused.status, str(refused))
        await self._sessions.end(request.cookies.get(SESSION_COOKIE, ""))
        answer = RedirectResponse(request.scope["gangq.base"] + "/", 303)
        set_cookie(request, answer, SESSION_COOKIE, name)
        return answer

    async def log_out(self, request: Request) -> Response:
        assert self._sessions is not None
        await read_form(request, viewer_of(request).form_token)
        await self._sessions.end(request.cookies.get(SESSION_COOKIE, ""))
        answer = RedirectResponse(request.scope["gangq.base"] + "/login", 303)
        answer.delete_cookie(SESSION_COOKIE, path=cookie_path(request))
        return answer

    async def ask_action(self, request: Request) -> Response:
        action, target = await self._asked(request, request.query_params.get("what", ""))
        return self._page(request, "confirm.html", action=action, target=target, form={}, said="")

    async def act(self, request: Request) -> Response:
        viewer = viewer_of(request)
        form = await read_form(request, viewer.form_token)
        action, target = await self._asked(request, form.get("what", ""))
        try:
            await action.call(viewer.client, target.key, await read_said(viewer, form))
        except InvalidInput as wrong:
            return self._page(
                request, "confirm.html", 400, action=action, target=target, form=form, said=str(wrong)
            )
        log.info("action", extra={"action": action.name, "target": target.key, "login": viewer.login})
        return RedirectResponse(request.scope["gangq.base"] + target.path, 303)

    async def _asked(self, request: Request, what: str) -> tuple[Action, Target]:
        viewer = viewer_of(request)
        action = ACTIONS.get(request.path_params["action"])
        if action is None:
            raise NotFound("there is no such action")
        if action.verb not in viewer.verbs:
            raise NotAllowed(f"{viewer.login} may not {action.verb}")
        target = await find_target(viewer, action, what)
        if not target.allowed:
            raise NotAllowed(f"{viewer.login} may not {action.verb} {target.title}")
        return action, target


def labelled(page: str) -> str:
    """Write the heading of its column into each cell: where the screen is narrow, a row is shown as a card. Cells
    below a heading of numbers are marked as numbers. Texts of others are escaped by now, so each `<td` is one of
    the templates.

    Cells and headings are paired by counting: a row has a `<td` for each `<th`. Where an `if` leaves a `<td` out, the
    same condition leaves its heading empty; otherwise the labels of all cells after it are shifted.

    In a template each cell has its own line. The blanks before it are removed: on a card they would show.
    """

    def with_headings(table: re.Match[str]) -> str:
        headings = [f'<td{kind} data-label="{said}"' for kind, said in _HEADING.findall(table[0])]
        cell = itertools.cycle(headings)
        return re.sub(r"\s*<td", lambda _: next(cell), table[0])

    return re.sub("<table>.*?</table>", with_headings, page, flags=re.DOTALL)


def _by_host(devices: Sequence[Row]) -> dict[str, Any]:
    """What the page of the fleet says of its devices."""
    hosts: dict[str, list[Row]] = {}
    for row in devices:
        hosts.setdefault(row["host"], []).append(row)
    counts = Counter(row["state"] for row in devices if row["uuid"] is not None)
    return {"hosts": hosts, "counts": counts, "startable": _startable_members(devices), "sizes": _MEMBERS}


def _life(shown: Mapping[str, Any], base: str) -> dict[str, Any]:
    """What the page of a gang says of its waits, and its picture."""
    gang, steps = shown["gang"], shown["steps"]
    end = gang["finished_at"] or shown["now"][0]["at"]
    if not steps:
        return {"waited": [], "owners": OWNERS, "drawn": ""}
    waited = waits(steps, gang["waited"], end)
    life = Life(
        steps, shown["attempts"], shown["beats"], shown["displaced"], waited, gang["epoch"], end, base=base
    )
    return {"waited": waited, "owners": OWNERS, "drawn": Markup(life.drawn())}


def _gpus(rows: Sequence[Row], base: str) -> Markup:
    """The devices of a host. In a template thousands of them would take most of a page's time."""
    parts: list[str] = []
    for row in rows:
        if not row["uuid"]:
            parts.append(f"<small>no GPU, {row['state']}</small>")
            continue
        reason = f", {row['reason']}" if row["reason"] else ""
        said = escape(f"{row['model']} {row['index']}: {row['state']}{reason}")
        shown = f'title="{said}" aria-label="{said}"'
        if row["job_id"]:
            to = f"gangs/{row['gang_id']}" if row["gang_id"] else f"jobs/{row['job_id']}"
            parts.append(f'<a class="gpu {row["state"]}" href="{escape(base)}/{to}" {shown}></a>')
        else:
            parts.append(f'<i class="gpu {row["state"]}" role="img" {shown}></i>')
    return Markup("".join(parts))


def _startable_members(fleet: Sequence[Row]) -> list[tuple[str, int, list[int]]]:
    """For each kind of GPU: its name, how many are free on workers that take work, and how many members of 1, 2, 4
    and 8 GPUs could start now. A member takes a slot of its worker, too.
    """
    free: dict[str, Counter[tuple[str, int]]] = {}
    for row in fleet:
        if row["uuid"] is not None:
            kind = free.setdefault(f"{row['model'] or 'GPU'} {row['vram_mb'] // 1024} GiB", Counter())
            if row["state"] == "free" and row["free_slots"] is not None:
                kind[row["worker"], row["free_slots"]] += 1
    return [
        (
            kind,
            workers.total(),
            [sum(min(slots, gpus // size) for (_, slots), gpus in workers.items()) for size in _MEMBERS],
        )
        for kind, workers in sorted(free.items())
    ]
