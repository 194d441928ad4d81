"""gangq submit, cancel, retry, priority."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any
from uuid import UUID

import click

from gangq.cli import parsing, stored
from gangq.cli.options import THEN, TIMEOUT_STYLE, Sectioned, settings
from gangq.cli.output import say
from gangq.cli.parsing import Due, ParamType, RoleType, Seconds
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import columns
from gangq.cli.wait import refuse_in_job, wait_for
from gangq.cli.which import Which, WhichType, ids_of, takes_several
from gangq.client.encoding import AWAITING
from gangq.client.options import GANG_ONLY, SubmitGangOptions, SubmitOptions
from gangq.client.rows import StateChange, UniqueGangSubmitted
from gangq.client.verbs import Verbs
from gangq.errors import NotFound
from gangq.placement.strategies import STRATEGIES

_CHANGES = columns("job >gang state")
_MANY_JOBS = 10_000
"""It takes a second or more to write so many; a million take minutes."""


class _Work(SubmitOptions, SubmitGangOptions, total=False):
    """All that an option says of a job or gang."""

    queue: str | None
    priority: int | None
    gpus: int | None
    size: int | None
    avoid_hosts: Sequence[str]
    due_at: str | None
    after: Sequence[int]
    spec: str | None
    unique_key: str | None
    keep_s: float | None
    waits: bool
    replaces: bool


_AWAITED = WhichType(batches=True)
min_option = settings(_Work, {"min_size=--min N": "Of a gang so many are enough to start."}, "Gangs")
tag_option = settings(_Work, {"tags=--tag TAG": "A mark of the batch; may be repeated."}, "Batches")
_RECURRING: Mapping[str, Mapping[str, str | tuple[ParamType, str]]] = {
    "Where and how it is treated": {
        "queue": "Where it waits [as its task is declared, else default].",
        "priority": "-1000 to 1000; higher runs first [as declared, else 0].",
        "budget_s": "Wall-clock time an attempt may take [the task's, else the queue's].",
        "max_attempts": "Attempts it may spend [the queue's].",
        "max_snoozes": "How often it may hand itself back with gangq snooze [100].",
        "preemptible=--no-preempt": "Others may not displace it.",
        "name": "A name for the gang; of single jobs: for the batch that these jobs are.",
    },
    "What it needs": {
        "gpus": "Whole devices [as declared, else 0]; for a gang, of each member.",
        "vram_mb": "Memory needed on each device, MiB [as declared].",
        "memory_mb": "Host memory needed, MiB [as declared].",
        "cpus": "CPUs needed; may be fractional [as declared].",
        "labels=--label K=V": "A label the worker must carry.",
        "model": "What it needs loaded: a worker that has it is preferred, any other may do.",
        "selector=--select COND[,COND...]": "Conditions on the worker: gpu=h100,zone!=eu,rack in (a,b),nvme,"
        "!spot,driver>=550.",
        "tolerates=--tolerate K[=V]": "A taint it may run in spite of.",
        "avoid_hosts=--avoid-host HOST": "A host it must not run on.",
        "wait_for_hardware": "Take it though no known worker could ever run it: one is still to come.",
    },
    "At most so many at once": {
        "limit_key KEY": "Of all jobs that name this key only so many are placed at once, whatever their queue.",
        "limit N": "So many; the first submission of a key must say it or the rate.",
        "rate N/PERIOD": "Of the jobs that name the key so many start in a period: 10/1m.",
    },
    "Gangs": {
        "size=--gang N": "N members that start together or not at all.",
        "roles=--role K=V,...": (
            RoleType(),
            "Instead of --gang, members of one role: name=executor,count=10,min=6,gpus=8,label.site=a, or a "
            "JSON object. Keys are the fields of gangq.Role; may be repeated.",
        ),
        "strategy": (
            click.Choice([*STRATEGIES]),
            "Fewest hosts, most, one, a host for each member, or fewest with all GPUs of a member joined by one "
            "NVLink or XGMI [pack].",
        ),
        "require LEVEL": "Topology level of which the gang must share one domain.",
        "prefer LEVEL": "Topology level of which it should share one domain.",
        "balanced": "Evenly many members on each host used.",
        "apart NAME": "Gangs of one such name never share a host.",
        "failure_policy": (
            click.Choice(["restart_gang", "restart_member", "shrink", "fail"]),
            "What a lost or failed member means [restart_gang].",
        ),
        "completion ROLE": "The role whose end is the gang's [all members'].",
        "timeout_s": "How long the gang may wait for its place while eligible [the queue's].",
        "timeout_style": (TIMEOUT_STYLE, f"And then: {THEN} [the queue's]."),
        "checkpoint_mode": (
            click.Choice(["each", "rank0"]),
            "Whether every member of the gang saves its part, or rank 0 all of it.",
        ),
        "claim_deadline_s": "How long the gang may stay reserved [30s].",
    },
}
recurring_options = chained(*(settings(_Work, texts, title) for title, texts in _RECURRING.items()))
"""What a job needs and how it is treated, each time it is submitted: the options of schedule add."""
work_options = chained(
    settings(
        _Work,
        {
            "due_at=--due": (Due(), "Not before: 15m from now, or 2026-11-20T14:30."),
            "after ID": (
                _AWAITED,
                "A job (12), gang (g12) or batch (b12) that must be done first; may be repeated.",
            ),
            "after_any ID": (
                _AWAITED,
                "One that must have ended first, whatever came of it; may be repeated.",
            ),
            "after_failed ID": (_AWAITED, "One that must have failed first; may be repeated."),
        },
        "When it may start",
    ),
    tag_option,
    settings(
        _Work,
        {"at_most N": (click.IntRange(min=1), "Of the batch so many jobs are placed at once.")},
        "Batches",
    ),
    recurring_options,
    min_option,
    settings(
        _Work,
        {
            "spec FILE": (
                click.File(),
                "A JSON object with the arguments of gangq.submit_gang; what the command line says comes first.",
            )
        },
        "Gangs",
    ),
)
"""The options of submit and run: these, and what holds for one submission."""


class _Aloud(logging.Handler):
    """What the database notes on a submission, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def notes_aloud(jobs: int = 1) -> Iterator[None]:
    """Within, say what the database notes; first how many jobs it is given, where it takes seconds to write them."""
    if jobs >= _MANY_JOBS:
        say(f"submitting {jobs:,} jobs")
    handler, logger = _Aloud(), logging.getLogger("gangq.server")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def is_gang(options: Mapping[str, Any]) -> bool:
    """Whether these `work_options` ask for a gang."""
    return options["size"] is not None or bool(options["roles"]) or options["spec"] is not None


