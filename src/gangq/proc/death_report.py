"""Reports the end of a worker by a fresh process, and keeps on this host what could not be reported."""

from __future__ import annotations

# Not signal and socket, which import enum: a tenth of all the memory there is for the supervisor.
import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import sys

from . import clock, statefile, supervisor_log

_REPORT_S = 5.0
_REPORTED_S = 2.0
"""For the death of a worker that has reported its trip itself."""
_REPORTED_LATER = "the next start of this worker reports it"
_LEAST_S = 0.7
"""A fresh Python reports nothing in less."""


def send(
    log: supervisor_log.Log,
    environ: dict[str, str],
    secrets: bytes,
    record: bytes,
    incarnation: int,
    facts: dict[str, object],
    frozen_at: float | None,
) -> None:
    """Have a fresh process report ``facts``, until 5 s after the verdict. If that fails they stay in the worker's
    directory, and its next start, the bouncer or report-death reports them.

    ``environ`` and ``secrets`` (as JSON) are for that process; ``record`` is what the worker wrote about its
    incarnation. ``frozen_at`` is when it was found frozen, None if it was not.
    """
    import json

    try:
        worker, handed = json.loads(record), json.loads(secrets)
        directory = str(worker.get("directory") or "")
    except (AttributeError, ValueError, RecursionError) as problem:
        # A handler can overwrite the memory of its process, which the record is in.
        log.say("error", "death_not_reported", error=repr(problem), advice="its lease ends by itself")
        return
    trip = statefile.read_report(directory, statefile.TRIP, incarnation, uid=os.getuid()) or {}
    reported = bool(trip.get("reported"))
    if not reported and directory:
        try:
            death = json.dumps({**facts, "incarnation": incarnation}).encode()
            statefile.write(directory, statefile.DEATH, death)
        except (OSError, ValueError) as problem:
            log.say("warning", "death_not_kept", error=str(problem))
    if facts["stuck"]:
        for_s = _REPORT_S
    else:
        for_s = _left_s(trip.get("until") if frozen_at is None else frozen_at + _REPORT_S, reported)
    if for_s < _LEAST_S:
        log.say("warning", "report_skipped", advice=_REPORTED_LATER)
        return
    until = clock.boottime() + for_s
    words = {"record": worker, "secrets": handed, "facts": facts, "until": until}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        status = _run_report(root, json.dumps(words).encode(), environ, for_s)
    except OSError as problem:
        log.say("error", "reporter_not_started", error=str(problem))
        return
    if status != 0:
        log.say("error", "death_not_reported", exit_code=status, advice=_REPORTED_LATER)


def _left_s(until: object, reported: bool) -> float:
    """For how long to report: worker and supervisor share one deadline (boottime)."""
    left = min(_REPORT_S, until - clock.boottime()) if isinstance(until, (int, float)) else _REPORT_S
    # That it is gone is known to the database soon without this.
    return min(left, _REPORTED_S) if reported else left


def _run_report(root: str, words: bytes, environ: dict[str, str], for_s: float) -> int | None:
    """Run the reporter on these words for so long; its exit status, minus the signal that ended it, None: too
    late.
    """
    import subprocess

    # The program is this package and no neighbour of the working directory that happens to bear a module's
    # name; that directory itself stays, because the address of a database may name files relative to it.
    program = (
        "import sys; sys.path[:] = [sys.argv[1]] + [place for place in sys.path if place]; "
        "from gangq import private; private.close(); from gangq.worker.death_main import main; main()"
    )
    # Not a pipe: until it is closed, other processes of its user could open that and read the secrets.
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    # Not the signals that this process has blocked: it could not even be interrupted.
    reporter = subprocess.Popen(
        [sys.executable, "-c", program, root],
        stdin=theirs.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environ,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
    )
    theirs.close()
    reporter.stdin = os.fdopen(ours.detach(), "wb", 0)
    # Not to our own standard error: if that is a full pipe, the reporter would wait for ever.
    try:
        said, _ = reporter.communicate(words, timeout=for_s)
    except subprocess.TimeoutExpired as late:
        reporter.kill()
        supervisor_log.offer(2, late.output or b"")
        return None
    supervisor_log.offer(2, said)
    return reporter.returncode
