"""Replicas of services: which of this worker's jobs take requests, and how busy they are.

A handler or a command says so (`Context.ready`, `gangq ready`), or its worker polls the health URL of the service. A
task of the control loop tells the database, again and again until it is answered: nobody waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gangq.context import ServiceInfo
from gangq.errors import GangqError, StaleToken
from gangq.watchdogs import signs
from gangq.worker.repeating import ANSWERS

if TYPE_CHECKING:
    from gangq.worker.jobs import ActiveJob
    from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.replicas")

_PACE_S = 0.1
"""The least time between two looks: a handler may say how busy it is a million times a second."""
_POLL_S = 1.0
"""From one poll of a health URL to the next, and the least time between two reports of a load."""
_SAME_LOAD_S = 15.0
"""... that is the same as before. The database takes a load that is older than 60 s as unknown."""
_ANSWER_S = 3.0
_FAILURES = 3
"""So many polls in a row that fail make a replica that was ready one that is not."""

Said = tuple[bool, int | None]
"""Whether a replica is ready, and the port it listens at; None: at none."""


class Replica:
    """What one replica has said, and what of it has been reported. The handler's threads write the first two."""

    def __init__(self, service: ServiceInfo, changed: Callable[[], None]) -> None:
        """`changed` is called, from any thread, when there is something to report."""
        self.service = service
        self.said: Said | None = None
        """None: it has said nothing yet."""
        self.load = 0.0
        self.load_said = False
        """The load was said, perhaps again, since it was last reported."""
        self.reported: Said | None = None
        self.reported_load: float | None = None
        self.load_at = 0.0
        self.polled = False
        """A task polls its health URL."""
        self.failures = 0
        self._changed = changed

    def ready(self, ready: bool, port: int | None) -> None:
        """It is ready or not, at this port [its own]; 0: at none."""
        self.said = (ready, self.service.port if port is None else port or None)
        self._changed()

    def busy(self, load: float) -> None:
        """The handler has said its load."""
        # In this order: `_report` clears `load_said` before it reads `load`, so it misses none.
        self.load = float(load)
        self.load_said = True
        self._changed()


class ReplicaWatch:
    """Polls and reports the replicas of a session. A task of the control loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._some = asyncio.Event()

    def changed(self) -> None:
        """A replica has begun, or has said something. From any thread."""
        self._session.control.soon(self._some.set)

    async def run(self) -> None:
        """Poll, and report what is said, until cancelled."""
        # Each replica is polled by a task of its own: a server that hangs delays no other replica.
        async with asyncio.TaskGroup() as polls:
            while True:
                signs.alive()
                self._some.clear()
                found = [
                    (job, job.replica)
                    for job in self._session.table.snapshot()
                    if job.replica is not None and not _over(job)
                ]
                for job, replica in found:
                    if replica.service.health is not None and not replica.polled:
                        replica.polled = True
                        polls.create_task(self._poll(job, replica))
                await asyncio.gather(*(self._look(job, replica) for job, replica in found))
                await asyncio.sleep(_PACE_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._some.wait(), _POLL_S if found else None)

    async def _look(self, job: ActiveJob, replica: Replica) -> None:
        said = replica.said  # What is said during the call is for the next one.
        try:
            await self._report(job, replica, said, asyncio.get_running_loop().time())
        except StaleToken:
            pass  # It was told to stop, or lost: its next heartbeat says so.
        except ANSWERS as problem:
            log.error("replica_refused", extra={**job.extra, "error": str(problem)})
            replica.reported = said
        except GangqError as problem:
            log.warning("replica_not_reported", extra={**job.extra, "error": str(problem)})
        except Exception:
            # It must not end the task, which reports all other replicas of this worker too.
            log.exception("replica_fault", extra=job.extra)

    async def _poll(self, job: ActiveJob, replica: Replica) -> None:
        """Poll its health URL until it ends. Raises nothing."""
        loop = asyncio.get_running_loop()
        while not _over(job):
            begun = loop.time()
            await self._poll_once(job, replica)
            await asyncio.sleep(begun + _POLL_S - loop.time())

    async def _poll_once(self, job: ActiveJob, replica: Replica) -> None:
        extra = {**job.extra, "service": replica.service.name}
        try:
            port = await healthy_port(replica.service)
            problem = None
        except Exception as failure:
            port, problem = None, str(failure) or type(failure).__name__
        # Read after the poll, during which the replica itself may have said something.
        was_ready = replica.said is not None and replica.said[0]
        if problem is None:
            replica.failures = 0
            if not was_ready:
                log.info("replica_ready", extra=extra)
            replica.ready(True, port)
            return
        replica.failures += 1
        extra["error"] = problem
        if was_ready and replica.failures >= _FAILURES:
            log.warning("replica_not_ready", extra=extra)
            replica.ready(False, None)
        elif replica.failures == _FAILURES:
            log.info("replica_not_ready_yet", extra=extra)

    async def _report(self, job: ActiveJob, replica: Replica, said: Said | None, now: float) -> None:
        client = self._session.control.client
        if said is not None and said != replica.reported:
            await client.report_ready(job_id=job.id, token=job.token, ready=said[0], port=said[1])
            replica.reported = said
        pace_s = _SAME_LOAD_S if replica.load == replica.reported_load else _POLL_S
        if replica.load_said and now - replica.load_at >= pace_s:
            replica.load_said = False
            load = replica.load
            try:
                await client.report_load(job_id=job.id, token=job.token, load=load)
            except GangqError as problem:
                if not isinstance(problem, ANSWERS):
                    replica.load_said = True
                raise
            replica.reported_load, replica.load_at = load, now


def _over(job: ActiveJob) -> bool:
    """Whether there is nothing to report of it any more: it must end, or has ended."""
    return job.must_end or job.reporting


async def healthy_port(service: ServiceInfo) -> int:
    """The port of the health URL of a service, which answers. Raises OSError (TimeoutError among them), or ValueError
    for another status, what is no answer of HTTP, and what is no URL.
    """
    host, port, path = target_of(service)
    async with asyncio.timeout(_ANSWER_S):
        status = await get_status(host, port, path)
    if not 200 <= status < 400:
        raise ValueError(f"status {status}")
    return port


def target_of(service: ServiceInfo) -> tuple[str, int, str]:
    """Host, port and path of the health URL of a service, which has one. Raises ValueError for what is no URL."""
    health = service.health or "/"
    if health.startswith("/"):
        return "127.0.0.1", service.port, health
    parts = urlsplit(health)
    path = parts.path or "/"
    return parts.hostname or "127.0.0.1", parts.port or 80, f"{path}?{parts.query}" if parts.query else path


async def get_status(host: str, port: int, path: str) -> int:
    """The status of a GET over HTTP. Raises OSError, or ValueError for what is no answer of HTTP."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        name = f"[{host}]" if ":" in host else host  # An IPv6 address is in brackets there.
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        line = await reader.readline()
        words = line.split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/"):
            raise ValueError(f"no answer of HTTP: {line[:100]!r}")
        return int(words[1])
    finally:
        writer.close()
