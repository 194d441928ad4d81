"""The program that reports how a worker died, for its supervisor, which starts it anew for each death
(:mod:`gangq.proc.death_report`): ``python -m gangq.worker.death_main``.

Standard input is one JSON object. ``record`` is what the worker wrote about its incarnation; it holds the address of
the database, so none of this is on a command line. ``secrets`` is what libpq has to find in the environment.
``facts`` is what the supervisor saw. ``until`` (boottime) is when the supervisor kills this process. Two things are
reported: first the trip of the job that ran in the worker's own process, then that all of the incarnation is dead. If
a process cannot be killed, only that is reported: what it holds is not free.

Exit status: 0 all was reported, 1 not all; then the worker's lease ends by itself. The supervisor allows 5 s at most.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq import private
from gangq.errors import GangqError, IncarnationEnded, InvalidInput, NotFound, StaleToken
from gangq.proc import clock, statefile
from gangq.proc.proof import HostIdentity
from gangq.watchdogs import dumps
from gangq.watchdogs.codes import ExitCode
from gangq.worker.host_record import DIRECTORY_PREFIX
from gangq.worker.session import clean_stop_reason

if TYPE_CHECKING:
    from gangq.client import Client

log = logging.getLogger("gangq.worker.death_main")

_CALL_S = 2.0
_AGAIN_S = 0.25
_TO_END_S = 0.5
"""What this process keeps of its time to say that it failed, and to exit."""


def main() -> None:
    """Read standard input, report, and exit."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    words = json.load(sys.stdin)
    record, facts = words["record"], words["facts"]
    os.environ.update(words["secrets"])
    dsn = record.get("dsn") or os.environ.get(private.DSN_VARIABLE)
    until = float(words["until"]) - _TO_END_S
    while True:
        try:
            # libpq counts whole seconds, two at least: the pool's own limit ends a connect sooner.
            limit_s = max(0.1, min(_CALL_S, until - clock.boottime()))
            from gangq.client import Client

            with Client(dsn, max_size=1, timeout_s=limit_s, connect_timeout=2) as client:
                said = report(client, record, facts)
            break
        except GangqError as problem:
            # Every call here may be repeated. PostgreSQL is often back within a second or two.
            if not problem.retryable or clock.boottime() + _AGAIN_S > until:
                log.error("report_failed: %s", problem)
                said = False
                break
        time.sleep(_AGAIN_S)
    sys.exit(0 if said else 1)


