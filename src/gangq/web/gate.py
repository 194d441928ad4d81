"""In front of every route: which hosts are answered, who asks, and what each answer's headers forbid the browser."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gangq.web.sessions import Refused, Sessions
from gangq.web.viewer import Viewer

SESSION_COOKIE = "gangq_session"
FORM_COOKIE = "gangq_form"
_SECURITY = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    # Without a referrer of its own a form would be sent with "Origin: null".
    b"referrer-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_LARGEST_FORM = 16_384
_MOST_FIELDS = 10


class Gate:
    """The page as an ASGI app. Checks the Host header (a page elsewhere could otherwise reach this one by a name of
    its own), finds the viewer, and adds the headers that every answer has.
    """

    def __init__(
        self,
        inner: ASGIApp,
        base_path: str,
        hosts: Sequence[str],
        close: Callable[[], Awaitable[None]],
        *,
        sessions: Sessions | None,
        viewer: Viewer | None,
    ) -> None:
        self._inner = inner
        self._base_path = base_path
        self._hosts = {*_HOSTS, *map(str.lower, hosts)}
        self._sessions = sessions
        self._viewer = viewer
        self.close = close
        """End all sessions and close all connections."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI app."""
        if scope["type"] == "lifespan":
            await self._live_and_close(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live_and_close(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SECURITY.items()]
            await send(message)

        base = scope.get("root_path", "") + self._base_path
        scope = {**scope, "root_path": base, "gangq.base": base}
        request = Request(scope, receive)
        if _name(request.headers.get("host", "")) not in self._hosts:
            await PlainTextResponse("unknown host\n", 400)(scope, receive, with_headers)
            return
        scope["gangq.hosts"] = self._hosts
        scope["gangq.viewer"] = viewer = self._find(request)
        answer = self._inner if viewer is not None or _is_open(request) else _to_login(request)
        await answer(scope, receive, with_headers)

    def _find(self, request: Request) -> Viewer | None:
        if self._sessions is None:
            return self._viewer
        # What the open page asks for by itself does not keep a session: nobody may be sitting there.
        used = request.headers.get("hx-request") != "true" and _path(request) != "/live"
        return self._sessions.find(request.cookies.get(SESSION_COOKIE, ""), used=used)


def _name(host: str) -> str:
    host = host.lower()
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _path(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix(request.scope["root_path"])


def _is_open(request: Request) -> bool:
    return _path(request) in ("/login", "/metrics") or _path(request).startswith("/static/")


def _to_login(request: Request) -> Response:
    login: str = request.scope["root_path"] + "/login"
    if request.headers.get("hx-request") == "true" or _path(request) == "/live":
        return PlainTextResponse("log in first\n", 401, {"hx-redirect": login})
    # A form that comes too late is not sent again: who pressed its button is told so.
    return RedirectResponse(login if request.method in ("GET", "HEAD") else f"{login}?ended", 303)


def cookie_path(request: Request) -> str:
    """Where the browser sends the cookies."""
    path: str = request.scope["root_path"]
    return f"{path}/"


def set_cookie(request: Request, answer: Response, name: str, value: str) -> None:
    """Set a cookie that scripts cannot read, and that the browser leaves out of requests which another site begins.
    Behind https it is sent over https only.
    """
    secure = request.url.scheme == "https"
    answer.set_cookie(name, value, path=cookie_path(request), httponly=True, samesite="strict", secure=secure)


async def read_form(request: Request, token: str) -> dict[str, str]:
    """Read a form that this page made for this browser: it holds `token`. Raises `Refused`.

    A browser says where a form was, if it says anything: this is checked, too.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    if site != "same-origin" or (
        origin is not None and _name(urlsplit(origin).netloc) not in request.scope["gangq.hosts"]
    ):
        raise Refused("this form was sent from elsewhere")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_FORM:
            raise Refused("this form is too large", 413)
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise Refused("this form has too many fields", 413) from None
    form = {name: values[-1] for name, values in fields.items()}
    if not token or not hmac.compare_digest(form.get("token", "").encode(), token.encode()):
        raise Refused("this form is of another session: go back, load the page again and repeat it")
    return form
