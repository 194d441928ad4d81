"""The command line: a thin shell over the library.

Standard output is the answer, standard error the commentary. With `--json` every line of standard output is
one JSON object: one for a command that answers one thing, one per row or event for a command that lists or
follows. Keys are the columns of the views, so they are as stable as those. A gang is written `g12`, a job
`12`; in JSON `gang_id` is the number, as in psql.

Exit codes: 0 done; 1 refused or failed; 2 bad input or not found; 3 the database cannot be reached, or its
schema does not fit; 130 interrupted. `gangq run` exits with the status of what it ran, `gangq wait` with
that of what it waited for or 124 when the time is up, `gangq worker` with
the code of the worker (`gangq.watchdogs.codes`), `gangq checkpoint load` with 4 when there is none.
GANGQ_DEBUG=1 shows tracebacks, NO_COLOR turns colours off.
"""

from __future__ import annotations

import click

from gangq.cli.group import LazyGroup
from gangq.cli.session import Session, common_options

SECTIONS = {
    "Jobs": {
        "submit": "work",
        "run": "run",
        "ls": "look",
        "show": "look",
        "logs": "follow",
        "events": "follow",
        "explain": "look",
        "wait": "wait",
        "cancel": "work",
        "retry": "work",
        "priority": "work",
    },
    "Gangs": {
        "plan": "plan",
        "replay": "plan",
        "board": "plan",
        "decide": "plan",
        "drains": "look",
    },
    "Queues": {
        "schedule": "schedules",
        "service": "services",
        "queue": "queues",
        "limit": "queues",
        "task": "tasks",
    },
    "Fleet": {
        "top": "top",
        "worker": "worker",
        "workers": "fleet",
        "devices": "fleet",
        "trips": "trips",
        "quarantine": "operate",
        "unquarantine": "operate",
        "cordon": "operate",
        "uncordon": "operate",
        "drain-host": "operate",
        "undrain": "operate",
        "taint": "operate",
        "usage": "fleet",
        "web": "web",
        "notify": "notify",
        "metrics": "metrics",
        "tick": "ticker",
        "bounce": "bounce",
    },
    "Setup": {
        "migrate": "database",
        "db": "database",
        "systemd": "systemd",
        "doctor": "doctor",
        "completion": "completion",
        "bench": "bench",
        "demo": "operate",
    },
    "Inside a job": {
        "beat": "child",
        "checkpoint": "child",
        "gang": "child",
        "ready": "child",
        "load": "child",
        "snooze": "child",
    },
}
"""By section of the help: a command, and the module of this package that holds it; imported when it is called."""
COMMANDS = {name: module for section in SECTIONS.values() for name, module in section.items()}


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="gangq", prog_name="gangq")
@common_options
def main(session: Session) -> None:
    """Run a durable job queue for work that occupies GPUs, inside PostgreSQL.

    The database is --dsn, else GANGQ_DSN; --embedded is a private PostgreSQL on this machine.
    A DURATION is a number of seconds, or 90s, 15m, 1h30m, 2d.
    """
    click.get_current_context().call_on_close(session.close)


__all__ = ["COMMANDS", "main"]