def report(client: Client, record: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Report what the supervisor saw of this incarnation; whether all of it was reported.

    Raises:
        GangqError: the database is not there, or refused.
    """
    worker, incarnation = str(record["worker"]), int(record["incarnation"])
    if facts["stuck"]:
        evidence = {**_seen(facts), "pid": facts["stuck"][0]["pid"], "boot_id": HostIdentity.here().boot_id}
        client.report_stuck(worker=worker, incarnation=incarnation, evidence=evidence)
        log.critical(
            "reported_stuck: process %s of worker %s does not die of SIGKILL: reboot this host",
            evidence["pid"],
            worker,
        )
        return True
    if not facts["tree_dead"]:
        left = [entry["pid"] for entry in facts["left"]]
        log.error(
            "not_proven_dead: processes %s of worker %s have not ended: they are slow, or not ours to end",
            left,
            worker,
        )
        return False
    directory = own_directory(record.get("directory"))
    evidence = {"by": "its supervisor", **_seen(facts)}
    reason, freed = report_end(client, worker, incarnation, directory, os.getuid(), evidence, facts)
    if reason is None:
        log.warning("reported_dead: worker %s, incarnation %s, jobs freed: %s", worker, incarnation, freed)
    else:
        log.warning("reported_retired: worker %s, incarnation %s: %s", worker, incarnation, reason)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    return True


def report_end(
    client: Client,
    worker: str,
    incarnation: int,
    directory: Path | None,
    uid: int,
    evidence: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
) -> tuple[str | None, int]:
    """Report an incarnation that is proven dead. Returns why it was retired, None if it was reported dead, and how
    many jobs that freed.

    ``directory`` is the private one of a worker of user ``uid``; None: it is not known. ``facts`` is what its
    supervisor saw [what that left there]. In this order:

    1. The trip of a job that the worker, or else its supervisor, could not report.
       If the claim is over by now its token is refused, and nothing changes.
    2. If the worker had ended its jobs for no fault of theirs, its retirement: they are released, not charged with a
       crash. Otherwise its death.

    Raises:
        IncarnationEnded: another process has reported the death already.
        DatabaseUnreachable: the files stay, and the next caller reports what they say.
    """
    reason = None if directory is None else clean_stop_reason(directory, incarnation, uid)
    tripped = directory is not None and _kept_trip(client, incarnation, directory, uid)
    if reason is None and not tripped:
        if facts is not None:
            charged = _trip(client, incarnation, facts)
        else:
            charged = directory is None or _trip_of_kept_death(client, incarnation, directory, uid)
        if not charged:
            reason = "it continued for a moment while it was being ended"
    if reason is None:
        return None, client.report_dead(worker=worker, incarnation=incarnation, evidence=evidence)
    try:
        client.retire_worker(incarnation=incarnation, final=True)
    except IncarnationEnded:
        log.info("already_ended: incarnation %s", incarnation)
    return reason, 0


def _trip_of_kept_death(client: Client, incarnation: int, directory: Path, uid: int) -> bool:
    """Report the trip that the supervisor could not, if it kept one; False as for :func:`_trip`."""
    facts = statefile.read_report(directory, statefile.DEATH, incarnation, uid=uid)
    if facts is None:
        return True
    try:
        return _trip(client, incarnation, {**_NOTHING, **facts})
    except _JUNK as problem:
        _raise_if_retryable(problem)
        log.warning("death_unreadable: %s: %s", directory, problem)
        return True


_JUNK = (GangqError, TypeError, ValueError, KeyError, AttributeError)
"""What may come of a file in the worker's directory, where a job can write: none of it keeps the death unreported."""


def _raise_if_retryable(problem: Exception) -> None:
    if isinstance(problem, GangqError) and problem.retryable:
        raise problem


_NOTHING: dict[str, Any] = {
    "exit_code": 0,
    "job": 0,
    "token": 0,
    "silent_s": None,
    "threads": [],
    "stacks": "",
}


def _kept_trip(client: Client, incarnation: int, directory: Path, uid: int) -> bool:
    """Report the trip that the worker itself could not; whether there was one."""
    trip = statefile.read_report(directory, statefile.TRIP, incarnation, uid=uid)
    if trip is None or "job" not in trip:
        return False
    try:
        outcome = client.trip(
            incarnation=incarnation,
            job_id=trip["job"],
            token=trip["token"],
            code=trip["code"],
            error=trip["error"],
            evidence=trip.get("evidence") or {},
            devices=trip.get("devices") or (),
            exit_in_s=0,
            class_=trip.get("class"),
        )
    except _JUNK as problem:
        _raise_if_retryable(problem)
        log.info("no_trip: job %s: %s", trip.get("job"), problem)
    else:
        log.warning("delivered_trip: job %s, code %s: %s", trip["job"], trip["code"], outcome)
    return True


def own_directory(path: object) -> Path | None:
    """The private directory of a worker that could not remove it itself; None if this is no such directory.

    The name may come from the database, so it is checked.
    """
    if not isinstance(path, str):
        return None
    found = Path(path)
    try:
        mine = found.lstat().st_uid == os.getuid()
    except (OSError, ValueError):
        return None
    named = found.is_absolute() and found.name.startswith(DIRECTORY_PREFIX)
    return found if mine and named and not found.is_symlink() else None


def _trip(client: Client, incarnation: int, facts: Mapping[str, Any]) -> bool:
    """Report the trip of the job whose handler ran in the worker, if the worker died of it.

    False if the worker was frozen and the job is over by now. To write the stacks of a stopped process its supervisor
    continues it, so the job may have finished in that moment. A job that began after it is not to blame.
    """
    code, job = ExitCode.of(int(facts["exit_code"])), facts["job"]
    if not job or code is None or code.reporter is None:
        return True
    silent_s = facts["silent_s"]
    if code is ExitCode.FROZEN:
        since = f" for {silent_s:.0f} s" if silent_s is not None else ""
        kind, message = "Frozen", f"no thread of its worker ran{since}: something held the interpreter"
    elif code is ExitCode.MEMORY:
        kind = "OutOfMemory"
        message = "the kernel killed its worker for want of memory: give the job a larger memory_mb, or the host more"
    else:
        # The worker's own trip, in case it could not report it itself: the repeat of a reported one changes nothing.
        kind, message = code.word, code.meaning
    try:
        outcome = client.trip(
            incarnation=incarnation,
            job_id=job,
            token=facts["token"],
            code=int(code),
            error={"type": kind, "message": message},
            evidence={"by": "its supervisor", **_seen(facts), **_handler(facts)},
            # The process is gone already. This also ends the incarnation and hands its other jobs back.
            exit_in_s=0,
        )
    except (StaleToken, IncarnationEnded, NotFound, InvalidInput) as problem:
        # The worker was between two jobs, or has reported this trip itself.
        log.info("no_trip: job %s: %s", job, problem)
        return code is not ExitCode.FROZEN or isinstance(problem, InvalidInput)
    log.warning("reported_trip: job %s, code %d: %s", job, code, outcome)
    return True


def _seen(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as evidence. Stacks and threads go under ``traceback``, which the database hides from viewers and
    keeps out of events.
    """
    kept = {
        key: value
        for key, value in facts.items()
        if key not in ("stacks", "threads", "token") and value not in (None, [], 0.0)
    }
    kernel = [
        f"{entry['tid']} {entry['name']} state {entry['state']} in {entry['wchan']}, system call {entry['syscall']}"
        for entry in facts["threads"]
    ]
    trace = "\n".join([facts["stacks"], *kernel]).replace("\0", "\ufffd").strip()
    return {**kept, **({"traceback": trace} if trace else {})}


def _handler(facts: Mapping[str, Any]) -> dict[str, str]:
    """The handler's own frames. Only for the evidence of a trip: viewers may read the evidence of a death, and must
    not see frames.
    """
    frames = dumps.inline_handler(facts["stacks"])
    return {"handler": frames.replace("\0", "\ufffd")} if frames else {}


if __name__ == "__main__":
    main()
