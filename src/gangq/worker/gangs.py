"""The members of gangs on this worker: the port on which they meet, the barrier at which they start, new epochs.

1. The rendezvous port is held by rank 0's worker from before the reservation until its code starts. A port that is
   merely *chosen* may be taken by another program before the training binds it. So a worker keeps sockets bound (not
   listening) and offers their numbers with every claim; the database picks one that no other live epoch of this host
   uses. A bound socket that never listened leaves nothing behind when it closes.
2. No member's code begins before every member of this epoch has been claimed.
3. The heartbeat's answer names the epoch of every job. A newer one than the work was told of (another member was
   replaced, or the gang goes on with fewer) is looked up with `barrier`, and handed on once it is whole; until then,
   every heartbeat asks again, and the database's notification brings the next one forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Sequence

from gangq.client.rows import BarrierMember
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.context import GangInfo, Peer, ServiceInfo
from gangq.errors import GangqError, IncarnationEnded, NotFound, StaleToken, WrongState
from gangq.watchdogs import signs
from gangq.worker.jobs import ActiveJob
from gangq.worker.repeating import TRANSIENT
from gangq.worker.replicas import Replica
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.gangs")

_POLL_S = 0.2
_RANGE = range(20000, 32000)
"""Below Linux's ephemeral ports: there, between our close and the handler's bind, any outgoing connection of
the host could be given the very number.
"""
_TRIES = 64


class PortHolder:
    """Keeps a number of ports bound. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._offered: dict[int, socket.socket] = {}
        self._given: dict[int, socket.socket] = {}
        """Those of claimed members."""

    def offer(self) -> Sequence[int]:
        """The ports held and not yet given to a member; binds new ones up to the count."""
        with self._lock:
            while len(self._offered) < self._count:
                self._offered.update([_bind()])
            return sorted(self._offered)

    def give(self, port: int) -> None:
        """This port belongs to a claimed member now: it stays bound and is not offered again."""
        with self._lock:
            if port in self._offered:
                self._given[port] = self._offered.pop(port)

    def take(self) -> int:
        """Bind one that is not offered with claims: for a member that becomes rank 0 while it runs."""
        port, bound = _bind()
        with self._lock:
            self._given[port] = bound
        return port

    def release(self, *ports: int) -> None:
        """Close them: their member starts, or will not. A repeat is harmless, even if a number is offered again."""
        with self._lock:
            released = [self._given.pop(port) for port in ports if port in self._given]
        for bound in released:
            bound.close()

    def renew(self) -> None:
        """Offer others from now on: the database knows these as another worker's of the same host name."""
        with self._lock:
            refused = self._offered
            # While those are bound, so that none of them comes again.
            self._offered = dict(_bind() for _ in refused)
        for bound in refused.values():
            bound.close()

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            held, self._offered, self._given = {**self._offered, **self._given}, {}, {}
        for bound in held.values():
            bound.close()


def _bind() -> tuple[int, socket.socket]:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            bound.bind(("", random.choice(_RANGE)))
            break
    else:
        bound.bind(("", 0))
    return bound.getsockname()[1], bound


def wait_for_go(session: Session, job: ActiveJob, ports: PortHolder) -> GangInfo | None:
    """Wait until the gang may start and return this member's place in it; None when it must not start any more.

    The last claim's transaction opens the barrier and notifies; behind that it is polled every 200 ms. Being
    told to stop, or having lost the claim, ends the wait at once.
    """
    while not job.must_end and not session.ended.is_set():
        job.wake.clear()
        try:
            members = session.thread_client.execute(who_is_who(job, ports))
        except TRANSIENT as problem:
            log.warning("barrier_unknown", extra={**job.extra, "error": str(problem)})
            members = []
        except (StaleToken, WrongState, NotFound):
            # Drained meanwhile, and the heartbeat would say so next. Nothing of it runs: acknowledging is
            # right where the database waits for it, and harmless where the claim is gone for good.
            job.tell_stop("preempt", 0.0)
            return None
        except IncarnationEnded as problem:
            session.end(str(problem))
            return None
        if members and members[0].go and not job.must_end:
            gang, first = gang_info(job, members), members[0]
            if first.service is None:
                job.enter_gang(gang, None)
            else:
                service = ServiceInfo(first.service, first.revision or 0, ports.take(), first.health)
                job.enter_gang(gang, Replica(service, session.on_replica))
                session.on_replica()
            return gang
        job.wake.wait(_POLL_S * random.uniform(0.8, 1.2))
    return None


