"""gangq service: replicas that stay up, in whole gangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gangq.cli import output, stored, tables
from gangq.cli.group import Subgroup
from gangq.cli.loops import Interrupts, until_interrupted
from gangq.cli.options import Sectioned, look_options, settings, table_options, wide_option
from gangq.cli.output import moment, say
from gangq.cli.parsing import payload_of
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import Cell, columns
from gangq.cli.work import recurring_options, submission
from gangq.client.options import ServiceOptions
from gangq.client.rows import EndpointRow, ScalingRow, ServiceRow
from gangq.commands import COMMAND, command_payload

_LOOK_S = 5.0
_COLUMNS = columns(
    "name state ready gangs:2 revision:1 task:1 load:2 why queue:3 submitter:4",
    {"ready": lambda s: f"{s.ready_replicas} of {s.replicas}"},
)
_GANGS = columns(
    ">gang revision state ready hosts:1 load:2 made=made_at:2 why",
    {
        "state": lambda g: "leaving" if g.leaves else "serving" if g.serves else g.state or "ended",
        "ready": lambda g: f"{g.ready_members} of {g.members}",
    },
)
_ENDPOINTS = columns("service >gang rank address port host:2 worker:2 revision:1 load:1")


_named = chained(click.argument("name", shell_complete=stored.services), common_options)


@click.group(cls=Subgroup)
def service() -> None:
    """Keep replicas of a task running, in whole gangs, and say where they take requests.

    Workers and gangq tick keep what is wanted. A new revision replaces the old one gang by gang, each once it is
    ready.
    """


@service.command(name="set", cls=Sectioned)
@click.argument("service_name", metavar="NAME", shell_complete=stored.services)
@click.argument("program", nargs=-1, metavar="[-- PROGRAM ARGS]")
@click.option("--task", shell_complete=stored.tasks, help="What each replica runs; or a PROGRAM after --.")
@click.option(
    "--payload", "payload", multiple=True, metavar="JSON|K=V", help="Its arguments; K=V may be repeated."
)
@click.option("--replicas", type=click.IntRange(min=0), metavar="N", help="Rounded up to whole gangs.")
@settings(
    ServiceOptions,
    {
        "stopped": "Want none, whatever --replicas says.",
        "surge N": "So many gangs more while one replaces another; 0: stop first [1].",
        "ready_within_s": "Replace a gang that is not ready for so long [10m].",
        "linger_s": "From leaving the endpoints to being told to stop [5s].",
        "health PATH|URL": "Polled by its worker: a replica is ready while it answers. A PATH is at GANGQ_PORT; "
        "none: no more.",
        "min_replicas=--min N": "Scale: at least so many replicas [1].",
        "max_replicas=--max N": "Scale: at most so many; 0: do not scale any more.",
        "target_load=--load X": "Scale: the average load to aim at.",
        "target_depth=--depth N": "Or so many jobs for each replica.",
        "depth_of QUEUE": "The queue whose waiting and running jobs --depth counts [named as the service].",
        "up_after_s": "Add replicas when more have been needed for so long [30s].",
        "down_after_s": "Remove some when fewer have been needed for so long [5m].",
        "version": "A change of it alone makes a new revision, too.",
    },
)
@recurring_options
@common_options
def set_(
    session: Session,
    /,
    service_name: str,
    program: tuple[str, ...],
    task: str | None,
    payload: tuple[str, ...],
    replicas: int | None,
    **options: Any,
) -> None:
    """Make a service, or change what is given of it. What was stopped starts.

    gangq service set chat --task serve --replicas 4 --gang 2 --gpus 1 --payload model=m

    gangq service set chat --min 2 --max 8 --load 0.7 --up-after 30s --down-after 5m

    gangq service set web --replicas 2 --health /healthz -- python server.py

    Another task, payload, gang, version or need is a new revision. --gang is the size of each gang [1].
    """
    if program and (task or payload):
        raise click.UsageError("name a task, with its payload, or a program after --, not both")
    if replicas == 0 and not options["stopped"]:
        raise click.UsageError(
            "--replicas 0: add --stopped to want none; gangq service stop does that, and delete forgets it"
        )
    own = {name: options.pop(name) for name in ServiceOptions.__annotations__ if name in options}
    size = options["size"]
    work = submission(session, {**options, "size": 1})
    del work["size"]
    outcome = session.client().set_service(
        name=service_name,
        task=COMMAND if program else task,
        payload=command_payload(program) if program else payload_of(payload) if payload else None,
        replicas=replicas or None,
        gang=size,
        work=work or None,
        **own,
    )
    _answer(session, service_name, outcome, lambda found: f"{outcome}; {_in_words(found)}")


@service.command(name="list")
@table_options
def list_(session: Session) -> None:
    """List the services: how many replicas are wanted and ready, and what is in the way."""
    session.rows(session.client().services(), _COLUMNS, "no services; make one with: gangq service set")


@service.command()
@click.argument("name", shell_complete=stored.services)
@wide_option
@look_options
def show(session: Session, name: str) -> None:
    """Show a service and its gangs; gangq explain says why one waits."""
    found = _existing(session, name)
    gangs = session.client().service_gangs(service=name)
    scaling = next(iter(session.client().scaling(service=name)), None)
    if session.json:
        session.answer({"service": found, "gangs": gangs, "scaling": scaling})
        return
    scaled = _scaling_in_words(scaling, found) if scaling is not None else {}
    tables.pairs(
        found,
        f"service=name state why ready {' '.join(scaled)} revision good_revision failures? next_try=next_try_at task "
        "queue version health load payload work set not_declared_by",
        {
            **scaled,
            "ready": lambda s: f"{s.ready_replicas} of {s.replicas}, in gangs of {s.gang}",
            "good_revision": lambda s: s.good_revision if s.good_revision != s.revision else None,
            "set": lambda s: f"{moment(s.set_at)} by {s.submitter}",
            "not_declared_by": lambda s: s.source if s.undeclared_at else None,
        },
    )
    if gangs:
        output.write("")
        session.table(gangs, _GANGS)


def _scaling_in_words(scaling: ScalingRow, found: ServiceRow) -> dict[str, Cell]:
    target = (
        f"load {scaling.target_load:g}"
        if scaling.target_load is not None
        else f"{scaling.target_depth:g} jobs of queue {scaling.depth_of} for each"
    )
    wants = f"the {scaling.replicas} it has"
    if scaling.wants is not None:
        wants = f"{scaling.wants} since {moment(scaling.since)}, and has them {moment(scaling.due_at)}: {scaling.why}"
    elif scaling.target_load is not None and found.load is None:
        wants += ": no replica has said within 60 s how busy it is"
    return {
        "scaled": lambda _: f"from {scaling.min_replicas} to {scaling.max_replicas} replicas, {target}",
        "wants": lambda _: wants,
        "last_scaled": lambda _: scaling.scaled_at and f"{moment(scaling.scaled_at)}: {scaling.scaled_why}",
    }


@service.command()
@click.argument("name", shell_complete=stored.services)
@click.option("-f", "--follow", is_flag=True, help="Print all of them again at every change, until Ctrl-C.")
@table_options
def endpoints(session: Session, name: str, follow: bool) -> None:
    """List where the replicas of a service take requests: whole gangs that are ready.

    With --json an object for each endpoint; with --follow one for each change: {"service", "endpoints"}.
    """
    _existing(session, name)
    if not follow:
        found = session.client().endpoints(service=name)
        session.rows(found, _ENDPOINTS, f"no gang of service {name} is ready")
        return
    shown: list[EndpointRow] | None = None

    def look(_: bool) -> float:
        nonlocal shown
        found = session.client().endpoints(service=name)
        if shown is None or _places(found) != _places(shown):
            shown = found
            _print(session, name, found)
        # A look now and then, for a notification that was lost.
        return _LOOK_S

    with Interrupts() as interrupts:
        until_interrupted(session.client(), interrupts, look, channel="gangq_endpoints")


def _places(found: list[EndpointRow]) -> list[tuple[int, int, str, int]]:
    return [(one.job_id, one.rank, one.address, one.port) for one in found]


def _print(session: Session, name: str, found: list[EndpointRow]) -> None:
    if session.json:
        session.answer({"service": name, "endpoints": found})
    elif found:
        session.table(found, _ENDPOINTS)
        output.write("")
    else:
        output.write(f"no gang of service {name} is ready\n")


@service.command()
@_named
def stop(session: Session, name: str) -> None:
    """Want no replica of a service, until gangq service set."""
    session.client().stop_service(name=name)
    _answer(session, name, "stopped", lambda found: found.state)


@service.command()
@click.option("--to", "to_revision", type=int, metavar="REVISION", help="[the last other one that was ready]")
@_named
def rollback(session: Session, name: str, to_revision: int | None) -> None:
    """Let a service be of another revision again; the present one: try an update again that has halted."""
    session.client().roll_back_service(name=name, to_revision=to_revision)
    _answer(session, name, "rolled back", _in_words)


@service.command()
@_named
def delete(session: Session, name: str) -> None:
    """Stop a service, and forget it once its last gang has ended.

    One that a program declares comes back when a worker of it starts: take it out of the program, too.
    """
    found = _existing(session, name)
    session.client().delete_service(name=name)
    if found.source is not None and found.undeclared_at is None:
        say(f"{found.source} declares it: it comes back when a worker of that starts")
    session.answer({"name": name, "state": "deleting"}, f"service {name}: deleting")


def _existing(session: Session, name: str) -> ServiceRow:
    advice = "gangq service list names those that do"
    return stored.existing(session.client().services(name=name), "service", name, advice)


def _in_words(found: ServiceRow) -> str:
    return (
        f"revision {found.revision}, {found.ready_replicas} of {found.replicas} replicas ready, {found.state}"
    )


def _answer(session: Session, name: str, done: str, in_words: Callable[[ServiceRow], str]) -> None:
    """Answer with the service as it is now, after a change that has succeeded."""
    found = next(iter(session.client().services(name=name)), None)
    if found is not None:
        session.answer(found, f"service {name}: {in_words(found)}")
    else:
        # Somebody deleted it between the two calls.
        session.answer({"name": name, "state": "deleted"}, f"service {name}: {done}; it was deleted since")
