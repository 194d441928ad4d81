"""Says how a worker died, for its supervisor: ``python -m gangq.worker.report``, a fresh process each time.

On standard input comes one JSON object: ``record``, what the worker had said of its incarnation (with the
address of its database, which is why none of this is on a command line), ``secrets``, what libpq has to find in
the environment, and ``facts``, what the supervisor saw. Out of these it says, in this order: the trip of the job
that ran in the worker's own process; that all of the incarnation is dead. Of a process that nothing can kill it
says that, and nothing else: what such a process holds is not free.

Exit status: 0 all was said, 1 something was not; then the worker's lease ends by itself. The supervisor allows
5 s.
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
from typing import Any

from gangq import private
from gangq.client import Client
from gangq.errors import GangqError, IncarnationEnded, InvalidInput, NotAllowed, NotFound, StaleToken
from gangq.proc import statefile
from gangq.proc.proof import HostIdentity
from gangq.watchdogs.codes import ExitCode
from gangq.worker.host_record import DIRECTORY_PREFIX
from gangq.worker.session import clean_stop_reason

log = logging.getLogger("gangq.worker.report")

_CONNECT_S = 2
_TRY_FOR_S = 4.0
_AGAIN_S = 0.25
_RUNNER = os.path.join("worker", "runner_inline.py")


def main() -> None:
    """Read standard input, say it, and exit."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    words = json.load(sys.stdin)
    record, facts = words["record"], words["facts"]
    os.environ.update(words["secrets"])
    dsn = record.get("dsn") or os.environ.get(private.DSN_VARIABLE)
    until = time.monotonic() + _TRY_FOR_S
    while True:
        try:
            with Client(dsn, max_size=1, timeout_s=_CONNECT_S, connect_timeout=_CONNECT_S) as client:
                said = report(client, record, facts)
            break
        except GangqError as problem:
            # Everything said here may be said again. PostgreSQL is often back within a second or two.
            if not problem.retryable or time.monotonic() + _AGAIN_S > until:
                log.error("report_failed: %s", problem)
                said = False
                break
        time.sleep(_AGAIN_S)
    sys.exit(0 if said else 1)


def report(client: Client, record: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Say what the supervisor saw of this incarnation; whether all of it was said.

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
    reason = None if directory is None else clean_stop_reason(directory, incarnation, os.getuid())
    told = directory is not None and _kept_trip(client, incarnation, directory, os.getuid())
    if reason is None and not told and not _trip(client, incarnation, facts):
        reason = "it came to life for a moment while it was being ended"
    if reason is not None:
        # What it held had begun for no fault of its own, or was ended for none.
        try:
            client.retire_worker(incarnation=incarnation, final=True)
        except IncarnationEnded:
            log.info("already_ended: incarnation %s", incarnation)
        else:
            log.warning("reported_retired: worker %s, incarnation %s: %s", worker, incarnation, reason)
    else:
        freed = client.report_dead(
            worker=worker, incarnation=incarnation, evidence={"by": "its supervisor", **_seen(facts)}
        )
        log.warning("reported_dead: worker %s, incarnation %s, jobs freed: %s", worker, incarnation, freed)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    return True


def deliver(client: Client, incarnation: int, directory: Path, uid: int) -> None:
    """Tell what this incarnation, a worker of user ``uid``, or its supervisor could not, if they left it there: the
    trip of a job. Not of a claim that is over by now: its token fences that.

    Raises:
        DatabaseUnreachable: the database is away; it is told the next time.
    """
    if _kept_trip(client, incarnation, directory, uid):
        return
    facts = _kept(directory, statefile.DEATH, incarnation, uid)
    if facts is None:
        return
    try:
        _trip(client, incarnation, {**_NOTHING, **facts})
    except (TypeError, ValueError, KeyError, AttributeError, NotAllowed) as problem:
        log.warning("death_unreadable: %s: %s", directory, problem)


_NOTHING: dict[str, Any] = {
    "exit_code": 0,
    "job": 0,
    "token": 0,
    "silent_s": None,
    "threads": [],
    "stacks": "",
}


def _kept(directory: Path, name: str, incarnation: int, uid: int) -> dict[str, Any] | None:
    """What stands in that file about that incarnation."""
    raw = statefile.read(directory, name, uid=uid, most=statefile.REPORT_BYTES)
    try:
        found = json.loads(raw or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("incarnation") == incarnation else None


def _kept_trip(client: Client, incarnation: int, directory: Path, uid: int) -> bool:
    """Tell the trip that the worker itself could not; whether there was one."""
    trip = _kept(directory, statefile.TRIP, incarnation, uid)
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
    except (StaleToken, IncarnationEnded, NotFound, InvalidInput, NotAllowed, KeyError, TypeError) as problem:
        log.info("no_trip: job %s: %s", trip.get("job"), problem)
    else:
        log.warning("delivered_trip: job %s, code %s: %s", trip["job"], trip["code"], outcome)
    return True


def own_directory(path: object) -> Path | None:
    """The private directory of a worker that could not remove it itself; None if this is no such directory.

    The name may come from the database: believe little.
    """
    if not isinstance(path, str):
        return None
    found = Path(path)
    try:
        mine = found.lstat().st_uid == os.getuid()
    except OSError:
        return None
    named = found.is_absolute() and found.name.startswith(DIRECTORY_PREFIX)
    return found if mine and named and not found.is_symlink() else None


def _trip(client: Client, incarnation: int, facts: Mapping[str, Any]) -> bool:
    """The trip of the job whose handler ran in the worker, if that is what it died of.

    False where a frozen worker's job is over by now: writing down its stacks sets a stopped process going and
    interrupts what it waits for. Then it finished, and may have begun another, which is not to blame.
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
            evidence={"by": "its supervisor", **_seen(facts), **_handler(facts["stacks"])},
            # All of it is gone already, and the other jobs of this worker are nobody's fault: this ends the
            # incarnation and hands them back.
            exit_in_s=0,
        )
    except (StaleToken, IncarnationEnded, NotFound, InvalidInput) as problem:
        # It was between two jobs, or could say so itself.
        log.info("no_trip: job %s: %s", job, problem)
        return code is not ExitCode.FROZEN or isinstance(problem, InvalidInput)
    log.warning("reported_trip: job %s, code %d: %s", job, code, outcome)
    return True


def _seen(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as evidence. What stacks and threads say goes by the name under which the database keeps it from
    viewers, and out of events.
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


def _handler(stacks: str) -> dict[str, str]:
    """The handler's own frames in a dump of all threads, innermost last, as evidence of a trip. Nowhere else: viewers
    read how a worker was proven dead.
    """
    ours = f'  File "{Path(__file__).parents[1]}{os.sep}'
    for thread in stacks.split("\n\n"):
        frames = thread.splitlines()[1:]
        run_by = next((n for n, frame in enumerate(frames) if frame.startswith(f"{ours}{_RUNNER}")), 0)
        theirs = [frame for frame in frames[:run_by] if not frame.startswith(ours)]
        if theirs:
            return {"handler": "\n".join(reversed(theirs)).replace("\0", "\ufffd")}
    return {}


if __name__ == "__main__":
    main()
