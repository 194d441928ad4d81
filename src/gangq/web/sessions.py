"""Sessions of people who gave a PostgreSQL login. They are held in memory: a restart of the server ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gangq.client import AsyncClient
from gangq.errors import GangqError
from gangq.web.viewer import Viewer

log = logging.getLogger("gangq.web.sessions")

IDLE_S = 30 * 60.0
MOST_S = 12 * 3600.0
_SESSIONS = 200
_ATTEMPTS = 10
_ATTEMPTS_ALL = 60
_PER_S = 60.0


class Refused(Exception):
    """A login that is not let in, or a form that is not read: the message is shown to whoever sent it."""

    def __init__(self, said: str, status: int = 403) -> None:
        super().__init__(said)
        self.status = status


@dataclass(eq=False)
class Session(Viewer):
    """A viewer who gave a password, which is kept where the pool needs it to connect again, and nowhere else."""

    began: float = 0.0
    seen: float = 0.0


class Attempts:
    """Attempts to log in: at most 10 a minute for one login or from one address, and 60 in all."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of: dict[tuple[str, str], deque[float]] = {}

    def admit(self, login: str, address: str) -> bool:
        """Count an attempt before its password is tried, so that many at once are no way around the limit."""
        now = self._now()
        for key in [key for key, times in self._of.items() if times[-1] <= now - _PER_S]:
            del self._of[key]
        limits = {("", ""): _ATTEMPTS_ALL, ("login", login): _ATTEMPTS, ("from", address): _ATTEMPTS}
        recent = {key: self._of.get(key, deque()) for key in limits}
        for times in recent.values():
            while times and times[0] <= now - _PER_S:
                times.popleft()
        if any(len(recent[key]) >= most for key, most in limits.items()):
            return False
        for key, times in recent.items():
            times.append(now)
            self._of[key] = times
        return True


class Sessions:
    """Those who are logged in, each under a random name that only their cookie has."""

    def __init__(
        self,
        dsn: str | None,
        *,
        idle_s: float = IDLE_S,
        most_s: float = MOST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dsn = dsn
        self._idle_s = idle_s
        self._most_s = most_s
        self._now = now
        self._attempts = Attempts(now)
        self._sessions: dict[str, Session] = {}
        self._expiry: set[asyncio.Task[None]] = set()

    def find(self, name: str, *, used: bool) -> Session | None:
        """The session of this name, unless it has expired. `used`: by a person, so that it stays."""
        session = self._sessions.get(name)
        if session is None or self._left(session) <= 0:
            return None
        if used:
            session.seen = self._now()
        return session

    async def open(self, login: str, password: str, address: str) -> str:
        """Log in to PostgreSQL and return the name of the session. Raises `Refused`."""
        if not self._attempts.admit(login, address):
            raise Refused("too many attempts: wait a minute", 429)
        if len(self._sessions) >= _SESSIONS:
            raise Refused("too many people are logged in", 503)
        # libpq takes an empty password for none, and would look for one in its own files.
        if not login or not password or "\0" in login + password:
            raise Refused("a login and its password are needed")
        client = AsyncClient(self._dsn, user=login, password=password, min_size=0, max_size=2)
        session = Session(client, form_token=secrets.token_urlsafe(32), began=self._now(), seen=self._now())
        try:
            async with await client.connect_listener() as conn:
                proven = conn.pgconn.used_password
            if not proven:
                log.warning("login_without_password", extra={"login": login})
                raise Refused("PostgreSQL asked for no password, so nobody can prove who they are")
            await session.learn_rights()
        except GangqError as problem:
            await session.close()
            log.warning(
                "login_refused", extra={"login": login, "address": address, "error": type(problem).__name__}
            )
            raise Refused("PostgreSQL refuses this login and password, or is not reached") from None
        except BaseException:
            await session.close()
            raise
        name = secrets.token_urlsafe(32)
        self._sessions[name] = session
        task = asyncio.create_task(self._expire(name, session), name="gangq-web-session")
        self._expiry.add(task)
        log.info("login", extra={"login": session.login, "address": address})
        task.add_done_callback(self._expiry.discard)
        return name

    async def end(self, name: str) -> None:
        """Log out: its connections are closed, and the password is forgotten with them."""
        session = self._sessions.pop(name, None)
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """End all sessions."""
        for task in list(self._expiry):
            task.cancel()
        for name in list(self._sessions):
            await self.end(name)

    def _left(self, session: Session) -> float:
        return min(session.seen + self._idle_s, session.began + self._most_s) - self._now()

    async def _expire(self, name: str, session: Session) -> None:
        while name in self._sessions and (left := self._left(session)) > 0:
            await asyncio.sleep(min(left, 60.0))
        with contextlib.suppress(GangqError):
            await self.end(name)
