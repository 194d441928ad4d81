"""gangq quarantine, taint, cordon, drain-host and their opposites; gangq worker off, on, drain; gangq demo."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from gangq.cli import options, queries, stored
from gangq.cli.group import EXIT_INTERRUPTED, EXIT_REFUSED
from gangq.cli.loops import Interrupts
from gangq.cli.output import say, when
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, chained, common_options, json_option
from gangq.cli.which import device_named
from gangq.client.encoding import counted
from gangq.client.rows import CordonRow
from gangq.errors import GangqError

if TYPE_CHECKING:
    from gangq.client import Client


def _one(session: Session, device: str | None, worker: str | None) -> dict[str, Any]:
    if (device is None) == (worker is None):
        raise click.UsageError("name a device (--device HOST:INDEX) or a worker (--worker NAME), one of them")
    return {"device_uuid": device and device_named(session, device), "worker": worker}


def _whose(given: dict[str, Any]) -> str:
    return f"device {given['device_uuid']}" if given["device_uuid"] else f"worker {given['worker']}"


_host = chained(click.argument("host", shell_complete=stored.hosts), common_options)


_worker = chained(click.argument("name", shell_complete=stored.workers), common_options)


@click.command()
@options.device
@options.worker
@options.reason
@common_options
def quarantine(session: Session, device: str | None, worker: str | None, reason: str | None) -> None:
    """Keep a device or a worker from taking work. What runs on a worker goes on."""
    given, reason = _one(session, device, worker), reason or "operator"
    session.client().quarantine(**given, reason=reason)
    session.answer(
        {**given, "quarantined": True, "reason": reason}, f"{_whose(given)} is quarantined: {reason}"
    )


@click.command()
@options.device
@options.worker
@common_options
def unquarantine(session: Session, device: str | None, worker: str | None) -> None:
    """Lift the quarantine of a device or a worker."""
    given = _one(session, device, worker)
    session.client().unquarantine(**given)
    session.answer({**given, "quarantined": False, "reason": None}, f"{_whose(given)} may take work")


@click.command()
@click.argument("worker", shell_complete=stored.workers)
@click.argument("taints", nargs=-1, metavar="[K[=V]...]")
@common_options
def taint(session: Session, worker: str, taints: tuple[str, ...]) -> None:
    """Keep off a worker what does not tolerate it.

    gangq taint w1 repair spot=yes sets these beside the taints that the worker itself registers with, also for
    when it comes back after a restart; gangq taint w1 takes them off. What runs there goes on.
    """
    session.client().set_taints(worker=worker, taints=taints)
    said = f"is tainted: {', '.join(taints)}" if taints else "has no taints but its own"
    session.answer({"worker": worker, "taints": list(taints)}, f"worker {worker} {said}")


@click.command()
@json_option
def demo(session: Session) -> None:
    """See a gang survive the death of a rank.

    It trains a model, on the private PostgreSQL, in under a minute. With --json the show goes to standard
    error, and standard output gets {"exit_code"}.
    """
    # It starts servers and workers and trains a model: nothing that any other command should load.
    try:
        from rich.console import Console

        from gangq.cli import demo as show
    except ModuleNotFoundError as missing:
        raise GangqError(f"the demo needs {missing.name}: pip install 'gangq[demo]'") from missing

    code = show.run(Console(stderr=True) if session.json else None)
    session.answer({"exit_code": code})
    click.get_current_context().exit(code)


_POLL_S = 0.5
_PRESENT = ("live", "draining", "silent")

_draining = chained(
    click.option(
        "--deadline",
        type=Seconds(),
        metavar="DURATION",
        help="From now: then what has found no other place is told to stop [never].",
    ),
    options.reason,
    click.option("--wait", is_flag=True, help="Wait until nothing runs there, and show what still does."),
)


@click.command()
@options.reason
@_host
def cordon(session: Session, host: str, reason: str | None) -> None:
    """Give the workers of a host nothing new. What runs there goes on.

    It lasts over restarts, until gangq uncordon. With --json the columns of gangq.cordoned.
    """
    _cordon(session, reason, host=host)


@click.command()
@_host
def uncordon(session: Session, host: str) -> None:
    """Give the workers of a host work again. With --json: {"kind", "name", "state"}."""
    _uncordon(session, host=host)


@click.command()
@_draining
@_host
def drain_host(session: Session, host: str, deadline: float | None, reason: str | None, wait: bool) -> None:
    """Move everything away from a host, gangs as a whole, and give it nothing new.

    Nobody is charged. Ctrl-C ends the waiting and not the drain: gangq undrain does. With --json the columns of
    gangq.cordoned, one object each time they change.
    """
    _drain(session, deadline, reason, wait, host=host)


@click.command()
@_host
def undrain(session: Session, host: str) -> None:
    """End the drain of a host, and give it work again. With --json: {"kind", "name", "state"}."""
    _uncordon(session, host=host)


@click.command(name="off")
@options.reason
@_worker
def worker_off(session: Session, name: str, reason: str | None) -> None:
    """Give a worker nothing new. What it runs goes on.

    It lasts over its restarts, until gangq worker on. With --json the columns of gangq.cordoned.
    """
    _cordon(session, reason, worker=name)


@click.command(name="on")
@_worker
def worker_on(session: Session, name: str) -> None:
    """Give a worker work again. With --json: {"kind", "name", "state"}."""
    _uncordon(session, worker=name)


@click.command(name="drain")
@_draining
@_worker
def worker_drain(session: Session, name: str, deadline: float | None, reason: str | None, wait: bool) -> None:
    """Move everything away from a worker, gangs as a whole, and give it nothing new.

    Nobody is charged. Ctrl-C ends the waiting and not the drain: gangq worker on does. With --json the columns of
    gangq.cordoned, one object each time they change.
    """
    _drain(session, deadline, reason, wait, worker=name)


WORKER_VERBS = {"off": worker_off, "on": worker_on, "drain": worker_drain}
"""What may follow `gangq worker` instead of what a worker is started with."""


def _cordon(session: Session, reason: str | None, **where: Any) -> None:
    client = session.client()
    client.cordon(**where, reason=reason)
    found = _seen(client, where)
    session.answer(found, _described(found))


def _uncordon(session: Session, **where: Any) -> None:
    client = session.client()
    client.uncordon(**where)
    ((kind, name),) = where.items()
    # A worker stays cordoned as long as its host is: whoever turns it on should hear that.
    there = client.workers(host=name) if kind == "host" else client.workers(name=name)
    still = [w for w in there if w.cordoned is not None and w.state in _PRESENT]
    text = f"{kind} {name} may take work"
    if still and kind == "worker":
        text += f", but not before its host may: gangq uncordon {still[0].host}"
    elif still:
        text += f", but not {', '.join(w.name for w in still)}: gangq worker on NAME"
    session.answer({"kind": kind, "name": name, "state": "open"}, text)


def _drain(session: Session, deadline: float | None, reason: str | None, wait: bool, **where: Any) -> None:
    client = session.client()
    # By the database's clock, which is the one it is compared with.
    at = None if deadline is None else client.execute(queries.database_time()) + timedelta(seconds=deadline)
    client.cordon(**where, drain=True, deadline=at, reason=reason)
    found = _seen(client, where)
    with Interrupts() as interrupts:
        session.answer(found, _described(found))
        while wait and found.state != "drained":
            interrupts.wait(_POLL_S)
            if interrupts.count:
                say(f"{found.kind} {found.name} goes on being drained")
                click.get_current_context().exit(EXIT_INTERRUPTED)
            before, found = found, _seen(client, where)
            if found != before:
                session.answer(found, f"{when(client.execute(queries.database_time()))}  {_described(found)}")


def _seen(client: Client, where: Mapping[str, str]) -> CordonRow:
    ((kind, name),) = where.items()
    found = client.cordoned(kind=kind, name=name)
    if not found:
        say(f"the cordon of {kind} {name} was lifted by somebody else")
        click.get_current_context().exit(EXIT_REFUSED)
    return found[0]


def _described(found: CordonRow) -> str:
    whose = f"{found.kind} {found.name}"
    if not found.drain:
        return f"{whose} is given nothing new: {found.reason}"
    if found.state == "drained":
        return f"{whose} is drained: nothing runs there"
    left = [*(f"g{gang}" for gang in found.gangs), *map(str, found.jobs)]
    some = ", ".join(left[:10]) + (", ..." if len(left) > 10 else "")
    until = f", told to stop at {when(found.deadline)}" if found.deadline else ""
    left_there = f"{counted(len(found.gangs), 'gang')}, {counted(len(found.jobs), 'job')}"
    return f"{whose} is being drained: {left_there} left ({some}){until}"
