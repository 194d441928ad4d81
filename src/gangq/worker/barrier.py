"""The start barrier: no member's code begins before every member of this epoch has been claimed."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from gangq.client.rows import BarrierMember
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.context import GangInfo, Peer, ServiceInfo
from gangq.errors import IncarnationEnded, NotFound, StaleToken, WrongState
from gangq.worker.jobs import ActiveJob
from gangq.worker.ports import PortHolder
from gangq.worker.repeating import TRANSIENT
from gangq.worker.replicas import Replica
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.barrier")

_POLL_S = 0.2


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
