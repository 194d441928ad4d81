"""gangq quarantine, unquarantine, taint, demo."""

from __future__ import annotations

from typing import Any

import click

from gangq.cli import options, stored
from gangq.cli.session import Session, common_options, json_option
from gangq.cli.which import device_named
from gangq.errors import GangqError


def _one(session: Session, device: str | None, worker: str | None) -> dict[str, Any]:
    if (device is None) == (worker is None):
        raise click.UsageError("name a device (--device HOST:INDEX) or a worker (--worker NAME), one of them")
    return {"device_uuid": device and device_named(session, device), "worker": worker}


def _whose(given: dict[str, Any]) -> str:
    return f"device {given['device_uuid']}" if given["device_uuid"] else f"worker {given['worker']}"


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
