"""gangq wait: wait until jobs, gangs and batches have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gangq.cli.parsing import Seconds
from gangq.cli.run import ending
from gangq.cli.session import Session, common_options, pass_session, say
from gangq.cli.which import Which, takes_several
from gangq.errors import WaitTimeout
from gangq.status import error_in_words

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.handle_steps import Handle

EXIT_TIMED_OUT = 124
"""As timeout(1) has it."""


@click.command(
    epilog="""Exit codes: 0 when all are done. Otherwise that of the first in the order of the IDs that is not, as
    gangq run would exit: the command's own, 128+N, 127, 1, or 130 when it was cancelled. 124 when the time is up."""
)
@takes_several
@click.option("--timeout", type=Seconds(), metavar="DURATION", help="Wait at most so long [without end].")
@common_options
@pass_session
def wait(session: Session, named: Sequence[Which], timeout: float | None) -> None:
    """Wait until jobs, gangs and batches have ended.

    Prints each as it ends. Ctrl-C ends the waiting and nothing else. With --json one object for each: {"job_id",
    "gang_id", "batch_id", "state", "exit_code", "error"}.
    """
    if session.inside_job:
        raise click.UsageError("a job cannot wait for another: submit it with --after, or pass --dsn")
    from gangq.handle_steps import Limit, first_ended

    client = session.client()
    waiting = {_handle(client, which): which for which in named}
    codes: dict[Which, int] = {}
    limit = Limit(timeout)
    while waiting:
        try:
            ended = client.execute(first_ended([*waiting], limit))
        except WaitTimeout as problem:
            say(str(problem))
            click.get_current_context().exit(EXIT_TIMED_OUT)
        for handle, state in ended.items():
            which = waiting.pop(handle)
            codes[which] = _tell(session, client, which, state)
    click.get_current_context().exit(next((codes[which] for which in named if codes[which]), 0))


def _handle(client: Client, which: Which) -> Handle[Any]:
    from gangq.handles import Batch, Gang, Job

    if which.gang:
        return Gang(lambda: client, which.id, [])
    return Batch(lambda: client, [which.id]) if which.batch else Job(lambda: client, which.id)


def _tell(session: Session, client: Client, which: Which, state: str) -> int:
    """Say how it has ended; return the exit code for that."""
    code, culprit = ending(state, [] if state == "done" else which.jobs(client))
    error = (culprit.error if culprit else None) or {}
    ids = {"job_id": None, "gang_id": None, "batch_id": None, **which.named}
    said = error_in_words(error)
    session.answer(
        {**ids, "state": state, "exit_code": code, "error": error or None},
        f"{which} {state}" + (f": {said}" if said else ""),
    )
    return code