def who_is_who(job: ActiveJob, ports: PortHolder) -> Steps[list[BarrierMember]]:
    """Ask for the members of the present epoch; as its rank 0, register an address if there is none.

    The rank 0 of a gang that shrank was claimed as another one, without a port.
    """
    members: list[BarrierMember] = yield Verbs.barrier(job_id=job.id, token=job.token)
    mine = next(member for member in members if member.job_id_of_rank == job.id)
    if mine.rank != 0 or mine.go or mine.master_addr is not None or mine.epoch == job.claim.epoch:
        return members
    port = ports.take()
    try:
        found: list[BarrierMember] = yield Verbs.barrier(job_id=job.id, token=job.token, port=port)
        return found
    except WrongState as problem:
        log.warning("port_taken", extra={**job.extra, "port": port, "error": str(problem)})
        return members
    finally:
        # The member that learns of the new epoch is about to bind it.
        ports.release(port)


def gang_info(job: ActiveJob, members: Sequence[BarrierMember]) -> GangInfo:
    """Who this member is, from an answer of ``barrier`` that lists it."""
    mine = next(member for member in members if member.job_id_of_rank == job.id)
    return GangInfo(
        id=job.claim.gang_id or 0,
        epoch=mine.epoch,
        rank=mine.rank,
        world_size=len(members),
        local_rank=mine.local_rank,
        node_rank=mine.node_rank,
        local_world_size=mine.local_world_size,
        peers=tuple(
            Peer(member.rank, member.job_id_of_rank, member.host or "", member.worker or "", member.role)
            for member in members
        ),
        master_addr=mine.master_addr or "",
        master_port=mine.master_port or 0,
        role=mine.role,
        role_rank=mine.role_rank,
    )


class EpochWatch:
    """Keeps what running members know of their gang up to date. A task of the control loop."""

    def __init__(self, session: Session, ports: PortHolder) -> None:
        self._session = session
        self._ports = ports
        self._some = asyncio.Event()
        self._behind: dict[int, ActiveJob] = {}

    def note_epoch(self, job: ActiveJob, epoch: int | None) -> None:
        """A heartbeat said that this job's gang is in this epoch. For the control loop."""
        gang = job.gang
        if gang is None or epoch is None or epoch <= gang.epoch:
            return
        self._behind[job.token] = job
        self._some.set()

    async def run(self) -> None:
        """Look up each new epoch that a heartbeat named, until cancelled."""
        while True:
            await self._some.wait()
            signs.alive()
            self._some.clear()
            behind, self._behind = self._behind, {}
            for job in behind.values():
                if job.must_end or job.reporting:
                    continue
                try:
                    await self.look(job)
                except GangqError as problem:
                    # Lost, told to stop, or no answer: the next heartbeat knows which.
                    log.warning("epoch_unknown", extra={**job.extra, "error": str(problem)})
                except Exception:
                    log.exception("epoch_fault", extra=job.extra)

    async def look(self, job: ActiveJob) -> None:
        """Ask who is who, and tell the work if the new epoch is whole.

        Raises:
            GangqError: the claim is over, or there was no answer.
        """
        members = await self._session.control.client.execute(who_is_who(job, self._ports))
        known = job.gang
        if known is None or not members or not members[0].go or members[0].epoch <= known.epoch:
            return
        job.change_gang(gang_info(job, members))
