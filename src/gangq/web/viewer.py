"""Whoever looks at the page: the connections that their requests use, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from gangq.client import AsyncClient
from gangq.web.live import Live
from gangq.web.queries import Read, Row, reading

_MAY = """
  select session_user::text as login, gangq.is_admin() as admin, array(
    select v.verb
    from (values ('cancel', 'gangq.cancel'), ('retry', 'gangq.retry'), ('pause queues', 'gangq.set_queue'),
      ('pause tasks', 'gangq.pause_task'), ('cordon', 'gangq.cordon'), ('schedule', 'gangq.pause_schedule'),
      ('service', 'gangq.stop_service')) as v(verb, f)
    where has_function_privilege(v.f::regproc, 'execute')) as verbs"""
_OWNS = """
  select %(login)s::text = session_user or %(queue)s = any ((select gangq.shared_queues())::text[]) as owns"""


@dataclass(eq=False)
class Viewer:
    """The login whose rights the requests have."""

    client: AsyncClient
    live: Live = field(init=False)
    login: str = ""
    admin: bool = False
    verbs: frozenset[str] = frozenset()
    """The actions that the page offers: none in a page that is read-only."""
    form_token: str = ""
    """In each form of a session, so that a page elsewhere cannot send one."""

    def __post_init__(self) -> None:
        self.live = Live(self.client)

    async def learn_rights(self) -> None:
        """Read which of the verbs the login may call. Raises `NotAllowed` where it may not use gangq at all."""
        async with reading(self.client) as read:
            (found,) = await read(_MAY)
        self.login, self.admin, self.verbs = found["login"], found["admin"], frozenset(found["verbs"])

    async def owns(self, read: Read, row: Row) -> bool:
        """Whether it may cancel and retry this row of `gangs` or `jobs`; the database has the last word."""
        if self.admin or "cancel" not in self.verbs:
            return self.admin
        (found,) = await read(_OWNS, login=row["login"], queue=row["queue"])
        return bool(found["owns"])

    async def close(self) -> None:
        """Close all connections."""
        await self.live.close()
        await self.client.close()


def viewer_of(request: Request) -> Viewer:
    """The viewer that the gate in front of the routes has found; without one no page has a connection to read by."""
    viewer: Any = request.scope["gangq.viewer"]
    assert isinstance(viewer, Viewer)
    return viewer