def submission(session: Session, given: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Keyword arguments of `Client.submit`, or where `is_gang` of `submit_gang`, out of those of `work_options` that
    the command has.

    `own`: arguments that the command itself gives, and a --spec must not.
    """
    options: dict[str, Any] = {
        name: [*value] if isinstance(value, tuple) else value for name, value in given.items()
    }
    spec, due = options.pop("spec", None), options.get("due_at")
    selectors, avoided = options.pop("selector", []), options.pop("avoid_hosts", [])
    _say_if_unknown(session, avoided)
    avoid = [{"key": "host", "op": "notin", "values": avoided}] if avoided else []
    arguments = {
        **options,
        "labels": dict(options.get("labels", [])),
        **{name: _awaited(session, name, options.get(name, [])) for name in AWAITING},
        "selector": [*selectors, *avoid],
        "due_at": None if due is None else session.moment(due),
    }
    said = {key: value for key, value in arguments.items() if value not in (None, [], {})}
    if said.keys() & {"tags", "at_most"} and (spec is not None or said.keys() & {"size", "roles"}):
        raise click.UsageError("--tag and --at-most are for batches of single jobs: a gang is no batch")
    if spec is not None:
        return _over(_read_spec(spec, own), said)
    of_a_gang = said.keys() & {"size", *GANG_ONLY}
    if of_a_gang and not of_a_gang & {"size", "roles"}:
        params = click.get_current_context().command.params
        flag = next(param.opts[0] for param in params if param.name in of_a_gang)
        raise click.UsageError(f"{flag} is for gangs: add --gang N or --role, or leave it out")
    return said


def _say_if_unknown(session: Session, avoided: Sequence[str]) -> None:
    """A host may be still to come, or be away for long: what is to avoid it is taken."""
    # A job may ask nothing of the database.
    if avoided and not session.inside_job:
        client = session.client()
        for host in avoided:
            for sentence in stored.unknown(client, host=host):
                say(
                    f"{sentence}: it is avoided if it comes. {stored.alike(client, NotFound(sentence))}".rstrip()
                )


def _awaited(session: Session, option: str, after: Sequence[Which]) -> list[int]:
    """The jobs to wait for: of a gang all its members, of a batch all its jobs."""
    ids: list[int] = []
    for which in after:
        members = (
            [which.id]
            if which.kind == "job"
            else [job.id for job in session.client().jobs(**which.named, limit=None)]
        )
        if not members:
            raise NotFound(
                f"--{option.replace('_', '-')} names {which.phrase}, which does not exist, or is older than its "
                "retention"
            )
        ids += members
    return ids


def _read_spec(file: IO[str], own: Collection[str]) -> dict[str, Any]:
    """The arguments of a gang out of a file."""
    what = f"--spec {file.name}"
    spec = parsing.from_json(parsing.bounded(file.read, what), what)
    if not isinstance(spec, dict):
        raise click.UsageError(
            f'--spec {file.name} must be a JSON object, e.g. {{"task": "train", "size": 4}}'
        )
    known = {*Verbs.submit_gang.parameters, *SubmitGangOptions.__annotations__} - {
        "options",
        "connection",
        "due_at",
        "request_id",
        *own,
    }
    unknown = sorted(set(spec) - known)
    if unknown:
        raise click.UsageError(
            f"--spec {file.name} has the key {unknown[0]!r}; its keys are {', '.join(sorted(known))}"
        )
    return spec


def _over(spec: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What the command line says, over what the file says."""
    if said.keys() & {"size", "roles"}:
        spec = {key: value for key, value in spec.items() if key not in ("size", "min_size", "roles")}
    found = {**spec, **said}
    if not found.keys() & {"size", "roles"}:
        raise click.UsageError('the --spec has neither "size" nor "roles": it describes a gang')
    return found


@click.command(cls=Sectioned)
@click.argument("task", required=False, shell_complete=stored.tasks)
@click.argument("payload", nargs=-1)
@click.option(
    "--count",
    type=click.IntRange(1, 1_000_000),
    default=1,
    show_default=True,
    help="This many jobs, all alike.",
)
@settings(
    _Work,
    {
        "request_id UUID": (
            click.UUID,
            "A new one for each submission, e.g. of uuidgen: the same command run again within an hour prints the "
            "same ids and submits nothing.",
        ),
        "unique_key=--unique KEY": "Submit nothing where KEY stands for a live job or gang of this task in this "
        "queue already; say which.",
        "keep_s=--unique-for DURATION": "KEY stands for it at least so long, also when it has ended.",
        "waits=--wait": "Wait until it has ended, with bars on a terminal, and exit as gangq wait does.",
        "replaces=--replace": "Where that job still waits, it gets this PAYLOAD, --due and --priority.",
    },
)
@work_options
@common_options
def submit(
    session: Session,
    /,
    task: str | None,
    payload: tuple[str, ...],
    count: int,
    request_id: UUID | None,
    unique_key: str | None,
    keep_s: float | None,
    replaces: bool,
    waits: bool,
    **options: Any,
) -> None:
    """Submit a job, or with --gang N, --role or --spec a gang.

    Prints the id; with --name the jobs are a batch, and its id is printed. PAYLOAD is one JSON object, or
    key=value pairs whose values are JSON where they parse as such (n=1 is a number, name=a a string), or -
    for one JSON object per line of standard input: one job each, or one member each. TASK may be left out
    where --spec names it; then there is no PAYLOAD.
    """
    gang_wanted = is_gang(options)
    if task is None and options["spec"] is None:
        raise click.UsageError("name the task to run: gangq submit TASK [PAYLOAD]")
    if waits:
        refuse_in_job(session)
    payloads = _payloads(payload, count)
    key: dict[str, Any] = {"unique_key": unique_key, "keep_s": keep_s}
    _check_key(key, replaces, gang_wanted, payloads)
    given = {**submission(session, options), "request_id": request_id}
    given |= {} if task is None else {"task": task}
    if not gang_wanted:
        submitted = _submit_jobs(session, payloads, key, replaces, given)
    elif count > 1:
        raise click.UsageError("--count and --gang exclude each other: a gang is one gang")
    else:
        if payload:
            given = {name: value for name, value in given.items() if name not in ("payload", "payloads")}
            given |= {"payload": payloads[0]} if payload != ("-",) else {"payloads": payloads}
        submitted = [_submit_gang(session, key, given)]
    if waits:
        click.get_current_context().exit(wait_for(session, submitted))


def _submit_jobs(
    session: Session,
    payloads: Sequence[object],
    key: Mapping[str, Any],
    replaces: bool,
    given: Mapping[str, Any],
) -> list[Which]:
    """Submit jobs and say their ids; return the jobs, or the batch that they are."""
    client = session.client()
    existed = replaced = False
    with notes_aloud(len(payloads)):
        if key["unique_key"] is None:
            ids = client.submit(payloads=payloads, **given)
        else:
            one = client.submit_unique(payload=payloads[0], replaces=replaces, **key, **given)
            ids, existed, replaced = [one.job_id], one.existed, one.replaced
    if existed:
        _already_there(session, Which(ids[0], "job"), replaced)
    told = {"job_ids": ids, "existed": existed, "replaced": replaced}
    if "name" in given and not existed:
        batch = Which(ids[0], "batch")
        session.answer({"batch": str(batch), **told}, str(batch))
        return [batch]
    session.answer(told, "\n".join(map(str, ids)))
    return [Which(id, "job") for id in ids]


def _submit_gang(session: Session, key: Mapping[str, Any], given: Mapping[str, Any]) -> Which:
    """Submit a gang and say its id."""
    client = session.client()
    unique = key["unique_key"] is not None
    made = client.submit_unique_gang(**key, **given) if unique else client.submit_gang(**given)
    which = Which(made.gang_id, "gang")
    existed = isinstance(made, UniqueGangSubmitted) and made.existed
    if existed:
        _already_there(session, which, replaced=False)
    if made.note:
        say(f"gang {which} cannot be placed now: {made.note}")
    session.answer({"gang": str(which), **made._asdict(), "existed": existed}, str(which))
    return which


def _check_key(key: Mapping[str, Any], replaces: bool, gang_wanted: bool, payloads: Sequence[object]) -> None:
    """Raise `UsageError` for options of a key that make no sense."""
    if key["unique_key"] is None and (replaces or key["keep_s"] is not None):
        raise click.UsageError("--unique-for and --replace say how --unique is meant: give --unique KEY")
    if replaces and gang_wanted:
        raise click.UsageError("--replace is for single jobs: a gang that waits stays as it was submitted")
    if key["unique_key"] is not None and not gang_wanted and len(payloads) != 1:
        raise click.UsageError(f"--unique stands for one job, and this submits {len(payloads)}")


def _already_there(session: Session, which: Which, replaced: bool) -> None:
    changed = ", now with this payload" if replaced else ""
    # A job may ask nothing of the database.
    state = "" if session.inside_job else f" ({which.state(session.client())})"
    say(f"already there: {which.phrase}{state}{changed}")


def _payloads(words: Sequence[str], count: int) -> list[dict[str, Any]]:
    if tuple(words) != ("-",):
        return [parsing.payload_of(words)] * count
    if count > 1:
        raise click.UsageError("--count and - exclude each other: one job is submitted per line")
    read = iter(lambda: parsing.bounded(sys.stdin.readline, "a line of standard input"), "")
    lines = [line for line in read if line.strip()]
    if not lines:
        raise click.UsageError("standard input has no payload: write one JSON object per line")
    wrong = next((line for line in lines if not line.lstrip().startswith("{")), None)
    if wrong is not None:
        raise click.UsageError(f"not a JSON object: {wrong.strip()[:100]!r}; write one per line")
    return [parsing.payload_of([line]) for line in lines]


@click.command()
@takes_several()
@click.option("--reason", help="Why; kept in the events.")
@common_options
def cancel(session: Session, named: Sequence[Which], reason: str | None) -> None:
    """Cancel jobs, gangs and batches. What runs is told to stop; it may still end as done."""
    ids = ids_of(session.client(), named)
    _changed(session, session.client().cancel(**ids, reason=reason) if any(ids.values()) else [])


@click.command()
@takes_several(optional=True)
@click.option(
    "--failed", is_flag=True, help="Without an ID: all single jobs that have failed, of those that:"
)
@click.option("--queue", shell_complete=stored.queues, help="waited in this queue.")
@click.option("--task", shell_complete=stored.tasks, help="are of this task.")
@click.option("--name", shell_complete=stored.batch_names, help="are of a batch of this name.")
@click.option("--tag", shell_complete=stored.tags, help="are of a batch with this tag.")
@click.option("--user", "submitter", shell_complete=stored.roles, help="this role has submitted.")
@click.option("--since", "since_s", type=Seconds(), help="have failed within this time: 2h.")
@click.option("--dry-run", is_flag=True, help="Only list what would be retried.")
@common_options
def retry(
    session: Session,
    /,
    named: Sequence[Which],
    failed: bool,
    since_s: float | None,
    dry_run: bool,
    **filters: str | None,
) -> None:
    """Run what has ended once more, under its id; of a batch (b12) the jobs that have failed.

    A failed gang resumes from its last checkpoint. What was cancelled because it failed waits for it again.
    With --failed in place of an ID: all that this login may retry, and all that is given must hold.
    """
    client = session.client()
    if failed:
        if named:
            raise click.UsageError("--failed stands in place of ids: leave one of them out")
        since = None if since_s is None else session.moment(timedelta(seconds=-since_s))
        changes = client.retry_failed(**filters, since=since, dry_run=dry_run)  # type: ignore[arg-type]
        if not changes:
            stored.must_exist(client, **filters)
        _changed(session, changes)
        return
    if dry_run or since_s is not None or any(filters.values()):
        raise click.UsageError("these options select among what has failed: add --failed")
    if not named:
        raise click.UsageError("name at least one job (12), gang (g12) or batch (b12), or add --failed")
    changes = [change for which in named if which.batch for change in client.retry_failed(batch_id=which.id)]
    others = [which for which in named if not which.batch]
    if others:
        changes += client.retry(**ids_of(client, others))
    _changed(session, changes)


# A priority may be negative, and -5 would be an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("priority", type=int)
@takes_several()
@common_options
def priority(session: Session, priority: int, named: Sequence[Which]) -> None:
    """Change the priority of what waits.

    gangq priority 10 12 g3: -1000 to 1000, higher first. Nothing that runs is stopped.
    """
    ids = ids_of(session.client(), named)
    _changed(session, session.client().set_priority(priority=priority, **ids) if any(ids.values()) else [])


def _changed(session: Session, changes: Sequence[StateChange]) -> None:
    session.rows(changes, _CHANGES, "nothing changed")
