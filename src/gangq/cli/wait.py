"""gangq wait: wait until jobs, gangs and batches have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gangq.cli.output import say
from gangq.cli.parsing import Seconds
from gangq.cli.progress import Bars
from gangq.cli.session import Session, common_options
from gangq.cli.which import Which, takes_several
from gangq.errors import WaitTimeout
from gangq.status import error_in_words

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.client.rows import JobRow
    from gangq.handle_steps import Handle

EXIT_TIMED_OUT = 124
"""As timeout(1) has it."""
EXIT_NOT_STARTED = 127
EXIT_CANCELLED = 130


@click.command(
    epilog="""Exit codes: 0 when all are done. Otherwise that of the first in the order of the IDs that is not, as
    gangq run would exit: the command's own, 128+N, 127, 1, or 130 when it was cancelled. 124 when the time is up."""
)
@takes_several()
@click.option("--timeout", type=Seconds(), metavar="DURATION", help="Wait at most so long [without end].")
@common_options
def wait(session: Session, named: Sequence[Which], timeout: float | None) -> None:
    """Wait until jobs, gangs and batches have ended.

    Prints each as it ends, and below on a terminal a bar of each that tells its steps. Ctrl-C ends the waiting and
    nothing else. With --json one object for each: {"job_id", "gang_id", "batch_id", "state", "exit_code", "error"}.
    """
    refuse_in_job(session)
    click.get_current_context().exit(wait_for(session, named, timeout))


def refuse_in_job(session: Session) -> None:
    """Raise `UsageError` inside a job, which has no database to ask."""
    if session.inside_job:
        raise click.UsageError("a job cannot wait for another: submit it with --after, or pass --dsn")


def wait_for(session: Session, named: Sequence[Which], timeout: float | None = None) -> int:
    """Wait until these have ended, with bars on a terminal, and print each as it ends; return the exit code."""
    from gangq.handle_steps import Limit, first_ended

    client = session.client()
    waiting = {_handle(client, which): which for which in dict.fromkeys(named)}
    codes: dict[Which, int] = {}
    limit = Limit(timeout)
    with Bars(client, list(waiting.values())) as bars:
        while waiting:
            try:
                ended = client.execute(first_ended([*waiting], limit, bars.draw))
            except WaitTimeout as problem:
                bars.clear()
                say(str(problem))
                return EXIT_TIMED_OUT
            for handle, state in ended.items():
                which = waiting.pop(handle)
                bars.leave_out(which)
                codes[which] = _tell(session, client, which, state)
    return next((codes[which] for which in named if codes[which]), 0)


def _handle(client: Client, which: Which) -> Handle[Any, Any]:
    from gangq.handles import Batch, Gang, Job

    if which.gang:
        return Gang(lambda: client, which.id, [])
    return Batch(lambda: client, [which.id]) if which.batch else Job(lambda: client, which.id)


def _tell(session: Session, client: Client, which: Which, state: str) -> int:
    """Say how it has ended; return the exit code for that."""
    code, failed = ending(state, [] if state == "done" else which.jobs(client))
    error = (failed.error if failed else None) or {}
    ids = {"job_id": None, "gang_id": None, "batch_id": None, **which.named}
    said = error_in_words(error)
    session.answer(
        {**ids, "state": state, "exit_code": code, "error": error or None},
        f"{which} {state}" + (f": {said}" if said else ""),
    )
    return code


def ending(state: str, members: list[JobRow]) -> tuple[int, JobRow | None]:
    """The exit code, and the job whose failure it is."""
    if state == "done":
        return 0, None
    if state == "cancelled":
        return EXIT_CANCELLED, None
    failed = culprit(members)
    error = (failed.error if failed else None) or {}
    if error.get("type") == "CommandStartError":
        return EXIT_NOT_STARTED, failed
    code = error.get("exit_status")
    return (code if isinstance(code, int) and 0 < code < 256 else 1), failed


def culprit(members: Sequence[JobRow]) -> JobRow | None:
    """The job, or the member, whose own failure the end was: of several the lowest rank."""
    failed = sorted((m for m in members if m.error and m.state == "failed"), key=lambda m: m.rank or 0)
    # The others fell with the gang, and their error says only that.
    own = [m for m in failed if (m.error or {}).get("type") != "GangFailed"]
    spent = [m for m in own if m.attempts >= m.max_attempts]
    return next(iter([*spent, *own, *failed]), None)
