"""gangq notify: who is told of failures, trips and quarantines, and what delivers it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import click

from gangq import private
from gangq.cli import stored
from gangq.cli.group import Subgroup
from gangq.cli.loops import Interrupts, until_interrupted
from gangq.cli.options import duration, table_options
from gangq.cli.output import say, words
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import columns
from gangq.client.encoding import counted
from gangq.errors import InvalidInput, NotFound
from gangq.notify import Deliver, Outcome, Post, Program, Runner

_POLL_S = 10.0
"""How often a runner looks that hears no notification."""
_SECRET_LEAST = 16
_FILE_MOST = 1 << 16

_TARGETS = columns(
    "target waiting dead dropped:1 delivered:1 last=delivered_at:2 queue:3 user=submitter:3 task:3 of=kinds problem",
    {"problem": lambda row: row.error or row.dead_error},
)


_named = chained(click.argument("target", shell_complete=stored.targets), common_options)


@click.group(cls=Subgroup)
def notify() -> None:
    """Tell people and programs of failures, trips and quarantines.

    A target is a name and what it is told of, kept in the database. Where and how it is told is said on the host
    that runs `gangq notify run`.
    """


@notify.command()
@click.option(
    "--on", "kinds", multiple=True, metavar="KIND", help="What it is told of; may be repeated [everything]."
)
@click.option(
    "--queue", shell_complete=stored.queues, help="Only of jobs and gangs of this queue and those below it."
)
@click.option(
    "--user", "submitter", shell_complete=stored.roles, metavar="NAME", help="Only of this submitter's."
)
@click.option("--task", shell_complete=stored.tasks, help="Only of this task.")
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 1000),
    help="Deliveries of one notification before it is given up [20, which takes some eight hours].",
)
@_named
def add(session: Session, target: str, kinds: tuple[str, ...], **of: Any) -> None:
    """Add a target, or change what the one of this name is told of.

    KIND is job_failed, gang_failed, batch_done, trip, device_quarantined, worker_quarantined, crash_loop or
    update_halted (the view gangq.notification_kinds). For admins. With --json the columns of gangq.notifications.
    """
    client = session.client()
    client.add_notification(target=target, kinds=kinds or None, **of)
    for sentence in stored.unknown(client, **{**of, "queue": None}):
        say(sentence)
    (row,) = client.notifications(target=target)
    session.answer(row, f"{target} is told of {words(row.kinds)}; to deliver it: gangq notify run {target}")


@notify.command("list")
@table_options
def list_(session: Session) -> None:
    """List the targets, and how far each has been told.

    With --json the columns of gangq.notifications; what was not delivered is in gangq.undelivered.
    """
    session.rows(session.client().notifications(), _TARGETS, "nobody is told of anything")


@notify.command()
@_named
def rm(session: Session, target: str) -> None:
    """Remove a target, with what it was not told yet. For admins. With --json: {"target"}."""
    session.client().remove_notification(target=target)
    session.answer({"target": target}, f"{target} is not told of anything any more")


@notify.command()
@click.option(
    "--wait", "wait_s", type=Seconds(), default=0, help="Wait so long for its delivery; exit code 1 if none."
)
@_named
def test(session: Session, target: str, wait_s: float) -> None:
    """Have a target told that this is a test. For admins.

    With --json: {"target", "id", "delivered"}; delivered is null without --wait.
    """
    client = session.client()
    made = client.test_notification(target=target)
    delivered = None
    until = time.monotonic() + wait_s
    with Interrupts() as interrupts:
        while wait_s and not delivered and not interrupts.count and time.monotonic() < until:
            interrupts.wait(0.1)
            delivered = all(row.id != made for row in client.undelivered(target=target, limit=None))
    state = {None: "waits for gangq notify run", True: "was delivered", False: "was not delivered in time"}
    session.answer(
        {"target": target, "id": made, "delivered": delivered},
        f"notification {made} to {target} {state[delivered]}",
    )
    if delivered is False:
        click.get_current_context().exit(1)


@notify.command()
@_named
def retry(session: Session, target: str) -> None:
    """Deliver what was given up for a target after all, and at once what backs off.

    For admins. With --json: {"target", "retried"}.
    """
    retried = session.client().retry_notifications(target=target)
    session.answer(
        {"target": target, "retried": retried},
        f"{counted(retried, 'notification')} that had been given up for {target} will be delivered; what backs off "
        "is tried at once",
    )


@notify.command()
@click.option("--url", help="POST there. Others on this machine can read command lines: see --url-file.")
@click.option("--url-file", type=click.Path(path_type=Path), help="The same, with the address in a file.")
@click.option("--exec", "program", metavar="PROGRAM", help="Run this program, which reads standard input.")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    help="Sign what is posted with the key in this file (16 bytes or more): header Gangq-Signature.",
)
@duration("--timeout", "10s", "How long one delivery may take.")
@click.option("--once", is_flag=True, help="Deliver what is due, and end: for cron.")
@_named
def run(session: Session, target: str, timeout_s: float, once: bool, **where: Any) -> None:
    """Deliver the notifications of a target from this host, as JSON.

    Each is delivered at least once, and has the same "id" each time. An answer from 200 to 299, or exit code 0 of
    the program, is success; after anything else it is delivered again, later and later. Redirects and proxies are
    not used. Several runners may share a target. Stops at SIGTERM, after the delivery in progress. The login needs
    the role gangq_notifier and nothing else.

    With --json one object per delivery: {"id", "kind", "delivery", "outcome", "error"}; outcome is delivered,
    waiting (for the next delivery), dead (given up) or stale (another runner has it). With --once the exit code is 1
    if a delivery failed. Without it the database may go and come.
    """
    private.close()
    deliver = _delivery(timeout_s, **where)

    def tell(found: Outcome) -> None:
        failed = "" if found.error is None else f": {found.error}"
        session.answer(found, f"{found.outcome} {found.kind} {found.id} (delivery {found.delivery}){failed}")

    # A loop may be started before its database.
    client = session.client(checked=once)
    runner = Runner(client, target, deliver, timeout_s=timeout_s, tell=tell)
    with Interrupts() as interrupts:

        def deliver_due(_: bool = False) -> float:
            due_in_s = runner.run(lambda: bool(interrupts.count))
            return min(_POLL_S * random.uniform(0.9, 1.1), _POLL_S if due_in_s is None else due_in_s)

        if once:
            deliver_due()
            if runner.failed:
                click.get_current_context().exit(1)
        else:
            until_interrupted(
                client,
                interrupts,
                deliver_due,
                channel="gangq_notify",
                check=session.check_schema,
                # Also one that will not go by itself, such as a schema that is being migrated: the line about it does
                # not go unnoticed, a host that tells nobody does.
                final=lambda problem: isinstance(problem, (NotFound, InvalidInput)),
            )


def _delivery(
    timeout_s: float, url: str | None, url_file: Path | None, program: str | None, secret_file: Path | None
) -> Deliver:
    """What delivers a notification. Raises `UsageError`, `InvalidInput`."""
    if sum(given is not None for given in (url, url_file, program)) != 1:
        raise click.UsageError("say --url, --url-file or --exec, one of them")
    if not 0 < timeout_s <= 600:
        raise click.UsageError("--timeout is more than 0 and 600 seconds at most")
    if program is not None and secret_file is not None:
        raise click.UsageError("--secret-file signs what is posted: with --exec there is nothing to sign")
    if program is not None:
        return Program(program, timeout_s)
    address = url if url_file is None else _read(url_file, "--url-file").decode(errors="replace")
    secret = None if secret_file is None else _read(secret_file, "--secret-file")
    if secret is not None and len(secret) < _SECRET_LEAST:
        raise InvalidInput(
            f"the key in --secret-file has {len(secret)} bytes: it needs {_SECRET_LEAST} or more "
            "(openssl rand -hex 32)"
        )
    return Post(address or "", timeout_s, secret)


def _read(path: Path, option: str) -> bytes:
    """The content of a file of one line."""
    try:
        with path.open("rb") as file:
            found = file.read(_FILE_MOST).strip()
    except OSError as problem:
        raise InvalidInput(f"{option} {path} cannot be read: {problem.strerror or problem}") from problem
    if not found:
        raise InvalidInput(f"{option} {path} is empty")
    return found
