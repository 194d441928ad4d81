"""gangq worker: serve queues until told to stop, under a supervisor that sees it freeze."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gangq import context, logqueue, names, private
from gangq.cli import output
from gangq.cli.group import STDOUT_CLOSED, exit_code
from gangq.cli.operate import WORKER_VERBS
from gangq.cli.options import settings
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, common_options
from gangq.errors import GangqError, InvalidInput
from gangq.worker.options import WorkerOptions, default_name

if TYPE_CHECKING:
    from gangq.app import App

# What every log record has; the rest is what the caller said with extra=.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(logging.Formatter):
    """Log records as lines of text with key=value behind, or as JSON objects. They name the worker, and the job
    that a handler's line is of.
    """

    def __init__(self, as_json: bool, worker: str | None = None) -> None:
        super().__init__()
        self._as_json = as_json
        self._of_worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        """One record. A traceback follows as text, or is a key of the object."""
        extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        at = datetime.fromtimestamp(record.created, UTC)
        # Of a line that was queued (gangq.logqueue) only the text is left.
        trace = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else None)
        extra = {**self._of_worker, **({} if "job" in extra else _of_job()), **extra}
        if self._as_json:
            fields = {
                "at": at,
                "level": record.levelname,
                "logger": record.name,
                "message": record.getMessage(),
            }
            return output.to_json({**fields, **extra, **({"traceback": trace} if trace else {})})
        words = [
            f"{key}={json.dumps(value, default=str)}" for key, value in extra.items() if value is not None
        ]
        line = " ".join([at.astimezone().isoformat(" ", "milliseconds"), record.levelname, record.name])
        return " ".join([line, record.getMessage(), *words]) + (f"\n{trace}" if trace else "")


def _of_job() -> dict[str, Any]:
    """The job whose handler logs in this thread: lines of the library say theirs themselves."""
    if not context.runs_handler() or logqueue.is_own_thread():
        return {}
    return dict(context.current().log.extra or {})


class _OrVerb(click.Command):
    """A command that starts a worker, unless its first word is a verb about one: off, on, drain.

    A module of such a name is written off:app, or off.py:app.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the start, or of the verb."""
        verb = WORKER_VERBS.get(args[0]) if args else None
        if verb is None:
            return super().make_context(info_name, args, parent, **extra)
        return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@click.command(cls=_OrVerb)
@click.argument("app", required=False, metavar="[MODULE:APP]")
@settings(
    WorkerOptions,
    {
        "queues=--queue": "A queue to serve [default]; may be repeated.",
        "name": "Unique among live workers, the same over restarts [the host's name].",
        "host": "The host as others see it [this host's name].",
        "address": "Where members of a gang reach this host [the host].",
        "slots": "Placed jobs at once: members of gangs, and jobs that ask for GPUs, memory or CPUs, for a model, or "
        "wait in a queue with limits or a fair order [one for each GPU, at least 1]; 0: none.",
        "light": "Light jobs at once: all that are not placed; 0: none.",
        "prefetch": "Light jobs it may hold for its main thread; more than 1 only with --light 1.",
        "devices 2x24GiB": "Declare GPUs where no driver answers; none: offer none [detected].",
        "memory_mb": "Host memory to offer, MiB [all of it].",
        "cpus": "CPUs to offer [all this process may use].",
        "labels=--label K=V": "A label jobs may ask for; may be repeated.",
        "taints=--taint K[=V]": "Keeps off every job that does not tolerate it; may be repeated.",
        "connections": (
            click.IntRange(1, 2),
            "To the database: one for what the main thread runs, one for all else; or 1 for everything.",
        ),
        "lease_s=--lease-s": "Length of its lease [the installation's, 120 s].",
        "metrics [HOST:]PORT": "Where to serve /metrics about this worker, for a Prometheus; HOST is 127.0.0.1 by "
        "default [nowhere].",
        "drain_timeout_s": "When told to stop: how long running jobs may go on before they are told too [0].",
        "commands": "Whether it runs submitted commands [it does].",
        "once=--once": "End when nothing is left to claim.",
    },
)
@click.option(
    "--expect-gpus",
    type=click.IntRange(min=0),
    metavar="N",
    help="Do not start with fewer GPUs [as many as the last time]; GANGQ_EXPECT_GPUS says the same.",
)
@click.option(
    "--silence-s",
    type=Seconds(),
    help="Seconds without a sign of life after which it is killed, code 80 [30]; GANGQ_SILENCE_S says the same.",
)
@click.option(
    "--start-s",
    type=Seconds(),
    help="The same for the time before the first one, imports included [600]; GANGQ_START_S says the same.",
)
@click.option(
    "--supervisor/--no-supervisor",
    default=True,
    help="Whether a small process around it ends it when it freezes; without, a debugger can read the terminal "
    "[it does, on Linux].",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@common_options
def worker(
    session: Session,
    /,
    app: str | None,
    log_level: str,
    supervisor: bool,
    start_s: float | None,
    **options: Any,
) -> None:
    """Run a worker until told to stop; or turn one off, on, or drain it.

    gangq worker off NAME gives a worker nothing new, drain NAME also moves away what it runs, on NAME gives it
    work again; each has a --help of its own. Everything else starts a worker here.

    It runs the tasks of MODULE:APP (training:app, or jobs.py:app), and commands. Without MODULE:APP it runs
    commands only. Placed jobs and light jobs have slots of their own. With GPUs the main thread runs the placed job,
    without them the light one, as long as that lane has one slot; all other jobs run in child processes.

    SIGTERM or Ctrl-C: running jobs finish or are handed back, which counts a stop and no attempt; a second one
    skips the grace. It logs to standard error; with --json to standard output, one object per record:
    {"at", "level", "logger", "message", "worker", ...}, and of a job "job", "token", "gang", "epoch", "rank".
    """
    if sys.__stdout__ is None:
        raise GangqError(STDOUT_CLOSED)  # Its handlers print there.
    _into_environment(options)
    private.close()
    if supervisor and _is_process_of_its_own():
        _become_supervisor(session, start_s)
    _take_secrets(session)
    _start_logging(session.json, log_level, options)
    # Not at the top: no other command needs watchdogs and device libraries.
    from gangq.worker.main import run_worker
    from gangq.worker.shutdown import end_soon

    given = {name: value for name, value in options.items() if value not in (None, ())}
    given["labels"] = dict(options["labels"])
    if session.flag_dsn:
        # What its handlers submit goes to the same database; children of the worker never see it.
        os.environ["GANGQ_DSN"] = session.flag_dsn
    target = app if app is None or ":" in app else f"{app}:app"
    found = None if target is None else _find(target)
    dsn = _dsn(session, found)
    try:
        code = run_worker(found, dsn=dsn, target=target, **given)
    except GangqError as e:
        # Its name may have been taken while it was away, after many handlers.
        end_soon(exit_code(e))
        raise
    end_soon(code)
    click.get_current_context().exit(code)


def _start_logging(as_json: bool, level: str, options: Mapping[str, Any]) -> None:
    handler = logging.StreamHandler(sys.stdout if as_json else sys.stderr)
    if as_json and isinstance(sys.stdout, io.TextIOWrapper):
        # Before the first record: who changes it later waits for those that are being written.
        sys.stdout.reconfigure(line_buffering=True)
    name = options["name"] or default_name(options["host"] or names.host_name(), os.environ)
    handler.setFormatter(LogFormat(as_json, name))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for library in ("psycopg", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _into_environment(options: dict[str, Any]) -> None:
    """What a worker reads from its environment, also where nobody gave it a command line."""
    from gangq.worker.fitness import EXPECT_VARIABLE
    from gangq.worker.liveness import SILENCE_VARIABLE

    for name, variable in (("expect_gpus", EXPECT_VARIABLE), ("silence_s", SILENCE_VARIABLE)):
        given = options.pop(name)
        if given is not None:
            os.environ[variable] = str(given)


def _is_process_of_its_own() -> bool:
    """Whether this process is the command `gangq worker` and nothing else: not yet the child of a supervisor,
    and not a program that calls the command line as a function.
    """
    from gangq.proc.liveness_memory import VARIABLE

    called = Path(sys.argv[0])
    ours = called.name == "gangq" or called.parts[-2:] == ("gangq", "__main__.py")
    return sys.platform == "linux" and VARIABLE not in os.environ and ours and "worker" in sys.argv


def _become_supervisor(session: Session, start_s: float | None) -> None:
    """Turn this process into the supervisor, which runs this very command line again as its child.

    The process a service manager or a terminal has started so remains the one it talks to.
    """
    from gangq.proc import supervision, supervisor
    from gangq.worker.liveness import SILENCE_VARIABLE, START_VARIABLE, number_of

    limits = [
        ("--silence", number_of(os.environ, SILENCE_VARIABLE, supervision.SILENCE_S)),
        ("--start", start_s or number_of(os.environ, START_VARIABLE, supervision.START_S)),
    ]
    argv = [sys.executable, "-I", "-S", supervisor.__file__]
    argv += [word for name, value in limits for word in (name, str(value))]
    argv += ["--json"] if session.json else []
    private.given_dsn()
    environ = dict(os.environ)
    secrets = private.take_secrets(environ)
    command = [sys.executable, *sys.orig_argv[1:]]
    if session.flag_dsn is not None:
        secrets[_FLAG] = session.flag_dsn
        command = _without_dsn(command)
    argv += ["--secrets", str(private.hand_over(secrets))]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*argv, "--", *command], environ)


_FLAG = "--dsn"


def _without_dsn(argv: list[str]) -> list[str]:
    """The command line without --dsn, which every user of this host can read as long as the worker runs."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == _FLAG:
            next(words, None)
        elif not word.startswith(f"{_FLAG}="):
            kept.append(word)
    return kept


def _take_secrets(session: Session) -> None:
    """What the supervisor has for this process. It is not in the environment that others see, and handlers in this
    process find it where they look for it.
    """
    from gangq.worker.liveness import handed_secrets

    secrets = handed_secrets()
    session.flag_dsn = secrets.pop(_FLAG, session.flag_dsn)
    os.environ.update(secrets)


def _find(target: str) -> App:
    from gangq.app import App
    from gangq.worker.child_main import find_app

    # As `python -m` would: an installed script has its own directory there instead.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = find_app(target)
    except GangqError as e:
        raise InvalidInput(str(e)) from e
    if not isinstance(found, App):
        raise InvalidInput(
            f"{target} is {type(found).__qualname__}, not a gangq.App: name the variable that is one"
        )
    return found


def _dsn(session: Session, app: App | None) -> str:
    """--dsn, else what the App names, else GANGQ_DSN; the schema of the private server is made."""
    if session.flag_dsn is None and app is not None:
        session.flag_dsn = app.given_dsn
    address = session.dsn()
    if session.private:
        session.client()
        session.close()
    return address
