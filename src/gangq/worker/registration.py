"""Becoming an incarnation: registering, and proving a dead predecessor of the same name dead.

A worker that was SIGKILLed and started again finds its own name taken by an incarnation whose lease runs on
for minutes. On the same host it can do better than wait: it looks whether anything the predecessor had
started is still alive, ends what is, and reports the proof; the predecessor's jobs are free at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.errors import DatabaseUnreachable, WorkerNameTaken
from gangq.gpu import Detection
from gangq.watchdogs.deadman import boottime
from gangq.worker import cgroup, fitness, host_record, procfs
from gangq.worker.lanes import Lanes
from gangq.worker.options import WorkerOptions
from gangq.worker.proof import (
    HostIdentity,
    ProcessIdentity,
    confirm_gone,
    is_same_process,
    process_identity,
)
from gangq.worker.report import deliver
from gangq.worker.retry import backoff
from gangq.worker.session import Session, Terms, blameless
from gangq.worker.whereabouts import whereabouts

if TYPE_CHECKING:
    from gangq.client import Client

log = logging.getLogger("gangq.worker.registration")

PROCESS_MARK = secrets.token_hex(4)
"""Begins the mark of every incarnation of this process."""
_LET_END_S = 8.0
"""Longer than the grace that guardians give a command whose worker died (5 s)."""
_KILL_S = 10.0
_GLANCE_S = 0.3
_ASK_AGAIN_S = 30.0


def register(
    client: Client,
    options: WorkerOptions,
    *,
    lanes: Lanes,
    tasks: list[str],
    task_options: dict[str, dict[str, Any]],
    detection: Detection,
    directory: Path,
) -> Session:
    """Register and return the session; a dead predecessor of this name is reported dead first, and the memory
    of its devices waited for.

    Raises:
        WorkerNameTaken: a live worker has the name, or one that cannot be proven dead from here.
        Unfit: processes of a predecessor cannot be ended, or the memory of its devices stays taken.
        GangqError: the database refused, or is not there.
    """
    mark = PROCESS_MARK + secrets.token_hex(4)
    host = HostIdentity.here()
    process = process_identity(os.getpid())
    cgroups = cgroup.home()
    identity = {
        "mark": mark,
        "host": asdict(host),
        "process": asdict(process),
        "directory": str(directory),
        "cgroups": cgroups is not None,
        **{key: value for key, value in asdict(whereabouts()).items() if value is not None},
    }
    # What ended by a trip has given up its name already, and was to be gone by now.
    exiting = client.unproven(worker=options.name)
    buried = [
        _bury(client, options.name, row.incarnation, row.identity, directory, exiting=True) for row in exiting
    ]
    if any(buried):
        fitness.memory_back(client, options, detection, os.environ)
    # Before the database knows of it: from then on somebody may have to find what it has started.
    host_record.write(directory, options.name, mark, process)
    last_try = False
    lost_at: float | None = None
    waits = backoff()
    while True:
        sent_at = boottime()
        try:
            row = client.register_worker(
                name=options.name,
                host=options.host,
                queues=list(options.queues),
                slots=lanes.slots,
                light=lanes.light,
                prefetch=options.prefetch if lanes.main == "light" else 1,
                memory_mb=options.memory_mb or 0,
                cpus=options.cpus or 0,
                labels=options.labels,
                taints=list(options.taints),
                tasks=tasks,
                task_options=task_options,
                devices=[device.as_json() for device in detection.devices],
                address=options.address,
                boot_id=host.boot_id,
                pid=os.getpid(),
                identity=identity,
                lease_s=options.lease_s,
            )
        except DatabaseUnreachable as problem:
            # It was there a moment ago, and the worker may be registered by now: ask again.
            lost_at = sent_at if lost_at is None else lost_at
            if boottime() - lost_at > _ASK_AGAIN_S:
                raise
            log.warning("call_repeated", extra={"call": "register_worker", "error": str(problem)})
            time.sleep(next(waits))
            continue
        except WorkerNameTaken as taken:
            holder = taken.holder
            if _is_ours(holder, mark):
                # The answer to an earlier call was lost. Nothing was claimed under that incarnation.
                log.warning("own_incarnation_retired", extra={"incarnation": holder["incarnation"]})
                client.retire_worker(incarnation=holder["incarnation"], final=True)
                continue
            if last_try or not _bury(
                client, options.name, holder.get("incarnation"), holder.get("identity") or {}, directory
            ):
                raise
            fitness.memory_back(client, options, detection, os.environ)
            last_try = True
            continue
        break
    if row.withheld:
        log.warning("devices_withheld", extra={"devices": row.withheld})
    log.info(
        "registered",
        extra={
            "worker": options.name,
            "incarnation": row.incarnation,
            "slots": lanes.slots,
            "light": lanes.light,
            "main_thread": lanes.main,
            "tasks": tasks,
        },
    )
    # What handlers start carries the mark, so that a successor finds it. Not the worker itself: its own
    # environment was fixed when it started; it is found by pid and start time.
    os.environ["GANGQ_MARK"] = mark
    return Session(
        client,
        Terms.of(row),
        name=options.name,
        host=options.host,
        mark=mark,
        directory=directory,
        cgroups=cgroups,
        sent_at=sent_at,
    )


def _is_ours(holder: Mapping[str, Any], mark: str) -> bool:
    """Whether the live incarnation that holds the name is one that this very call of `register` made."""
    identity = holder.get("identity")
    return (
        isinstance(identity, Mapping)
        and identity.get("mark") == mark
        and holder.get("pid") == os.getpid()
        and holder.get("boot_id") == HostIdentity.here().boot_id
        and isinstance(holder.get("incarnation"), int)
    )


def _bury(
    client: Client,
    name: str,
    incarnation: object,
    identity: Mapping[str, Any],
    directory: Path,
    *,
    exiting: bool = False,
) -> bool:
    """Report an incarnation of our name dead, if nothing of it lives; False when that cannot be said.

    What the database says of it is good for looking. Its processes are ended, and its directory is removed, only
    where this host has a record of that very incarnation (:mod:`gangq.worker.host_record`). ``exiting``: it has
    announced its end, so what still lives of it is ended even if its worker does.
    """
    identity = identity if isinstance(identity, Mapping) else {}
    mark, host = identity.get("mark"), HostIdentity.of(identity.get("host"))
    process = ProcessIdentity.of(identity.get("process"))
    if not (isinstance(mark, str) and mark) or host is None or process is None:
        return False
    if not isinstance(incarnation, int):
        return False
    own = host_record.find(name, mark)
    if own is None and process == process_identity(os.getpid()) and mark.startswith(PROCESS_MARK):
        own = host_record.HostRecord(name, mark, process, directory)
    process = process if own is None else own.process
    lives = process.pid != os.getpid() and host == HostIdentity.here() and is_same_process(process)
    if lives and not (exiting and own is not None):
        entry = procfs.stat(process.pid)
        if own is not None and entry is not None and procfs.dying(process.pid):
            # Somebody has killed it: it may only be slow to give its memory back.
            procfs.await_end([entry])
            if is_same_process(process):
                raise fitness.beside(name, [process.pid])
        elif is_same_process(process):
            return False
    # First let guardians end their commands in peace, then insist.
    evidence = confirm_gone(
        mark, [process], host=host, timeout_s=_LET_END_S if own is not None else _GLANCE_S
    )
    if evidence.survivors and own is not None:
        evidence = confirm_gone(mark, [process], host=host, kill=True, timeout_s=_KILL_S)
        if evidence.survivors:
            found = [procfs.stat(survivor.pid) for survivor in evidence.survivors]
            procfs.await_end([entry for entry in found if entry is not None])
            evidence = confirm_gone(mark, [process], host=host, kill=True, timeout_s=_GLANCE_S)
    log.warning(
        "predecessor",
        extra={
            "incarnation": incarnation,
            "dead": evidence.proves_death,
            "recorded_here": own is not None,
            "survivors": [survivor.pid for survivor in evidence.survivors],
        },
    )
    if evidence.survivors and own is not None:
        raise fitness.beside(name, [survivor.pid for survivor in evidence.survivors])
    if not evidence.proves_death:
        return False
    excuse = None if own is None else blameless(own.directory, incarnation, os.getuid())
    if excuse is not None:
        # It ended its own work for a reason that is no fault of the jobs', and left word of it.
        client.retire_worker(incarnation=incarnation, final=True)
        log.warning("predecessor_retired", extra={"incarnation": incarnation, "reason": excuse})
    else:
        if own is not None:
            deliver(client, incarnation, own.directory, os.getuid())
        freed = client.report_dead(
            worker=name,
            incarnation=incarnation,
            evidence={"by": "its next incarnation", **evidence.as_json()},
        )
        log.warning("predecessor_reported_dead", extra={"incarnation": incarnation, "jobs": freed})
    if own is not None:
        for group in cgroup.left_by(mark):
            cgroup.remove(group)
    if own is not None and not own.lives():
        shutil.rmtree(own.directory, ignore_errors=True)
    return True
