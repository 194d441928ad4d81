"""Becoming an incarnation: registering, after a dead predecessor of the same name was reported dead."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.errors import DatabaseUnreachable, WorkerNameTaken
from gangq.gpu import Detection
from gangq.proc import cgroup, procfs
from gangq.proc.clock import boottime
from gangq.proc.proof import HostIdentity, process_identity
from gangq.worker import fitness, host_record
from gangq.worker.options import Lanes, WorkerOptions
from gangq.worker.predecessor import Predecessor
from gangq.worker.repeating import backoff
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.client.rows import Registration
    from gangq.worker.control import Control

log = logging.getLogger("gangq.worker.registration")

PROCESS_MARK = secrets.token_hex(4)
"""Begins the mark of every incarnation of this process."""
_ASK_AGAIN_S = 30.0
_MANAGER = re.compile(r"^user@\d+\.service$")


def register(
    client: Client,
    control: Control,
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
    name = options.name

    # What ended by a trip has given up its name already, and was to be gone by now.
    exiting = [(row.incarnation, row.identity) for row in client.unproven(worker=name)]
    _report_dead(client, options, detection, directory, exiting, exiting=True)
    # Before the database knows of it: from then on its next incarnation may have to find what it has started.
    host_record.write(directory, name, mark, process_identity(os.getpid()))
    cgroups = cgroup.home()
    offer = {
        **_capacity(options, lanes, detection),
        **_identity(mark, directory, has_cgroups=cgroups is not None),
        "tasks": tasks,
        "task_options": task_options,
    }
    try:
        sent_at, row = _ask(client, offer)
    except WorkerNameTaken as taken:
        holder = [(taken.holder.get("incarnation"), taken.holder.get("identity"))]
        if not _report_dead(client, options, detection, directory, holder):
            raise
        sent_at, row = _ask(client, offer)
    if row.withheld:
        log.warning("devices_withheld", extra={"devices": row.withheld})
    about = {"slots": lanes.slots, "light": lanes.light, "main_thread": lanes.main, "tasks": tasks}
    log.info("registered", extra={"worker": name, "incarnation": row.incarnation, **about})
    # What handlers start carries the mark, so that a successor finds it. Not the worker itself: its own
    # environment was fixed when it started; it is found by pid and start time.
    os.environ[procfs.MARK_VARIABLE] = mark
    return Session(
        client,
        row,
        name=name,
        host=options.host,
        mark=mark,
        directory=directory,
        cgroups=cgroups,
        sent_at=sent_at,
        control=control,
    )


def _report_dead(
    client: Client,
    options: WorkerOptions,
    detection: Detection,
    directory: Path,
    incarnations: Sequence[tuple[object, object]],
    *,
    exiting: bool = False,
) -> bool:
    """Prove and report dead these incarnations, each with its identity; whether any was. Then the memory of its
    devices is waited for.
    """
    reported = False
    for incarnation, identity in incarnations:
        found = Predecessor.of(
            options.name, incarnation, identity, own_mark=PROCESS_MARK, own_directory=directory
        )
        reported |= found is not None and found.prove_and_report_dead(client, exiting=exiting)
    if reported:
        fitness.memory_back(client, options, detection, os.environ)
    return reported


def _capacity(options: WorkerOptions, lanes: Lanes, detection: Detection) -> dict[str, Any]:
    """What `register_worker` is told of the work that this worker takes."""
    return {
        "name": options.name,
        "host": options.host,
        "queues": list(options.queues),
        "slots": lanes.slots,
        "light": lanes.light,
        "prefetch": options.prefetch if lanes.main == "light" else 1,
        "memory_mb": options.memory_mb or 0,
        "cpus": options.cpus or 0,
        "labels": options.labels,
        "taints": list(options.taints),
        "devices": [device.as_json() for device in detection.devices],
        "address": options.address,
        "lease_s": options.lease_s,
    }


def _identity(mark: str, directory: Path, *, has_cgroups: bool) -> dict[str, Any]:
    """What `register_worker` is told of this process: with it a successor can prove that it is dead."""
    host = HostIdentity.here()
    process = process_identity(os.getpid())
    return {
        "boot_id": host.boot_id,
        "pid": process.pid,
        "identity": {
            "mark": mark,
            "host": asdict(host),
            "process": asdict(process),
            "directory": str(directory),
            "cgroups": has_cgroups,
            **service_unit(),
        },
    }


def _ask(client: Client, offer: Mapping[str, Any]) -> tuple[float, Registration]:
    """Register; returns when that was sent. An answer that was lost is asked for again for 30 s: the worker may be
    registered by then.
    """
    lost_at: float | None = None
    pauses = backoff()
    while True:
        sent_at = boottime()
        try:
            return sent_at, client.register_worker(**offer)
        except DatabaseUnreachable as problem:
            lost_at = sent_at if lost_at is None else lost_at
            if boottime() - lost_at > _ASK_AGAIN_S:
                raise
            log.warning("call_repeated", extra={"call": "register_worker", "error": str(problem)})
            time.sleep(next(pauses))
        except WorkerNameTaken as taken:
            if not _is_ours(taken.holder, offer["identity"]["mark"]):
                raise
            # The answer to an earlier call was lost. Nothing was claimed under that incarnation.
            log.warning("own_incarnation_retired", extra={"incarnation": taken.holder["incarnation"]})
            client.retire_worker(incarnation=taken.holder["incarnation"], final=True)


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


def service_unit(
    environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc"), pids: tuple[int, ...] = ()
) -> dict[str, str]:
    """The systemd unit that this process runs as: what has to be restarted to restart it.

    ``unit`` is a unit of the system's service manager and ``user_unit`` one of a user's (``gangq-worker@0.service``),
    of which this process is the main one; neither where there is none. ``pids`` [this process and its parent] are
    those that may be the main one: a supervisor is, its worker is not.
    """
    environ = os.environ if environ is None else environ
    text = _read(proc / "self" / "cgroup")
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    if not _is_main(environ, pids or (os.getpid(), os.getppid())):
        return {}
    # Version 2, and on hosts with both the tree that systemd keeps for itself, say the same.
    for path in paths:
        parts = path.split("/")
        services = [part for part in parts if part.endswith(".service") and not _MANAGER.match(part)]
        if services:
            of_user = any(_MANAGER.match(part) for part in parts)
            return {"user_unit" if of_user else "unit": services[-1]}
    return {}


def _is_main(environ: Mapping[str, str], pids: tuple[int, ...]) -> bool:
    """Whether the unit around this process is its own: a terminal, or a program that starts workers, is in a
    unit as well, and to restart that would end more than a worker.
    """
    told = environ.get("SYSTEMD_EXEC_PID")
    if told is not None:
        return told.isdigit() and int(told) in pids
    # systemd before 248 does not say which process it started.
    return "INVOCATION_ID" in environ


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
